"""The voice of a verb: shapes, streams, and nothing that could drive a terminal."""

from __future__ import annotations

import io
import json
import os
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.cli.render import (
    Failure,
    ReaderGone,
    Render,
    clean,
    clean_lines,
    size_text,
    table,
    time_text,
)

ANY = st.text(st.characters(codec=None, exclude_categories=()), max_size=60)


def voice(*, json: bool) -> tuple[Render, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return Render("verb", json=json, stdout=out, stderr=err), out, err


def objects(out: io.StringIO) -> list[Any]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def harmless(text: str) -> bool:
    """No control character, format character, surrogate or separator but a line feed."""
    return all(
        unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
        for c in text
        if c not in "\n\t"
    )


# ------------------------------------------------------------------------- masking


@pytest.mark.parametrize(
    ("untrusted", "shown"),
    [
        ("plain", "plain"),
        ("emoji 👍 漢字 é", "emoji 👍 漢字 é"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nb\rc\td", "a\\x0ab\\x0dc\\x09d"),
        ("\x7f\x9b", "\\x7f\\x9b"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\u2028", "\\u2028"),
        ("\ud800", "\\ud800"),
        ("\U000e0001", "\\U000e0001"),
    ],
)
def test_what_is_not_printable_is_shown_as_its_escape(untrusted: str, shown: str) -> None:
    assert clean(untrusted) == shown


@given(ANY)
def test_masked_text_is_one_harmless_line(untrusted: str) -> None:
    assert harmless(clean(untrusted))
    assert "\n" not in clean(untrusted)
    assert "\t" not in clean(untrusted)
    assert clean_lines(untrusted).count("\n") == untrusted.count("\n")
    assert harmless(clean_lines(untrusted))


@given(ANY, ANY, st.booleans())
def test_nothing_that_is_said_can_drive_a_terminal(one: str, two: str, json: bool) -> None:
    for say in (
        lambda out: out.result({"a": one, "b": [two]}, f"{one}\n{two}"),
        lambda out: out.error(1, "kind", one, text=two, fact=two),
        lambda out: out.item("line", {"a": one}, two),
        lambda out: out.progress(one),
        lambda out: out.warning(one),
        lambda out: out.text(one),
    ):
        out, stdout, stderr = voice(json=json)
        say(out)
        for text in (stdout.getvalue(), stderr.getvalue()):
            assert harmless(text)
            if json:
                assert text.isascii() or text == stderr.getvalue()


@given(ANY)
def test_an_error_is_one_line_whatever_it_says(message: str) -> None:
    out, _, stderr = voice(json=False)
    out.error(1, "kind", message)
    assert stderr.getvalue().count("\n") == 1
    assert stderr.getvalue().startswith("agent-box: ")


@given(st.lists(st.tuples(ANY, ANY), max_size=5))
def test_a_cell_cannot_forge_a_row(rows: list[tuple[str, str]]) -> None:
    assert len(table(("A", "B"), rows).split("\n")) == len(rows) + 1


def test_a_table_is_aligned() -> None:
    text = table(("NAME", "STATE"), [("a", "running"), ("longer", 3)])
    assert text == "NAME    STATE\na       running\nlonger  3"


# -------------------------------------------------------------------------- shapes


def test_a_result() -> None:
    out, stdout, stderr = voice(json=True)
    out.result({"name": "web1"}, "web1 created")
    assert objects(stdout) == [
        {"schema": 1, "verb": "verb", "ok": True, "result": {"name": "web1"}}
    ]
    assert stderr.getvalue() == ""
    assert out.exit == 0


def test_a_result_for_people() -> None:
    out, stdout, _ = voice(json=False)
    out.result({"name": "web1"}, "web1 created\nsecond line")
    assert stdout.getvalue() == "web1 created\nsecond line\n"


def test_a_result_without_words() -> None:
    out, stdout, _ = voice(json=False)
    out.result({"name": "web1"})
    assert stdout.getvalue() == ""


def test_an_error() -> None:
    """The very example of the specification."""
    out, stdout, stderr = voice(json=True)
    out.verb = "pause"
    out.error(4, "wrong-state", "web1 is stopped; pause needs running", state="stopped")
    assert stdout.getvalue() == (
        '{"schema": 1, "verb": "pause", "ok": false, "error": {"exit": 4, "kind": "wrong-state", '
        '"message": "web1 is stopped; pause needs running", "state": "stopped"}}\n'
    )
    assert stderr.getvalue() == "agent-box: web1 is stopped; pause needs running\n"
    assert out.exit == 4


def test_an_error_for_people_may_have_an_answer() -> None:
    out, stdout, stderr = voice(json=False)
    out.error(1, "denied", "example.com is denied", text="deny mode:deny")
    assert stdout.getvalue() == "deny mode:deny\n"
    assert stderr.getvalue() == "agent-box: example.com is denied\n"


def test_a_stream() -> None:
    out, stdout, _ = voice(json=True)
    out.item("event", {"seq": 1}, "1")
    out.item("event", {"seq": 2})
    out.end()
    assert objects(stdout) == [
        {"type": "event", "seq": 1},
        {"type": "event", "seq": 2},
        {"type": "end", "ok": True, "exit": 0},
    ]


def test_a_stream_for_people() -> None:
    out, stdout, _ = voice(json=False)
    out.item("event", {"seq": 1}, "one")
    out.item("event", {"seq": 2})
    out.item("event", {"seq": 3}, "")
    out.end()
    assert stdout.getvalue() == "one\n\n"


def test_a_stream_that_fails_ends_as_a_stream() -> None:
    out, stdout, stderr = voice(json=True)
    out.item("event", {"seq": 1})
    out.error(14, "connection-lost", "the registry is gone")
    assert objects(stdout)[-1] == {
        "type": "end",
        "ok": False,
        "exit": 14,
        "error": {"exit": 14, "kind": "connection-lost", "message": "the registry is gone"},
    }
    assert stderr.getvalue() == "agent-box: the registry is gone\n"


def test_a_stream_is_shown_as_it_comes() -> None:
    """Each line is flushed: a reader of a pipe must not wait for the next one."""
    read, write = os.pipe()
    with open(write, "w") as stdout, open(read, "rb", buffering=0) as reader:
        out = Render("v", json=True, stdout=stdout, stderr=None)
        out.item("event", {})
        assert reader.read(100) == b'{"type": "event"}\n'


@pytest.mark.parametrize("second", ["result", "error", "end"])
def test_there_is_one_answer(second: str) -> None:
    out, _, _ = voice(json=True)
    out.result({})
    with pytest.raises(RuntimeError, match="answered twice|gave no answer"):
        {
            "result": lambda: out.result({}),
            "error": lambda: out.error(1, "k", "m"),
            "end": out.end,
        }[second]()


def test_numbers_that_are_none_are_refused() -> None:
    out, _, _ = voice(json=True)
    with pytest.raises(ValueError, match="JSON"):
        out.result({"x": float("nan")})


def test_progress_is_for_people_and_never_on_stdout() -> None:
    for as_json in (True, False):
        out, stdout, stderr = voice(json=as_json)
        out.progress("building ...")
        out.warning("slow")
        assert stdout.getvalue() == ""
        assert stderr.getvalue() == "building ...\nagent-box: warning: slow\n"


# ------------------------------------------------------------------- broken outputs


def test_a_reader_that_is_gone() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stdout:
        out = Render("v", json=False, stdout=stdout, stderr=io.StringIO())
        with pytest.raises(ReaderGone):
            out.result({}, "x")
        stdout.write("more")  # goes nowhere, and so does the flush when it is closed


def test_a_full_disk() -> None:
    with open("/dev/full", "w") as stdout:
        out = Render("v", json=False, stdout=stdout, stderr=io.StringIO())
        with pytest.raises(Failure, match="stdout: No space left on device") as caught:
            out.result({}, "x")
        assert caught.value.exit == 1


def test_without_stderr_nothing_is_lost_but_words() -> None:
    stdout = io.StringIO()
    out = Render("v", json=True, stdout=stdout, stderr=None)
    out.error(3, "not-found", "gone")
    assert objects(stdout)[0]["error"]["exit"] == 3
    with open("/dev/full", "w") as full:
        out = Render("v", json=True, stdout=io.StringIO(), stderr=full)
        out.progress("one")
        out.error(3, "not-found", "gone")
        assert out.exit == 3


# --------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (1_795_986_245_123, "2026-11-29T21:04:05.123Z"),
        (253_402_300_799_999, "9999-12-31T23:59:59.999Z"),
    ],
)
def test_times_are_rfc_3339(ms: int, text: str) -> None:
    assert time_text(ms) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(8 << 30, "8G"), (512 << 20, "512M"), (1025 << 20, "1025M"), (5, "5B"), (0, "0B")],
)
def test_sizes_are_shown_as_they_are_written(size: int, text: str) -> None:
    assert size_text(size) == text
