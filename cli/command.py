"""The verb `exec`: a command in an instance."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from agent_box.bus.errors import Refusal
from agent_box.channel.contract import Exec
from agent_box.cli import tty as host
from agent_box.cli.guest import LOST, SIGNALLED, Guest, Signalled, reach, status, variables
from agent_box.cli.pump import NobodyReads, Pump
from agent_box.cli.render import Failure, ReaderGone, Render, Usage
from agent_box.cli.screen import Screen
from agent_box.cli.session import CommandSession, Lost, draw
from agent_box.cli.sink import Sink

if TYPE_CHECKING:
    from agent_box.bus.client import Client
    from agent_box.cli.values import Place

DEAF_S: Final = 1.0  # for a command to end whose output nobody reads
FORWARDED: Final = tuple(
    getattr(signal, name)
    for name in ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"]
)


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
        from agent_box.cli import terminal

        return terminal.command(
            out, target=target, user=user, env=env, timeout_ms=timeout_ms, argv=command
        )
    with reach(out, target.name) as guest:
        return _Run(guest, _request(guest, target, user, command, env, timeout_ms), out).serve()


def _request(
    guest: Guest,
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
        environment=variables(env),
        timeout_ms=timeout_ms,
    )


class _Run:
    """A command with our stdin, stdout and stderr."""

    def __init__(self, guest: Guest, request: Exec, out: Render) -> None:
        self._guest = guest
        self._request = request
        self._out = out

    def serve(self) -> int:
        guest, out = self._guest, self._out
        session = CommandSession(guest.channel, self._request, guest.look)
        with host.Signals(FORWARDED) as signals:
            pump = _CommandPump(session, guest.channel, signals, out)
            try:
                ended = pump.run()
            except NobodyReads:  # as whoever writes to a pipe that nobody reads
                pump.end_unread()
                return SIGNALLED + signal.SIGPIPE
            except Signalled as end:
                why = "interrupted while nobody could pass the signal on"
                raise Failure(SIGNALLED + signal.SIGINT, "interrupted", why) from end
            except Lost as lost:
                why = f"the connection to {guest.name} is lost: {lost}"
                raise Failure(LOST, "connection-lost", why) from None
            finally:
                session.close()
                pump.close()
        code = status(ended, guest)
        if out.json:
            out.end(code, how=ended.how, status=ended.status, signal=ended.signal)
        return code


class _CommandPump(Pump):
    def __init__(
        self, session: CommandSession, client: Client, signals: host.Signals, out: Render
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
            with suppress(NobodyReads, Lost, Refusal, Signalled):
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
            raise Signalled(number)
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
