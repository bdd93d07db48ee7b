"""How engine and helper prove themselves to each other. Sans-I/O.

Each answers the other's random challenge with an HMAC under a key that only these two can
read, over both challenges and its own name, so that no answer serves twice or for the other.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from agent_box.helper import contract
from agent_box.helper.contract import Hex, Int, Struct
from agent_box.helper.wire import WireError, check, decode, encode

CHALLENGE_BYTES: Final = 32
ENGINE: Final = "engine"
HELPER: Final = "helper"
_VERSION: Final = Int(contract.PROTOCOL, contract.PROTOCOL)
_CHALLENGE: Final = Hex(2 * CHALLENGE_BYTES)
_MAC: Final = Hex(64)
HELLO: Final = Struct((("v", _VERSION), ("challenge", _CHALLENGE)))
PROOF: Final = Struct((("v", _VERSION), ("challenge", _CHALLENGE), ("mac", _MAC)))
WELCOME: Final = Struct((("v", _VERSION), ("mac", _MAC)))


def mac(key: bytes, side: str, own: str, other: str) -> str:
    """What `side` proves itself with.

    Args:
        own: the challenge that it sent, hex.
        other: the one that it answers, hex.
    """
    text = f"agent-box helper {contract.PROTOCOL} {side} {own} {other}".encode()
    return hmac.new(key, text, hashlib.sha256).hexdigest()


def proves(key: bytes, side: str, own: str, other: str, untrusted_mac: str) -> bool:
    """Whether `side` has proved itself, in constant time."""
    return hmac.compare_digest(mac(key, side, own, other), untrusted_mac)


class HelperSide:
    """The proof as the helper makes it.

    Args:
        challenge: `CHALLENGE_BYTES` of fresh randomness.
    """

    def __init__(self, key: bytes, challenge: bytes) -> None:
        self._key = key
        self._own = challenge.hex()

    def hello(self) -> bytes:
        return encode({"v": contract.PROTOCOL, "challenge": self._own})

    def welcome(self, untrusted_proof: bytes) -> bytes:
        """The last message, if the other is the engine.

        Raises:
            WireError: it is not.
        """
        proof = check(PROOF, decode(untrusted_proof))
        if proof["challenge"] == self._own:
            raise WireError("the challenge came back")
        if not proves(self._key, ENGINE, proof["challenge"], self._own, proof["mac"]):
            raise WireError("the proof is wrong")
        own = mac(self._key, HELPER, self._own, proof["challenge"])
        return encode({"v": contract.PROTOCOL, "mac": own})


class EngineSide:
    """The proof as the engine makes it. Arguments as for `HelperSide`."""

    def __init__(self, key: bytes, challenge: bytes) -> None:
        self._key = key
        self._own = challenge.hex()
        self._other = ""

    def proof(self, untrusted_hello: bytes) -> bytes:
        """Raises:
        WireError: that was no helper's hello.
        """
        self._other = check(HELLO, decode(untrusted_hello))["challenge"]
        own = mac(self._key, ENGINE, self._own, self._other)
        return encode({"v": contract.PROTOCOL, "challenge": self._own, "mac": own})

    def accept(self, untrusted_welcome: bytes) -> None:
        """Raises:
        WireError: the other does not hold the key.
        """
        welcome = check(WELCOME, decode(untrusted_welcome))
        if not proves(self._key, HELPER, self._other, self._own, welcome["mac"]):
            raise WireError("the helper's proof is wrong")
