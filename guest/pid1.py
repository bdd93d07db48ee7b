"""PID 1 of the guest. Tiny: an exception here is a kernel panic.

It mounts, binds every vsock port and opens tun0 before any other code runs in the guest, so
that no process of the agent's uid can ever hold a port that the host dials. Then it keeps
one child, the agent process, and reaps. All that may fail in interesting ways is the
agent's; it is forked and not executed, since Python takes longer to start than to fork.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Final

from agent_box.guest import system
from agent_box.guest.ports import Inherited, listeners

RESPAWN_S: Final = (0.0, 0.1, 0.5, 2.0, 5.0)  # the wait before the next start, longer each time
STEADY_S: Final = 30.0  # an agent that lived this long starts at no wait again


def main() -> None:
    """Runs for as long as the machine does."""
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(name, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    _mounts()
    inherited = Inherited(listeners(), _tun())
    agent, started, deaths = _fork(inherited), time.monotonic(), 0
    again: float | None = None  # when the agent is started again
    while True:
        try:
            wait = 3600.0 if again is None else max(0.0, again - time.monotonic())
            signal.sigtimedwait({signal.SIGCHLD}, wait)
            while (ended := _reap()) is not None:
                if ended == agent:
                    steady = time.monotonic() - started > STEADY_S
                    deaths = 1 if steady else deaths + 1
                    wait = RESPAWN_S[min(deaths, len(RESPAWN_S)) - 1]
                    again = time.monotonic() + wait
            if again is not None and time.monotonic() >= again:
                agent, started, again = _fork(inherited), time.monotonic(), None
        except Exception as error:  # noqa: BLE001 - the kernel panics if this process ends
            system.log(f"PID 1 goes on after {type(error).__name__}: {error}")


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
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        from agent_box.guest import agent  # the agent's imports are its own, not PID 1's

        agent.main(inherited)
        status = 0
    except BaseException as error:  # noqa: BLE001 - told on the console; PID 1 starts another
        system.log(f"agent: {type(error).__name__}: {error}")
    finally:
        os._exit(status)


def _reap() -> int | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    if pid == 0:
        return None
    if os.WIFSIGNALED(status):
        system.log(f"process {pid} ended by signal {os.WTERMSIG(status)}")
    return pid
