"""`python -I -m agent_box.helper --mode user --runtime DIR --state DIR`

The helper. Under the daemon's supervisor it dies with that: it asks the kernel for it, and
watches its standard input, when that is a pipe. What it started lives on.

`--check` in place of serving prints what `probe` answers, as one JSON object, and exits with 0.

Exit status: 0 after SIGTERM, 64 for wrong arguments, 70 for system mode, which is not built
yet, 71 when starting it again cannot help, 75 when another helper holds the directories.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import select
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

from agent_box.helper import jail, places, procs, wire
from agent_box.helper.ops import Ops, user_mode
from agent_box.helper.places import Places
from agent_box.helper.probe import Probe
from agent_box.helper.server import Server

USAGE: Final = 64
NOT_BUILT: Final = 70
FATAL: Final = 71
BUSY: Final = 75
LOCK_S: Final = 5.0  # for the last one to be gone


class Options(NamedTuple):
    """The two directories, and what to do."""

    runtime: Path
    state: Path
    check: bool


class Usage(Exception):
    """Wrong arguments. One line."""


class NotBuilt(Exception):
    """System mode. One line."""


def parse(words: list[str]) -> Options:
    """Raises:
    Usage: as the line says.
    NotBuilt: system mode is asked for.
    """
    values: dict[str, str] = {}
    rest = list(words)
    check = False
    while rest:
        name = rest.pop(0)
        if name == "--check" and not check:
            check = True
        elif name in ("--mode", "--runtime", "--state") and name not in values and rest:
            values[name] = rest.pop(0)
        else:
            raise Usage(f"unknown or incomplete: {name}")
    if values.get("--mode") == "system":
        raise NotBuilt("system mode is not built yet: use --mode user")
    if values.get("--mode") != "user":
        raise Usage("--mode is user or system")
    paths = []
    for name in ("--runtime", "--state"):
        path = Path(values.get(name, ""))
        if not path.is_absolute():
            raise Usage(f"{name} is an absolute path")
        paths.append(path)
    return Options(paths[0], paths[1], check)


def main() -> int:
    parent = os.getppid()
    try:
        options = parse(sys.argv[1:])
    except Usage as error:
        return _end(USAGE, str(error))
    except NotBuilt as error:
        return _end(NOT_BUILT, str(error))
    if os.geteuid() == 0:
        return _end(USAGE, "in user mode the helper is an ordinary account's")
    os.umask(0o077)
    os.chdir("/")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        found = Places(options.runtime, options.state)
    except OSError as error:
        return _end(FATAL, f"{error.filename}: {error.strerror}")
    for path, _ in jail.code():
        if any(own.resolve().is_relative_to(Path(path).resolve()) for own in options[:2]):
            return _end(FATAL, f"{path}, which every jail sees, holds our own directories")
    if options.check:
        print(json.dumps(Probe("user", found).run()))
        return 0
    lifeline = 0 if stat.S_ISFIFO(os.fstat(0).st_mode) else None
    if lifeline is not None:
        try:
            procs.die_with(parent)
        except OSError as error:
            return _end(0 if error.errno == errno.ESRCH else FATAL, str(error))
    if not _lock(found.own):
        return _end(BUSY, "another helper holds the state directory")
    try:
        key = found.key()
    except (OSError, ValueError) as error:
        return _end(FATAL, f"the key cannot be used: {error}")
    mode = user_mode()
    server = Server(found.socket, key, mode.peers, _log)
    ops = Ops(mode, found, log=_log, on_end=server.on_end)
    _log(f"serves {options.runtime}/helper/{places.SOCKET}, protocol of user mode")
    server.submit(ops.recover)  # meanwhile it is asked already
    server.serve(ops, lifeline)
    sys.stderr.flush()
    os._exit(0)  # not to wait for a thread that waits for a machine: its shim does without us


def _lock(directory: int) -> bool:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(places.LOCK, flags, 0o600, dir_fd=directory)
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until we end
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        select.select([], [], [], 0.01)


def _log(text: str) -> None:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for part in text.splitlines():
        print(f"{stamp} {wire.line(part)}", file=sys.stderr, flush=True)


def _end(code: int, text: str) -> int:
    print(f"agent-box-helper: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
