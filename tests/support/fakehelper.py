"""A helper that does nothing, in the loop of a test: it holds states, and makes streams that
lead to the test. The real one's socket, proof and frames.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_box.helper import link, proof, wire
from agent_box.helper.wire import Refused


def state(instance: str, word: str, launch: str | None = None, **more: Any) -> dict[str, Any]:
    running = word == "running"
    return {
        "id": instance, "state": word, "launch_id": launch, "disk_bytes": 1 << 30,
        "vmm": {"pid": 77, "start": 5} if running else None, "shim": running, "device": running,
        "worker": False, "restarts": 0, "exit": None, "error": None, **more,
    }  # fmt: skip


ENDED = {"code": 0, "signal": None, "by": "guest", "at_ms": 0}


class FakeHelper:
    """Attributes:
    states: by instance.
    asked: names of the operations, in order.
    monitors: what serves a monitor, by instance; None: nobody ever answers.
    silent: operations that are not answered.
    """

    def __init__(self, root: Path) -> None:
        self.sock = root / "helper.sock"
        self.key_file = root / "helper.key"
        self._key = secrets.token_bytes(32)
        self.key_file.write_text(self._key.hex() + "\n")
        self.states: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.silent: set[str] = set()
        self.refuses: dict[str, Refused] = {}
        self.drop: set[str] = set()  # operations that end the connection, once each
        self.status: dict[str, str] = {}
        self.full = False  # the host's disk: who goes on is stopped by it again
        self.monitors_open: dict[str, int] = {}
        self.monitors_most = 0
        self.on_dial: Callable[[socket.socket], None] = lambda sock: sock.close()
        self._watchers: dict[str, list[int]] = {}
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ its life

    def start(self) -> None:
        self.sock.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(str(self.sock))
        self._listener.listen()
        self._spawn(self._accept(self._listener))

    async def stop(self) -> None:
        """As a kill: every connection ends."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._listener is not None:
            self._listener.close()
        self.sock.unlink(missing_ok=True)
        for pipes in self._watchers.values():
            link.close(pipes)
        self._watchers = {}

    def change(self, instance: str, word: str, **more: Any) -> None:
        """A state changes, and whoever watches is woken."""
        before = self.states[instance]
        self.states[instance] = state(instance, word, before["launch_id"], **more)
        for pipe in list(self._watchers.get(instance, [])):
            try:
                os.write(pipe, b".")
            except BrokenPipeError:
                self._watchers[instance].remove(pipe)
                os.close(pipe)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            sock.setblocking(False)
            self._spawn(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            side = proof.HelperSide(self._key, secrets.token_bytes(32))
            link.send(sock, side.hello())
            link.send(sock, side.welcome(await loop.sock_recv(sock, 4096)))
            while data := await loop.sock_recv(sock, 65536):
                number, asked = wire.read_request(data)
                assert isinstance(asked, wire.Request)
                name = asked.op.name
                self.asked.append(name)
                if name in self.drop:
                    self.drop.discard(name)
                    return
                if name in self.silent:
                    continue
                try:
                    if name in self.refuses:
                        raise self.refuses[name]
                    reply, fds = getattr(self, f"_{name}")(asked.args)
                    link.send(sock, wire.reply(number, asked.op, reply), fds)
                    link.close(fds)
                except Refused as refused:
                    link.send(sock, wire.refusal(number, refused.code, refused.detail))
        except (OSError, wire.WireError):
            pass
        finally:
            sock.close()

    # ------------------------------------------------------------------ operations

    def _list(self, args: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        after = args["after"] or ""
        found = [self.states[name] for name in sorted(self.states) if name > after]
        return {"instances": found[:64], "more": len(found) > 64}, []

    def _allocate(self, args: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        made = self.states.setdefault(args["id"], state(args["id"], "allocated"))
        return made, []

    def _launch(self, args: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        before = self.states[args["id"]]
        if before["launch_id"] != args["launch_id"]:
            self.states[args["id"]] = state(args["id"], "running", args["launch_id"])
        return self.states[args["id"]], []

    def _kill(self, args: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        self._boot(args)
        ended = {"code": None, "signal": 9, "by": "kill", "at_ms": 1}
        self.change(args["id"], "exited", exit=ended)
        return self.states[args["id"]], []

    def _release(self, args: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        if self.states.pop(args["id"], None) is None:
            raise Refused("not_found", args["id"])
        return {}, []

    def _watch(self, args: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        self._boot(args)
        reader, writer = os.pipe()
        self._watchers.setdefault(args["id"], []).append(writer)
        return self.states[args["id"]], [reader]

    def _dial(self, args: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        self._boot(args)
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self.on_dial(theirs)
        return {}, [ours.detach()]

    def _monitor(self, args: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        self._boot(args)
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._spawn(self._qmp(args["id"], theirs))
        return {}, [ours.detach()]

    def _boot(self, args: dict[str, Any]) -> None:
        found = self.states.get(args["id"])
        if found is None:
            raise Refused("not_found", args["id"])
        if found["launch_id"] != args["launch_id"]:
            raise Refused("conflict", "another launch")
        if found["state"] != "running":
            raise Refused("precondition", f"the launch is {found['state']}")

    async def _qmp(self, instance: str, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.monitors_open[instance] = self.monitors_open.get(instance, 0) + 1
        self.monitors_most = max(self.monitors_most, self.monitors_open[instance])
        try:
            status = self.status.setdefault(instance, "running")
            if status == "silent":
                await loop.sock_recv(sock, 1)
                return
            await loop.sock_sendall(sock, b'{"QMP": {"version": {}, "capabilities": []}}\r\n')
            while data := await loop.sock_recv(sock, 4096):
                asked = json.loads(data)
                result: dict[str, Any] = {}
                if asked["execute"] in ("stop", "cont"):
                    goes_on = "io-error" if self.full else "running"
                    self.status[instance] = "paused" if asked["execute"] == "stop" else goes_on
                elif asked["execute"] == "query-status":
                    result = {"status": self.status[instance]}
                answer = {"return": result} | ({"id": asked["id"]} if "id" in asked else {})
                await loop.sock_sendall(sock, json.dumps(answer).encode() + b"\n")
        except OSError:
            pass
        finally:
            self.monitors_open[instance] -= 1
            sock.close()
