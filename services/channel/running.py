"""One run as it goes on: what happens is spooled first, then acted on.

The driver decides; this joins it to the spool, the updates, the stream to the guest and the
clock. After a restart the records of the spool are fed to a new driver, which comes to where
the old one was, and the guest says how much of our input its harness has.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.handover import HandoverClient, Hold
from agent_box.channel import acp, contract
from agent_box.channel.acp import Allowed, Driver, Effect, End, Send
from agent_box.channel.bridge import Bridge, Lost, Refused
from agent_box.channel.spool import BYTES_MAX, Kind, Record, Spool
from agent_box.channel.updates import Updates
from agent_box.guest import streams
from agent_box.guest.streams import Frame
from agent_box.guest.wire import FrameError

CANCEL_S: Final = 15.0  # that a harness has to answer to a cancel
RETRY_S: Final = (0.1, 0.3, 1.0, 2.0)
FORGED_MAX: Final = 5  # streams with bad frames, then it is given up
LEAVE_S: Final = 10.0  # for the guest to close a stream that we left
STDERR_MAX: Final = 4096
GONE: Final = frozenset((Reason.NOT_FOUND, Reason.CONFLICT, Reason.WRONG_STATE, Reason.BAD_REQUEST))

# event id, kind, facts
Noted = Callable[[bytes, str, dict[str, Any]], None]


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the first record of a spool says."""

    run: str
    instance: str
    boot: int
    command: list[str]
    prompt: str
    session: str | None
    directory: str
    mode: str | None
    authenticate: str | None
    timeout_ms: int | None
    begun_ms: int
    version: str


class Running:
    """A run, live or ended.

    Args:
        noted: told of what belongs in the journal; the same event has the same id.

    Attributes:
        kept: what it is.
        over: set at its end.
    """

    def __init__(self, kept: Kept, spool: Spool, updates: Path, noted: Noted) -> None:
        self.kept = kept
        self._spool = spool
        self._updates = Updates(updates)
        self._noted = noted
        self._driver = Driver(
            acp.Wanted(
                prompt=kept.prompt,
                session=kept.session,
                directory=kept.directory,
                mode=kept.mode,
                authenticate=kept.authenticate,
                version=kept.version,
            )
        )
        self._input = bytearray()  # for the harness, what it did not take yet
        self._base = 0  # offset of its first byte
        self._have = 0  # output up to here has arrived on the stream that is there now
        self._stderr = b""
        self._stderr_seen = 0
        self._events = 0
        self._cancelled = False
        self._sent = 0  # input up to here was sent on the stream that is there now
        self._leaving = False  # it was said on this stream that the harness is needed no more
        self._left_it = False  # and the guest knows
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()
        self.over = asyncio.Event()
        self._act(self._driver.begin(), kept.begun_ms)

    @property
    def session(self) -> str | None:
        return self._driver.session or self.kept.session

    @property
    def end(self) -> End | None:
        return self._driver.end

    def replay(self, records: Sequence[Record]) -> None:
        """Brings it to where it was.

        Raises:
            OSError: the disk is full.
        """
        for record in records:
            self._apply(record.kind, record.data, record.at_ms)

    def close(self) -> None:
        self._spool.close()
        self._updates.close()

    # ------------------------------------------------------------------ what is asked

    async def read(self, cursor: int, limit: int, seconds: float) -> contract.Updates:
        """Updates from `cursor` on, waiting for one.

        Raises:
            OSError: they cannot be read.
        """
        if cursor >= len(self._updates) and self.end is None:
            self._changed.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            except TimeoutError:
                pass  # nothing came: an empty answer
        found = self._updates.read(cursor, limit)
        cursor += len(found)
        end = self.end if cursor >= len(self._updates) else None
        told = None
        if end is not None:
            told = contract.RunEnd(
                how=end.how, stop_reason=end.stop_reason, code=end.code, text=end.text
            )
        return contract.Updates(updates=found, cursor=cursor, end=told)

    def cancel(self, why: Literal["timed-out", "cancelled"]) -> None:
        """Raises:
        OSError: the disk is full.
        """
        if self.end is None and not self._cancelled:
            self._happened(Kind.CANCEL, why.encode())

    def left(self) -> None:
        """The instance runs no more."""
        if self.end is None:
            self._happened(Kind.LEFT, b"")

    # ------------------------------------------------------------------ what happens

    def _happened(self, kind: Kind, data: bytes) -> None:
        """Spooled, then acted on."""
        at_ms = time.time_ns() // 1_000_000
        try:
            self._spool.add(kind, data, at_ms)
        except OSError:
            if kind is Kind.OUTPUT:
                raise
            # the end of a run is told even where it cannot be written down any more
        self._apply(kind, data, at_ms)

    def _apply(self, kind: Kind, data: bytes, at_ms: int) -> None:
        driver = self._driver
        effects: list[Effect] = []
        if kind is Kind.OUTPUT:
            effects = driver.feed(data)
        elif kind is Kind.CANCEL:
            self._cancelled = True
            asyncio.get_running_loop().call_later(CANCEL_S, self._give_up)
            effects = driver.cancel("timed-out" if data == b"timed-out" else "cancelled")
        elif kind is Kind.GIVE_UP:
            effects = driver.give_up()
        elif kind is Kind.EXITED:
            fields = json.loads(data)
            effects = driver.exited(fields["status"], fields["signal"], fields["stderr"])
        elif kind is Kind.LEFT:
            effects = driver.left()
        elif kind is Kind.LOST:
            effects = driver.lost(data.decode())
        elif kind is Kind.FLOOD:
            effects = driver.flooded(BYTES_MAX)
        self._act(effects, at_ms)

    def _act(self, effects: list[Effect], at_ms: int) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._input += effect.data
            elif isinstance(effect, acp.Update):
                update = contract.Update(at_ms=at_ms, kind=effect.kind, body=effect.body)
                self._updates.add(update)
            elif isinstance(effect, Allowed):
                if effect.option is not None:
                    facts: dict[str, Any] = {"title": effect.title, "option": effect.option}
                    self._note("permission-allowed", facts)
            else:
                self._note(
                    "run-ended",
                    {
                        "how": effect.how,
                        "stop_reason": effect.stop_reason,
                        "code": effect.code,
                        "session": self.session,
                    },
                )
                self.over.set()
        self._changed.set()
        self._wake.set()

    def _note(self, kind: str, facts: dict[str, Any]) -> None:
        self._events += 1
        id = hashlib.sha256(f"{self.kept.run} {self._events}".encode()).digest()[:16]
        told = {k: v for k, v in facts.items() if v is not None}
        self._noted(id, kind, {"run": self.kept.run, **told})

    # ------------------------------------------------------------------ the guest

    async def go(self, dials: HandoverClient, hold: Hold) -> None:
        """Until its end, and until the guest knows that we need its harness no more.

        Raises:
            OSError: the disk is full; the run has failed.
        """
        timeout = self._clock()
        try:
            tries = forged = 0
            while not self._done(tries):
                try:
                    bridge = await Bridge.dial(
                        dials, self.kept.instance, self.kept.boot, self._opening()
                    )
                    tries = 0
                    await self._converse(bridge, hold)
                except Lost:
                    await asyncio.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
                    tries += 1
                except Refused as refused:
                    self._refused(refused)
                    return
                except FrameError as error:
                    forged += 1
                    if forged >= FORGED_MAX:
                        self._happened(Kind.LOST, f"the guest sent a bad frame: {error}".encode())
                        return
                except Refusal as refusal:
                    if refusal.reason in GONE:
                        self.left()
                        return
                    await asyncio.sleep(RETRY_S[-1])
        except OSError as error:
            self._happened(Kind.LOST, f"the run cannot be kept: {error.strerror}".encode())
            raise
        finally:
            if timeout is not None:
                timeout.cancel()

    def _done(self, tries: int) -> bool:
        """Whether there is nothing left to be said to the guest, or nobody to hear it."""
        end = self.end
        return end is not None and (self._left_it or end.how == "left-running" or tries > 3)

    def _clock(self) -> asyncio.TimerHandle | None:
        if self.kept.timeout_ms is None:
            return None
        left = self.kept.begun_ms + self.kept.timeout_ms - time.time_ns() // 1_000_000
        loop = asyncio.get_running_loop()
        return loop.call_later(max(0.0, left / 1000), self.cancel, "timed-out")

    def _give_up(self) -> None:
        if self.end is None:
            self._happened(Kind.GIVE_UP, b"")

    def _refused(self, refused: Refused) -> None:
        if self.end is None:
            why = f"the guest lost the harness: {refused}"
            if self._spool.output == 0:
                why = f"the harness did not start: {refused}"
            self._happened(Kind.LOST, why.encode())

    def _opening(self) -> bytes:
        kept = self.kept
        begun = self._spool.output > 0
        return streams.opening(
            "command",
            kept.run,
            new=not begun and self.end is None,
            offsets=[self._spool.output, 0],
            argv=[word.encode() for word in kept.command],
            user="agent",
            directory=kept.directory,
            environment=[],
            timeout_ms=None,
            term="",
            size=None,
        )

    async def _converse(self, bridge: Bridge, hold: Hold) -> None:
        """Raises Lost, FrameError, OSError."""
        try:
            self._leaving = False
            self._have = bridge.offsets[0]
            if self._have != self._spool.output and self.end is None:
                raise FrameError("output that nobody has is gone")
            self._stderr_seen = bridge.offsets[1]
            self._took(bridge.taken)
            self._sent = bridge.taken
            self._wake.set()
            sending = hold(self._send(bridge), name="run-input")
            try:
                while True:
                    kind, untrusted = await bridge.receive()
                    if self._frame(kind, untrusted):
                        self._left_it = True
                        return
            except Lost:
                self._left_it = self._leaving
                raise
            finally:
                sending.cancel()
        finally:
            bridge.close()

    def _frame(self, kind: int, untrusted: bytes) -> bool:
        """Takes a frame of the guest's; whether it was the last."""
        if kind == Frame.OUTPUT:
            source, offset, data = streams.read_output(untrusted)
            if source == 0:
                self._output(offset, data)
            else:
                self._stderr = (self._stderr + data)[-STDERR_MAX:]
                self._stderr_seen = offset + len(data)
            self._wake.set()
        elif kind == Frame.TAKEN:
            self._took(streams.read_input(untrusted)[0])
            self._wake.set()
        elif kind == Frame.ENDED:
            fields = streams.read_note(untrusted)
            status, number = fields.get("status"), fields.get("signal")
            ended = {
                "status": status if type(status) is int else None,
                "signal": number if type(number) is int else None,
                "stderr": self._stderr.decode(errors="replace"),
            }
            if self.end is None:
                self._happened(Kind.EXITED, json.dumps(ended).encode())
            return True
        else:
            raise FrameError("a frame that does not belong here")
        return False

    def _output(self, offset: int, data: bytes) -> None:
        have = self._have
        if offset > have:
            raise FrameError("a gap in the output")
        fresh = data[have - offset :]
        self._have += len(fresh)
        if not fresh or self.end is not None:
            return  # what it says after its end is for nobody
        if have + len(fresh) > BYTES_MAX:
            self._happened(Kind.FLOOD, b"")
        else:
            self._happened(Kind.OUTPUT, fresh)

    def _took(self, offset: int) -> None:
        if not self._base <= offset <= self._base + len(self._input):
            raise FrameError("input was taken that never was")
        del self._input[: offset - self._base]
        self._base = offset

    async def _send(self, bridge: Bridge) -> None:
        """Sends what there is to be sent, until it is cancelled or the stream is lost."""
        acked = stderr = 0
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                out = bytearray()
                if self._have != acked or self._stderr_seen != stderr:
                    acked, stderr = self._have, self._stderr_seen
                    out += streams.data(Frame.SEEN, acked, b"", 0)
                    out += streams.data(Frame.SEEN, stderr, b"", 1)
                while (size := self._next_size()) > 0:
                    at = self._sent - self._base
                    piece = bytes(self._input[at : at + size])
                    out += streams.data(Frame.INPUT, self._sent, piece)
                    self._sent += size
                if self.end is not None:
                    await bridge.send(bytes(out) + streams.leave())
                    self._leaving = True
                    # The guest closes when it has read that; were we to close before, it could
                    # find out while it sends, and not read it.
                    asyncio.get_running_loop().call_later(LEAVE_S, bridge.abort)
                    return
                if out:
                    await bridge.send(bytes(out))
        except Lost:
            bridge.abort()

    def _next_size(self) -> int:
        """Bytes of the next piece: as much as the guest takes beyond what it has."""
        room = streams.INPUT_MAX - (self._sent - self._base)
        return min(streams.CHUNK_MAX, room, self._base + len(self._input) - self._sent)
