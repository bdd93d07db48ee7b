"""The parts of docs/cli.md that are made from the code: the verbs, the codes, the config keys.

`deploy/docs.py` fills them in between markers, ``<!-- made: NAME -->`` and ``<!-- end -->``;
a test fails while the page is stale.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from agent_box.bus.errors import MEANING
from agent_box.cli import demo, help
from agent_box.cli.render import size_text
from agent_box.cli.verbs import VERBS, Arg, Verb
from agent_box.config.shape import FILE
from agent_box.config.tables import Key, Named, Reader, Table, Tables

_MARKED: Final = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(page: str) -> str:
    """The page with every marked part made anew. KeyError for a marker that is not known."""
    return _MARKED.sub(lambda m: m[1] + "\n" + "\n".join(_PARTS[m[2]]()) + "\n" + m[3], page)


# ------------------------------------------------------------------------------ verbs


def _verbs() -> Iterator[str]:
    for section in dict.fromkeys(verb.section for verb in VERBS):
        yield f"### {section}"
        yield ""
        yield "| verb | arguments | what it does |"
        yield "| --- | --- | --- |"
        for verb in VERBS:
            if verb.section == section:
                yield _row(f"`{verb.name}`", _arguments(verb), _does(verb))
        yield ""


def _arguments(verb: Verb) -> str:
    words = [word for word in help.synopsis(verb) if word != "[--json]"]
    return " ".join(f"`{word}`" for word in words) or "none"


def _does(verb: Verb) -> str:
    text = f"{verb.summary} {verb.detail}".strip()
    return text if verb.body else f"{text} *Not built: `{verb.entry}`.*"


def _arguments_in_full() -> Iterator[str]:
    """Each flag once: verbs that share one say the same of it or are listed apart."""
    told: dict[tuple[str, str], list[str]] = {}
    for verb in VERBS:
        for arg in verb.args:
            if arg.flag:
                told.setdefault((f"{arg.flag} {arg.metavar}".strip(), _told(arg)), []).append(
                    verb.name
                )
    yield "| flag | of | meaning |"
    yield "| --- | --- | --- |"
    for (flag, text), names in sorted(told.items()):
        yield _row(f"`{flag}`", ", ".join(names), text)
    yield ""


def _told(arg: Arg) -> str:
    return arg.help if arg.default is None else f"{arg.help}; else `{arg.default}`"


def _kinds() -> Iterator[str]:
    yield "| kind | exit |"
    yield "| --- | --- |"
    for reason, meaning in sorted(MEANING.items(), key=lambda item: item[1].exit):
        yield _row(f"`{reason}`", str(meaning.exit))
    yield ""


# ----------------------------------------------------------------------------- config


def _example() -> Iterator[str]:
    yield "```toml"
    yield from demo.EXAMPLE.rstrip("\n").split("\n")
    yield "```"
    yield ""


def _keys() -> Iterator[str]:
    yield from _table(FILE, "The top level", "")


def _table(table: Table, title: str, path: str) -> Iterator[str]:
    yield f"### {title}"
    yield ""
    yield "| key | value | when left out | meaning |"
    yield "| --- | --- | --- | --- |"
    for name, key in table.keys.items():
        yield _row(f"`{name}`", _kind(key), _default(key), key.doc)
    yield ""
    for name, key in table.keys.items():
        here = f"{path}.{name}" if path else name
        if isinstance(key.reader, Table):
            yield from _table(key.reader, f"`[{here}]`", here)
        elif isinstance(key.reader, Named):
            yield from _table(key.reader.of, f"`[{here}.NAME]`", f"{here}.NAME")
        elif isinstance(key.reader, Tables):
            yield from _table(key.reader.of, f"`[[{here}]]`", here)


def _kind(key: Key) -> str:
    if isinstance(key.reader, Reader):
        return key.reader.kind
    if isinstance(key.reader, Named):
        return f"a table per {key.reader.what}"
    return "array of tables" if isinstance(key.reader, Tables) else "table"


def _default(key: Key) -> str:
    if key.required:
        return "refused"
    if key.default in (None, (), {}):
        return "none"
    if isinstance(key.default, bool):
        return f"`{'true' if key.default else 'false'}`"
    if isinstance(key.default, int) and key.default >= 1 << 20:
        return f"`{size_text(key.default)}`"
    if isinstance(key.default, tuple):
        return "`[443]`"
    return f"`{key.default}`"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


_PARTS: Final[dict[str, Callable[[], Iterator[str]]]] = {
    "verbs": _verbs,
    "flags": _arguments_in_full,
    "kinds": _kinds,
    "example": _example,
    "keys": _keys,
}
