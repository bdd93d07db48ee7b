"""The table of prices: what it costs, and what cannot be one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.source import ROOT

from agent_box.broker import prices
from agent_box.broker.usage import Tokens
from agent_box.config.errors import ConfigError

TABLE = b"""
version = 1
currency = "USD"

[[models]]
kind = "anthropic"
model = "claude-*"
input = 3
output = 15.0
cache_read = 0.3
cache_write = 3.75

[[models]]
kind = "anthropic"
model = "claude-big-*"
input = 15
output = 75

[[models]]
kind = "anthropic"
model = "claude-big-1"
input = 1
output = 1
"""
SOURCE = "prices.toml"


def test_costs_are_exact_and_rounded_up() -> None:
    table = prices.parse(TABLE, SOURCE)
    assert table.currency == "USD"

    def cost(model: str, *counts: int) -> int | None:
        return table.cost("anthropic", Tokens(model, *counts, known=True))

    assert cost("claude-small", 1_000_000, 0, 0, 0) == 3_000_000
    assert cost("claude-small", 1000, 100, 10_000, 200) == 3000 + 1500 + 3000 + 750
    assert cost("claude-small", 0, 0, 1, 0) == 1  # 0.3, and never nothing
    assert cost("claude-small", 0, 0, 0, 0) == 0
    assert cost("claude-big-2", 10, 1, 2, 3) == 150 + 75 + 30 + 45  # caches cost as input does
    assert cost("claude-big-1", 10, 1, 0, 0) == 11  # an exact name goes first
    assert cost("claudette", 10, 1, 0, 0) == 225  # unknown: the dearest
    assert table.cost("openai", Tokens("m", 1, 1, 1, 1, known=True)) is None
    assert table.knows("anthropic")
    assert not table.knows("openai")


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ("version = 1", "", "version is missing"),
        ("version = 1", "version = 2", "version at the top level must be 1"),
        ('"USD"', '"$"', "currency at the top level must be a currency in capitals"),
        ("input = 3\n", "", "input is missing in [[models]] number 1"),
        ("input = 3\n", "input = -1\n", "input in [[models]] number 1 must be a number from 0"),
        ("input = 3\n", "input = true\n", "must be a number from 0"),
        ("input = 3\n", "input = nan\n", "must be a number from 0"),
        ("input = 3\n", "inputs = 3\n", 'unknown key "inputs"'),
        ("claude-*", "cl*ude", "must be a model's name"),
        ("claude-big-*", "claude-*", "model in [[models]] number 2 stands twice"),
        ('kind = "anthropic"', 'kind = "header"', "kind in [[models]] number 1 must be one of"),
        ("version = 1", "version = ", "not TOML"),
    ],
)
def test_what_cannot_be_a_table(was: str, now: str, says: str) -> None:
    assert was in TABLE.decode()
    with pytest.raises(ConfigError) as refused:
        prices.parse(TABLE.decode().replace(was, now, 1).encode(), SOURCE)
    assert str(refused.value).startswith("prices.toml: ")
    assert says in str(refused.value)


def test_the_file_lies_beside_the_config(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("version = 1\n")
    assert prices.load(None) == prices.load(config) == prices.NONE
    (tmp_path / "prices.toml").write_bytes(TABLE)
    assert prices.load(config) == prices.parse(TABLE, SOURCE)
    link = tmp_path / "elsewhere" / "config.toml"
    link.parent.mkdir()
    link.symlink_to(config)
    assert prices.load(link).currency == "USD"  # beside the real file, as a CA file is
    (tmp_path / "prices.toml").write_bytes(b"#" * (1 << 20) + b"#")
    with pytest.raises(ConfigError, match="longer than"):
        prices.load(config)
    os.unlink(tmp_path / "prices.toml")
    (tmp_path / "prices.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        prices.load(config)


def test_the_example_is_a_table() -> None:
    example = (ROOT / "docs" / "prices.example.toml").read_bytes()
    table = prices.parse(example, "prices.example.toml")
    assert {row.kind for row in table.rows} == {"anthropic", "openai", "google"}
