"""After a switch of protocols: the bytes of both directions, the ones down still searched."""

from __future__ import annotations

import asyncio
from typing import Final

from agent_box.broker import scrub
from agent_box.broker.guest import Gone, Guest
from agent_box.broker.limits import Limits
from agent_box.broker.line import Line
from agent_box.broker.tally import Tally
from agent_box.process.tasks import TaskSet


class Upgraded:
    """Args:
    line: to the upstream.
    needles: what must not come down.
    """

    def __init__(
        self, guest: Guest, line: Line, needles: scrub.Needles, tally: Tally, limits: Limits
    ) -> None:
        self._guest: Final = guest
        self._line: Final = line
        self._search: Final = scrub.Scrub(needles, b"text/plain", None, None)
        self._tally: Final = tally
        self._limits: Final = limits
        self._clock: Final = asyncio.get_running_loop().time

    async def run(self, early: bytes, tasks: TaskSet) -> None:
        """Until one of the directions ends, or nothing came for too long.

        Args:
            early: what came with the head that switched.

        Raises:
            scrub.Cut: the credential came down.
            guest.Gone: the guest is away.
        """
        up = tasks.hold(self._up(), name="upgraded")
        try:
            more = early
            while True:
                if more:
                    self._tally.received(len(more))
                    await self._guest.send_raw(self._search.feed(more))
                more = await self._line.read(self._clock() + self._limits.upgraded_idle_s)
                if not more:
                    break
            await self._guest.send_raw(self._search.finish())
        except (OSError, TimeoutError):
            pass  # the end of it, one way or the other
        finally:
            up.cancel()
            await asyncio.wait((up,))

    async def _up(self) -> None:
        try:
            while data := await self._guest.raw():
                self._tally.sent(len(data))
                self._line.write(data)
                await self._line.drain(self._limits.idle_s)
        except (OSError, TimeoutError, Gone):
            pass
        self._line.abort()
