"""What a daemon that was killed may have left running: walls without a service.

A service dies with its wall, and the wall with its supervisor. But bubblewrap's first process
makes the second, which waits to be told that its user namespace is ready, and asks for its own
death only after that. When the first one is killed in this moment, the second waits for ever.
It holds no lock, no socket and no file of ours; the next daemon ends it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from agent_box.process.confine import BWRAP
from agent_box.process.paths import SERVICES, Paths


def end_walls(paths: Paths, proc: Path = Path("/proc")) -> list[int]:
    """Kills every wall of a service of this runtime directory. Only for who holds its lock.

    Returns:
        The pids that were sent SIGKILL.
    """
    ended = []
    for entry in proc.iterdir():
        if not entry.name.isdecimal() or not _is_wall(entry, paths):
            continue
        try:
            descriptor = os.pidfd_open(int(entry.name))
        except OSError:
            continue  # it has ended
        try:
            if _is_wall(entry, paths):  # still this one, which the descriptor keeps
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                ended.append(int(entry.name))
        except (ProcessLookupError, PermissionError):
            continue  # it has ended, or is another account's
        finally:
            os.close(descriptor)
    return ended


def _is_wall(entry: Path, paths: Paths) -> bool:
    try:
        words = (entry / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended
    if words[0] != os.fsencode(BWRAP) or b"--runtime" not in words:
        return False
    at = words.index(b"--runtime")
    services = [f"agent_box.{service}".encode() for service in SERVICES]
    return words[at - 1] in services and words[at + 1] == os.fsencode(paths.runtime)
