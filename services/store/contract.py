"""store: credentials, encrypted at rest.

TRUST. The store believes the transport about who is calling, and nobody about anything
else. The operator may put values in and take them away, and can never read one back. The
broker alone may read one, sealed to the key that this start of the broker made. No other
process has any business here; the store calls nobody and has no network.

A value crosses the bus only in a NaCl sealed box, under the transport's own encryption, to
a key that lives as long as its receiver's process. A box to the key of an earlier start is
refused with `conflict` and the fact ``seal=stale``: ask `seal_key` again and seal anew.
"""

from __future__ import annotations

from typing import Literal

from agent_box.bus.schema import Contract, Data, Empty, Kind, Method, Wall, Wire

Protection = Literal["key-file", "keyring", "systemd-creds", "passphrase"]


class SealKey(Wire, frozen=True):
    key: bytes  # X25519 public key of this start of the store, 32 bytes
    locked: bool  # `put` and `reveal` are refused until `unlock`


class Sealed(Wire, frozen=True):
    to: bytes  # the SealKey.key that it is sealed to
    box: bytes  # NaCl sealed box


class Put(Wire, frozen=True):
    name: str
    value: Sealed


class Stored(Wire, frozen=True):
    version: int  # counts up with every `put` of this name; a `put` sent again may count twice


class Name(Wire, frozen=True):
    name: str


class Credential(Wire, frozen=True):
    name: str
    version: int
    updated_ms: int  # Unix time, milliseconds
    problem: str | None  # why it cannot be used, e.g. "tampered with"; None when it can


class Credentials(Wire, frozen=True):
    credentials: list[Credential]  # by name
    protection: Protection  # how the master key is kept
    locked: bool  # the master key is not here; problems are then not known either
    problem: str | None  # of the whole store


class Reveal(Wire, frozen=True):
    name: str
    to: bytes  # X25519 public key of this start of the broker, 32 bytes


class Revealed(Wire, frozen=True):
    version: int
    box: bytes  # the value in a NaCl sealed box to Reveal.to


class Unlock(Wire, frozen=True):
    secret: Sealed  # the passphrase, or the 32 bytes that the keyring or systemd-creds keeps


class Protect(Wire, frozen=True):
    protection: Protection
    key: str  # 32 hex digits, the name of the key where it is kept; empty for the store's choice
    secret: Sealed | None  # the passphrase or the key of 32 bytes; None for key-file
    blob: bytes  # what systemd-creds made of the key; empty for the others


CONTRACT = Contract(
    service="store",
    trusts="The transport for the caller's role. Nobody for anything else.",
    methods=(
        Method(
            name="seal_key",
            kind=Kind.READ,
            request=Empty,
            reply=SealKey,
            deadline_s=10,
            data=Data.STATUS,
            summary="The public key to which a value for the store is sealed.",
        ),
        Method(
            name="put",
            kind=Kind.IDEMPOTENT,
            request=Put,
            reply=Stored,
            deadline_s=30,
            data=Data.SEALED,
            summary="Stores or replaces a credential; durable when answered.",
        ),
        Method(
            name="list",
            kind=Kind.READ,
            request=Empty,
            reply=Credentials,
            deadline_s=10,
            data=Data.RECORD,
            summary="Names, versions and problems. Never a value.",
        ),
        Method(
            name="remove",
            kind=Kind.ONCE,
            request=Name,
            reply=Empty,
            deadline_s=30,
            data=Data.RECORD,
            summary="Removes one credential.",
        ),
        Method(
            name="reveal",
            kind=Kind.READ,
            request=Reveal,
            reply=Revealed,
            deadline_s=10,
            data=Data.SEALED,
            summary="One credential, sealed to the broker's key of this start.",
        ),
        Method(
            name="unlock",
            kind=Kind.IDEMPOTENT,
            request=Unlock,
            reply=Empty,
            deadline_s=60,
            data=Data.SEALED,
            summary="Opens a store whose key is not kept where it can read it by itself.",
        ),
        Method(
            name="protect",
            kind=Kind.IDEMPOTENT,
            request=Protect,
            reply=Empty,
            deadline_s=60,
            data=Data.SEALED,
            summary="Changes how the master key is kept; the old key or the new one opens it.",
        ),
    ),
    events=(),
    wall=Wall(
        launcher="agent_box.store.keysource",
        memory_mib=768,
        why=(
            "Needs only its own database and its own keys. The launcher asks the OS keyring or "
            "systemd-creds for the master key, when one of them has it, and leaves it in a pipe. "
            "The memory is for Argon2id, which takes 256 MiB so that guessing a passphrase "
            "costs as much."
        ),
    ),
)
