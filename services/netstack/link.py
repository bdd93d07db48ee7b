"""The stream of frames to and from one guest, over a vsock or Unix socket."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final

from agent_box.netstack.packet import FRAME_MAX, LENGTH, LENGTH_READ, VNET
from agent_box.netstack.wire import Wire

_BUFFER: Final = 1 << 20
_READ_MAX: Final = 1 << 20  # in one go, before others have their turn
_QUEUE: Final = 512 << 10  # in the kernel, if the host's wmem_max lets it
_BUFFERS_MAX: Final = 512  # in one sendmsg; the kernel takes 1024


class LinkBroken(Exception):
    """The other end hung up, or sent a length that no frame has. One line says which."""


class Link:
    """One stream. What is `readable`, `writable` and `unsure` an edge-triggered epoll tells."""

    def __init__(self, sock: socket.socket, wire: Wire) -> None:
        sock.setblocking(False)
        # A writer is told of room only once three quarters are read (unix_writable in the
        # kernel); with more in between, the reader does not run dry meanwhile.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE)
        self.sock = sock
        self.readable = True
        self.unsure = False
        self.writable = True
        self._wire = wire
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._have = 0

    def read(
        self, packet: Callable[[memoryview, int, int], None], batch: Callable[[], None]
    ) -> None:
        """Reads until nothing is left, or enough is read for now.

        Args:
            packet: gets each packet as (view, offset, length); the view holds until `batch`.
            batch: called after the packets of one read.

        Raises:
            LinkBroken: there is nothing to be read any more.
        """
        total = 0
        buffer, view = self._buffer, self._view
        while self.readable and total < _READ_MAX:
            try:
                room = _BUFFER - self._have
                count = self.sock.recv_into(view[self._have :])
            except BlockingIOError:
                self.readable = False
                return
            except OSError as error:
                raise LinkBroken(f"the link to the guest broke: {error}") from None
            if not count:
                raise LinkBroken("the guest hung up")
            total += count
            if count < room and not self.unsure:
                self.readable = False  # see `poller.Handler`
            end = self._have + count
            at = 0
            wrong = None
            while end - at >= LENGTH:
                (length,) = LENGTH_READ.unpack_from(buffer, at)
                if not VNET < length <= FRAME_MAX:
                    wrong = length
                    break
                if end - at - LENGTH < length:
                    break
                packet(view, at + LENGTH + VNET, length - VNET)
                at += LENGTH + length
            batch()
            if wrong is not None:
                raise LinkBroken(f"the guest sent a frame of {wrong} bytes")
            if at < end and at:
                view[: end - at] = view[at:end]
            self._have = end - at

    def flush(self) -> None:
        """Sends what is queued, as far as the stream takes it.

        Raises:
            LinkBroken: the other end is gone.
        """
        wire = self._wire
        out = wire.out
        start = 0
        try:
            while start < len(out) and self.writable:
                batch = out[start : start + _BUFFERS_MAX]
                try:
                    sent = self.sock.sendmsg(batch)
                except BlockingIOError:
                    self.writable = False
                    break
                except OSError as error:
                    raise LinkBroken(f"the link to the guest broke: {error}") from None
                wire.queued -= sent
                if not wire.queued:
                    start = len(out)
                    break
                for buffer in batch:
                    size = len(buffer)
                    if sent < size:
                        if sent:
                            out[start] = memoryview(buffer)[sent:]
                        break
                    sent -= size
                    start += 1
        finally:
            del out[:start]
