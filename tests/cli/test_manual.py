"""docs/cli.md says what the program does."""

from __future__ import annotations

import re

import pytest
from support.cli import schema
from support.source import ROOT

from agent_box.bus.errors import MEANING
from agent_box.cli import manual, verbs
from agent_box.cli.demo import EXAMPLE
from agent_box.config.parse import parse
from agent_box.config.shape import FILE
from agent_box.config.tables import Named, Table, Tables

PAGE = (ROOT / "docs" / "cli.md").read_text()


def test_the_made_parts_are_up_to_date() -> None:
    assert manual.fill(PAGE) == PAGE, "stale: run deploy/docs.py"


def test_every_part_has_a_place() -> None:
    places = re.findall(r"<!-- made: (\w+) -->", PAGE)
    assert sorted(places) == sorted(manual._PARTS)
    assert PAGE.count("<!-- end -->") == len(places)


def test_a_stale_part_is_made_anew() -> None:
    stale = PAGE.replace("| `create` |", "| `crate` |")
    assert stale != PAGE
    assert manual.fill(stale) == PAGE


def test_an_unknown_part_is_noticed() -> None:
    with pytest.raises(KeyError):
        manual.fill("<!-- made: nonsense -->\n<!-- end -->")


def test_every_verb_and_flag_is_told() -> None:
    for verb in verbs.VERBS:
        assert f"| `{verb.name}` | " in PAGE
        for arg in verb.args:
            shown = f"{arg.flag} {arg.metavar}".strip()
            assert f"`{shown}`" in PAGE if arg.flag else arg.metavar in PAGE


def test_every_key_is_told() -> None:
    def tell(table: Table) -> None:
        for name, key in table.keys.items():
            assert f"| `{name}` | " in PAGE
            inner = key.reader.of if isinstance(key.reader, Named | Tables) else key.reader
            if isinstance(inner, Table):
                tell(inner)

    tell(FILE)


def test_the_example_is_a_config() -> None:
    block = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    assert block[1] == EXAMPLE
    parse(block[1].encode(), "")


def test_every_exit_code_is_told() -> None:
    told = {int(code) for code in re.findall(r"^\| (\d+) \| [a-z ]+ \|", PAGE, re.M)}
    allowed = set(schema("error")["$defs"]["error"]["properties"]["exit"]["enum"])
    assert allowed - told == {124}  # exec --timeout passes on what timeout(1) says
    assert {meaning.exit for meaning in MEANING.values()} <= told
