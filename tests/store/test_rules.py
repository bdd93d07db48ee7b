"""What a credential may be called and may hold."""

from __future__ import annotations

import pytest

from agent_box.store import rules


@pytest.mark.parametrize("name", ["a", "0", "anthropic-api-key", "a.b_c-d", "x" * 64, "a--"])
def test_a_name(name: str) -> None:
    assert rules.name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "x" * 65, "A", "-a", ".a", "_a", "a b", "a\n", "a/b", "ä", "a\0", "..", "a\x1b", "٣"],
)
def test_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="^1 to 64 lowercase"):
        rules.name(name)


@pytest.mark.parametrize(
    "value", [b"x", b" x ", b"\t", bytes(range(0x80, 0x100)), b"k" * rules.VALUE_MAX]
)
def test_a_value(value: bytes) -> None:
    assert rules.value(value) == value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"", "empty"),
        (b"k" * (rules.VALUE_MAX + 1), "longer than 65536 bytes"),
        (b"ab\0cd", "NUL"),
        (b"ab\n", "a line feed"),
        (b"ab\rcd", "a carriage return"),
        (b"ab\x1bcd", "control character 0x1b"),
        (b"ab\x7fcd", "control character 0x7f"),
    ],
)
def test_no_value_and_the_message_does_not_show_it(value: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        rules.value(value)
    assert "ab" not in str(refused.value)
    assert "kk" not in str(refused.value)


@pytest.mark.parametrize("word", [b"", b"a\n", b"a\r", b"\0", b"x" * 1025])
def test_no_passphrase(word: bytes) -> None:
    with pytest.raises(ValueError, match="^the passphrase"):
        rules.passphrase(word)


def test_a_passphrase() -> None:
    assert rules.passphrase("schöne Wörter".encode()) == "schöne Wörter".encode()
