"""Terminals and commands: each stream of the bus is tied to one of the guest.

Nothing is kept here. What is not acknowledged lies in the guest, what is not taken at the
caller; so when this service is killed, both find each other again at the next opening.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, Protocol

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.handover import HandoverClient
from agent_box.bus.server import Call, StreamIO
from agent_box.channel.attached import Attached, End, Happened, Opened, Out
from agent_box.channel.contract import (
    Attach,
    Ended,
    Exec,
    ExecInput,
    ExecOutput,
    Instance,
    Shown,
    Size,
    Terminal,
    Terminals,
    Typed,
)
from agent_box.engine.contract import Dial
from agent_box.guest import streams
from agent_box.guest.wire import CONTROL_PORT, FrameError
from agent_box.process.tasks import TaskSet

DIAL_S: Final = 8.0
GONE_S: Final = 3.0  # until the engine knows of a machine's end
GONE_EVERY_S: Final = 0.1
LIST_S: Final = 8.0
DEPART_S: Final = 2.0
CHUNK: Final = 1 << 16
LISTED_MAX: Final = 256
# What the engine says of a boot that is over, or never was.
GONE: Final = frozenset((Reason.NOT_FOUND, Reason.CONFLICT, Reason.WRONG_STATE, Reason.BAD_REQUEST))
LEFT: Final = Ended(how="left-running", status=None, signal=None)
SOURCES: Final[tuple[Literal["stdout"], Literal["stderr"]]] = ("stdout", "stderr")


class House(Protocol):
    """What the channel gives."""

    def boot_of(self, instance: str) -> int | None:
        """Of a guest that is up; None when none is."""

    def forged(self, instance: str, port: int, error: Exception) -> Refusal: ...

    def note(self, instance: str, kind: str, facts: dict[str, Any]) -> None: ...


class Desk:
    """The handlers of attach, exec and terminals."""

    def __init__(self, house: House, dials: HandoverClient, tasks: TaskSet) -> None:
        self._house = house
        self._dials = dials
        self._tasks = tasks
        self._ties: set[_Tie] = set()

    def leave(self, instance: str) -> None:
        """Everything that is attached there ends: the guest stops, or is paused."""
        for tie in list(self._ties):
            if tie.instance == instance:
                tie.end(LEFT)

    def starts_again(self) -> None:
        """This service ends; the callers come back to the next."""
        for tie in list(self._ties):
            tie.end(Refusal(Reason.UNAVAILABLE, "the channel service starts again"))

    async def attach(self, request: Attach, call: Call, io: StreamIO) -> Ended:
        if not request.shell and not request.argv:
            raise Refusal(
                Reason.UNAVAILABLE, "this version gives no harness a terminal: it is not built"
            )
        size = _size(request.size)
        attached = Attached([request.offset])
        opening = _opening(
            "terminal",
            request.terminal,
            new=request.new,
            offsets=[request.offset],
            argv=request.argv,
            user=request.user,
            directory=request.directory,
            environment=[(v.name, v.value) for v in request.environment],
            timeout_ms=request.timeout_ms,
            term=request.term,
            size=size,
        )

        at, seen = request.offset, request.offset  # told, and heard

        async def down(happened: Happened) -> None:
            nonlocal at
            data = b""
            if isinstance(happened, Out):
                data = happened.untrusted
            elif isinstance(happened, Opened):
                at = happened.offsets[0]
            shown = Shown(terminal=request.terminal, offset=at, data=data, taken=attached.taken)
            at += len(data)
            await io.send(shown)

        def up(item: Any) -> bytes:
            nonlocal seen
            assert isinstance(item, Typed)
            frames = attached.typed(item.offset, item.data)
            if item.seen != seen:
                frames += attached.saw(0, item.seen)
                seen = item.seen
            if item.size is not None:
                frames += streams.size(*_size(item.size))
            return frames

        root = {"what": "terminal"} if request.user == "root" and request.new else None
        tie = _Tie(request.instance, attached, io, up, down)
        return await self._tied(tie, opening, root)

    async def exec(self, request: Exec, call: Call, io: StreamIO) -> Ended:
        if request.new and not request.argv:
            raise Refusal(Reason.BAD_REQUEST, "there is no command")
        seen = [request.stdout, request.stderr]
        attached = Attached(list(seen))
        opening = _opening(
            "command",
            request.command,
            new=request.new,
            offsets=list(seen),
            argv=request.argv,
            user=request.user,
            directory=request.directory,
            environment=[(v.name, v.value) for v in request.environment],
            timeout_ms=request.timeout_ms,
            term="",
            size=None,
        )

        at = list(seen)  # what was told, of each source

        async def down(happened: Happened) -> None:
            source, data = 0, b""
            if isinstance(happened, Out):
                source, data = happened.source, happened.untrusted
            elif isinstance(happened, Opened):
                at[:] = happened.offsets
            item = ExecOutput(
                source=SOURCES[source], offset=at[source], data=data, taken=attached.taken
            )
            at[source] += len(data)
            await io.send(item)

        ended = False

        def up(item: Any) -> bytes:
            nonlocal ended
            assert isinstance(item, ExecInput)
            frames = attached.typed(item.offset, item.data)
            for source, offset in enumerate((item.stdout, item.stderr)):
                if offset != seen[source]:
                    frames += attached.saw(source, offset)
                    seen[source] = offset
            if item.end and not ended:
                frames += attached.no_more()
                ended = True
            if item.signal is not None:
                if not 1 <= item.signal <= 64:
                    raise Refusal(Reason.BAD_REQUEST, f"there is no signal {item.signal}")
                frames += streams.signal(item.signal)
            return frames

        root = {"what": "command"} if request.user == "root" and request.new else None
        tie = _Tie(request.instance, attached, io, up, down)
        return await self._tied(tie, opening, root)

    async def terminals(self, request: Instance, call: Call) -> Terminals:
        boot = self._boot(request.instance)
        attached = Attached([])
        opening = streams.opening(
            "list", "", new=False, offsets=[], argv=[], user="agent", directory=None,
            environment=[], timeout_ms=None, term="", size=None,
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        with await self._dial(request.instance, boot) as sock:
            try:
                async with asyncio.timeout(LIST_S):
                    await loop.sock_sendall(sock, opening)
                    while True:
                        untrusted = await loop.sock_recv(sock, CHUNK)
                        if not untrusted:
                            raise ConnectionError
                        for happened in attached.feed(untrusted):
                            assert isinstance(happened, Opened)
                            return _listed(happened.untrusted)
            except FrameError as error:
                raise self._house.forged(request.instance, streams.PORT, error) from None
            except (OSError, TimeoutError):
                raise Refusal(Reason.CONNECTION_LOST, "the guest did not answer") from None

    # ------------------------------------------------------------------

    def _boot(self, instance: str) -> int:
        boot = self._house.boot_of(instance)
        if boot is None:
            raise Refusal(Reason.WRONG_STATE, "the guest is not up", facts={"state": "not running"})
        return boot

    async def _dial(
        self, instance: str, boot: int, port: int = streams.PORT, seconds: float = DIAL_S
    ) -> socket.socket:
        request = Dial(instance=instance, boot=boot, port=port, deadline_ms=int(seconds * 1000))
        try:
            fd = await self._dials.ask(request, deadline_s=seconds + 1)
        except Refusal as refusal:
            if refusal.reason in GONE:
                why = f"the guest is not up: {refusal.message}"
                raise Refusal(Reason.WRONG_STATE, why) from None
            raise Refusal(
                Reason.UNAVAILABLE, f"the guest does not answer: {refusal.message}"
            ) from None
        sock = socket.socket(fileno=fd)
        sock.setblocking(False)
        return sock

    async def _tied(self, tie: _Tie, opening: bytes, root: dict[str, Any] | None) -> Ended:
        boot = self._boot(tie.instance)
        self._ties.add(tie)  # from now on a stop is noticed
        try:
            tie.sock = await self._dial(tie.instance, boot)
            if root is not None:
                self._house.note(tie.instance, "root-session", root)
            tie.unsent += opening
            ended = await tie.run(self._tasks)
            if ended is not None:
                return ended
            if await self._is_gone(tie.instance, boot):
                return LEFT
            raise Refusal(Reason.CONNECTION_LOST, "the connection to the guest was lost")
        except FrameError as error:
            raise self._house.forged(tie.instance, streams.PORT, error) from None
        finally:
            self._ties.discard(tie)
            tie.settle()
            self._part(tie)

    def _part(self, tie: _Tie) -> None:
        """Closes the guest's stream; the guest is told when nobody will come back to it."""
        if tie.sock is None:
            return
        if tie.comes_back:
            tie.sock.close()
            return
        tie.unsent += streams.leave()
        sock = tie.sock
        departing = self._tasks.hold(tie.depart(), name="depart")
        departing.add_done_callback(lambda _: sock.close())  # cancelled before its start, too

    async def _is_gone(self, instance: str, boot: int) -> bool:
        """Whether the machine has ended, rather than a stream of it."""
        until = asyncio.get_running_loop().time() + GONE_S
        while asyncio.get_running_loop().time() < until:
            if self._house.boot_of(instance) != boot:
                return True
            try:
                (await self._dial(instance, boot, CONTROL_PORT, 1.0)).close()
                return False
            except Refusal as refusal:
                if refusal.reason is Reason.WRONG_STATE:
                    return True
            await asyncio.sleep(GONE_EVERY_S)
        return False


class _Tie:
    """One stream of the bus and one of a guest.

    Attributes:
        unsent: bytes for the guest.
        comes_back: whether the caller may open it again, so that the guest shall wait.
    """

    def __init__(
        self,
        instance: str,
        attached: Attached,
        io: StreamIO,
        up: Callable[[Any], bytes],
        down: Callable[[Happened], Awaitable[None]],
    ) -> None:
        self.instance = instance
        self.sock: socket.socket | None = None
        self.unsent = bytearray()
        self.comes_back = False
        self._attached = attached
        self._io = io
        self._up = up
        self._down = down
        self._outcome: asyncio.Future[Ended | None] = asyncio.get_running_loop().create_future()

    def end(self, how: Ended | Refusal) -> None:
        """From outside: it ends, and the guest keeps what it has."""
        self.comes_back = True
        if isinstance(how, Refusal):
            self._fail(how)
        else:
            self._done(how)

    def settle(self) -> None:
        """What came too late for `run` is nobody's."""
        if self._outcome.done() and not self._outcome.cancelled():
            self._outcome.exception()

    async def run(self, tasks: TaskSet) -> Ended | None:
        """Until one end is over. None: the guest's stream ended without a word.

        Raises:
            FrameError: what no box-guest sends.
            Refusal: what the guest refuses, or the caller did wrong.
        """
        both = [
            tasks.hold(self._guarded(work), name=name)
            for work, name in ((self._upward(), "up"), (self._downward(), "down"))
        ]
        try:
            return await self._outcome
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def depart(self) -> None:
        """Says what is unsent, in bounded time."""
        try:
            async with asyncio.timeout(DEPART_S):
                await self._flush()
        except (OSError, TimeoutError):
            pass  # the guest finds out by the stream's end

    async def _guarded(self, work: Awaitable[None]) -> None:
        """Whatever it raises is the stream's outcome, and no other stream's."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - raised again where the stream is waited for
            self._fail(error)

    def _done(self, how: Ended | None) -> None:
        if not self._outcome.done():
            self._outcome.set_result(how)

    def _fail(self, error: Exception) -> None:
        if not self._outcome.done():
            self._outcome.set_exception(error)

    async def _upward(self) -> None:
        await self._send()
        while (item := await self._io.recv()) is not None:
            if not self._attached.opened:
                raise Refusal(Reason.BAD_REQUEST, "an item before the first of the guest")
            self.unsent += self._up(item)
            await self._send()
        self._done(LEFT)  # the caller goes of its own accord

    async def _send(self) -> None:
        try:
            await self._flush()
        except OSError:
            return  # the downward half reads what the guest said last, and then its end

    async def _flush(self) -> None:
        assert self.sock is not None
        loop = asyncio.get_running_loop()
        while self.unsent:
            try:
                del self.unsent[: self.sock.send(self.unsent)]
            except BlockingIOError:
                writable = loop.create_future()
                loop.add_writer(self.sock, _wake, writable)
                try:
                    await writable
                finally:
                    loop.remove_writer(self.sock)

    async def _downward(self) -> None:
        assert self.sock is not None
        loop = asyncio.get_running_loop()
        while True:
            try:
                untrusted = await loop.sock_recv(self.sock, CHUNK)
            except OSError:
                untrusted = b""
            if not untrusted:
                self.comes_back = True
                self._done(None)
                return
            for happened in self._attached.feed(untrusted):
                if isinstance(happened, End):
                    self.comes_back = True  # perhaps it does not hear of its end
                    self._done(
                        Ended(how=happened.how, status=happened.status, signal=happened.signal)
                    )
                    return
                await self._down(happened)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _size(size: Size) -> tuple[int, int]:
    if not all(1 <= part <= streams.SIZE_MAX for part in (size.rows, size.columns)):
        raise Refusal(Reason.BAD_REQUEST, f"a terminal of {size.rows} by {size.columns}")
    return size.rows, size.columns


def _opening(op: str, id: str, **fields: Any) -> bytes:
    """The first frame.

    Raises:
        Refusal: BAD_REQUEST, the guest would not take it.
    """
    try:
        frame = streams.opening(op, id, **fields)
        streams.Opening(streams.read_note(frame[5:]))
    except FrameError as error:
        raise Refusal(Reason.BAD_REQUEST, str(error)) from None
    return frame


def _listed(untrusted: dict[str, Any]) -> Terminals:
    """What a guest claims to hold.

    Raises:
        FrameError: it is no list of terminals.
    """
    rows = untrusted.get("terminals")
    if not isinstance(rows, list) or len(rows) > LISTED_MAX:
        raise FrameError("no list of terminals")
    found = []
    for row in rows:
        if not isinstance(row, dict):
            raise FrameError("a terminal that is none")
        id, user, command = row.get("terminal"), row.get("user"), row.get("command")
        attached = row.get("attached")
        if (
            not isinstance(id, str)
            or not 1 <= len(id) <= streams.ID_MAX
            or not set(id) <= set("0123456789abcdef")
            or (user != "agent" and user != "root")
            or not isinstance(command, str)
            or type(attached) is not bool
        ):
            raise FrameError("a terminal that is none")
        shown = "".join(c if c.isprintable() else "?" for c in command[:200])
        found.append(Terminal(terminal=id, user=user, attached=attached, command=shown))
    return Terminals(terminals=found)
