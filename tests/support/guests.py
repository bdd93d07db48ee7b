"""Guests made by a test: an engine's dial socket whose streams lead to them."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.handover import HandoverServer
from agent_box.channel.adapter import Channel
from agent_box.channel.contract import Guest as GuestName
from agent_box.channel.contract import Hook, Provision
from agent_box.channel.keeper import Clocks
from agent_box.engine.contract import Dial
from agent_box.guest.claims import EVENTS_PORT
from agent_box.guest.control import Session
from agent_box.process.log import Log
from agent_box.process.tasks import TaskSet

Serve = Callable[[socket.socket], Awaitable[None]]
ID = "a" * 32
OTHER = "b" * 32


class FakeClocks:
    """Clocks that a test turns; what it does not turn goes on."""

    def __init__(self) -> None:
        self.wall_off = 0

    def clocks(self) -> Clocks:
        return Clocks(wall=lambda: time.time_ns() + self.wall_off)


class Good:
    """A guest as it should be, with a clock of its own."""

    def __init__(self, clocks: FakeClocks | None = None, **hello: Any) -> None:
        self.hello = {
            "guest": "1.2",
            "boot_id": "x",
            "boot": None,
            "disk": {"state": "ok", "bytes": 1, "text": ""},
            "streams": [],
        } | hello
        self.ops: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.off_ns = 0
        self.set_at: list[float] = []
        self.streams = 0
        self.ends_after: int | None = None  # requests, then the stream is lost
        self.refuses: str | None = None
        self.hook: dict[str, Any] = {"state": "none", "line": ""}
        self.frozen = asyncio.Event()
        self.frozen.set()

    async def __call__(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.streams += 1
        session = Session(self.hello)
        await self.frozen.wait()
        await loop.sock_sendall(sock, session.outgoing())
        done = 0
        while data := await loop.sock_recv(sock, 65536):
            await self.frozen.wait()
            for action in session.feed(data):
                if self.ends_after is not None and done >= self.ends_after:
                    self.ends_after = None
                    return
                done += 1
                self.ops.append(action.op)
                self.asked.append(action.fields)
                if action.op in ("time", "provision"):
                    self.off_ns = action.fields["time_ns"] - time.time_ns()
                    self.set_at.append(time.monotonic())
                if self.refuses is not None:
                    session.refuse(self.refuses)
                elif action.op == "hook":
                    session.reply(self.hook)
                else:
                    session.reply({"now_ns": time.time_ns() + self.off_ns})
            await loop.sock_sendall(sock, session.outgoing())


class Scene:
    """A channel whose guests are functions.

    Attributes:
        guests: by instance; a Refusal is what the engine says of a machine.
        notes: kind and facts of what was noted.
    """

    def __init__(self, root: Path, clocks: FakeClocks) -> None:
        self.clocks = clocks
        self.guests: dict[str, Serve | Refusal] = {}
        self.tellers: dict[str, Serve | Refusal] = {}  # those of their events
        self.dialled: list[str] = []
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.failed: list[str] = []
        self.root = root
        self.bus = SimpleNamespace(drain_asked=asyncio.Event())
        self.tasks = TaskSet(Log(service="test"), lambda name, _: self.failed.append(name))
        (root / "data").mkdir(exist_ok=True)
        (root / "dial" / "channel").mkdir(parents=True, exist_ok=True)
        self.streams: list[asyncio.Task[None]] = []
        self.server = HandoverServer(
            root / "dial" / "channel" / "sock", Dial, self._dial, self.tasks.hold
        )
        self.channel = self.made()

    def made(self) -> Channel:
        context: Any = SimpleNamespace(
            data=self.root / "data",
            paths=SimpleNamespace(runtime=self.root),
            tasks=self.tasks,
            log=Log(service="test"),
            client=lambda _: SimpleNamespace(call=self._noted),
            problem=None,
            server=self.bus,
        )
        return Channel(context, self.clocks.clocks())

    async def _noted(self, method: str, note: Any, *, deadline_s: float) -> None:
        assert method == "note" and deadline_s > 0
        self.notes.append((note.kind, note.facts))

    async def _dial(self, request: Dial) -> int:
        if request.port == EVENTS_PORT:
            serve = self.tellers.get(request.instance)
        else:
            self.dialled.append(request.instance)
            serve = self.guests.get(request.instance)
        if serve is None:
            raise Refusal(Reason.UNAVAILABLE, "nobody", facts={"dial": "refused"})
        if isinstance(serve, Refusal):
            raise serve
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self.streams.append(self.tasks.hold(self._serve(serve, theirs), name="guest"))
        return ours.detach()

    async def _serve(self, serve: Serve, sock: socket.socket) -> None:
        try:
            await serve(sock)
        except OSError:
            pass  # the host ended it
        finally:
            sock.close()

    async def __aenter__(self) -> Scene:
        self.before = set(os.listdir("/proc/self/fd"))
        self.server.start()
        await self.channel.start()
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        await self.channel.stop()
        await self.tasks.cancel()
        self.server.close()
        if kind is None:
            assert self.failed == []
            assert set(os.listdir("/proc/self/fd")) - self.before == set()

    async def provision(
        self,
        instance: str = ID,
        boot: int = 1,
        *,
        seconds: float = 10,
        hook: Hook | None = None,
        timer: Literal["right", "any"] = "right",
    ) -> Any:
        request = Provision(
            instance=instance,
            boot=boot,
            hostname="work",
            environment=[],
            bindings=[],
            harness=None,
            hook=hook,
            sudo=False,
            timer=timer,
        )
        return await self.channel.provision(request, call(seconds))

    async def set_time(self, instance: str = ID, boot: int = 1, *, seconds: float = 10) -> Any:
        return await self.channel.set_time(GuestName(instance=instance, boot=boot), call(seconds))

    async def poweroff(self, instance: str = ID, boot: int = 1, *, seconds: float = 10) -> Any:
        return await self.channel.poweroff(GuestName(instance=instance, boot=boot), call(seconds))

    def noted(self, kind: str) -> list[dict[str, Any]]:
        return [facts for found, facts in self.notes if found == kind]


def call(seconds: float) -> Any:
    until = time.monotonic() + seconds
    return SimpleNamespace(remaining_s=lambda: max(0.0, until - time.monotonic()))
