"""What is written down survives what it must, and says no more than is true."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.helper import procs, record
from agent_box.helper.procs import Proc
from agent_box.helper.record import Record

LAUNCH = "ab" * 16


@pytest.fixture
def directories(tmp_path: Path) -> Iterator[tuple[int, int]]:
    fds = []
    for name in ("state", "room"):
        (tmp_path / name).mkdir()
        fds.append(os.open(tmp_path / name, os.O_RDONLY))
    yield fds[0], fds[1]
    for fd in fds:
        os.close(fd)


def made(**more: object) -> Record:
    found = Record(LAUNCH, "running", procs.boot_id(), {"shim": procs.find(os.getpid())})
    return found._replace(**more)  # type: ignore[arg-type]


def test_it_is_read_as_it_was_written(directories: tuple[int, int]) -> None:
    ended = {"code": None, "signal": 9, "by": "kill", "at_ms": 5}
    wrote = made(state="exited", exit=ended, error=None, restarts=3).change()
    assert record.write(directories, wrote) == []
    found = record.read(directories)
    assert found is not None
    assert found._replace(procs={}) == wrote._replace(procs={})
    assert found.procs["shim"] == procs.find(os.getpid())
    assert found.lives("shim")
    assert not found.lives("vmm")


def test_the_newer_copy_counts(directories: tuple[int, int]) -> None:
    old = made()
    record.write(directories, old)
    record.write(directories[1:], old.change(state="exited"))
    assert record.read(directories).state == "exited"  # type: ignore[union-attr]
    assert record.read(directories[:1]).state == "running"  # type: ignore[union-attr]


def test_a_copy_of_this_run_of_the_host_counts_before_any_older(
    directories: tuple[int, int],
) -> None:
    record.write(directories[:1], made(boot_id="before", serial=900))
    record.write(directories[1:], made(serial=1))
    assert record.read(directories).serial == 1  # type: ignore[union-attr]


def test_nothing_of_another_run_of_the_host_lives(directories: tuple[int, int]) -> None:
    found = made(boot_id="before")
    assert not found.lives("shim")
    assert found.end(1)  # and so this process is still here


def test_a_number_that_another_process_has_now_is_not_it() -> None:
    me = procs.find(os.getpid())
    assert me is not None
    assert procs.alive(me)
    assert not procs.alive(Proc(me.pid, me.start + 1))
    assert procs.handle(Proc(me.pid, me.start + 1)) is None


def test_one_that_is_dead_but_not_reaped_is_dead() -> None:
    child = subprocess.Popen(["/usr/bin/sleep", "60"])
    found = procs.find(child.pid)
    assert found is not None
    assert procs.end([found, None], 10)
    assert Path(f"/proc/{child.pid}").exists()  # a zombie
    assert not procs.alive(found)
    assert procs.handle(found) is None
    child.wait()


def test_one_that_is_stopped_lives() -> None:
    child = subprocess.Popen(["/usr/bin/sleep", "60"])
    child.send_signal(19)
    found = procs.find(child.pid)
    assert procs.alive(found)
    assert procs.end([found], 10)
    child.wait()


def test_a_removed_directory_is_no_error(tmp_path: Path, directories: tuple[int, int]) -> None:
    (tmp_path / "state").rmdir()
    assert record.write(directories, made()) == []
    assert record.read(directories) is not None


@given(st.binary(max_size=200))
def test_a_spoiled_copy_is_none(data: bytes) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as path:
        Path(path, record.FILE).write_bytes(data)
        fd = os.open(path, os.O_RDONLY)
        assert record.read([fd]) is None
        os.close(fd)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path, directories: tuple[int, int]) -> None:
    record.write(directories[1:], made())
    (tmp_path / "state" / record.FILE).symlink_to(tmp_path / "room" / record.FILE)
    assert record.read(directories[:1]) is None
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "state" / f".{record.FILE}").symlink_to(victim)
    assert record.write(directories[:1], made())
    assert victim.read_text() == "kept"
