"""The netstack service with workers in threads of the test, whose planes only note what they
are told. What listens is the test's, as a shim's: a worker that ends is followed by another."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.handover import HandoverServer
from agent_box.engine.contract import Dial
from agent_box.netstack.adapter import Netstack
from agent_box.netstack.contract import (
    Applied,
    Apply,
    Capture,
    CaptureEnd,
    Counters,
    Forward,
    ForwardAdd,
    ForwardRemove,
    Instance,
    InstanceUp,
    Policy,
)
from agent_box.netstack.reports import Denied
from agent_box.netstack.worker import Worker
from agent_box.process.log import Log
from agent_box.process.tasks import TaskSet

ID = "a" * 32
OTHER = "b" * 32
WAIT_S = 20.0  # a bound on a hang


def policy(generation: int = 1) -> Policy:
    return Policy(generation=generation, mode="allowlist", allow_open=False, rules=[], endpoints=[])


class FakePlane:
    """Notes what it is told; `linked` until the stream of its guest ends."""

    def __init__(self, told: Policy, report: Callable[[Any], None]) -> None:
        self.policy = told
        self.report = report
        self.revokes = 0
        self.guest: socket.socket | None = None
        self.listeners: list[tuple[socket.socket, int]] = []
        self.sink: Callable[[bytes, float], bool] | None = None
        self.closed = False
        self._bell, self._ring = os.pipe()
        os.set_blocking(self._bell, False)

    @property
    def linked(self) -> bool:
        return self.guest is not None

    def fileno(self) -> int:
        return self._bell

    def run(self) -> float | None:
        try:
            os.read(self._bell, 100)
        except BlockingIOError:
            pass  # it was called for another reason
        if self.guest is not None:
            try:
                if not self.guest.recv(1000):
                    self.link(None)
            except BlockingIOError:
                pass  # nothing was sent
        return 0.02

    def link(self, sock: socket.socket | None) -> None:
        if self.guest is not None:
            self.guest.close()
        self.guest = sock

    def apply(self, told: Policy) -> int:
        self.policy = told
        return self.revokes

    def counters(self) -> Counters:
        return Counters(
            generation=self.policy.generation, flows=1, flows_total=2, denied=3, bytes_up=4,
            bytes_down=5, dropped_frames=6,
        )  # fmt: skip

    def forward_add(self, listener: socket.socket, guest_port: int) -> None:
        self.listeners.append((listener, guest_port))

    def forward_remove(self, host_port: int) -> None:
        for pair in list(self.listeners):
            if pair[0].getsockname()[1] == host_port:
                pair[0].close()
                self.listeners.remove(pair)

    def capture(self, sink: Callable[[bytes, float], bool] | None, snap: int) -> None:
        self.sink = sink

    def close(self) -> None:
        self.link(None)
        for listener, _ in self.listeners:
            listener.close()
        os.close(self._bell)
        os.close(self._ring)
        self.closed = True


class WorkerThread:
    """One worker after the other on one listener."""

    def __init__(self, room: Path, instance: str = ID) -> None:
        self.planes: list[FakePlane] = []
        self._instance = instance
        room.mkdir(parents=True, exist_ok=True)
        self._path = str(room / "ctl")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._path)
        self._listener.listen(8)
        self._restarts = 0
        self._todo: list[Callable[[], None]] = []
        self.begin()

    @property
    def plane(self) -> FakePlane:
        return self.planes[-1]

    def begin(self) -> None:
        self._end = False
        self._worker = Worker(
            self._instance, self._listener.dup(), self._make, restarts=self._restarts
        )
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def _make(self, told: Policy, report: Callable[[Any], None]) -> FakePlane:
        self.planes.append(FakePlane(told, report))
        return self.planes[-1]

    def _live(self) -> None:
        while not self._end:
            self._worker.turn(0.02)
            while self._todo:
                self._todo[0]()
                del self._todo[0]

    def do(self, work: Callable[[], None]) -> None:
        """In the worker's thread."""
        self._todo.append(work)
        until = time.monotonic() + WAIT_S
        while self._todo:
            assert time.monotonic() < until
            time.sleep(0.005)  # nothing tells when another thread has done it

    def deny(self, rule: str, count: int = 1) -> None:
        self.do(lambda: self.plane.report(Denied(rule, "w", "x.y", None, 443, "tcp", count)))

    def kill(self) -> None:
        """As SIGKILL would: nothing is said, and every descriptor is closed."""
        self._end = True
        self._thread.join(WAIT_S)
        self._worker._drop()
        self._worker._end()
        self._worker._poll.close()
        self._worker._listener.close()
        self._restarts += 1

    def close(self) -> None:
        if not self._end:
            self.kill()
        self._listener.close()


class NetScene:
    """A service; `guest` says whether the engine gives streams to the guest."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.guest = True
        self.guests: list[socket.socket] = []
        self.dialled: list[tuple[str, int, int]] = []
        self.notes: list[tuple[str | None, str, dict[str, Any]]] = []
        self.journal: dict[bytes, str] = {}
        self.registry_away = False
        self.failed: list[str] = []
        self.tasks = TaskSet(Log(service="test"), lambda name, _: self.failed.append(name))
        (root / "dial" / "netstack").mkdir(parents=True, exist_ok=True)
        self.rooms = root / "vm" / "worker"
        self.rooms.mkdir(parents=True, exist_ok=True)
        path = root / "dial" / "netstack" / "sock"
        self.server = HandoverServer(path, Dial, self._dial, self.tasks.hold)
        self.net = self.made()

    def worker(self, instance: str = ID) -> WorkerThread:
        return WorkerThread(self.rooms / instance, instance)

    def made(self) -> Netstack:
        context: Any = SimpleNamespace(
            paths=SimpleNamespace(runtime=self.root),
            tasks=self.tasks,
            epoch=os.urandom(16),
            log=Log(service="test"),
            client=lambda _: SimpleNamespace(call=self._noted),
        )
        return Netstack(context)

    async def restart(self) -> None:
        """Another service in the place of this one."""
        await self.net.stop()
        self.net = self.made()
        await self.net.start()

    async def _noted(self, method: str, note: Any, *, deadline_s: float) -> None:
        assert method == "note" and deadline_s > 0
        if self.registry_away:
            raise Refusal(Reason.UNAVAILABLE, "away")
        if note.event_id not in self.journal:
            self.notes.append((note.instance, note.kind, note.facts))
        self.journal[note.event_id] = note.kind

    async def _dial(self, request: Dial) -> int:
        self.dialled.append((request.instance, request.boot, request.port))
        if not self.guest:
            raise Refusal(Reason.UNAVAILABLE, "nobody", facts={"dial": "refused"})
        ours, theirs = socket.socketpair()
        self.guests.append(theirs)
        return ours.detach()

    async def __aenter__(self) -> NetScene:
        self.server.start()
        await self.net.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.net.stop()
        await self.tasks.cancel()
        self.server.close()
        for guest in self.guests:
            guest.close()
        assert self.failed == []

    async def up(self, instance: str = ID, boot: int = 1, told: Policy | None = None) -> Applied:
        request = InstanceUp(instance=instance, name="work", boot=boot, policy=told or policy())
        return await self.net.instance_up(request, call())

    async def apply(self, told: Policy, seconds: float = WAIT_S) -> Applied:
        return await self.net.apply(Apply(instance=ID, policy=told), call(seconds))

    async def down(self) -> None:
        await self.net.instance_down(Instance(instance=ID), call())

    async def counters(self) -> Counters:
        return await self.net.counters(Instance(instance=ID), call())

    async def forward(
        self, host_port: int, guest_port: int, address: str = "127.0.0.1", instance: str = ID
    ) -> Forward:
        wanted = Forward(address=address, host_port=host_port, guest_port=guest_port, public=False)
        return await self.net.forward_add(ForwardAdd(instance=instance, forward=wanted), call())

    async def unforward(self, host_port: int) -> None:
        await self.net.forward_remove(ForwardRemove(instance=ID, host_port=host_port), call())

    async def capture(self, send: Any, count: int | None, snap: int = 65535) -> CaptureEnd:
        io: Any = SimpleNamespace(send=send)
        return await self.net.capture(
            Capture(instance=ID, snap_bytes=snap, count=count), call(), io
        )

    def noted(self, kind: str) -> list[dict[str, Any]]:
        return [facts for _, found, facts in self.notes if found == kind]


def call(seconds: float = WAIT_S) -> Any:
    until = time.monotonic() + seconds
    return SimpleNamespace(remaining_s=lambda: max(0.0, until - time.monotonic()))


async def soon(what: str, look: Callable[[], object], seconds: float = WAIT_S) -> None:
    """Nothing tells when another thread or task has done it."""
    until = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < until, what
        await asyncio.sleep(0.01)
