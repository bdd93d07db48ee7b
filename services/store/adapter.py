"""The store as it runs: the core, its database, its key directory and the clock.

A store that cannot be opened still answers: every call that needs it is refused with the
reason, and `hello` carries it, so an operator reads what is wrong instead of "unavailable".
Nothing that is missing is made anew, except at the very first start, when there is nothing.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from agent_box.bus import durable
from agent_box.bus.durable import Damaged
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.outcomes import Outcomes, Prior
from agent_box.bus.schema import Empty
from agent_box.process.secret import Secret
from agent_box.store import core as deciding
from agent_box.store import database as stored
from agent_box.store import rules, seal
from agent_box.store.contract import (
    Credentials,
    Name,
    Protect,
    Put,
    Reveal,
    Revealed,
    SealKey,
    Stored,
    Unlock,
)
from agent_box.store.core import Core
from agent_box.store.custody import HANDED, Custody
from agent_box.store.database import Database
from agent_box.store.files import FileRefused, KeyDirectory, sync_directory
from agent_box.store.handing import Handed

DATABASE: Final = "credentials.db"
_NOUN: Final = {"passphrase": "passphrase", "keyring": "key", "systemd-creds": "key"}


class Log(Protocol):
    def info(self, event: str, **fields: object) -> None: ...
    def warning(self, event: str, **fields: object) -> None: ...
    def error(self, event: str, *, error: BaseException | None = None, **fields: object) -> str: ...


def unix_ms() -> int:
    return time.time_ns() // 1_000_000


class Store:
    """One store of credentials.

    Args:
        data: its directory for the database.
        keys: its key directory.
        handed: gives what the launcher fetched outside the wall; asked only when custody
            says that the key comes from there.
        outcomes: makes the record of calls that must not be repeated, in the same database
            as their effects, with its tables when they are missing.
        now_ms: Unix time in milliseconds.

    Attributes:
        problem: why it cannot serve, or serves in part; None when all is well.
        database: None when it cannot be opened.
    """

    def __init__(
        self,
        *,
        data: Path,
        keys: Path,
        handed: Callable[[], Handed],
        log: Log,
        outcomes: Callable[[sqlite3.Connection], Outcomes],
        now_ms: Callable[[], int] = unix_ms,
    ) -> None:
        self._path: Final = data / DATABASE
        self._new_path: Final = data / f"{DATABASE}.new"
        self._keys: Final = KeyDirectory(keys)
        self._log: Final = log
        self._make_outcomes: Final = outcomes
        self._now_ms: Final = now_ms
        self._one_derivation: Final = asyncio.Lock()  # each takes 256 MiB
        self._core: Core | None = None
        self._broken: str | None = None
        self.database: Database | None = None
        self._outcomes: Outcomes | None = None
        try:
            self._open(handed)
        except (Damaged, FileRefused) as error:
            self._broken = str(error)
        except OSError as error:
            self._broken = f"the store cannot be opened: {error.filename or keys}: {error.strerror}"
        except sqlite3.Error as error:
            self._broken = f"the store cannot be made in {data}: {durable.name_of(error)}"
        if self.problem is not None:
            log.warning("the store is not open", problem=self.problem)

    @property
    def problem(self) -> str | None:
        if self._broken is not None:
            return self._broken
        if self._core is not None and self._core.problem is not None:
            return f"locked: {self._core.problem}" if self._core.locked else self._core.problem
        return self.database.damage if self.database is not None else None

    def close(self) -> None:
        if self.database is not None:
            self.database.close()

    # ---------------------------------------------------- what became of calls: bus.Outcomes

    def lookup(self, caller: str, request_id: bytes) -> Prior | None:
        try:
            return self._recorded().lookup(caller, request_id)
        except sqlite3.Error as error:
            raise self._serving()[1].refusal(error) from error

    def record(self, caller: str, request_id: bytes, method: str, state: str, body: bytes) -> None:
        database = self._serving()[1]
        if database.connection.in_transaction:
            self._recorded().record(caller, request_id, method, state, body)
            return
        with database.transaction():
            self._recorded().record(caller, request_id, method, state, body)

    # --------------------------------------------------------------------------- verbs

    def seal_key(self) -> SealKey:
        return self._serving()[0].seal_key()

    def list(self) -> Credentials:
        core, database = self._serving()
        listed = core.list(database.rows(), database.book())
        if listed.problem is None and database.damage is not None:
            return Credentials(
                credentials=listed.credentials,
                protection=listed.protection,
                locked=listed.locked,
                problem=database.damage,
            )
        return listed

    def put(self, untrusted: Put) -> Stored:
        core, database = self._serving()
        with database.transaction():
            write = core.put(
                untrusted,
                untrusted_book=database.book(),
                old=database.row(untrusted.name),
                now_ms=self._now_ms(),
            )
            database.put(write.row)
            database.put_book(write.book)
        self._log.info("stored", credential=write.row.name, version=write.reply.version)
        if write.note is not None:
            self._log.warning("began a new table of versions", problem=write.note)
        return write.reply

    def remove(self, untrusted: Name, within: Callable[[Empty], None]) -> Empty:
        """Removes one credential.

        Args:
            within: records the reply, in the transaction that has the effect.
        """
        core, database = self._serving()
        reply = Empty()
        with database.transaction():
            name, book = core.remove(
                untrusted.name, untrusted_book=database.book(), old=database.row(untrusted.name)
            )
            database.remove(name)
            database.put_book(book)
            within(reply)
        self._log.info("removed", credential=name)
        return reply

    def reveal(self, untrusted: Reveal) -> Revealed:
        core, database = self._serving()
        return core.reveal(
            untrusted, untrusted_book=database.book(), row=database.row(untrusted.name)
        )

    async def unlock(self, untrusted: Unlock) -> Empty:
        """Opens a store whose key is not kept where it can read it by itself."""
        core, _ = self._serving()
        secret = core.received(untrusted.secret)
        if core.open:
            return Empty()
        if not core.locked:
            raise Refusal(Reason.WRONG_STATE, f"no key or passphrase helps: {core.problem}")
        if core.custody.protection == "passphrase":
            _passphrase(secret)
            secret = await self._derive(
                secret, core.custody.salt, core.custody.passes, core.custody.memory
            )
        self._unwrap(core, secret, f"that is not the {_NOUN[core.custody.protection]} of the store")
        return Empty()

    async def protect(self, untrusted: Protect) -> Empty:
        """Changes how the master key is kept. The old way or the new one opens the store."""
        core, _ = self._serving()
        salt = seal.new_salt()
        key = await self._new_key(core, untrusted, salt)
        custody = core.rewrap(untrusted, key, salt)
        if custody is core.custody:
            return Empty()
        try:
            if custody.protection == "key-file":
                self._keys.begin_key(custody.key, key.reveal())
            self._keys.replace(custody)
            if custody.protection == "key-file":
                self._keys.finish_key(custody.key)
        except OSError as error:
            raise self._not_changed(core, error) from error
        core.adopt(custody)
        self._log.info("the master key is kept another way", protection=custody.protection)
        self._tidy(custody)
        return Empty()

    # --------------------------------------------------------------------------- below

    def _serving(self) -> tuple[Core, Database]:
        if self._core is None or self.database is None:
            raise Refusal(Reason.TAMPERED, f"the store does not serve: {self._broken}")
        return self._core, self.database

    def _recorded(self) -> Outcomes:
        self._serving()
        assert self._outcomes is not None
        return self._outcomes

    def _open(self, handed: Callable[[], Handed]) -> None:
        custody = self._keys.custody()
        if custody is None:
            custody = self._begin()
        elif self._new_path.exists() and not self._path.exists():
            self._name_database()  # the first start was cut off before its last step
        self.database = Database(self._path)
        try:
            self._outcomes = self._make_outcomes(self.database.connection)
        except sqlite3.Error:
            raise Damaged(f"the database {self._path} is damaged: no record of calls") from None
        if self.database.id != custody.store:
            raise Damaged(
                f"the database {self._path} belongs to another store than {self._keys.path}"
            )
        self._core = Core(custody, self.database.fingerprint)
        self._find_key(self._core, handed)
        if self._core.open:
            self._tidy(custody)

    def _begin(self) -> Custody:
        """The first start: nothing is there, so everything is made, in an order that a
        crash cannot turn into a store that lost its key."""
        if self._path.exists():
            raise FileRefused(
                f"{self._keys.custody_path} is missing, and without it nothing opens {self._path}"
            )
        if self._keys.has_keys():
            raise Damaged(
                f"the database {self._path} and {self._keys.custody_path} are missing, but the "
                f"key of a store is there"
            )
        birth = deciding.birth()
        self._keys.begin_key(birth.custody.key, birth.key.reveal())
        stored.create(self._new_path, birth, self._make_outcomes)
        self._keys.replace(birth.custody)
        self._name_database()
        self._log.info("made a new store")
        return birth.custody

    def _name_database(self) -> None:
        for end in ("-wal", "-shm", "-journal"):
            # left by a database that was taken away; SQLite would play it back into this one
            self._path.with_name(self._path.name + end).unlink(missing_ok=True)
        os.rename(self._new_path, self._path)
        sync_directory(self._path.parent)

    def _find_key(self, core: Core, handed: Callable[[], Handed]) -> None:
        custody = core.custody
        if custody.protection == "passphrase":
            core.lock("run `agent-box secret unlock` and give the passphrase")
        elif custody.protection in HANDED:
            given = handed()
            if given.key is None:
                core.lock(f"{given.problem}; then run `agent-box secret unlock`")
                return
            try:
                core.unwrap(given.key)
            except seal.Unsealable:
                core.lock(f"{custody.protection} gave a key that does not open the store")
        else:
            try:
                core.unwrap(Secret(self._keys.key(custody.key)))
            except FileRefused as error:
                core.fail(str(error))
            except seal.Unsealable:
                core.fail(deciding.WRONG_KEY)

    async def _new_key(self, core: Core, untrusted: Protect, salt: bytes) -> Secret:
        if (untrusted.protection == "key-file") != (untrusted.secret is None):
            raise Refusal(Reason.BAD_REQUEST, "a secret belongs to every protection but key-file")
        if untrusted.secret is None:
            return seal.new_key()
        secret = core.received(untrusted.secret)
        if untrusted.protection == "passphrase":
            _passphrase(secret)
            return await self._derive(secret, salt, seal.KDF_PASSES, seal.KDF_MEMORY)
        if len(secret.reveal()) != seal.KEY_BYTES:
            raise Refusal(Reason.BAD_REQUEST, f"a key has {seal.KEY_BYTES} bytes")
        return secret

    async def _derive(self, passphrase: Secret, salt: bytes, passes: int, memory: int) -> Secret:
        if passes not in seal.KDF_PASSES_RANGE or memory not in seal.KDF_MEMORY_RANGE:
            raise Refusal(
                Reason.TAMPERED, f"{self._keys.custody_path} asks for an impossible derivation"
            )
        async with self._one_derivation:
            try:
                return await asyncio.to_thread(
                    seal.key_of_passphrase, passphrase, salt, passes, memory
                )
            except MemoryError as error:
                raise Refusal(Reason.EXHAUSTED, str(error)) from None

    def _unwrap(self, core: Core, key: Secret, otherwise: str) -> None:
        if core.open:
            return  # by another call, while this one derived its key
        try:
            opened = core.unwrap(key)
        except seal.Unsealable:
            raise Refusal(Reason.DENIED, otherwise) from None
        if not opened:
            raise Refusal(Reason.TAMPERED, f"the store stays closed: {core.problem}")
        self._log.info("unlocked")
        self._tidy(core.custody)

    def _not_changed(self, core: Core, error: OSError) -> Refusal:
        """Which custody is on the disk after a failed write, and the answer that says so."""
        try:
            now = self._keys.custody()
        except FileRefused as damage:
            return Refusal(Reason.TAMPERED, str(damage))
        if now is not None and now.key != core.custody.key:
            core.adopt(now)  # the rename happened; only its sync, or the step after, failed
            return Refusal(
                Reason.EXHAUSTED,
                f"the protection was changed to {now.protection}, but {self._keys.path} could "
                f"not be finished ({error.strerror}); it is finished at the next start",
            )
        return durable.os_refusal(self._keys.path, error)

    def _tidy(self, custody: Custody) -> None:
        try:
            self._keys.tidy(custody)
        except OSError as error:
            # The key that lies there opens nothing any more, but it should not lie there.
            self._log.error("a key file of an earlier protection remains", error=error)


def _passphrase(secret: Secret) -> None:
    try:
        rules.passphrase(secret.reveal())
    except ValueError as error:
        raise Refusal(Reason.BAD_REQUEST, str(error)) from None
