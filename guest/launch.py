"""Starts a program of the agent's: in its root, as its uid, in a session of its own.

The child says through a pipe why it could not begin; when the pipe ends without a word the
program runs. Nothing here waits for a child.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import struct
import termios
from collections.abc import Mapping

from agent_box.guest import disk, processes, system
from agent_box.guest.streams import Refused

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from typing import Final, NoReturn

NOT_FOUND: Final = 127  # as every shell says it
NOT_EXECUTABLE: Final = 126
SHELL: Final = "/bin/bash"
TTY_GID: Final = 5
IUTF8: Final = 0o40000  # asm-generic/termbits.h: erasing takes whole characters
WORDS_MAX: Final = 1000  # bytes of why it could not begin
# What a kernel that refuses has no more of; its own words for a terminal speak of a disk.
USED_UP: Final = {
    errno.EAGAIN: "processes",
    errno.ENOMEM: "memory",
    errno.EMFILE: "descriptors",
    errno.ENFILE: "descriptors",
    errno.ENOSPC: "terminals",
}
UIDS: Final = {"agent": disk.AGENT_UID, "root": 0}


class Ground:
    """Where programs run. A test's has no root and no uids: it runs them as itself."""

    __slots__ = ("home", "root", "work")

    def __init__(self, root: str | None, work: str, home: str) -> None:
        self.root = root
        self.work = work
        self.home = home


AGENTS: Final = Ground(disk.ROOT, disk.WORK, disk.HOME)


class Started:
    """A child, and our ends of what it has.

    Attributes:
        input: where its input is written to.
        outputs: where its output is read from; of a terminal one, of a command two.
        said: the pipe that tells whether it began.
        terminal: the terminal's own descriptor, for its size.
    """

    __slots__ = ("input", "outputs", "pid", "pidfd", "said", "terminal")

    def __init__(
        self, pid: int, said: int, input: int, outputs: list[int], terminal: int | None
    ) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.said = said
        self.input = input
        self.outputs = outputs
        self.terminal = terminal


class Launch:
    """What shall be started.

    Attributes:
        argv: empty for the login shell.
        directory: None for the usual one.
        size: of a terminal, rows and columns; None for a command without one.
    """

    __slots__ = ("argv", "directory", "environment", "size", "user")

    def __init__(
        self,
        argv: list[bytes],
        user: str,
        directory: str | None,
        environment: Mapping[str, str],
        size: tuple[int, int] | None,
    ) -> None:
        self.argv = argv
        self.user = user
        self.directory = directory
        self.environment = environment
        self.size = size


def start(launch: Launch, ground: Ground) -> Started:
    """Forks it.

    Raises:
        Refused: exhausted, there are no more processes, terminals or descriptors.
    """
    mine: list[int] = []
    theirs: list[int] = []
    try:
        said, tells = _pipe(mine, theirs)
        if launch.size is None:
            stdin, input = _pipe(theirs, mine)
            out, stdout = _pipe(mine, theirs)
            err, stderr = _pipe(mine, theirs)
            terminal, outputs, fds = None, [out, err], (stdin, stdout, stderr)
        else:
            terminal, slave = _terminal(launch, ground, mine, theirs)
            input = os.dup(terminal)
            mine.append(input)
            outputs, fds = [terminal], (slave, slave, slave)
        pid = os.fork()
        if pid == 0:
            _become(launch, ground, fds, tells)
        for fd in (input, *outputs, said):
            os.set_blocking(fd, False)
        try:
            return Started(pid, said, input, outputs, terminal)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
    except OSError as error:
        for fd in mine:
            os.close(fd)
        what = USED_UP.get(error.errno or 0)
        why = error.strerror if what is None else f"it has no more {what}"
        raise Refused("exhausted", f"nothing can be started in the guest: {why}") from None
    finally:
        for fd in theirs:
            os.close(fd)


def resize(terminal: int, rows: int, columns: int) -> None:
    """Sets the size; the kernel sends SIGWINCH to whoever has the terminal (tty_ioctl(4))."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def unread(fd: int) -> int:
    """Bytes that can be read at once, 0 when that cannot be told."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0])
    except OSError:
        return 0


def _pipe(reads: list[int], writes: list[int]) -> tuple[int, int]:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    reads.append(reader)
    writes.append(writer)
    return reader, writer


def _terminal(
    launch: Launch, ground: Ground, mine: list[int], theirs: list[int]
) -> tuple[int, int]:
    master, slave = os.openpty()
    mine.append(master)
    theirs.append(slave)
    if ground.root is not None:
        os.fchown(slave, UIDS[launch.user], TTY_GID)
        os.fchmod(slave, 0o620)
    modes = termios.tcgetattr(slave)
    modes[0] |= IUTF8
    termios.tcsetattr(slave, termios.TCSANOW, modes)
    assert launch.size is not None
    resize(master, *launch.size)
    return master, slave


# What Python ignores, which an exec would pass on, and what it handles until there is one.
_RESET: Final = (
    *(signal.SIGPIPE, signal.SIGXFSZ),
    *(signal.SIGINT, signal.SIGHUP, signal.SIGTERM),
)


def _become(launch: Launch, ground: Ground, fds: tuple[int, int, int], tells: int) -> NoReturn:
    """The child, until the program takes its place."""
    try:
        os.setsid()
        if launch.size is not None:
            fcntl.ioctl(fds[0], termios.TIOCSCTTY, 0)
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        _enter(ground, launch.user)
        _settle(launch, ground)
        _execute(launch, ground)
    except BaseException as error:  # noqa: BLE001 - told to the parent, which tells the host
        os.write(tells, f"{error}".encode(errors="replace")[:WORDS_MAX])
    finally:
        os._exit(NOT_EXECUTABLE)


def _enter(ground: Ground, user: str) -> None:
    if ground.root is not None:
        system.spare(0)
        processes.join()
        os.chroot(ground.root)
        os.chdir("/")
        uid = UIDS[user]
        os.setgroups([uid])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    os.umask(0o022)
    for name in _RESET:
        signal.signal(name, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _settle(launch: Launch, ground: Ground) -> None:
    if launch.directory is not None:
        if not launch.directory.startswith("/"):
            raise ValueError(f"{launch.directory} is no absolute path")
        try:
            os.chdir(launch.directory)
        except OSError as error:
            raise ValueError(f"{launch.directory}: {error.strerror}") from None
        return
    for path in (ground.work, ground.home, "/"):
        try:
            os.chdir(path)
            return
        except OSError:
            continue  # the agent removed it


def _execute(launch: Launch, ground: Ground) -> None:
    """Returns when there is nothing to execute, having said so as a shell does."""
    home, shell = _account(launch.user, ground)
    environment = {"HOME": home, "SHELL": shell, **launch.environment}
    if launch.argv:
        file, argv = launch.argv[0], launch.argv
    else:
        file = os.fsencode(environment["SHELL"])
        argv = [b"-" + os.path.basename(file)]
    places = [b""]
    if b"/" not in file:
        path = environment.get("PATH", "")
        places = [os.fsencode(place or ".") + b"/" for place in path.split(":")]
    status, why = NOT_FOUND, os.strerror(errno.ENOENT)
    for place in places:
        try:
            os.execve(place + file, argv, environment)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            status, why = NOT_EXECUTABLE, error.strerror or ""
            if error.errno != errno.EACCES:
                break
    os.write(2, file[:WORDS_MAX] + f": {why}\n".encode())
    os._exit(status)


def _account(user: str, ground: Ground) -> tuple[str, str]:
    """Home and shell in /etc/passwd of whoever we are now; read after the uid was given away."""
    uid = UIDS[user] if ground.root is not None else os.getuid()
    try:
        with open("/etc/passwd", "rb") as file:
            for line in file.read(1 << 20).splitlines():
                fields = line.split(b":")
                if len(fields) == 7 and fields[2] == str(uid).encode() and fields[6]:
                    return os.fsdecode(fields[5]), os.fsdecode(fields[6])
    except OSError:
        pass  # the usual one
    return "/", SHELL
