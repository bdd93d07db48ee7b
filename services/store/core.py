"""The store's decisions: what opens, what is refused and why, what is to be written.

Sans-I/O: rows and the book go in as they were read, replies and new rows come out, and the
adapter commits them. Nothing read from the disk is believed before it opened under the key.

The *book* is one sealed record of which sealing counts for each name. It is written in the
same transaction as every row. An older row of the same name, put back by whoever can write
the file, opens under the key but is not the one in the book, so it is refused by name; so is
a row that was removed and put back, or taken away. What it cannot show is that the whole
file, book and all, is an older one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

import msgspec

from agent_box.bus.errors import Reason, Refusal
from agent_box.process.secret import Secret
from agent_box.store import custody as kept
from agent_box.store import rules, seal
from agent_box.store.contract import (
    Credential,
    Credentials,
    Protect,
    Protection,
    Put,
    Reveal,
    Revealed,
    Sealed,
    SealKey,
    Stored,
)
from agent_box.store.custody import Custody

TAMPERED: Final = "tampered with, or sealed under another key"
OLDER: Final = "an older version of it was put back into the database"
REMOVED: Final = "it was removed once, and was put back into the database"
GONE: Final = "its row is gone from the database"
UNREADABLE: Final = "its row in the database cannot be read"
BOOK: Final = (
    "the table of versions is damaged, so it cannot be told from an older one; set it again"
)
WRONG_KEY: Final = "the master key is not the one that it was sealed under"

_VERSION_MAX: Final = 1 << 53


class Row(NamedTuple):
    """One credential as it lies in the database. Untrusted until it opened."""

    name: str
    version: int
    updated_ms: int
    sealed: bytes


class Unreadable(NamedTuple):
    """A row that the database could not give."""

    name: str


class Pin(NamedTuple):
    """Which sealing of a name counts."""

    version: int
    nonce: bytes


Book = dict[str, Pin]


@dataclass(frozen=True)
class Write:
    """What a `put` commits in one transaction, and then answers."""

    row: Row
    book: bytes
    reply: Stored
    note: str | None  # for the log


class Core:
    """One store, open or not.

    Args:
        custody: how the master key is kept, as read.
        fingerprint: of the data key, as the database has it; untrusted.

    Attributes:
        locked: the key is not here, and somebody outside has it.
        problem: why the key is not here, or does not fit, for a person; None when open.
    """

    def __init__(self, custody: Custody, fingerprint: bytes) -> None:
        self.custody = custody
        self.inbox: Final = seal.Inbox()
        self.locked = False
        self.problem: str | None = None
        self._fingerprint: Final = fingerprint
        self._data_key: Secret | None = None
        self._row_key: Secret | None = None
        self._book_key: Secret | None = None
        self._read: tuple[bytes, Book] | None = None  # the book last opened: names and versions
        self._sender: seal.Sender | None = None  # to who asked last: the broker of this start

    # -------------------------------------------------------------------------- the key

    @property
    def open(self) -> bool:
        return self._data_key is not None

    def unwrap(self, key: Secret) -> bool:
        """Opens the store with the key-encryption key.

        Returns:
            Whether it is open now; else `problem` says why not.

        Raises:
            seal.Unsealable: the key is another one, or the custody file was changed.
        """
        data_key = seal.unseal(key, self.custody.wrapped, _wrapping(self.custody))
        if seal.fingerprint(data_key) != self._fingerprint:
            self.fail(WRONG_KEY)
            return False
        self._data_key = data_key
        self._row_key = seal.subkey(data_key, b"credential")
        self._book_key = seal.subkey(data_key, b"book")
        self.locked, self.problem = False, None
        return True

    def lock(self, why: str) -> None:
        """The key has to come from outside: a person, the keyring, systemd."""
        self.locked, self.problem = True, why

    def fail(self, why: str) -> None:
        """The key is here and no good, or cannot be read where it should be."""
        self.locked, self.problem = False, why

    def received(self, untrusted: Sealed) -> Secret:
        """What somebody sealed to this start of the store."""
        if untrusted.to != self.inbox.public:
            raise Refusal(
                Reason.CONFLICT,
                "sealed to the key of an earlier start of the store; ask for the key again",
                facts={"seal": "stale"},
            )
        try:
            return self.inbox.open(untrusted.box)
        except seal.Unsealable:
            raise Refusal(
                Reason.BAD_REQUEST, "the sealed value does not open: it is damaged"
            ) from None

    def rewrap(self, untrusted: Protect, key: Secret, salt: bytes) -> Custody:
        """The custody that follows from `untrusted`; `key` is the new key-encryption key."""
        if self._data_key is None:
            raise self._closed("the protection cannot be changed")
        try:
            name = kept.key_name(untrusted.key) if untrusted.key else seal.new_id().hex()
        except ValueError as error:
            raise Refusal(Reason.BAD_REQUEST, str(error)) from None
        if name == self.custody.key and untrusted.protection == self.custody.protection:
            # Sent again after the reply was lost. Anything else under this name would
            # overwrite what opens the store today.
            return self.custody
        if (untrusted.protection == "systemd-creds") != bool(untrusted.blob):
            raise Refusal(Reason.BAD_REQUEST, "a blob belongs to systemd-creds, and only to it")
        if len(untrusted.blob) > kept.BLOB_MAX:
            raise Refusal(Reason.BAD_REQUEST, f"the blob is longer than {kept.BLOB_MAX} bytes")
        return custody(
            store=self.custody.store,
            protection=untrusted.protection,
            name=name,
            key=key,
            data_key=self._data_key,
            salt=salt,
            blob=untrusted.blob,
        )

    def adopt(self, custody: Custody) -> None:
        """The new custody is on the disk."""
        self.custody = custody

    # --------------------------------------------------------------------------- verbs

    def seal_key(self) -> SealKey:
        return SealKey(key=self.inbox.public, locked=self.locked)

    def put(
        self, untrusted: Put, *, untrusted_book: bytes, old: Row | Unreadable | None, now_ms: int
    ) -> Write:
        """What to write so that `untrusted.name` has this value."""
        name = _name(untrusted.name)
        if self._row_key is None:
            raise self._closed(f"{name}: not stored")
        value = self.received(untrusted.value)
        try:
            rules.value(value.reveal())
        except ValueError as error:
            raise Refusal(Reason.BAD_REQUEST, f"{name}: {error}") from None
        book, note = self._book(untrusted_book), None
        if book is None:
            # Whoever can write the file could damage the book in order to have an old row
            # believed; so nothing but what is stored from now on counts.
            book, note = {}, BOOK
        if name not in book and len(book) >= rules.CREDENTIALS_MAX:
            raise Refusal(
                Reason.EXHAUSTED,
                f"{name}: not stored, the store holds {rules.CREDENTIALS_MAX} credentials",
            )
        before = book[name].version if name in book else 0
        if isinstance(old, Row) and 0 < old.version < _VERSION_MAX:
            before = max(before, old.version)
        version = before + 1
        sealed = seal.seal(self._row_key, value.reveal(), self._place(name, version, now_ms))
        book = {**book, name: Pin(version, seal.nonce_of(sealed))}
        return Write(
            row=Row(name, version, now_ms, sealed),
            book=self._close(book),
            reply=Stored(version=version),
            note=note,
        )

    def remove(
        self, untrusted_name: str, *, untrusted_book: bytes, old: Row | Unreadable | None
    ) -> tuple[str, bytes]:
        """The name whose row is to go, and the book without it."""
        name = _name(untrusted_name)
        if self._row_key is None:
            raise self._closed(f"{name}: not removed")
        book = self._book(untrusted_book)
        if old is None and name not in (book or {}):
            raise _unknown(name)
        if book is None:
            return name, untrusted_book  # as damaged as it was: the others stay refused
        return name, self._close({n: pin for n, pin in book.items() if n != name})

    def reveal(
        self, untrusted: Reveal, *, untrusted_book: bytes, row: Row | Unreadable | None
    ) -> Revealed:
        """The value, sealed to the one who asks."""
        name = _name(untrusted.name)
        if self._row_key is None:
            if row is None and not self.locked:
                raise _unknown(name)
            raise self._closed(f"{name}: cannot be read")
        book = self._book(untrusted_book)
        if row is None and name not in (book or {}):
            raise _unknown(name)
        value, problem = self._judge(name, row, book)
        if value is None:
            raise Refusal(Reason.TAMPERED, f"credential {name}: {problem}")
        try:
            if self._sender is None or self._sender.to != untrusted.to:
                self._sender = seal.Sender(untrusted.to)
            box = self._sender.box(value)
        except ValueError as error:
            raise Refusal(Reason.BAD_REQUEST, f"{name}: {error}") from None
        assert isinstance(row, Row)
        return Revealed(version=row.version, box=box)

    def list(self, rows: Iterable[Row | Unreadable], untrusted_book: bytes) -> Credentials:
        """Every name that is in the database, or should be, and what is wrong with it."""
        book = self._book(untrusted_book) if self.open else None
        found: dict[str, Credential] = {}
        nameless = 0
        for row in rows:
            try:
                name = rules.name(row.name)
            except ValueError:
                nameless += 1
                continue
            found[name] = self._credential(name, row, book)
        for name, pin in (book or {}).items():
            if name not in found:
                found[name] = Credential(name=name, version=pin.version, updated_ms=0, problem=GONE)
        # to be locked by a passphrase is how such a store starts, and no problem
        waiting = self.locked and self.custody.protection == "passphrase"
        problem = None if waiting else self.problem
        if problem is None and nameless:
            problem = f"rows without a valid name: {nameless}"
        return Credentials(
            credentials=[found[name] for name in sorted(found)],
            protection=cast(Protection, self.custody.protection),
            locked=self.locked,
            problem=problem,
        )

    # --------------------------------------------------------------------------- below

    def _credential(self, name: str, row: Row | Unreadable, book: Book | None) -> Credential:
        problem: str | None
        if self.open:
            problem = self._judge(name, row, book)[1]
        elif isinstance(row, Unreadable):
            problem = UNREADABLE
        else:
            problem = None if self.locked else self.problem
        if isinstance(row, Unreadable):
            version = book[name].version if book is not None and name in book else 0
            return Credential(name=name, version=version, updated_ms=0, problem=problem)
        return Credential(
            name=name,
            version=_sane(row.version),
            updated_ms=_sane(row.updated_ms),
            problem=problem,
        )

    def _judge(
        self, name: str, row: Row | Unreadable | None, book: Book | None
    ) -> tuple[Secret, None] | tuple[None, str]:
        """The value that counts, or why there is none."""
        assert self._row_key is not None
        if row is None:
            return None, GONE
        if isinstance(row, Unreadable):
            return None, UNREADABLE
        if not (0 < row.version < _VERSION_MAX and 0 <= row.updated_ms < _VERSION_MAX):
            return None, TAMPERED
        try:
            value = seal.unseal(
                self._row_key, row.sealed, self._place(name, row.version, row.updated_ms)
            )
        except seal.Unsealable:
            return None, TAMPERED
        if book is None:
            return None, BOOK
        if name not in book:
            return None, REMOVED
        if book[name] != (row.version, seal.nonce_of(row.sealed)):
            return None, OLDER
        return value, None

    def _place(self, name: str, version: int, updated_ms: int) -> bytes:
        return seal.context(b"credential", self.custody.store, name.encode(), version, updated_ms)

    def _book(self, untrusted: bytes) -> Book | None:
        """What was written last; None when that cannot be told."""
        assert self._book_key is not None
        if self._read is not None and self._read[0] == untrusted:
            return self._read[1]  # the very bytes that opened
        try:
            opened = seal.unseal(
                self._book_key, untrusted, seal.context(b"book", self.custody.store)
            )
        except seal.Unsealable:
            return None
        book = msgspec.msgpack.decode(opened.reveal(), type=Book)
        self._read = (untrusted, book)
        return book

    def _close(self, book: Book) -> bytes:
        assert self._book_key is not None
        return seal_book(self._book_key, self.custody.store, book)

    def _closed(self, what: str) -> Refusal:
        if self.locked:
            return Refusal(Reason.STORE_LOCKED, f"{what}: the store is locked; {self.problem}")
        return Refusal(Reason.TAMPERED, f"{what}: {self.problem}")


def seal_book(key: Secret, store: bytes, book: Book) -> bytes:
    return seal.seal(key, msgspec.msgpack.encode(book), seal.context(b"book", store))


def custody(
    *,
    store: bytes,
    protection: str,
    name: str,
    key: Secret,
    data_key: Secret,
    salt: bytes,
    blob: bytes,
) -> Custody:
    """A custody file's content, the data key wrapped by `key` in it."""
    argon = protection == "passphrase"
    unwrapped = Custody(
        store=store,
        protection=protection,
        key=name,
        salt=salt if argon else b"",
        passes=seal.KDF_PASSES if argon else 0,
        memory=seal.KDF_MEMORY if argon else 0,
        blob=blob,
        wrapped=b"",
    )
    wrapped = seal.seal(key, data_key.reveal(), _wrapping(unwrapped))
    return Custody(**{**unwrapped.__dict__, "wrapped": wrapped})


@dataclass(frozen=True)
class Birth:
    """What a store is made of at its first start."""

    custody: Custody
    key: Secret  # for the key file
    fingerprint: bytes
    book: bytes


def birth() -> Birth:
    """A new store under a new key file: the protection that needs nobody."""
    key, data_key, store = seal.new_key(), seal.new_key(), seal.new_id()
    return Birth(
        custody=custody(
            store=store,
            protection="key-file",
            name=seal.new_id().hex(),
            key=key,
            data_key=data_key,
            salt=b"",
            blob=b"",
        ),
        key=key,
        fingerprint=seal.fingerprint(data_key),
        book=seal_book(seal.subkey(data_key, b"book"), store, {}),
    )


def _wrapping(custody: Custody) -> bytes:
    return seal.context(
        b"data key",
        custody.store,
        custody.protection.encode(),
        custody.key.encode(),
        custody.salt,
        custody.passes,
        custody.memory,
        custody.blob,
    )


def _name(untrusted: str) -> str:
    try:
        return rules.name(untrusted)
    except ValueError as error:
        # It is not shown: what stands in the place of a name by mistake is often the value.
        raise Refusal(Reason.BAD_REQUEST, f"a credential's name must be {error}") from None


def _unknown(name: str) -> Refusal:
    return Refusal(Reason.NOT_FOUND, f"no credential is named {name}")


def _sane(untrusted: int) -> int:
    return untrusted if 0 <= untrusted < _VERSION_MAX else 0
