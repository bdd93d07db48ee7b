"""What a credential may be called and what it may hold. The CLI and the store both ask here.

A value ends up in one header of an HTTP request, so what a header cannot carry is refused
when it is stored, not when an agent first needs it. Bytes from 0x80 up are allowed: the
broker puts them in as they are. Standard library only: `secret list` must not wait for a
crypto library.
"""

from __future__ import annotations

from typing import Final

from agent_box.config import values

VALUE_MAX: Final = 64 << 10  # bytes
PASSPHRASE_MAX: Final = 1024  # bytes
CREDENTIALS_MAX: Final = 1000

_NAMED: Final = {0x00: "NUL", 0x0A: "a line feed", 0x0D: "a carriage return"}


def name(untrusted: str) -> str:
    """A credential's name, by the rule that the config has too. ValueError tells the rule."""
    return values.credential(untrusted)


def value(untrusted: bytes) -> bytes:
    """A credential's value. ValueError says what is wrong with it, and nothing about it."""
    if not untrusted:
        raise ValueError("the value is empty")
    if len(untrusted) > VALUE_MAX:
        raise ValueError(f"the value is longer than {VALUE_MAX} bytes")
    for byte in untrusted:
        if (byte < 0x20 and byte != 0x09) or byte == 0x7F:
            what = _NAMED.get(byte, f"the control character 0x{byte:02x}")
            raise ValueError(f"the value contains {what}, which no header can carry")
    return untrusted


def passphrase(untrusted: bytes) -> bytes:
    """A passphrase. ValueError says what is wrong with it, and nothing about it."""
    if not untrusted:
        raise ValueError("the passphrase is empty")
    if len(untrusted) > PASSPHRASE_MAX:
        raise ValueError(f"the passphrase is longer than {PASSPHRASE_MAX} bytes")
    if b"\0" in untrusted or b"\n" in untrusted or b"\r" in untrusted:
        raise ValueError("the passphrase contains NUL or a line end, which no terminal can type")
    return untrusted
