"""A TCP flow: the guest's half (`Tcp`) and a socket of the host, and bytes between them."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Literal

from agent_box.netstack.contract import Flow as Facts
from agent_box.netstack.poller import ERROR, OUT, UNSURE, Poller
from agent_box.netstack.sni import NO_NAME, Hello, HelloReader
from agent_box.netstack.tcp import DEAD, NOW, OPEN, ROOM, Tcp
from agent_box.netstack.wire import Wire

POLICY: Final = 0  # leads to where the policy allows
BROKER: Final = 1
RESOLVER: Final = 2
FORWARD: Final = 3

_NOW_AND_HARD: Final = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST
_PIECES: Final = 64  # in one sendmsg upstream
_POURED: Final = 7  # segments read at once from an upstream that has filled one already
_ACK_S: Final = 0.001  # what an ACK waits for an answer of upstream's that it may go with
# The same once the guest has finished. It has nothing more to send, so no program of its waits for
# that ACK, and upstream mostly ends as well. Linux takes as long.
_LAST_ACK_S: Final = 0.04
HIGH: Final = 512 << 10  # queued for the link: then upstream waits


class Flow(Tcp):
    """See `Tcp` for the guest's half.

    Attributes:
        sock: towards upstream; None while connecting.
        kind: where it leads.
        facts: what the policy is asked about; of kind POLICY only.
        hello: reads the first bytes of a flow whose server name is not known yet.
        shut: upstream was told that the guest finished.
        eof: upstream finished.
        readable: upstream may have something to be read.
        unsure: a short read of it does not mean that there is no more; see `poller.Handler`.
        broken: upstream takes no more; what it sent before is still to be read.
        dirty, ready: whether it stands in the relay's lists.
    """

    __slots__ = (
        "broken", "dial", "dirty", "eof", "facts", "hello", "kind", "origin", "outq",
        "readable", "ready", "relay", "shut", "sock", "unsure",
    )  # fmt: skip

    def __init__(self, relay: Relay, wire: Wire, key: bytes, iss: int, kind: int) -> None:
        super().__init__(wire, key, iss)
        self.relay = relay
        self.kind = kind
        self.sock: socket.socket | None = None
        self.facts: Facts | None = None
        self.dial: object | None = None
        self.hello: HelloReader | None = None
        self.outq: deque[bytes | memoryview] | None = None
        self.origin = 0  # of a forward: the host's port
        self.eof = self.shut = self.broken = False
        self.dirty = self.ready = self.readable = self.unsure = False

    def on_event(self, events: int) -> None:
        if self.state == DEAD:
            return
        if events & OUT and self.outq:
            self.relay.drain(self)
        if events & ~OUT:
            self.readable = True
            if events & UNSURE:
                self.unsure = True
            if self.state != OPEN:
                if events & ERROR:
                    self.relay.reset(self)
            elif self.eof:
                if events & ERROR and self.sock is not None and self._error():
                    self.relay.reset(self)
            elif not self.ready and not self.blocked:
                self.ready = True
                self.relay.ready.append(self)

    def _error(self) -> int:
        return 0 if self.sock is None else self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


class Relay:
    """Moves bytes between the flows' halves. All flows of an instance share one.

    Args:
        judge: asked again when a flow's server name is known; False: it may not be, and the
            judge has told of it.
    """

    def __init__(self, poller: Poller, wire: Wire, judge: Callable[[Flow, Hello], bool]) -> None:
        self._poller = poller
        self._wire = wire
        self._judge = judge
        self.flows: dict[bytes, Flow] = {}
        self.ready: deque[Flow] = deque()
        self.dirty: list[Flow] = []
        self._later: dict[float, list[Flow]] = {_ACK_S: [], _LAST_ACK_S: []}
        self.overdue: list[Flow] = []  # waited for so long that `acknowledge` is to be called
        self.bytes_up = 0
        self.bytes_down = 0

    # -- guest to upstream

    def mark(self, flow: Flow) -> None:
        """Something arrived: see to it at the end of the batch."""
        if not flow.dirty:
            flow.dirty = True
            self.dirty.append(flow)

    def wake(self, flow: Flow) -> None:
        """There is room towards the guest again."""
        flow.blocked = False
        if not flow.ready and (flow.readable or flow.resend is not None):
            flow.ready = True
            self.ready.append(flow)

    def batch(self) -> None:
        """Sends upstream what arrived, and acknowledges it, once for each flow."""
        for flow in self.dirty:
            flow.dirty = False
            if flow.state != OPEN:
                continue
            if flow.arrived is not None:
                self._up(flow, flow.arrived)
            if flow.hello is not None and flow.finished and flow.state == OPEN:
                if flow.hello.data:
                    self._greeted(flow, NO_NAME)  # it never said
                else:
                    flow.hello = None  # nor anything else
            if flow.state == OPEN:
                if flow.due == NOW:
                    flow.acknowledge()
                elif flow.due:
                    self._acknowledge_later(flow)
                if flow.finished and not flow.outq:
                    self._finish_up(flow)
        self.dirty.clear()

    def _acknowledge_later(self, flow: Flow) -> None:
        wait = _LAST_ACK_S if flow.finished else _ACK_S
        later = self._later[wait]
        if not later:
            self._poller.at(self._poller.now + wait, partial(self._waited, wait))
        later.append(flow)

    def _waited(self, wait: float) -> None:
        self.overdue += self._later[wait]
        self._later[wait].clear()

    def acknowledge(self) -> None:
        """Acknowledges what waited for an answer that did not come."""
        for flow in self.overdue:
            if flow.due:
                flow.acknowledge()
        self.overdue.clear()

    def _up(self, flow: Flow, pieces: list[memoryview]) -> None:
        flow.arrived = None
        if flow.broken or flow.sock is None:
            flow.taken(sum(map(len, pieces)))
            return
        if flow.hello is not None:
            hello = None
            for piece in pieces:
                if hello is None:
                    hello = flow.hello.feed(piece)
                else:
                    flow.hello.data += piece
            if hello is not None:
                self._greeted(flow, hello)
            return
        if flow.outq:
            flow.outq.extend(bytes(piece) for piece in pieces)
            return
        try:
            if len(pieces) == 1:
                sent = flow.sock.send(pieces[0])
            else:
                sent = flow.sock.sendmsg(pieces[:_PIECES])
        except BlockingIOError:
            sent = 0
        except OSError:
            self._broke(flow)
            return
        self.bytes_up += sent
        left = sent
        for piece in pieces:
            size = len(piece)
            if left >= size:
                left -= size
            else:
                if flow.outq is None:
                    flow.outq = deque()
                flow.outq.append(bytes(piece[left:]))
                left = 0
        if sent:
            flow.taken(sent)
        if flow.outq and len(pieces) > _PIECES:
            self.drain(flow)

    def _greeted(self, flow: Flow, hello: Hello) -> None:
        first = flow.hello
        flow.hello = None
        if not self._judge(flow, hello):
            self.cut(flow)
            return
        if first is not None and first.data:
            flow.outq = deque((bytes(first.data),))
            self.drain(flow)

    def drain(self, flow: Flow) -> None:
        """Upstream takes more."""
        queue = flow.outq
        if flow.sock is None:
            return
        while queue:
            try:
                pieces = [queue[i] for i in range(min(_PIECES, len(queue)))]
                sent = flow.sock.sendmsg(pieces)
            except BlockingIOError:
                return
            except OSError:
                self._broke(flow)
                return
            self.bytes_up += sent
            left = sent
            while left:
                size = len(queue[0])
                if left < size:
                    queue[0] = memoryview(queue[0])[left:]
                    break
                left -= size
                queue.popleft()
            flow.taken(sent)
        flow.outq = None
        if flow.finished and flow.state == OPEN and not flow.dirty:
            self._finish_up(flow)

    def _broke(self, flow: Flow) -> None:
        """Upstream takes nothing any more. What it said before that is still the guest's."""
        flow.broken = True
        flow.outq = None
        flow.taken(flow.holding)
        if flow.eof:
            self.reset(flow)
        else:
            self.wake(flow)

    def _finish_up(self, flow: Flow) -> None:
        if not flow.shut:
            flow.shut = True
            if flow.sock is not None and not flow.broken:
                try:
                    flow.sock.shutdown(socket.SHUT_WR)
                except OSError:
                    pass  # it is gone already, which reading tells as well
        self.settle(flow)

    # -- upstream to guest

    def pump(self) -> bool:
        """Reads what upstreams have, a little of each. Returns whether there may be more."""
        ready = self.ready
        wire = self._wire
        for _ in range(len(ready)):
            if wire.queued >= HIGH:
                return True
            flow = ready.popleft()
            if self._down(flow):
                ready.append(flow)
            else:
                flow.ready = False
        return bool(ready)

    def _down(self, flow: Flow) -> bool:
        """Returns whether to come back without being told."""
        if flow.state != OPEN or flow.sock is None:
            return False
        wire = self._wire
        if flow.resend is not None:
            if flow.again(HIGH):
                return True
            if flow.resend is not None:
                flow.blocked = True
                return False
        if flow.eof or not flow.readable:
            return False
        room = flow.room()
        if not room:
            return False
        slot = wire.slot()
        count = self._read(flow, [slot[:room]])
        if not count:
            wire.give_back(slot)
            return False
        flow.send(slot, count)
        filled = count == room
        segment = flow.segment
        if count == segment and wire.queued < HIGH and (many := flow.whole(_POURED)):
            slots = [wire.slot() for _ in range(many)]
            count = self._read(flow, [slot[:segment] for slot in slots])
            filled = count == many * segment
            whole, rest = divmod(count, segment)
            if whole:
                flow.send_whole(slots[:whole])
            if rest:
                flow.send(slots[whole], rest)
                whole += 1
            for slot in slots[whole:]:
                wire.give_back(slot)
        return filled or flow.unsure

    def _read(self, flow: Flow, views: list[memoryview]) -> int:
        """Reads from upstream. 0: there is nothing now, or never again, which is seen to."""
        assert flow.sock is not None
        try:
            if len(views) == 1:
                count = flow.sock.recv_into(views[0])
            else:
                count = flow.sock.recvmsg_into(views)[0]
        except BlockingIOError:
            flow.readable = False
            return 0
        except OSError:
            self.reset(flow)
            return 0
        if not count:
            if flow.broken:
                self.reset(flow)
            else:
                flow.eof = True
                flow.finish()
            return 0
        self.bytes_down += count
        if not flow.unsure and count < sum(map(len, views)):
            flow.readable = False  # see `poller.Handler`
        return count

    # -- ends

    def event(self, flow: Flow, bits: int) -> None:
        """What `Tcp` found that is not a matter of the batch."""
        if bits & ROOM and (flow.blocked or flow.resend is not None):
            self.wake(flow)
        if flow.fin_acked:
            self.settle(flow)

    def settle(self, flow: Flow) -> None:
        """Forgets a flow that both sides finished."""
        if flow.shut and flow.fin_acked and flow.state == OPEN:
            flow.die()
            self.drop(flow, hard=False)

    def reset(self, flow: Flow) -> None:
        """Upstream is gone: the guest hears RST."""
        self.cut(flow)

    def cut(self, flow: Flow) -> None:
        """Ends a flow at once, towards both sides."""
        if flow.state != DEAD:
            flow.abort()
        self.drop(flow, hard=True)

    def drop(self, flow: Flow, *, hard: bool) -> None:
        """Lets go of a DEAD flow. `hard`: upstream hears RST."""
        if self.flows.get(flow.key) is flow:
            del self.flows[flow.key]
        flow.outq = None
        flow.hello = None
        sock, flow.sock = flow.sock, None
        if sock is None:
            return
        self._poller.closing(sock.fileno())
        if hard and sock.family != socket.AF_UNIX:
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NOW_AND_HARD)
            except OSError:
                pass  # it is closed below in any case
        sock.close()


def facts(
    name: str | None, address: str | None, port: int, protocol: Literal["tcp", "udp"] = "tcp"
) -> Facts:
    """What is known of a flow at its beginning."""
    return Facts(name=name, address=address, port=port, protocol=protocol, hello="unread", sni=None)
