"""What was used, and which boots have endpoints: the broker's own database.

Counters are written as things happen: a request before it is forwarded, bytes and tokens
before the reply's last byte goes to the guest. So after a kill at any point nothing that a
guest saw completed is missing. Commits reach the kernel and not the disk each time
(``synchronous = NORMAL``): a loss of power may cost the last moments, a kill costs nothing.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from agent_box.bus.durable import Durable, create

APPLICATION: Final = 0x61626272  # "abbr"
VERSION: Final = 1
_PAGE: Final = 1024  # bytes: two small commits for each request write and check a page each
DAY_MS: Final = 86_400_000

_SCHEMA: Final = """
CREATE TABLE boot (
  instance TEXT PRIMARY KEY,
  number INTEGER NOT NULL,
  body BLOB NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE named (
  instance TEXT PRIMARY KEY,
  name TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE used (
  instance TEXT NOT NULL,
  binding TEXT NOT NULL,
  day INTEGER NOT NULL,
  requests INTEGER NOT NULL,
  refused INTEGER NOT NULL,
  bytes_up INTEGER NOT NULL,
  bytes_down INTEGER NOT NULL,
  tokens_in INTEGER NOT NULL,
  tokens_out INTEGER NOT NULL,
  cost INTEGER NOT NULL,
  unpriced INTEGER NOT NULL,
  PRIMARY KEY (instance, binding, day)
) STRICT, WITHOUT ROWID;
"""


@dataclass(kw_only=True)
class Count:
    """What is added up."""

    requests: int = 0
    refused: int = 0
    bytes_up: int = 0  # of bodies, guest to upstream
    bytes_down: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    cost: int = 0  # micro-units of the price table's currency
    unpriced: int = 0  # tokens of models that the price table does not know

    @property
    def empty(self) -> bool:
        return not any(vars(self).values())

    def add(self, other: Count) -> None:
        mine = vars(self)
        for name, value in vars(other).items():
            if value:
                mine[name] += value


@dataclass(frozen=True, kw_only=True)
class Row:
    """One instance's use of one binding on one day (UTC, days since 1970)."""

    instance: str
    name: str
    binding: str
    day: int
    count: Count


@dataclass(frozen=True, kw_only=True)
class Boot:
    """A boot whose endpoints are open. `body` is what `adapter` needs to open them again."""

    instance: str
    number: int
    body: bytes


_NAMES: Final = tuple(field.name for field in fields(Count))
_ADD: Final = (
    f"INSERT INTO used (instance, binding, day, {', '.join(_NAMES)}) "
    f"VALUES (?, ?, ?, {', '.join('?' for _ in _NAMES)}) ON CONFLICT DO UPDATE SET "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in _NAMES)
)
_SUMS: Final = ", ".join(f"coalesce(sum({name}), 0)" for name in _NAMES)


class Ledger:
    """The open database.

    Raises:
        bus.durable.Damaged, sqlite3.Error, OSError: it cannot be opened or made.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            create(
                path,
                application_id=APPLICATION,
                version=VERSION,
                schema=_SCHEMA,
                fill=lambda connection: None,
                page_bytes=_PAGE,
            )
        self._base: Final = Durable(path, application_id=APPLICATION, version=VERSION)
        self._db: Final = self._base.connection
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._totals: dict[tuple[str, str], Count] = {}

    @property
    def damage(self) -> str | None:
        return self._base.damage

    def close(self) -> None:
        self._base.close()

    # ------------------------------------------------------------------ usage

    def add(self, instance: str, binding: str, day: int, count: Count) -> None:
        """Raises:
        Refusal: it could not be written. Then it is not counted, in memory neither.
        """
        total = self.total(instance, binding)
        try:
            self._db.execute(
                _ADD,
                (instance, binding, day, *vars(count).values()),  # in the order of _NAMES
            )
        except sqlite3.Error as error:
            raise self._base.refusal(error) from error
        total.add(count)

    def total(self, instance: str, binding: str) -> Count:
        """Of an instance's whole life. Not to be changed."""
        key = (instance, binding)
        if key not in self._totals:
            row = self._db.execute(
                f"SELECT {_SUMS} FROM used WHERE instance = ? AND binding = ?", key
            ).fetchone()
            self._totals[key] = _count(row)
        return self._totals[key]

    def rows(self, instance: str | None, since_day: int) -> list[Row]:
        """By instance, binding and day; of all instances for None."""
        found = self._db.execute(
            f"SELECT used.instance, coalesce(named.name, ''), binding, day, {', '.join(_NAMES)} "
            "FROM used LEFT JOIN named ON named.instance = used.instance "
            "WHERE day >= ? AND (? IS NULL OR used.instance = ?) "
            "ORDER BY 2, used.instance, binding, day",
            (since_day, instance, instance),
        )
        return [
            Row(instance=r[0], name=r[1], binding=r[2], day=r[3], count=_count(r[4:]))
            for r in found
        ]

    # ------------------------------------------------------------------ boots

    def boots(self) -> list[Boot]:
        found = self._db.execute("SELECT instance, number, body FROM boot")
        return [Boot(instance=r[0], number=r[1], body=r[2]) for r in found]

    def put_boot(self, boot: Boot, name: str) -> None:
        """Raises `Refusal` when it cannot be written."""
        with self._base.transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO boot VALUES (?, ?, ?)",
                (boot.instance, boot.number, boot.body),
            )
            self._db.execute("INSERT OR REPLACE INTO named VALUES (?, ?)", (boot.instance, name))

    def remove_boot(self, instance: str) -> None:
        with self._base.transaction():
            self._db.execute("DELETE FROM boot WHERE instance = ?", (instance,))


def _count(values: tuple[int, ...]) -> Count:
    return Count(**dict(zip(_NAMES, values, strict=True)))
