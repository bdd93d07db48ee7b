"""One stream of port 5001 as the host sees it, without I/O: the other half of guest/terminal.py.

What the guest says is checked against what a box-guest could say: output goes on where it
stopped, input is taken in order, and nothing follows the end. What the caller sends is
checked too, so that no caller can make the guest end its stream.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

from agent_box.bus.errors import Reason, Refusal
from agent_box.guest import streams
from agent_box.guest.streams import Frame
from agent_box.guest.wire import Decoder, FrameError

TEXT_MAX: Final = 400
_REASONS: Final = {
    "bad-request": Reason.BAD_REQUEST,
    "not-found": Reason.NOT_FOUND,
    "exhausted": Reason.EXHAUSTED,
    "wrong-state": Reason.WRONG_STATE,
}
How = Literal["exited", "signalled", "taken", "timed-out"]
_HOWS: Final[dict[str, How]] = {
    "exited": "exited",
    "signalled": "signalled",
    "taken": "taken",
    "timed-out": "timed-out",
}


class Opened(NamedTuple):
    """It runs.

    Attributes:
        offsets: of the first byte that comes, of each source.
    """

    offsets: list[int]
    untrusted: dict[str, Any]


class Out(NamedTuple):
    """Bytes of one source."""

    source: int
    offset: int
    untrusted: bytes


class Taken(NamedTuple):
    """More input has arrived."""


class End(NamedTuple):
    """Its end, as the guest says."""

    how: How
    status: int | None
    signal: int | None


Happened = Opened | Out | Taken | End


class Attached:
    """The offsets of one stream. After a `FrameError` the stream must be closed.

    Args:
        wanted: the offset of the first output byte wanted, for each source.

    Attributes:
        next: of each source, the offset of the byte that comes next.
        taken: input up to here has arrived in the guest's program.
        opened: whether the guest said that it runs.
    """

    def __init__(self, wanted: list[int]) -> None:
        self._decoder = Decoder(streams.FRAME_MAX)
        self.next = list(wanted)
        self.taken = 0
        self.opened = False
        self._typed = 0  # the offset after the last input byte that was sent
        self._ended = False

    def feed(self, untrusted: bytes) -> list[Happened]:
        """What happened; output that belongs together is put together.

        Raises:
            FrameError: what no box-guest sends.
            Refusal: the guest refuses what was asked for, with its own line.
        """
        found: list[Happened] = []
        for kind, untrusted_payload in self._decoder.feed(untrusted):
            if self._ended:
                raise FrameError("a frame after the end")
            happened = self._one(kind, untrusted_payload)
            last = found[-1] if found else None
            if (
                isinstance(happened, Out)
                and isinstance(last, Out)
                and last.source == happened.source
                and len(last.untrusted) + len(happened.untrusted) <= streams.CHUNK_MAX
            ):
                merged = last.untrusted + happened.untrusted
                found[-1] = Out(last.source, last.offset, merged)
            elif happened != last:
                found.append(happened)
        return found

    def _one(self, kind: int, untrusted: bytes) -> Happened:
        if not self.opened:
            return self._first(kind, untrusted)
        if kind == Frame.OUTPUT:
            source, offset, data = streams.read_output(untrusted)
            if source >= len(self.next) or offset != self.next[source] or not data:
                raise FrameError("output that is not the next")
            self.next[source] += len(data)
            return Out(source, offset, data)
        if kind == Frame.TAKEN:
            offset = streams.read_input(untrusted)[0]
            if not self.taken <= offset <= self._typed:
                raise FrameError("input was taken that was not sent")
            self.taken = offset
            return Taken()
        if kind == Frame.ENDED:
            self._ended = True
            return _end(streams.read_note(untrusted))
        raise FrameError("a frame that does not belong here")

    def _first(self, kind: int, untrusted: bytes) -> Opened:
        fields = streams.read_note(untrusted)
        if kind == Frame.REFUSED:
            reason = _REASONS.get(str(fields.get("reason")))
            text = fields.get("text")
            if reason is None or not isinstance(text, str):
                raise FrameError("a refusal without a reason")
            raise Refusal(reason, text[:TEXT_MAX])
        if kind != Frame.OPENED:
            raise FrameError("the first frame opens nothing")
        self.opened = True
        if not self.next:
            self._ended = True
            return Opened([], fields)
        offsets, taken = fields.get("offsets"), fields.get("taken")
        if (
            not isinstance(offsets, list)
            or len(offsets) != len(self.next)
            or not all(type(offset) is int for offset in offsets)
            or not all(o >= w for o, w in zip(offsets, self.next, strict=True))
            or type(taken) is not int
            or not all(0 <= number < 1 << 62 for number in (taken, *offsets))
        ):
            raise FrameError("an opening without its offsets")
        self.next, self.taken, self._typed = list(offsets), taken, taken
        return Opened(list(offsets), fields)

    # What the caller does.

    def typed(self, offset: int, data: bytes) -> bytes:
        """The frame for input; empty when all of it was sent already.

        Raises:
            Refusal: BAD_REQUEST, a gap, or more than may be under way.
        """
        if not 0 <= offset <= self._typed or len(data) > streams.CHUNK_MAX:
            raise Refusal(Reason.BAD_REQUEST, f"the input does not go on at {offset}")
        fresh = data[self._typed - offset :]
        if self._typed + len(fresh) - self.taken > streams.INPUT_MAX:
            raise Refusal(Reason.BAD_REQUEST, "too much input is under way")
        if not fresh:
            return b""
        frame = streams.data(Frame.INPUT, self._typed, fresh)
        self._typed += len(fresh)
        return frame

    def no_more(self) -> bytes:
        """The frame that ends the input."""
        return streams.data(Frame.INPUT_END, self._typed, b"")

    def saw(self, source: int, offset: int) -> bytes:
        """The frame that acknowledges output.

        Raises:
            Refusal: BAD_REQUEST, that much never came.
        """
        if not 0 <= offset <= self.next[source]:
            raise Refusal(Reason.BAD_REQUEST, f"output up to {offset} was never sent")
        return streams.data(Frame.SEEN, offset, b"", source)


def _end(fields: dict[str, Any]) -> End:
    how, status, signal = fields.get("how"), fields.get("status"), fields.get("signal")
    known = _HOWS.get(how) if isinstance(how, str) else None
    if (
        known is None
        or not (type(status) is int and 0 <= status <= 255 if known == "exited" else status is None)
        or not (
            type(signal) is int and 1 <= signal <= 64 if known == "signalled" else signal is None
        )
    ):
        raise FrameError("an end of an unknown kind")
    return End(known, status, signal)
