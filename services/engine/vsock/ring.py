"""Split virtqueues over memory that the guest may change at any time. No I/O.

Source: Virtual I/O Device (VIRTIO) 1.2, 2.7; indirect descriptors and event indices are not
offered and so refused. All addresses in descriptors are the guest's; those of the rings come
from the VMM as its own.

Every value is read once, then checked, then used. What a hostile guest can gain is a
`RingError`: nothing outside of the shared memory is touched, no loop runs longer than the
queue is long, and nothing is allocated that grows with what it says.

Indices are stored through 16-bit views: `struct.pack_into` would write zero first, and a
driver that reads at that moment is lost for good (measured: a machine hung).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from agent_box.engine.vsock.fence import fence

MAX_SIZE: Final = 1024  # entries; also what one sendmsg takes. QEMU uses 128
_NEXT: Final = 1
_WRITE: Final = 2
_NO_INTERRUPT: Final = 1
_descriptor = struct.Struct("<QIHH").unpack_from

READABLE: Final = 0  # by the device
WRITABLE: Final = _WRITE


class RingError(Exception):
    """The driver broke its queue; until it sets the queue up again nothing can be done."""


class Region(NamedTuple):
    """A stretch of the guest's memory.

    Attributes:
        guest: its address in the guest, in bytes.
        user: its address in the VMM's process.
        view: the memory itself; as long as the region is.
    """

    guest: int
    user: int
    view: memoryview


class Memory:
    """The guest's memory as the VMM described it."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = tuple(regions)
        empty = Region(0, 0, memoryview(b""))
        self.first = self._regions[0] if self._regions else empty

    def guest(self, untrusted_address: int, untrusted_length: int) -> memoryview:
        """Bytes at an address of the guest.

        Raises:
            RingError: not within one region, or of no length.
        """
        if untrusted_length > 0:
            for region in self._regions:
                start = untrusted_address - region.guest
                if start >= 0 and start + untrusted_length <= len(region.view):
                    return region.view[start : start + untrusted_length]
        raise RingError("a buffer that is not in the guest's memory")

    def user(self, untrusted_address: int, untrusted_length: int) -> memoryview:
        """Bytes at an address of the VMM's.

        Raises:
            RingError: not within one region, or of no length.
        """
        if untrusted_length > 0:
            for region in self._regions:
                start = untrusted_address - region.user
                if start >= 0 and start + untrusted_length <= len(region.view):
                    return region.view[start : start + untrusted_length]
        raise RingError("a ring that is not in the guest's memory")


class Queue:
    """One virtqueue, seen from the device.

    Between two turns of the device's loop every chain that was taken has been pushed or put
    back, so `base` alone tells where to go on after a pause.
    """

    __slots__ = (
        "_avail",
        "_base",
        "_desc",
        "_direction",
        "_mask",
        "_memory",
        "_next",
        "_pushed",
        "_seen",
        "_size",
        "_span",
        "_used",
        "_used_index",
        "_used_next",
        "_view",
    )

    def __init__(
        self,
        memory: Memory,
        direction: int,
        *,
        size: int,
        desc: int,
        avail: int,
        used: int,
        base: int,
    ) -> None:
        """Args:
            direction: `READABLE` or `WRITABLE`: what every buffer in this queue must be.
            size: entries, a power of two up to `MAX_SIZE`.
            desc, avail, used: addresses of the three parts in the VMM's process.
            base: index of the next available entry.

        Raises:
            RingError: a part is not aligned, or not in the guest's memory.
        """
        if not 0 < size <= MAX_SIZE or size & (size - 1):
            raise RingError("a queue of an impossible size")
        if desc % 16 or avail % 2 or used % 4:
            raise RingError("a ring that is not aligned")
        self._memory = memory
        self._direction = direction
        self._size = size
        self._mask = size - 1
        self._desc = memory.user(desc, 16 * size)
        self._avail = memory.user(avail, 4 + 2 * size).cast("H")
        ring = memory.user(used, 4 + 8 * size)
        self._used_index = ring[:4].cast("H")
        self._used = ring[4:].cast("Q")
        self._base = memory.first.guest
        self._view = memory.first.view
        self._span = len(self._view)
        self._next = base & 0xFFFF
        self._seen = self._next
        self._used_next = self._used_index[1]
        self._pushed = False

    @property
    def base(self) -> int:
        """Index of the next available entry, for the VMM to give back after a pause."""
        return self._next

    def pending(self) -> int:
        """How many chains can be taken now.

        Raises:
            RingError: more than the queue has room for.
        """
        if self._seen == self._next:
            self._seen = self._avail[1]
            fence()  # what the driver wrote before that index is read after it
        count = (self._seen - self._next) & 0xFFFF
        if count > self._size:
            raise RingError("an index that runs ahead of the queue")
        return count

    def take(self) -> tuple[int, list[memoryview]]:
        """The next chain: its head, and its buffers, none of them empty.

        Only after `pending` said that there is one.

        Raises:
            RingError: the chain is not sound.
        """
        head = self._avail[2 + (self._next & self._mask)]
        size = self._size
        if head >= size:
            raise RingError("a descriptor outside of the table")
        address, length, flags, follows = _descriptor(self._desc, head << 4)
        start = address - self._base
        if start >= 0 and length and start + length <= self._span:
            buffers = [self._view[start : start + length]]
        else:
            buffers = [self._memory.guest(address, length)]
        direction = self._direction
        while flags != direction:
            if flags != direction | _NEXT:
                raise RingError("a descriptor with flags that it must not have")
            if follows >= size:
                raise RingError("a descriptor outside of the table")
            if len(buffers) >= size:
                raise RingError("descriptors that go round in a circle")
            address, length, flags, follows = _descriptor(self._desc, follows << 4)
            start = address - self._base
            if start >= 0 and length and start + length <= self._span:
                buffers.append(self._view[start : start + length])
            else:
                buffers.append(self._memory.guest(address, length))
        self._next = (self._next + 1) & 0xFFFF
        return head, buffers

    def put_back(self, count: int) -> None:
        """Gives back the last `count` chains that were taken and not pushed."""
        self._next = (self._next - count) & 0xFFFF

    def push(self, head: int, written: int) -> None:
        """Returns a chain to the driver, which sees it after `publish`.

        Args:
            written: bytes that the device wrote into it.
        """
        self._used[self._used_next & self._mask] = head | written << 32
        self._used_next = (self._used_next + 1) & 0xFFFF
        self._pushed = True

    def publish(self) -> bool:
        """Shows the driver what was pushed.

        Returns:
            Whether it must be interrupted.
        """
        if not self._pushed:
            return False
        self._pushed = False
        fence()  # the driver must not see the index before the entries
        self._used_index[1] = self._used_next
        fence()  # and we must not see its wish before it can see the index
        return not self._avail[0] & _NO_INTERRUPT
