"""The stand-ins that a guest presents in place of keys.

A nonce is a MAC over instance, binding and boot, so nothing is kept: a broker that starts
again makes the same ones, and another boot of the instance has others.
"""

from __future__ import annotations

import hmac
import re
from base64 import b32encode
from typing import Final

KEY_BYTES: Final = 32
PREFIX: Final = "sk-agentbox-"  # some clients take only keys that begin with sk-
# Lowercase letters and digits: the same text in a header, a URL, an .ini file and a shell.
PATTERN: Final = re.compile(rb"sk-agentbox-[a-z2-7]{52}")
_DOMAIN: Final = b"agent-box nonce 1"


def make(key: bytes, instance: str, binding: str, boot: int) -> str:
    """The nonce of one binding of one boot of one instance.

    Args:
        key: the broker's own, 32 bytes.
        instance: its id.
        boot: counts up with every start.

    Raises:
        ValueError: the key is not of 32 bytes, or the boot is negative.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"the broker's key has {KEY_BYTES} bytes")
    if boot < 0:
        raise ValueError("a boot is not negative")
    parts = (_DOMAIN, instance.encode(), binding.encode(), str(boot).encode())
    # Each with its length before it, so that no two lists of parts give the same text.
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return PREFIX + b32encode(hmac.digest(key, text, "sha256")).decode().rstrip("=").lower()


def same(untrusted: bytes, nonce: str) -> bool:
    """Whether the two are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(untrusted, nonce.encode())
