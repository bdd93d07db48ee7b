"""The data disk is judged by its own bytes, and never formatted."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_box.guest import disk, system

MKFS = "/sbin/mkfs.ext4"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What was mounted and run; the device is a file."""
    made: list[Any] = []
    image = tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    monkeypatch.setattr(system, "drive", lambda name: str(image) if name == "data" else None)
    monkeypatch.setattr(system, "device_bytes", lambda path: os.stat(path).st_size)
    monkeypatch.setattr(system, "mount", lambda *words: made.append(words))
    monkeypatch.setattr(disk, "_run", lambda *words, accept=(0,): made.append(words))
    monkeypatch.setattr(disk, "ROOT", str(tmp_path / "root"))
    monkeypatch.setattr(disk, "DATA", str(tmp_path / "data"))
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=16384, f_frsize=4096))
    monkeypatch.setattr(os, "chown", lambda *_, **__: None)
    return made


def told() -> tuple[str, int, str]:
    found = disk.prepare()
    return found.state, found.bytes, found.text


def format_it(tmp_path: Path) -> Path:
    subprocess.run([MKFS, "-q", "-F", str(tmp_path / "disk")], check=True)
    return tmp_path / "disk"


def test_a_good_one_is_mounted_without_a_check(calls: list[Any], tmp_path: Path) -> None:
    format_it(tmp_path)
    assert told() == ("ok", 64 << 20, "")
    assert calls[0][2] == "ext4" and calls[0][3] & system.MS_NODEV
    assert not any("e2fsck" in str(call) or "resize2fs" in str(call) for call in calls)


def test_one_with_errors_is_checked_first(calls: list[Any], tmp_path: Path) -> None:
    image = format_it(tmp_path)
    with image.open("r+b") as file:
        file.seek(1024 + 0x3A)
        file.write(b"\x02\x00")
    assert disk.prepare().state == "ok"
    assert calls[0] == ("/sbin/e2fsck", "-p", str(image))


def test_what_is_no_ext4_is_left_as_it_is(calls: list[Any], tmp_path: Path) -> None:
    before = (tmp_path / "disk").read_bytes()
    found = disk.prepare()
    assert (found.state, found.text) == ("damaged", "data disk: it holds no ext4 file system")
    assert calls == []
    assert (tmp_path / "disk").read_bytes() == before


def test_one_that_was_cut_off_says_so_and_is_left_as_it_is(
    calls: list[Any], tmp_path: Path
) -> None:
    for options in ([], ["-O", "64bit"]):
        image = tmp_path / "disk"
        os.truncate(image, 64 << 20)
        subprocess.run([MKFS, "-q", "-F", *options, str(image)], check=True)
        os.truncate(image, 40 << 20)
        state, size, text = told()
        assert (state, size) == ("damaged", 40 << 20)
        assert text == (
            f"data disk: its file system has {64 << 20} bytes, and the disk only {40 << 20}: "
            "it was cut off"
        )
    assert calls == []


def test_a_short_one_is_damaged(calls: list[Any], tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(b"x" * 1100)
    assert disk.prepare().state == "damaged"


def test_none_is_absent(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "drive", lambda _: None)
    assert told() == ("absent", 0, "the machine has no data disk")


def test_a_mount_that_fails_is_damage(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    format_it(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(117, "mount: Structure needs cleaning")

    monkeypatch.setattr(system, "mount", fail)
    assert disk.prepare().state == "damaged"


def test_a_check_that_does_not_end_is_damage(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(disk, "CHECK_S", 0.1)
    with pytest.raises(OSError, match="sleep did not end in 0.1 s"):
        disk._run("/bin/sleep", "60")
    monkeypatch.undo()
    with pytest.raises(OSError, match="false: exit status 1"):
        disk._run("/bin/false")
    disk._run("/bin/false", accept=(1,))


def test_a_larger_one_is_grown(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    image = format_it(tmp_path)
    with image.open("r+b") as file:
        file.truncate(200 << 20)
    assert told() == ("ok", 200 << 20, "")
    assert ("/sbin/resize2fs", str(image)) in calls

    def fail(*words: str, accept: tuple[int, ...] = (0,)) -> None:
        raise OSError("resize2fs: no room")

    monkeypatch.setattr(disk, "_run", fail)
    found = disk.prepare()
    assert found.state == "ok" and "cannot be grown" in found.text


def test_links_of_the_agents_are_not_followed(calls: list[Any], tmp_path: Path) -> None:
    format_it(tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    root = tmp_path / "root"
    (root / "home" / "agent").mkdir(parents=True)
    os.symlink(outside, root / "tmp")
    os.symlink("/nowhere", root / "home" / "agent" / "work")
    assert disk.prepare().state == "ok"
    assert not (root / "tmp").is_symlink()
    assert os.readlink(root / "home" / "agent" / "work") == "/nowhere"
    assert list(outside.iterdir()) == []


def test_the_home_is_made_once(calls: list[Any], tmp_path: Path) -> None:
    format_it(tmp_path)
    (tmp_path / "root" / "home").mkdir(parents=True)
    assert disk.prepare().state == "ok"
    assert (tmp_path / "root" / "home" / "agent" / "work").is_dir()
