"""Port 5001: terminals and commands. Each stream is one attachment of one of them.

An attachment that breaks its protocol ends; the program it belonged to does not.
"""

from __future__ import annotations

import contextlib
import selectors
import socket

from agent_box.guest import environment, launch, streams, system
from agent_box.guest.loop import Loop
from agent_box.guest.program import Program, Watcher
from agent_box.guest.streams import Frame, Opening, Refused
from agent_box.guest.wire import Decoder, FrameError

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Final

    Surroundings = Callable[[], "tuple[list[tuple[str, str]], dict[str, str]] | None"]

ATTACHMENTS_MAX: Final = 256
TERMINALS_MAX: Final = 32
COMMANDS_MAX: Final = 64  # that run
ENDED_MAX: Final = 64  # that are kept after their end
LINGER_S: Final = 10.0  # for the host to close a stream at its end
UNSENT_HIGH: Final = 1 << 18  # bytes for the host beyond which no more is made


class Terminals:
    """All programs that run for the host.

    Args:
        surroundings: gives the provisioned variables and what the hook exported; None while
            the hook runs, and `settled` is called when it has ended.
    """

    programs = Program

    def __init__(
        self,
        loop: Loop,
        surroundings: Surroundings,
        ground: launch.Ground = launch.AGENTS,
    ) -> None:
        self.loop = loop
        self._surroundings = surroundings
        self._ground = ground
        self._attachments: set[Attachment] = set()
        self._programs: dict[str, Program] = {}  # oldest first
        self._waiting: list[tuple[Attachment, Opening]] = []

    def serve(self, connection: socket.socket) -> None:
        """A new stream of the host's."""
        if len(self._attachments) >= ATTACHMENTS_MAX:
            raise OSError("there are too many streams")
        self._attachments.add(Attachment(self, connection))

    def settled(self) -> None:
        """The hook has ended: who waited for it is served."""
        waiting, self._waiting = self._waiting, []
        for attachment, opening in waiting:
            if attachment in self._attachments:
                attachment.open(opening)

    def closed(self, attachment: Attachment) -> None:
        self._attachments.discard(attachment)

    def open(self, attachment: Attachment, opening: Opening) -> Program | None:
        """The program that the attachment has from now on; None when it has to wait, or only
        wanted the list.

        Raises:
            Refused: why not.
        """
        if opening.op == "list":
            attachment.tell({"terminals": self._listed()})
            return None
        program = self._programs.get(opening.id)
        if program is None:
            if not opening.new:
                raise Refused("not-found", f"the guest has no {opening.op} {opening.id}")
            around = self._surroundings()
            if around is None:
                self._waiting.append((attachment, opening))
                return None
            return self._begin(opening, *around)
        if program.terminal != (opening.op == "terminal"):
            raise Refused("bad-request", f"{opening.id} is no {opening.op}")
        for output, offset in zip(program.outputs, opening.offsets, strict=True):
            if offset > output.end:
                raise Refused("bad-request", f"{opening.id} has not put out {offset} bytes")
        return program

    def _begin(
        self, opening: Opening, provisioned: list[tuple[str, str]], hook: dict[str, str]
    ) -> Program:
        terminal = opening.op == "terminal"
        most = TERMINALS_MAX if terminal else COMMANDS_MAX
        alike = [p for p in self._programs.values() if p.terminal == terminal and p.ended is None]
        if len(alike) >= most:
            raise Refused("exhausted", f"{most} of the guest's {opening.op}s run already")
        if any(opening.offsets):
            raise Refused("bad-request", f"a new {opening.op} has put out nothing")
        wanted = launch.Launch(
            opening.argv,
            opening.user,
            opening.directory,
            environment.build(
                opening.user,
                provisioned,
                hook,
                [(name, value) for name, value in opening.environment],
                opening.term if terminal else None,
            ),
            (opening.size[0], opening.size[1]) if terminal and opening.size else None,
        )
        program = self.programs(self.loop, opening.id, wanted, opening.timeout_ms, self._gone)
        program.start(wanted, self._ground)
        self._programs[opening.id] = program
        self._tidy()
        return program

    def _tidy(self) -> None:
        over = [p for p in self._programs.values() if p.ended and p.attachment is None]
        for program in over[: max(0, len(over) - ENDED_MAX)]:
            program.forget()

    def _gone(self, program: Program) -> None:
        if self._programs.get(program.id) is program:
            del self._programs[program.id]

    def _listed(self) -> list[dict[str, Any]]:
        return [
            {
                "terminal": program.id,
                "user": program.user,
                "attached": program.attachment is not None,
                "command": program.words,
            }
            for program in self._programs.values()
            if program.terminal and program.ended is None
        ]


class Attachment(Watcher):
    """One stream of the host's."""

    def __init__(self, terminals: Terminals, connection: socket.socket) -> None:
        self._terminals = terminals
        self._loop = terminals.loop
        self._connection = connection
        self._decoder = Decoder(streams.FRAME_MAX)
        self._unsent = bytearray()
        self._opening: Opening | None = None
        self._program: Program | None = None
        self._sent: list[int] = []  # of each source, the offset of what goes next
        self._taken = 0
        self._ending = False  # nothing follows what is unsent
        self._open = True
        self._loop.register(connection, selectors.EVENT_READ, self._ready)

    # ------------------------------------------------------------------ for the program

    def opened(self) -> None:
        """The program runs: the host is told where its bytes begin."""
        program, opening = self._program, self._opening
        assert program is not None and opening is not None
        self._sent = [
            max(offset, output.base)
            for offset, output in zip(opening.offsets, program.outputs, strict=True)
        ]
        for output, offset in zip(program.outputs, opening.offsets, strict=True):
            output.saw(offset)
        self._taken = program.input.taken
        fields = {"id": program.id, "offsets": self._sent, "taken": self._taken}
        self._unsent += streams.note(Frame.OPENED, fields)

    def pump(self) -> None:
        """Makes frames of what the program has, as far as the host takes them."""
        program = self._program
        if program is None or self._over():
            return
        while True:
            self._fill(program)
            if self._all_sent(program) and program.ended is not None:
                self.finish(program.ended)
                return
            self._send()
            if self._unsent or self._over() or self._all_sent(program):
                return

    def _over(self) -> bool:
        return self._ending or not self._open

    def _all_sent(self, program: Program) -> bool:
        return all(
            sent == output.end for sent, output in zip(self._sent, program.outputs, strict=True)
        )

    def _fill(self, program: Program) -> None:
        for source, output in enumerate(program.outputs):
            while len(self._unsent) < UNSENT_HIGH and self._sent[source] < output.end:
                piece = output.slice(self._sent[source], streams.CHUNK_MAX)
                self._unsent += streams.data(Frame.OUTPUT, self._sent[source], piece, source)
                self._sent[source] += len(piece)
        if program.input.taken != self._taken:
            self._taken = program.input.taken
            self._unsent += streams.data(Frame.TAKEN, self._taken, b"")

    def finish(self, fields: dict[str, Any]) -> None:
        """The last frame."""
        self._end_with(streams.note(Frame.ENDED, fields))

    def refuse(self, why: Refused) -> None:
        """The last frame, when nothing was opened."""
        fields = {"reason": why.reason, "text": str(why)[:500]}
        self._end_with(streams.note(Frame.REFUSED, fields))

    def tell(self, fields: dict[str, Any]) -> None:
        """The only frame of a stream that asks for no program."""
        self._end_with(streams.note(Frame.OPENED, fields))

    def _end_with(self, frame: bytes) -> None:
        if not self._ending and self._open:
            self._unsent += frame
            self._ending = True
            self._send()

    # ------------------------------------------------------------------ the stream

    def open(self, opening: Opening) -> None:
        """Asks for the program; again when it had to wait."""
        self._opening = opening
        try:
            program = self._terminals.open(self, opening)
        except Refused as why:
            self.refuse(why)
            return
        if program is not None:
            self._program = program
            size = None if opening.size is None else (opening.size[0], opening.size[1])
            program.attach(self, size if program.terminal else None)

    def _ready(self, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read()
            if events & selectors.EVENT_WRITE and self._open:
                self._send()
                self.pump()
        except FrameError as error:
            system.log(f"a terminal's stream ended: {error}")
            self._close(for_good=False)
        except Exception:
            self._close(for_good=False)  # a defect of ours: who waits for it comes again
            raise

    def _read(self) -> None:
        try:
            untrusted = self._connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            untrusted = b""
        if not untrusted:
            self._close(for_good=False)
            return
        if self._ending:
            return  # what it still sends is for nobody
        for kind, payload in self._decoder.feed(untrusted):
            if self._over():
                return
            self._take(kind, payload)

    def _take(self, kind: int, untrusted: bytes) -> None:
        if self._opening is None:
            if kind != Frame.OPEN:
                raise FrameError("the first frame opens nothing")
            self.open(Opening(streams.read_note(untrusted)))
            return
        if kind == Frame.LEAVE and not untrusted:
            self._close(for_good=True)
            return
        program = self._program
        if program is None:
            raise FrameError("a frame before anything was opened")
        if kind == Frame.INPUT:
            program.typed(*streams.read_input(untrusted))
        elif kind == Frame.INPUT_END:
            program.no_more(streams.read_input(untrusted)[0])
        elif kind == Frame.SEEN:
            program.saw(*streams.read_output(untrusted)[:2])
        elif kind == Frame.SIZE:
            program.resize(*streams.read_size(untrusted))
        elif kind == Frame.SIGNAL and len(untrusted) == 1:
            program.signal(untrusted[0])
        else:
            raise FrameError("a frame that does not belong here")

    def _send(self) -> None:
        if not self._open or (self._ending and not self._unsent):
            return
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass  # it is told when there is room
        except OSError:
            self._close(for_good=False)
            return
        if self._ending and not self._unsent:
            self._linger()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._loop.modify(self._connection, events, self._ready)

    def _linger(self) -> None:
        """All is said: what the host has under way is read and dropped until it closes, since
        a close with unread bytes would reset the stream and could take the last frame."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        self._loop.modify(self._connection, selectors.EVENT_READ, self._ready)
        self._loop.later(LINGER_S, lambda: self._close(for_good=False))
        program, self._program = self._program, None
        if program is not None:
            program.detach(self, for_good=False)

    def _close(self, *, for_good: bool) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.unregister(self._connection)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._terminals.closed(self)
        if self._program is not None:
            self._program.detach(self, for_good=for_good)
