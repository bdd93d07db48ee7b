"""The custody file: read as it was written, and nothing that is not exactly that."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stores import custody

from agent_box.store.custody import HANDED, PROTECTIONS, SIZE_MAX, Custody, key_name


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_it_is_read_as_it_was_written(protection: str) -> None:
    assert Custody.decode(custody(protection).encode()) == custody(protection)


def test_what_is_handed_in_is_a_protection() -> None:
    assert set(HANDED) < set(PROTECTIONS)


def changed(**members: Any) -> bytes:
    return json.dumps({**json.loads(custody("passphrase").encode()), **members}).encode()


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("version", 2),
        ("version", True),
        ("version", "1"),
        ("store", "00"),
        ("store", None),
        ("protection", "none"),
        ("protection", ["key-file"]),
        ("key", "AB" * 16),
        ("key", "../../etc"),
        ("key", 5),
        ("salt", ""),
        ("salt", "zz" * 16),
        ("passes", -1),
        ("passes", "3"),
        ("passes", True),
        ("passes", 1.5),
        ("memory", 1 << 60),
        ("blob", "Ym9v"),
        ("blob", "*"),
        ("blob", "A" * 40_000),
        ("wrapped", "00"),
        ("extra", 1),
    ],
)
def test_a_wrong_member_is_named(member: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"'{member}'"):
        Custody.decode(changed(**{member: value}))


@pytest.mark.parametrize("member", sorted(json.loads(custody().encode())))
def test_a_missing_member_is_named(member: str) -> None:
    members = json.loads(custody().encode())
    del members[member]
    with pytest.raises(ValueError, match=f"'{member}'"):
        Custody.decode(json.dumps(members).encode())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 5000,
        b" " * (SIZE_MAX + 1),
        custody().encode()[:-20],
        custody().encode().replace(b'"key"', b'"salt"'),
    ],
    ids=range(9),
)
def test_what_is_no_custody_file_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="it is|it stands|member|a member"):
        Custody.decode(content)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_with_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError):
        Custody.decode(content)


@given(data=st.data())
def test_any_damaged_byte_is_refused_or_changes_the_content(data: st.DataObject) -> None:
    whole = bytearray(custody("passphrase").encode())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    try:
        decoded = Custody.decode(bytes(whole))
    except ValueError:
        return
    # white space may be exchanged for other white space; every member counts
    assert decoded != custody("passphrase") or chr(whole[at]).isspace()


def test_a_key_name() -> None:
    assert key_name("0f" * 16) == "0f" * 16
    for wrong in ("", "0F" * 16, "0f" * 17, "../" + "0" * 29, "0f" * 15 + "0\n"):
        with pytest.raises(ValueError, match="32 lowercase hex"):
            key_name(wrong)
