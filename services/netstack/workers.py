"""The service's end of one instance's worker: connected, told what it should know, and
connected again. A connection is a means, not a state: whatever must outlive it lies with the
worker, and a worker that was started anew is told everything again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.handover import HandoverClient, Hold
from agent_box.engine.contract import Dial
from agent_box.netstack import control, rights
from agent_box.netstack.contract import Applied, Counters, Forward, Policy

ROOMS: Final = ("vm", "worker")  # below the runtime directory
SOCKET: Final = "ctl"
GUEST_PORT: Final = 5003  # of the pump in the guest (guest/network.py)
ANSWER_S: Final = 5.0  # of a worker, which waits for nobody
AGAIN_S: Final = (0.05, 0.1, 0.2, 0.5)  # nothing tells when another process binds a path
DIAL_S: Final = 10.0
STEADY_S: Final = 2.0  # a link that lived this long is dialled anew at once
_CHUNK: Final = 65536


Make = Callable[
    [int],
    control.Up | control.Down | control.Apply | control.Link | control.Count
    | control.Listen | control.Unlisten | control.Capture,
]  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """What the registry said last."""

    boot: int
    name: str
    policy: Policy


class Told(Protocol):
    """Who hears what a worker has to say."""

    async def noted(
        self, instance: str, kind: str, facts: dict[str, control.Fact], id: bytes
    ) -> None:
        """Returns when it is in the journal, or never will be."""

    async def bind(self, forward: Forward) -> list[socket.socket]:
        """The listeners of a forward, again."""


class Held:
    """One instance.

    Args:
        room: the directory in which its worker listens.
        dials: the engine's socket for this service.
        hold: starts tasks and keeps them.
    """

    def __init__(
        self, instance: str, room: Path, dials: HandoverClient, told: Told, hold: Hold
    ) -> None:
        self.instance = instance
        self.wanted: Wanted | None = None
        self.forwards: list[Forward] = []
        self.hello: control.Hello | None = None  # of the connection that stands
        self._room = room
        self._dials = dials
        self._told = told
        self._hold = hold
        self._sock: socket.socket | None = None
        self._sending = asyncio.Lock()
        self._n = 0
        self._asked: dict[int, asyncio.Future[control.Done]] = {}
        self._settled = asyncio.Event()
        self._poke = asyncio.Event()
        self.over = False  # it is of no use any more
        self._parts: list[asyncio.Task[None]] = []
        self._linking: asyncio.Task[None] | None = None
        self._linked_s = float("-inf")  # when the last stream was handed over
        self._notices: asyncio.Queue[control.Notice] = asyncio.Queue()

    # ------------------------------------------------------------------ what is asked

    async def up(self, wanted: Wanted, seconds: float) -> Applied:
        """Raises:
        Refusal: UNAVAILABLE, no worker is there in time; BAD_REQUEST, it refuses the policy.
        """
        if self.wanted is None or self.wanted.boot != wanted.boot:
            self.forwards = []
        self.wanted = wanted
        done = await self._asked_until(
            seconds,
            lambda n: control.Up(n=n, boot=wanted.boot, name=wanted.name, policy=wanted.policy),
        )
        assert done.applied is not None
        hello = self.hello
        if hello is not None and hello.boot != wanted.boot:
            self.hello = msgspec.structs.replace(hello, boot=wanted.boot, linked=False)
        self._relink()
        return done.applied

    async def apply(self, policy: Policy, seconds: float) -> Applied:
        """Raises:
        Refusal: as `up`.
        """
        done = await self._asked_until(seconds, lambda n: control.Apply(n=n, policy=policy))
        if self.wanted is not None:
            self.wanted = Wanted(self.wanted.boot, self.wanted.name, policy)
        assert done.applied is not None
        return done.applied

    async def down(self) -> None:
        """Nothing passes any more. A worker that is gone already has nothing to end."""
        self.wanted = None
        self.forwards = []
        if self.hello is not None:
            try:
                await self.ask(lambda n: control.Down(n=n))
                if self.hello is not None:
                    self.hello = msgspec.structs.replace(self.hello, boot=None, linked=False)
            except Refusal as refusal:
                if refusal.reason is not Reason.UNAVAILABLE:
                    raise

    async def counters(self, seconds: float) -> Counters:
        done = await self._asked_until(seconds, lambda n: control.Count(n=n))
        assert done.counters is not None
        return done.counters

    async def listen(self, forward: Forward, listeners: list[socket.socket]) -> None:
        """Hands over listeners, which are closed here in any case."""
        try:
            for listener in listeners:
                await self.ask(lambda n: control.Listen(n=n, forward=forward), fd=listener.fileno())
        finally:
            for listener in listeners:
                listener.close()
        self.forwards.append(forward)

    async def unlisten(self, host_port: int) -> None:
        await self._asked_until(ANSWER_S, lambda n: control.Unlisten(n=n, host_port=host_port))
        self.forwards = [each for each in self.forwards if each.host_port != host_port]

    async def capture(self, snap: int) -> socket.socket:
        """Where the packets come from, one each, headed by `worker.RECORD`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            await self.ask(lambda n: control.Capture(n=n, snap=snap), fd=theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    async def connected(self, seconds: float) -> None:
        """Raises:
        Refusal: UNAVAILABLE, there is no worker, or it does not answer.
        """
        self._poke.set()
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._settled.wait()
        except TimeoutError:
            raise Refusal(
                Reason.UNAVAILABLE, "the network worker of the machine does not answer"
            ) from None

    async def _asked_until(self, seconds: float, make: Make) -> control.Done:
        """What may be asked twice is, when its connection is lost.

        Raises:
            Refusal: as `connected` and `ask`.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            await self.connected(until - loop.time())
            try:
                return await self.ask(make)
            except Refusal as refusal:
                if refusal.reason is not Reason.UNAVAILABLE or loop.time() >= until:
                    raise

    async def ask(self, make: Make, fd: int | None = None) -> control.Done:
        """Raises:
        Refusal: UNAVAILABLE, the connection is gone; WRONG_STATE, the worker's own words.
        """
        self._n += 1
        n = self._n
        answer: asyncio.Future[control.Done] = asyncio.get_running_loop().create_future()
        self._asked[n] = answer
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._send(control.frame(make(n)), fd)
                return await answer
        except (TimeoutError, OSError):
            self._drop()
            raise Refusal(Reason.UNAVAILABLE, "the network worker does not answer") from None
        finally:
            del self._asked[n]
            answer.cancel()

    # ------------------------------------------------------------------ the connection

    async def run(self) -> None:
        """Until `close`, or until nothing is there and nothing is wanted."""
        try:
            await self._keep_on()
        finally:
            self.over = True

    async def _keep_on(self) -> None:
        tries = 0
        while self._goes_on() and self._room.is_dir():
            absent = False
            try:
                await self._converse()
            except (FileNotFoundError, ConnectionRefusedError):
                absent = True
                tries += 1
            except (OSError, TimeoutError, control.ControlError):
                tries = 0 if self._settled.is_set() else tries + 1
            finally:
                self._forget()
            if not self._goes_on() or (absent and self.wanted is None):
                return  # its machine does not run, and nobody says that it should
            self._poke.clear()
            try:
                async with asyncio.timeout(AGAIN_S[min(tries, len(AGAIN_S) - 1)]):
                    await self._poke.wait()
            except TimeoutError:
                continue

    def _goes_on(self) -> bool:
        return not self.over

    def close(self) -> None:
        self.over = True
        self._poke.set()
        self._drop()

    def _drop(self) -> None:
        self._settled.clear()
        if self._sock is not None:
            try:
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes the reader, who closes it
            except OSError:
                pass  # it is over already, with the same effect

    def _forget(self) -> None:
        self.hello = None
        self._settled.clear()
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        for part in self._parts:
            part.cancel()
        self._parts.clear()
        self._linking = None
        for answer in self._asked.values():
            if not answer.done():
                gone = Refusal(Reason.UNAVAILABLE, "the network worker has ended")
                answer.set_exception(gone)

    async def _converse(self) -> None:
        """One connection. Raises OSError, ControlError: it is over."""
        loop = asyncio.get_running_loop()
        self._sock = sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        async with asyncio.timeout(ANSWER_S):
            await loop.sock_connect(sock, str(self._room / SOCKET))
        reader = control.Reader(worker=False)
        while True:
            if self.hello is None:
                async with asyncio.timeout(ANSWER_S):
                    untrusted = await loop.sock_recv(sock, _CHUNK)
            else:
                untrusted = await loop.sock_recv(sock, _CHUNK)
            if not untrusted:
                raise ConnectionError("the worker ended")
            for message in reader.feed(untrusted):
                self._take(message)

    def _take(self, message: Any) -> None:
        if isinstance(message, control.Hello):
            if self.hello is not None or message.version != control.VERSION:
                raise control.ControlError("another version of the worker runs")
            if message.instance != self.instance:
                raise control.ControlError("the worker of another instance")
            self.hello = message
            self._notices = asyncio.Queue()
            self._keep(self._settle(message), "settle")
            self._keep(self._journal(message, self._notices), "journal")
        elif self.hello is None:
            raise control.ControlError("the first frame is no hello")
        elif isinstance(message, control.Done | control.Refused):
            answer = self._asked.get(message.n)
            if answer is None or answer.done():
                return
            if isinstance(message, control.Done):
                answer.set_result(message)
            else:
                answer.set_exception(Refusal(Reason.WRONG_STATE, message.why))
        elif isinstance(message, control.Notice):
            self._notices.put_nowait(message)
        elif isinstance(message, control.Unlinked):
            self.hello = msgspec.structs.replace(self.hello, linked=False)
            self._relink()

    def _keep(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Until it or the connection ends."""
        self._parts[:] = [part for part in self._parts if not part.done()]
        self._parts.append(self._hold(work, name=name))

    async def _settle(self, hello: control.Hello) -> None:
        """Tells a worker that does not know it what it should know."""
        try:
            if hello.boot is None and self.wanted is not None:
                wanted = self.wanted
                await self.ask(
                    lambda n: control.Up(
                        n=n, boot=wanted.boot, name=wanted.name, policy=wanted.policy
                    )
                )
                if self.hello is not None:
                    self.hello = msgspec.structs.replace(self.hello, boot=wanted.boot)
                lost, self.forwards = self.forwards, []
                for forward in lost:
                    if self.wanted is not wanted:
                        break  # another boot, or none: forwards end with theirs
                    await self.listen(forward, await self._told.bind(forward))
            elif hello.boot is not None:
                if self.wanted is None and hello.policy is not None:
                    self.wanted = Wanted(hello.boot, hello.name or "", hello.policy)
                self.forwards = _once(hello.forwards)
        except Refusal as refusal:
            if refusal.reason is Reason.UNAVAILABLE:
                return  # the connection is over, and another one begins anew
        self._settled.set()
        if not hello.linked:
            self._relink()

    async def _journal(self, hello: control.Hello, notices: asyncio.Queue[control.Notice]) -> None:
        """In order, since an acknowledgement is for all before it. The id of an event is made
        of what it is, so that the journal has it once."""
        if hello.restarts:
            facts: dict[str, control.Fact] = {"restarts": hello.restarts}
            id = hashlib.sha256(b"worker-started" + hello.epoch).digest()[:16]
            await self._told.noted(self.instance, "worker-started", facts, id)
        while True:
            notice = await notices.get()
            id = hashlib.sha256(hello.epoch + notice.seq.to_bytes(8, "little")).digest()[:16]
            await self._told.noted(self.instance, notice.kind, notice.facts, id)
            await self._send_quietly(control.Ack(seq=notice.seq))

    async def _send_quietly(self, message: control.Ack) -> None:
        try:
            await self._send(control.frame(message), None)
        except OSError:
            pass  # it is told again on the next connection, and acknowledged there

    async def _send(self, data: bytes, fd: int | None) -> None:
        """Raises OSError: the connection is over."""
        async with self._sending:
            if self._sock is None:
                raise ConnectionError("there is no connection")
            view = memoryview(data)
            while view:
                try:
                    count = rights.send(self._sock, view, fd)
                except BlockingIOError:
                    await _writable(self._sock)
                    continue
                view, fd = view[count:], None

    # ------------------------------------------------------------------ the guest's stream

    def _relink(self) -> None:
        """Sees to it that the worker has a stream to its guest."""
        if self._linking is None or self._linking.done():
            self._linking = self._hold(self._link(), name="link")
            self._parts.append(self._linking)

    def _wants_link(self) -> bool:
        return self.hello is not None and not self.hello.linked

    async def _link(self) -> None:
        loop = asyncio.get_running_loop()
        tries = 0
        if loop.time() - self._linked_s < STEADY_S:
            await asyncio.sleep(AGAIN_S[-1])  # a guest that ends its streams at once
        while self.wanted is not None and self._wants_link():
            request = Dial(
                instance=self.instance,
                boot=self.wanted.boot,
                port=GUEST_PORT,
                deadline_ms=int(DIAL_S * 1000),
            )
            try:
                fd = await self._dials.ask(request, deadline_s=DIAL_S + 1)
                try:
                    await self.ask(lambda n: control.Link(n=n), fd=fd)
                finally:
                    os.close(fd)
                self._linked_s = loop.time()
                if self.hello is not None:
                    self.hello = msgspec.structs.replace(self.hello, linked=True)
            except Refusal:
                pass  # it still boots, or is ending, or the engine starts again
            if not self._wants_link():
                return
            await asyncio.sleep(AGAIN_S[min(tries, len(AGAIN_S) - 1)])
            tries += 1


def _once(forwards: list[Forward]) -> list[Forward]:
    """A forward has a listener for each of its addresses, and is one."""
    return list({forward.host_port: forward for forward in forwards}.values())


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(sock, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_writer(sock)
