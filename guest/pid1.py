"""PID 1 of the guest. Tiny: an exception here is a kernel panic.

It mounts, binds every vsock port and opens tun0 before any other code runs in the guest, so
that no process of the agent's uid can ever hold a port that the host dials. Then it keeps
two children, the agent process and the network pump, and reaps. All that may fail in
interesting ways is theirs; they are forked and not executed, since Python takes longer to
start than to fork.

The kernel drops every signal to PID 1 for which there is no handler, SIGKILL and SIGSTOP too
(kill(2), "Notes"); so there is none but SIGCHLD, which is blocked and waited for.
"""

from __future__ import annotations

import os
import signal
import time

from agent_box.guest import system
from agent_box.guest.ports import Inherited, listeners
from agent_box.guest.wire import NETWORK_PORT

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    import socket
    from typing import Final

RESPAWN_S: Final = (0.0, 0.1, 0.5, 2.0, 5.0)  # the wait before the next start, longer each time
STEADY_S: Final = 30.0  # a child that lived this long starts at no wait again
FOREVER_S: Final = 3600.0
IGNORED: Final = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE)


class Respawn:
    """When a child is started again. No I/O: it is told the time."""

    def __init__(self) -> None:
        self.pid = 0  # 0 while there is none
        self._since = 0.0
        self._deaths = 0
        self._again = 0.0

    def started(self, pid: int, now: float) -> None:
        self.pid, self._since = pid, now

    def ended(self, pid: int, now: float) -> bool:
        """Whether the process that ended was this child."""
        if not self.pid or pid != self.pid:
            return False
        self.pid = 0
        self._deaths = 1 if now - self._since > STEADY_S else self._deaths + 1
        self._again = now + RESPAWN_S[min(self._deaths, len(RESPAWN_S)) - 1]
        return True

    def failed(self, now: float) -> None:
        """It could not be forked; so that a full machine is not asked without a pause."""
        self._again = now + RESPAWN_S[-1]

    def wait(self, now: float) -> float:
        """Seconds until one is to be started; 0 when that is now."""
        return FOREVER_S if self.pid else max(0.0, self._again - now)


def main() -> None:
    """Runs for as long as the machine does."""
    for name in IGNORED:
        signal.signal(name, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    system.prepare_log()
    _mounts()
    try:
        children = _children(listeners(), _tun())
    except OSError as error:
        # nobody could ever reach this machine: its end tells more than its silence
        system.log(f"no port can be bound, powering off: {error}")
        system.power_off()
        return
    while True:
        try:
            _turn(children)
        except Exception as error:  # noqa: BLE001 - the kernel panics if this process ends
            system.log(f"PID 1 goes on after {type(error).__name__}: {error}")
            for respawn, _ in children:
                if not respawn.pid:
                    respawn.failed(time.monotonic())


def _children(bound: dict[int, socket.socket], tun: int | None) -> list[tuple[Respawn, Inherited]]:
    """The agent process, and the pump where there is a tun0; each with what is its own."""
    if tun is None:
        return [(Respawn(), Inherited(bound, None))]
    pump = {port: each for port, each in bound.items() if port == NETWORK_PORT}
    rest = {port: each for port, each in bound.items() if port != NETWORK_PORT}
    return [(Respawn(), Inherited(rest, None)), (Respawn(), Inherited(pump, tun))]


def _turn(children: list[tuple[Respawn, Inherited]]) -> None:
    """One wait, all that ended, and at most one start of each."""
    wait = min(respawn.wait(time.monotonic()) for respawn, _ in children)
    if wait:
        signal.sigtimedwait({signal.SIGCHLD}, wait)
    while (ended := _reap()) is not None:
        pid, status = ended
        for respawn, inherited in children:
            if respawn.ended(pid, time.monotonic()):
                what = "agent process" if inherited.tun is None else "network pump"
                system.log(f"the {what} {pid} ended with status {status}")
    for respawn, inherited in children:
        if not respawn.pid and not respawn.wait(time.monotonic()):
            respawn.started(_fork(inherited), time.monotonic())


def _mounts() -> None:
    nosuid, nodev, noexec = system.MS_NOSUID, system.MS_NODEV, system.MS_NOEXEC
    strict = nosuid | nodev | noexec
    for source, target, kind, flags, data in (
        ("devpts", "/dev/pts", "devpts", nosuid | noexec, "mode=0620,gid=5,ptmxmode=0666"),
        ("tmpfs", "/dev/shm", "tmpfs", nosuid | nodev, "mode=1777"),
        ("tmpfs", "/tmp", "tmpfs", nosuid | nodev, "mode=1777"),
        ("cgroup2", "/sys/fs/cgroup", "cgroup2", strict, ""),
    ):
        try:
            system.mount(source, target, kind, flags, data)
        except OSError as error:
            system.log(str(error))
    for target, name in (
        ("/proc/self/fd", "/dev/fd"),
        ("/proc/self/fd/0", "/dev/stdin"),
        ("/proc/self/fd/1", "/dev/stdout"),
        ("/proc/self/fd/2", "/dev/stderr"),
    ):
        try:
            os.symlink(target, name)
        except FileExistsError:
            continue
        except OSError as error:
            system.log(f"{name}: {error}")


def _tun() -> int | None:
    try:
        return system.open_tun()
    except OSError as error:
        system.log(f"tun0: {error}")
        return None


def _fork(inherited: Inherited) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for name in IGNORED:
            signal.signal(name, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        # a child's imports are its own, not PID 1's
        if inherited.tun is None:
            from agent_box.guest import agent

            agent.main(inherited)
        else:
            from agent_box.guest import network

            network.main(inherited)
        status = 0
    except BaseException as error:  # noqa: BLE001 - told on the console; PID 1 starts another
        system.log(f"a child: {type(error).__name__}: {error}")
    finally:
        os._exit(status)


def _reap() -> tuple[int, int] | None:
    """The next process that ended, and its exit status, negative for a signal. What the
    guest's own processes do to one another is not told: it could fill the console."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None
