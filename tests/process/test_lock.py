from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.until import until

from agent_box.process import lock
from agent_box.process.lock import Held, Holder

HOLD = """
import sys
from pathlib import Path
from agent_box.process import lock
held = lock.acquire(Path(sys.argv[1]), config=Path("/c/config.toml"), version="9")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "daemon.lock"


@contextmanager
def holding(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the lock until it is killed or its stdin ends."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process


def test_the_holder_is_named(path: Path) -> None:
    with holding(path) as process:
        who = Holder(process.pid, "/c/config.toml", "9")
        assert lock.holder(path) == who
        with pytest.raises(Held, match=f"held by pid {process.pid}, config /c/config.toml") as held:
            lock.acquire(path, config=None, version="1")
        assert held.value.holder == who
    assert lock.holder(path) is None


def test_nobody_holds_what_is_not_there(path: Path) -> None:
    assert lock.holder(path) is None
    assert not path.exists()


def test_a_killed_holder_holds_nothing_and_what_it_wrote_is_not_believed(path: Path) -> None:
    with holding(path) as process:
        process.kill()
    assert json.loads(path.read_bytes())["pid"] == process.pid
    assert lock.holder(path) is None
    mine = lock.acquire(path, config=None, version="1")
    assert lock.holder(path) == Holder(os.getpid(), None, "1")
    mine.release()


def test_asking_takes_no_lock(path: Path) -> None:
    """A daemon that starts while somebody asks must not fail."""
    with holding(path) as process:
        process.send_signal(signal.SIGSTOP)
        assert lock.holder(path) is not None
        process.send_signal(signal.SIGCONT)
    before = Path("/proc/locks").read_text().count("FLOCK")
    descriptor = os.open(path, os.O_RDONLY)
    assert lock.holder(path) is None
    assert Path("/proc/locks").read_text().count("FLOCK") == before
    os.close(descriptor)


def test_only_one_of_many_gets_it(path: Path) -> None:
    program = HOLD.replace("print(", "import os; os.set_blocking(0, True)\nprint(")
    command = [sys.executable, "-c", program, str(path)]
    started = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        for _ in range(6)
    ]

    def ended() -> bool:
        return sum(p.poll() is not None for p in started) == 5

    until("five of six gave up", ended)
    (winner,) = (p for p in started if p.poll() is None)
    assert lock.holder(path) == Holder(winner.pid, "/c/config.toml", "9")
    winner.communicate()
    for process in started:
        process.communicate()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"pid": 1, "config": "/evil", "version": "x"}',
        b'{"pid": "1"}',
        b"\xff" * 10000,
    ],
)
def test_what_the_holder_did_not_write_is_not_believed(path: Path, content: bytes) -> None:
    held = lock.acquire(path, config=Path("/c"), version="1")
    path.write_bytes(content)
    assert lock.holder(path) == Holder(os.getpid(), None, None)
    held.release()


def test_members_of_a_wrong_type_are_left_out(path: Path) -> None:
    held = lock.acquire(path, config=Path("/c"), version="1")
    path.write_bytes(json.dumps({"pid": os.getpid(), "config": 3, "version": []}).encode())
    assert lock.holder(path) == Holder(os.getpid(), None, None)
    held.release()


def test_the_file_stays_and_is_private(path: Path) -> None:
    os.umask(0)
    held = lock.acquire(path, config=None, version="1")
    held.release()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_lock_on_a_removed_file_is_not_the_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, taken = lock.fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        real(descriptor, operation)
        if not taken:
            path.unlink()  # between the open and the flock, as far as we can see
        taken.append(descriptor)

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    held = lock.acquire(path, config=None, version="1")
    assert len(taken) == 2
    assert os.path.samestat(os.fstat(held.fileno()), path.stat())
    held.release()


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    for use in (lambda: lock.acquire(path, config=None, version="1"), lambda: lock.holder(path)):
        with pytest.raises(OSError) as raised:
            use()
        assert raised.value.errno == errno.ELOOP
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_is_told_and_nothing_stays_locked() -> None:
    full = Path("/dev/full")
    with pytest.raises(OSError) as raised:
        lock.acquire(full, config=None, version="1")
    assert raised.value.errno in (errno.ENOSPC, errno.EINVAL)  # by the write, or by ftruncate
    assert lock.holder(full) is None


def test_a_child_that_inherits_it_keeps_it_held(path: Path) -> None:
    held = lock.acquire(path, config=None, version="1")
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[held.fileno()])
    held.release()
    assert lock.holder(path) is not None
    child.communicate()
    assert lock.holder(path) is None
