"""The first line of a client, and how long it may take. No I/O.

The scheme is Firecracker's (docs/vsock.md, "host-initiated connections"): the client writes
``CONNECT <port>\\n``, and after the guest accepted it reads ``OK <n>\\n``, where n is the
host's port. A refusal is the end of the stream, without a line.

While the guest's driver is not up, or the machine is paused, clients wait; only they know
for how long.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

LINE_BYTES: Final = 32  # "CONNECT 4294967295\n" has 19
GREETING_SECONDS: Final = 10.0
_MAX_PORT: Final = 0xFFFFFFFE  # 2**32 - 1 is VMADDR_PORT_ANY
_VERB: Final = b"CONNECT "


class LineError(Exception):
    """What a client wrote is not the line."""


class Line:
    """Gathers the line from pieces of any size."""

    __slots__ = ("_text",)

    def __init__(self) -> None:
        self._text = b""

    def wants(self) -> int:
        """How many bytes may be looked at next; at least 1."""
        return LINE_BYTES - len(self._text)

    def feed(self, untrusted: bytes) -> tuple[int, int | None]:
        """Takes what belongs to the line.

        Args:
            untrusted: the next bytes; what follows the line is the stream's own data.

        Returns:
            How many of them belong to the line, and the port when it is complete.

        Raises:
            LineError: this cannot become the line.
        """
        end = untrusted.find(b"\n", 0, self.wants())
        if end < 0:
            self._text += untrusted
            if len(self._text) >= LINE_BYTES:
                raise LineError("too long")
            return len(untrusted), None
        return end + 1, _port(self._text + untrusted[:end])


def _port(line: bytes) -> int:
    digits = line[len(_VERB) :]
    if not line.startswith(_VERB) or not digits.isdigit() or len(digits) > 10:
        raise LineError("not CONNECT and a port")
    port = int(digits)
    if port > _MAX_PORT:
        raise LineError("no such port")
    return port


def accepted(host_port: int) -> bytes:
    """What a client reads when the guest accepted."""
    return b"OK %d\n" % host_port


_Client = TypeVar("_Client", bound=Hashable)


class Porch(Generic[_Client]):
    """Clients before their stream: some have not said what they want, some wait for the guest.

    Attributes:
        expired: clients that were silent for too long.
    """

    def __init__(self, seconds: float = GREETING_SECONDS) -> None:
        self.expired = 0
        self._seconds = seconds
        self._silent: OrderedDict[_Client, float] = OrderedDict()  # by deadline
        self._parked: OrderedDict[_Client, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._silent) + len(self._parked)

    def came(self, client: _Client, now: float) -> None:
        """A client connected. `now` in seconds of a clock that never goes back."""
        self._silent[client] = now + self._seconds

    def park(self, client: _Client, port: int) -> None:
        """It said which port it wants; the guest cannot be asked yet."""
        self._silent.pop(client, None)
        self._parked[client] = port

    def left(self, client: _Client) -> None:
        """It went away, or has its stream."""
        self._silent.pop(client, None)
        self._parked.pop(client, None)

    def release(self) -> list[tuple[_Client, int]]:
        """Everybody who is parked, in order of arrival, with their ports; the guest is there."""
        parked = list(self._parked.items())
        self._parked.clear()
        return parked

    def deadline(self) -> float | None:
        """When somebody will have been silent for too long."""
        return next(iter(self._silent.values()), None)

    def overdue(self, now: float) -> list[_Client]:
        """Those who were silent for too long; they are forgotten here."""
        late = []
        for client, deadline in self._silent.items():
            if deadline > now:
                break
            late.append(client)
        for client in late:
            del self._silent[client]
        self.expired += len(late)
        return late
