"""The loop between our descriptors and a guest: stdin, stdout, stderr, signals and the bus, in
one poll and without a thread. No side is waited for while another has something to say."""

from __future__ import annotations

import errno
import os
import select
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final

from agent_box.bus.client import Client
from agent_box.channel.contract import Ended
from agent_box.cli.render import Failure
from agent_box.cli.session import Session
from agent_box.cli.sink import Sink
from agent_box.cli.tty import Signals

PIECE: Final = 1 << 16  # bytes of one read of stdin
_IN: Final = select.POLLIN


class NobodyReads(Exception):
    """Whoever read our output has closed it."""


class Pump(ABC):
    """One session and what belongs to it. What stdin, output and signals mean is the part of
    whoever derives from it.

    Args:
        session: with the guest.
        client: of the channel, whose descriptors tell of the session.
        signals: that were asked for.
        stdin: its descriptor; None: nothing is read.
    """

    def __init__(
        self, session: Session, client: Client, signals: Signals, stdin: int | None
    ) -> None:
        self.session = session
        self.sinks: dict[int, Sink] = {}
        self._client = client
        self._signals = signals
        self._stdin = stdin
        self._interest: dict[int, int] = {}
        self._poll = select.poll()
        for number in (*client.descriptors, signals.descriptor):
            self._poll.register(number, _IN)

    def run(self) -> Ended:
        """Until it ends, and all that it said is written.

        Raises:
            NobodyReads: our reader is gone.
            Failure: our output cannot be written.
            Refusal, session.Lost, and what the hooks raise.
        """
        session, client = self.session, self._client
        while True:
            session.step()
            self._show()
            session.step()  # acknowledges what was shown, and learns of the end
            if session.reply is not None and not any(s.waits for s in self.sinks.values()):
                return session.reply
            if not client.attend():
                self._wait()

    # The hooks.

    @abstractmethod
    def typed(self, data: bytes) -> None:
        """What was read from stdin; empty at its end, once."""

    @abstractmethod
    def shown(self, source: int, data: bytes) -> None:
        """Output of the guest for descriptor 1 or 2."""

    @abstractmethod
    def signalled(self, number: int) -> None:
        """A signal came."""

    @abstractmethod
    def wait_s(self) -> float | None:
        """Seconds after which `tick` wants to be called."""

    @abstractmethod
    def tick(self) -> None:
        """Called after each wait."""

    def wants_input(self) -> bool:
        """Whether stdin is to be read now."""
        return self.session.input.room >= PIECE

    # ------------------------------------------------------------------

    def put(self, number: int, data: bytes) -> None:
        """Writes to descriptor 1 or 2, now or when it takes more."""
        sink = self.sinks[number]
        try:
            sink.put(data)
        except OSError as error:
            self._cannot_write(number, error)

    def no_input(self) -> None:
        """Stdin is not read any more."""
        self._stdin = None

    def close(self) -> None:
        for sink in self.sinks.values():
            sink.close()

    def _show(self) -> None:
        while all(sink.room for sink in self.sinks.values()):
            found = self.session.receive()
            if found is None:
                return
            self.shown(*found)

    def _wait(self) -> None:
        wanted: dict[int, int] = {
            sink.descriptor: select.POLLOUT for sink in self.sinks.values() if sink.waits
        }
        if self._stdin is not None and self.wants_input():
            wanted[self._stdin] = wanted.get(self._stdin, 0) | _IN
        self._register(wanted)
        waits = [s for s in (self.session.wait_s(), self.wait_s()) if s is not None]
        ready = dict(self._poll.poll(max(1, int(min(waits) * 1000)) if waits else None))
        if self._signals.descriptor in ready:
            for number in self._signals.came():
                self.signalled(number)
        for number, sink in self.sinks.items():
            if sink.waits and sink.descriptor in ready:
                try:
                    sink.write()
                except OSError as error:
                    self._cannot_write(number, error)
        if self._stdin is not None and ready.get(self._stdin, 0) & ~select.POLLOUT:
            self._read(self._stdin)
        self.tick()

    def _read(self, stdin: int) -> None:
        try:
            data = os.read(stdin, PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # a terminal that has hung up
        if not data:
            self._stdin = None
        self.typed(data)

    def _register(self, wanted: Mapping[int, int]) -> None:
        """Only what has changed: it is the same most of the time."""
        if wanted == self._interest:
            return
        for number in self._interest.keys() - wanted.keys():
            self._poll.unregister(number)
        for number, events in wanted.items():
            self._poll.register(number, events)
        self._interest = dict(wanted)

    def _cannot_write(self, number: int, error: OSError) -> None:
        self.sinks[number].drop()
        if error.errno in (errno.EPIPE, errno.EIO, errno.ECONNRESET):
            raise NobodyReads from None
        name = "stdout" if number == 1 else "stderr"
        raise Failure(1, "output", f"{name}: {error.strerror}") from None
