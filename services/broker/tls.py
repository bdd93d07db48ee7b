"""TLS between a socket and a `Line`: records in and out of memory, all else by OpenSSL.

asyncio's own way has a buffer of 256 KiB for each connection, which was nearly all that an
open stream cost. Here all connections receive into one, as lines do. What is verified, and
how, is the context's affair alone.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Final, cast

from agent_box.broker.line import Line

_ROOM: Final = memoryview(bytearray(1 << 18))  # of records that came; see `line`


class Tls(asyncio.Transport, asyncio.BufferedProtocol):
    """The protocol of a plain connection and, after the handshake, the transport of a line.

    Args:
        context: says what is verified.
        host: the name that the certificate has to be for.
        line: is told of the connection once the handshake is over.
    """

    def __init__(self, context: ssl.SSLContext, host: str, line: Line) -> None:
        super().__init__()
        self._incoming: Final = ssl.MemoryBIO()
        self._outgoing: Final = ssl.MemoryBIO()
        self._ssl: Final = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._line: Final = line
        self._raw: asyncio.Transport | None = None
        self._shaken: Final[asyncio.Future[None]] = asyncio.get_running_loop().create_future()
        self._is_up = False  # the handshake is over, and went well

    async def handshake(self, seconds: float) -> None:
        """Waits until it is over.

        Raises:
            ssl.SSLError: the two do not come together, or the certificate is not good.
            OSError: the connection was lost.
            TimeoutError
        """
        async with asyncio.timeout(seconds):
            await self._shaken

    # ------------------------------------------------------------------ told by the loop

    @property
    def raw(self) -> asyncio.Transport:
        assert self._raw is not None
        return self._raw

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        self._shake()

    def get_buffer(self, sizehint: int) -> memoryview:
        return _ROOM

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.write(_ROOM[:nbytes])
        if not self._shaken.done():
            self._shake()
        if self._is_up:
            self._read()

    def eof_received(self) -> bool:
        """An end without TLS's own goodbye is an end, too: HTTP says what is complete."""
        if not self._shaken.done():
            self._fail(ConnectionResetError("the connection ended during the handshake"))
        elif self._is_up:
            self._line.eof_received()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._shaken.done():
            self._fail(exc or ConnectionResetError("the connection is lost"))
        elif self._is_up:
            self._line.connection_lost(exc)

    def pause_writing(self) -> None:
        self._line.pause_writing()

    def resume_writing(self) -> None:
        self._line.resume_writing()

    # ------------------------------------------------------------------ records

    def _shake(self) -> None:
        """A step of the handshake."""
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLError as error:
            self._flush()  # the other side is told why
            self._fail(error)
        else:
            self._flush()
            self._shaken.set_result(None)
            self._is_up = True
            self._line.connection_made(self)

    def _fail(self, error: Exception) -> None:
        self._shaken.set_exception(error)
        self._shaken.exception()  # who waited for it may have left: then it is nobody's
        self.raw.abort()

    def _read(self) -> None:
        """Gives the line what came, as much at a time as there is room for."""
        more = True
        while more and not self.is_closing():
            room, size, over = self._line.get_buffer(-1), 0, False
            try:
                while size < len(room) and not over:
                    # its type is that of two functions in one: with a buffer, it is a size
                    got = cast(int, self._ssl.read(len(room) - size, room[size:]))
                    size += got
                    over = got == 0  # TLS's own goodbye
                    if not (self._incoming.pending or self._ssl.pending()):
                        more = False  # which OpenSSL would tell by an exception
                        break
            except ssl.SSLWantReadError:
                more = False
            except ssl.SSLError as error:
                self._lost(error)
                return
            if size:
                self._line.buffer_updated(size)
            if over:
                self._line.eof_received()
                self.raw.close()
        self._flush()

    def _flush(self) -> None:
        if self._outgoing.pending and not self.is_closing():
            self.raw.write(self._outgoing.read())

    def _lost(self, error: ssl.SSLError) -> None:
        self._flush()
        self._line.connection_lost(error)
        self.raw.abort()

    # ------------------------------------------------------------------ used by the line

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._ssl.write(rest) :]
        except ssl.SSLError as error:
            self._lost(error)
            return
        self._flush()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As asyncio's: `ssl_object` and `sslcontext`, and all that the socket has."""
        if name == "ssl_object":
            return self._ssl
        if name == "sslcontext":
            return self._ssl.context
        return self.raw.get_extra_info(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.raw.set_write_buffer_limits(high, low)

    def is_closing(self) -> bool:
        return self.raw.is_closing()

    def pause_reading(self) -> None:
        self.raw.pause_reading()

    def resume_reading(self) -> None:
        self.raw.resume_reading()

    def can_write_eof(self) -> bool:
        return False

    def abort(self) -> None:
        self.raw.abort()
