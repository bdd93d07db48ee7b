"""A log never grows beyond its size, and tells truly which bytes it still has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from agent_box.helper.capped import Shape, Writer, read

SMALL = Shape("log", 10, 16)


@contextmanager
def directory() -> Iterator[int]:
    with TemporaryDirectory() as path:
        fd = os.open(path, os.O_RDONLY)
        try:
            yield fd
        finally:
            os.close(fd)


def everything(fd: int) -> tuple[dict[int, int], int]:
    """Each byte that is kept by its offset, read a few at a time; and the end."""
    found: dict[int, int] = {}
    offset = 0
    while True:
        start, end, data = read(fd, SMALL, offset, 7)
        assert offset <= start <= end
        if not data:
            assert start == end
            return found, end
        found.update(enumerate(data, start))
        offset = start + len(data)


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_the_first_and_the_last_bytes_are_there_and_no_others(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    with directory() as fd:
        writer = Writer(fd, SMALL)
        for part in parts:
            writer.write(part)
        writer.close()
        found, end = everything(fd)
        assert end == len(whole)
        assert all(whole[at] == byte for at, byte in found.items())
        assert set(range(min(10, end))) <= set(found)
        assert set(range(max(0, end - 16), end)) <= set(found)
        size = sum(os.stat(name, dir_fd=fd).st_size for name in os.listdir(fd))
        assert size <= 10 + 2 * 16


@given(st.integers(0, 400), st.integers(0, 200))
def test_any_offset_may_be_asked_for(offset: int, size: int) -> None:
    with directory() as fd:
        writer = Writer(fd, SMALL)
        writer.write(bytes(range(200))[:size])
        writer.close()
        start, end, data = read(fd, SMALL, offset, 100)
        assert end == size
        assert start >= min(offset, end)
        assert data == bytes(range(200))[start : start + len(data)]


def test_a_new_one_forgets_the_old(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    first = Writer(fd, SMALL)
    first.write(b"x" * 60)
    first.close()
    (tmp_path / "logs").write_text("another's")
    second = Writer(fd, SMALL)
    second.write(b"new")
    second.close()
    assert read(fd, SMALL, 0, 100) == (0, 3, b"new")
    assert sorted(os.listdir(tmp_path)) == ["log.0", "logs"]
    os.close(fd)


def test_one_that_is_continued_goes_on_where_it_ended(tmp_path: Path) -> None:
    for before in (0, 5, 10, 20, 26, 40, 58, 70):
        with directory() as fd:
            data = bytes(range(100))
            first = Writer(fd, SMALL)
            first.write(data[:before])
            first.close()
            second = Writer(fd, SMALL, anew=False)
            second.write(data[before:])
            second.close()
            found, end = everything(fd)
            assert end == 100 and all(data[at] == byte for at, byte in found.items())


def test_what_cannot_be_written_is_let_go_and_counted(tmp_path: Path) -> None:
    inner = tmp_path / "gone"
    inner.mkdir()
    fd = os.open(inner, os.O_RDONLY)
    writer = Writer(fd, SMALL)
    inner.rmdir()
    writer.write(b"x" * 100)
    assert writer.lost == 100
    writer.close()
    os.close(fd)


def test_links_that_lie_there_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    inner = tmp_path / "inner"
    inner.mkdir()
    fd = os.open(inner, os.O_RDONLY)
    writer = Writer(fd, SMALL)
    (inner / "log.0").symlink_to(victim)
    writer.write(b"evil")
    writer.close()
    assert victim.read_text() == "kept"
    assert writer.lost == 4
    os.close(fd)
