"""How a table of the config file is declared, and the one reader of such declarations.

A `Table` lists its keys; each key has a reader for its value, a default or none, and a line
for docs/cli.md, which is checked against these declarations. Whatever is not listed is
refused by name, at any depth, so a misspelt key can never be believed to be in force.

A reader takes what TOML gave and returns the value, or raises `ValueError` with the rule
(to follow "must be", never with the value), or `values.Said` with a sentence.

A `private` table is one that somebody may paste a secret into. No refusal shows a value that
stands in it, at any depth, whatever is wrong: it names key, table and rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, NoReturn

from agent_box.config import values
from agent_box.config.errors import ConfigError

Where = tuple[str | int, ...]  # names of tables; an integer is the position in an array, from 0

_REQUIRED: Final = object()


class Reader(NamedTuple):
    """`kind` names what is accepted, for people: ``integer 1 to 64``. A `private` value is
    never shown in a refusal: somebody may have pasted a secret where its name belongs."""

    kind: str
    read: Callable[[Any], Any]
    private: bool = False


class Key(NamedTuple):
    reader: Reader | Table | Tables | Named
    doc: str
    default: Any = _REQUIRED

    @property
    def required(self) -> bool:
        return self.default is _REQUIRED


class Table(NamedTuple):
    """One table: its keys by name. `private`: see above; it holds for what is nested, too."""

    keys: Mapping[str, Key]
    private: bool = False


class Tables(NamedTuple):
    """An array of tables, each of the same shape."""

    of: Table


class Named(NamedTuple):
    """A table of tables whose names the operator chooses."""

    of: Table
    what: str  # what one of them is called, e.g. "profile"


def read(
    table: Table, untrusted: Any, source: str, where: Where = (), *, private: bool = False
) -> dict[str, Any]:
    """The values of a table, complete: of each declared key, and of no other.

    Nested tables come as dicts, arrays of tables as tuples of dicts.

    Args:
        private: the table is nested in a private one.

    Raises:
        ConfigError: naming the key and its table.
    """
    private = private or table.private
    if not isinstance(untrusted, dict):
        named, last = where[:-1], where[-1]
        if isinstance(last, int):  # one of an array of tables
            named, last = named[:-1], f"{named[-1]} number {last + 1}"
        refuse(source, named, last, "must be a table", _unless(private, untrusted))
    for key in untrusted:
        if key not in table.keys:
            raise ConfigError(source, f"unknown key {_quoted(key)} {_in(where)}{_near(key, table)}")
    result = {}
    for name, key in table.keys.items():
        if name in untrusted:
            result[name] = _value(key.reader, untrusted[name], source, (*where, name), private)
        elif key.required:
            raise ConfigError(source, f"{name} is missing {_in(where)}")
        else:
            result[name] = key.default
    return result


def refuse(source: str, where: Where, key: str, rule: str, value: Any = _REQUIRED) -> NoReturn:
    """Raises the refusal of one key's value. `value` is shown when it is short and plain."""
    shown = "" if value is _REQUIRED else f", not {_shown(value)}"
    raise ConfigError(source, f"{key} {_in(where)} {rule}{shown}")


def _unless(private: bool, untrusted: Any) -> Any:
    """What `refuse` may show."""
    return _REQUIRED if private else untrusted


def _value(
    reader: Reader | Table | Tables | Named,
    untrusted: Any,
    source: str,
    where: Where,
    private: bool,
) -> Any:
    if isinstance(reader, Table):
        return read(reader, untrusted, source, where, private=private)
    key = str(where[-1])
    private = private or (reader.private if isinstance(reader, Reader) else reader.of.private)
    if isinstance(reader, Named):
        if not isinstance(untrusted, dict):
            refuse(source, where[:-1], key, "must be a table", _unless(private, untrusted))
        for name in untrusted:
            try:
                values.name(name)
            except ValueError as rule:
                raise ConfigError(
                    source, f"{_quoted(name)} {_in(where)}: the name of a {reader.what} is {rule}"
                ) from None
        return {
            n: read(reader.of, v, source, (*where, n), private=private)
            for n, v in untrusted.items()
        }
    if isinstance(reader, Tables):
        if not isinstance(untrusted, list):
            shown = _unless(private, untrusted)
            refuse(source, where[:-1], key, "must be an array of tables", shown)
        return tuple(
            read(reader.of, v, source, (*where, i), private=private)
            for i, v in enumerate(untrusted)
        )
    try:
        return reader.read(untrusted)
    except values.Said as said:
        sentence = said.blind if private else str(said)
        if sentence is None:
            refuse(source, where[:-1], key, f"must be {reader.kind}")
        raise ConfigError(source, f"{key} {_in(where[:-1])}: {sentence}") from None
    except ValueError as rule:
        refuse(source, where[:-1], key, f"must be {rule}", _unless(private, untrusted))


# --------------------------------------------------------------------- readers


def text(rule: Callable[[str], Any], kind: str) -> Reader:
    """A string that `rule` reads further."""

    def read_text(untrusted: Any) -> Any:
        if not isinstance(untrusted, str):
            raise ValueError("a string")
        return rule(untrusted)

    return Reader(kind, read_text)


def integer(least: int, most: int) -> Reader:
    rule = f"{least}" if least == most else f"an integer from {least} to {most}"

    def read_integer(untrusted: Any) -> int:
        whole = isinstance(untrusted, int) and not isinstance(untrusted, bool)
        if not whole or not least <= untrusted <= most:
            raise ValueError(rule)
        return int(untrusted)

    return Reader(rule.removeprefix("an "), read_integer)


def _read_boolean(untrusted: Any) -> bool:
    if not isinstance(untrusted, bool):
        raise ValueError("true or false")
    return untrusted


BOOLEAN: Final = Reader("true or false", _read_boolean)


def choice(*words: str) -> Reader:
    def read_choice(untrusted: str) -> str:
        if untrusted not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return untrusted

    return text(read_choice, ", ".join(f'"{word}"' for word in words))


def several(item: Reader, kind: str, *, least: int = 0) -> Reader:
    """An array without repetition, as a tuple."""

    def read_several(untrusted: Any) -> tuple[Any, ...]:
        if not isinstance(untrusted, list):
            raise ValueError(f"an array of {kind}")
        if len(untrusted) < least:
            raise ValueError(f"an array of at least {least} {kind}")
        found = []
        for each in untrusted:
            try:
                value = item.read(each)
            except values.Said:
                raise
            except ValueError as rule:
                blind = f"each must be {rule}"
                raise values.Said(f"{blind}, not {_shown(each)}", blind=blind) from None
            if value in found:
                raise values.Said(f"{_shown(each)} stands twice", blind="one stands twice")
            found.append(value)
        return tuple(found)

    return Reader(f"array of {kind}", read_several)


# ----------------------------------------------------------------- for people


def _in(where: Where) -> str:
    """``in [profiles.rust]``, ``in [[policies.dev.allow]] number 2``, ``at the top level``."""
    if not where:
        return "at the top level"
    number = ""
    names = list(where)
    if isinstance(names[-1], int):
        number = f" number {names.pop() + 1}"  # type: ignore[operator]
    path = ".".join(_quoted(str(n), bare=True) for n in names)
    return f"in [[{path}]]{number}" if number else f"in [{path}]"


def _near(key: str, table: Table) -> str:
    from difflib import get_close_matches

    close = get_close_matches(key[:64], list(table.keys), n=1)
    return f"; did you mean {_quoted(close[0])}?" if close else ""


def _quoted(text: str, *, bare: bool = False) -> str:
    """A key as TOML would write it, cut when it is long."""
    short = text if len(text) <= 64 else text[:61] + "..."
    if bare and short.isascii() and short.replace("-", "").replace("_", "").isalnum():
        return short
    escaped = short.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'


def _shown(value: Any) -> str:
    """A value for a refusal. A long string is not shown: it may be a secret in a wrong place."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else "such a large integer"
    if isinstance(value, str):
        return _quoted(value) if len(value) <= 40 else "what stands there"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, float):
        return str(value)
    return "a date or a time"
