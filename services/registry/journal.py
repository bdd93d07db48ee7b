"""The chain of events: how one is written down, hashed, checked, and where old ones are cut.

Pure: it makes and checks entries and keeps none. Each entry's hash covers its own canonical
text and the hash of the entry before it, so an entry cannot be changed, left out, moved or
slipped in without the chain showing the first place where it no longer fits.

What that does not give: whoever can write the database can rewrite the whole chain from some
place on, or cut its end off. A head that was kept elsewhere (`agent-box logs --head`) shows
both.

    hash(n) = SHA-256("agent-box journal 1\\n" || hash(n-1) || canonical text of n)

and hash(0) is 32 zero bytes. The canonical text is JSON in ASCII with sorted keys and without
spaces, which any language can make again.

A cut removes the oldest entries. It is itself an entry (`CUT`), which tells the last sequence
number and hash that are gone, so the oldest entry that is kept still has a predecessor to be
checked against, and an attacker who removes old entries has to write one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

Source = Literal["host-observed", "guest-channel", "agent-reported"]
Fact = str | int | bool

SOURCES: Final[tuple[str, ...]] = get_args(Source)
REGISTRY: Final = "registry"
CUT: Final = "journal-cut"
ANCHOR: Final = "record-anchored"
RECORD: Final = "record"  # the fact that carries a record's hash
GENESIS: Final = bytes(32)

_DOMAIN: Final = b"agent-box journal 1\n"
_KIND: Final = re.compile(r"[a-z][a-z0-9-]{0,47}")
_FACT: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")
FACTS_MAX: Final = 32
TEXT_MAX: Final = 2_000  # characters of one fact
BODY_MAX: Final = 16_384  # bytes of one canonical text
_INTEGER: Final = 1 << 63


class BadEvent(ValueError):
    """It cannot be written down. One line says which part."""


@dataclass(frozen=True, kw_only=True)
class New:
    """An event that is to be written; what the journal itself adds is not in it."""

    kind: str
    by: str  # the role that says so
    source: Source
    instance: str | None
    name: str | None  # that the instance had
    facts: Mapping[str, Fact]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An event in its place in the chain. `time_ms` is Unix time in milliseconds."""

    seq: int
    time_ms: int
    kind: str
    by: str
    source: Source
    instance: str | None
    name: str | None
    facts: Mapping[str, Fact]
    body: bytes  # the canonical text
    prev: bytes
    hash: bytes


@dataclass(frozen=True)
class Mark:
    """A place in the chain: the last entry before whatever comes next."""

    seq: int
    hash: bytes


START: Final = Mark(0, GENESIS)


def check(new: New) -> None:
    """Refuses an event that would not be the same when it is read back, or is too large.

    Raises:
        BadEvent: naming the part.
    """
    if not _KIND.fullmatch(new.kind):
        raise BadEvent("kind is not lower-case words with hyphens, at most 48 characters")
    if new.source not in SOURCES:
        raise BadEvent(f"source is not one of {', '.join(SOURCES)}")
    if len(new.facts) > FACTS_MAX:
        raise BadEvent(f"more than {FACTS_MAX} facts")
    for key, value in new.facts.items():
        if not _FACT.fullmatch(key):
            raise BadEvent("the name of a fact is not a snake_case word of at most 40 characters")
        if isinstance(value, bool):
            continue
        if isinstance(value, int):
            if not -_INTEGER <= value < _INTEGER:
                raise BadEvent(f"fact {key} does not fit into 64 bits")
        elif not isinstance(value, str):
            raise BadEvent(f"fact {key} is neither text nor an integer nor true or false")
        elif len(value) > TEXT_MAX:
            raise BadEvent(f"fact {key} is longer than {TEXT_MAX} characters")
        elif not value.isascii() and not _encodes(value):
            raise BadEvent(f"fact {key} is not Unicode text")


def link(new: New, *, after: Mark, time_ms: int) -> Entry:
    """Puts an event behind `after`.

    Raises:
        BadEvent: as `check`, or it is too large as a whole.
    """
    check(new)
    seq = after.seq + 1
    body = _canonical(
        {
            "by": new.by,
            "facts": dict(new.facts),
            "instance": new.instance,
            "kind": new.kind,
            "name": new.name,
            "seq": seq,
            "source": new.source,
            "time_ms": time_ms,
        }
    )
    if len(body) > BODY_MAX:
        raise BadEvent(f"it is longer than {BODY_MAX} bytes")
    return Entry(
        seq=seq,
        time_ms=time_ms,
        kind=new.kind,
        by=new.by,
        source=new.source,
        instance=new.instance,
        name=new.name,
        facts=dict(new.facts),
        body=body,
        prev=after.hash,
        hash=digest(after.hash, body),
    )


def read(untrusted_body: bytes, *, prev: bytes, hash: bytes) -> Entry:
    """An entry from what was stored of it. Its place in the chain is not checked here.

    Raises:
        BadEvent: the text is not one that `link` wrote.
    """
    try:
        value = json.loads(untrusted_body, parse_float=_no_float, parse_constant=_no_float)
    except (ValueError, RecursionError):
        raise BadEvent("its text is not canonical JSON") from None
    keys = {"by", "facts", "instance", "kind", "name", "seq", "source", "time_ms"}
    if not isinstance(value, dict) or set(value) != keys or not isinstance(value["facts"], dict):
        raise BadEvent("its text has other members than an event")
    if _canonical(value) != untrusted_body:
        raise BadEvent("its text is not canonical JSON")
    texts = [value[k] for k in ("by", "kind", "source")]
    texts += [value[k] for k in ("instance", "name") if value[k] is not None]
    if not all(isinstance(text, str) for text in texts) or not all(
        type(value[k]) is int for k in ("seq", "time_ms")
    ):
        raise BadEvent("a member of its text is of the wrong type")
    new = New(
        kind=value["kind"],
        by=value["by"],
        source=value["source"],
        instance=value["instance"],
        name=value["name"],
        facts=value["facts"],
    )
    check(new)
    return Entry(
        seq=value["seq"],
        time_ms=value["time_ms"],
        kind=new.kind,
        by=new.by,
        source=new.source,
        instance=new.instance,
        name=new.name,
        facts=new.facts,
        body=untrusted_body,
        prev=prev,
        hash=hash,
    )


def digest(prev: bytes, body: bytes) -> bytes:
    return hashlib.sha256(_DOMAIN + prev + body).digest()


def record_hash(packed: bytes) -> str:
    """The hash of a record as an entry carries it in the fact `RECORD`, hexadecimal."""
    return hashlib.sha256(b"agent-box record 1\n" + packed).hexdigest()


def cut_event(gone: Mark, *, removed: int, why: str) -> New:
    """The entry that records that everything up to and including `gone` has been removed."""
    return New(
        kind=CUT,
        by=REGISTRY,
        source="host-observed",
        instance=None,
        name=None,
        facts={
            "last_seq": gone.seq,
            "last_hash": gone.hash.hex(),
            "removed": removed,
            "why": why,
        },
    )


@dataclass(frozen=True)
class Stored:
    """A row as the database has it: nothing of it is believed."""

    seq: int
    instance: str | None
    name: str | None
    source: str
    time_ms: int
    body: bytes
    hash: bytes


class Verifier:
    """Checks a chain from its oldest entry on, in pieces of any size.

    Feed every row in the order of `seq`, then ask `finish`. The first problem stays.

    Attributes:
        bad_seq: the first entry that does not fit; None while all do.
        problem: what is wrong with it, in one line.
        last: the last entry that fitted.
        records: the latest hash that the chain tells of each record, by instance id; of
            one that was removed, none.
    """

    def __init__(self) -> None:
        self.bad_seq: int | None = None
        self.problem: str | None = None
        self.first = 0
        self.last = START
        self.records: dict[str, str] = {}
        self._oldest: Stored | None = None
        self._before: Mark | None = None  # what the oldest entry follows, once that is known
        self._cut = START  # the latest

    def feed(self, rows: Iterable[Stored]) -> None:
        for row in rows:
            if self.bad_seq is not None:
                return
            self._one(row)

    def finish(self, head: Mark) -> None:
        """Args: head: where the database says that the chain ends."""
        if self.bad_seq is not None:
            return
        if self.last != head:
            seq = min(self.last.seq, head.seq) + (self.last.seq != head.seq)
            self._bad(seq, f"the end of the chain is not event {head.seq} as it was written")
        elif self.first and self._before is None:
            self._bad(self.first, "what was before it was removed without a record of the cut")

    def _one(self, row: Stored) -> None:
        if self._oldest is not None and row.seq != self.last.seq + 1:
            self._bad(self.last.seq + 1, "it is missing")
            return
        try:
            entry = read(row.body, prev=b"", hash=row.hash)
        except BadEvent as error:
            self._bad(row.seq, str(error))
            return
        stored = (row.seq, row.instance, row.name, row.source, row.time_ms)
        if stored != (entry.seq, entry.instance, entry.name, entry.source, entry.time_ms):
            self._bad(row.seq, "its columns differ from its text")
            return
        if self._oldest is None:
            self._oldest, self.first = row, row.seq
            if row.seq == 1:
                self._follows(row, START)
        elif digest(self.last.hash, row.body) != row.hash:
            self._bad(row.seq, "its hash does not fit")
        if self.bad_seq is None:
            self.last = Mark(row.seq, row.hash)
            self._learn(entry)

    def _follows(self, oldest: Stored, before: Mark) -> None:
        self._before = before
        if digest(before.hash, oldest.body) != oldest.hash:
            self._bad(oldest.seq, "its hash does not fit")

    def _learn(self, entry: Entry) -> None:
        """Takes from an entry of the registry's own what the rest of the check needs."""
        if entry.by != REGISTRY:
            return
        if entry.kind == CUT:
            gone = _gone(entry)
            if gone is None or not self._cut.seq < gone.seq < entry.seq:
                self._bad(entry.seq, "it records a cut that cannot be")
                return
            self._cut = gone
            if gone.seq == self.first - 1 and self._oldest is not None:
                self._follows(self._oldest, gone)
        recorded = entry.facts.get(RECORD)
        if entry.instance is not None and isinstance(recorded, str):
            if recorded:
                self.records[entry.instance] = recorded
            else:
                self.records.pop(entry.instance, None)

    def _bad(self, seq: int, problem: str) -> None:
        self.bad_seq, self.problem = seq, f"event {seq}: {problem}"


def _gone(entry: Entry) -> Mark | None:
    seq, text = entry.facts.get("last_seq"), entry.facts.get("last_hash")
    if type(seq) is not int or not isinstance(text, str) or not re.fullmatch("[0-9a-f]{64}", text):
        return None
    return Mark(seq, bytes.fromhex(text))


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _no_float(text: str) -> Any:
    raise ValueError(f"{text} is not an integer")


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
