"""Sealed boxes: how a value crosses the bus so that one process alone can read it.

NaCl's sealed box (X25519, XSalsa20-Poly1305, libsodium through PyNaCl) to a key pair that
lives as long as its process: who records a box cannot open it after the receiver's end.

A sealed box makes a key pair and agrees on a key for each value, which is most of its cost.
Who seals to one receiver for each request is a `Sender`: NaCl's box between a key pair that it
made for this receiver and the receiver's, agreed on once, with a random nonce of 192 bits. What it
made can be opened by the sender, too, as long as that lives: the store, which has it all anyway.
"""

from __future__ import annotations

from typing import Final

import nacl.bindings as sodium
import nacl.exceptions
import nacl.utils

from agent_box.process.secret import Secret

# Before what a `Sender` makes. A sealed box begins with a public key instead, at random.
_SENT: Final = b"agentbox"
_NO_KEY: Final = "that is not a public key to which anything can be sealed"
_SENDER_AT: Final = len(_SENT)
_NONCE_AT: Final = _SENDER_AT + sodium.crypto_box_PUBLICKEYBYTES
_TEXT_AT: Final = _NONCE_AT + sodium.crypto_box_NONCEBYTES


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
        self._sender = b""  # the last one, and what was agreed on with it
        self._shared = Secret(b"")

    def open(self, untrusted_box: bytes) -> Secret:
        """A sealed box, or one of a `Sender`. Raises `Unsealable`."""
        if untrusted_box.startswith(_SENT):
            return self._open_sent(untrusted_box)
        if len(untrusted_box) < sodium.crypto_box_SEALBYTES:
            raise Unsealable
        try:
            return Secret(
                sodium.crypto_box_seal_open(untrusted_box, self.public, self._secret.reveal())
            )
        except nacl.exceptions.CryptoError:
            raise Unsealable from None

    def _open_sent(self, untrusted_box: bytes) -> Secret:
        sender = untrusted_box[_SENDER_AT:_NONCE_AT]
        try:
            if sender != self._sender:
                shared = sodium.crypto_box_beforenm(sender, self._secret.reveal())
                self._sender, self._shared = sender, Secret(shared)
            return Secret(
                sodium.crypto_box_open_easy_afternm(
                    untrusted_box[_TEXT_AT:],
                    untrusted_box[_NONCE_AT:_TEXT_AT],
                    self._shared.reveal(),
                )
            )
        except (nacl.exceptions.CryptoError, nacl.exceptions.ValueError):
            raise Unsealable from None


class Sender:
    """Seals to one receiver, again and again.

    Args:
        untrusted_to: an X25519 public key.

    Raises:
        ValueError: as `box`.
    """

    def __init__(self, untrusted_to: bytes) -> None:
        _check(untrusted_to)
        public, secret = sodium.crypto_box_keypair()
        try:
            shared = sodium.crypto_box_beforenm(untrusted_to, secret)
        except nacl.exceptions.CryptoError:
            raise ValueError(_NO_KEY) from None
        self.to: Final = untrusted_to
        self._start: Final = _SENT + bytes(public)
        self._shared: Final = Secret(shared)

    def box(self, plaintext: Secret) -> bytes:
        nonce = nacl.utils.random(sodium.crypto_box_NONCEBYTES)
        sealed = sodium.crypto_box_easy_afternm(plaintext.reveal(), nonce, self._shared.reveal())
        return self._start + nonce + bytes(sealed)


def box(plaintext: Secret, untrusted_to: bytes) -> bytes:
    """Seals to an X25519 public key.

    Raises:
        ValueError: it is not a key of 32 bytes, or one of the few points to which nothing
            can be sealed, because everybody knows the shared secret.
    """
    _check(untrusted_to)
    try:
        return bytes(sodium.crypto_box_seal(plaintext.reveal(), untrusted_to))
    except nacl.exceptions.CryptoError:
        raise ValueError(_NO_KEY) from None


def _check(untrusted_to: bytes) -> None:
    if len(untrusted_to) != sodium.crypto_box_PUBLICKEYBYTES:
        raise ValueError(f"a public key has {sodium.crypto_box_PUBLICKEYBYTES} bytes")
