"""The guest's end of one connection: heads and bodies as they come, replies as they go.

Every request has an h11 state machine of its own: what one request did to it means nothing to
the next. Nothing of what arrives is believed; nothing of it is logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import h11

from agent_box.broker import head as heads
from agent_box.broker import refusal
from agent_box.broker.limits import Limits
from agent_box.broker.line import Line
from agent_box.broker.refusal import Reason, Refuse

_PHRASES: Final = {
    400: b"Bad Request", 401: b"Unauthorized", 403: b"Forbidden", 404: b"Not Found",
    405: b"Method Not Allowed", 408: b"Request Timeout", 413: b"Content Too Large",
    414: b"URI Too Long", 417: b"Expectation Failed", 421: b"Misdirected Request",
    429: b"Too Many Requests", 431: b"Request Header Fields Too Large",
    500: b"Internal Server Error", 502: b"Bad Gateway", 503: b"Service Unavailable",
    504: b"Gateway Timeout", 505: b"HTTP Version Not Supported",
}  # fmt: skip
TIMEOUT: Final = Refuse(Reason.HEAD_TIMEOUT, 408, "the head of the request did not come in time")


class Gone(Exception):
    """The guest is away, or stopped reading."""


class Guest:
    """Args:
    line: a connection to an instance's socket.

    Attributes:
        until: of the loop's clock: when the reply under way has to be over. None: no matter.
    """

    def __init__(self, line: Line, limits: Limits) -> None:
        self._line: Final = line
        self._limits: Final = limits
        self._clock: Final = asyncio.get_running_loop().time
        self._buffer = b""  # came after the last request
        self._machine = h11.Connection(h11.SERVER)
        self._taken = False  # the request's body, and not by h11
        self._replied = False  # the reply is complete, and h11 has not seen it
        self.until: float | None = None

    # ------------------------------------------------------------------ requests

    async def head(self) -> bytes | Refuse | None:
        """The next request's head, raw; None when the guest is done."""
        buffer = self._buffer
        until = self._clock() + (self._limits.head_s if buffer else self._limits.idle_s)
        while True:
            size = heads.end(buffer) if buffer else None
            if size is not None:
                self._buffer = buffer[size:]
                return buffer[:size]
            if buffer and (hopeless := heads.hopeless(buffer)) is not None:
                return hopeless
            try:
                more = await self._line.read(until)
            except TimeoutError:
                return TIMEOUT if buffer else None
            except OSError:
                return None
            if not more:
                return None
            if not buffer:
                until = self._clock() + self._limits.head_s
            buffer += more

    def begin(self, raw_head: bytes) -> h11.Request | None:
        """What h11 reads in a head; None when it reads no request."""
        self._machine = h11.Connection(h11.SERVER, max_incomplete_event_size=heads.MAX_HEAD + 4)
        self._taken = self._replied = False
        self.until = None
        try:
            self._machine.receive_data(raw_head)
            event = self._machine.next_event()
        except h11.RemoteProtocolError:
            return None
        return event if isinstance(event, h11.Request) else None

    def whole(self, length: int) -> bytes | None:
        """All of the request's body, when it is of this length and came already. What follows
        it is the next request's. Nothing of the body may have been read before."""
        if len(self._buffer) < length:
            return None
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        self._taken = True
        return body

    def here(self) -> h11.Data | h11.EndOfMessage | None:
        """The next part of the request's body, when it came already.

        Raises:
            h11.RemoteProtocolError: it is not framed as its head said.
        """
        if self._buffer:
            buffer, self._buffer = self._buffer, b""
            self._machine.receive_data(buffer)
        event = self._machine.next_event()
        if isinstance(event, h11.Data):
            return event
        if isinstance(event, h11.EndOfMessage):
            self._buffer = self._machine.trailing_data[0]
            return event
        return None

    async def body(self) -> h11.Data | h11.EndOfMessage:
        """The next part of the request's body.

        Raises:
            h11.RemoteProtocolError: it is not framed as its head said.
            Gone: it ends, or nothing came for too long.
        """
        while True:
            event = self.here()
            if event is not None:
                return event
            more = await self._read(self._limits.idle_s)
            if not more:
                raise Gone
            self._machine.receive_data(more)

    async def skip(self) -> bool:
        """Passes the end of a request without a body. Whether the next can be read."""
        if self._taken:
            return True
        if self._machine.their_state is not h11.SEND_BODY:
            return self._machine.their_state is h11.DONE
        try:
            return isinstance(await self.body(), h11.EndOfMessage)
        except h11.RemoteProtocolError:
            return False

    def watch(self, left: Callable[[], None] | None) -> None:
        """Calls `left` when the guest goes away; at once, when it is away already. What it
        sends meanwhile is its next request, and waits."""
        self._line.ended = left
        if left is not None and self._line.over:
            left()

    async def raw(self) -> bytes:
        """Bytes after an upgrade; empty at the end."""
        if self._buffer:
            taken, self._buffer = self._buffer, b""
            return taken
        return await self._read(self._limits.upgraded_idle_s)

    # ------------------------------------------------------------------ replies

    async def send(self, *events: h11.Event) -> None:
        """Raises `Gone`; `h11.LocalProtocolError` for what cannot be framed."""
        for event in events:
            data = self._machine.send(event)
            if data:
                self._line.write(data)
        await self._drained()

    async def reply(
        self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes, *, last: bool
    ) -> None:
        """A whole reply at once. Raises `Gone`.

        Args:
            headers: with the body's length. They are sent as they are.
            last: the guest is told that no other follows on this connection.
        """
        lines = [b"HTTP/1.1 %d " % status, *(b"%s: %s" % each for each in headers)]
        if last:
            lines.append(b"Connection: close")
        self._line.write_now(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self._replied = True
        await self._drained()

    def flush(self) -> None:
        """What was sent leaves at once."""
        self._line.flush()

    def pass_on(self, data: memoryview) -> bool:
        """A part of a reply's body, at once and uncopied. Whether the guest is not behind;
        else `send` waits for it."""
        part = h11.Data(data=data)  # type: ignore[arg-type]  # "any bytes-like object"
        for piece in self._machine.send_with_data_passthrough(part) or ():
            self._line.write_now(piece)
        return not self._line.behind

    async def send_raw(self, data: bytes) -> None:
        self._line.write(data)
        await self._drained()

    async def refuse(self, refuse: Refuse, method: str, *, keep: bool) -> None:
        """A whole reply that says no. Without `keep` the guest is told that it is the last."""
        body = refusal.body(refuse)
        lines = [
            b"HTTP/1.1 %d %s" % (refuse.status, _PHRASES.get(refuse.status, b"Refused")),
            b"Content-Type: application/json",
            b"Content-Length: %d" % len(body),
            b"Cache-Control: no-store",
        ]
        if refuse.status == 401:  # without it git and curl do not show what they have
            lines.append(b'WWW-Authenticate: Basic realm="agent-box"')
        if refuse.status == 503:
            lines.append(b"Retry-After: 1")
        if not keep:
            lines.append(b"Connection: close")
        head = b"\r\n".join(lines) + b"\r\n\r\n"
        await self.send_raw(head if method == "HEAD" else head + body)

    @property
    def answered(self) -> bool:
        """Whether the head of the final reply is on its way."""
        return self._replied or self._machine.our_state not in (h11.IDLE, h11.SEND_RESPONSE)

    @property
    def again(self) -> bool:
        """Whether another request may follow on this connection."""
        return (self._replied or self._machine.our_state is h11.DONE) and (
            self._taken or self._machine.their_state is h11.DONE
        )

    async def linger(self) -> None:
        """Ends our direction and reads what the guest was sending, for a while: a reply is lost
        when its connection is closed over unread bytes."""
        rest = self._limits.linger_bytes
        try:
            await self._line.finish(self._limits.linger_s)
            until = self._clock() + self._limits.linger_s
            while rest > 0 and (more := await self._line.read(until)):
                rest -= len(more)
        except (TimeoutError, OSError):
            pass  # it had its time
        self.close()

    async def finish(self) -> None:
        """After the last reply, which came to its end: the guest gets all of it, however slowly
        it reads.

        Raises:
            Gone: it does not.
        """
        try:
            await self._line.finish(self._limits.idle_s)
        except (TimeoutError, OSError):
            raise Gone from None

    def close(self) -> None:
        """At once: what was not complete must not look as if it were."""
        self._line.abort()

    async def _drained(self) -> None:
        if not self._line.behind:
            return
        seconds = self._limits.idle_s
        if self.until is not None:
            seconds = min(seconds, max(0.0, self.until - self._clock()))
        try:
            await self._line.drain(seconds)
        except (TimeoutError, OSError):
            raise Gone from None

    async def _read(self, seconds: float) -> bytes:
        try:
            return await self._line.read(self._clock() + seconds)
        except (TimeoutError, OSError):
            raise Gone from None


def headers_of(event: h11.Response | h11.InformationalResponse) -> Sequence[tuple[bytes, bytes]]:
    """As they came, in their own case."""
    return event.headers.raw_items()
