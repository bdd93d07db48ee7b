"""The second wall, inside the first: Landlock, which a process puts on itself.

Its rules say once more what the mounts say, and three things that mounts cannot: no TCP for
those without a network (ABI 4), no abstract Unix socket and no signal beyond the process
(ABI 6), nothing executed. Older kernels have less of it or none; that is reported and
refuses nothing, because the first wall stands without it.

Source: Linux, Documentation/userspace-api/landlock.rst.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent_box.process import linux

_EXECUTE: Final = 1 << 0
_WRITE_FILE: Final = 1 << 1
_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3
_REMOVE_DIR: Final = 1 << 4
_REMOVE_FILE: Final = 1 << 5
_MAKE_CHAR: Final = 1 << 6
_MAKE_DIR: Final = 1 << 7
_MAKE_REG: Final = 1 << 8
_MAKE_SOCK: Final = 1 << 9
_MAKE_FIFO: Final = 1 << 10
_MAKE_BLOCK: Final = 1 << 11
_MAKE_SYM: Final = 1 << 12
_REFER: Final = 1 << 13  # ABI 2
_TRUNCATE: Final = 1 << 14  # ABI 3
_IOCTL_DEV: Final = 1 << 15  # ABI 5
_BIND_TCP: Final = 1 << 0  # ABI 4
_CONNECT_TCP: Final = 1 << 1
_SCOPE_ABSTRACT_UNIX_SOCKET: Final = 1 << 0  # ABI 6
_SCOPE_SIGNAL: Final = 1 << 1

NETWORK_ABI: Final = 4
SCOPE_ABI: Final = 6

_READ: Final = _READ_FILE | _READ_DIR
_WRITE: Final = (
    _READ
    | _WRITE_FILE
    | _REMOVE_DIR
    | _REMOVE_FILE
    | _MAKE_DIR
    | _MAKE_REG
    | _MAKE_SOCK
    | _MAKE_SYM
    | _REFER
    | _TRUNCATE
)
_OF_A_FILE: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_ABI_1: Final = (1 << 13) - 1


@dataclass(frozen=True)
class Rule:
    """What may be done beneath a path: read, or also write, make and remove."""

    path: Path
    writable: bool


def enforce(rules: Iterable[Rule], *, network: bool) -> int:
    """Puts the wall on this process. Once only, before it starts a thread.

    Args:
        rules: paths that do not exist are left out.
        network: whether TCP stays allowed.

    Returns:
        The kernel's ABI, by which one knows what is enforced; 0 when there is no Landlock.

    Raises:
        OSError: the kernel has Landlock and refuses the wall.
    """
    abi = linux.landlock_abi()
    if abi < 1:
        return 0
    handled = _handled(abi)
    tcp = _BIND_TCP | _CONNECT_TCP if abi >= NETWORK_ABI and not network else 0
    scoped = _SCOPE_ABSTRACT_UNIX_SOCKET | _SCOPE_SIGNAL if abi >= SCOPE_ABI else 0
    ruleset = linux.landlock_ruleset(handled, tcp, scoped)
    try:
        for rule in rules:
            _allow(ruleset, rule, handled)
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        linux.landlock_enforce(ruleset)
    finally:
        os.close(ruleset)
    return abi


def enforced() -> bool:
    """Whether the wall stands, by an attempt: the root can be listed but for Landlock."""
    try:
        os.listdir("/")
    except PermissionError:
        return True
    return False


def _handled(abi: int) -> int:
    handled = _ABI_1
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        if abi >= since:
            handled |= right
    return handled


def _allow(ruleset: int, rule: Rule, handled: int) -> None:
    try:
        descriptor = os.open(rule.path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rights = (_WRITE if rule.writable else _READ) & handled
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_A_FILE
        linux.landlock_allow(ruleset, descriptor, rights)
    finally:
        os.close(descriptor)
