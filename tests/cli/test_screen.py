"""What of a guest's output reaches a terminal: the policy, cut at every byte."""

from __future__ import annotations

import random
import re

import pytest

from agent_box.cli.screen import STRING_MAX, Screen

PASS = [
    b"plain\r\n\ttext \x07\x08",
    "emoji \U0001f9d1‍\U0001f4bb, 漢字, é".encode(),
    b"\x1b[1;38;5;208m\x1b[48:2::1:2:3m\x1b[0m",
    b"\x1b[2J\x1b[H\x1b[10;20H\x1b[?25l\x1b[?25h\x1b[3 q\x1b[5A\x1b[K\x1b[1;5r\x1b[4h\x1b[4l",
    b"\x1b[?1049h\x1b[?1049l\x1b[?2004h\x1b[?1;1000;1006h\x1b[?2026h",
    b"\x1b7\x1b8\x1b=\x1b>\x1bM\x1bD\x1bE\x1bH\x1bc\x1b(0\x1b(B\x1b)0\x1b#8",
    b"\x1b]0;a title\x07\x1b]2;a title\x1b\\\x1b]1;x\x07\x1b[22;0t\x1b[23;0t\x1bka title\x1b\\",
    b"\x1b]8;;https://example.com/\x1b\\link\x1b]8;;\x1b\\\x1b]133;A\x07",
    b"\x1b]4;1;rgb:00/00/00\x07\x1b]10;?\x07\x1b]11;?\x1b\\\x1b]104\x07\x1b]110\x1b\\",
    b"\x1b[c\x1b[>c\x1b[=c\x1b[5n\x1b[6n\x1b[?6n\x1b[18t\x1b[14t\x1b[>q\x1b[?2026$p\x1b[!p",
    b"\x1bP$qm\x1b\\\x1bP$q q\x1b\\",
    b"\x1b[>1u\x1b[<u\x1b[=1;1u\x1b[?u\x1b[>4;2m\x1b[>4m",
]
DROP = [
    b"\x1b]52;c;aGVsbG8=\x07",
    b"\x1b]52;c;?\x1b\\",
    b"\x1b]7;file://host/tmp\x07",
    b"\x1b]9;hello\x07\x1b]777;notify;a;b\x07\x1b]99;;x\x1b\\",
    b"\x1b]1337;File=name=eA==:AAAA\x07\x1b]50;?\x07\x1b]3;X=1\x07",
    b"\x1bPtmux;\x1b\x1b]52;c;aGVsbG8=\x07\x1b\\"[:6] + b"\x1b\\",
    b"\x1bP+q544e\x1b\\",
    b"\x1bP0;0|17/61\x1b\\",
    b"\x1bPq#0;2;0;0;0~~\x1b\\",
    b"\x1b_Gf=100,t=f;L2V0Yy9wYXNzd2Q=\x1b\\\x1b^pm\x1b\\\x1bXsos\x1b\\",
    b"\x1b[21t\x1b[20t\x1b[3;0;0t\x1b[8;10;10t\x1b[2t\x1b[5i\x1b[?5i",
    b"\x1b[1;1;1;1;1;1*y\x1b[?1;2s\x1b[?9999h",
    b"\x05\xc2\x9b31m"[:1] + b"\xc2\x9b\xc2\x9d\xc2\x90",
    b"\x1b]52;c;" + b"A" * (STRING_MAX * 2) + b"\x07",
    b"\x1b\\",
]


def shown(data: bytes, size: int) -> bytes:
    screen = Screen()
    return b"".join(screen.feed(data[i : i + size]) for i in range(0, len(data), size))


@pytest.mark.parametrize("data", PASS, ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3, 1 << 20])
def test_what_passes_passes_whole(data: bytes, size: int) -> None:
    assert shown(data, size) == data
    assert shown(b"a" + data * 3 + b"z", size) == b"a" + data * 3 + b"z"


@pytest.mark.parametrize("data", PASS, ids=repr)
def test_cut_anywhere_it_passes_whole(data: bytes) -> None:
    for cut in range(len(data)):
        screen = Screen()
        assert screen.feed(data[:cut]) + screen.feed(data[cut:] + b"z") == data + b"z"


@pytest.mark.parametrize("data", DROP, ids=lambda d: repr(d[:40]))
@pytest.mark.parametrize("size", [1, 2, 3, 1 << 20])
def test_what_does_not_pass_is_dropped_whole(data: bytes, size: int) -> None:
    assert shown(b"a" + data + b"z", size) == b"az"


def test_the_clipboard_cannot_be_reached_through_another_sequence() -> None:
    inner = b"\x1b]52;c;aGVsbG8=\x07"
    for before in (
        b"\x1b",
        b"\x1b[",
        b"\x1b[1;",
        b"\x1b]0;title",
        b"\x1b]8;;",
        b"\x1bP",
        b"\x1bPtmux;\x1b",
        b"\x1bP$q",
        b"\x1b_",
        b"\x1bX",
        b"\x1bk",
        b"\x1b(",
        b"\xf0\x9f",
        b"\xc2",
        b"\x18",
    ):
        for data in (before + inner, before + inner + b"\x1b\\"):
            for size in (1, 1000):
                assert b"52;c" not in shown(data + b"z", size), (before, size)


def test_malformed_sequences_are_text_without_their_escape() -> None:
    assert shown(b"\x1b[3\n1mz", 1) == b"[3\n1mz"
    assert shown(b"\x1b\x1b[1mz", 1000) == b"\x1b[1mz"
    assert shown(b"\x1b%@z", 1000) == b"%@z"
    long = b"[" + b"1;" * 300 + b"m"
    assert shown(b"\x1b" + long, 1) == shown(b"\x1b" + long, 1000) == long


def test_bytes_that_are_not_utf_8_are_shown_as_such() -> None:
    assert shown(b"a\xff\x9b31mz", 1).decode() == "a��31mz"


def test_a_string_that_never_ends_takes_no_memory() -> None:
    screen = Screen()
    for _ in range(1000):
        assert screen.feed(b"\x1b]0;" + b"x" * 10_000) == b""
        assert len(screen._rest) <= STRING_MAX + 64
    assert screen.feed(b"\x18z") == b"z"


def test_nothing_but_vetted_sequences_ever_comes_out() -> None:
    """Noise made of pieces of sequences: each escape in the output begins a whole one."""
    dice = random.Random(4)
    pieces = [d[i : i + 3] for d in (*PASS, *DROP[:-3]) for i in range(0, min(len(d), 60), 3)]
    whole = re.compile(
        rb"\x1b(?:\[[<-?]?[0-9:;]*[ -/]*[@-~]|[78=>DEHMc]|[()*+][0-9A-Za-z<=>]|#[3-68]"
        rb"|\][^\x00-\x1f\x7f]*(?:\x07|\x1b\\)|[Pk][^\x00-\x1f\x7f]*\x1b\\)"
    )
    for _ in range(3_000):
        data = b"".join(dice.choices(pieces, k=dice.randint(1, 30)))
        out = shown(data, dice.randint(1, 9))
        left = whole.sub(b"", out)
        assert b"\x1b" not in left, (data, out)
        for bad in (b"]52;", b"P+q", b"tmux", b"]1337", b"\x05"):
            assert b"\x1b" + bad not in out
        assert b"\xc2\x9b" not in out


def test_modes_that_are_on_are_undone_and_no_others() -> None:
    screen = Screen()
    assert screen.reset() == b""
    screen.feed(b"\x1b[?1049h\x1b[?1;1000;1006;2004h\x1b[?25l\x1b[?7l\x1b=\x1b[4h\x1b[2 q\x1b(0")
    screen.feed(b"\x1b[>1u\x1b[>4;2m\x1b]11;#000\x07\x1b[3;5r\x1b[?1000l")
    undone = screen.reset()
    for expected in (
        b"\x1b[?1l",
        b"\x1b[?1006l",
        b"\x1b[?2004l",
        b"\x1b[?25h",
        b"\x1b[?7h",
        b"\x1b[4l",
        b"\x1b>",
        b"\x1b[<1u",
        b"\x1b[>4m",
        b"\x1b(B",
        b"\x1b[r",
        b"\x1b[?1049l",
        b"\x1b[0 q",
        b"\x1b]111\x1b\\",
    ):
        assert expected in undone, expected
    assert b"1000" not in undone
    assert screen.reset() == b""


def test_questions_are_counted() -> None:
    screen = Screen()
    screen.feed(b"text\x1b[1m")
    assert screen.asked == 0
    for number, question in enumerate((b"\x1b[c", b"\x1b[6n", b"\x1b]11;?\x07", b"\x1b[?u"), 1):
        screen.feed(question)
        assert screen.asked == number


def test_a_quiet_one_drops_questions_and_nothing_else() -> None:
    questions = [b"\x1b[c", b"\x1b[>c", b"\x1b[6n", b"\x1b]11;?\x07", b"\x1b[?u", b"\x1b[18t"]
    questions += [b"\x1b[>q", b"\x1b[?2026$p", b"\x1bP$qm\x1b\\", b"\x1b]4;1;?\x1b\\"]
    others = b"text\x1b[1m\x1b[?1049h\x1b]11;red\x07\x1b[>1u\x1b[22;0;0t"
    screen = Screen(quiet=True)
    assert screen.feed(b"".join(questions) + others) == others.removesuffix(b"\x1b[22;0;0t")
    assert screen.asked == 0
    screen.quiet = False
    for number, question in enumerate(questions, 1):
        assert screen.feed(question) == question
        assert screen.asked == number
