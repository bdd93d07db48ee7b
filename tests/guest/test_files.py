"""Files of the host in the agent's home: where they may go, and which the agent may keep."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from agent_box.guest import disk, files


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(disk, "HOME", str(tmp_path))
    return tmp_path


def item(
    path: object, content: str = "new", mode: int = 0o640, *, yields: bool = False
) -> dict[str, Any]:
    return {"path": str(path), "mode": mode, "content": content, "yields": yields}


def test_files_replace_what_lies_there(home: Path) -> None:
    elsewhere = home / "elsewhere"
    elsewhere.write_text("old")
    os.symlink(elsewhere, home / "link")
    os.mkfifo(home / "pipe")
    os.mkfifo(home / "pipe.new")
    os.symlink(elsewhere, home / "link.new")
    files.write(
        [item(home / n) for n in ("link", "pipe", "a/b/c")] + [item(home / "set", mode=0o4755)]
    )
    assert elsewhere.read_text() == "old"
    for name in ("link", "pipe", "a/b/c"):
        assert (home / name).read_text() == "new" and not (home / name).is_symlink()
        assert (home / name).stat().st_mode & 0o7777 == 0o640
    assert (home / "set").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize("path", ["/etc/passwd", "{}", "{}/../x", "x", "", "{}x/y", "{}/a/../../x"])
def test_no_file_is_written_elsewhere(home: Path, path: str) -> None:
    with pytest.raises(OSError, match="is not below"):
        files.write([item(path.format(home))])


def test_what_the_agent_changed_is_left_and_the_rest_is_kept_up(home: Path) -> None:
    mine, ours, always = home / ".tool/mine", home / ".tool/ours", home / "always"

    def given(version: str) -> None:
        files.write(
            [item(mine, version, yields=True), item(ours, version, yields=True)]
            + [item(always, version)]
        )

    given("1")
    mine.write_text("of the agent")
    always.write_text("of the agent")
    for version in ("2", "3"):
        given(version)
        assert mine.read_text() == "of the agent"
        assert ours.read_text() == always.read_text() == version
    mine.unlink()  # it wants ours again
    given("4")
    given("5")
    assert mine.read_text() == ours.read_text() == "5"


@pytest.mark.parametrize("kind", ["file", "link", "pipe", "directory", "long"])
def test_what_lay_there_before_us_is_left(home: Path, kind: str) -> None:
    path = home / "config"
    if kind == "file":
        path.write_text("before")
    elif kind == "link":
        path.symlink_to("nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_bytes(bytes((1 << 20) + 1))
    before = path.lstat()
    for _ in range(2):
        files.write([item(path, yields=True)])
    assert (path.lstat().st_ino, path.lstat().st_size) == (before.st_ino, before.st_size)


@pytest.mark.parametrize("noted", ["", "{", "[]", "[" * 100000, '{"x": 1}', "\udc80"])
def test_notes_that_the_agent_spoiled_are_none(home: Path, noted: str) -> None:
    path = home / "config"
    files.write([item(path, "1", yields=True)])
    (home / files.NOTED).write_bytes(noted.encode(errors="surrogateescape"))
    files.write([item(path, "2", yields=True)])
    assert path.read_text() == "1"
    assert json.loads((home / files.NOTED).read_text()) == {}
