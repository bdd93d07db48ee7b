"""A store of credentials without a bus, for tests: its two directories and its verbs."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent_box.bus.outcomes import SqliteOutcomes
from agent_box.process.secret import Secret
from agent_box.store import seal
from agent_box.store.adapter import DATABASE, Store
from agent_box.store.contract import (
    Credential,
    Credentials,
    Name,
    Protect,
    Protection,
    Put,
    Reveal,
    Sealed,
    Unlock,
)
from agent_box.store.custody import Custody
from agent_box.store.handing import Handed


class Lines:
    """A log that keeps what was said."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, object]]] = []

    def info(self, event: str, **fields: object) -> None:
        self.lines.append(("info", event, fields))

    def warning(self, event: str, **fields: object) -> None:
        self.lines.append(("warning", event, fields))

    def error(self, event: str, *, error: BaseException | None = None, **fields: object) -> str:
        self.lines.append(("error", event, {"error": repr(error), **fields}))
        return "id"

    def events(self) -> list[str]:
        return [event for _, event, _ in self.lines]


def nothing_handed() -> Handed:
    return Handed(None, "nothing was handed in")


class Box:
    """The directories of one store, and its verbs as a caller would use them."""

    def __init__(self, root: Path) -> None:
        self.data = root / "data"
        self.keys = root / "keys"
        for directory in (root, self.data, self.keys):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.database = self.data / DATABASE
        self.log = Lines()
        self.now_ms = 1_800_000_000_000

    def open(self, handed: Callable[[], Handed] = nothing_handed) -> Store:
        return Store(
            data=self.data,
            keys=self.keys,
            handed=handed,
            log=self.log,
            outcomes=SqliteOutcomes,
            now_ms=lambda: self.now_ms,
        )

    @contextmanager
    def opened(self, handed: Callable[[], Handed] = nothing_handed) -> Iterator[Store]:
        store = self.open(handed)
        try:
            yield store
        finally:
            store.close()

    @contextmanager
    def sql(self) -> Iterator[sqlite3.Connection]:
        """The database in the hands of somebody else; the store must be closed."""
        connection = sqlite3.connect(self.database)
        try:
            with connection:
                yield connection
        finally:
            connection.close()


def sealed(store: Store, value: bytes) -> Sealed:
    key = store.seal_key().key
    return Sealed(to=key, box=seal.box(Secret(value), key))


def put(store: Store, name: str, value: bytes) -> int:
    return store.put(Put(name=name, value=sealed(store, value))).version


def reveal(store: Store, name: str) -> bytes:
    inbox = seal.Inbox()
    return inbox.open(store.reveal(Reveal(name=name, to=inbox.public)).box).reveal()


def remove(store: Store, name: str) -> None:
    store.remove(Name(name=name), lambda reply: None)


def listed(store: Store) -> dict[str, Credential]:
    return {c.name: c for c in full_list(store).credentials}


def full_list(store: Store) -> Credentials:
    return store.list()


def protect(
    store: Store,
    protection: Protection,
    secret: bytes | None = None,
    *,
    key: str = "",
    blob: bytes = b"",
) -> None:
    request = Protect(
        protection=protection,
        key=key,
        secret=None if secret is None else sealed(store, secret),
        blob=blob,
    )
    run(store.protect(request))


def unlock(store: Store, secret: bytes) -> None:
    run(store.unlock(Unlock(secret=sealed(store, secret))))


def run(work: Any) -> Any:
    return asyncio.run(work)


def custody(protection: str = "key-file") -> Custody:
    """The content of a custody file that opens nothing."""
    argon = protection == "passphrase"
    return Custody(
        store=bytes(16),
        protection=protection,
        key="ab" * 16,
        salt=b"s" * 16 if argon else b"",
        passes=3 if argon else 0,
        memory=256 << 20 if argon else 0,
        blob=b"blob" if protection == "systemd-creds" else b"",
        wrapped=b"w" * 72,
    )
