"""What the VMM hands over as descriptors: the guest's memory, and bells."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Final

from agent_box.engine.vsock.ring import Memory, Region
from agent_box.engine.vsock.vhost import LinkError, Shared

_F_GET_SEALS: Final = 1034
_F_SEAL_SHRINK: Final = 2


def hear(fd: int) -> None:
    """Takes the ring of a bell.

    Raises:
        LinkError: it is no bell.
    """
    try:
        if not os.read(fd, 8):
            raise LinkError("a bell that has ended")
    except BlockingIOError:
        pass  # it was rung and heard before
    except OSError as error:
        raise LinkError(f"a bell that cannot be heard: {error.strerror}") from error


def descriptors(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def map_memory(regions: Sequence[Shared]) -> Memory:
    """Maps the guest's memory.

    Only files that cannot shrink are taken: reading beyond the end of a file would kill us.

    Raises:
        LinkError: a file is not what it should be.
    """
    mapped = []
    try:
        for region in regions:
            skip = region.offset % mmap.ALLOCATIONGRANULARITY
            try:
                if not fcntl.fcntl(region.fd, _F_GET_SEALS) & _F_SEAL_SHRINK:
                    raise LinkError("memory that could be taken away")
                area = mmap.mmap(region.fd, region.size + skip, offset=region.offset - skip)
            except (OSError, ValueError, OverflowError) as error:
                raise LinkError(f"memory that cannot be mapped: {error}") from error
            view = memoryview(area)[skip:]
            mapped.append(Region(region.guest, region.user, view))
    finally:
        close_all([region.fd for region in regions])
    return Memory(mapped)
