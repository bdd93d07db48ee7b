"""A terminal or a command in a guest, over as many streams as it takes.

A stream ends with its connection; what runs in the guest does not. The caller draws the id,
counts bytes both ways, and after a lost connection opens the next stream with them: what the
guest has not acknowledged is sent again, and what has arrived here is not asked for again.

Nothing here waits. `step` does what can be done now; whoever calls it waits on the descriptors
of the client.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from agent_box.bus.client import Client, ClientStream
from agent_box.bus.errors import Code, Reason, Refusal
from agent_box.bus.schema import Wire
from agent_box.channel.contract import (
    CHUNK_MAX,
    INPUT_MAX,
    SEEN_EVERY,
    Attach,
    Ended,
    Exec,
    ExecInput,
    ExecOutput,
    Shown,
    Size,
    Typed,
)

LOST_S: Final = 30.0  # so long the channel may be away
OPEN_S: Final = 5.0  # for one try to open a stream
AGAIN_S: Final = 0.1  # between two tries, when the answer is that it does not go now
BUFFER_MAX: Final = 1 << 22  # bytes of input that wait; with more nothing is read
_PASSING: Final = frozenset((Code.UNAVAILABLE, Code.DEADLINE, Code.UNKNOWN_OUTCOME))


class Lost(Exception):
    """The channel or the guest did not come back within `LOST_S`. Its text says why."""


def draw() -> str:
    """An id for a terminal or a command."""
    return os.urandom(8).hex()


class Input:
    """Bytes on their way to the guest, until it has acknowledged them."""

    def __init__(self) -> None:
        self.taken = 0  # acknowledged
        self.sent = 0  # on the stream that is open now
        self._bytes = bytearray()  # from `taken` on

    @property
    def end(self) -> int:
        """Offset behind the last byte."""
        return self.taken + len(self._bytes)

    @property
    def room(self) -> int:
        return max(0, BUFFER_MAX - len(self._bytes))

    def put(self, data: bytes) -> None:
        self._bytes += data

    def next(self) -> bytes:
        """What to send at offset `sent`; empty when there is nothing, or no window for it."""
        size = min(CHUNK_MAX, self.end - self.sent, self.taken + INPUT_MAX - self.sent)
        at = self.sent - self.taken
        return bytes(self._bytes[at : at + size]) if size > 0 else b""

    def acknowledge(self, untrusted_taken: int) -> None:
        """The guest has all up to here. Raises ValueError: that was never sent."""
        if untrusted_taken > self.end:
            raise ValueError("it acknowledges what was never sent")
        if untrusted_taken > self.taken:
            del self._bytes[: untrusted_taken - self.taken]
            self.taken = untrusted_taken
            self.sent = max(self.sent, self.taken)

    def join(self, untrusted_taken: int) -> None:
        """Begins behind what somebody else has sent; only before anything is put."""
        if not self._bytes and self.taken == 0:
            self.taken = untrusted_taken

    def again(self) -> None:
        """The stream is lost: all that is not acknowledged is to be sent again."""
        self.sent = self.taken


class Session(ABC):
    """What terminals and commands have in common.

    Args:
        client: of the channel.
        gone: asked when a stream was lost; raises when nothing will come back, because the
            instance does not run any more.
        monotonic: the clock, seconds.

    Attributes:
        input: to the guest.
        begun: whether the guest has answered.
        reply: how it ended; None while it has not.
    """

    name = ""

    def __init__(
        self,
        client: Client,
        gone: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.input = Input()
        self.begun = False
        self.reply: Ended | None = None
        self._client = client
        self._gone = gone
        self._now = monotonic
        self._stream: ClientStream | None = None
        self._answered = False  # on this stream
        self._lost_at: float | None = None
        self._again_at = 0.0
        self._why = ""

    @property
    def connected(self) -> bool:
        """Whether the guest is there, as far as is known."""
        return self._answered

    def wait_s(self) -> float | None:
        """Seconds after which `step` wants to be called, whatever happens meanwhile."""
        now = self._now()
        if self._stream is None:
            return max(0.0, self._again_at - now)
        if not self._stream.accepted:
            return max(0.05, (self._stream.deadline_ns - _boottime()) / 1e9)
        return None

    def step(self) -> None:
        """Opens, reads the state of the stream and sends.

        Raises:
            Refusal: the channel or the guest does not give what is asked for.
            Lost: for good.
            Exception: what `gone` raises.
        """
        if self.reply is not None:
            return
        if self._stream is None:
            if self._now() < self._again_at:
                return
            self._open()
        stream = self._stream
        assert stream is not None
        if stream.done and not stream.waiting:
            self._over(stream)
            return
        if not self._answered:
            # Once accepted it may take its time: the guest may have its hook to run first.
            if not stream.accepted and stream.deadline_ns <= _boottime():
                self._lose(Refusal(Reason.UNAVAILABLE, "the channel does not answer"))
            return
        while stream.credit > 0 and (item := self._up()) is not None:
            stream.send(item)

    def receive(self) -> tuple[int, bytes] | None:
        """The next piece of output: number of the descriptor and bytes; None: nothing now."""
        stream = self._stream
        while stream is not None and stream.waiting:
            item = stream.recv()
            assert item is not None
            found = self._arrived(item)
            if not self._answered:
                self._answered = self.begun = True
                self._lost_at = None
            if found[1]:
                return found
        return None

    def close(self) -> None:
        """Leaves; what runs in the guest stays as it is."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    # What differs.

    @abstractmethod
    def _request(self) -> Wire:
        """With what the next stream is opened."""

    @abstractmethod
    def _up(self) -> Wire | None:
        """The next item to send, if there is one."""

    @abstractmethod
    def _arrived(self, item: Wire) -> tuple[int, bytes]:
        """An item came: number of the descriptor that it is for, and bytes."""

    # ------------------------------------------------------------------

    def _open(self) -> None:
        self._answered = False
        self._stream = self._client.opening(self.name, self._request(), deadline_s=OPEN_S)

    def _over(self, stream: ClientStream) -> None:
        if stream.error is None:
            assert isinstance(stream.reply, Ended)
            self.reply = stream.reply
            return
        error = stream.error
        if error.reason is Reason.CONNECTION_LOST or (self.begun and error.code in _PASSING):
            self._lose(error)
            return
        if self.begun and error.reason is Reason.WRONG_STATE:
            self._gone()
        if self.begun and error.reason in (Reason.NOT_FOUND, Reason.WRONG_STATE):
            raise Lost(error.message)
        raise error

    def _lose(self, why: Refusal) -> None:
        self.close()
        self._answered = False
        self.input.again()
        now = self._now()
        if self._lost_at is None:
            self._lost_at = now
        self._why = why.message
        self._gone()
        if now - self._lost_at > LOST_S:
            raise Lost(self._why)
        self._again_at = now + AGAIN_S

    @staticmethod
    def _rest(data: bytes, offset: int, got: int) -> bytes:
        """Of what arrived, what is new."""
        return data[got - offset :] if offset < got else data


class TerminalSession(Session):
    """A terminal.

    Args:
        attach: as it is asked for; `new`, `offset` and `size` change as it goes on.
    """

    name = "attach"

    def __init__(
        self,
        client: Client,
        attach: Attach,
        gone: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(client, gone, monotonic)
        self._attach = attach
        self._got = 0
        self._seen = 0  # as it was told
        self._size = attach.size
        self._told = attach.size

    @property
    def terminal(self) -> str:
        """Its id."""
        return self._attach.terminal

    def resize(self, rows: int, columns: int) -> None:
        self._size = Size(rows=rows, columns=columns)

    def _request(self) -> Attach:
        import msgspec

        self._told = self._size
        self._seen = self._got
        return msgspec.structs.replace(
            self._attach,
            new=self._attach.new and not self.begun,
            offset=self._got,
            size=self._size,
        )

    def _up(self) -> Typed | None:
        size = self._size if self._size != self._told else None
        data = self.input.next()
        if not data and size is None and self._got - self._seen < SEEN_EVERY // 4:
            return None
        item = Typed(offset=self.input.sent, data=data, seen=self._got, size=size)
        self.input.sent += len(data)
        self._seen = self._got
        self._told = self._size
        return item

    def _arrived(self, item: Wire) -> tuple[int, bytes]:
        assert isinstance(item, Shown)
        if not self.begun:
            self.input.join(item.taken)
        _acknowledge(self.input, item.taken)
        if not self._answered:
            self.input.again()
        data = self._rest(item.data, item.offset, self._got)
        self._got = max(self._got, item.offset + len(item.data))
        return 1, data


class CommandSession(Session):
    """A command without a terminal."""

    name = "exec"

    def __init__(
        self,
        client: Client,
        command: Exec,
        gone: Callable[[], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(client, gone, monotonic)
        self._exec = command
        self._got = {"stdout": 0, "stderr": 0}
        self._seen = dict(self._got)
        self._end = False
        self._told_end = False
        self._signals: list[int] = []

    def finish(self) -> None:
        """No more input is put."""
        self._end = True

    def signal(self, number: int) -> None:
        """Sends a signal to the command."""
        self._signals.append(number)

    def _request(self) -> Exec:
        import msgspec

        self._seen = dict(self._got)
        self._told_end = False
        return msgspec.structs.replace(
            self._exec,
            new=not self.begun,
            stdout=self._got["stdout"],
            stderr=self._got["stderr"],
        )

    def _up(self) -> ExecInput | None:
        data = self.input.next()
        is_last = self._end and self.input.sent + len(data) == self.input.end
        number = self._signals.pop(0) if self._signals else None
        due = any(self._got[s] - self._seen[s] >= SEEN_EVERY // 4 for s in self._got)
        if not data and number is None and not due and is_last is self._told_end:
            return None
        item = ExecInput(
            offset=self.input.sent,
            data=data,
            end=is_last,
            signal=number,
            stdout=self._got["stdout"],
            stderr=self._got["stderr"],
        )
        self.input.sent += len(data)
        self._seen = dict(self._got)
        self._told_end = is_last
        return item

    def _arrived(self, item: Wire) -> tuple[int, bytes]:
        assert isinstance(item, ExecOutput)
        _acknowledge(self.input, item.taken)
        if not self._answered:
            self.input.again()
        got = self._got[item.source]
        if item.offset > got:
            raise Lost("some of the output is not there any more")
        data = self._rest(item.data, item.offset, got)
        self._got[item.source] = max(got, item.offset + len(item.data))
        return (1 if item.source == "stdout" else 2), data


def _acknowledge(input: Input, untrusted_taken: int) -> None:
    try:
        input.acknowledge(untrusted_taken)
    except ValueError as error:
        raise Refusal(Reason.INTERNAL, f"the channel: {error}") from None


def _boottime() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
