"""The serving half: one ROUTER, the declared methods, and nothing that is not declared.

For each message: who (the role that the transport vouches for), what (the method table), may
it (the policy), in time (the deadline), and is it well formed. Then the handler. A handler
that is a plain function runs at once, inside the loop that reads, and costs no task; one that
is a coroutine becomes a task, and there may be only so many of those per caller and in all.

A handler answers with its reply or raises `Refusal`. Anything else is a defect: it is logged
here under an id, and the caller is told the id.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, cast

import zmq

from agent_box import __version__
from agent_box.bus import base, wire
from agent_box.bus.errors import Code, Reason, Refusal
from agent_box.bus.keys import KeyPair
from agent_box.bus.outcomes import BEGUN, DONE, REFUSED, Outcomes, Prior
from agent_box.bus.policy import Policy
from agent_box.bus.schema import BASE_METHODS, Contract, Empty, Kind, Method, Stream, Wire
from agent_box.bus.sockets import descriptor, readable, receive, receive_from, send
from agent_box.bus.zap import Gate

PENDING_PER_CALLER: Final = 128  # calls under way, streams included
PENDING_MAX: Final = 512
WINDOWS_PER_PEER: Final = 256  # sum of the windows of one connection's streams
BATCH: Final = 64  # messages read before other tasks get their turn
FLUSH_MS: Final = 250  # for the last replies when the process ends
_PROBES_S: Final = (0.0, 0.05, 0.5)  # after somebody left: who was it?
_WARN_S: Final = 10.0

_EMPTY: Final = wire.encode_body(Empty())


class Log(Protocol):
    """What the bus needs of a log. `process.log.Log` is one."""

    def warning(self, event: str, **fields: object) -> None: ...

    def error(self, event: str, *, error: BaseException | None = None, **fields: object) -> str:
        """Logs a defect and returns the id under which it stands there."""


class Call:
    """The circumstances of one call.

    Attributes:
        caller: the role of the other end, as the transport says.
        method: its name.
        deadline_ns: CLOCK_BOOTTIME; nobody waits for the answer after it.
        request_id: of a `Kind.ONCE` call, otherwise None.
    """

    __slots__ = ("_outcomes", "caller", "committed", "deadline_ns", "method", "request_id")

    def __init__(
        self,
        caller: str,
        method: str,
        deadline_ns: int,
        request_id: bytes | None,
        outcomes: Outcomes | None,
    ) -> None:
        self.caller = caller
        self.method = method
        self.deadline_ns = deadline_ns
        self.request_id = request_id
        self.committed = False
        self._outcomes = outcomes

    def remaining_s(self) -> float:
        """Seconds until the deadline, not below 0."""
        return max(0.0, (self.deadline_ns - wire.now_ns()) / wire.NS)

    def begin(self) -> None:
        """Puts on record that it has begun, before an effect outside of the database."""
        self._record(BEGUN, b"")

    def commit(self, reply: Wire) -> None:
        """Puts the result on record; call it inside the transaction of the effect.

        For other kinds than ONCE it does nothing, so a handler may serve several.
        """
        self._record(DONE, wire.encode_body(reply))
        self.committed = True

    def _record(self, state: str, body: bytes) -> None:
        if self.request_id is not None and self._outcomes is not None:
            self._outcomes.record(self.caller, self.request_id, self.method, state, body)


class StreamIO(Protocol):
    """A stream as its handler sees it. When the other end goes away or cancels, the handler's
    task is cancelled: clean up in `finally`."""

    async def send(self, item: Wire) -> None:
        """Sends one item; waits for credit."""

    async def recv(self) -> Wire | None:
        """The next item; None after the caller's last."""


Handler = Callable[[Any, Call], Wire | Awaitable[Wire]]
StreamHandler = Callable[[Any, Call, StreamIO], Awaitable[Wire]]


class _Entry:
    """One row of the dispatch table."""

    __slots__ = ("callers", "handler", "limit_ns", "method", "name", "once", "read", "reply")

    def __init__(self, method: Method, handler: Handler, callers: frozenset[str]) -> None:
        self.name = method.name
        self.method = method
        self.handler = handler
        self.callers = callers
        self.reply = method.reply
        self.once = method.kind is Kind.ONCE
        self.read = method.kind is Kind.READ
        self.limit_ns = int(method.deadline_s * wire.NS)


class _StreamEntry:
    __slots__ = ("callers", "handler", "stream")

    def __init__(self, stream: Stream, handler: StreamHandler, callers: frozenset[str]) -> None:
        self.stream = stream
        self.handler = handler
        self.callers = callers


class _Work:
    """A call or a stream that is under way in a task."""

    __slots__ = ("call", "cancellable", "flow", "id", "inner", "others", "peer", "task", "timer")

    def __init__(self, peer: bytes, id: int, call: Call, cancellable: bool) -> None:
        self.peer = peer
        self.id = id
        self.call = call
        self.cancellable = cancellable
        self.task: asyncio.Task[None] | None = None
        self.inner: Coroutine[Any, Any, Wire] | None = None  # what the handler has returned
        self.timer: asyncio.TimerHandle | None = None
        self.flow: _Flow | None = None
        self.others: list[tuple[bytes, int]] = []  # who else waits for this very ONCE call


class _Flow:
    """The callee's end of a stream."""

    def __init__(self, server: Server, peer: bytes, id: int, stream: Stream, credit: int) -> None:
        self._server = server
        self._peer = peer
        self._id = id
        self.stream = stream
        self._credit = min(credit, stream.window)
        self._room = stream.window
        self._eaten = 0
        self._inbox: deque[Wire] = deque()
        self._ended = False
        self._change = asyncio.Event()

    async def send(self, item: Wire) -> None:
        if type(item) is not self.stream.down:
            raise TypeError(f"{self.stream.name} sends {self.stream.down.__name__}")
        body = wire.encode_body(item)
        while self._credit <= 0:
            self._change.clear()
            await self._change.wait()
        self._credit -= 1
        if not self._server._send(self._peer, wire.Item(version=1, id=self._id), body):
            self._server._gone(self._peer)
            await asyncio.sleep(0)  # where the cancellation that this caused arrives

    async def recv(self) -> Wire | None:
        while not self._inbox:
            if self._ended:
                return None
            self._change.clear()
            await self._change.wait()
        item = self._inbox.popleft()
        self._eaten += 1
        if self._eaten * 2 >= self.stream.window and not self._ended:
            self._room += self._eaten
            credit = wire.Credit(version=1, id=self._id, n=self._eaten)
            self._eaten = 0
            self._server._send(self._peer, credit)
        return item

    def credited(self, n: int) -> None:
        self._credit = min(self._credit + n, self.stream.window)
        self._change.set()

    def arrived(self, untrusted_body: bytes) -> None:
        """Raises WireError: not an item, or one without credit or after the end."""
        if self._ended or self._room <= 0:
            raise wire.WireError("an item without credit")
        self._room -= 1
        self._inbox.append(wire.decode_body(untrusted_body, self.stream.up))
        self._change.set()

    def ended(self) -> None:
        self._ended = True
        self._change.set()


class Server:
    """One service on the bus.

    Args:
        contract: its methods.
        sock: path of the socket; the directory exists. Whoever binds it first has taken a
            lock: a second bind steals the path.
        secret: the key pair of this service's role.
        public_keys: by role, of all who may connect.
        policy: who may call what; enforced here.
        epoch: 16 random bytes, new at each start of the process.
        handlers: one for each declared method and stream, and no other.
        outcomes: needed when the contract has a `Kind.ONCE` method.
        log: gets defects and what was dropped, never a body.
        confinement: what this process reads of its walls.

    Raises:
        ValueError: handlers and contract do not match, or `outcomes` is missing.

    Attributes:
        ready: set by `set_ready`; until then calls wait, only the base methods are answered.
        problem: one line for `hello`, or None.
        drain_asked: set when it drains: a caller with the right to it asked, or the process
            ends. Who lets callers wait for something answers them now.
    """

    def __init__(
        self,
        contract: Contract,
        *,
        sock: Path,
        secret: KeyPair,
        public_keys: Mapping[str, bytes],
        policy: Policy,
        epoch: bytes,
        handlers: Mapping[str, Handler | StreamHandler],
        outcomes: Outcomes | None,
        log: Log,
        confinement: Callable[[], base.Confinement] | None = None,
    ) -> None:
        if len(epoch) != wire.EPOCH_BYTES:
            raise ValueError(f"an epoch has {wire.EPOCH_BYTES} bytes")
        self.contract = contract
        self.service = contract.service
        self.epoch = epoch
        self.ready = False
        self.problem: str | None = None
        self.draining = False
        self.drain_asked = asyncio.Event()
        self.dropped = 0  # messages that were not of this protocol
        self._sock = sock
        self._outcomes = outcomes
        self._log = log
        self._confinement = confinement
        self._started_ms = time.time_ns() // 1_000_000
        self._entries: dict[str, _Entry] = {}
        self._streams: dict[str, _StreamEntry] = {}
        self._declare(policy, handlers)
        self._works: dict[tuple[bytes, int], _Work] = {}
        self._peers: dict[bytes, dict[int, _Work]] = {}  # of those with work under way
        self._count: dict[str, int] = dict.fromkeys(public_keys, 0)
        self._once: dict[tuple[str, bytes], _Work] = {}
        self._held: deque[tuple[bytes, str, Any, bytes]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._again = False  # a round of reading is due, or is this one
        self._probing: list[asyncio.TimerHandle] = []
        self._warned: dict[str, tuple[float, int]] = {}  # event: when, and how often since
        self.gate = Gate(public_keys, lambda why: self._warn("handshake refused", why=why))
        self._router = self.gate.socket(
            zmq.ROUTER, f"agent-box/{self.service}", secret, frozenset(public_keys)
        )
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.MAXMSGSIZE, wire.FRAME_MAX)
        self._fd = descriptor(self._router)
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._monitor.linger = 0
        self._monitor_fd = descriptor(self._monitor)

    async def start(self) -> None:
        """Binds and serves in the running loop.

        Raises:
            zmq.ZMQError: the path cannot be bound.
        """
        self._loop = asyncio.get_running_loop()
        self.gate.start()
        self._router.bind(f"ipc://{self._sock}")
        self._loop.add_reader(self._fd, self._read)
        self._loop.add_reader(self._monitor_fd, self._somebody_left)
        self._read()
        self._somebody_left()  # a pipe that was never read gives no signal

    def set_ready(self) -> None:
        """The service can do its work; calls that came before are begun now."""
        self.ready = True
        while self._held:
            peer, role, header, untrusted_body = self._held.popleft()
            self._count[role] -= 1
            if type(header) is wire.Call:
                self._call(peer, role, header, untrusted_body)
            else:
                self._open(peer, role, header, untrusted_body)

    def drain(self) -> None:
        """Takes nothing new from now on; what has begun is finished."""
        self.draining = True
        self.drain_asked.set()
        while self._held:
            peer, role, header, _ = self._held.popleft()
            self._count[role] -= 1
            self._send(peer, wire.Away(version=1, id=header.id, epoch=self.epoch))

    async def drained(self) -> None:
        """Waits until nothing is under way."""
        await self._idle.wait()

    async def close(self) -> None:
        """Ends what is still under way, lets the last replies leave and closes the sockets.

        Clients that share `gate.context` must be closed before.
        """
        if self._loop is None:
            self.gate.close()
            return
        for timer in self._probing:
            timer.cancel()
        self._loop.remove_reader(self._fd)
        self._loop.remove_reader(self._monitor_fd)
        tasks = [w.task for w in self._works.values() if w.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._router.disable_monitor()
        self.gate.close(FLUSH_MS)
        self._loop = None

    # The table.

    def _declare(self, policy: Policy, handlers: Mapping[str, Handler | StreamHandler]) -> None:
        declared = {m.name: m for m in self.contract.methods}
        if missing := sorted(set(declared) - set(handlers)):
            raise ValueError(f"{self.service}: no handler for {', '.join(missing)}")
        if extra := sorted(set(handlers) - set(declared)):
            raise ValueError(f"{self.service}: not in the contract: {', '.join(extra)}")
        for name, method in declared.items():
            callers = policy.callers(self.service, name)
            if isinstance(method, Stream):
                if not 1 <= method.window <= WINDOWS_PER_PEER:
                    raise ValueError(f"{self.service}.{name}: the window is out of range")
                entry = _StreamEntry(method, cast(StreamHandler, handlers[name]), callers)
                self._streams[name] = entry
                continue
            if method.kind is Kind.ONCE and self._outcomes is None:
                raise ValueError(f"{self.service}.{name} is called once, but nothing records it")
            self._entries[name] = _Entry(method, cast(Handler, handlers[name]), callers)
        own: dict[str, Handler] = {
            "hello": self._hello,
            "ping": self._ping,
            "drain": self._drain,
            "outcome": self._outcome,
            "confinement": self._walls,
        }
        for method in base.METHODS:
            callers = policy.callers(self.service, method.name)
            self._entries[method.name] = _Entry(method, own[method.name], callers)

    def _hello(self, _request: Empty, _call: Call) -> base.Hello:
        return base.Hello(
            service=self.service,
            version=__version__,
            epoch=self.epoch,
            ready=self.ready,
            pid=os.getpid(),
            started_ms=self._started_ms,
            problem=self.problem,
        )

    def _ping(self, _request: Empty, _call: Call) -> Empty:
        return Empty()

    def _drain(self, _request: Empty, _call: Call) -> Empty:
        self.drain()
        return Empty()

    def _walls(self, _request: Empty, _call: Call) -> base.Confinement:
        if self._confinement is None:
            raise Refusal(Reason.UNAVAILABLE, f"{self.service} does not report its walls")
        return self._confinement()

    def _outcome(self, request: base.Ask, call: Call) -> base.Outcome | Awaitable[base.Outcome]:
        work = self._once.get((call.caller, request.request_id))
        if work is not None:
            return self._later_outcome(work, request, call)
        return self._known_outcome(request, call)

    async def _later_outcome(self, work: _Work, request: base.Ask, call: Call) -> base.Outcome:
        if work.task is not None:
            await asyncio.wait((work.task,), timeout=call.remaining_s())
        return self._known_outcome(request, call)

    def _known_outcome(self, request: base.Ask, call: Call) -> base.Outcome:
        if (call.caller, request.request_id) in self._once:
            return base.Outcome(state="unknown", reply=None, problem=None)
        prior = None
        if self._outcomes is not None:
            prior = self._outcomes.lookup(call.caller, request.request_id)
        if prior is None:
            return base.Outcome(state="absent", reply=None, problem=None)
        if prior.state == DONE:
            return base.Outcome(state="done", reply=prior.body, problem=None)
        if prior.state == REFUSED:
            return base.Outcome(state="refused", reply=None, problem=prior.body)
        return base.Outcome(state="unknown", reply=None, problem=None)

    # Reading.

    def _read(self) -> None:
        """Reads until nothing is left, or a batch is full: the descriptor tells of new messages
        only once."""
        self._again = True
        router = self._router
        for number in range(BATCH):
            if number and not readable(router):
                self._again = False
                return
            try:
                peer, role, untrusted_frames = receive_from(router)
            except zmq.Again:
                self._again = False
                return
            try:
                self._message(peer, role, untrusted_frames)
            except wire.WireError as error:
                self._drop(str(error))
            except Exception as error:  # noqa: BLE001 - one message must not end the service
                self._log.error("a message broke the bus", error=error)
        self._again = False
        self._read_again()

    def _read_again(self) -> None:
        """A send may have taken the descriptor's signal with it, so after one look again."""
        if not self._again and self._loop is not None:
            self._again = True
            self._loop.call_soon(self._read)

    def _drop(self, why: str) -> None:
        self.dropped += 1
        self._warn("dropped what is no message", why=why)

    def _warn(self, event: str, **fields: str) -> None:
        """Warns, but of each thing only now and then: nobody fills the disk by being refused."""
        now = time.monotonic()
        key = f"{event} {fields}" if event == "denied" else event
        last, missed = self._warned.get(key, (-_WARN_S, 0))
        if now - last < _WARN_S:
            self._warned[key] = (last, missed + 1)
            return
        self._warned[key] = (now, 0)
        self._log.warning(event, **fields, not_logged=missed)

    def _message(self, peer: bytes, role: str, untrusted_frames: list[bytes]) -> None:
        header, untrusted_body = wire.decode_from_caller(untrusted_frames)
        if isinstance(header, wire.Call):
            self._call(peer, role, header, untrusted_body)
        elif isinstance(header, wire.Greet):
            self._send(peer, wire.Welcome(version=1, id=header.id, epoch=self.epoch))
        elif isinstance(header, wire.Open):
            self._open(peer, role, header, untrusted_body)
        else:
            self._about(peer, header, untrusted_body)

    def _about(self, peer: bytes, header: Any, untrusted_body: bytes) -> None:
        """A message about something under way. What has ended meanwhile is not an error."""
        work = self._works.get((peer, header.id))
        if work is None:
            return
        if type(header) is wire.Cancel:
            if work.cancellable:
                self._cancel(work)
            return
        flow = work.flow
        if flow is None:
            raise wire.WireError("an item for a call")
        if type(header) is wire.Credit:
            flow.credited(header.n)
        elif type(header) is wire.End:
            flow.ended()
        else:
            try:
                flow.arrived(untrusted_body)
            except wire.WireError as error:
                self._fail(peer, header.id, Refusal(Reason.BAD_REQUEST, str(error)))
                self._cancel(work)

    def _call(self, peer: bytes, role: str, header: wire.Call, untrusted_body: bytes) -> None:
        id = header.id
        if header.epoch != self.epoch:
            self._send(peer, wire.Stale(version=1, id=id, epoch=self.epoch))
            return
        entry = self._entries.get(header.method)
        call = None  # until the handler is asked
        try:
            if entry is None:
                raise self._no_method(header.method)
            if role not in entry.callers:
                raise self._denied(role, header.method)
            if not (self.ready and not self.draining) and header.method not in BASE_METHODS:
                self._not_now(peer, role, header, untrusted_body)
                return
            self._in_time(header, entry.limit_ns)
            if (header.request_id is None) is entry.once:
                what = "needs" if entry.once else "has no"
                raise Refusal(Reason.BAD_REQUEST, f"{entry.name} {what} request_id")
            try:
                request = wire.decode_body(untrusted_body, entry.method.request)
            except wire.WireError as error:
                raise Refusal(Reason.BAD_REQUEST, f"{entry.name}: {error}") from None
            asked = Call(role, entry.name, header.deadline, header.request_id, self._outcomes)
            if entry.once and self._repeated(peer, id, asked):
                return
            call = asked
            result = entry.handler(request, call)
            if type(result) is entry.reply:
                self._finish(peer, id, call, entry, result)
            else:
                self._take_up(peer, id, call, entry, result)
        except Refusal as refusal:
            if call is not None:
                self._record_refusal(call, refusal)
            self._fail(peer, id, refusal)
        except Exception as error:  # noqa: BLE001 - a defect of the handler; logged, told by id
            defect = self._as_defect(role, header.method, error)
            if call is not None:
                self._record_refusal(call, defect)
            self._fail(peer, id, defect)

    def _finish(self, peer: bytes, id: int, call: Call, entry: _Entry, result: Wire) -> None:
        if entry.once and not call.committed:
            call.commit(result)
        self._send(peer, wire.Reply(version=1, id=id, epoch=self.epoch), wire.encode_body(result))

    def _repeated(self, peer: bytes, id: int, call: Call) -> bool:
        """Whether this very call is under way or has ended; then it is answered with that."""
        assert call.request_id is not None and self._outcomes is not None
        work = self._once.get((call.caller, call.request_id))
        prior = None
        if work is not None:
            prior = Prior(work.call.method, BEGUN, b"")
        else:
            prior = self._outcomes.lookup(call.caller, call.request_id)
        if prior is None:
            return False
        if prior.method != call.method:
            raise Refusal(Reason.BAD_REQUEST, "the request_id belongs to another method")
        if work is not None:
            if len(work.others) >= 8:
                raise Refusal(Reason.EXHAUSTED, "this call is waited for too often")
            work.others.append((peer, id))
        elif prior.state == DONE:
            self._send(peer, wire.Reply(version=1, id=id, epoch=self.epoch), prior.body)
        elif prior.state == REFUSED:
            self._send(peer, wire.Failure(version=1, id=id, epoch=self.epoch), prior.body)
        else:
            why = f"{call.method} was begun before a restart, and its end is not on record"
            self._fail(peer, id, Refusal(Reason.UNKNOWN_OUTCOME, why))
        return True

    def _take_up(self, peer: bytes, id: int, call: Call, entry: _Entry, result: Any) -> None:
        """A handler that needs time: a task, within the caps."""
        if not inspect.iscoroutine(result):
            if not inspect.isawaitable(result):
                raise TypeError(f"{entry.name} must answer with {entry.reply.__name__}")
            result = _awaited(result)
        try:
            self._room_for(peer, id, call.caller)
        except Refusal:
            result.close()
            raise
        work = _Work(peer, id, call, cancellable=entry.read)
        work.inner = result
        if entry.once:
            assert call.request_id is not None
            self._once[call.caller, call.request_id] = work
        self._begin(work, self._run(work, entry, result))
        if entry.read and self._loop is not None:
            # Nobody waits any more: its place is for others.
            work.timer = self._loop.call_later(call.remaining_s(), self._late, work)

    async def _run(self, work: _Work, entry: _Entry, result: Coroutine[Any, Any, Wire]) -> None:
        call = work.call
        header: type[wire.Reply | wire.Failure]
        try:
            reply = await result
            if type(reply) is not entry.reply:
                raise TypeError(f"{entry.name} must answer with {entry.reply.__name__}")
            if entry.once and not call.committed:
                call.commit(reply)
            header, body = wire.Reply, wire.encode_body(reply)
        except Refusal as refusal:
            self._record_refusal(call, refusal)
            header, body = wire.Failure, wire.encode_refusal(refusal)
        except Exception as error:  # noqa: BLE001 - a defect of the handler; logged, told by id
            defect = self._as_defect(call.caller, call.method, error)
            self._record_refusal(call, defect)
            header, body = wire.Failure, wire.encode_refusal(defect)
        for peer, id in ((work.peer, work.id), *work.others):
            self._send(peer, header(version=1, id=id, epoch=self.epoch), body)

    def _open(self, peer: bytes, role: str, header: wire.Open, untrusted_body: bytes) -> None:
        id = header.id
        if header.epoch != self.epoch:
            self._send(peer, wire.Stale(version=1, id=id, epoch=self.epoch))
            return
        try:
            entry = self._streams.get(header.method)
            if entry is None:
                raise self._no_method(header.method)
            if role not in entry.callers:
                raise self._denied(role, header.method)
            if self.draining or not self.ready:
                self._not_now(peer, role, header, untrusted_body)
                return
            self._in_time(header, int(wire.OPEN_S * wire.NS))
            stream = entry.stream
            try:
                request = wire.decode_body(untrusted_body, stream.request)
            except wire.WireError as error:
                raise Refusal(Reason.BAD_REQUEST, f"{stream.name}: {error}") from None
            self._room_for(peer, id, role)
            open_ = (w.flow for w in self._peers.get(peer, {}).values() if w.flow is not None)
            if sum(f.stream.window for f in open_) + stream.window > WINDOWS_PER_PEER:
                raise Refusal(Reason.EXHAUSTED, "too many streams on this connection")
            call = Call(role, stream.name, header.deadline, None, None)
            work = _Work(peer, id, call, cancellable=True)
            work.flow = _Flow(self, peer, id, stream, header.credit)
            self._send(peer, wire.Credit(version=1, id=id, n=stream.window))
            self._begin(work, self._run_stream(work, entry, request))
        except Refusal as refusal:
            self._fail(peer, id, refusal)

    async def _run_stream(self, work: _Work, entry: _StreamEntry, request: Wire) -> None:
        assert work.flow is not None
        header: type[wire.Reply | wire.Failure]
        try:
            reply = await entry.handler(request, work.call, work.flow)
            if type(reply) is not entry.stream.reply:
                raise TypeError(f"{work.call.method} must end with {entry.stream.reply.__name__}")
            header, body = wire.Reply, wire.encode_body(reply)
        except Refusal as refusal:
            header, body = wire.Failure, wire.encode_refusal(refusal)
        except Exception as error:  # noqa: BLE001 - a defect of the handler; logged, told by id
            defect = self._as_defect(work.call.caller, work.call.method, error)
            header, body = wire.Failure, wire.encode_refusal(defect)
        self._send(work.peer, header(version=1, id=work.id, epoch=self.epoch), body)

    # What is under way.

    def _room_for(self, peer: bytes, id: int, role: str) -> None:
        if (peer, id) in self._works:
            raise Refusal(Reason.BAD_REQUEST, "this id is in use")
        if self._count[role] >= PENDING_PER_CALLER:
            raise Refusal(Reason.EXHAUSTED, f"too many calls of {role} are under way")
        if len(self._works) + len(self._held) >= PENDING_MAX:
            raise Refusal(Reason.EXHAUSTED, f"{self.service} has too many calls under way")

    def _begin(self, work: _Work, coroutine: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None
        self._works[work.peer, work.id] = work
        self._peers.setdefault(work.peer, {})[work.id] = work
        self._count[work.call.caller] += 1
        self._idle.clear()
        work.task = self._loop.create_task(coroutine, name=f"{self.service}.{work.call.method}")
        work.task.add_done_callback(lambda task: self._ended(work, task))

    def _ended(self, work: _Work, task: asyncio.Task[None]) -> None:
        del self._works[work.peer, work.id]
        of_peer = self._peers[work.peer]
        del of_peer[work.id]
        if not of_peer:
            del self._peers[work.peer]
        self._count[work.call.caller] -= 1
        if work.timer is not None:
            work.timer.cancel()
        if work.inner is not None:
            work.inner.close()  # of a task that was cancelled before its first step
        if work.call.request_id is not None:
            self._once.pop((work.call.caller, work.call.request_id), None)
        if not self._works:
            self._idle.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("an answer could not be given", error=error, method=work.call.method)

    def _late(self, work: _Work) -> None:
        self._fail(
            work.peer, work.id, Refusal(Reason.DEADLINE, f"{work.call.method} took too long")
        )
        self._cancel(work)

    def _cancel(self, work: _Work) -> None:
        if work.task is not None:
            work.task.cancel()

    def _not_now(self, peer: bytes, role: str, header: Any, untrusted_body: bytes) -> None:
        if self.draining:
            self._send(peer, wire.Away(version=1, id=header.id, epoch=self.epoch))
            return
        self._room_for(peer, header.id, role)
        self._count[role] += 1
        self._held.append((peer, role, header, untrusted_body))

    def _somebody_left(self) -> None:
        left = False
        while readable(self._monitor):
            receive(self._monitor)
            left = True
        # ZeroMQ does not say who. Whoever has something under way is tried, now and again soon,
        # because the ROUTER forgets a peer a little later than the monitor tells.
        if left and self._peers and self._loop is not None:
            for timer in self._probing:
                timer.cancel()
            self._probing = [self._loop.call_later(s, self._probe) for s in _PROBES_S]

    def _probe(self) -> None:
        for peer in list(self._peers):
            if not self._send(peer, wire.Probe(version=1, id=0)):
                self._gone(peer)

    def _gone(self, peer: bytes) -> None:
        for work in list(self._peers.get(peer, {}).values()):
            if work.cancellable:
                self._cancel(work)

    # Answers.

    def _send(self, peer: bytes, header: wire.Header, body: bytes = _EMPTY) -> bool:
        """Sends to one peer. False: it is gone, or has not read for so long that its queue is
        full; either way its answers are lost to nobody but itself."""
        try:
            send(self._router, peer, wire.MAGIC, wire.encode_header(header), body)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        finally:
            if not self._again:
                self._read_again()
        return True

    def _fail(self, peer: bytes, id: int, refusal: Refusal) -> None:
        header = wire.Failure(version=1, id=id, epoch=self.epoch)
        self._send(peer, header, wire.encode_refusal(refusal))

    def _as_defect(self, role: str, method: str, error: Exception) -> Refusal:
        id = self._log.error("a call failed", error=error, method=method, caller=role)
        return Refusal(Reason.INTERNAL, f"{self.service}.{method} failed; see its log", id=id)

    def _record_refusal(self, call: Call, refusal: Refusal) -> None:
        """So that whoever asks later is told the same."""
        if call.request_id is None or self._outcomes is None:
            return
        try:
            prior = self._outcomes.lookup(call.caller, call.request_id)
            if (prior is None and _is_final(refusal)) or (prior and prior.state == BEGUN):
                body = wire.encode_refusal(refusal)
                self._outcomes.record(call.caller, call.request_id, call.method, REFUSED, body)
        except Exception as error:  # noqa: BLE001 - the refusal itself must still be told
            self._log.error("a refusal is not on record", error=error, method=call.method)

    def _no_method(self, untrusted_name: str) -> Refusal:
        return Refusal(Reason.BAD_REQUEST, f"{self.service} has no method {untrusted_name!r}")

    def _denied(self, role: str, method: str) -> Refusal:
        self._warn("denied", caller=role, method=method)
        return Refusal(Reason.DENIED, f"{role} may not call {self.service}.{method}")

    @staticmethod
    def _in_time(header: wire.Call | wire.Open, limit_ns: int) -> None:
        left = header.deadline - wire.now_ns()
        if left <= 0:
            raise Refusal(Reason.DEADLINE, f"{header.method} came after its deadline")
        if left > limit_ns:
            raise Refusal(Reason.BAD_REQUEST, f"{header.method} has a deadline too far away")


def _is_final(refusal: Refusal) -> bool:
    """Whether sending the same again would be pointless; a passing want is not recorded."""
    return refusal.code not in (Code.UNAVAILABLE, Code.DEADLINE, Code.EXHAUSTED)


async def _awaited(result: Awaitable[Wire]) -> Wire:
    return await result
