"""The control stream of each guest, kept open: dialled, shaken hands on, dialled again.

A stream is a means, not a state: when it is lost, by a restart of the engine or of this
service or by the guest's own agent, the next request dials another one. Nothing is read of a
guest but while an answer of its is awaited, so one that floods fills its own stream.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.handover import HandoverClient
from agent_box.channel.control import Hello, Session, refused
from agent_box.channel.keeper import Clocks
from agent_box.engine.contract import Dial
from agent_box.guest.wire import CONTROL_PORT, FrameError, VersionError

# Nobody had bound the port yet, and nothing tells when PID 1 does. Each try costs an emulated
# guest 20 ms of the time in which it boots.
RETRY_S: Final = (0.05, 0.1, 0.2, 0.3)
CHUNK: Final = 65536
TIMED: Final = frozenset(("provision", "time"))  # what carries the host's clocks


class Forged(Exception):
    """The guest sent what no box-guest sends. Its stream was ended. One line."""


class Link:
    """The control stream of one boot of one instance.

    Args:
        dials: the engine's socket for this service.
    """

    def __init__(self, dials: HandoverClient, instance: str, boot: int, clocks: Clocks) -> None:
        self._dials = dials
        self.instance = instance
        self.boot = boot
        self._clocks = clocks
        self._stream: socket.socket | None = None
        self._session = Session()
        self._turn = asyncio.Lock()
        self._ended = False

    def end(self) -> None:
        """For good: whoever waits for this guest is told that its boot is over."""
        self._ended = True
        if not self._turn.locked():
            self._close()
        elif self._stream is not None:
            try:
                self._stream.shutdown(socket.SHUT_RDWR)  # wakes whoever reads, who closes it
            except OSError:
                pass  # the guest ended it first, with the same effect

    def reset(self) -> None:
        """The stream is of no use any more; the next request dials another."""
        if not self._turn.locked():
            self._close()

    async def hello(self, deadline_s: float) -> Hello:
        """Shakes hands, waiting for a guest that still boots.

        Raises:
            Refusal: BOOT_TIMEOUT, it did not in time; BOOT_FAILED, it speaks another version;
                what the engine says of a machine that is gone.
            Forged: see there.
        """
        until = self._now() + deadline_s
        async with self._alone(until):
            try:
                return await self._connected(until)
            except _Silent:
                why = "the guest did not shake hands in time"
                raise Refusal(Reason.BOOT_TIMEOUT, why) from None

    async def ask(self, op: str, fields: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """One request. Each may be repeated, so one whose stream was lost is asked again.

        Returns:
            The untrusted reply.

        Raises:
            Refusal: CONNECTION_LOST, the guest is silent; EXHAUSTED, it says that it cannot, with
                its own line; BOOT_FAILED as `hello`; whatever the engine says of a machine that
                is gone.
            Forged: see there.
        """
        until = self._now() + deadline_s
        async with self._alone(until):
            while True:
                try:
                    await self._connected(until)
                    untrusted = await self._round(op, fields, until)
                    why = refused(untrusted)
                except _Silent:
                    raise Refusal(
                        Reason.CONNECTION_LOST, f"the guest did not answer to {op}"
                    ) from None
                except _Lost:
                    self._close()
                    await asyncio.sleep(RETRY_S[0])
                    continue
                except FrameError as error:
                    self._close()
                    raise Forged(str(error)) from None
                except BaseException:
                    self._close()  # a reply may still come, and is not the next one's
                    raise
                if why is not None:
                    raise Refusal(Reason.EXHAUSTED, f"the guest refuses: {why}")
                return untrusted

    def _now(self) -> float:
        return self._clocks.steady() / 1e9

    @asynccontextmanager
    async def _alone(self, until: float) -> AsyncIterator[None]:
        """One at a time speaks with a guest.

        Raises:
            Refusal: CONNECTION_LOST, the one before waits for it still.
        """
        try:
            async with asyncio.timeout(max(0.0, until - self._now())):
                await self._turn.acquire()
        except TimeoutError:
            raise Refusal(Reason.CONNECTION_LOST, "the guest is still being waited for") from None
        try:
            yield
        finally:
            self._turn.release()
            if self._ended:
                self._close()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    async def _connected(self, until: float) -> Hello:
        tries = 0
        while True:
            if self._ended:
                raise Refusal(Reason.CONFLICT, "another boot of the instance is meant")
            if self._stream is not None and self._session.hello is not None:
                return self._session.hello
            left = until - self._now()
            if left <= 0:
                raise _Silent
            try:
                await self._dial(left)
                await self._shake(until)
            except _Lost:
                self._close()
                await asyncio.sleep(min(RETRY_S[min(tries, len(RETRY_S) - 1)], left))
                tries += 1
            except VersionError as error:
                self._close()
                why = f"{error}: build the image anew with `agent-box image build`"
                raise Refusal(Reason.BOOT_FAILED, why) from None
            except FrameError as error:
                self._close()
                raise Forged(str(error)) from None
            except BaseException:
                self._close()
                raise

    async def _dial(self, left: float) -> None:
        request = Dial(
            instance=self.instance,
            boot=self.boot,
            port=CONTROL_PORT,
            deadline_ms=int(left * 1000),
        )
        try:
            fd = await self._dials.ask(request, deadline_s=left + 1)
        except Refusal as refusal:
            # still booting, or the engine starts again, or it has too much to do
            if refusal.reason in (Reason.UNAVAILABLE, Reason.DEADLINE, Reason.EXHAUSTED):
                raise _Lost from None
            raise
        self._stream = socket.socket(fileno=fd)
        self._stream.setblocking(False)
        self._session = Session()

    async def _shake(self, until: float) -> None:
        while self._session.hello is None:
            await self._receive(until)
        await self._send(self._session.greet(), until)

    async def _round(self, op: str, fields: dict[str, Any], until: float) -> dict[str, Any]:
        if op in TIMED:
            fields = {**fields, "time_ns": self._clocks.wall(), "at_ns": self._clocks.boot()}
        await self._send(self._session.request(op, fields), until)
        while True:
            reply = await self._receive(until)
            if reply is not None:
                return reply

    async def _send(self, data: bytes, until: float) -> None:
        assert self._stream is not None
        try:
            async with asyncio.timeout(max(0.0, until - self._now())):
                await asyncio.get_running_loop().sock_sendall(self._stream, data)
        except (OSError, TimeoutError):
            raise _Lost from None

    async def _receive(self, until: float) -> dict[str, Any] | None:
        assert self._stream is not None
        try:
            async with asyncio.timeout(max(0.0, until - self._now())):
                untrusted = await asyncio.get_running_loop().sock_recv(self._stream, CHUNK)
        except (OSError, TimeoutError):
            raise _Lost from None
        if not untrusted:
            raise _Lost
        return self._session.feed(untrusted)


class _Lost(Exception):
    """The stream ended or stayed silent."""


class _Silent(Exception):
    """No stream led to a hello in time."""


def dials(runtime: Path) -> HandoverClient:
    """The engine's socket for this service."""
    return HandoverClient(runtime / "dial" / "channel" / "sock")
