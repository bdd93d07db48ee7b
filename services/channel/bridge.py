"""One stream to a harness in a guest (port 5004): opened, then frames both ways.

The guest keeps the harness whether or not a stream is there; what it puts out waits until it
is acknowledged, and what was sent to it has an offset. So a stream is a means, as everywhere:
when one is lost another is dialled.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.handover import HandoverClient
from agent_box.engine.contract import Dial
from agent_box.guest import streams
from agent_box.guest.streams import Frame
from agent_box.guest.wire import Decoder, FrameError

CHUNK: Final = 1 << 16
DIAL_S: Final = 10.0
OPEN_S: Final = 30.0  # a guest that has much to do may take a while to start a program


class Lost(Exception):
    """The stream ended, or was never there; another may be dialled."""


class Refused(Exception):
    """The guest does not open it. `reason` is a word of the bus, by the guest's claim."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Bridge:
    """An open stream. Close it.

    Attributes:
        offsets: of the next output byte that comes, of standard output and standard error.
        taken: input up to here has reached the harness.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._closed = False
        self._decoder = Decoder(streams.FRAME_MAX)
        self._frames: list[tuple[int, bytes]] = []
        self.offsets = (0, 0)
        self.taken = 0

    @classmethod
    async def dial(cls, dials: HandoverClient, instance: str, boot: int, opening: bytes) -> Bridge:
        """Dials and opens.

        Raises:
            Lost: nobody answers now.
            Refused: the guest will not.
            Refusal: what the engine says of a machine that is gone.
            FrameError: the guest sent what no box-guest sends.
        """
        request = Dial(
            instance=instance, boot=boot, port=streams.HARNESS_PORT, deadline_ms=int(DIAL_S * 1000)
        )
        try:
            fd = await dials.ask(request, deadline_s=DIAL_S + 1)
        except Refusal as refusal:
            if refusal.reason in (Reason.UNAVAILABLE, Reason.DEADLINE, Reason.EXHAUSTED):
                raise Lost from None
            raise
        made = cls(socket.socket(fileno=fd))
        try:
            made._sock.setblocking(False)
            async with asyncio.timeout(OPEN_S):
                await made.send(opening)
                kind, untrusted = await made.receive()
            made._opened(kind, streams.read_note(untrusted))
        except TimeoutError:
            made.close()
            raise Lost from None
        except BaseException:
            made.close()
            raise
        return made

    def _opened(self, kind: int, untrusted: dict[str, Any]) -> None:
        if kind == Frame.REFUSED:
            reason, text = untrusted.get("reason"), untrusted.get("text")
            if not isinstance(reason, str) or not isinstance(text, str):
                raise FrameError("a refusal without a reason")
            raise Refused(reason, "".join(c if c.isprintable() else " " for c in text[:300]))
        offsets, taken = untrusted.get("offsets"), untrusted.get("taken")
        if (
            kind != Frame.OPENED
            or not isinstance(offsets, list)
            or len(offsets) != 2
            or not all(type(n) is int and n >= 0 for n in (*offsets, taken))
        ):
            raise FrameError("a bad answer to an opening")
        self.offsets = (offsets[0], offsets[1])
        self.taken = int(taken or 0)

    async def send(self, data: bytes) -> None:
        """Raises:
        Lost
        """
        try:
            await asyncio.get_running_loop().sock_sendall(self._sock, data)
        except OSError:
            raise Lost from None

    async def receive(self) -> tuple[int, bytes]:
        """The next frame, not believed.

        Raises:
            Lost
            FrameError
        """
        while not self._frames:
            try:
                untrusted = await asyncio.get_running_loop().sock_recv(self._sock, CHUNK)
            except OSError:
                raise Lost from None
            if not untrusted:
                raise Lost
            self._frames += self._decoder.feed(untrusted)
        return self._frames.pop(0)

    def abort(self) -> None:
        """Ends it for whoever waits for a frame; the close is theirs."""
        if self._closed:
            return
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end did it first

    def close(self) -> None:
        self._sock.close()
        self._closed = True
