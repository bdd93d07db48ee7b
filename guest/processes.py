"""How many processes the agent's uid may have, and whose turn it is, so that a fork bomb leaves
room for us.

Whatever is started for the agent, as its uid or as root, joins one control group before it
becomes the program; its children are in it, too. The kernel refuses their forks (EAGAIN) when
the group is full (cgroup v2, pids.max), never those of PID 1 or of the agent process, which
stay outside. And the scheduler sees the whole group as one process beside ours (cpu controller,
the weight of nice 0), however many are in it: the control port is answered while they spin.
"""

from __future__ import annotations

import contextlib
import os

from agent_box.guest import system

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from typing import Final

ROOT: Final = "/sys/fs/cgroup"
GROUP: Final = "agent"
THREADS_MAX: Final = "/proc/sys/kernel/threads-max"
LEAST: Final = 256


def prepare() -> None:
    """Makes the group. Where the kernel has none, that is said and the rest goes on."""
    try:
        with contextlib.suppress(FileExistsError):  # of the agent process before this one
            os.mkdir(f"{ROOT}/{GROUP}")
        _write(f"{ROOT}/cgroup.subtree_control", "+pids +cpu")
        _write(f"{ROOT}/{GROUP}/pids.max", str(limit()))
    except OSError as error:
        system.log(f"the agent's processes are not counted: {error}")


def limit() -> int:
    """Half of what the kernel has room for, which follows the machine's memory."""
    with open(THREADS_MAX) as file:
        return max(LEAST, int(file.read()) // 2)


def join() -> None:
    """Called in a new child, as root and outside of the agent's root, before it becomes the
    program.

    Raises:
        OSError: there is no group; then nothing of the agent's may be started.
    """
    _write(f"{ROOT}/{GROUP}/cgroup.procs", "0")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
