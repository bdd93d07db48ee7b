"""The accelerator that `agent-box setup` found to work, for a config that names none.

The config file is the operator's and is never written by us. What setup learned by running a
guest is kept beside it, in the engine's own directory; `[engine] accel` in the config wins.
Nothing changes it but the next setup: a machine that does not start with it is a refusal.
"""

from __future__ import annotations

import os
import tempfile
import tomllib
from pathlib import Path
from typing import Final, Literal

from agent_box.process.paths import Paths

Accel = Literal["kvm", "tcg"]
FILE: Final = "chosen.toml"
_MAX: Final = 4096  # bytes
_TEXT: Final = """\
# Written by `agent-box setup`, which ran a guest with it. [engine] accel in the config wins.
accel = "{accel}"
"""


def file(paths: Paths) -> Path:
    return paths.data("engine") / FILE


def read(path: Path) -> Accel | None:
    """What was chosen; None when nothing was, or the file is none of ours."""
    try:
        with path.open("rb") as opened:
            untrusted = tomllib.loads(opened.read(_MAX).decode()).get("accel")
    except (OSError, ValueError):
        return None
    return "kvm" if untrusted == "kvm" else "tcg" if untrusted == "tcg" else None


def write(path: Path, accel: Accel) -> None:
    """Replaces it in one step.

    Raises:
        OSError: the disk is full, or the like.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{FILE}.")
    try:
        with open(descriptor, "w", encoding="ascii") as opened:
            opened.write(_TEXT.format(accel=accel))
            opened.flush()
            os.fsync(descriptor)
        os.rename(name, path)
    except BaseException:
        os.unlink(name)
        raise
