"""The verbs `attach` and `exec`: a terminal or a command in an instance."""

from __future__ import annotations

import os
import signal
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from agent_box.bus.errors import Reason, Refusal
from agent_box.channel.contract import Attach, Ended, Exec, Size, Variable
from agent_box.cli import link, tty
from agent_box.cli.detach import ARMED_S, HOLD_S, Detach
from agent_box.cli.pump import NobodyReads, Pump
from agent_box.cli.render import Failure, ReaderGone, Render, Usage, table
from agent_box.cli.screen import Screen
from agent_box.cli.session import CommandSession, Lost, TerminalSession, draw
from agent_box.cli.sink import Sink

if TYPE_CHECKING:
    from agent_box.bus.client import Client
    from agent_box.cli.values import Place
    from agent_box.registry.contract import Instance

TIMED_OUT: Final = 124  # as timeout(1)
LEFT: Final = 23  # the instance left running
LOST: Final = 14
SIGNALLED: Final = 128  # plus the number
LOOK_S: Final = 2.0  # between two questions whether the instance still runs
ASK_S: Final = 0.5  # for the answer; meanwhile nobody is heard
FRESH_S: Final = 1.0  # so long the answer to a question may be on its way
DEPART_S: Final = 3.0  # without progress, for what was typed before the detach keys
DEAF_S: Final = 1.0  # for a command to end whose output nobody reads
CAN: Final = b"\x18"  # ends a sequence of which the terminal got a part
FORWARDED: Final = tuple(
    getattr(signal, name)
    for name in ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"]
)
TERM: Final = "xterm-256color"  # for what the guest's terminfo does not know
# What ncurses-base has: every Debian image knows them.
_TERMS: Final = frozenset(
    [
        "ansi",
        "cygwin",
        "dumb",
        "linux",
        "mach",
        "mach-color",
        "pcansi",
        "rxvt",
        "rxvt-unicode",
        "rxvt-unicode-256color",
        "screen",
        "screen-256color",
        "screen-256color-bce",
        "screen-bce",
        "screen.xterm-256color",
        "sun",
        "tmux",
        "tmux-256color",
        "vt100",
        "vt102",
        "vt220",
        "vt52",
        "xterm",
        "xterm-256color",
        "xterm-color",
        "xterm-mono",
    ]
)


def attach(
    out: Render,
    *,
    target: Place,
    shell: bool,
    user: str,
    detach_keys: tuple[int, ...],
    terminal: str | None,
    list: bool,
    env: list[tuple[str, str]],
) -> int | None:
    """A terminal: a new one, one that is there, or the list of them."""
    if list:
        _list(out, target.name)
        return None
    if out.json:
        raise Usage("attach: --json goes with --list")
    _need_terminal("attach")
    with _guest(out, target.name) as guest:
        argv = [] if shell or terminal is not None else _own_program(guest)
        request = _attach(
            guest, target, user, terminal=terminal, argv=argv, env=env, timeout_ms=None
        )
        return _Attached(guest, request, detach_keys).serve(out)


def _own_program(guest: _Guest) -> list[bytes]:
    """The harness's own program for a terminal, and its arguments.

    Raises:
        Failure: exit 4, the instance has no harness, or the harness no such program.
    """
    from agent_box.config import presets

    name, harness = guest.name, guest.harness
    if harness is None:
        why = f"{name} has no harness: its profile had none when it was created"
        raise Failure(4, "no-harness", f"{why}; --shell opens a shell")
    tui = presets.load(harness).tui if isinstance(harness, str) else ()
    if not tui:
        what = harness if isinstance(harness, str) else "a harness that is a command"
        why = f"{what} has no program of its own for a terminal"
        raise Failure(4, "no-terminal-program", f"{why}; --shell opens a shell", name=name)
    return [word.encode() for word in tui]


def exec_command(
    out: Render,
    *,
    target: Place,
    user: str,
    env: list[tuple[str, str]],
    timeout: int | None,
    tty: bool,
    command: list[bytes],
) -> int:
    """A command: with our stdin, stdout and stderr, or with our terminal."""
    timeout_ms = None if timeout is None else timeout * 1000
    if tty:
        if out.json:
            raise Usage("exec: --tty has no --json")
        _need_terminal("exec --tty")
    with _guest(out, target.name) as guest:
        if tty:
            request = _attach(
                guest, target, user, terminal=None, argv=command, env=env, timeout_ms=timeout_ms
            )
            return _Attached(guest, request, _default_keys()).serve(out)
        return _Run(guest, _exec(guest, target, user, command, env, timeout_ms), out).serve()


# ------------------------------------------------------------------------ instance


class _Guest:
    """A running instance and the way to it."""

    def __init__(self, found: Instance, registry: Client, channel: Client):
        self.name = found.row.name
        self.id = found.id
        self.harness = found.harness
        self.channel = channel
        self._boots = found.boots
        self._registry = registry
        self._looked = 0.0

    def look(self) -> None:
        """A stream was lost. Whether the instance is to blame is asked now and then.

        Raises:
            Failure: it does not run any more, or not in the boot that it was.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        try:
            found = self._ask(ASK_S)
        except Refusal as refusal:
            if refusal.reason is Reason.NOT_FOUND:
                raise self.left("was deleted") from None
            return  # the registry is away as well
        if found.row.state not in ("running", "unknown"):
            raise self.left(f"is {found.row.state}")
        if found.boots != self._boots:
            raise self.left("was started anew")

    def ended(self) -> Failure:
        """The channel says that the instance left running: how is for the registry to tell."""
        how = "was stopped or paused"
        try:
            found = self._ask(ASK_S)
            if found.row.state != "running":
                how = f"is {found.row.state}"
        except Refusal as refusal:
            if refusal.reason is Reason.NOT_FOUND:
                how = "was deleted"
        return self.left(how)

    def left(self, how: str) -> Failure:
        return Failure(LEFT, "left-running", f"{self.name} {how}", name=self.name)

    def _ask(self, seconds: float) -> Instance:
        from agent_box.registry.contract import Instance, Name

        found = self._registry.call("inspect", Name(name=self.name), deadline_s=seconds)
        assert isinstance(found, Instance)
        if found.id != self.id:
            raise Refusal(Reason.NOT_FOUND, "another instance has the name")
        return found


@contextmanager
def _guest(out: Render, name: str) -> Iterator[_Guest]:
    """Raises Failure: exit 3, 4 or 12; and what `link.service` raises."""
    from agent_box.registry.contract import Instance, Name

    here = link.place()
    registry, _ = link.ready(here, "registry", out)
    try:
        # Its greeting is on the way while the registry is asked.
        channel = link.connect(here, "channel")
        try:
            found = registry.call("inspect", Name(name=name))
            assert isinstance(found, Instance)
            state = found.row.state
            if state == "unknown":
                raise Failure(
                    12, "state-unknown", f"the state of {name} cannot be observed", state=state
                )
            if state != "running":
                why = f"{name} is {state}; this verb needs running"
                raise Failure(4, "wrong-state", why, state=state)
            yield _Guest(found, registry, channel)
        finally:
            channel.close()
    finally:
        registry.close()


def _list(out: Render, name: str) -> None:
    from agent_box.channel.contract import Instance, Terminals

    with _guest(out, name) as guest:
        found = guest.channel.call("terminals", Instance(instance=guest.id))
    assert isinstance(found, Terminals)
    rows = [
        {"terminal": t.terminal, "user": t.user, "attached": t.attached, "command": t.command}
        for t in found.terminals
    ]
    header = ("TERMINAL", "USER", "ATTACHED", "COMMAND")
    lines = [
        (r["terminal"], r["user"], "yes" if r["attached"] else "no", r["command"] or "login shell")
        for r in rows
    ]
    out.result({"terminals": rows}, table(header, lines) if rows else "no terminals")


# ------------------------------------------------------------------------- requests


def _attach(
    guest: _Guest,
    target: Place,
    user: str,
    *,
    terminal: str | None,
    argv: list[bytes],
    env: list[tuple[str, str]],
    timeout_ms: int | None,
) -> Attach:
    rows, columns = tty.size(1)
    colours = os.environ.get("COLORTERM", "")
    if colours in ("truecolor", "24bit") and all(name != "COLORTERM" for name, _ in env):
        env = [("COLORTERM", colours), *env]
    return Attach(
        instance=guest.id,
        terminal=draw() if terminal is None else terminal,
        new=terminal is None,
        offset=0,
        shell=True,
        argv=argv,
        user=user,  # type: ignore[arg-type]
        directory=target.path,
        environment=_variables(env),
        timeout_ms=timeout_ms,
        term=_term(),
        size=Size(rows=rows, columns=columns),
    )


def _exec(
    guest: _Guest,
    target: Place,
    user: str,
    argv: list[bytes],
    env: list[tuple[str, str]],
    timeout_ms: int | None,
) -> Exec:
    return Exec(
        instance=guest.id,
        command=draw(),
        new=True,
        stdout=0,
        stderr=0,
        argv=argv,
        user=user,  # type: ignore[arg-type]
        directory=target.path,
        environment=_variables(env),
        timeout_ms=timeout_ms,
    )


def _variables(env: list[tuple[str, str]]) -> list[Variable]:
    return [Variable(name=name, value=value) for name, value in dict(env).items()]


def _term() -> str:
    """Our TERM where the guest knows it too; unset or empty it is `dumb`."""
    ours = os.environ.get("TERM", "")
    if not ours:
        return "dumb"
    return ours if ours in _TERMS else TERM


def _default_keys() -> tuple[int, ...]:
    from agent_box.cli import values

    return values.detach_keys(values.DEFAULT_DETACH_KEYS)


def _need_terminal(what: str) -> None:
    for number, name in ((0, "stdin"), (1, "stdout")):
        if not os.isatty(number):
            raise Usage(f"{what}: {name} is not a terminal; `exec` without --tty needs none")


# ------------------------------------------------------------------------- terminals


class _Detached(Exception):
    """The detach keys were typed."""


class _Ended(Exception):
    """A signal that ends us."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Attached:
    """Our terminal on a terminal in the guest."""

    def __init__(self, guest: _Guest, request: Attach, keys: tuple[int, ...]) -> None:
        self._guest = guest
        self._request = request
        self._keys = keys

    def serve(self, out: Render) -> int:
        """Until the program ends, or is left. The terminal is as it was, whatever happens."""
        guest = self._guest
        session = TerminalSession(guest.channel, self._request, guest.look)
        raw = tty.Raw(0)
        numbers = (*tty.ENDING, signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)
        with tty.Signals(numbers) as signals:
            screen = Screen(quiet=not self._request.new)
            pump = _TerminalPump(session, guest.channel, signals, raw, self._keys, screen)
            clean = False
            try:
                ended = pump.run()
                clean = ended.how in ("exited", "signalled")
            except _Detached:
                ended = None
            except _Ended as end:
                name = signal.Signals(end.number).name if end.number < 32 else str(end.number)
                why = f"ended by {name}; {self._again(session)}"
                raise Failure(SIGNALLED + end.number, "signalled", why) from None
            except (NobodyReads, termios.error):
                why = f"the terminal is gone; {self._again(session)}"
                raise Failure(SIGNALLED + signal.SIGHUP, "signalled", why) from None
            except Lost as lost:
                raise self._lost(lost, session) from None
            finally:
                session.close()
                pump.leave(clean=clean)
        if ended is None:
            out.progress(f"detached from {guest.name}; {self._again(session)}")
            return 0
        return _status(ended, guest)

    def _again(self, session: TerminalSession) -> str:
        if not session.begun:
            return "nothing was begun"
        return f"agent-box attach {self._guest.name} --terminal {session.terminal} goes on"

    def _lost(self, lost: Lost, session: TerminalSession) -> Failure:
        why = f"the connection to {self._guest.name} is lost: {lost}"
        return Failure(LOST, "connection-lost", why, terminal=session.terminal)


class _TerminalPump(Pump):
    def __init__(
        self,
        session: TerminalSession,
        client: Client,
        signals: tty.Signals,
        raw: tty.Raw,
        keys: tuple[int, ...],
        screen: Screen,
    ) -> None:
        super().__init__(session, client, signals, 0)
        self.sinks = {1: Sink(1)}
        self._terminal = session
        self._raw = raw
        self._is_raw = False
        self._keys = Detach(keys)
        self._typed_at = 0.0
        self._leaves_at: float | None = None  # the detach keys were typed
        self._had = 0  # of what was typed before them, when that was looked at last
        self._screen = screen
        self._asked = 0
        self._asked_at = -FRESH_S

    def wants_input(self) -> bool:
        # Before the guest has answered Ctrl-C is ours, and what is typed waits for the guest.
        return self._is_raw and super().wants_input()

    def typed(self, data: bytes) -> None:
        if not data:
            raise _Ended(signal.SIGHUP)
        self._typed_at = time.monotonic()
        if not data.startswith(b"\x1b"):  # a person's key, and no report of the terminal's
            self._screen.quiet = False
        self._pass(*self._keys.feed(data))

    def shown(self, source: int, data: bytes) -> None:
        self._begin()
        shown = self._screen.feed(data)
        if self._screen.asked != self._asked:
            self._asked, self._asked_at = self._screen.asked, time.monotonic()
        self.put(1, shown)

    def signalled(self, number: int) -> None:
        if number == signal.SIGWINCH:
            self._terminal.resize(*tty.size(1))
        elif number == signal.SIGCONT:
            self._raw.again()
            self._terminal.resize(*tty.size(1))
        elif number == signal.SIGTSTP:
            self._stop()
        else:
            raise _Ended(number)

    def wait_s(self) -> float | None:
        if self._leaves_at is not None:
            return 0.0 if self._has_all() else max(0.0, self._leaves_at - time.monotonic())
        since = time.monotonic() - self._typed_at
        if self._keys.holds:
            return max(0.0, HOLD_S - since)
        if self._keys.armed:
            return max(0.0, ARMED_S - since)
        return None

    def tick(self) -> None:
        if self.session.begun:
            self._begin()
        if self._leaves_at is not None:
            self._leaves_at = self._depart(self._leaves_at)
            return
        since = time.monotonic() - self._typed_at
        if self._keys.holds and since >= HOLD_S:
            self._pass(*self._keys.pass_on())
        elif self._keys.armed and since >= ARMED_S:
            self._keys.disarm()

    def _begin(self) -> None:
        if not self._is_raw:
            self._raw.enter()
            self._is_raw = True
            self._terminal.resize(*tty.size(1))

    def leave(self, *, clean: bool) -> None:
        """Gives the terminal back."""
        cut = CAN if self.sinks[1].drop() else b""
        if self._is_raw:
            last = cut + self._screen.reset() + (b"" if clean else b"\r\n")
            self._raw.leave(last, fence=time.monotonic() - self._asked_at < FRESH_S)
            self._is_raw = False
        self.close()

    def _pass(self, data: bytes, is_detached: bool) -> None:
        self.session.input.put(data)
        if is_detached:
            self.no_input()
            self._leaves_at = time.monotonic() + DEPART_S

    def _depart(self, at: float) -> float:
        """Leaves once the guest has all that was typed before the keys, or takes no more of it.
        Gives until when that is waited for."""
        now = time.monotonic()
        if self._has_all() or now >= at:
            raise _Detached
        had, self._had = self._had, self.session.input.taken
        return now + DEPART_S if self._had > had else at

    def _has_all(self) -> bool:
        return self.session.input.taken == self.session.input.end

    def _stop(self) -> None:
        was_raw = self._is_raw
        if was_raw:
            self._raw.leave(self._screen.reset() + b"\r\n", fence=False)
        self._signals.stop()
        if was_raw:
            self._raw.enter()
            self._terminal.resize(*tty.size(1))


# -------------------------------------------------------------------------- commands


class _Run:
    """A command with our stdin, stdout and stderr."""

    def __init__(self, guest: _Guest, request: Exec, out: Render) -> None:
        self._guest = guest
        self._request = request
        self._out = out

    def serve(self) -> int:
        guest, out = self._guest, self._out
        session = CommandSession(guest.channel, self._request, guest.look)
        with tty.Signals(FORWARDED) as signals:
            pump = _CommandPump(session, guest.channel, signals, out)
            try:
                ended = pump.run()
            except NobodyReads:  # as whoever writes to a pipe that nobody reads
                pump.end_unread()
                return SIGNALLED + signal.SIGPIPE
            except _Ended as end:
                why = "interrupted while nobody could pass the signal on"
                raise Failure(SIGNALLED + signal.SIGINT, "interrupted", why) from end
            except Lost as lost:
                why = f"the connection to {guest.name} is lost: {lost}"
                raise Failure(LOST, "connection-lost", why) from None
            finally:
                session.close()
                pump.close()
        code = _status(ended, guest)
        if out.json:
            out.end(code, how=ended.how, status=ended.status, signal=ended.signal)
        return code


class _CommandPump(Pump):
    def __init__(
        self, session: CommandSession, client: Client, signals: tty.Signals, out: Render
    ) -> None:
        super().__init__(session, client, signals, 0)
        self.sinks = {} if out.json else {1: Sink(1), 2: Sink(2)}
        self._command = session
        self._out = out
        self._sent = {"stdout": 0, "stderr": 0}
        self._deaf_until: float | None = None
        # A person's terminal must not be driven; a file or a pipe gets every byte.
        self._screens = {number: Screen() for number in self.sinks if os.isatty(number)}

    def end_unread(self) -> None:
        """Tells the command that nobody reads, and lets it end; what it says is dropped."""
        if self.session.connected and self.session.reply is None:
            self._deaf_until = time.monotonic() + DEAF_S
            self.no_input()
            self._command.signal(signal.SIGPIPE)
            with suppress(NobodyReads, Lost, Refusal, _Ended):
                self.run()

    def wait_s(self) -> float | None:
        if self._deaf_until is None:
            return None
        return max(0.0, self._deaf_until - time.monotonic())

    def tick(self) -> None:
        if self._deaf_until is not None and time.monotonic() >= self._deaf_until:
            raise NobodyReads

    def typed(self, data: bytes) -> None:
        if data:
            self.session.input.put(data)
        else:
            self._command.finish()

    def shown(self, source: int, data: bytes) -> None:
        if self._deaf_until is not None:
            return
        if self._out.json:
            self._tell(source, data)
            return
        screen = self._screens.get(source)
        self.put(source, data if screen is None else screen.feed(data))

    def signalled(self, number: int) -> None:
        if not self.session.connected or self.session.reply is not None:
            raise _Ended(number)
        self._command.signal(number)

    def _tell(self, source: int, data: bytes) -> None:
        from base64 import b64encode

        name = "stdout" if source == 1 else "stderr"
        text = b64encode(data).decode()
        try:
            self._out.item("output", {"source": name, "offset": self._sent[name], "data": text})
        except ReaderGone:
            raise NobodyReads from None
        self._sent[name] += len(data)


# ------------------------------------------------------------------------------- end


def _status(ended: Ended, guest: _Guest) -> int:
    """The exit code. Raises Failure: the end was not the program's own."""
    if ended.how == "exited":
        return (ended.status or 0) & 0xFF
    if ended.how == "signalled":
        return SIGNALLED + ((ended.signal or 0) & 0x7F)
    if ended.how == "timed-out":
        raise Failure(TIMED_OUT, "timed-out", "the time is over, and the command was ended")
    if ended.how == "taken":
        raise Failure(1, "taken", "another attach has taken this terminal over")
    raise guest.ended()
