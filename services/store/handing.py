"""How a key comes through the wall: an inherited pipe, never an argument, a variable or a file.

The launcher (`keysource`) writes one message and closes its end before it becomes the
confined store, which reads to the end and closes the other. A message is ``K`` and a key of
32 bytes, or ``E`` and the reason why there is none. After that the pipe is empty, and so is
every other process that may have inherited it.

Standard library only.
"""

from __future__ import annotations

import os
import stat
from typing import Final, NamedTuple

from agent_box.process.secret import Secret

DESCRIPTOR: Final = 63  # far from those that shells, supervisord and bubblewrap use
KEY_BYTES: Final = 32
_MESSAGE_MAX: Final = 1024
_KEY: Final = b"K"
_PROBLEM: Final = b"E"


class Handed(NamedTuple):
    """A key, or why there is none."""

    key: Secret | None
    problem: str | None


def pipe_with(handed: Handed) -> int:
    """A descriptor from which `take` reads `handed`: inheritable, its other end closed."""
    if handed.key is not None:
        message = _KEY + handed.key.reveal()
    else:
        message = _PROBLEM + (handed.problem or "no reason").encode()[: _MESSAGE_MAX - 1]
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        os.write(theirs, message)  # less than PIPE_BUF: whole, and without waiting
    finally:
        os.close(theirs)
    if ours != DESCRIPTOR:
        os.dup2(ours, DESCRIPTOR)
        os.close(ours)
    os.set_inheritable(DESCRIPTOR, True)
    return DESCRIPTOR


def take(descriptor: int = DESCRIPTOR) -> Handed:
    """What the launcher handed in. Reads it to the end and closes it."""
    try:
        facts = os.fstat(descriptor)
    except OSError:
        return Handed(None, "the store was started without its launcher, so no key was handed in")
    if not stat.S_ISFIFO(facts.st_mode):
        return Handed(None, f"descriptor {descriptor} is not the launcher's pipe")
    try:
        untrusted = b""
        while piece := os.read(descriptor, _MESSAGE_MAX):
            untrusted += piece
            if len(untrusted) > _MESSAGE_MAX:
                break
    finally:
        os.close(descriptor)
    kind, content = untrusted[:1], untrusted[1:]
    if kind == _KEY and len(content) == KEY_BYTES:
        return Handed(Secret(content), None)
    if kind == _PROBLEM:
        text = content.decode(errors="replace")
        return Handed(None, "".join(c if c.isprintable() else "?" for c in text))
    return Handed(None, "what the launcher handed in is not a key")
