"""What guests tell of themselves, from port 5002 into the journal, as their claim.

Each guest that is up has one stream. An event is acknowledged when the journal has it, under an
id made of its number: so one that is sent again, after a restart on either side, is there once.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.handover import HandoverClient
from agent_box.engine.contract import Dial
from agent_box.guest import claims
from agent_box.guest.claims import EVENTS_PORT, EVENTS_VERSION, Rate, Said
from agent_box.guest.wire import Decoder, FrameError, pack, unpack
from agent_box.process.tasks import TaskSet

DIAL_S: Final = 10.0
AGAIN_S: Final = (0.5, 1.0, 2.0, 5.0, 15.0)
FORGED_S: Final = 60.0  # a guest that lied is not heard for this time
STEADY_S: Final = 30.0  # a stream that lived so long is dialled again at once
RUN: Final = 16  # hex digits
# What the engine says of a boot that is over, or never was.
GONE: Final = frozenset((Reason.NOT_FOUND, Reason.CONFLICT, Reason.WRONG_STATE, Reason.BAD_REQUEST))


class Claim(NamedTuple):
    """An event, checked for shape."""

    number: int
    kind: str
    facts: dict[str, str | int]


class Claims:
    """One stream of events as the host sees it, without I/O. After a `FrameError` it is dead."""

    def __init__(self, now: float) -> None:
        self._decoder = Decoder(claims.EVENT_MAX)
        self._due = 0
        self._sent = 0
        self._number: int | None = None
        # what a guest kept comes at once
        self._rate = Rate(now, claims.BURST * 8)
        self.run: str | None = None

    def feed(self, untrusted: bytes, now: float) -> list[Claim]:
        """Raises:
        FrameError: what no box-guest sends, or more than it may.
        """
        found = []
        for kind, untrusted_payload in self._decoder.feed(untrusted):
            fields = unpack(untrusted_payload, self._due)
            self._due += 1
            if self.run is None:
                self._greeted(kind, fields)
            else:
                found.append(self._event(kind, fields, now))
        return found

    def greet(self) -> bytes:
        """Our hello, when the guest's has come."""
        return self._pack(Said.HELLO, {"version": EVENTS_VERSION})

    def seen(self, number: int) -> bytes:
        """Says that everything up to that number is on record."""
        return self._pack(Said.SEEN, {"number": number})

    def _greeted(self, kind: int, fields: dict[str, Any]) -> None:
        run, versions = fields.get("run"), fields.get("versions")
        if kind != Said.HELLO or not isinstance(versions, list) or EVENTS_VERSION not in versions:
            raise FrameError("the first frame is no hello of ours")
        if not isinstance(run, str) or len(run) != RUN or not set(run) <= set("0123456789abcdef"):
            raise FrameError("a hello without a run")
        self.run = run

    def _event(self, kind: int, fields: dict[str, Any], now: float) -> Claim:
        number, facts = fields.get("number"), fields.get("facts")
        if kind != Said.EVENT or fields.keys() != {"number", "kind", "facts"}:
            raise FrameError("a frame that does not belong here")
        if type(number) is not int or not 1 <= number < 1 << 53:
            raise FrameError("an event without a number")
        if self._number is not None and number != self._number + 1:
            raise FrameError("an event that is not the next")
        if not claims.good(fields["kind"], facts):
            raise FrameError("an event of an unknown kind or shape")
        if not self._rate.take(now):
            raise FrameError("more events than a guest may tell")
        self._number = number
        assert isinstance(facts, dict)
        return Claim(number, fields["kind"], {k: _printable(v) for k, v in facts.items()})

    def _pack(self, kind: Said, fields: dict[str, Any]) -> bytes:
        self._sent += 1
        return pack(kind, self._sent - 1, fields)


class Listener:
    """Listens to every guest that is up.

    Args:
        record: puts a claim on record under an id; Refusal when it cannot.
        forged: counts a lie.
    """

    def __init__(
        self,
        dials: HandoverClient,
        tasks: TaskSet,
        record: Callable[[str, Claim, bytes], Awaitable[None]],
        forged: Callable[[str, int, Exception], Refusal],
    ) -> None:
        self._dials = dials
        self._tasks = tasks
        self._record = record
        self._forged = forged
        self._listening: dict[str, tuple[int, asyncio.Task[None]]] = {}

    def begin(self, instance: str, boot: int) -> None:
        """From now on, until the boot is over. Twice is as once."""
        before = self._listening.get(instance)
        if before is not None and before[0] == boot and not before[1].done():
            return
        self.end(instance)
        task = self._tasks.hold(self._listen(instance, boot), name="events")
        self._listening[instance] = (boot, task)

    def end(self, instance: str) -> None:
        before = self._listening.pop(instance, None)
        if before is not None:
            before[1].cancel()

    async def _listen(self, instance: str, boot: int) -> None:
        tries = 0
        while True:
            pause = AGAIN_S[min(tries, len(AGAIN_S) - 1)]
            began = time.monotonic()
            try:
                await self._stream(instance, boot)
                tries = 0 if time.monotonic() - began > STEADY_S else tries + 1
            except Refusal as refusal:
                if refusal.reason in GONE:
                    return
                tries += 1  # it boots, is paused, or somebody starts again
            except FrameError as error:
                self._forged(instance, EVENTS_PORT, error)
                pause = FORGED_S
            await asyncio.sleep(pause)

    async def _stream(self, instance: str, boot: int) -> None:
        """Until it ends. Raises Refusal, FrameError."""
        request = Dial(
            instance=instance, boot=boot, port=EVENTS_PORT, deadline_ms=int(DIAL_S * 1000)
        )
        fd = await self._dials.ask(request, deadline_s=DIAL_S + 1)
        loop = asyncio.get_running_loop()
        with socket.socket(fileno=fd) as sock:
            sock.setblocking(False)
            heard = Claims(time.monotonic())
            greeted = False
            while True:
                try:
                    untrusted = await loop.sock_recv(sock, claims.EVENT_MAX)
                    found = heard.feed(untrusted, time.monotonic()) if untrusted else []
                    if heard.run is not None and not greeted:
                        await loop.sock_sendall(sock, heard.greet())
                        greeted = True
                    for claim in found:
                        name = f"event {instance} {boot} {heard.run} {claim.number}"
                        id = hashlib.sha256(name.encode()).digest()[:16]
                        await self._record(instance, claim, id)
                    if found:
                        await loop.sock_sendall(sock, heard.seen(found[-1].number))
                except OSError:
                    return
                if not untrusted:
                    return


def _printable(value: Any) -> str | int:
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "?" for c in value)
    assert isinstance(value, int)
    return value
