"""One exchange that the gate let through: the request up (`upload`), the reply down.

Nothing is buffered but a chunk each way; a slow reader slows its writer. A reply that carries
the credential back is cut before the guest has it. What the guest saw complete was counted
before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import h11

from agent_box.broker import forward, gate, lfs, scrub, usage
from agent_box.broker.guest import Gone, Guest, headers_of
from agent_box.broker.head import Head
from agent_box.broker.kinds import Headers
from agent_box.broker.limits import Limits
from agent_box.broker.refusal import Reason, Refuse
from agent_box.broker.tally import Tally
from agent_box.broker.upgraded import Upgraded
from agent_box.broker.upload import Upload
from agent_box.broker.upstream import Connection
from agent_box.process.tasks import TaskSet

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


class Exchange:
    """Args:
    inject: what the gate gave for this request and this connection.
    rewrite: what the guest gets in place of a successful reply's body; None: the body.
    kept: of the request's body, what was read already.
    continued: the guest was told to send its body.
    body_max: bytes of the request's body; None: any number.
    tally: is told what was used, as it happens.
    tasks: where the way up runs.

    Attributes:
        reusable: when it has ended, whether its connection serves for another.
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
        tally: Tally,
        limits: Limits,
        tasks: TaskSet,
    ) -> None:
        self._head: Final = head
        self._inject: Final = inject
        self._guest: Final = guest
        self._connection: Final = connection
        self._rewrite: Final = rewrite
        self._continued: Final = continued
        self._tally: Final = tally
        self._limits: Final = limits
        self._tasks: Final = tasks
        self._machine: Final = h11.Connection(
            h11.CLIENT, max_incomplete_event_size=limits.head_bytes
        )
        self._upload: Final = Upload(
            head,
            inject,
            guest,
            connection,
            self._machine,
            tally,
            kept=kept,
            body_max=body_max,
            limits=limits,
            tasks=tasks,
        )
        self._needles: Final = scrub.Needles(inject)
        self._clock: Final = asyncio.get_running_loop().time
        self._until: Final = self._clock() + limits.transfer_s
        self._heard = False  # anything of a reply
        self._headers: Headers = ()  # of it, with lowercase names
        self._keeps = False  # the upstream keeps the connection, by the reply's head
        self._in_order = False  # a body that was counted here came to its end, and nothing else
        self.reusable = False

    async def run(self) -> None:
        """Raises:
        Refused, Stale: nothing was sent to the guest.
        Cut, Broken, guest.Gone: its connection must be reset.
        """
        self._guest.until = self._until
        self._upload.begin()
        try:
            await self._download()
        finally:
            await self._upload.end()
            if self._heard or self._upload.gone:
                self._tally.settle(whole=False)
            self._tally.flush()
        if not self._in_order:
            # h11's own state says then as well whether the upstream keeps the connection
            self._in_order = (
                self._machine.their_state is h11.DONE and not self._machine.trailing_data[0]
            )
        self.reusable = self._upload.whole and self._keeps and self._in_order

    # ------------------------------------------------------------------ the reply

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
        self._tally.meter = meter = self._meter_of(event)
        bodiless = self._head.method == "HEAD" or event.status_code in (204, 304)
        search = scrub.Scrub(
            self._needles,
            _one(self._headers, b"content-type"),
            None if bodiless else _list(self._headers, b"content-encoding"),
            None if meter is None else meter.feed,
        )
        length = 0 if bodiless else _length(self._headers)
        early = self._machine.trailing_data[0] if length else b""
        if length and len(early) == length and self._head.upgrade is None:
            await self._all_here(event, headers, search, early)
            return
        await self._guest.send(
            h11.Response(status_code=event.status_code, headers=headers, reason=b"")
        )
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

    async def _all_here(
        self,
        event: h11.Response,
        headers: list[tuple[bytes, bytes]],
        search: scrub.Scrub,
        body: bytes,
    ) -> None:
        """A body of known length that came whole, together with the head: so it goes on, and
        h11 need not count its bytes."""
        self._tally.received(len(body))
        clean = search.feed(body) + search.finish()
        self._tally.settle(whole=True)
        self._tally.flush()
        self._in_order = True
        await self._guest.reply(event.status_code, headers, clean, last=not self._head.keep_alive)

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
            self._tally.received(len(data))
            if not rest:
                self._tally.settle(whole=True)
                self._tally.flush()
            return self._guest.pass_on(data) and rest > 0

        if early:
            pass_on(memoryview(early))
        while rest:
            await self._guest.send()
            until = min(last + self._limits.idle_s, self._until)
            try:
                await self._connection.line.relay(pass_on, until)
            except TimeoutError:
                if self._clock() >= min(last + self._limits.idle_s, self._until):
                    raise Broken from None
            except OSError:
                raise self._lost() from None
        await self._guest.send(h11.EndOfMessage())
        self._in_order = not surplus

    async def _rewritten(
        self, event: h11.Response, headers: list[tuple[bytes, bytes]], rewrite: Rewrite
    ) -> None:
        """Collects the reply and sends another body, or none of it."""
        refuse = Refuse(Reason.REPLY_BAD, 502, "the upstream's reply cannot be rewritten")
        if (_list(self._headers, b"content-encoding") or b"identity").lower() != b"identity":
            raise Refused(refuse)
        body = bytearray()
        while not isinstance(part := await self._next(), h11.EndOfMessage):
            if not isinstance(part, h11.Data) or len(body) + len(part.data) > lfs.REPLY_MAX:
                raise Refused(refuse)
            body += part.data
        self._tally.received(len(body))
        done = rewrite(bytes(body))
        if isinstance(done, Refuse):
            raise Refused(done)
        if self._needles.within(done):
            raise Cut("credential")
        self._tally.settle(whole=True)
        self._tally.flush()
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
        raw = headers_of(event)
        if scrub.in_headers(self._needles, raw):
            raise Cut("credential")
        self._headers = came = tuple([(name.lower(), value) for name, value in raw])
        headers = forward.reply(
            self._inject.binding, event.status_code, came, method=self._head.method
        )
        if isinstance(headers, Refuse):
            raise Refused(headers)
        self._keeps = forward.keeps(event.http_version, came)
        return headers

    def _meter_of(self, event: h11.Response) -> usage.Meter | None:
        if not 200 <= event.status_code < 300:
            return None
        return usage.meter(self._inject.binding.kind, _one(self._headers, b"content-type"))

    async def _pass_down(self, search: scrub.Scrub, part: bytes) -> None:
        self._tally.received(len(part))
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
        self._tally.settle(whole=True)
        self._tally.flush()
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
            if self._heard:
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
        answered = self._guest.answered
        while (now := self._clock()) < self._until:
            until = now + self._limits.idle_s if answered else self._answer_until()
            try:
                return await self._connection.line.read(min(max(until, now + 0.001), self._until))
            except TimeoutError:
                if answered or self._clock() >= self._answer_until():
                    break
                # the request itself was still going up
        raise self._broken(Reason.UPSTREAM_TIMEOUT, 504, "the upstream did not answer in time")

    def _answer_until(self) -> float:
        return self._upload.sent + self._limits.answer_s

    def _lost(self) -> Exception:
        """Why the upstream's connection is at its end."""
        if self._upload.gone:
            return Gone()
        if self._upload.bad is not None and not self._guest.answered:
            return Refused(self._upload.bad)
        if not self._heard and not self._connection.fresh and not self._guest.answered:
            return Stale()
        return self._broken(
            Reason.UPSTREAM_GARBAGE, 502, "the upstream ended the connection without a reply"
        )

    def _broken(self, reason: Reason, status: int, message: str) -> Exception:
        if self._guest.answered:
            return Broken()
        return Refused(Refuse(reason, status, message))

    async def _upgraded(self, event: h11.InformationalResponse) -> None:
        """Both directions raw, until one of them ends; then the guest's connection does too."""
        assert self._head.upgrade is not None  # or h11 had refused the reply
        await self._guest.send(
            h11.InformationalResponse(
                status_code=_SWITCHING, headers=self._reply(event), reason=b""
            )
        )
        await self._upload.end()
        line = self._connection.line
        upgraded = Upgraded(self._guest, line, self._needles, self._tally, self._limits)
        await upgraded.run(self._machine.trailing_data[0], self._tasks)
        raise Broken


def _one(headers: Headers, name: bytes) -> bytes | None:
    """A header's value; None when there is none, or more than one."""
    found = [value for each, value in headers if each == name]
    return found[0] if len(found) == 1 else None


def _length(headers: Headers) -> int:
    """Of the body, when a Content-Length frames it; else 0."""
    if _list(headers, b"transfer-encoding") is not None:
        return 0
    value = _one(headers, b"content-length")
    return 0 if value is None else int(value)


def _list(headers: Headers, name: bytes) -> bytes | None:
    """The values of a header that is a list, as one (RFC 9110 section 5.3)."""
    return b", ".join([value for each, value in headers if each == name]) or None
