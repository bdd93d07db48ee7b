"""The vhost-user protocol, from the back end's side. No I/O.

Source: QEMU's docs/interop/vhost-user.rst. What comes in are bytes and descriptors of the
VMM, hostile after an escape: sizes, numbers of descriptors, indices and bounds are checked
here, addresses by `ring`, and what a descriptor really is by `device`. The first message that
is wrong ends the link, for an honest VMM sends none.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

QUEUES: Final = 2
RX: Final = 0  # to the guest
TX: Final = 1
MAX_REGIONS: Final = 8
MAX_PAYLOAD: Final = 512
MAX_FDS: Final = MAX_REGIONS
MAX_MEMORY: Final = 1 << 44  # bytes, in all regions

F_VERSION_1: Final = 1 << 32
F_PROTOCOL: Final = 1 << 30
FEATURES: Final = F_VERSION_1 | F_PROTOCOL
P_REPLY_ACK: Final = 1 << 3
P_CONFIG: Final = 1 << 9
PROTOCOL_FEATURES: Final = P_REPLY_ACK | P_CONFIG

GET_FEATURES: Final = 1
SET_FEATURES: Final = 2
SET_OWNER: Final = 3
RESET_OWNER: Final = 4
SET_MEM_TABLE: Final = 5
SET_VRING_NUM: Final = 8
SET_VRING_ADDR: Final = 9
SET_VRING_BASE: Final = 10
GET_VRING_BASE: Final = 11
SET_VRING_KICK: Final = 12
SET_VRING_CALL: Final = 13
SET_VRING_ERR: Final = 14
GET_PROTOCOL_FEATURES: Final = 15
SET_PROTOCOL_FEATURES: Final = 16
GET_QUEUE_NUM: Final = 17
SET_VRING_ENABLE: Final = 18
GET_CONFIG: Final = 24

_head: Final = struct.Struct("<III")
_u64: Final = struct.Struct("<Q")
_state: Final = struct.Struct("<II")
_address: Final = struct.Struct("<IIQQQQ")
_table: Final = struct.Struct("<II")
_region: Final = struct.Struct("<QQQQ")
_config: Final = struct.Struct("<III")
_VERSION: Final = 1
_REPLY: Final = 4
_NEED_REPLY: Final = 8
_NO_FD: Final = 1 << 8
_CONFIG_MAX: Final = 256

# Request: smallest and largest payload, most descriptors.
_SHAPES: Final[dict[int, tuple[int, int, int]]] = {
    GET_FEATURES: (0, 0, 0),
    SET_FEATURES: (8, 8, 0),
    SET_OWNER: (0, 0, 0),
    RESET_OWNER: (0, 0, 0),
    SET_MEM_TABLE: (8, 8 + 32 * MAX_REGIONS, MAX_REGIONS),
    SET_VRING_NUM: (8, 8, 0),
    SET_VRING_ADDR: (40, 40, 0),
    SET_VRING_BASE: (8, 8, 0),
    GET_VRING_BASE: (8, 8, 0),
    SET_VRING_KICK: (8, 8, 1),
    SET_VRING_CALL: (8, 8, 1),
    SET_VRING_ERR: (8, 8, 1),
    GET_PROTOCOL_FEATURES: (0, 0, 0),
    SET_PROTOCOL_FEATURES: (8, 8, 0),
    GET_QUEUE_NUM: (0, 0, 0),
    SET_VRING_ENABLE: (8, 8, 0),
    GET_CONFIG: (12, 12 + _CONFIG_MAX, 0),
}
_ANSWERED: Final = {
    GET_FEATURES,
    GET_VRING_BASE,
    GET_PROTOCOL_FEATURES,
    GET_QUEUE_NUM,
    GET_CONFIG,
}


class LinkError(Exception):
    """The VMM broke the protocol. One line."""


class Message(NamedTuple):
    request: int
    flags: int
    payload: bytes
    fds: list[int]


class Shared(NamedTuple):
    """A region of the guest's memory that is to be mapped.

    Attributes:
        guest: address in the guest.
        user: address in the VMM's process.
        size: bytes.
        offset: where in the file it begins, bytes.
        fd: the file.
    """

    guest: int
    user: int
    size: int
    offset: int
    fd: int


class Map(NamedTuple):
    """Map these, and let go of what was mapped before."""

    regions: tuple[Shared, ...]


class Kick(NamedTuple):
    """The driver rings here when a queue has something new. The old bell is no more."""

    queue: int
    fd: int


class Call(NamedTuple):
    """Where to interrupt the driver; None: nowhere."""

    queue: int
    fd: int | None


class Discard(NamedTuple):
    """A descriptor without use."""

    fd: int


class Start(NamedTuple):
    """A queue is set up and may be used.

    Attributes:
        fresh: it is not the one that was stopped: the driver began anew.
    """

    queue: int
    size: int
    desc: int
    avail: int
    used: int
    base: int
    fresh: bool


class Enable(NamedTuple):
    """Whether a queue may be used, while it stays set up."""

    queue: int
    on: bool


class Stop(NamedTuple):
    """Use a queue no more, and call `Link.stopped`."""

    queue: int


Action = Map | Kick | Call | Discard | Start | Enable | Stop


class Parser:
    """Cuts what the VMM sends into messages.

    `wants` says how much may be read, so that no byte of the next message, and with it no
    descriptor, is ever taken for this one's.
    """

    def __init__(self) -> None:
        self._data = b""
        self._fds: list[int] = []
        self._size = _head.size

    def wants(self) -> int:
        """How many bytes are missing, at least 1."""
        return self._size - len(self._data)

    def feed(self, untrusted: bytes, fds: list[int]) -> Message | None:
        """Takes up to `wants` bytes, and owns `fds` from then on.

        Returns:
            The message, when it is complete.

        Raises:
            LinkError: no message begins like this. `take_fds` gives the descriptors back.
        """
        self._data += untrusted
        self._fds += fds
        if len(self._fds) > MAX_FDS:
            raise LinkError("too many descriptors")
        if len(self._data) < self._size:
            return None
        request, flags, size = _head.unpack_from(self._data)
        if self._size == _head.size:
            shape = _SHAPES.get(request)
            if shape is None:
                raise LinkError(f"unknown message {request}")
            if flags & ~_NEED_REPLY != _VERSION:
                raise LinkError(f"message {request} with flags {flags:#x}")
            if not shape[0] <= size <= shape[1]:
                raise LinkError(f"message {request} of {size} bytes")
            self._size += size
            if size:
                return None
        if len(self._fds) > _SHAPES[request][2]:
            raise LinkError(f"message {request} with {len(self._fds)} descriptors")
        message = Message(request, flags, self._data[_head.size :], self._fds)
        self._data, self._fds, self._size = b"", [], _head.size
        return message

    def take_fds(self) -> list[int]:
        """Descriptors of a message that will never be complete."""
        fds, self._fds = self._fds, []
        return fds


class _Ring:
    def __init__(self) -> None:
        self.size = 0
        self.base = 0
        self.addresses: tuple[int, int, int] | None = None  # desc, avail, used
        self.started = False
        self.last: tuple[int, int, tuple[int, int, int] | None] | None = None


class Link:
    """What the VMM has said so far, and what follows from it."""

    def __init__(self, guest_cid: int) -> None:
        self._config = _u64.pack(guest_cid)
        self._rings = [_Ring() for _ in range(QUEUES)]
        self._mapped = False
        self._acks = False

    def message(self, message: Message) -> tuple[list[Action], bytes]:
        """What to do, in order, and then what to answer (empty: nothing).

        Every descriptor of the message is in one of the actions. After a `Stop` the answer
        comes from `stopped`.

        Raises:
            LinkError: the message is wrong; its descriptors are still the caller's.
        """
        request, flags, payload, fds = message
        actions: list[Action] = []
        if request in _ANSWERED:
            if request == GET_VRING_BASE:
                index, _ = _state.unpack(payload)
                self._ring(index)
                return [Stop(index)], b""
            return actions, self._answer(request, payload)
        if request == SET_FEATURES:
            if _u64.unpack(payload)[0] & ~FEATURES:
                raise LinkError("features that were not offered")
        elif request == SET_PROTOCOL_FEATURES:
            chosen = _u64.unpack(payload)[0]
            if chosen & ~PROTOCOL_FEATURES:
                raise LinkError("protocol features that were not offered")
            self._acks = bool(chosen & P_REPLY_ACK)
        elif request == SET_MEM_TABLE:
            actions.append(Map(self._regions(payload, fds)))
            self._mapped = True
            # Rings that run are looked up again in the new table.
            actions += [
                self._start(i, ring, fresh=False)
                for i, ring in enumerate(self._rings)
                if ring.started
            ]
        elif request in (SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR):
            self._bell(request, payload, fds, actions)
        elif request in (SET_VRING_NUM, SET_VRING_BASE, SET_VRING_ENABLE):
            index, value = _state.unpack(payload)
            ring = self._ring(index)
            if request == SET_VRING_ENABLE:
                actions.append(Enable(index, value != 0))
            elif ring.started:
                raise LinkError("a queue that is in use was changed")
            elif request == SET_VRING_NUM:
                ring.size = value
            else:
                if value > 0xFFFF:
                    raise LinkError("an impossible index")
                ring.base = value
        elif request == SET_VRING_ADDR:
            index, dirty_log, desc, used, avail, _ = _address.unpack(payload)
            ring = self._ring(index)
            if dirty_log:
                raise LinkError("a dirty log was asked for")
            if ring.started and ring.addresses != (desc, avail, used):
                raise LinkError("a queue that is in use was changed")
            ring.addresses = (desc, avail, used)
        answer = b""
        if flags & _NEED_REPLY and self._acks:
            answer = _reply(request, _u64.pack(0))
        return actions, answer

    def stopped(self, queue: int, base: int | None) -> bytes:
        """The answer to a `Stop` that was done.

        Args:
            base: index of the next available entry; None when the queue was not running.
        """
        ring = self._rings[queue]
        ring.last = None
        if base is not None:
            ring.base = base
            ring.last = (base, ring.size, ring.addresses)
        ring.started = False
        return _reply(GET_VRING_BASE, _state.pack(queue, ring.base))

    def _ring(self, index: int) -> _Ring:
        if index >= QUEUES:
            raise LinkError(f"there is no queue {index}")
        return self._rings[index]

    def _answer(self, request: int, payload: bytes) -> bytes:
        if request == GET_FEATURES:
            return _reply(request, _u64.pack(FEATURES))
        if request == GET_PROTOCOL_FEATURES:
            return _reply(request, _u64.pack(PROTOCOL_FEATURES))
        if request == GET_QUEUE_NUM:
            return _reply(request, _u64.pack(QUEUES))
        offset, size, _ = _config.unpack_from(payload)
        if size != len(payload) - _config.size or offset + size > _CONFIG_MAX:
            raise LinkError("a question about the configuration that contradicts itself")
        found = self._config[offset : offset + size].ljust(size, b"\0")
        return _reply(request, payload[: _config.size] + found)

    def _regions(self, payload: bytes, fds: list[int]) -> tuple[Shared, ...]:
        count, _ = _table.unpack_from(payload)
        if not 0 < count <= MAX_REGIONS or len(fds) != count:
            raise LinkError(f"{count} regions with {len(fds)} descriptors")
        if len(payload) < _table.size + count * _region.size:
            raise LinkError("a table of memory that is cut off")
        regions = []
        for i, fd in enumerate(fds):
            guest, size, user, offset = _region.unpack_from(payload, _table.size + 32 * i)
            if not size or max(guest, user, offset) + size > 1 << 64:
                raise LinkError("a region that cannot be")
            regions.append(Shared(guest, user, size, offset, fd))
        if sum(region.size + region.offset for region in regions) > MAX_MEMORY:
            raise LinkError("more memory than a machine has")
        for a, b in ((a, b) for a in regions for b in regions if a is not b):
            if a.guest < b.guest + b.size and b.guest < a.guest + a.size:
                raise LinkError("regions that overlap")
        return tuple(regions)

    def _bell(self, request: int, payload: bytes, fds: list[int], actions: list[Action]) -> None:
        value = _u64.unpack(payload)[0]
        if value & ~(_NO_FD | 0xFF) or bool(value & _NO_FD) == bool(fds):
            raise LinkError("a bell that contradicts itself")
        index = value & 0xFF
        ring = self._ring(index)
        if request == SET_VRING_CALL:
            actions.append(Call(index, fds[0] if fds else None))
        elif request == SET_VRING_ERR:
            actions += [Discard(fd) for fd in fds]
        elif not fds:
            raise LinkError("a queue without a bell")
        else:
            actions.append(Kick(index, fds[0]))
            if not ring.started:
                fresh = ring.last != (ring.base, ring.size, ring.addresses)
                actions.append(self._start(index, ring, fresh=fresh))
                ring.started = True

    def _start(self, index: int, ring: _Ring, *, fresh: bool) -> Start:
        if not self._mapped or ring.addresses is None or not ring.size:
            raise LinkError("a queue that is not set up was started")
        desc, avail, used = ring.addresses
        return Start(index, ring.size, desc, avail, used, ring.base, fresh)


def _reply(request: int, payload: bytes) -> bytes:
    return _head.pack(request, _VERSION | _REPLY, len(payload)) + payload
