"""The cryptography of the store, and all of it: libsodium through PyNaCl, nothing of ours.

Three keys, one above the other:

* the *key-encryption key*, kept where the operator chose (`custody`), or made of a
  passphrase by Argon2id. It wraps only
* the *data key*, random, made once with the store. It never changes, so that changing the
  protection rewrites one small file and no credential. From it come, by keyed BLAKE2b,
* the keys that are used: one for credentials, one for the book of their versions.

Everything is sealed by XChaCha20-Poly1305 with a random nonce of 192 bits. What a sealed
thing *is* (store, name, version, time) is its associated data, so a row that is swapped with
another, renamed, or given another version does not open.

For the bus there are the sealed boxes of `process.sealedbox`.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final

import nacl.bindings as sodium
import nacl.exceptions
import nacl.utils

from agent_box.process.sealedbox import Inbox, Sender, Unsealable, box
from agent_box.process.secret import Secret

__all__ = [
    "Inbox",
    "Sender",
    "Unsealable",
    "box",
]  # with what is below, all cryptography of the store

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 24
SALT_BYTES: Final = 16
ID_BYTES: Final = 16

# Argon2id. libsodium's MODERATE: three passes over 256 MiB, about a second here.
KDF_PASSES: Final = sodium.crypto_pwhash_argon2id_OPSLIMIT_MODERATE
KDF_MEMORY: Final = sodium.crypto_pwhash_argon2id_MEMLIMIT_MODERATE  # bytes
KDF_PASSES_RANGE: Final = range(1, 17)
KDF_MEMORY_RANGE: Final = range(8 << 20, (512 << 20) + 1)


def new_id() -> bytes:
    """16 random bytes, a name for a store."""
    return bytes(nacl.utils.random(ID_BYTES))


def new_salt() -> bytes:
    return bytes(nacl.utils.random(SALT_BYTES))


def new_key() -> Secret:
    """32 random bytes from the kernel."""
    return Secret(nacl.utils.random(KEY_BYTES))


def subkey(key: Secret, purpose: bytes) -> Secret:
    """A key for one purpose. `purpose` has at most 16 bytes; different ones are unrelated."""
    return Secret(_blake2b(key, purpose, KEY_BYTES))


def fingerprint(key: Secret) -> bytes:
    """16 bytes by which a key is known again; they say nothing about it."""
    return _blake2b(key, b"fingerprint", ID_BYTES)


def _blake2b(key: Secret, purpose: bytes, size: int) -> bytes:
    return hashlib.blake2b(
        b"agent-box store 1", digest_size=size, key=key.reveal(), person=purpose
    ).digest()


def context(what: bytes, store: bytes, *parts: bytes | int) -> bytes:
    """Associated data: every part with its length, so that no two contexts are alike."""
    encoded = [p if isinstance(p, bytes) else struct.pack(">Q", p) for p in (what, store, *parts)]
    return b"".join(struct.pack(">I", len(part)) + part for part in encoded)


def seal(key: Secret, plaintext: bytes, associated: bytes) -> bytes:
    """Nonce and ciphertext."""
    nonce = bytes(nacl.utils.random(NONCE_BYTES))
    return nonce + sodium.crypto_aead_xchacha20poly1305_ietf_encrypt(
        plaintext, associated, nonce, key.reveal()
    )


def nonce_of(sealed: bytes) -> bytes:
    """What tells one sealing from every other, of the same value even."""
    return sealed[:NONCE_BYTES]


def unseal(key: Secret, untrusted: bytes, associated: bytes) -> Secret:
    """The plaintext. Raises `Unsealable`."""
    if len(untrusted) < NONCE_BYTES + sodium.crypto_aead_xchacha20poly1305_ietf_ABYTES:
        raise Unsealable
    try:
        return Secret(
            sodium.crypto_aead_xchacha20poly1305_ietf_decrypt(
                untrusted[NONCE_BYTES:], associated, untrusted[:NONCE_BYTES], key.reveal()
            )
        )
    except nacl.exceptions.CryptoError:
        raise Unsealable from None


def key_of_passphrase(passphrase: Secret, salt: bytes, passes: int, memory: int) -> Secret:
    """A key-encryption key by Argon2id. Takes a second and `memory` bytes, by intention.

    Raises:
        MemoryError: there is not so much memory to be had.
    """
    try:
        return Secret(
            sodium.crypto_pwhash_alg(
                KEY_BYTES,
                passphrase.reveal(),
                salt,
                passes,
                memory,
                sodium.crypto_pwhash_ALG_ARGON2ID13,
            )
        )
    except nacl.exceptions.RuntimeError:
        raise MemoryError(f"Argon2id needs {memory >> 20} MiB of memory") from None
