"""The files that the host gives a guest, below the agent's home.

All of this runs as the agent in the agent's root, so that no link of the agent's leads anywhere
where the agent could not write itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat

from agent_box.guest import disk

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from typing import Any, Final

# What was last written of each file that yields: its path, and the SHA-256 of its content. The
# agent may write there what it likes: it decides over no files but its own.
NOTED: Final = ".config/agent-box/written.json"
_READ_MAX: Final = 1 << 20  # bytes of a file that is compared; a longer one is not ours


def write(items: list[dict[str, Any]]) -> None:
    """Puts each file in its place. One that yields is left alone when somebody else wrote it.

    Raises:
        OSError: a path outside of the agent's home, or what the kernel says.
    """
    for item in items:
        path = os.path.normpath(item["path"])
        if not path.startswith(disk.HOME + "/"):
            raise OSError(f"{path} is not below {disk.HOME}")
    if not any(item["yields"] for item in items):
        for item in items:
            _put(item)
        return
    noted = _noted()
    now = {}
    for item in items:
        path = os.path.normpath(item["path"])
        if not item["yields"]:
            _put(item)
        elif not os.path.lexists(path) or _sum(path) == noted.get(path, "none"):
            _put(item)
            now[path] = _sum(path)
        elif path in noted:
            now[path] = noted[path]
    _put({"path": f"{disk.HOME}/{NOTED}", "mode": 0o600, "content": json.dumps(now)})


def _put(item: dict[str, Any]) -> None:
    path = os.path.normpath(item["path"])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    replace(path, item["content"], item["mode"] & 0o777)


def replace(path: str, content: str, mode: int) -> None:
    """Puts a new file in the place of whatever lies there, a link or a pipe too."""
    new = path + ".new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(new, flags, 0o600), "w") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)
    os.replace(new, path)


def _noted() -> dict[str, str]:
    """Empty when it cannot be told: then what is there was somebody else's."""
    untrusted = _read(f"{disk.HOME}/{NOTED}")
    try:
        found = json.loads(untrusted or b"{}")
    except (ValueError, RecursionError):
        return {}
    return {k: v for k, v in found.items() if type(v) is str} if type(found) is dict else {}


def _sum(path: str) -> str:
    """Of a plain file; empty for anything else, or one too long."""
    import hashlib  # in the child that writes files, and not in every agent

    content = _read(path)
    return "" if content is None else hashlib.sha256(content).hexdigest()


def _read(path: str) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > _READ_MAX:
            return None
        return os.read(fd, _READ_MAX)
    finally:
        os.close(fd)
