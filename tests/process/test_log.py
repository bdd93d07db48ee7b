from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from agent_box.process.log import FRAMES_MAX, TEXT_MAX, Log
from agent_box.process.secret import MASK, Secret


class Lines(list[dict[str, Any]]):
    def __call__(self, line: bytes) -> None:
        assert line.endswith(b"\n") and line.count(b"\n") == 1
        self.append(json.loads(line))


@pytest.fixture
def lines() -> Lines:
    return Lines()


def test_a_line_has_its_fields(lines: Lines) -> None:
    Log(lines, service="store").bind(part="seal").info("opened", rows=3, locked=False, why=None)
    (line,) = lines
    assert len(line.pop("timestamp")) == len("2026-01-01T00:00:00.000Z")
    assert line == {
        "level": "info",
        "service": "store",
        "part": "seal",
        "event": "opened",
        "rows": 3,
        "locked": False,
        "why": None,
    }


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_the_level_is_the_methods_name(lines: Lines, level: str) -> None:
    getattr(Log(lines), level)("event")
    assert lines[0]["level"] == level


def test_an_error_has_an_id_that_the_caller_gets(lines: Lines) -> None:
    log = Log(lines)
    first, second = log.error("broken"), log.error("broken")
    assert [line["id"] for line in lines] == [first, second]
    assert first != second


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (b"canary", "<6 bytes>"),
        (bytearray(b"canary"), "<6 bytes>"),
        (memoryview(b"canary"), "<6 bytes>"),
        ({"k": b"canary", b"canary": 1}, {"k": "<6 bytes>", "<6 bytes>": 1}),
        ([[b"canary"]], [["<6 bytes>"]]),
        ([[[[b"canary"]]]], [[["<1 items>"]]]),
        (Secret(b"canary"), MASK),
        ({"deep": [Secret(b"canary")]}, {"deep": [MASK]}),
        ("x" * (TEXT_MAX + 1), "x" * TEXT_MAX + "..."),
        (list(range(1000)), list(range(64))),
        (1.5, 1.5),
    ],
)
def test_values_are_bounded_and_bytes_are_not_shown(
    lines: Lines, value: object, shown: object
) -> None:
    Log(lines).info("event", value=value)
    assert lines[0]["value"] == shown
    assert "canary" not in json.dumps(lines)


@pytest.mark.parametrize("text", ["a\nb", "\x1b[2J", "\u2028", "\ud800", "\x00"])
def test_nothing_that_a_peer_says_forges_a_line(text: str) -> None:
    raw: list[bytes] = []
    Log(raw.append).info(text, value=text)
    (line,) = raw
    assert line.count(b"\n") == 1
    assert all(32 <= byte < 127 for byte in line[:-1])


def fail(depth: int) -> None:
    secret_local = "canary"
    if depth:
        fail(depth - 1)
    raise ValueError(len(secret_local))


def test_an_exception_says_what_and_where_and_no_local(lines: Lines) -> None:
    try:
        try:
            fail(2)
        except ValueError as error:
            raise RuntimeError("wrapped") from error
    except RuntimeError as error:
        Log(lines).error("broken", error=error)
    told = lines[0]["error"]
    assert (told["type"], told["message"]) == ("builtins.RuntimeError", "wrapped")
    assert told["because"]["message"] == "6"
    assert [frame.split()[-1] for frame in told["because"]["at"]][-3:] == ["fail"] * 3
    assert "canary" not in json.dumps(lines)


def test_a_deep_traceback_is_cut(lines: Lines) -> None:
    try:
        fail(200)
    except ValueError as error:
        Log(lines).error("broken", error=error)
    assert len(lines[0]["error"]["at"]) == FRAMES_MAX


def test_bytes_in_an_exception_are_not_shown(lines: Lines) -> None:
    log = Log(lines)
    for work in (lambda: b"canary\xff".decode(), lambda: {}[b"canary"], lambda: int(b"canary")):
        try:
            work()
        except (UnicodeError, KeyError, ValueError) as error:
            log.error("broken", error=error)
    shown = json.dumps(lines[:2])
    assert "canary" not in shown
    assert lines[0]["error"]["message"] == "invalid start byte"


def test_a_group_tells_its_parts(lines: Lines) -> None:
    Log(lines).error("broken", error=ExceptionGroup("two", [ValueError("a"), KeyError("b")]))
    assert [part["message"] for part in lines[0]["error"]["parts"]] == ["a", "'b'"]


PROGRAM = """
import logging, os, sys, threading
from agent_box.process.log import Log, install
from agent_box.process.secret import Secret
install(Log(service="x"))
secret = Secret(b"canary")
{}
"""


def run(body: str) -> tuple[int, list[dict[str, Any]]]:
    ran = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM.format(body)],
        capture_output=True,
        check=False,
        text=True,
    )
    assert ran.stdout == ""
    return ran.returncode, [json.loads(line) for line in ran.stderr.splitlines()]


@pytest.mark.parametrize(
    ("body", "code", "event", "message"),
    [
        ("raise ValueError(secret)", 1, "uncaught exception", MASK),
        (
            "t = threading.Thread(target=lambda: [][secret.reveal()[0]]); t.start(); t.join()",
            0,
            "uncaught exception",
            "list index out of range",
        ),
        (
            "class A:\n  def __del__(self): raise ValueError('late', secret)\nA()",
            0,
            "uncaught exception in a destructor",
            f"('late', {MASK})",
        ),
        ("logging.getLogger('lib').error('it %s', secret)", 0, f"it {MASK}", None),
        ("logging.getLogger('lib').warning('it %s', secret)", 0, f"it {MASK}", None),
        ("import warnings; logging.captureWarnings(True)\nwarnings.warn('old')", 0, None, None),
        (
            "logging.getLogger('lib').error('it %d', 'x')",
            0,
            "a log call that cannot be formatted",
            None,
        ),
    ],
)
def test_what_python_would_print_is_a_line(
    body: str, code: int, event: str | None, message: str | None
) -> None:
    status, lines = run(body)
    assert status == code
    (line,) = lines
    assert line["service"] == "x"
    if event is not None:
        assert line["event"] == event
    if message is not None:
        assert line["error"]["message"] == message


def test_what_libraries_whisper_is_not_written() -> None:
    assert run("logging.getLogger('lib').info('it')") == (0, [])


def test_an_interrupt_is_not_a_defect() -> None:
    status, lines = run("raise KeyboardInterrupt")
    assert [line["event"] for line in lines] == ["interrupted"]
    assert status != 0


def test_a_long_line_goes_through_a_pipe_whole() -> None:
    body = (
        "os.set_blocking(2, True)\n"
        "from agent_box.process.log import to_stderr\n"
        "to_stderr(b'\"' + b'x' * 300_000 + b'\"\\n')"
    )
    assert run(body) == (0, ["x" * 300_000])


def test_it_does_not_load_what_it_does_not_need() -> None:
    """structlog costs a process some 60 ms and 5 MB, asyncio and logging less, but too much."""
    ran = subprocess.run(
        [
            *(sys.executable, "-I", "-c"),
            "import sys; before = set(sys.modules); import agent_box.process.log as l, "
            "agent_box.process.secret; l.Log().error('e', error=ValueError()); "
            "print({'structlog', 'logging', 'asyncio', 'rich'} & (set(sys.modules) - before))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "set()\n"
