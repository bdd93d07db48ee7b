"""Private files: refused unless they are exactly that; replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.stores import custody

from agent_box.store import files
from agent_box.store.files import FileRefused, KeyDirectory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.mkdir(mode=0o700)
    return path


def test_a_private_file_is_read(directory: Path) -> None:
    files.write_private(directory / "f", b"content")
    assert files.read_private(directory / "f", 7) == b"content"
    assert (directory / "f").stat().st_mode & 0o7777 == 0o600
    assert [p.name for p in directory.iterdir()] == ["f"]


def test_a_private_file_has_its_mode_under_any_umask(directory: Path) -> None:
    old = os.umask(0)
    try:
        files.write_private(directory / "f", b"")
    finally:
        os.umask(old)
    assert (directory / "f").stat().st_mode & 0o7777 == 0o600


def test_a_file_that_is_missing_is_told_apart(directory: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.read_private(directory / "f", 7)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o601, 0o660])
def test_a_file_that_others_may_touch_is_refused_and_left_as_it_is(
    directory: Path, mode: int
) -> None:
    path = directory / "f"
    files.write_private(path, b"content")
    path.chmod(mode)
    with pytest.raises(FileRefused, match=f"f has mode {mode:04o}.*chmod 600"):
        files.read_private(path, 7)
    assert path.stat().st_mode & 0o7777 == mode


def test_links_directories_and_pipes_are_refused(directory: Path) -> None:
    files.write_private(directory / "f", b"content")
    (directory / "link").symlink_to("f")
    (directory / "dir").mkdir(mode=0o700)
    os.mkfifo(directory / "fifo", 0o600)
    for name in ("link", "dir", "fifo"):
        with pytest.raises(FileRefused, match=name):
            files.read_private(directory / name, 7)


def test_a_file_that_is_too_large_is_refused(directory: Path) -> None:
    files.write_private(directory / "f", b"content!")
    with pytest.raises(FileRefused, match="larger than 7 bytes"):
        files.read_private(directory / "f", 7)


def test_a_file_that_cannot_be_read_is_refused(directory: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    files.write_private(directory / "f", b"content")
    (directory / "f").chmod(0)
    with pytest.raises(FileRefused, match="Permission denied"):
        files.read_private(directory / "f", 7)


def test_a_file_of_somebody_else_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_private(directory / "f", b"content")
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(FileRefused, match=r"f belongs to uid \d+, not to uid 4242"):
        files.read_private(directory / "f", 7)
    with pytest.raises(FileRefused, match="belongs to uid"):
        files.check_directory(directory)


def test_a_directory_that_others_may_enter_is_refused(directory: Path) -> None:
    files.check_directory(directory)
    directory.chmod(0o750)
    with pytest.raises(FileRefused, match="has mode 0750.*chmod 700"):
        files.check_directory(directory)
    with pytest.raises(FileRefused, match="not a directory"):
        files.check_directory(Path("/dev/null"))
    with pytest.raises(FileRefused, match="No such file"):
        files.check_directory(directory / "none")


def test_a_leftover_does_not_stop_a_write(directory: Path) -> None:
    (directory / "f.new").write_bytes(b"half of somethi")
    files.write_private(directory / "f", b"content")
    assert files.read_private(directory / "f", 7) == b"content"


def test_custody_is_none_only_when_there_is_no_file(directory: Path) -> None:
    keys = KeyDirectory(directory)
    assert keys.custody() is None
    keys.replace(custody())
    assert keys.custody() == custody()
    keys.custody_path.write_bytes(custody().encode()[:100])
    with pytest.raises(FileRefused, match=r"custody\.json is damaged: it is not JSON"):
        keys.custody()


def test_the_way_to_a_new_key_can_be_cut_off_anywhere(directory: Path) -> None:
    keys, key = KeyDirectory(directory), b"k" * 32
    name = custody().key
    with pytest.raises(FileRefused, match=r"the key file .*key is missing"):
        keys.key(name)
    keys.begin_key(name, key)
    assert not keys.has_keys()  # nothing names it yet
    assert keys.key(name) == key  # named by a custody file: the last step is done now
    assert keys.has_keys()
    assert keys.key_path(name).read_bytes() == key
    assert [p.name for p in directory.iterdir()] == [f"master-{name}.key"]


@pytest.mark.parametrize("size", [0, 31])
def test_a_key_file_that_is_torn_is_refused(directory: Path, size: int) -> None:
    keys = KeyDirectory(directory)
    files.write_private(keys.key_path("00" * 16), b"k" * size)
    with pytest.raises(FileRefused, match=f"damaged: it has {size} bytes"):
        keys.key("00" * 16)


def test_tidying_leaves_the_one_key_that_counts(directory: Path) -> None:
    keys = KeyDirectory(directory)
    for name in ("00" * 16, "11" * 16, custody().key):
        files.write_private(keys.key_path(name), b"k" * 32)
    keys.begin_key("22" * 16, b"k" * 32)
    files.write_private(directory / "curve.secret", b"not ours to tidy")
    keys.tidy(custody("key-file"))
    assert sorted(p.name for p in directory.iterdir()) == [
        "curve.secret",
        f"master-{custody().key}.key",
    ]
    keys.tidy(custody("passphrase"))
    assert sorted(p.name for p in directory.iterdir()) == ["curve.secret"]
