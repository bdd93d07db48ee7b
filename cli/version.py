"""Which agent-box this is: version and commit."""

from __future__ import annotations

import re
from pathlib import Path


def version() -> str:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as of_package

    try:
        return of_package("agent-box")
    except PackageNotFoundError:
        return "unknown"


def commit() -> str:
    """Twelve hex digits, or ``unknown``.

    A build may leave it in the file ``_commit`` of the package; a checkout has it in its
    ``.git``, which is read and never run: no program is started for this.
    """
    package = Path(__file__).resolve().parent.parent
    candidates = (package / "_commit", package / "services" / "_commit")
    for file in candidates:
        if file.is_file():
            return _digits(file.read_text(errors="replace"))
    return _digits(_head(package / ".git"))


def line() -> str:
    return f"agent-box {version()} ({commit()})"


def _head(git: Path) -> str:
    try:
        if git.is_file():  # a worktree: the directory is elsewhere
            git = git.parent / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        ref = head.removeprefix("ref: ")
        common = git / "commondir"
        if common.is_file():
            git = git / common.read_text().strip()
        if (git / ref).is_file():
            return (git / ref).read_text()
        for packed in (git / "packed-refs").read_text().splitlines():
            digest, _, name = packed.partition(" ")
            if name == ref:
                return digest
    except (OSError, UnicodeDecodeError):
        return ""
    return ""


def _digits(text: str) -> str:
    found = re.match(r"[0-9a-f]{12}", text.strip())
    return found[0] if found else "unknown"
