"""The virtio-vsock protocol as a host speaks it that alone opens connections. No I/O.

Source: Virtual I/O Device (VIRTIO) 1.2, 5.10, and what Linux's driver does with it. A stream
has two ends: the guest's, which this module keeps, and the host's, which `device` keeps. A
packet of the guest goes into `Table.packet`, which answers with what to do at the host's end;
what happens at the host's end goes into the other methods; what has to be said to the guest
comes out of `Table.control`.

Credit. We tell the guest a window of bytes that we are ready to keep for a stream, and how
many we have passed on. It never may have more than the window on the way, so memory is
bounded by the sum of the windows. The first streams get a large one, the others a small one.

Closing. To a guest that has unread data a RST loses it, so once both sides of a stream were
shut by us it *lingers* until the guest closes its end. A guest that never does loses the
oldest such streams when the table is full.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from typing import Any, Final

HEADER_BYTES: Final = 44
header = struct.Struct("<QQIIIHHIII")
"""src_cid dst_cid src_port dst_port len type op flags buf_alloc fwd_cnt"""

REQUEST: Final = 1
RESPONSE: Final = 2
RST: Final = 3
SHUTDOWN: Final = 4
RW: Final = 5
CREDIT_UPDATE: Final = 6
CREDIT_REQUEST: Final = 7

TYPE_STREAM: Final = 1
HOST_CID: Final = 2
NO_RECEIVE: Final = 1  # flags of SHUTDOWN: the sender will not receive, or not send, any more
NO_SEND: Final = 2
BOTH: Final = 3

LARGE_WINDOW: Final = 256 << 10
SMALL_WINDOW: Final = 32 << 10
LARGE_STREAMS: Final = 64
CREDIT_STEP: Final = 32 << 10
MAX_STREAMS: Final = 4096
MAX_RESETS: Final = 1024  # waiting to be told; the device reads no packets above that

_FIRST_PORT: Final = 1 << 30
_LAST_PORT: Final = 0xFFFFFF00
_U32: Final = 0xFFFFFFFF

# What `packet` asks for at the host's end, as bits.
OPENED: Final = 1  # the guest accepted: tell the client
DATA: Final = 2  # pass on the payload and call `forwarded`
CREDIT: Final = 4  # the guest may have more room now
FINISH: Final = 8  # nothing more will come: shut the writing side when all is written
DEAF: Final = 16  # the guest will not read: read no more from the client
GONE: Final = 32  # the guest's end is no more: write what is kept, then close

_CONNECTING: Final = 0
_OPEN: Final = 1
_GONE: Final = 2

# What has to be told to the guest, as bits.
_TELL_REQUEST: Final = 1
_TELL_SHUT: Final = 2
_TELL_CREDIT: Final = 4


class Full(Exception):
    """There is no room for another stream."""


class Stream:
    """The guest's end of one stream. To others, only what is named here is of interest.

    Attributes:
        guest_port: the port in the guest.
        host_port: ours, which tells streams to the same port apart.
        window: bytes of the guest's that we are ready to keep.
        host: whatever the device hangs on it; None when the host's end is closed.
    """

    __slots__ = (
        "_forwarded",
        "_guest_shut",
        "_large",
        "_peer_alloc",
        "_peer_forwarded",
        "_received",
        "_sent",
        "_shut",
        "_state",
        "_step",
        "_tell",
        "_told",
        "guest_port",
        "host",
        "host_port",
        "window",
    )

    def __init__(self, guest_port: int, host_port: int, large: bool) -> None:
        self.guest_port = guest_port
        self.host_port = host_port
        self.window = LARGE_WINDOW if large else SMALL_WINDOW
        self.host: Any = None
        self._large = large
        self._step = min(CREDIT_STEP, self.window // 4)
        self._state = _CONNECTING
        self._received = 0  # bytes from the guest
        self._forwarded = 0  # of these, passed on
        self._told = 0  # of these, told to the guest
        self._sent = 0  # bytes to the guest
        self._peer_alloc = 0
        self._peer_forwarded = 0
        self._shut = 0  # what we told the guest, flags of SHUTDOWN
        self._guest_shut = 0  # what it told us
        self._tell = 0

    @property
    def open(self) -> bool:
        """Whether data may be sent to the guest or come from it."""
        return self._state == _OPEN

    @property
    def gone(self) -> bool:
        """Whether the guest's end is no more."""
        return self._state == _GONE

    @property
    def finished(self) -> bool:
        """Whether the guest has sent all that it will send."""
        return self._state == _GONE or self._guest_shut & NO_SEND != 0

    def credit(self) -> int:
        """How many bytes may be sent to the guest now, never less than 0."""
        if self._state != _OPEN or self._shut & NO_SEND or self._guest_shut & NO_RECEIVE:
            return 0
        room = self._peer_alloc - ((self._sent - self._peer_forwarded) & _U32)
        return room if room > 0 else 0


class Table:
    """All streams of one machine.

    Attributes:
        guest_cid: the guest's address.
        refused: connections that the guest tried to start.
        violations: packets that broke the protocol of an open stream, each of which ended it.
        strays: packets that belonged to nothing.
    """

    def __init__(self, guest_cid: int, *, limit: int = MAX_STREAMS) -> None:
        self.guest_cid = guest_cid
        self.refused = 0
        self.violations = 0
        self.strays = 0
        self.evicted = 0
        self.opened = 0
        self._limit = limit
        self._streams: dict[tuple[int, int], Stream] = {}  # by guest and host port
        self._lingering: OrderedDict[tuple[int, int], Stream] = OrderedDict()
        self._large = 0
        self._next_port = _FIRST_PORT
        self._waiting: OrderedDict[Stream, None] = OrderedDict()  # with something to tell
        self._resets: deque[tuple[int, int, int]] = deque()  # guest port, host port, type

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def congested(self) -> bool:
        """Whether no packet of the guest may be read before the guest takes what waits."""
        return len(self._resets) >= MAX_RESETS

    @property
    def has_control(self) -> bool:
        """Whether `control` has something to say."""
        return bool(self._resets or self._waiting)

    # ---- the host's end

    def open(self, guest_port: int) -> Stream:
        """Starts a stream to a port of the guest.

        Raises:
            Full: as many as there may be are open.
        """
        if len(self._streams) >= self._limit:
            if not self._lingering:
                raise Full
            key, oldest = next(iter(self._lingering.items()))
            self._resets.append((*key, TYPE_STREAM))
            self._remove(oldest)
            self.evicted += 1
        port = self._next_port
        while (guest_port, port) in self._streams:  # ends: there are fewer streams than ports
            port = port + 1 if port < _LAST_PORT else _FIRST_PORT
        self._next_port = port + 1 if port < _LAST_PORT else _FIRST_PORT
        large = self._large < LARGE_STREAMS
        self._large += large
        stream = Stream(guest_port, port, large)
        self._streams[guest_port, port] = stream
        self._later(stream, _TELL_REQUEST)
        self.opened += 1
        return stream

    def sent(self, stream: Stream, count: int) -> None:
        """`count` bytes went to the guest, each packet with a header of `write_header`."""
        stream._sent += count
        stream._told = stream._forwarded  # the headers said so

    def forwarded(self, stream: Stream, count: int) -> None:
        """`count` more bytes of the guest's have reached the client, or are thrown away."""
        stream._forwarded += count
        if stream._forwarded - stream._told >= stream._step and stream._state == _OPEN:
            self._later(stream, _TELL_CREDIT)

    def host_ended(self, stream: Stream) -> None:
        """The client will send nothing more, and all that it sent has gone to the guest."""
        self._shut(stream, NO_SEND)

    def host_deaf(self, stream: Stream) -> None:
        """The client will not read any more."""
        self._shut(stream, NO_RECEIVE)

    def abort(self, stream: Stream) -> None:
        """Ends a stream at once; data that the guest has not read is lost to it."""
        if stream._state == _GONE:
            return
        if stream._state == _OPEN or not stream._tell & _TELL_REQUEST:
            self._resets.append((stream.guest_port, stream.host_port, TYPE_STREAM))
        self._remove(stream)

    def host_closed(self, stream: Stream) -> None:
        """The host's end is closed; what came for it from now on is to be thrown away."""
        if stream.host is not None:
            stream.host = None
            if stream._state == _GONE:
                self._large -= stream._large

    def forget(self) -> list[Stream]:
        """The guest's driver began anew and knows of nothing.

        Returns:
            The streams that were.
        """
        streams = list(self._streams.values())
        for stream in streams:
            self._remove(stream)
        self._resets.clear()
        self._waiting.clear()
        return streams

    # ---- the guest's end

    def packet(self, untrusted: tuple[int, ...], payload: int) -> tuple[Stream | None, int]:
        """A packet of the guest's.

        Args:
            untrusted: the fields of its header, copied from the guest's memory.
            payload: how many bytes its buffers hold behind the header.

        Returns:
            The stream it belongs to, and what to do: bits `OPENED` … `GONE`. With `DATA`, the
            first ``len`` bytes of the payload are to be passed on.
        """
        source, target, guest_port, host_port, length, kind, op, flags, alloc, passed = untrusted
        if source != self.guest_cid or target != HOST_CID:
            self.strays += 1
            return None, 0
        stream = self._streams.get((guest_port, host_port))
        if stream is None or kind != TYPE_STREAM:
            if op == REQUEST:
                self.refused += 1
            elif op != RST:
                self.strays += 1
            if op != RST:
                self._resets.append((guest_port, host_port, kind))
            return None, 0
        if op == RST:
            self._remove(stream)
            return stream, GONE
        connecting = stream._state == _CONNECTING
        if connecting != (op == RESPONSE) or (connecting and stream._tell & _TELL_REQUEST):
            return self._violation(stream)
        stream._peer_alloc = alloc
        stream._peer_forwarded = passed
        if op == RW:
            if (
                length > payload
                or stream._guest_shut & NO_SEND
                or stream._received + length - stream._forwarded > stream.window
            ):
                return self._violation(stream)
            stream._received += length
            return stream, DATA | CREDIT
        if op == CREDIT_UPDATE:
            return stream, CREDIT
        if op == CREDIT_REQUEST:
            self._later(stream, _TELL_CREDIT)
            return stream, CREDIT
        if op == SHUTDOWN:
            return self._shut_by_guest(stream, flags & BOTH)
        if op == RESPONSE:
            stream._state = _OPEN
            return stream, OPENED | CREDIT
        return self._violation(stream)

    def control(self) -> bytes | None:
        """The next packet without data for the guest; None when there is none."""
        if self._resets:
            guest_port, host_port, kind = self._resets.popleft()
            return header.pack(
                HOST_CID, self.guest_cid, host_port, guest_port, 0, kind, RST, 0, 0, 0
            )
        if self._waiting:
            stream, _ = self._waiting.popitem(last=False)
            tell, stream._tell = stream._tell, 0
            # One packet says it all: credit goes with any, and nothing can be added to a
            # request, because a stream that is not open has nothing else to tell.
            if tell & _TELL_REQUEST:
                return self._pack(stream, REQUEST, 0)
            if tell & _TELL_SHUT:
                return self._pack(stream, SHUTDOWN, stream._shut)
            return self._pack(stream, CREDIT_UPDATE, 0)
        return None

    def write_header(self, target: memoryview, stream: Stream, length: int) -> None:
        """Writes the header of a packet with `length` bytes of data to the guest."""
        header.pack_into(
            target,
            0,
            HOST_CID,
            self.guest_cid,
            stream.host_port,
            stream.guest_port,
            length,
            TYPE_STREAM,
            RW,
            0,
            stream.window,
            stream._forwarded & _U32,
        )

    # ---- inside

    def _pack(self, stream: Stream, op: int, flags: int) -> bytes:
        stream._told = stream._forwarded
        return header.pack(
            HOST_CID,
            self.guest_cid,
            stream.host_port,
            stream.guest_port,
            0,
            TYPE_STREAM,
            op,
            flags,
            stream.window,
            stream._forwarded & _U32,
        )

    def _later(self, stream: Stream, tell: int) -> None:
        stream._tell |= tell
        self._waiting[stream] = None

    def _shut(self, stream: Stream, flags: int) -> None:
        """Shuts ways of an open stream. The guest ends it when it has read all."""
        if stream._state != _OPEN or stream._shut & flags == flags:
            return
        stream._shut |= flags
        self._later(stream, _TELL_SHUT)
        if stream._shut == BOTH:
            self._lingering[stream.guest_port, stream.host_port] = stream

    def _shut_by_guest(self, stream: Stream, flags: int) -> tuple[Stream, int]:
        stream._guest_shut |= flags  # Linux sends one flag after the other
        if stream._guest_shut == BOTH:
            # It waits for this RST. What it sent before lies at the host's end.
            self._resets.append((stream.guest_port, stream.host_port, TYPE_STREAM))
            self._remove(stream)
            return stream, GONE
        effect = CREDIT
        if stream._guest_shut & NO_SEND:
            effect |= FINISH
        if stream._guest_shut & NO_RECEIVE:
            effect |= DEAF
        return stream, effect

    def _violation(self, stream: Stream) -> tuple[Stream, int]:
        self.violations += 1
        self._resets.append((stream.guest_port, stream.host_port, TYPE_STREAM))
        self._remove(stream)
        return stream, GONE

    def _remove(self, stream: Stream) -> None:
        key = (stream.guest_port, stream.host_port)
        if self._streams.pop(key, None) is None:
            return
        self._lingering.pop(key, None)
        if stream.host is None:  # else its client may still have to read a window full
            self._large -= stream._large
        self._waiting.pop(stream, None)
        stream._state = _GONE
        stream._tell = 0
