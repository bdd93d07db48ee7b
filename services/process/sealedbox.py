"""Sealed boxes: how a value crosses the bus so that one process alone can read it.

NaCl's sealed box (X25519, XSalsa20-Poly1305, libsodium through PyNaCl) to a key pair that
lives as long as its process: who records a box cannot open it after the receiver's end.
"""

from __future__ import annotations

from typing import Final

import nacl.bindings as sodium
import nacl.exceptions

from agent_box.process.secret import Secret


class Unsealable(Exception):
    """It does not open: another key, another context, or not the bytes that were sealed.

    Which of these cannot be told, by design of the cipher. Carries no detail.
    """


class Inbox:
    """The key pair of one start of a process, to which others seal what only it may read."""

    def __init__(self) -> None:
        public, secret = sodium.crypto_box_keypair()
        self.public: Final = bytes(public)
        self._secret: Final = Secret(secret)

    def open(self, untrusted_box: bytes) -> Secret:
        """Raises `Unsealable`."""
        if len(untrusted_box) < sodium.crypto_box_SEALBYTES:
            raise Unsealable
        try:
            return Secret(
                sodium.crypto_box_seal_open(untrusted_box, self.public, self._secret.reveal())
            )
        except nacl.exceptions.CryptoError:
            raise Unsealable from None


def box(plaintext: Secret, untrusted_to: bytes) -> bytes:
    """Seals to an X25519 public key.

    Raises:
        ValueError: it is not a key of 32 bytes, or one of the few points to which nothing
            can be sealed, because everybody knows the shared secret.
    """
    if len(untrusted_to) != sodium.crypto_box_PUBLICKEYBYTES:
        raise ValueError(f"a public key has {sodium.crypto_box_PUBLICKEYBYTES} bytes")
    try:
        return bytes(sodium.crypto_box_seal(plaintext.reveal(), untrusted_to))
    except nacl.exceptions.CryptoError:
        raise ValueError("that is not a public key to which anything can be sealed") from None
