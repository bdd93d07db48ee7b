"""The socket of one instance: whoever connects to it is that instance, and nobody else.

It lies in a directory of its own, which is shown to that instance's network worker alone.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from agent_box.broker.guest import Guest
from agent_box.broker.line import Line
from agent_box.broker.session import Boot, Desk, Session
from agent_box.process.paths import SOCKET_PATH_MAX
from agent_box.process.tasks import TaskSet

SOCKET: Final = "sock"
_BACKLOG: Final = 1024  # beyond it a connect fails at once, and the guest is told "refused"


class Endpoint:
    """Args:
    room: the directory; made when it is missing.
    instance: whose it is.
    boot: what runs of it now.
    """

    def __init__(
        self, room: Path, instance: str, boot: Callable[[], Boot | None], desk: Desk
    ) -> None:
        self._room: Final = room
        self._instance: Final = instance
        self._boot: Final = boot
        self._desk: Final = desk
        self._tasks: Final = TaskSet(desk.log)  # a defect ends one connection, and is logged
        self._open: set[Guest] = set()
        self._server: asyncio.AbstractServer | None = None

    async def open(self) -> None:
        """Raises:
        OSError: the socket cannot be made.
        """
        with suppress(FileExistsError):
            self._room.mkdir(mode=0o700)
        path = self._room / SOCKET
        with suppress(FileNotFoundError):
            path.unlink()  # of an earlier start of the broker
        directory = os.open(self._room, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            short = len(os.fsencode(path)) <= SOCKET_PATH_MAX
            name = str(path) if short else f"/proc/self/fd/{directory}/{SOCKET}"
            limits = self._desk.limits
            self._server = await asyncio.get_running_loop().create_unix_server(
                lambda: Line(limits.chunk, limits.buffer, self._accepted), name, backlog=_BACKLOG
            )
        finally:
            os.close(directory)

    async def close(self) -> None:
        """Ends what runs through it: each connection is reset."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for guest in list(self._open):
            guest.close()
        await self._tasks.cancel()
        (self._room / SOCKET).unlink(missing_ok=True)

    def _accepted(self, line: Line) -> None:
        if len(self._open) >= self._desk.limits.connections:
            line.abort()
            return
        # so that a piece of the largest size leaves by one system call, as far as the host allows
        sock = line.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._desk.limits.buffer)
        guest = Guest(line, self._desk.limits)
        self._open.add(guest)
        self._tasks.spawn(self._serve(guest), name="session")

    async def _serve(self, guest: Guest) -> None:
        try:
            await Session(guest, self._instance, self._boot, self._desk).run()
        finally:
            self._open.discard(guest)
            guest.close()
