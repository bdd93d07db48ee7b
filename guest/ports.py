"""The vsock ports that PID 1 binds, and what an agent process inherits of them."""

from __future__ import annotations

import socket

from agent_box.guest.wire import PORTS

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from typing import Final

BACKLOG: Final = 1024
BUFFER: Final = 4 << 20  # bytes a stream may have in flight to us


class Inherited:
    """What PID 1 opened and a process that it keeps gets.

    Attributes:
        listeners: by port.
        tun: of tun0, for the network pump alone.
    """

    __slots__ = ("listeners", "tun")

    def __init__(self, listeners: dict[int, socket.socket], tun: int | None) -> None:
        self.listeners = listeners
        self.tun = tun


def listeners() -> dict[int, socket.socket]:
    """Binds every port.

    Raises:
        OSError: the kernel has no vsock, or somebody was faster.
    """
    bound = {}
    for port in PORTS:
        listener = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        for option in (
            socket.SO_VM_SOCKETS_BUFFER_MAX_SIZE,
            socket.SO_VM_SOCKETS_BUFFER_SIZE,
        ):
            listener.setsockopt(socket.AF_VSOCK, option, BUFFER)
        listener.bind((socket.VMADDR_CID_ANY, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
        bound[port] = listener
    return bound
