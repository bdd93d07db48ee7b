"""Names and sizes, as operators write them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.config import values
from agent_box.store import rules


@pytest.mark.parametrize("name", ["a", "0", "a-b", "a--b", "web1", "a" * 63])
def test_a_name(name: str) -> None:
    assert values.name(name) == name


@pytest.mark.parametrize(
    "name", ["", "-", "-a", "a-", "A", "a_b", "a.b", "a b", "a\n", "\na", "é", "１", "a" * 64]
)
def test_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 63 lowercase letters"):
        values.name(name)


@pytest.mark.parametrize(
    ("text", "size"), [("1M", 1 << 20), ("30G", 30 << 30), ("999999999M", 999999999 << 20)]
)
def test_a_size(text: str, size: int) -> None:
    assert values.size(text) == size


@given(st.text(max_size=12))
def test_what_is_no_size_is_refused(text: str) -> None:
    if not re.fullmatch(r"[1-9][0-9]*[MG]", text, re.ASCII):
        with pytest.raises(ValueError, match="an integer and a unit"):
            values.size(text)


def test_bounds() -> None:
    assert values.memory("128M") == values.MEMORY_MIN
    assert values.memory("1024G") == values.MEMORY_MAX
    assert values.disk("64M") == values.DISK_MIN
    assert values.disk("16384G") == values.DISK_MAX
    for parse, text in (
        (values.memory, "127M"),
        (values.memory, "1025G"),
        (values.disk, "63M"),
        (values.disk, "16385G"),
    ):
        with pytest.raises(ValueError, match="a size from"):
            parse(text)


@given(st.text(st.sampled_from("ab0.-_A é\n"), max_size=8) | st.text(max_size=70))
def test_the_config_takes_the_names_that_the_store_takes(text: str) -> None:
    """A binding must be able to name every credential, and no other."""

    def takes(parse: object) -> bool:
        try:
            parse(text)  # type: ignore[operator]
        except ValueError:
            return False
        return True

    assert takes(values.credential) == takes(rules.name)
