"""The small values that operators write, on the command line and in the config file.

Each function takes the text and returns the value, or raises `ValueError` whose message is
the rule that was broken, without the value, so that "must be {rule}" reads well: the caller
knows where the value came from and names it. Standard library only, and `re` alone of it.
"""

from __future__ import annotations

import re
from typing import Final


class Said(ValueError):
    """A refusal whose message is a whole sentence, and not a rule to follow "must be".

    Args:
        sentence: it may show the value.
        blind: the same without any part of the value, for a table whose values are never
            shown; None when there is no such sentence.
    """

    def __init__(self, sentence: str, *, blind: str | None = None) -> None:
        super().__init__(sentence)
        self.blind = blind


NAME_RULE: Final = (
    "1 to 63 lowercase letters, digits and hyphens, with a letter or digit at each end"
)
_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)

CREDENTIAL_RULE: Final = (
    "1 to 64 lowercase letters, digits, dots, underscores and hyphens, "
    "with a letter or digit at the start"
)
_CREDENTIAL: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)

SIZE_RULE: Final = "an integer and a unit, M or G, such as 512M or 8G"
_SIZE: Final = re.compile(r"([1-9][0-9]{0,8})([MG])", re.ASCII)
_UNITS: Final = {"M": 1 << 20, "G": 1 << 30}

CPUS_MAX: Final = 64
MEMORY_MIN: Final = 128 << 20  # bytes; less does not boot
MEMORY_MAX: Final = 1 << 40
DISK_MIN: Final = 64 << 20
DISK_MAX: Final = 16 << 40
COUNT_MAX: Final = 10**15  # of a budget; less than what a database's integer holds


def name(untrusted: str) -> str:
    """A name of an instance, profile, policy, binding, variant: the rules of a DNS label."""
    if not _NAME.fullmatch(untrusted):
        raise ValueError(NAME_RULE)
    return untrusted


def credential(untrusted: str) -> str:
    """A credential's name, as the store takes it."""
    if not _CREDENTIAL.fullmatch(untrusted):
        raise ValueError(CREDENTIAL_RULE)
    return untrusted


def size(untrusted: str) -> int:
    """Bytes. Units are binary: 30G is 30 GiB."""
    match = _SIZE.fullmatch(untrusted)
    if match is None:
        raise ValueError(SIZE_RULE)
    return int(match[1]) * _UNITS[match[2]]


def memory(untrusted: str) -> int:
    """Bytes of an instance's memory."""
    return memory_bytes(size(untrusted))


def memory_bytes(untrusted: int) -> int:
    return _between(untrusted, MEMORY_MIN, MEMORY_MAX, "a size from 128M to 1024G")


def disk(untrusted: str) -> int:
    """Bytes of an instance's data disk."""
    return disk_bytes(size(untrusted))


def disk_bytes(untrusted: int) -> int:
    return _between(untrusted, DISK_MIN, DISK_MAX, "a size from 64M to 16384G")


def cpus(untrusted: int) -> int:
    return _between(untrusted, 1, CPUS_MAX, f"an integer from 1 to {CPUS_MAX}")


def _between(value: int, least: int, most: int, rule: str) -> int:
    if not least <= value <= most:
        raise ValueError(rule)
    return value
