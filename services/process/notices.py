"""What the supervisor has to say to the journal, kept until the registry has it.

supervisord knows no bus, and the service that stays down may be the registry itself. So each
notice is a small file in `Paths.notices` until it stands in the journal; `registry.notices`,
a short-lived program, takes them there and removes them.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from pathlib import Path
from typing import Final, NamedTuple

KEPT_MAX: Final = 256  # more than these say nothing that they do not say
REASON_MAX: Final = 500  # characters
_NAME: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)


class Notice(NamedTuple):
    """A service stays down.

    Attributes:
        event_id: 16 bytes, also the name of the file: however often it is told, the journal
            has it once.
        at_ms: Unix time.
    """

    event_id: bytes
    service: str
    reason: str
    at_ms: int


def leave(directory: Path, service: str, reason: str) -> None:
    """Writes a notice; none when as many as may be kept are there.

    Raises:
        OSError: the disk is full, or the directory is not usable.
    """
    if len(waiting(directory)) >= KEPT_MAX:
        return
    name = secrets.token_hex(16)
    said = {"service": service, "reason": reason[:REASON_MAX], "at_ms": _now_ms()}
    new = directory / f"{name}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(new, flags, 0o600), "w", encoding="utf-8") as file:
        json.dump(said, file)
    new.rename(directory / name)


def waiting(directory: Path) -> list[str]:
    """The names of the notices that are there, in no order; none where no directory is."""
    try:
        return [name for name in os.listdir(directory) if _NAME.fullmatch(name)]
    except FileNotFoundError:
        return []


def read(directory: Path) -> list[Notice]:
    """All of them, the oldest first. One that is no notice is removed: it can be told to nobody."""
    found = []
    for name in waiting(directory):
        try:
            said = json.loads((directory / name).read_text(encoding="utf-8"))
            service, reason, at_ms = said["service"], said["reason"], said["at_ms"]
            if (type(service), type(reason), type(at_ms)) != (str, str, int):
                raise TypeError(name)
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError, RecursionError):
            (directory / name).unlink(missing_ok=True)
            continue
        found.append(Notice(bytes.fromhex(name), service, reason, at_ms))
    return sorted(found, key=lambda notice: notice.at_ms)


def done(directory: Path, notice: Notice) -> None:
    """The journal has it."""
    (directory / notice.event_id.hex()).unlink(missing_ok=True)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
