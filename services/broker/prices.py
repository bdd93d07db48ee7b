"""What tokens cost, by a table that the operator keeps: prices.toml beside config.toml.

Prices change and differ by contract, so none is built in. Without the file there are no
costs, and a binding with `max_cost` is refused. Money is counted in whole millionths of the
table's currency, rounded up for each reply.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent_box.broker.usage import Tokens
from agent_box.config.errors import ConfigError
from agent_box.config.model import METERED
from agent_box.config.tables import Key, Reader, Table, Tables, choice, integer, read, text

FILE: Final = "prices.toml"
FILE_MAX: Final = 1 << 20  # bytes
MILLION: Final = 10**6
_PRICE_MAX: Final = 10**6  # of a currency, for a million tokens


@dataclass(frozen=True)
class Price:
    """One row: millionths of the currency for a million tokens of each sort."""

    kind: str
    model: str  # a name, or the beginning of names with a `*` after it
    input: int
    output: int
    cache_read: int
    cache_write: int

    def of(self, tokens: Tokens) -> int:
        """What these cost, in millionths, rounded up."""
        whole = (
            tokens.input * self.input
            + tokens.output * self.output
            + tokens.cache_read * self.cache_read
            + tokens.cache_write * self.cache_write
        )
        return -(-whole // MILLION)


@dataclass(frozen=True)
class Prices:
    currency: str  # such as USD; empty when there is no table
    rows: tuple[Price, ...]

    def knows(self, kind: str) -> bool:
        """Whether a reply of this kind can be given a cost at all."""
        return any(row.kind == kind for row in self.rows)

    def cost(self, kind: str, tokens: Tokens) -> int | None:
        """What a reply cost, in millionths; None when the kind has no row.

        The longest match of the model's name governs, an exact one first. A model that no row
        is for costs what the kind's dearest one does, so that no budget is escaped by a name.
        """
        rows = [row for row in self.rows if row.kind == kind]
        if not rows:
            return None
        fits = [row for row in rows if _fits(row.model, tokens.model)]
        if fits:
            best = max(fits, key=lambda row: (not row.model.endswith("*"), len(row.model)))
            return best.of(tokens)
        return max(row.of(tokens) for row in rows)


def _fits(pattern: str, model: str) -> bool:
    if pattern.endswith("*"):
        return model.startswith(pattern[:-1])
    return model == pattern


def _price(untrusted: Any) -> int:
    rule = f"a number from 0 to {_PRICE_MAX}, for a million tokens"
    if isinstance(untrusted, bool) or not isinstance(untrusted, int | float):
        raise ValueError(rule)
    if not 0 <= untrusted <= _PRICE_MAX:
        raise ValueError(rule)
    return round(untrusted * MILLION)


def _model(untrusted: str) -> str:
    name = untrusted.removesuffix("*")
    if not name.isascii() or not name.isprintable() or "*" in name or len(name) > 128:
        raise ValueError("a model's name, or the beginning of names with a * after it")
    return untrusted


def _currency(untrusted: str) -> str:
    if not (untrusted.isascii() and untrusted.isalpha() and untrusted.isupper()):
        raise ValueError("a currency in capitals, such as USD")
    return untrusted


_NUMBER: Final = Reader("number", _price)
_ROW: Final = Table(
    {
        "kind": Key(choice(*METERED), "of the binding"),
        "model": Key(text(_model, "name"), "as replies name it; a * at its end for all such"),
        "input": Key(_NUMBER, "for a million tokens that were not cached"),
        "output": Key(_NUMBER, "for a million tokens, thought included"),
        "cache_read": Key(_NUMBER, "for a million; left out: as input", None),
        "cache_write": Key(_NUMBER, "for a million; left out: as input", None),
    }
)
_FILE: Final = Table(
    {
        "version": Key(integer(1, 1), "of this format"),
        "currency": Key(text(_currency, "currency"), "of all numbers"),
        "models": Key(Tables(_ROW), "the rows", ()),
    }
)
NONE: Final = Prices("", ())


def parse(untrusted: bytes, source: str) -> Prices:
    """Reads a table of prices.

    Raises:
        ConfigError: naming the file and the key.
    """
    try:
        document = tomllib.loads(untrusted.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(source, f"not TOML: {str(error)[:200]}") from None
    got = read(_FILE, document, source)
    return Prices(got["currency"], tuple(_rows(got["models"], source)))


def _rows(tables: Iterable[dict[str, Any]], source: str) -> Iterable[Price]:
    seen = set()
    for i, table in enumerate(tables):
        name = (table["kind"], table["model"])
        if name in seen:
            raise ConfigError(source, f"model in [[models]] number {i + 1} stands twice")
        seen.add(name)
        for sort in ("cache_read", "cache_write"):
            if table[sort] is None:
                table[sort] = table["input"]
        yield Price(**table)


def load(config: Path | None) -> Prices:
    """The prices beside a config file; none when there is no such file, or no config.

    Raises:
        ConfigError: it is there and cannot be used.
    """
    if config is None:
        return NONE
    path = config.resolve().parent / FILE
    try:
        with path.open("rb") as file:
            untrusted = file.read(FILE_MAX + 1)
    except FileNotFoundError:
        return NONE
    except OSError as error:
        raise ConfigError(str(path), f"it cannot be read: {error.strerror}") from None
    if len(untrusted) > FILE_MAX:
        raise ConfigError(str(path), f"it is longer than {FILE_MAX} bytes")
    return parse(untrusted, str(path))
