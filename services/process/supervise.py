"""Runs supervisord inside this process.

In the same process, so that the daemon's lock lives exactly as long as supervisord, whatever
ends it. When it is killed, the kernel kills its children: each asks for that before it
becomes the program, so that there is no moment at which one could be left over.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

from supervisor.medusa import asyncore_25 as asyncore
from supervisor.options import ServerOptions
from supervisor.states import ProcessStates, SupervisorStates
from supervisor.supervisord import Supervisor

from agent_box.process import notices
from agent_box.process.paths import told
from agent_box.process.supervision import (
    CONFIG_FILE,
    GROUP,
    NOTICES_LINK,
    REPORT,
    SOCKET_FILE,
    TELL,
)

REMIND_S: Final = 1.0
REFRESH_S: Final = 5.0
TELL_S: Final = 1.0
REPORT_S: Final = 10.0  # after the start: whoever waits for a service should not wait for it
_PR_SET_PDEATHSIG: Final = 1
# What supervisord sets handlers for (ServerOptions.setsignals) and what Python ignores.
_CHANGED: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
    signal.SIGCHLD,
    signal.SIGUSR2,
    signal.SIGPIPE,
    signal.SIGXFSZ,
)
_libc: Final = ctypes.CDLL(None, use_errno=True)


class SupervisorError(Exception):
    """supervisord could not start. The message is one line for a person."""


def run(
    directory: Path,
    *,
    on_running: Callable[[], None],
    refresh: Callable[[], object],
) -> None:
    """Runs supervisord until SIGTERM, SIGINT, SIGQUIT or SIGHUP and every program is gone.

    The caller holds the daemon's lock and stands in the main thread; it must not have
    threads, because the death signal of a child belongs to the thread that forked it.

    Args:
        directory: holds the configuration file; mode 0700.
        on_running: called once, when the control socket is open, before any program starts.
        refresh: called every `REFRESH_S`; an OSError of it is logged.

    Raises:
        SupervisorError: the configuration or the control socket is refused.
    """
    # We hold the lock, so a socket that lies there is nobody's. supervisord would find that
    # out too, but takes 0.3 s over it.
    (directory / SOCKET_FILE).unlink(missing_ok=True)
    os.chdir(directory)  # the paths in the configuration are relative to it
    options = _Options()
    options.realize(["-c", str(directory / CONFIG_FILE)], doc="", progname="agent-box")
    for server in options.server_configs:
        # It made the path absolute and binds a longer name first, with its pid at the end,
        # which might not fit where the name itself does.
        server["file"] = SOCKET_FILE
    options.first = True  # we never run it a second time, so it closes no descriptors
    options.test = False
    supervisor = _Supervisor(options, on_running, refresh)
    try:
        supervisor.main()
    except asyncore.ExitNow:
        pass
    finally:
        options.close_httpservers()
        options.close_logger()


class _Options(ServerOptions):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self._daemon = os.getpid()

    def fork(self) -> int:
        """No signal is lost to a child that is not yet the program.

        It has supervisord's handlers until then, which only take note, so a SIGTERM would be
        forgotten; and a signal to its group goes nowhere until the group is there.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            child = os.fork()
            if child == 0:
                for number in _CHANGED:
                    signal.signal(number, signal.SIG_DFL)
            else:
                _make_group(child)
            return child
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def setpgrp(self) -> None:
        """The first thing that supervisord does in a child."""
        os.setpgrp()
        if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != self._daemon:
            os._exit(1)  # it died before we asked

    def write_pidfile(self) -> None:
        """None is written: a file outlives its process and lies. The lock names the holder."""

    def usage(self, msg: Any) -> NoReturn:
        """supervisord's way to say what is wrong; its own would print a manual and exit."""
        raise SupervisorError(f"supervisord: {msg}")


class _Supervisor(Supervisor):  # type: ignore[misc]
    def __init__(
        self, options: _Options, on_running: Callable[[], None], refresh: Callable[[], object]
    ) -> None:
        super().__init__(options)
        self._on_running = on_running
        self._refresh = refresh
        now = time.monotonic()
        self._due = {
            self._remind_all: (now, REMIND_S),
            self._refresh_all: (now + REFRESH_S, REFRESH_S),
            self._tell: (now + TELL_S, TELL_S),
            self._report: (now + REPORT_S, math.inf),
        }

    def runforever(self) -> None:
        self._on_running()
        super().runforever()

    def tick(self, now: float | None = None) -> None:
        """Every turn of the loop, at least once a second."""
        super().tick(now)
        for work, (due, every) in self._due.items():
            if time.monotonic() >= due:
                self._due[work] = (time.monotonic() + every, every)
                work()

    def _refresh_all(self) -> None:
        try:
            self._refresh()
        except OSError as error:
            self.options.logger.warn(f"what the services see of the host is old: {told(error)}")

    def _report(self) -> None:
        if REPORT in self.process_groups and self.options.mood == SupervisorStates.RUNNING:
            self.process_groups[REPORT].processes[REPORT].spawn()

    def _tell(self) -> None:
        """Runs what takes notices into the journal, when there are any and somebody listens.

        Looked for now and again, since a notice may be older than this daemon, and the registry
        may be the one that stays down.
        """
        if TELL not in self.process_groups or self.options.mood != SupervisorStates.RUNNING:
            return
        teller = self.process_groups[TELL].processes[TELL]
        registry = self.process_groups[GROUP].processes["registry"]
        if teller.pid or registry.state != ProcessStates.RUNNING:
            return
        if notices.waiting(Path(NOTICES_LINK)):
            teller.spawn()

    def _remind_all(self) -> None:
        for group in self.process_groups.values():
            for process in group.processes.values():
                self._remind(process)

    def _remind(self, process: Any) -> None:
        """Sends SIGTERM again to a program that is to stop and has not.

        bubblewrap must not act on it (it would kill the service in the middle), so it is
        ignored from before bubblewrap starts until the service has set its own handler; one
        that came in that time is gone, and SIGKILL would be next.
        """
        if process.state == ProcessStates.STOPPING and process.pid:
            try:
                os.killpg(process.pid, signal.SIGTERM)
            except ProcessLookupError:
                pass  # ended, and not reaped yet


def _make_group(child: int) -> None:
    """The child does this for itself, too; who comes first does not matter."""
    try:
        os.setpgid(child, child)
    except (PermissionError, ProcessLookupError):
        pass  # it is the program already, or has ended: it came first
