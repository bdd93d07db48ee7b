"""The decisions of the store, without a disk: what opens, what is refused and by which name."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_box.bus.errors import Reason, Refusal
from agent_box.process.secret import Secret
from agent_box.store import core as deciding
from agent_box.store import rules, seal
from agent_box.store.contract import Credential, Protect, Put, Reveal, Sealed
from agent_box.store.core import Core, Row, Unreadable


@dataclass
class Desk:
    """A core with the rows and the book that a database would hold."""

    birth: deciding.Birth = field(default_factory=deciding.birth)
    rows: dict[str, Row | Unreadable] = field(default_factory=dict)
    now_ms: int = 1_800_000_000_000

    def __post_init__(self) -> None:
        self.core = Core(self.birth.custody, self.birth.fingerprint)
        self.core.unwrap(self.birth.key)
        self.book = self.birth.book

    def sealed(self, value: bytes) -> Sealed:
        to = self.core.inbox.public
        return Sealed(to=to, box=seal.box(Secret(value), to))

    def write(self, name: str, value: bytes) -> deciding.Write:
        return self.core.put(
            Put(name=name, value=self.sealed(value)),
            untrusted_book=self.book,
            old=self.rows.get(name),
            now_ms=self.now_ms,
        )

    def put(self, name: str, value: bytes) -> int:
        write = self.write(name, value)
        self.rows[write.row.name], self.book = write.row, write.book
        return write.reply.version

    def remove(self, name: str) -> None:
        name, self.book = self.core.remove(name, untrusted_book=self.book, old=self.rows.get(name))
        self.rows.pop(name, None)

    def reveal(self, name: str) -> bytes:
        inbox = seal.Inbox()
        revealed = self.core.reveal(
            Reveal(name=name, to=inbox.public),
            untrusted_book=self.book,
            row=self.rows.get(name),
        )
        row = self.rows[name]
        assert isinstance(row, Row)
        assert revealed.version == row.version
        return inbox.open(revealed.box).reveal()

    def list(self) -> dict[str, Credential]:
        return {c.name: c for c in self.core.list(self.rows.values(), self.book).credentials}

    def row(self, name: str) -> Row:
        row = self.rows[name]
        assert isinstance(row, Row)
        return row

    def refused(self, name: str) -> str:
        with pytest.raises(Refusal) as refused:
            self.reveal(name)
        assert refused.value.reason is Reason.TAMPERED
        assert name in refused.value.message
        problem = self.list()[name].problem
        assert problem is not None
        assert problem in refused.value.message
        return problem


def test_what_was_put_is_revealed_and_counted() -> None:
    desk = Desk()
    assert desk.put("a", b"one") == 1
    assert desk.put("b", b"two") == 1
    desk.now_ms += 5
    assert desk.put("a", b"three") == 2
    assert (desk.reveal("a"), desk.reveal("b")) == (b"three", b"two")
    listed = desk.list()
    assert listed["a"] == Credential(name="a", version=2, updated_ms=desk.now_ms, problem=None)
    assert listed["b"].version == 1
    assert list(listed) == ["a", "b"]


def test_what_was_removed_is_not_found_and_begins_anew() -> None:
    desk = Desk()
    desk.put("a", b"one")
    desk.remove("a")
    with pytest.raises(Refusal) as refused:
        desk.reveal("a")
    assert refused.value.reason is Reason.NOT_FOUND
    assert desk.list() == {}
    with pytest.raises(Refusal) as refused:
        desk.remove("a")
    assert (refused.value.reason, refused.value.exit) == (Reason.NOT_FOUND, 3)
    assert desk.put("a", b"two") == 1


NAMES = st.sampled_from(["a", "b", "c"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES, st.binary(min_size=1, max_size=9).map(bytes.hex)),
        st.tuples(st.just("remove"), NAMES, st.just("")),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_any_steps_leave_exactly_the_last_values(steps: list[tuple[str, str, str]]) -> None:
    desk, expected = Desk(), {}
    for step, name, value in steps:
        if step == "put":
            desk.put(name, value.encode())
            expected[name] = value.encode()
        elif name in expected:
            desk.remove(name)
            del expected[name]
    assert {name: desk.reveal(name) for name in desk.list()} == expected


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, data=st.data())
def test_no_row_of_the_past_is_believed(
    steps: list[tuple[str, str, str]], data: st.DataObject
) -> None:
    """Whatever rows of any time somebody puts back, only those that count open."""
    desk, past, expected = Desk(), [], {}
    for step, name, value in steps:
        if step == "put":
            desk.put(name, value.encode())
            past.append(desk.row(name))
            expected[name] = value.encode()
        elif name in expected:
            desk.remove(name)
            del expected[name]
    current = dict(desk.rows)
    for row in data.draw(st.lists(st.sampled_from(past), max_size=3)) if past else []:
        desk.rows[row.name] = row
    for name, row in desk.rows.items():
        if row == current.get(name):
            assert desk.reveal(name) == expected[name]
        else:
            assert desk.refused(name) in (deciding.OLDER, deciding.REMOVED)


def test_a_tampered_row_is_named_and_the_others_are_served() -> None:
    desk = Desk()
    desk.put("a", b"one")
    desk.put("b", b"two")
    good = desk.row("a")
    damages = [
        good._replace(sealed=good.sealed[:-1]),
        good._replace(sealed=b""),
        good._replace(sealed=good.sealed[:-1] + bytes([good.sealed[-1] ^ 1])),
        good._replace(version=good.version + 1),
        good._replace(updated_ms=good.updated_ms + 1),
        good._replace(version=0),
        good._replace(version=-(1 << 63)),
        good._replace(updated_ms=-1),
        good._replace(sealed=desk.row("b").sealed),
    ]
    for damaged in damages:
        desk.rows["a"] = damaged
        assert desk.refused("a") == deciding.TAMPERED
        assert desk.reveal("b") == b"two"
        assert desk.list()["b"].problem is None
    desk.rows["a"] = good
    assert desk.reveal("a") == b"one"


def test_swapped_rows_are_both_named() -> None:
    desk = Desk()
    desk.put("a", b"one")
    desk.put("b", b"two")
    desk.put("c", b"three")
    a, b = desk.row("a"), desk.row("b")
    desk.rows |= {"a": b._replace(name="a"), "b": a._replace(name="b")}
    assert desk.refused("a") == deciding.TAMPERED
    assert desk.refused("b") == deciding.TAMPERED
    assert desk.reveal("c") == b"three"


def test_a_row_of_another_store_is_named() -> None:
    desk, other = Desk(), Desk()
    desk.put("a", b"one")
    other.put("a", b"two")
    desk.rows["a"] = other.rows["a"]
    assert desk.refused("a") == deciding.TAMPERED


def test_a_row_that_went_missing_is_named() -> None:
    desk = Desk()
    desk.put("a", b"one")
    desk.put("b", b"two")
    del desk.rows["a"]
    assert desk.refused("a") == deciding.GONE
    assert desk.reveal("b") == b"two"
    desk.remove("a")
    assert list(desk.list()) == ["b"]


def test_a_row_that_cannot_be_read_is_named() -> None:
    desk = Desk()
    desk.put("a", b"one")
    desk.rows["a"] = Unreadable("a")
    assert desk.refused("a") == deciding.UNREADABLE


@pytest.mark.parametrize("book", [b"", b"x" * 100])
def test_a_damaged_book_is_not_a_way_to_have_old_rows_believed(book: bytes) -> None:
    desk = Desk()
    desk.put("a", b"old")
    old = desk.rows["a"]
    desk.put("a", b"one")
    desk.put("b", b"two")
    desk.book, desk.rows["a"] = book, old
    assert desk.refused("a") == deciding.BOOK
    assert desk.refused("b") == deciding.BOOK
    # storing again is the way out, one by one, and counts on from what is there
    write = desk.write("a", b"three")
    assert write.note == deciding.BOOK
    assert write.reply.version == 2
    desk.rows["a"], desk.book = write.row, write.book
    assert desk.reveal("a") == b"three"
    assert desk.refused("b") == deciding.REMOVED
    desk.remove("b")
    assert list(desk.list()) == ["a"]


def test_removing_under_a_damaged_book_mends_nothing() -> None:
    desk = Desk()
    desk.put("a", b"one")
    desk.put("b", b"two")
    desk.book = b""
    desk.remove("a")
    assert desk.refused("b") == deciding.BOOK


def test_an_old_book_is_found_out_by_the_rows_it_does_not_know() -> None:
    desk = Desk()
    desk.put("a", b"one")
    book = desk.book
    desk.put("a", b"two")
    desk.put("b", b"three")
    desk.book = book
    assert desk.refused("a") == deciding.OLDER
    assert desk.refused("b") == deciding.REMOVED


def test_rows_with_impossible_names_are_counted_and_not_shown() -> None:
    desk = Desk()
    desk.put("a", b"one")
    rows = [*desk.rows.values(), Row("\x1b[31m", 1, 1, b""), Row("", 1, 1, b""), Unreadable("\n")]
    listed = desk.core.list(rows, desk.book)
    assert [c.name for c in listed.credentials] == ["a"]
    assert listed.problem == "rows without a valid name: 3"


# ------------------------------------------------------------------------------------ keys


def test_a_locked_store_lists_and_does_nothing_else() -> None:
    desk = Desk()
    desk.put("a", b"one")
    locked = Core(desk.birth.custody, desk.birth.fingerprint)
    locked.lock("say the word")
    assert locked.seal_key().locked
    listed = locked.list(desk.rows.values(), desk.book)
    assert listed.locked
    assert listed.problem == "say the word"
    assert [(c.name, c.version, c.problem) for c in listed.credentials] == [("a", 1, None)]
    desk.core, opened = locked, desk.core
    for verb in (desk.reveal, desk.remove, lambda name: desk.put(name, b"x")):
        with pytest.raises(Refusal) as refused:
            verb("a")
        assert refused.value.reason is Reason.STORE_LOCKED
        assert "say the word" in refused.value.message
    with pytest.raises(Refusal) as refused:
        locked.rewrap(protect("key-file"), seal.new_key(), b"")
    assert refused.value.reason is Reason.STORE_LOCKED
    desk.core = opened
    locked.unwrap(desk.birth.key)
    assert (locked.open, locked.locked, locked.problem) == (True, False, None)


def test_a_wrong_master_key_is_named_by_credential() -> None:
    desk = Desk()
    desk.put("a", b"one")
    wrong = Core(desk.birth.custody, desk.birth.fingerprint)
    with pytest.raises(seal.Unsealable):
        wrong.unwrap(seal.new_key())
    wrong.fail(deciding.WRONG_KEY)
    desk.core = wrong
    assert desk.refused("a") == deciding.WRONG_KEY
    with pytest.raises(Refusal) as refused:
        desk.put("b", b"two")
    assert (refused.value.reason, "b" in refused.value.message) == (Reason.TAMPERED, True)
    with pytest.raises(Refusal) as refused:
        desk.reveal("none")
    assert refused.value.reason is Reason.NOT_FOUND


def test_custody_of_another_data_key_is_a_wrong_key() -> None:
    desk, other = Desk(), Desk()
    desk.put("a", b"one")
    mixed = Core(other.birth.custody, desk.birth.fingerprint)
    mixed.unwrap(other.birth.key)
    assert (mixed.open, mixed.problem) == (False, deciding.WRONG_KEY)


@pytest.mark.parametrize("member", ["store", "key", "protection", "salt", "passes", "blob"])
def test_no_member_of_custody_can_be_exchanged(member: str) -> None:
    birth = deciding.birth()
    new = {
        "store": bytes(16),
        "key": "0" * 32,
        "protection": "keyring",
        "salt": b"s" * 16,
        "passes": 1,
        "blob": b"b",
    }[member]
    core = Core(replace(birth.custody, **{member: new}), birth.fingerprint)
    with pytest.raises(seal.Unsealable):
        core.unwrap(birth.key)


def protect(protection: str, key: str = "", blob: bytes = b"") -> Protect:
    return Protect(protection=protection, key=key, secret=None, blob=blob)


def test_a_new_protection_opens_the_same_rows_with_the_new_key_only() -> None:
    desk = Desk()
    desk.put("a", b"one")
    key, salt = seal.new_key(), seal.new_salt()
    custody = desk.core.rewrap(protect("passphrase"), key, salt)
    assert (custody.protection, custody.salt, custody.passes) == ("passphrase", salt, 3)
    assert custody.key != desk.birth.custody.key
    opened = Core(custody, desk.birth.fingerprint)
    with pytest.raises(seal.Unsealable):
        opened.unwrap(desk.birth.key)
    opened.unwrap(key)
    desk.core.adopt(custody)
    desk.core = opened
    assert desk.reveal("a") == b"one"


def test_a_protection_asked_for_twice_is_changed_once() -> None:
    desk, key = Desk(), seal.new_key()
    custody = desk.core.rewrap(protect("keyring", "ab" * 16), key, b"")
    desk.core.adopt(custody)
    assert desk.core.rewrap(protect("keyring", "ab" * 16), key, b"") is custody


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (protect("keyring", "nonsense"), "a key's name"),
        (protect("keyring", "ab" * 16, b"blob"), "a blob belongs to systemd-creds"),
        (protect("systemd-creds", "ab" * 16), "a blob belongs to systemd-creds"),
        (protect("systemd-creds", "ab" * 16, b"b" * 20_000), "longer than 16384"),
    ],
)
def test_a_protection_that_makes_no_sense_is_refused(request_: Protect, why: str) -> None:
    with pytest.raises(Refusal, match=why) as refused:
        Desk().core.rewrap(request_, seal.new_key(), b"")
    assert refused.value.reason is Reason.BAD_REQUEST


# --------------------------------------------------------------------------------- requests


@pytest.mark.parametrize("name", ["", "A", "../x", "a" * 65, "a\n", "\x1b[31m" * 100])
def test_a_bad_name_is_a_bad_request_everywhere(name: str) -> None:
    desk = Desk()
    for verb in (desk.reveal, desk.remove, lambda n: desk.put(n, b"x")):
        with pytest.raises(Refusal, match="^a credential's name must be 1 to 64") as refused:
            verb(name)
        assert refused.value.reason is Reason.BAD_REQUEST
        assert refused.value.message.isprintable()


@pytest.mark.parametrize("value", [b"", b"can\nary", b"can\0ary", b"k" * (rules.VALUE_MAX + 1)])
def test_a_bad_value_is_refused_and_not_shown(value: bytes) -> None:
    desk = Desk()
    with pytest.raises(Refusal, match="^a: the value") as refused:
        desk.put("a", value)
    assert refused.value.reason is Reason.BAD_REQUEST
    assert "can" not in refused.value.message.replace("can carry", "")
    assert desk.list() == {}


def test_a_box_for_an_earlier_start_can_be_told_from_a_damaged_one() -> None:
    desk = Desk()
    before = desk.sealed(b"one")
    desk.core = Core(desk.birth.custody, desk.birth.fingerprint)
    desk.core.unwrap(desk.birth.key)
    with pytest.raises(Refusal) as refused:
        desk.core.received(before)
    assert refused.value.reason is Reason.CONFLICT
    assert refused.value.facts == {"seal": "stale"}
    now = desk.sealed(b"one")
    with pytest.raises(Refusal) as refused:
        desk.core.received(Sealed(to=now.to, box=now.box[:-1]))
    assert (refused.value.reason, refused.value.facts) == (Reason.BAD_REQUEST, {})


@pytest.mark.parametrize("to", [b"", b"x" * 31, b"x" * 33, bytes(32)])
def test_a_value_is_revealed_to_a_proper_key_only(to: bytes) -> None:
    desk = Desk()
    desk.put("a", b"one")
    with pytest.raises(Refusal, match="public key") as refused:
        desk.core.reveal(Reveal(name="a", to=to), untrusted_book=desk.book, row=desk.rows["a"])
    assert refused.value.reason is Reason.BAD_REQUEST


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "CREDENTIALS_MAX", 2)
    desk = Desk()
    desk.put("a", b"1")
    desk.put("b", b"2")
    with pytest.raises(Refusal, match="^c: not stored, the store holds 2") as refused:
        desk.put("c", b"3")
    assert refused.value.reason is Reason.EXHAUSTED
    assert desk.put("a", b"4") == 2  # replacing is not one more


def test_nothing_that_is_written_holds_a_value_or_a_key() -> None:
    desk = Desk()
    write = desk.write("a", b"canary-value")
    written = repr(write) + repr(desk.birth) + repr(desk.core.__dict__)
    assert b"canary-value" not in write.row.sealed + write.book
    assert "canary" not in written
    assert repr(desk.birth.key.reveal()) not in written
