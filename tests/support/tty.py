"""A program at a terminal of its own, with a person who looks and types."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from support import procs
from support.until import until

LIMIT_S = 30.0  # only ends a test that hangs

# A shell in the place of a shell: without one, Ctrl-Z would stop nothing (an orphaned process
# group ignores it), and the program would lead the session.
_SHELL = """
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
child = os.fork()
if child == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execvp(sys.argv[1], sys.argv[1:])
while True:
    _, status = os.waitpid(child, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
"""


class Terminal:
    """Runs a command with stdin and stderr on a terminal and stdout in a pipe.

    Attributes:
        seen: what the terminal has shown.
    """

    def __init__(self, command: Sequence[str | Path], env: Mapping[str, str]) -> None:
        self.master, slave = pty.openpty()
        self.seen = b""
        self.before = termios.tcgetattr(self.master)

        def own() -> None:
            os.setsid()
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", _SHELL, *command],
            stdin=slave,
            stdout=subprocess.PIPE,
            stderr=slave,
            env=dict(env),
            preexec_fn=own,
        )
        self._slave = slave  # as the shell keeps it: what was typed and not read stays

    @property
    def pid(self) -> int:
        """Of the command itself."""
        return until("the command runs", lambda: procs.descendants(self.process.pid))[0]

    def type(self, text: bytes) -> None:
        while text:
            text = text[os.write(self.master, text) :]

    def until(self, text: bytes) -> None:
        """Waits until the terminal has shown `text` since the last call, and forgets it."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, (text, self.seen)
            if select.select([self.master], [], [], left)[0]:
                try:
                    piece = os.read(self.master, 4096)
                except OSError:  # the other side is closed
                    piece = b""
                assert piece, (text, self.seen)
                self.seen += piece
        self.seen = self.seen.partition(text)[2]

    @property
    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self.master)[3] & termios.ECHO)

    def unread(self) -> bytes:
        """What was typed and is left for the next program, e.g. the shell."""
        name = os.ttyname(self._slave)
        slave = os.open(name, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            return os.read(slave, 4096)
        except BlockingIOError:
            return b""
        finally:
            os.close(slave)

    def hang_up(self) -> None:
        """Closes the window, while the program runs."""
        os.close(self._slave)
        os.close(self.master)
        self.master = self._slave = -1

    def end(self) -> tuple[int, bytes, bytes]:
        """Waits for the end: exit code as a shell tells it, stdout, and what the terminal has
        shown besides."""
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        code = self.process.wait(LIMIT_S)
        while select.select([self.master], [], [], 0)[0]:
            try:
                piece = os.read(self.master, 4096)
            except OSError:
                break
            if not piece:
                break
            self.seen += piece
        return code, out, self.seen

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pid in (*procs.descendants(self.process.pid), self.process.pid):
            if self.process.poll() is None:
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        if self.master >= 0:
            os.close(self.master)
            os.close(self._slave)
