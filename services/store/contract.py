"""store: credentials, encrypted at rest.

TRUST. The store believes the transport about who is calling, and nobody about anything
else. The operator may put values in and take them away, and can never read one back. The
broker alone may read one, sealed to the key that this start of the broker made. No other
process has any business here; the store calls nobody and has no network.
"""

from __future__ import annotations

from agent_box.bus.schema import Contract, Data, Empty, Kind, Method, Wall, Wire


class SealKey(Wire, frozen=True):
    key: bytes  # X25519 public key of this start of the store, 32 bytes


class Put(Wire, frozen=True):
    name: str
    sealed: bytes  # the value in a NaCl sealed box to SealKey.key


class Stored(Wire, frozen=True):
    version: int  # counts up with every `put` of this name


class Name(Wire, frozen=True):
    name: str


class Credential(Wire, frozen=True):
    name: str
    version: int
    updated_ms: int  # Unix time, milliseconds
    problem: str | None  # why it cannot be read, e.g. "tampered"; None when it can


class Credentials(Wire, frozen=True):
    credentials: list[Credential]
    protection: str  # how the master key is kept: key-file, keyring, systemd-creds, passphrase
    locked: bool


class Reveal(Wire, frozen=True):
    name: str
    to: bytes  # X25519 public key of this start of the broker, 32 bytes


class Revealed(Wire, frozen=True):
    version: int
    sealed: bytes  # the value in a NaCl sealed box to Reveal.to


class Unlock(Wire, frozen=True):
    sealed: bytes  # the passphrase in a NaCl sealed box to SealKey.key


class Protect(Wire, frozen=True):
    protection: str
    sealed: bytes  # the new key or passphrase, sealed to SealKey.key; empty for key-file


CONTRACT = Contract(
    service="store",
    trusts="The transport for the caller's role. Nobody for anything else.",
    methods=(
        Method(
            name="seal_key", kind=Kind.READ, request=Empty, reply=SealKey, deadline_s=10,
            data=Data.STATUS, summary="The public key to which a value for the store is sealed.",
        ),
        Method(
            name="put", kind=Kind.IDEMPOTENT, request=Put, reply=Stored, deadline_s=30,
            data=Data.SEALED, summary="Stores or replaces a credential; durable when answered.",
        ),
        Method(
            name="list", kind=Kind.READ, request=Empty, reply=Credentials, deadline_s=10,
            data=Data.RECORD, summary="Names, versions and problems. Never a value.",
        ),
        Method(
            name="remove", kind=Kind.ONCE, request=Name, reply=Empty, deadline_s=30,
            data=Data.RECORD, summary="Removes one credential.",
        ),
        Method(
            name="reveal", kind=Kind.READ, request=Reveal, reply=Revealed, deadline_s=10,
            data=Data.SEALED, summary="One credential, sealed to the broker's key of this start.",
        ),
        Method(
            name="unlock", kind=Kind.IDEMPOTENT, request=Unlock, reply=Empty, deadline_s=60,
            data=Data.SEALED, summary="Opens a store whose key is kept by a passphrase.",
        ),
        Method(
            name="protect", kind=Kind.IDEMPOTENT, request=Protect, reply=Empty, deadline_s=60,
            data=Data.SEALED, summary="Changes how the master key is kept.",
        ),
    ),
    events=(),
    wall=Wall(why="Needs only its own database and its own keys."),
)
