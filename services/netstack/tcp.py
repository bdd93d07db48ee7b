"""One TCP connection with the guest, as RFC 9293 has it; no socket and no clock.

The other half of a flow is a socket of the host, which the relay moves bytes to and from. This
half answers the guest: the relay passes in each segment and each piece of upstream data, and
this queues frames on the `Wire` that all flows of an instance share.

The link is a stream and does not reorder. It still loses: the guest's TUN may drop, and a new
worker or a paused guest misses some. So what was sent is kept until it is acknowledged and sent
again from there on (go-back-N) after three duplicate acknowledgements or a timeout. There is no
congestion control, since the link's own backpressure is exact; the timer therefore stands still
while frames of ours still wait for the link.

Nothing here trusts a field of the guest's: what fits no rule is ignored or acknowledged again,
and a RST is never answered.
"""

from __future__ import annotations

from math import inf
from typing import Final

from agent_box.netstack.packet import (
    ACK,
    FIN,
    HEAD,
    IP_MAX,
    IP_TCP_SEND,
    LENGTH,
    MTU,
    PSH,
    RST,
    SYN,
    TCP,
    VNET,
    WORDS4,
    fold,
    offer,
)
from agent_box.netstack.wire import SLOT, Wire, cost

# States. Which sides have finished is told by flags of their own.
WAITING: Final = 0  # the guest sent SYN, nobody accepted yet
ANSWERED: Final = 1  # we sent SYN and ACK
CALLING: Final = 2  # we sent SYN
OPEN: Final = 3
DEAD: Final = 4

# What `arrive` and `timer` found, as bits.
DATA: Final = 1  # `arrived` has views, or the guest finished
ROOM: Final = 2  # more may be sent than before
RESET: Final = 4  # the guest reset it, or never answered: DEAD
OPENED: Final = 8

# When the guest is owed an ACK.
LATER: Final = 1  # it may wait a moment for data to go with (RFC 9293 §3.8.6.3)
NOW: Final = 2

MSS: Final = MTU - 40
SCALE: Final = 7  # of the windows that we advertise
SEGMENT_MAX: Final = IP_MAX - 40
RTO_S: Final = 1.0  # RFC 6298 §2.4: the least, and the first
RTO_MAX_S: Final = 8.0  # the link is local: trying again costs one segment
SYN_TRIES: Final = 6
EARLY_MAX: Final = 256  # segments of a flow kept that came before their time
KEPT_MAX: Final = 1024  # segments of a flow kept at a time
SMALL: Final = 8192  # data up to this is copied, so that its 64 KiB slot is free again
BURST: Final = 512 << 10  # sent again at once after a loss; more as it is acknowledged

_M: Final = 0xFFFFFFFF
_HALF: Final = 0x80000000
_SCALE_UNIT: Final = 1 << SCALE
_SCALED: Final = offer(MSS, SCALE)
_UNSCALED: Final = offer(MSS, None)
_IP_SUM: Final = 0x4500 + 0x4000 + 0x4000  # of an IPv4 header's words that are always the same
_SEQ: Final = LENGTH + VNET + 20 + 4  # where a frame has its sequence number


class Tcp:
    """One connection. `key` is as it lies in the guest's packets: addresses, then ports.

    Attributes:
        arrived: views of new data, in order, valid until the next read of the link; the relay
            takes them and says by `taken` what went upstream.
        holding: bytes arrived and not taken.
        finished: the guest has finished its side.
        fin_sent, fin_acked: whether our side is, and whether the guest knows.
        resend: from where on it must be sent again; None: nothing is.
        blocked: `room` said 0; `ROOM` says when to ask again.
        due: `LATER` or `NOW` (at the end of the batch): the guest is owed an ACK; 0: it is not.
        deadline: when `timer` wants to be called.
        segment: the most that one frame brings: whole segments of the guest's size.
        armed: for the keeper of timers alone.
        heard: when it last did anything.
    """

    __slots__ = (
        "_backoff", "_careful", "_dup", "_early", "_ends", "_recover", "_rtx", "_shift", "_shown",
        "_sum", "_tries", "armed", "arrived", "blocked", "deadline", "due", "fin_acked",
        "fin_sent", "finished", "heard", "holding", "key", "mss", "rcv_nxt", "resend", "scaled",
        "segment", "snd_nxt", "snd_una", "snd_wnd", "state", "wire",
    )  # fmt: skip

    def __init__(self, wire: Wire, key: bytes, iss: int) -> None:
        self.wire = wire
        self.key = key
        self.state = WAITING
        self.rcv_nxt = 0
        self.snd_una = iss
        self.snd_nxt = iss
        self.snd_wnd = 0
        self.mss = 536
        self.segment = SEGMENT_MAX // 536 * 536
        self.scaled = False
        self._shift = 0
        self._shown = 0
        self._rtx: list[tuple[int, int, memoryview | bytes, memoryview | None]] | None = None
        self._dup = 0
        self._careful = False
        self._recover: int | None = None
        self._backoff = RTO_S
        self._tries = 0
        self.resend: int | None = None
        self.arrived: list[memoryview] | None = None
        self._early: list[tuple[int, bytes]] | None = None
        self.holding = 0
        self.finished = self.fin_sent = self.fin_acked = False
        self.blocked = False
        self.due = 0
        self.deadline = inf
        self.armed = inf
        self.heard = wire.now
        self._ends = key[4:8] + key[:4] + key[10:12] + key[8:10]
        self._sum = fold(sum(WORDS4.unpack_from(key)) + TCP)

    # -- from the relay

    def called(self, seq: int, mss: int, scale: int | None) -> None:
        """The guest's SYN: nothing is answered before `accept`."""
        self.rcv_nxt = (seq + 1) & _M
        self.options(mss, scale)

    def accept(self) -> None:
        """Upstream accepted: answers the guest's SYN."""
        self.state = ANSWERED
        self.snd_nxt = (self.snd_una + 1) & _M
        self._handshake()

    def call(self) -> None:
        """Opens a connection to the guest."""
        self.state = CALLING
        self.scaled = True
        self.snd_nxt = (self.snd_una + 1) & _M
        self._handshake()

    def room(self) -> int:
        """Bytes that may be sent now. After 0, `ROOM` tells when to ask again."""
        if self.state != OPEN or self.fin_sent:
            return 0
        flight = (self.snd_nxt - self.snd_una) & _M
        wire = self.wire
        most = wire.sending if wire.kept < wire.memory else SMALL
        free = min(self.snd_wnd, most) - flight
        crowded = self._rtx is not None and len(self._rtx) >= KEPT_MAX
        if free <= 0 or (flight and free < self.mss) or crowded or self.resend is not None:
            self.blocked = True
            if not flight:
                self._set_timer()  # nothing under way will bring the window: ask for it
            return 0
        return free if free < self.segment else self.segment

    def whole(self, most: int) -> int:
        """How many segments of full size may be sent now, at most so many, when `room` said that
        there is room.
        """
        wire = self.wire
        if wire.kept >= wire.memory:
            return 0
        free = min(self.snd_wnd, wire.sending) - ((self.snd_nxt - self.snd_una) & _M)
        return min(free // self.segment, KEPT_MAX - len(self._rtx or ()), most)

    def send_whole(self, slots: list[memoryview]) -> None:
        """Sends segments of full size, each the first bytes of a slot, as `send` does.

        They differ in their sequence numbers only, so their headers are made once.
        """
        segment = self.segment
        wire = self.wire
        out = wire.out
        first = seq = self.snd_nxt
        if self._rtx is None:
            self._rtx = []
        head = self._head(seq, ACK | PSH, segment)
        before, after = head[:_SEQ], head[_SEQ + 4 :]
        for slot in slots:
            end = (seq + segment) & _M
            data = slot[:segment]
            self._rtx.append((seq, end, data, slot))
            head = before + seq.to_bytes(4, "big") + after
            out += (head, data)
            if wire.tap is not None:
                wire.tap(head[14:] + bytes(data))
            seq = end
        self.snd_nxt = seq
        wire.queued += (len(head) + segment) * len(slots)
        wire.kept += cost(segment, slots[0]) * len(slots)
        if first == self.snd_una:
            self._set_timer()
        self.heard = wire.now

    def send(self, slot: memoryview, length: int) -> None:
        """Sends the first bytes of a slot, which is given back once they are acknowledged."""
        data: memoryview | bytes
        kept: memoryview | None
        wire = self.wire
        if length <= SMALL:
            data, kept = bytes(slot[:length]), None
            wire.give_back(slot)
        else:
            data, kept = slot[:length], slot
        seq = self.snd_nxt
        self.snd_nxt = end = (seq + length) & _M
        if self._rtx is None:
            self._rtx = []
        self._rtx.append((seq, end, data, kept))
        wire.kept += cost(length, kept)
        self._emit(seq, ACK | PSH, data)
        if seq == self.snd_una:
            self._set_timer()
        self.heard = wire.now

    def finish(self) -> None:
        """Upstream has no more: FIN, after all that was sent."""
        if self.fin_sent or self.state != OPEN:
            return
        self.fin_sent = True
        seq = self.snd_nxt
        self.snd_nxt = (seq + 1) & _M
        if self.resend is None:
            self._emit(seq, FIN | ACK)
        self._set_timer()

    def abort(self) -> None:
        """Resets it towards the guest, and is DEAD."""
        if self.state in (ANSWERED, OPEN):
            self._emit(self.snd_nxt, RST | ACK)
        elif self.state == WAITING:
            self._emit(0, RST | ACK)
        elif self.state == CALLING:
            self._emit(self.snd_nxt, RST)
        self.die()

    def die(self) -> None:
        """Forgets everything, without a word to the guest."""
        self.state = DEAD
        self.deadline = inf
        wire = self.wire
        if self.armed is not inf:
            wire.disarm(self)
        if self._rtx:
            for seq, end, _, slot in self._rtx:
                wire.kept -= cost((end - seq) & _M, slot)
                if slot is not None:
                    wire.give_back(slot)
        self._rtx = None
        wire.held -= self.holding + sum(len(data) for _, data in self._early or ())
        self.holding = 0
        self.arrived = self._early = None

    def taken(self, count: int) -> None:
        """Upstream took bytes. The guest hears of it once the window opened by half, and with
        the ACK that it is owed in any case.
        """
        self.holding -= count
        self.wire.held -= count
        if self.state == OPEN and not self.finished and not self.due:
            free = self._free()
            gain = free - self._shown
            if gain >= self.wire.window >> 1 or (
                self._shown < self.mss and gain >= min(self.mss, SLOT >> 1)
            ):
                self._emit(self.snd_nxt, ACK)

    def acknowledge(self) -> None:
        """Sends the ACK that is due."""
        self.due = 0
        if self.state == OPEN:
            self._emit(self.snd_nxt, ACK)

    def probe(self) -> None:
        """Makes the guest speak: an ACK for what it has (RFC 9293 §3.8.4), or a RST."""
        self._emit((self.snd_una - 1) & _M, ACK)

    def again(self, most: int) -> bool:
        """Sends again what was lost, at most about `most` bytes of it now.

        Returns:
            Whether there is more that may go at once.
        """
        at = self.resend
        if at is None or self.state != OPEN:
            return False
        una = self.snd_una
        # What the guest can take, and not all of it at once: a burst was lost already. After a
        # timeout the way may be shut, so one segment goes until something is acknowledged.
        edge = max(self.snd_wnd, 1)
        limit = min(edge, 1 if self._careful else BURST)
        sent = 0
        for seq, end, data, _ in self._rtx or ():
            skip = (at - seq) & _M
            if skip >= _HALF:
                skip = 0
            elif skip >= (end - seq) & _M:
                continue
            start = (seq + skip) & _M
            if (start - una) & _M >= limit:
                self.resend = start
                return False
            if sent >= most:
                self.resend = start
                return True
            fit = min(len(data) - skip, edge - ((start - una) & _M))
            self._emit(start, ACK | PSH, data[skip : skip + fit] if fit < len(data) else data)
            sent += fit
            if fit < len(data) - skip:  # as far as the window reaches
                self.resend = (start + fit) & _M
                return False
        self.resend = None
        if self.fin_sent and not self.fin_acked:
            self._emit((self.snd_nxt - 1) & _M, FIN | ACK)
        return False

    def options(self, mss: int, scale: int | None) -> None:
        """What the guest's SYN offered."""
        self.mss = mss = MSS if mss >= MSS else max(mss, 64)
        self.segment = mss if mss == MSS else SEGMENT_MAX // mss * mss
        self.scaled = scale is not None
        self._shift = scale or 0

    def nudge(self) -> None:
        """The way to the guest is new: what is unanswered is tried at once."""
        self._backoff = RTO_S
        self._tries = 0
        if self.deadline is not inf:
            self.deadline = self.wire.now
            if self.deadline < self.armed:
                self.wire.arm(self)

    # -- from the guest

    def arrive(
        self, seq: int, ack: int, flags: int, window: int, payload: memoryview | None
    ) -> int:
        """Takes one segment; all of it is the guest's and untrusted. Returns bits."""
        if self.state != OPEN:
            return self._before(seq, ack, flags, window, payload)
        if flags & (SYN | RST):
            if flags & RST:
                # In the window counts: only the guest itself is on this link.
                if (seq - self.rcv_nxt) & _M > self._shown:
                    return 0
                self.die()
                return RESET
            self._emit(self.snd_nxt, ACK)  # RFC 5961 §4: challenge
            return 0
        if not flags & ACK:
            return 0
        wire = self.wire
        found = 0
        una = self.snd_una
        window <<= self._shift
        ahead = (ack - una) & _M
        if ahead:
            if ahead <= (self.snd_nxt - una) & _M:
                self._acked(ack)
                self.snd_wnd = window
                found = ROOM
            elif ahead < _HALF:
                self._emit(self.snd_nxt, ACK)  # of what was never sent
                return 0
        else:
            if window > self.snd_wnd:
                found = ROOM
            elif window == self.snd_wnd and payload is None and self._rtx and not flags & FIN:
                self._dup += 1
                if self._dup == 3 and self._recover is None:
                    self._recover = self.snd_nxt
                    self.resend = una
                    found = ROOM
            self.snd_wnd = window
        if payload is None and not flags & FIN:
            if (self.rcv_nxt - seq) & _M == 1:
                self.due = NOW  # a keepalive
                found |= DATA
            return found
        self.heard = wire.now
        length = 0 if payload is None else len(payload)
        ahead = (seq - self.rcv_nxt) & _M
        old = (-ahead) & _M
        if ahead:
            if ahead < _HALF:  # a gap: each such segment is answered, so that the guest counts
                if payload is not None and not self.finished:
                    self._keep(ahead, payload)
                self._emit(self.snd_nxt, ACK)
                return found
            if old >= length + (flags & FIN) or payload is None:
                self.due = NOW  # all known
                return found | DATA
            payload = payload[old:]
            length -= old
        if self.finished:
            self.due = NOW
            return found | DATA
        whole = True
        if length > self._shown:
            length = self._shown
            whole = False
        if length and wire.held >= wire.memory:
            # Nothing, or a little for one that holds nothing, so that each gets on.
            most = 0 if self.holding else SMALL
            whole = whole and length <= most
            length = min(length, most)
        if length and payload is not None:
            if self.arrived is None:
                self.arrived = []
            self.arrived.append(payload if whole else payload[:length])
            self.holding += length
            wire.held += length
            self.rcv_nxt = (self.rcv_nxt + length) & _M
            self._shown -= length
            if self._early is not None:
                self._join(self._early, self.arrived)
                whole = whole and self.rcv_nxt == (seq + old + length) & _M
        if flags & FIN and whole:
            self.finished = True
            self.rcv_nxt = (self.rcv_nxt + 1) & _M
        alone = whole and length <= SMALL and not self.due and self._early is None
        self.due = LATER if alone else NOW
        return found | DATA

    def timer(self) -> int:
        """The deadline passed. Returns bits."""
        wire = self.wire
        if self.state in (ANSWERED, CALLING):
            self._tries += 1
            if self._tries >= SYN_TRIES:
                self.abort()
                return RESET
            self._handshake()
            return 0
        self.deadline = inf
        if self.state != OPEN:
            return 0
        if self.snd_una == self.snd_nxt and not self.blocked:
            return 0
        if wire.out:  # the guest has not even read it yet
            self._set_timer()
            return 0
        self._backoff = min(self._backoff * 2, RTO_MAX_S)
        self._set_timer()
        if self.snd_una == self.snd_nxt or not self.snd_wnd:
            self.probe()
            return 0
        self._recover = self.snd_nxt
        self._careful = True
        self.resend = self.snd_una
        return ROOM

    # -- inside

    def _keep(self, ahead: int, payload: memoryview) -> None:
        """Holds what came before its time: the guest's kernel counts on it when it sends again.

        A FIN there does not count; it comes again.
        """
        wire = self.wire
        if ahead + len(payload) > self._shown or wire.held >= wire.memory:
            return
        early = self._early
        if early is None:
            early = self._early = []
        if len(early) >= EARLY_MAX:
            return
        at = len(early)
        while at and (early[at - 1][0] - self.rcv_nxt) & _M >= ahead:
            at -= 1
        seq = (self.rcv_nxt + ahead) & _M
        if at < len(early) and early[at][0] == seq and len(early[at][1]) >= len(payload):
            return
        early.insert(at, (seq, bytes(payload)))
        wire.held += len(payload)

    def _join(self, early: list[tuple[int, bytes]], arrived: list[memoryview]) -> None:
        """Takes what follows now without a gap."""
        wire = self.wire
        done = 0
        for seq, data in early:
            known = (self.rcv_nxt - seq) & _M
            if known >= _HALF:
                break
            done += 1
            wire.held -= len(data)
            fresh = len(data) - known
            if fresh > 0:
                arrived.append(memoryview(data)[known:])
                self.holding += fresh
                wire.held += fresh
                self.rcv_nxt = (self.rcv_nxt + fresh) & _M
                self._shown -= fresh
        del early[:done]
        if not early:
            self._early = None

    def _before(
        self, seq: int, ack: int, flags: int, window: int, payload: memoryview | None
    ) -> int:
        if flags & RST:
            known = self.state != CALLING or (flags & ACK and ack == self.snd_nxt)
            if self.state == DEAD or not known:
                return 0
            self.die()
            return RESET
        if self.state == CALLING:
            if flags & (SYN | ACK) != SYN | ACK or ack != self.snd_nxt:
                return 0
            self.rcv_nxt = (seq + 1) & _M
            self._opened(ack, window)
            self._emit(self.snd_nxt, ACK)
            return OPENED | ROOM
        if self.state != ANSWERED:
            return 0
        if flags & SYN:
            if (seq + 1) & _M == self.rcv_nxt:
                self._handshake()
            return 0
        if not flags & ACK or ack != self.snd_nxt or (seq - self.rcv_nxt) & _M > self._shown:
            return 0
        self._opened(ack, window << self._shift)
        if payload is None and not flags & FIN:
            return OPENED | ROOM
        return OPENED | ROOM | self.arrive(seq, ack, flags, window, payload)

    def _opened(self, ack: int, window: int) -> None:
        self.state = OPEN
        self.snd_una = ack
        self.snd_wnd = window
        self._backoff = RTO_S
        self.deadline = inf
        self.heard = self.wire.now

    def _handshake(self) -> None:
        flags = SYN | ACK if self.state == ANSWERED else SYN
        self._emit((self.snd_nxt - 1) & _M, flags, b"", _SCALED if self.scaled else _UNSCALED)
        self.deadline = self.wire.now + RTO_S * 2**self._tries
        if self.deadline < self.armed:
            self.wire.arm(self)

    def _acked(self, ack: int) -> None:
        wire = self.wire
        rtx = self._rtx
        if rtx:
            done = 0
            for seq, end, _, slot in rtx:
                if (ack - end) & _M >= _HALF:
                    break
                done += 1
                wire.kept -= cost((end - seq) & _M, slot)
                if slot is not None:
                    wire.give_back(slot)
            if done == len(rtx):
                self._rtx = None
            elif done:
                del rtx[:done]
        self.snd_una = ack
        self._careful = False
        self._dup = 0
        self._backoff = RTO_S
        self.heard = wire.now
        if self._recover is not None and (ack - self._recover) & _M < _HALF:
            self._recover = None
        if self.resend is not None and (ack - self.resend) & _M < _HALF:
            self.resend = ack
        if ack == self.snd_nxt:
            self.deadline = inf
            self.resend = None
            if self.fin_sent:
                self.fin_acked = True
        else:
            self._set_timer()

    def _set_timer(self) -> None:
        self.deadline = self.wire.now + self._backoff
        if self.deadline < self.armed:
            self.wire.arm(self)

    def _free(self) -> int:
        """Bytes that we would take now: little when the instance holds much already."""
        wire = self.wire
        most = wire.window if wire.held < wire.memory >> 1 else SLOT
        free = most - self.holding
        return free if free > 0 else 0

    def _emit(
        self, seq: int, flags: int, payload: memoryview | bytes = b"", options: bytes = b""
    ) -> None:
        length = len(payload)
        head = self._head(seq, flags, length, options)
        wire = self.wire
        wire.out.append(head)
        wire.queued += len(head) + length
        if length:
            wire.out.append(payload)
        if wire.tap is not None:
            wire.tap(head[14:] + bytes(payload))

    def _head(self, seq: int, flags: int, length: int, options: bytes = b"") -> bytes:
        """All of a frame before its data, which is to be sent next: it shows the window."""
        header = 20 + len(options)
        total = 20 + header + length
        free = self._free()
        if free > self._shown:  # the edge that was shown once is never taken back
            self._shown = free & -_SCALE_UNIT if self.scaled else min(free, 0xFFFF)
        if flags & ACK:
            self.due = 0
        if flags & SYN:
            self._shown = min(self._shown, 0xFFFF)
            window = self._shown
        else:
            window = self._shown >> SCALE if self.scaled else self._shown
        if length > self.mss:
            vnet = HEAD.pack(VNET + total, 1, 1, 20 + header, self.mss, 20, 16)
        else:
            vnet = HEAD.pack(VNET + total, 1, 0, 20 + header, 0, 20, 16)
        ip_sum = self._sum + _IP_SUM + total
        ip_sum = (ip_sum & 0xFFFF) + (ip_sum >> 16)
        ip_sum = ~(ip_sum + (ip_sum >> 16)) & 0xFFFF
        pseudo = self._sum + header + length
        pseudo = (pseudo & 0xFFFF) + (pseudo >> 16)
        return vnet + IP_TCP_SEND.pack(
            0x4500, total, 0x4000, 0x4000 | TCP, ip_sum, self._ends, seq,
            self.rcv_nxt if flags & ACK else 0, header << 10 | flags, window, pseudo,
        ) + options  # fmt: skip
