"""The way of a key through the wall."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from agent_box.process.secret import Secret
from agent_box.store import handing
from agent_box.store.handing import Handed, pipe_with, take


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handing.DESCRIPTOR)


def test_a_key_goes_through_and_the_pipe_is_empty_and_closed_after() -> None:
    descriptor = pipe_with(Handed(Secret(b"k" * 32), None))
    other = os.dup(descriptor)  # as any process in between may have inherited it
    handed = take(descriptor)
    assert handed.key is not None
    assert handed.key.reveal() == b"k" * 32
    assert handed.problem is None
    assert os.read(other, 100) == b""
    os.close(other)


def test_it_is_inherited_by_the_program_that_is_started() -> None:
    descriptor = pipe_with(Handed(Secret(b"k" * 32), None))
    text = "from agent_box.store.handing import take; print(take().key.reveal() == b'k' * 32)"
    command = [sys.executable, "-I", "-c", text]
    done = subprocess.run(command, pass_fds=[descriptor], capture_output=True, check=True)
    assert done.stdout == b"True\n"
    os.close(descriptor)


def test_a_reason_goes_through() -> None:
    handed = take(pipe_with(Handed(None, "no keyring answers")))
    assert handed == Handed(None, "no keyring answers")


def test_a_long_reason_is_cut_and_control_characters_are_masked() -> None:
    handed = take(pipe_with(Handed(None, "\x1b[31m\n" + "x" * 5000)))
    assert handed.key is None
    assert handed.problem is not None
    assert handed.problem.startswith("?[31m?xxx")
    assert 500 < len(handed.problem) <= 1024


def test_without_a_launcher_there_is_a_reason() -> None:
    assert "without its launcher" in str(take().problem)


def test_a_file_is_not_read() -> None:
    file = os.open("/dev/null", os.O_RDONLY)
    os.dup2(file, handing.DESCRIPTOR)
    os.close(file)
    assert "not the launcher's pipe" in str(take().problem)
    os.close(handing.DESCRIPTOR)


@pytest.mark.parametrize(
    "message", [b"", b"K", b"K" + b"k" * 31, b"K" + b"k" * 33, b"X" * 40, b"K" * 2000]
)
def test_what_is_no_message_gives_no_key(message: bytes) -> None:
    ours, theirs = os.pipe()
    os.write(theirs, message)
    os.close(theirs)
    handed = take(ours)
    assert handed.key is None
    assert "not a key" in str(handed.problem)
