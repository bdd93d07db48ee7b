"""The chain: whatever is done to what was stored, the first place that no longer fits is named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.registry import journal
from agent_box.registry.journal import (
    GENESIS,
    START,
    BadEvent,
    Entry,
    Mark,
    New,
    Stored,
    Verifier,
    cut_event,
    link,
    read,
)

FACT = st.text(max_size=40) | st.integers(-(2**63), 2**63 - 1) | st.booleans()
NEW = st.builds(
    New,
    kind=st.from_regex(r"[a-z][a-z0-9-]{0,20}", fullmatch=True),
    by=st.sampled_from(["registry", "channel"]),
    source=st.sampled_from(journal.SOURCES),
    instance=st.none() | st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
    name=st.none() | st.just("web1"),
    facts=st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]{0,10}", fullmatch=True), FACT, max_size=5),
).filter(lambda new: new.kind != journal.CUT)


def new(kind: str = "x", **facts: journal.Fact) -> New:
    return New(
        kind=kind, by="registry", source="host-observed", instance=None, name=None, facts=facts
    )


def chain(events: Sequence[New], after: Mark = START) -> list[Entry]:
    entries = []
    for number, event in enumerate(events):
        entry = link(event, after=after, time_ms=1_700_000_000_000 + number)
        entries.append(entry)
        after = Mark(entry.seq, entry.hash)
    return entries


def rows(entries: Sequence[Entry]) -> list[Stored]:
    return [Stored(e.seq, e.instance, e.name, e.source, e.time_ms, e.body, e.hash) for e in entries]


def check(stored: Sequence[Stored], head: Mark | None = None) -> Verifier:
    verifier = Verifier()
    verifier.feed(stored)
    if head is None:
        head = Mark(stored[-1].seq, stored[-1].hash) if stored else START
    verifier.finish(head)
    return verifier


@given(st.lists(NEW, max_size=12))
def test_what_was_linked_verifies_and_reads_back(events: list[New]) -> None:
    entries = chain(events)
    verifier = check(rows(entries))
    assert verifier.bad_seq is None
    assert verifier.last.seq == len(events)
    for event, entry in zip(events, entries, strict=True):
        again = read(entry.body, prev=entry.prev, hash=entry.hash)
        assert again == entry
        assert (again.kind, dict(again.facts)) == (event.kind, dict(event.facts))


@given(st.lists(NEW, min_size=1, max_size=8), st.data())
def test_any_change_of_a_row_is_named(events: list[New], data: st.DataObject) -> None:
    stored = rows(chain(events))
    place = data.draw(st.integers(0, len(stored) - 1))
    row = stored[place]
    bad = data.draw(
        st.sampled_from(
            [
                replace(row, body=_flip(row.body, data)),
                replace(row, hash=_flip(row.hash, data)),
                replace(row, time_ms=row.time_ms + 1),
                replace(row, name="other"),
                replace(row, instance="f" * 32 if row.instance != "f" * 32 else None),
                replace(row, source="guest-channel" if row.source[0] == "h" else "host-observed"),
            ]
        )
    )
    stored[place] = bad
    verifier = check(stored)
    assert verifier.bad_seq is not None
    # A changed hash may show only at the next entry, which no longer follows it.
    assert verifier.bad_seq in (row.seq, row.seq + 1)
    assert str(verifier.bad_seq) in (verifier.problem or "")


def _flip(content: bytes, data: st.DataObject) -> bytes:
    place = data.draw(st.integers(0, len(content) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    return content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]


def test_an_entry_left_out_is_named() -> None:
    stored = rows(chain([new(n=n) for n in range(5)]))
    for place in (1, 2, 3):
        assert check(stored[:place] + stored[place + 1 :]).bad_seq == place + 1


def test_the_first_entries_do_not_go_without_a_trace() -> None:
    stored = rows(chain([new(n=n) for n in range(5)]))
    verifier = check(stored[2:])
    assert verifier.bad_seq == 3
    assert "without a record of the cut" in (verifier.problem or "")


def test_the_last_entries_do_not_go_while_the_head_is_known() -> None:
    stored = rows(chain([new(n=n) for n in range(5)]))
    assert check(stored[:3], Mark(5, stored[-1].hash)).bad_seq == 4
    assert check([], Mark(5, stored[-1].hash)).bad_seq == 1
    assert check([]).bad_seq is None


def test_entries_that_changed_places_are_named() -> None:
    stored = rows(chain([new(n=n) for n in range(5)]))
    stored[1], stored[2] = stored[2], stored[1]
    assert check(stored).bad_seq == 2


def test_a_whole_chain_that_was_made_anew_has_another_head() -> None:
    """The limit of a chain without a key, which the documents say."""
    one, two = (rows(chain([new(n=n), new()])) for n in (1, 2))
    assert check(two).bad_seq is None
    assert check(two, Mark(2, one[-1].hash)).bad_seq == 2


def cut(entries: list[Entry], keep_from: int) -> list[Entry]:
    """What a cut leaves: the entries from `keep_from` on, and the entry that records it."""
    gone = entries[keep_from - 2]
    last = entries[-1]
    event = cut_event(Mark(gone.seq, gone.hash), removed=gone.seq, why="age")
    record = link(event, after=Mark(last.seq, last.hash), time_ms=1)
    return [e for e in [*entries, record] if e.seq >= keep_from]


def test_a_chain_verifies_after_cuts() -> None:
    entries = cut(chain([new(n=n) for n in range(9)]), 4)
    assert check(rows(entries)).bad_seq is None
    last = Mark(entries[-1].seq, entries[-1].hash)
    more = entries + chain([new(n=n) for n in range(3)], after=last)
    assert check(rows(more)).bad_seq is None
    gone = more[5]
    event = cut_event(Mark(gone.seq, gone.hash), removed=6, why="size")
    record = link(event, after=Mark(more[-1].seq, more[-1].hash), time_ms=1)
    again = [e for e in [*more, record] if e.seq > gone.seq]
    assert check(rows(again)).bad_seq is None
    assert check(rows(again[1:])).bad_seq == again[1].seq


def test_after_a_cut_the_oldest_entry_is_still_checked() -> None:
    stored = rows(cut(chain([new(n=n) for n in range(9)]), 4))
    forged = link(new(n=99), after=Mark(3, GENESIS), time_ms=stored[0].time_ms)
    stored[0] = rows([forged])[0]
    assert check(stored).bad_seq in (4, 5)
    # and with everything after it made anew, except the head that somebody kept
    assert check(stored[:1], Mark(4, stored[0].hash)).bad_seq == 4


def test_only_the_registry_itself_may_record_a_cut_or_a_record() -> None:
    entries = chain([new(n=n) for n in range(4)])
    gone = entries[1]
    event = replace(cut_event(Mark(2, gone.hash), removed=2, why="age"), by="channel")
    record = link(event, after=Mark(4, entries[-1].hash), time_ms=1)
    assert check(rows([*entries[2:], record])).bad_seq == 3
    said = replace(new(record="ab" * 32), by="engine", instance="1" * 32)
    assert check(rows(chain([said]))).records == {}


def test_it_learns_the_latest_hash_of_each_record() -> None:
    def about(instance: str, hash: str) -> New:
        return replace(new(record=hash), instance=instance)

    events = [about("1", "a"), about("2", "b"), about("1", "c"), about("2", ""), new()]
    assert check(rows(chain(events))).records == {"1": "c"}


def test_the_hash_can_be_made_by_anybody() -> None:
    """The recipe of the module's text, in other words."""
    entry = chain([new(n=1, t="ü")])[0]
    value = json.loads(entry.body)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    expected = hashlib.sha256(b"agent-box journal 1\n" + bytes(32) + text.encode()).digest()
    assert entry.hash == expected
    assert value["facts"] == {"n": 1, "t": "ü"}


@pytest.mark.parametrize(
    "event",
    [
        replace(new(), kind="X"),
        replace(new(), kind=""),
        replace(new(), kind="a b"),
        replace(new(), kind="a\x1b[31m"),
        replace(new(), source="made-up"),
        new(n=2**63),
        new(t="x" * 2001),
        new(t="\ud800"),
        new(t=1.5),
        new(t=None),
        new(t=[1]),
        replace(new(), facts={"Upper": 1}),
        replace(new(), facts={"a b": 1}),
        replace(new(), facts={f"n{n}": n for n in range(33)}),
        replace(new(), facts={f"n{n}": "x" * 2000 for n in range(12)}),
    ],
)
def test_what_could_not_be_read_back_is_not_written(event: New) -> None:
    with pytest.raises(BadEvent):
        link(event, after=START, time_ms=0)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_entry_are_refused(body: bytes) -> None:
    with pytest.raises(BadEvent):
        read(body, prev=b"", hash=b"")


@pytest.mark.parametrize(
    "change",
    [
        {"seq": 1.0},
        {"seq": "1"},
        {"seq": True},
        {"time_ms": None},
        {"kind": 7},
        {"by": 7},
        {"by": None},
        {"source": ["host-observed"]},
        {"instance": 7},
        {"instance": 0},
        {"name": []},
        {"facts": []},
        {"facts": {"x": [1]}},
        {"more": 1},
    ],
)
def test_an_entry_with_another_shape_is_refused(change: dict[str, object]) -> None:
    value = json.loads(chain([new()])[0].body) | change
    body = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(BadEvent):
        read(body, prev=b"", hash=b"")


def test_deep_or_huge_text_is_refused_and_not_more() -> None:
    for body in (b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5_000, b'{"seq":NaN}'):
        with pytest.raises(BadEvent):
            read(body, prev=b"", hash=b"")
