"""The calling half of the bus without a socket: what is pending, and what to do when the line
breaks.

Whoever drives a `Peer` tells it what happened (`connected`, `disconnected`, `received`,
`expire`) and lets it send (`pump`). It decides; it never waits.

    DOWN --connected--> GREETING --welcome--> UP
      ^                                        |
      +-------------- disconnected ------------+

A call is sent only when UP, marked with the epoch of the process it is meant for. Then:
- a reply of that epoch ends it; one of another epoch counts as the loss of the line;
- `stale` and `away` say that it was not begun: it is sent again, whatever its kind;
- when the line is lost, READ and IDEMPOTENT are sent again, and ONCE becomes a question
  for its outcome; a stream ends; a `drain` has come true when another process answers;
- each sending has an id of its own, so the answer to an earlier one ends nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Final

from agent_box.bus import base, wire
from agent_box.bus.errors import Code, Reason, Refusal
from agent_box.bus.schema import Empty, Kind, Method, Stream, Wire

IN_FLIGHT_MAX: Final = 64  # calls sent and not answered
WAITING_MAX: Final = 4_096  # calls not yet sent
WINDOWS_MAX: Final = 256  # sum of the windows of open streams; with IN_FLIGHT_MAX below the HWM

Frames = list[bytes]
Send = Callable[[Frames], bool]  # False: no room now, try again

_OUTCOME: Final = next(m for m in base.METHODS if m.name == "outcome")
_DRAIN: Final = next(m for m in base.METHODS if m.name == "drain")
_BASE: Final = frozenset(m.name for m in base.METHODS)


class Line(Enum):
    DOWN = "down"
    GREETING = "greeting"
    UP = "up"


class Pending:
    """One call, until it has a `result` or an `error`.

    Attributes:
        deadline: CLOCK_BOOTTIME, nanoseconds.
        epoch: of the process that it was last meant for.
        sent: whether it may have been begun: it left, and nobody said that it was not begun.
        asking: whether its outcome is asked for instead of sending it.
    """

    __slots__ = (
        "asking",
        "body",
        "deadline",
        "done",
        "epoch",
        "error",
        "finish",
        "id",
        "lost",
        "method",
        "request_id",
        "result",
        "sent",
    )

    def __init__(
        self,
        method: Method,
        body: bytes,
        deadline: int,
        request_id: bytes | None,
        finish: Callable[[Pending], None] | None,
    ) -> None:
        self.method = method
        self.body = body
        self.deadline = deadline
        self.request_id = request_id
        self.finish = finish
        self.id: int | None = None  # of the sending that is in flight
        self.epoch: bytes | None = None
        self.sent = False
        self.lost = False
        self.asking = False
        self.done = False
        self.result: Wire | None = None
        self.error: Refusal | None = None


class Flow:
    """One stream, seen from the caller.

    Attributes:
        credit: items that may be sent now.
        accepted: whether the callee has taken it up.
        done: it is over; `result` or `error` says how. `inbox` may still hold items.
    """

    __slots__ = (
        "_eaten",
        "accepted",
        "body",
        "credit",
        "deadline",
        "done",
        "error",
        "finished",
        "id",
        "inbox",
        "method",
        "notify",
        "result",
        "room",
    )

    def __init__(
        self, method: Stream, body: bytes, deadline: int, notify: Callable[[], None]
    ) -> None:
        self.method = method
        self.body = body
        self.deadline = deadline
        self.notify = notify
        self.id: int | None = None
        self.accepted = False
        self.finished = False  # no more items go up
        self.credit = 0
        self.room = method.window  # items that the callee may still send
        self.inbox: deque[Wire] = deque()
        self._eaten = 0
        self.done = False
        self.result: Wire | None = None
        self.error: Refusal | None = None


class Peer:
    """The calls and streams of one caller at one service.

    Args:
        service: its name, for messages.
    """

    def __init__(self, service: str) -> None:
        self.service = service
        self.line = Line.DOWN
        self.epoch: bytes | None = None
        self.away = False  # the process at the other end finishes
        self.blocked = False  # the last send found no room
        self._next_id = 0
        self._greeting: int | None = None  # id of the greeting in flight
        self._waiting: OrderedDict[Pending, None] = OrderedDict()
        self._in_flight: dict[int, Pending] = {}
        self._flows: dict[int, Flow] = {}
        self._unopened: deque[Flow] = deque()
        self._windows = 0
        self._frames: deque[Frames] = deque()  # of streams, and cancellations: in order

    # What the owner wants.

    def submit(
        self,
        method: Method,
        body: bytes,
        deadline: int,
        request_id: bytes | None,
        finish: Callable[[Pending], None] | None = None,
    ) -> Pending:
        """Takes a call. `finish` is called once, when it has ended.

        Raises:
            Refusal: EXHAUSTED, too many wait already.
        """
        if len(self._waiting) >= WAITING_MAX:
            raise Refusal(Reason.EXHAUSTED, f"too many calls wait for {self.service}")
        pending = Pending(method, body, deadline, request_id, finish)
        self._waiting[pending] = None
        return pending

    def abandon(self, pending: Pending) -> None:
        """The owner no longer wants the answer."""
        if pending.done:
            return
        if pending.id is not None:
            self._cancel(pending.id)
        self._end(pending, None, Refusal(Reason.DEADLINE, "abandoned"))

    def expire(self, pending: Pending) -> None:
        """The deadline of the call has passed."""
        if not pending.done:
            self._end(pending, None, self._too_late(pending))

    def expire_until(self, now: int) -> int | None:
        """Ends the calls whose deadline has passed. The first deadline of the others."""
        calls = [*self._waiting, *self._in_flight.values()]
        for pending in calls:
            if pending.deadline <= now:
                self.expire(pending)
        return min((each.deadline for each in calls if not each.done), default=None)

    def open(self, method: Stream, body: bytes, deadline: int, notify: Callable[[], None]) -> Flow:
        """Takes a stream. `notify` is called whenever something about it has changed.

        Raises:
            Refusal: EXHAUSTED, the windows of the open streams do not fit below the
                high-water mark of a socket.
        """
        if self._windows + method.window > WINDOWS_MAX:
            raise Refusal(Reason.EXHAUSTED, f"too many streams to {self.service}")
        self._windows += method.window
        flow = Flow(method, body, deadline, notify)
        self._unopened.append(flow)
        return flow

    def send_item(self, flow: Flow, body: bytes) -> None:
        """Sends one item; the owner has seen `credit` and that it is not `done`."""
        assert flow.id is not None and flow.credit > 0 and not flow.done and not flow.finished
        flow.credit -= 1
        self._frames.append(_frames(wire.Item(version=1, id=flow.id), body))

    def finish(self, flow: Flow) -> None:
        """No more items go up."""
        if flow.done or flow.finished:
            return
        flow.finished = True
        if flow.id is not None:
            self._frames.append(_frames(wire.End(version=1, id=flow.id)))

    def take(self, flow: Flow) -> Wire:
        """The next item of the inbox, and room for more at the callee's."""
        item = flow.inbox.popleft()
        flow._eaten += 1
        if not flow.done and flow.id is not None and flow._eaten * 2 >= flow.method.window:
            flow.room += flow._eaten
            self._frames.append(_frames(wire.Credit(version=1, id=flow.id, n=flow._eaten)))
            flow._eaten = 0
        return item

    def close_flow(self, flow: Flow, error: Refusal | None = None) -> None:
        """The owner is done with the stream, whether or not it is over."""
        if flow.done:
            return
        if flow.id is not None:
            self._cancel(flow.id)
        self._end_flow(flow, None, error or Refusal(Reason.CONNECTION_LOST, "closed"))

    # What happened.

    def connected(self) -> None:
        """A handshake has succeeded. Nothing is known yet of the process behind it."""
        if self.line is not Line.DOWN:
            self.disconnected()
        self.line = Line.GREETING

    def disconnected(self) -> None:
        """The line is lost, and with it whatever was on it."""
        self.line = Line.DOWN
        self.epoch = None
        self.away = False
        self.blocked = False
        self._greeting = None
        self._lose_all()

    def denied(self) -> None:
        """The service refused the key of this role. Asking again cannot help."""
        why = f"{self.service} does not admit the key of this role"
        for pending in [*self._waiting, *self._in_flight.values()]:
            self._end(pending, None, Refusal(Reason.DENIED, why))
        for flow in [*self._unopened, *self._flows.values()]:
            self._end_flow(flow, None, Refusal(Reason.DENIED, why))

    def shut(self) -> None:
        """Ends all that is pending, as if its deadline had come."""
        self.disconnected()
        for pending in list(self._waiting):
            self.expire(pending)
        for flow in list(self._unopened):
            self._lose_flow(flow)

    def received(self, untrusted_frames: Sequence[bytes]) -> None:
        """A message of the service. Raises WireError; the line is still good then."""
        header, untrusted_body = wire.decode_from_callee(untrusted_frames)
        if isinstance(header, wire.Reply | wire.Failure):
            self._answered(header, untrusted_body)
        elif isinstance(header, wire.Item):
            self._item(header, untrusted_body)
        elif isinstance(header, wire.Credit):
            flow = self._flows.get(header.id)
            if flow is not None:
                flow.accepted = True
                flow.credit = min(flow.credit + header.n, flow.method.window)
                flow.notify()
        elif isinstance(header, wire.Welcome):
            if header.id == self._greeting:
                self._greeting = None
                self.epoch = header.epoch
                self.line = Line.UP
        elif isinstance(header, wire.Stale):
            if self.line is Line.UP and header.epoch != self.epoch:
                self._not_begun(header.id)
                self._lose_all()
                self.line = Line.GREETING
        elif isinstance(header, wire.Away) and self.line is Line.UP and header.epoch == self.epoch:
            self.away = True
            self._not_begun(header.id)

    # What to do about it.

    def pump(self, send: Send) -> None:
        """Sends what can be sent now. `send` returns False when there is no room."""
        self.blocked = False
        if self.line is Line.DOWN:
            return
        if self.line is Line.GREETING:
            if self._greeting is None:
                id = self._id()
                if send(_frames(wire.Greet(version=1, id=id))):
                    self._greeting = id
                else:
                    self.blocked = True
            return
        while self._frames:
            if not send(self._frames[0]):
                self.blocked = True
                return
            self._frames.popleft()
        if self._unopened and not self._pump_flows(send):
            return
        if self._waiting:
            self._pump_calls(send)

    @property
    def eager(self) -> bool:
        """Whether `pump` has something to do."""
        greets = self.line is Line.GREETING and self._greeting is None
        return greets or bool(self._waiting or self._frames or self._unopened)

    def idle(self) -> bool:
        """Whether nothing is pending: no call waits or is in flight, and no stream is open."""
        return not (self._waiting or self._in_flight or self._flows or self._unopened)

    def _pump_flows(self, send: Send) -> bool:
        assert self.epoch is not None
        while self._unopened and not self.away:
            flow = self._unopened[0]
            id = self._id()
            header = wire.Open(
                version=1,
                id=id,
                epoch=self.epoch,
                method=flow.method.name,
                deadline=flow.deadline,
                credit=flow.method.window,
            )
            if not send(_frames(header, flow.body)):
                self.blocked = True
                return False
            flow.id = id
            self._flows[id] = flow
            self._unopened.popleft()
            if flow.finished:
                end = _frames(wire.End(version=1, id=id))
                if not send(end):
                    self._frames.append(end)
                    self.blocked = True
                    return False
        return True

    def _pump_calls(self, send: Send) -> None:
        assert self.epoch is not None
        for pending in list(self._waiting) if self.away else _emptying(self._waiting):
            if len(self._in_flight) >= IN_FLIGHT_MAX:
                return
            if self.away and not pending.asking and pending.method.name not in _BASE:
                continue
            if pending.method is _DRAIN and pending.epoch not in (None, self.epoch):
                self._end(pending, Empty(), None)  # and the next process is not to end as well
                continue
            id = self._id()
            if not send(self._sending(pending, id, self.epoch)):
                self.blocked = True
                return
            pending.id = id
            pending.epoch = self.epoch
            pending.sent = True
            del self._waiting[pending]
            self._in_flight[id] = pending

    @staticmethod
    def _sending(pending: Pending, id: int, epoch: bytes) -> Frames:
        if pending.asking:
            assert pending.request_id is not None
            body = wire.encode_body(base.Ask(request_id=pending.request_id))
            name, request_id = _OUTCOME.name, None
        else:
            body, name, request_id = pending.body, pending.method.name, pending.request_id
        header = wire.Call(
            version=1,
            id=id,
            epoch=epoch,
            method=name,
            deadline=pending.deadline,
            request_id=request_id,
        )
        return _frames(header, body)

    def _answered(self, header: wire.Reply | wire.Failure, untrusted_body: bytes) -> None:
        flow = self._flows.get(header.id)
        pending = self._in_flight.pop(header.id, None)
        if pending is None and flow is None:
            return
        if header.epoch != self.epoch:
            if pending is not None:
                self._lose(pending)
            if flow is not None:
                self._lose_flow(flow)
            return
        if pending is not None and pending.asking:
            self._told(pending, header, untrusted_body)
            return
        into = (pending or flow).method.reply  # type: ignore[union-attr]
        result, error = self._read(header, untrusted_body, into)
        if pending is not None:
            self._end(pending, result, error)
        elif flow is not None:
            self._end_flow(flow, result, error)

    def _told(
        self, pending: Pending, header: wire.Reply | wire.Failure, untrusted_body: bytes
    ) -> None:
        """The answer to the question for an outcome."""
        told, error = self._read(header, untrusted_body, base.Outcome)
        if error is not None and error.code in (Code.DEADLINE, Code.UNAVAILABLE):
            error = self._unknown(pending)
        if isinstance(told, base.Outcome):
            if told.state == "absent":
                self._back(pending)
                return
            if told.state == "done" and told.reply is not None:
                self._end(pending, *self._parse(told.reply, pending.method.reply))
                return
            if told.state == "refused" and told.problem is not None:
                try:
                    error = wire.to_refusal(told.problem)
                except wire.WireError:
                    error = self._nonsense()
            else:
                error = self._unknown(pending)
        self._end(pending, None, error)

    def _read(
        self, header: wire.Reply | wire.Failure, untrusted_body: bytes, into: type[Wire]
    ) -> tuple[Wire | None, Refusal | None]:
        if type(header) is wire.Failure:
            try:
                return None, wire.to_refusal(untrusted_body)
            except wire.WireError:
                return None, self._nonsense()
        return self._parse(untrusted_body, into)

    def _parse(self, untrusted_body: bytes, into: type[Wire]) -> tuple[Wire | None, Refusal | None]:
        try:
            return wire.decode_body(untrusted_body, into), None
        except wire.WireError:
            return None, self._nonsense()

    def _item(self, header: wire.Item, untrusted_body: bytes) -> None:
        flow = self._flows.get(header.id)
        if flow is None or flow.done:
            return
        if flow.room <= 0:
            error = Refusal(Reason.INTERNAL, f"{self.service} sent more than it had credit for")
            self.close_flow(flow, error)
            return
        flow.room -= 1
        item, refusal = self._parse(untrusted_body, flow.method.down)
        if item is None:
            self.close_flow(flow, refusal)
            return
        flow.inbox.append(item)
        flow.notify()

    def _lose_all(self) -> None:
        self._frames.clear()
        lost = list(self._in_flight.values())
        self._in_flight.clear()
        for pending in reversed(lost):  # back to the front, in their order
            self._lose(pending)
        for flow in list(self._flows.values()):
            self._lose_flow(flow)

    def _lose(self, pending: Pending) -> None:
        pending.id = None
        pending.lost = True
        if pending.method.kind is Kind.ONCE:
            pending.asking = True
        self._to_front(pending)

    def _lose_flow(self, flow: Flow) -> None:
        why = f"the connection to {self.service} was lost"
        self._end_flow(flow, None, Refusal(Reason.CONNECTION_LOST, why))

    def _not_begun(self, id: int) -> None:
        pending = self._in_flight.pop(id, None)
        if pending is not None:
            if pending.asking:
                self._lose(pending)
            else:
                self._back(pending)
        flow = self._flows.pop(id, None)
        if flow is not None:
            flow.id = None
            self._unopened.appendleft(flow)

    def _back(self, pending: Pending) -> None:
        """It is certain that it was not begun."""
        pending.id = None
        pending.sent = pending.lost = pending.asking = False
        self._to_front(pending)

    def _to_front(self, pending: Pending) -> None:
        self._waiting[pending] = None
        self._waiting.move_to_end(pending, last=False)

    def _end(self, pending: Pending, result: Wire | None, error: Refusal | None) -> None:
        pending.result, pending.error, pending.done = result, error, True
        self._waiting.pop(pending, None)
        if pending.id is not None:
            self._in_flight.pop(pending.id, None)
            pending.id = None
        pending.body = b""
        if pending.finish is not None:
            pending.finish(pending)

    def _end_flow(self, flow: Flow, result: Wire | None, error: Refusal | None) -> None:
        flow.result, flow.error, flow.done = result, error, True
        flow.body = b""
        if flow.id is not None:
            self._flows.pop(flow.id, None)
            flow.id = None
        elif flow in self._unopened:
            self._unopened.remove(flow)
        self._windows -= flow.method.window
        flow.notify()

    def _cancel(self, id: int) -> None:
        if self.line is Line.UP:
            self._frames.append(_frames(wire.Cancel(version=1, id=id)))

    def _id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _too_late(self, pending: Pending) -> Refusal:
        name, kind = f"{self.service}.{pending.method.name}", pending.method.kind
        if not pending.sent or (pending.lost and kind is Kind.READ):
            return Refusal(Reason.UNAVAILABLE, f"{self.service} could not be reached in time")
        if pending.asking:
            return self._unknown(pending)
        if pending.lost:
            return Refusal(
                Reason.CONNECTION_LOST, f"the connection was lost while {name} was under way"
            )
        return Refusal(Reason.DEADLINE, f"{name} was not answered in time")

    def _unknown(self, pending: Pending) -> Refusal:
        return Refusal(
            Reason.UNKNOWN_OUTCOME,
            f"whether {self.service}.{pending.method.name} happened could not be learned",
        )

    def _nonsense(self) -> Refusal:
        return Refusal(Reason.INTERNAL, f"{self.service} sent what is not an answer")


def _emptying(waiting: OrderedDict[Pending, None]) -> Iterator[Pending]:
    """The first one, again and again, while somebody takes it away."""
    while waiting:
        yield next(iter(waiting))


def _frames(header: wire.Header, body: bytes = b"\x80") -> Frames:
    return [wire.MAGIC, wire.encode_header(header), body]
