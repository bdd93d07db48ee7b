"""A request's way up: its head with the credential, and its body as it comes."""

from __future__ import annotations

import asyncio
from typing import Final

import h11

from agent_box.broker import forward, gate
from agent_box.broker.guest import Gone, Guest
from agent_box.broker.head import Framing, Head
from agent_box.broker.limits import Limits
from agent_box.broker.refusal import Reason, Refuse
from agent_box.broker.tally import Tally
from agent_box.broker.upstream import Connection
from agent_box.process.tasks import TaskSet


class Upload:
    """Args:
    inject: what the gate gave for this request and this connection.
    machine: HTTP towards the upstream, before its first event.
    kept: of the request's body, what was read already.
    body_max: bytes of the body; None: any number.
    tasks: where a body that is not here yet is waited for.

    Attributes:
        sent: of the loop's clock: when the last part of the request was written.
        whole: all of it was.
        bad: why the body cannot go on; the connection to the upstream is closed then.
        gone: the guest went away; likewise.
    """

    def __init__(
        self,
        head: Head,
        inject: gate.Inject,
        guest: Guest,
        connection: Connection,
        machine: h11.Connection,
        tally: Tally,
        *,
        kept: list[bytes],
        body_max: int | None,
        limits: Limits,
        tasks: TaskSet,
    ) -> None:
        self._head: Final = head
        self._inject: Final = inject
        self._guest: Final = guest
        self._connection: Final = connection
        self._machine: Final = machine
        self._tally: Final = tally
        self._kept: Final = kept
        self._body_max: Final = body_max
        self._limits: Final = limits
        self._tasks: Final = tasks
        self._clock: Final = asyncio.get_running_loop().time
        self._task: asyncio.Task[None] | None = None
        self.sent = self._clock()
        self.whole = False
        self.bad: Refuse | None = None
        self.gone = False

    def begin(self) -> None:
        """The head goes up, and with it all of the body when it is here, as nearly always: then
        it costs no task, and h11 need not count its bytes."""
        start = self._machine.send(forward.request(self._inject)) or b""
        plain = self._head.framing is not Framing.CHUNKED and self._head.upgrade is None
        if plain and not self._kept and not self._head.expects_continue:
            body = self._guest.whole(self._head.length or 0)
            if body is not None:
                self._connection.line.write_now(start + body)
                self._tally.sent(len(body))
                self._over()
                return
        self._task = self._tasks.hold(self._rest(start), name="upload")

    async def end(self) -> None:
        """Nothing goes up any more."""
        self._guest.watch(None)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _rest(self, start: bytes) -> None:
        """Ends quietly: how the exchange ends is seen on the way down.

        The head leaves at the end of the loop's turn, together with what is here of the body;
        or not at all, when that is not framed as the head says.
        """
        try:
            self._connection.line.write(start)
            for part in self._kept:
                await self._pass(part)
            while not isinstance(event := await self._guest.body(), h11.EndOfMessage):
                await self._pass(bytes(event.data))
            trailers = forward.trailers(self._inject, event.headers.raw_items())
            self._write(h11.EndOfMessage(headers=trailers))
            self._over()
        except h11.RemoteProtocolError:
            self._refuse(Refuse(Reason.BODY_BAD, 400, "the body is not framed as its head says"))
        except Gone:
            self._left()
        except (OSError, TimeoutError, h11.LocalProtocolError):
            pass  # the upstream takes no more; it may have answered already

    async def _pass(self, part: bytes) -> None:
        if self._body_max is not None and self._tally.up + len(part) > self._body_max:
            self._refuse(Refuse(Reason.BODY_BAD, 413, "the body is too large"))
            raise ConnectionResetError
        self._write(h11.Data(data=part))
        self._tally.sent(len(part))
        await self._connection.line.drain(self._limits.idle_s)
        self.sent = self._clock()

    def _write(self, event: h11.Event) -> None:
        data = self._machine.send(event)
        if data:
            self._connection.line.write(data)

    def _over(self) -> None:
        self.whole = True
        self.sent = self._clock()
        self._guest.watch(self._left)

    def _refuse(self, refuse: Refuse) -> None:
        self.bad = refuse
        self._connection.close()

    def _left(self) -> None:
        """The guest is away: the request ends."""
        self.gone = True
        self._connection.close()
