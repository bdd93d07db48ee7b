"""The broker's own key, of which nonces are made. It outlives restarts and never leaves."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from agent_box.broker.nonces import KEY_BYTES

FILE: Final = "nonces.key"


class KeyRefused(Exception):
    """The key file is not one that the broker made. One line that names it."""


def load(directory: Path) -> bytes:
    """The key; made at the first start, in one step.

    Raises:
        KeyRefused: what lies there is no key, not ours or open to others. It is not made anew:
            guests hold nonces that were made of it.
        OSError: it cannot be read or made.
    """
    path = directory / FILE
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    new = path.with_name(f"{FILE}.new")
    new.unlink(missing_ok=True)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        file.write(os.urandom(KEY_BYTES))
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    above = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(above)
    finally:
        os.close(above)
    return _read(path)


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(fd, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise KeyRefused(f"{path} is not a file of ours")
        if stat.S_IMODE(facts.st_mode) & 0o077:
            raise KeyRefused(f"{path} is open to others")
        key = file.read(KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise KeyRefused(f"{path} does not hold a key of {KEY_BYTES} bytes")
    return key
