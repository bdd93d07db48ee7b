"""The verb `attach`: a terminal in an instance; and `exec --tty`, which is one with a command."""

from __future__ import annotations

import os
import signal
import termios
import time
from typing import TYPE_CHECKING, Final

from agent_box.channel.contract import Attach, Size
from agent_box.cli import tty
from agent_box.cli.detach import ARMED_S, HOLD_S, Detach
from agent_box.cli.guest import LOST, SIGNALLED, Guest, Signalled, reach, status, variables
from agent_box.cli.pump import NobodyReads, Pump
from agent_box.cli.render import Failure, Render, Usage, table
from agent_box.cli.screen import Screen
from agent_box.cli.session import Lost, TerminalSession, draw
from agent_box.cli.sink import Sink

if TYPE_CHECKING:
    from agent_box.bus.client import Client
    from agent_box.cli.values import Place

FRESH_S: Final = 1.0  # so long the answer to a question may be on its way
DEPART_S: Final = 3.0  # without progress, for what was typed before the detach keys
CAN: Final = b"\x18"  # ends a sequence of which the terminal got a part
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
    with reach(out, target.name) as guest:
        argv = [] if shell or terminal is not None else _own_program(guest)
        request = _request(
            guest, target, user, terminal=terminal, argv=argv, env=env, timeout_ms=None
        )
        return _Attached(guest, request, detach_keys).serve(out)


def command(
    out: Render,
    *,
    target: Place,
    user: str,
    env: list[tuple[str, str]],
    timeout_ms: int | None,
    argv: list[bytes],
) -> int:
    """A new terminal with a command in it."""
    from agent_box.cli import values

    _need_terminal("exec --tty")
    keys = values.detach_keys(values.DEFAULT_DETACH_KEYS)
    with reach(out, target.name) as guest:
        request = _request(
            guest, target, user, terminal=None, argv=argv, env=env, timeout_ms=timeout_ms
        )
        return _Attached(guest, request, keys).serve(out)


def _own_program(guest: Guest) -> list[bytes]:
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


def _list(out: Render, name: str) -> None:
    from agent_box.channel.contract import Instance, Terminals

    with reach(out, name) as guest:
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


def _request(
    guest: Guest,
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
        environment=variables(env),
        timeout_ms=timeout_ms,
        term=_term(),
        size=Size(rows=rows, columns=columns),
    )


def _term() -> str:
    """Our TERM where the guest knows it too; unset or empty it is `dumb`."""
    ours = os.environ.get("TERM", "")
    if not ours:
        return "dumb"
    return ours if ours in _TERMS else TERM


def _need_terminal(what: str) -> None:
    for number, name in ((0, "stdin"), (1, "stdout")):
        if not os.isatty(number):
            raise Usage(f"{what}: {name} is not a terminal; `exec` without --tty needs none")


# ------------------------------------------------------------------------- terminals


class _Detached(Exception):
    """The detach keys were typed."""


class _Attached:
    """Our terminal on a terminal in the guest."""

    def __init__(self, guest: Guest, request: Attach, keys: tuple[int, ...]) -> None:
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
            except Signalled as end:
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
        return status(ended, guest)

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
            raise Signalled(signal.SIGHUP)
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
            raise Signalled(number)

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
