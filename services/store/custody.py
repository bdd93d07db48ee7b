"""How the master key is kept: one small file that says so and holds the wrapped data key.

The file is `custody.json` in the store's key directory. It holds no key that opens anything
by itself: for `key-file` the key lies beside it, for `keyring` with the operator's desktop,
for `systemd-creds` inside `blob`, which only this machine's systemd opens, and for
`passphrase` in a person's head. Replacing the file by rename changes the protection in one
step, so a crash leaves the old protection or the new one.

Standard library only: `keysource` reads it before every start of the store.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from typing import Final

FILE: Final = "custody.json"
PROTECTIONS: Final = ("key-file", "keyring", "systemd-creds", "passphrase")
HANDED: Final = ("keyring", "systemd-creds")  # fetched outside the wall and handed in
SIZE_MAX: Final = 64 << 10  # bytes of the file
BLOB_MAX: Final = 16 << 10  # bytes
VERSION: Final = 1

_HEX32: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Custody:
    """The content of the file.

    Attributes:
        store: the id of the store, 16 bytes; the database has the same.
        protection: one of `PROTECTIONS`.
        key: 32 hex digits, the name of the key-encryption key, new with every change.
        salt, passes, memory: Argon2id's parameters for `passphrase`; empty and 0 otherwise.
        blob: what systemd-creds made of the key for `systemd-creds`; empty otherwise.
        wrapped: the data key, sealed by the key-encryption key.
    """

    store: bytes
    protection: str
    key: str
    salt: bytes
    passes: int
    memory: int
    blob: bytes
    wrapped: bytes

    def encode(self) -> bytes:
        return (
            json.dumps(
                {
                    "version": VERSION,
                    "store": self.store.hex(),
                    "protection": self.protection,
                    "key": self.key,
                    "salt": self.salt.hex(),
                    "passes": self.passes,
                    "memory": self.memory,
                    "blob": base64.b64encode(self.blob).decode(),
                    "wrapped": self.wrapped.hex(),
                },
                indent=1,
            ).encode()
            + b"\n"
        )

    @classmethod
    def decode(cls, untrusted: bytes) -> Custody:
        """Raises ValueError that names the member which is wrong, never with its value."""
        if len(untrusted) > SIZE_MAX:
            raise ValueError("it is too large")
        try:
            members = json.loads(untrusted, object_pairs_hook=_once)
        except (UnicodeDecodeError, RecursionError, json.JSONDecodeError):
            raise ValueError("it is not JSON, or not all of it is there") from None
        if not isinstance(members, dict):
            raise ValueError("it is not a JSON object")
        expected = set(cls.__dataclass_fields__) | {"version"}
        if set(members) != expected:
            wrong = sorted(str(m) for m in set(members) ^ expected)
            raise ValueError(f"member {wrong[0][:64]!r} is missing or unknown")
        if members["version"] != VERSION or isinstance(members["version"], bool):
            raise ValueError("member 'version' is not one that this program knows")
        protection, key = members["protection"], members["key"]
        if protection not in PROTECTIONS:
            raise ValueError("member 'protection' is wrong")
        if not isinstance(key, str) or not _HEX32.fullmatch(key):
            raise ValueError("member 'key' is wrong")
        custody = cls(
            store=_hex(members, "store", 16),
            protection=protection,
            key=key,
            salt=_hex(members, "salt", 16 if protection == "passphrase" else 0),
            passes=_integer(members, "passes"),
            memory=_integer(members, "memory"),
            blob=_base64(members, "blob"),
            wrapped=_hex(members, "wrapped", 24 + 32 + 16),
        )
        if (protection == "systemd-creds") != bool(custody.blob):
            raise ValueError("member 'blob' is wrong")
        return custody


def key_name(untrusted: str) -> str:
    """The name of a key-encryption key. ValueError when it is none."""
    if not _HEX32.fullmatch(untrusted):
        raise ValueError("a key's name is 32 lowercase hex digits")
    return untrusted


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member stands twice")
    return members


def _hex(members: dict[str, object], name: str, size: int) -> bytes:
    text = members[name]
    if not isinstance(text, str) or not re.fullmatch(rf"[0-9a-f]{{{2 * size}}}", text, re.ASCII):
        raise ValueError(f"member {name!r} is wrong")
    return bytes.fromhex(text)


def _integer(members: dict[str, object], name: str) -> int:
    number = members[name]
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 40:
        raise ValueError(f"member {name!r} is wrong")
    return number


def _base64(members: dict[str, object], name: str) -> bytes:
    text = members[name]
    if not isinstance(text, str) or len(text) > 2 * BLOB_MAX:
        raise ValueError(f"member {name!r} is wrong")
    try:
        return base64.b64decode(text.encode(), validate=True)
    except ValueError:
        raise ValueError(f"member {name!r} is wrong") from None
