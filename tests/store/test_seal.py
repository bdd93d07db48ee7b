"""The cryptography: what was sealed opens, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.process.secret import Secret
from agent_box.store import seal


@given(value=st.binary(max_size=200), associated=st.binary(max_size=50))
def test_what_was_sealed_opens(value: bytes, associated: bytes) -> None:
    key = seal.new_key()
    assert seal.unseal(key, seal.seal(key, value, associated), associated).reveal() == value


@given(data=st.data(), value=st.binary(max_size=40))
def test_no_changed_bit_opens(data: st.DataObject, value: bytes) -> None:
    key = seal.new_key()
    sealed = bytearray(seal.seal(key, value, b"here"))
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(seal.Unsealable):
        seal.unseal(key, bytes(sealed), b"here")


@given(data=st.data(), value=st.binary(max_size=40))
def test_no_truncated_or_longer_seal_opens(data: st.DataObject, value: bytes) -> None:
    key = seal.new_key()
    sealed = seal.seal(key, value, b"here")
    with pytest.raises(seal.Unsealable):
        seal.unseal(key, sealed[: data.draw(st.integers(0, len(sealed) - 1))], b"here")
    with pytest.raises(seal.Unsealable):
        seal.unseal(key, sealed + b"\0", b"here")


def test_another_key_or_place_does_not_open() -> None:
    key = seal.new_key()
    sealed = seal.seal(key, b"value", b"here")
    with pytest.raises(seal.Unsealable):
        seal.unseal(seal.new_key(), sealed, b"here")
    with pytest.raises(seal.Unsealable):
        seal.unseal(key, sealed, b"there")


def test_a_seal_is_never_the_same_twice_and_holds_nothing_in_the_clear() -> None:
    key = seal.new_key()
    seals = [seal.seal(key, b"value" * 10, b"") for _ in range(50)]
    assert len({seal.nonce_of(s) for s in seals}) == 50
    assert not any(b"value" in s or key.reveal() in s for s in seals)


_PART = st.one_of(st.binary(max_size=9), st.integers(0, 2**64 - 1))


@given(one=st.lists(_PART, max_size=4), other=st.lists(_PART, max_size=4))
def test_different_contexts_are_never_alike(
    one: list[bytes | int], other: list[bytes | int]
) -> None:
    def plain(parts: list[bytes | int]) -> list[bytes]:
        return [p if isinstance(p, bytes) else p.to_bytes(8, "big") for p in parts]

    same = plain(one) == plain(other)
    assert (seal.context(b"w", b"s", *one) == seal.context(b"w", b"s", *other)) == same


def test_keys_for_different_purposes_are_unrelated() -> None:
    key = seal.new_key()
    derived = {seal.subkey(key, p).reveal() for p in (b"credential", b"book", b"third")}
    assert len(derived | {key.reveal()}) == 4
    assert len(seal.fingerprint(key)) == 16
    assert seal.fingerprint(key) not in b"".join(derived)
    assert seal.fingerprint(key) != seal.fingerprint(seal.new_key())


def test_a_passphrase_makes_a_key_that_depends_on_everything() -> None:
    def made(word: bytes, salt: bytes, passes: int, memory: int) -> bytes:
        return seal.key_of_passphrase(Secret(word), salt, passes, memory).reveal()

    salt, other = seal.new_salt(), seal.new_salt()
    same = made(b"word", salt, 1, 8 << 20)
    assert len(same) == 32
    assert same == made(b"word", salt, 1, 8 << 20)
    different = [
        made(b"Word", salt, 1, 8 << 20),
        made(b"word", other, 1, 8 << 20),
        made(b"word", salt, 2, 8 << 20),
        made(b"word", salt, 1, 16 << 20),
    ]
    assert len({same, *different}) == 5


def test_argon2id_is_what_rfc_9106_says() -> None:
    """Parameters at least as strong as its second recommendation: 3 passes, 64 MiB."""
    assert seal.KDF_PASSES >= 3
    assert seal.KDF_MEMORY >= 64 << 20
    assert seal.KDF_PASSES in seal.KDF_PASSES_RANGE
    assert seal.KDF_MEMORY in seal.KDF_MEMORY_RANGE


def test_a_box_opens_for_its_receiver_only() -> None:
    ours, theirs = seal.Inbox(), seal.Inbox()
    box = seal.box(Secret(b"value"), ours.public)
    assert ours.open(box).reveal() == b"value"
    assert b"value" not in box
    with pytest.raises(seal.Unsealable):
        theirs.open(box)
    with pytest.raises(seal.Unsealable):
        ours.open(box[:-1])
    with pytest.raises(seal.Unsealable):
        ours.open(b"")


def test_what_a_sender_boxes_opens_for_its_receiver_only() -> None:
    ours, theirs = seal.Inbox(), seal.Inbox()
    sender, other = seal.Sender(ours.public), seal.Sender(ours.public)
    boxes = [by.box(Secret(value)) for by in (sender, other, sender) for value in (b"", b"value")]
    assert [ours.open(each).reveal() for each in boxes] == [b"", b"value"] * 3
    assert len(set(boxes)) == 6 and not any(b"value" in each for each in boxes)
    for each in boxes:
        with pytest.raises(seal.Unsealable):
            theirs.open(each)
        for bad in (each[:-1], each[:50], each[:8], each[:40] + bytes(24) + each[64:]):
            with pytest.raises(seal.Unsealable):
                ours.open(bad)
    for at in (8, 45, 70):  # the sender's key, the nonce, the text
        changed = bytearray(boxes[1])
        changed[at] ^= 1
        with pytest.raises(seal.Unsealable):
            ours.open(bytes(changed))
    with pytest.raises(seal.Unsealable):
        ours.open(boxes[1][:8] + bytes(32) + boxes[1][40:])  # a key that anybody shares
    assert ours.open(boxes[1]).reveal() == b"value"


@pytest.mark.parametrize(
    "to", [b"", b"x" * 31, b"x" * 33, bytes(32), b"\1" + bytes(31)], ids=lambda to: to.hex()[:8]
)
def test_nothing_is_sealed_to_what_is_no_key(to: bytes) -> None:
    with pytest.raises(ValueError, match="public key"):
        seal.box(Secret(b"value"), to)
    with pytest.raises(ValueError, match="public key"):
        seal.Sender(to)


def test_an_empty_value_can_be_boxed() -> None:
    inbox = seal.Inbox()
    assert inbox.open(seal.box(Secret(b""), inbox.public)).reveal() == b""
