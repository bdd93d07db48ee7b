"""Files by their sha256: whole or not there, and what a killed run left goes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from pathlib import Path

import pytest
from support import images

from agent_box.engine.image import blobs
from agent_box.process.paths import Paths, PathsError


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    made = Paths(tmp_path / "run", tmp_path / "state")
    blobs.make(made)
    return made


def test_a_blob_is_named_by_its_digest_and_closed_to_writing(paths: Paths) -> None:
    with blobs.workshop(paths.images / "work") as work:
        part = blobs.add_bytes(paths, work, b"content")
    assert part == blobs.Part(hashlib.sha256(b"content").hexdigest(), 7)
    file = paths.blob(part.sha256)
    assert file.read_bytes() == b"content"
    assert stat.S_IMODE(file.stat().st_mode) == 0o444
    assert list(blobs.held(paths)) == [part.sha256]


def test_the_same_again_is_the_same(paths: Paths) -> None:
    with blobs.workshop(paths.images / "work") as work:
        assert blobs.add_bytes(paths, work, b"a") == blobs.add_bytes(paths, work, b"a")
    assert len(list(blobs.held(paths))) == 1


def test_everything_is_private(paths: Paths) -> None:
    for directory, _, _ in os.walk(paths.state):
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700


def test_a_directory_open_to_others_is_refused(paths: Paths) -> None:
    (paths.images / "manifests").chmod(0o755)
    with pytest.raises(PathsError, match="open to others"):
        blobs.make(paths)


def test_a_file_that_is_no_blob_is_not_listed(paths: Paths) -> None:
    (paths.images / "blobs" / "sha256" / "notes").write_text("x")
    assert list(blobs.held(paths)) == []


def test_a_link_is_not_followed(paths: Paths, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic links"):
        blobs.hash_file(tmp_path / "link")


@pytest.mark.parametrize("word", ["", "a" * 63, "A" * 64, "g" * 64, "../" + "a" * 61, "a" * 65])
def test_what_is_no_digest_never_becomes_a_path(word: str) -> None:
    with pytest.raises(ValueError, match="sha256"):
        blobs.digest(word)


def test_a_full_disk_leaves_no_final_name(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with blobs.workshop(paths.images / "work") as work, pytest.raises(OSError, match="No space"):
        blobs.add_bytes(paths, work, b"content")
    assert list(blobs.held(paths)) == []
    with pytest.raises(OSError, match="No space"):
        blobs.write_atomic(paths.images / "manifests" / "base", b"x")
    assert os.listdir(paths.images / "manifests") == []


def test_a_small_file_is_replaced_at_once(paths: Paths) -> None:
    file = paths.images / "manifests" / "base"
    blobs.write_atomic(file, b"one")
    inode = file.stat().st_ino
    blobs.write_atomic(file, b"two", 0o444)
    assert file.read_bytes() == b"two"
    assert file.stat().st_ino != inode
    assert os.listdir(file.parent) == ["base"]


def test_a_workshop_is_gone_afterwards(paths: Paths) -> None:
    above = paths.images / "work"
    with blobs.workshop(above, 0o711) as work:
        assert stat.S_IMODE(work.stat().st_mode) == 0o711
        (work / "deep" / "tree").mkdir(parents=True)
    assert os.listdir(above) == []
    with pytest.raises(KeyError), blobs.workshop(above):
        raise KeyError
    assert os.listdir(above) == []


def test_what_a_killed_run_left_goes_and_what_a_live_one_holds_stays(paths: Paths) -> None:
    above = paths.images / "work"
    left, live = above / "agent-box-work-left", above / "agent-box-work-live"
    for directory in (left, live):
        (directory / "tree").mkdir(parents=True)
    holder = os.open(live, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with blobs.workshop(above):
            assert not left.exists()
            assert live.exists()
    finally:
        os.close(holder)


def test_only_one_publishes_at_a_time_and_many_may_rely(paths: Paths) -> None:
    with blobs.locked(paths, shared=True), blobs.locked(paths, shared=True):
        other = os.open(paths.images / "lock", os.O_RDWR)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(other)
    with blobs.locked(paths):
        other = os.open(paths.images / "lock", os.O_RDWR)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(other)


def test_a_flipped_bit_changes_the_digest(paths: Paths) -> None:
    part = images.plant(paths).variant
    images.flip(paths.blob(part.sha256))
    assert blobs.hash_file(paths.blob(part.sha256)) != part
