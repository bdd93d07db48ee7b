"""The control stream of each guest, kept open: dialled, shaken hands on, dialled again.

A stream is a means, not a state: when it is lost, by a restart of the engine or of this
service or by the guest's own agent, the next request dials another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from pathlib import Path
from typing import Any, Final

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.handover import HandoverClient
from agent_box.channel.control import Hello, Session, refused
from agent_box.engine.contract import Dial
from agent_box.guest.wire import CONTROL_PORT, FrameError

RETRY_S: Final = 0.05  # nobody had bound the port yet; nothing tells when PID 1 does
REPLY_S: Final = 10.0
CHUNK: Final = 65536


class Forged(Exception):
    """The guest sent what no box-guest sends. Its stream was ended."""


class Link:
    """The control stream of one boot of one instance.

    Args:
        dials: the engine's socket for this service.
    """

    def __init__(self, dials: HandoverClient, instance: str, boot: int) -> None:
        self._dials = dials
        self.instance = instance
        self.boot = boot
        self._stream: socket.socket | None = None
        self._session = Session()
        self._turn = asyncio.Lock()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    async def hello(self, deadline_s: float) -> Hello:
        """Shakes hands, waiting for a guest that still boots.

        Raises:
            Refusal: BOOT_TIMEOUT, it did not in time; what the engine says of a machine that
                is gone.
            Forged: see there.
        """
        async with self._turn:
            return await self._connected(time.monotonic() + deadline_s)

    async def ask(self, op: str, fields: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """One request. Each may be repeated, so one whose stream was lost is asked again.

        Returns:
            The untrusted reply.

        Raises:
            Refusal: CONNECTION_LOST, the guest is silent; EXHAUSTED, it says that it cannot, with
                its own line; whatever the engine says of a machine that is gone.
            Forged: see there.
        """
        until = time.monotonic() + deadline_s
        async with self._turn:
            while True:
                try:
                    await self._connected(until)
                    untrusted = await self._round(op, fields, until)
                except _Lost:
                    self.close()
                    if time.monotonic() >= until:
                        raise Refusal(
                            Reason.CONNECTION_LOST, f"the guest did not answer to {op}"
                        ) from None
                    await asyncio.sleep(RETRY_S)
                    continue
                except BaseException:
                    self.close()  # a reply may still come, and is not the next one's
                    raise
                try:
                    why = refused(untrusted)
                except FrameError as error:
                    self.close()
                    raise Forged(str(error)) from None
                if why is not None:
                    raise Refusal(Reason.EXHAUSTED, f"the guest refuses: {why}")
                return untrusted

    async def _connected(self, until: float) -> Hello:
        while True:
            if self._stream is not None and self._session.hello is not None:
                return self._session.hello
            left = until - time.monotonic()
            if left <= 0:
                raise Refusal(Reason.BOOT_TIMEOUT, "the guest did not shake hands in time")
            try:
                await self._dial(left)
                await self._shake(until)
            except _Lost:
                self.close()
                await asyncio.sleep(RETRY_S)
            except BaseException:
                self.close()
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
            if refusal.reason in (Reason.UNAVAILABLE, Reason.DEADLINE):
                raise _Lost from None  # still booting, or the engine starts again
            raise
        self._stream = socket.socket(fileno=fd)
        self._stream.setblocking(False)
        self._session = Session()

    async def _shake(self, until: float) -> None:
        while self._session.hello is None:
            await self._receive(until)
        await self._send(self._session.greet(), until)

    async def _round(self, op: str, fields: dict[str, Any], until: float) -> dict[str, Any]:
        if op in ("time", "provision"):
            fields = {**fields, "time_ns": time.time_ns()}
        await self._send(self._session.request(op, fields), until)
        while True:
            reply = await self._receive(until)
            if reply is not None:
                return reply

    async def _send(self, data: bytes, until: float) -> None:
        assert self._stream is not None
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await asyncio.get_running_loop().sock_sendall(self._stream, data)
        except (OSError, TimeoutError):
            raise _Lost from None

    async def _receive(self, until: float) -> dict[str, Any] | None:
        assert self._stream is not None
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                untrusted = await asyncio.get_running_loop().sock_recv(self._stream, CHUNK)
        except (OSError, TimeoutError):
            raise _Lost from None
        if not untrusted:
            raise _Lost
        try:
            return self._session.feed(untrusted)
        except FrameError as error:
            raise Forged(str(error)) from None


class _Lost(Exception):
    """The stream ended or stayed silent."""


def dials(runtime: Path) -> HandoverClient:
    """The engine's socket for this service."""
    return HandoverClient(runtime / "dial" / "channel" / "sock")


def end(link: Link) -> None:
    """Closes whatever of it is open."""
    with contextlib.suppress(OSError):
        link.close()
