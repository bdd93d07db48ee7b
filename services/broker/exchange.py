"""One exchange that the gate let through: the request up, the reply down, both as they come.

Nothing is buffered but a chunk each way; a slow reader slows its writer. A reply that carries
the credential back is cut before the guest has it. What the guest saw complete was counted
before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

import h11

from agent_box.broker import forward, gate, lfs, scrub, usage
from agent_box.broker.guest import Gone, Guest, headers_of
from agent_box.broker.head import Head
from agent_box.broker.ledger import Count
from agent_box.broker.limits import Limits
from agent_box.broker.refusal import Reason, Refuse
from agent_box.broker.upstream import Connection
from agent_box.process.tasks import TaskSet

FLUSH_BYTES: Final = 4 << 20  # counted at the latest when so many were moved
STRAIGHT_BYTES: Final = 1 << 16  # a body from this length on is worth its own way
_SWITCHING: Final = 101


Rewrite = Callable[[bytes], bytes | Refuse]  # of a whole body, decoded


class Stale(Exception):
    """A kept connection had been closed before the upstream read this request."""


class Refused(Exception):
    """No reply was begun; `refuse` is the answer."""

    def __init__(self, refuse: Refuse) -> None:
        super().__init__(refuse.message)
        self.refuse: Final = refuse


# The reply held the credential, or could not be searched for it. `why` is a word.
Cut = scrub.Cut


class Broken(Exception):
    """The reply had begun and cannot be finished: the connection is reset."""


class Ended(NamedTuple):
    """How far an exchange came. `whole`: its reply is complete."""

    bytes_up: int
    bytes_down: int
    whole: bool


class Exchange:
    """Args:
    inject: what the gate gave for this request and this connection.
    rewrite: what the guest gets in place of a successful reply's body; None: the body.
    kept: of the request's body, what was read already.
    continued: the guest was told to send its body.
    body_max: bytes of the body; None: any number.
    count: is told what was used, as it happens.
    tasks: where the way up runs.
    """

    def __init__(
        self,
        head: Head,
        inject: gate.Inject,
        guest: Guest,
        connection: Connection,
        *,
        rewrite: Rewrite | None,
        kept: list[bytes],
        continued: bool,
        body_max: int | None,
        count: Callable[[Count], object],
        measured: Callable[[usage.Meter | None, Ended], Count],
        limits: Limits,
        tasks: TaskSet,
    ) -> None:
        self._head: Final = head
        self._inject: Final = inject
        self._guest: Final = guest
        self._connection: Final = connection
        self._rewrite: Final = rewrite
        self._kept: Final = kept
        self._continued: Final = continued
        self._body_max: Final = body_max
        self._count: Final = count
        self._measured: Final = measured
        self._limits: Final = limits
        self._tasks: Final = tasks
        self._machine: Final = h11.Connection(
            h11.CLIENT, max_incomplete_event_size=limits.head_bytes
        )
        self._needles: Final = scrub.Needles(inject)
        self._moved = Count()
        self._up = self._down = 0  # bytes of the whole exchange
        self._clock: Final = asyncio.get_running_loop().time
        self._uploading: asyncio.Task[None] | None = None
        self._sent = self._clock()  # the last of the request
        self._heard = False  # anything of a reply
        self._meter: usage.Meter | None = None
        self._settled = False  # its tokens are counted
        self._bad_body: Refuse | None = None
        self._gone = False
        self._straight_end = False  # of a body that was counted here, with nothing behind it
        self.reusable = False  # the connection, for another exchange

    async def run(self) -> None:
        """Raises:
        Refused, Stale: nothing was sent to the guest.
        Cut, Broken, guest.Gone: its connection must be reset.
        """
        self._write(self._machine.send(forward.request(self._inject)))
        if not self._up_at_once():
            # Its first step is before the end of this turn: a part of a body that is here
            # already leaves together with the head.
            self._uploading = self._tasks.hold(self._upload(), name="upload")
        try:
            async with asyncio.timeout(self._limits.transfer_s) as self._whole:
                await self._download()
        except TimeoutError:
            raise self._broken(Reason.UPSTREAM_TIMEOUT, 504, "the exchange took too long") from None
        finally:
            await self._end_upload()
            if self._heard or self._gone:
                self._settle(whole=False)
            self._flush()
        # h11's own state says as well whether the upstream keeps the connection
        self.reusable = self._machine.our_state is h11.DONE and (
            self._straight_end
            or (self._machine.their_state is h11.DONE and not self._machine.trailing_data[0])
        )

    # ------------------------------------------------------------------ up

    def _up_at_once(self) -> bool:
        """Whether all of the request was here, as nearly every one is: then it costs no task."""
        if self._kept:
            return False
        try:
            while (event := self._guest.here()) is not None:
                if isinstance(event, h11.EndOfMessage):
                    self._request_ends(event)
                    return True
                self._put_up(bytes(event.data))
        except h11.RemoteProtocolError:
            self._body_is_bad()
            return True
        except (OSError, h11.LocalProtocolError):
            return True  # as in `_upload`
        return False

    async def _upload(self) -> None:
        """Ends quietly: how the exchange ends is seen on the way down."""
        try:
            for part in self._kept:
                await self._pass_up(part)
            while True:
                event = await self._guest.body()
                if isinstance(event, h11.EndOfMessage):
                    break
                await self._pass_up(bytes(event.data))
            self._request_ends(event)
        except h11.RemoteProtocolError:
            self._body_is_bad()
        except Gone:
            self._left()
        except (OSError, TimeoutError, h11.LocalProtocolError):
            pass  # the upstream takes no more; it may have answered already

    def _request_ends(self, event: h11.EndOfMessage) -> None:
        trailers = forward.trailers(self._inject, event.headers.raw_items())
        self._write(self._machine.send(h11.EndOfMessage(headers=trailers)))
        self._sent = self._clock()
        self._guest.watch(self._left)

    def _body_is_bad(self) -> None:
        self._bad_body = Refuse(Reason.BODY_BAD, 400, "the body is not framed as its head says")
        self._connection.close()

    def _left(self) -> None:
        """The guest is away: the request ends."""
        self._gone = True
        self._connection.close()

    async def _end_upload(self) -> None:
        self._guest.watch(None)
        if self._uploading is not None:
            self._uploading.cancel()
            await asyncio.wait((self._uploading,))

    async def _pass_up(self, part: bytes) -> None:
        self._put_up(part)
        await self._connection.line.drain(self._limits.idle_s)
        self._sent = self._clock()

    def _put_up(self, part: bytes) -> None:
        if self._body_max is not None and self._up + len(part) > self._body_max:
            self._bad_body = Refuse(Reason.BODY_BAD, 413, "the body is too large")
            self._connection.close()
            raise ConnectionResetError
        self._write(self._machine.send(h11.Data(data=part)))
        self._up += len(part)
        self._moved.bytes_up += len(part)
        self._flush(FLUSH_BYTES)

    def _write(self, data: bytes | None) -> None:
        if data:
            self._connection.line.write(data)

    # ------------------------------------------------------------------ down

    async def _download(self) -> None:
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                break
            if not isinstance(event, h11.InformationalResponse):
                raise self._broken(Reason.UPSTREAM_GARBAGE, 502, "the upstream sent no reply")
            if event.status_code == _SWITCHING:
                await self._upgraded(event)
                return
            await self._informational(event)
        headers = self._reply(event)
        if self._rewrite is not None and event.status_code == 200:
            await self._rewritten(event, headers, self._rewrite)
            return
        self._meter = meter = self._meter_of(event)
        bodiless = self._head.method == "HEAD" or event.status_code in (204, 304)
        search = scrub.Scrub(
            self._needles,
            _one(event, b"content-type"),
            None if bodiless else _list(event, b"content-encoding"),
            None if meter is None else meter.feed,
        )
        await self._guest.send(
            h11.Response(status_code=event.status_code, headers=headers, reason=b"")
        )
        length = 0 if bodiless else _length(event)
        early = self._machine.trailing_data[0] if length else b""
        if length and len(early) == length:
            await self._all_here(search, early)
            return
        if length >= STRAIGHT_BYTES and search.blind:
            await self._straight(length, early)
            return
        while True:
            part = await self._next()
            if isinstance(part, h11.Data):
                await self._pass_down(search, bytes(part.data))
            elif isinstance(part, h11.EndOfMessage):
                await self._finish(search, part)
                return
            else:
                raise Broken

    async def _all_here(self, search: scrub.Scrub, body: bytes) -> None:
        """A body of known length that came whole, together with the head."""
        self._down += len(body)
        self._moved.bytes_down += len(body)
        clean = search.feed(body) + search.finish()
        self._settle(whole=True)
        self._flush()
        await self._guest.send(h11.Data(data=clean), h11.EndOfMessage())
        self._straight_end = True

    async def _straight(self, length: int, early: bytes) -> None:
        """A long body that is not searched and whose end is known: its bytes go from socket to
        socket. What h11 would do to them is to count them, which is done here; towards the
        guest it does so itself."""
        rest, last, surplus = length, self._clock(), False

        def pass_on(data: memoryview) -> bool:
            nonlocal rest, last, surplus
            last = self._clock()
            if len(data) > rest:
                data, surplus = data[:rest], True
            rest -= len(data)
            self._down += len(data)
            self._moved.bytes_down += len(data)
            if rest:
                self._flush(FLUSH_BYTES)
            else:
                self._settle(whole=True)
                self._flush()
            return self._guest.pass_on(data) and rest > 0

        if early:
            pass_on(memoryview(early))
        while rest:
            await self._guest.send()
            try:
                await self._connection.line.relay(pass_on, last + self._limits.idle_s)
            except TimeoutError:
                if self._clock() >= last + self._limits.idle_s:
                    raise Broken from None
            except OSError:
                raise self._lost() from None
        await self._guest.send(h11.EndOfMessage())
        self._straight_end = not surplus

    async def _rewritten(
        self, event: h11.Response, headers: list[tuple[bytes, bytes]], rewrite: Rewrite
    ) -> None:
        """Collects the reply and sends another body, or none of it."""
        refuse = Refuse(Reason.REPLY_BAD, 502, "the upstream's reply cannot be rewritten")
        if (_list(event, b"content-encoding") or b"identity").lower() != b"identity":
            raise Refused(refuse)
        body = bytearray()
        while not isinstance(part := await self._next(), h11.EndOfMessage):
            if not isinstance(part, h11.Data) or len(body) + len(part.data) > lfs.REPLY_MAX:
                raise Refused(refuse)
            body += part.data
        self._down += len(body)
        self._moved.bytes_down += len(body)
        done = rewrite(bytes(body))
        if isinstance(done, Refuse):
            raise Refused(done)
        if self._needles.within(done):
            raise Cut("credential")
        self._settle(whole=True)
        self._flush()
        framing = (b"content-length", b"transfer-encoding")
        await self._guest.send(
            h11.Response(
                status_code=event.status_code,
                headers=[
                    *((name, value) for name, value in headers if name not in framing),
                    (b"content-length", str(len(done)).encode()),
                ],
                reason=b"",
            ),
            h11.Data(data=done),
            h11.EndOfMessage(),
        )

    async def _informational(self, event: h11.InformationalResponse) -> None:
        if event.status_code == 100 and self._continued:
            return  # the guest was told to go on, to see what it asks for
        await self._guest.send(
            h11.InformationalResponse(
                status_code=event.status_code, headers=self._reply(event), reason=b""
            )
        )

    def _reply(self, event: h11.Response | h11.InformationalResponse) -> list[tuple[bytes, bytes]]:
        """The headers for the guest."""
        raw = list(headers_of(event))
        if scrub.in_headers(self._needles, raw):
            raise Cut("credential")
        headers = forward.reply(
            self._inject.binding, event.status_code, raw, method=self._head.method
        )
        if isinstance(headers, Refuse):
            raise Refused(headers)
        return headers

    def _meter_of(self, event: h11.Response) -> usage.Meter | None:
        if not 200 <= event.status_code < 300:
            return None
        return usage.meter(self._inject.binding.kind, _one(event, b"content-type"))

    async def _pass_down(self, search: scrub.Scrub, part: bytes) -> None:
        self._down += len(part)
        self._moved.bytes_down += len(part)
        self._flush(FLUSH_BYTES)
        clean = search.feed(part)
        if clean:
            await self._guest.send(h11.Data(data=clean))

    async def _finish(self, search: scrub.Scrub, end: h11.EndOfMessage) -> None:
        rest = search.finish()
        trailers = list(end.headers.raw_items())
        if scrub.in_headers(self._needles, trailers):
            raise Cut("credential")
        # 204, for which there is no framing
        kept = forward.reply(self._inject.binding, 204, trailers, method=self._head.method)
        if isinstance(kept, Refuse):
            raise Broken
        self._settle(whole=True)
        self._flush()
        last: list[h11.Event] = [h11.Data(data=rest)] if rest else []
        try:
            await self._guest.send(*last, h11.EndOfMessage(headers=kept))
        except h11.LocalProtocolError:
            # Trailers after a body of known length: no reply of ours can carry them.
            await self._guest.send(h11.EndOfMessage())

    async def _next(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event of the reply.

        Raises:
            Stale, Refused: nothing was sent to the guest yet.
            Broken: something was.
        """
        while True:
            try:
                event = self._machine.next_event()
            except h11.RemoteProtocolError:
                raise self._broken(
                    Reason.UPSTREAM_GARBAGE, 502, "the upstream's reply is not HTTP"
                ) from None
            if event is not h11.NEED_DATA:
                return event
            self._guest.flush()
            try:
                more = await self._read()
                self._machine.receive_data(more)
                if not more and not self._heard:
                    raise ConnectionResetError
            except (OSError, h11.RemoteProtocolError):
                raise self._lost() from None
            self._heard = True

    async def _read(self) -> bytes:
        """The upstream's next bytes: within the time for an answer, or for a pause."""
        while True:
            now = self._clock()
            limit = self._limits.idle_s if self._guest.answered else self._limits.answer_s
            until = (now if self._guest.answered else self._sent) + limit
            try:
                return await self._connection.line.read(max(until, now + 0.001))
            except TimeoutError:
                if not self._guest.answered and self._clock() < self._sent + limit:
                    continue  # the request itself was still going up
                raise self._broken(
                    Reason.UPSTREAM_TIMEOUT, 504, "the upstream did not answer in time"
                ) from None

    def _lost(self) -> Exception:
        """Why the upstream's connection is at its end."""
        if self._gone:
            return Gone()
        if self._bad_body is not None and not self._guest.answered:
            return Refused(self._bad_body)
        if not self._heard and not self._connection.fresh and not self._guest.answered:
            return Stale()
        return self._broken(
            Reason.UPSTREAM_GARBAGE, 502, "the upstream ended the connection without a reply"
        )

    def _broken(self, reason: Reason, status: int, message: str) -> Exception:
        if self._guest.answered:
            return Broken()
        return Refused(Refuse(reason, status, message))

    # ------------------------------------------------------------------ after an upgrade

    async def _upgraded(self, event: h11.InformationalResponse) -> None:
        """Both directions raw, until one of them ends."""
        assert self._head.upgrade is not None  # or h11 had refused the reply
        headers = self._reply(event)
        self._whole.reschedule(None)
        await self._guest.send(
            h11.InformationalResponse(status_code=_SWITCHING, headers=headers, reason=b"")
        )
        await self._end_upload()
        search = scrub.Scrub(self._needles, b"text/plain", None, None)
        up = self._tasks.hold(self._raw_up(), name="upgraded")
        try:
            more = self._machine.trailing_data[0]
            while True:
                if more:
                    self._moved.bytes_down += len(more)
                    self._flush(FLUSH_BYTES)
                    await self._guest.send_raw(search.feed(more))
                until = self._clock() + self._limits.upgraded_idle_s
                more = await self._connection.line.read(until)
                if not more:
                    break
            await self._guest.send_raw(search.finish())
        except (OSError, TimeoutError):
            pass  # the end of it, one way or the other
        finally:
            up.cancel()
            await asyncio.wait((up,))
        raise Broken

    async def _raw_up(self) -> None:
        try:
            while data := await self._guest.raw():
                self._moved.bytes_up += len(data)
                self._connection.line.write(data)
                await self._connection.line.drain(self._limits.idle_s)
        except (OSError, TimeoutError, Gone):
            pass
        self._connection.close()

    # ------------------------------------------------------------------ counting

    def _settle(self, *, whole: bool) -> None:
        if not self._settled:
            self._settled = True
            self._moved.add(self._measured(self._meter, Ended(self._up, self._down, whole)))

    def _flush(self, least: int = 0) -> None:
        moved = self._moved
        if moved.bytes_up + moved.bytes_down < least or moved.empty:
            return
        self._moved = Count()
        self._count(moved)


def _one(event: h11.Response, name: bytes) -> bytes | None:
    """A header's value; None when there is none, or more than one."""
    found = [bytes(value) for each, value in event.headers if each == name]
    return found[0] if len(found) == 1 else None


def _length(event: h11.Response) -> int:
    """Of the body, when a Content-Length frames it; else 0."""
    if _list(event, b"transfer-encoding") is not None:
        return 0
    value = _one(event, b"content-length")
    return 0 if value is None else int(value)


def _list(event: h11.Response, name: bytes) -> bytes | None:
    """The values of a header that is a list, as one (RFC 9110 section 5.3)."""
    return b", ".join(bytes(value) for each, value in event.headers if each == name) or None
