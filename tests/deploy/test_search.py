"""The quickstart's search finds what is there, and only that."""

from __future__ import annotations

import base64
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from support.source import ROOT

SECRET = b"sk-demo-0123456789abcdef"


@pytest.fixture(scope="module")
def search() -> Any:
    spec = importlib.util.spec_from_file_location("search", ROOT / "deploy/search.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("before", range(3))
def test_a_credential_is_found_in_base64_wherever_it_begins(search: Any, before: int) -> None:
    text = base64.b64encode(b"x" * before + SECRET + b"yz")
    assert search.holds(iter([text]), search.forms(SECRET)) is not None
    other = base64.b64encode(b"x" * before + SECRET[::-1] + b"yz")
    assert search.holds(iter([other]), search.forms(SECRET)) is None


def test_a_credential_is_found_over_the_border_of_two_pieces(search: Any) -> None:
    whole = b"a" * 50 + SECRET + b"b" * 50
    for cut in range(len(whole)):
        for further in (cut, cut + 1, cut + 7):
            pieces = [whole[:cut], whole[cut:further], whole[further:]]
            assert search.holds(iter(pieces), [SECRET]) == SECRET
    assert search.holds(iter([b"", b""]), [SECRET]) is None


def test_a_file_is_read_without_its_holes(search: Any, tmp_path: Path) -> None:
    file = tmp_path / "disk"
    with file.open("wb") as opened:
        opened.seek(1 << 30)
        opened.write(SECRET)
        opened.truncate(2 << 30)
    pieces = list(search.written(file))
    assert SECRET in b"".join(pieces)
    assert sum(map(len, pieces)) <= search.PIECE
    assert list(search.written(Path(os.devnull))) == []


def test_memory_is_looked_into(search: Any) -> None:
    held = bytearray(SECRET)
    assert search.holds(search.memory(os.getpid()), [bytes(held)]) == SECRET
