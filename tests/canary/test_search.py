"""The search itself: it finds a canary that was planted, in every form and at every place.

A search that finds nothing proves something only if it would have found something.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from support.canary import Canary

PLANTED: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda v: v,
    "within": lambda v: b"x" * 70_000 + v + b"y",
    "its beginning": lambda v: v[:14],
    "its end": lambda v: v[-14:],
    "hex": lambda v: v.hex().encode(),
    "HEX": lambda v: v.hex().upper().encode(),
    "base64": base64.b64encode,
    "base64, one byte before": lambda v: base64.b64encode(b":" + v),
    "base64, two bytes before": lambda v: base64.b64encode(b"u:" + v),
    "base64, between others": lambda v: base64.b64encode(b"user:" + v + b"\nnext"),
    "base64 for URLs": lambda v: base64.urlsafe_b64encode(b"me:" + v),
    "base64, no padding": lambda v: base64.b64encode(b"user:" + v).rstrip(b"="),
    "percent": lambda v: quote(v).encode(),
    "percent, nothing safe": lambda v: quote(v, safe="").encode(),
    "percent, all": lambda v: "".join(f"%{b:02X}" for b in v).encode(),
    "JSON": lambda v: json.dumps({"v": v.decode()}).encode(),
    "JSON, not ASCII": lambda v: json.dumps({"v": v.decode()}, ensure_ascii=False).encode(),
    "repr": lambda v: repr({"value": v}).encode(),
    "repr of text": lambda v: repr(v.decode()).encode(),
    "UTF-16": lambda v: v.decode().encode("utf-16"),
    "numbers": lambda v: str(list(v)).encode(),
    "an exception": lambda v: f"ValueError: bad value {v!r}".encode(),
}


@pytest.mark.parametrize("form", PLANTED)
def test_a_planted_canary_is_found(tmp_path: Path, form: str) -> None:
    canary = Canary()
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "log").write_bytes(b"before " + PLANTED[form](canary.value))
    (tmp_path / "clean").write_bytes(PLANTED[form](Canary().value))
    found = canary.in_files([tmp_path])
    assert {f.where for f in found} == {str(tmp_path / "deep" / "er" / "log")}


def test_any_alignment_and_neighbourhood_in_base64_is_found() -> None:
    for _ in range(20):
        canary = Canary()
        for before in range(7):
            for after in range(4):
                encoded = base64.b64encode(b"b" * before + canary.value + b"a" * after)
                assert canary.within(encoded), (before, after)


def test_a_name_of_a_file_is_looked_at(tmp_path: Path) -> None:
    canary = Canary(b"canary-without-a-slash-in-it")
    (tmp_path / f"x{canary.value.decode()}").touch()
    assert canary.in_files([tmp_path])


@pytest.mark.parametrize("where", ["cmdline", "environ"])
def test_a_process_that_shows_it_is_found(where: str) -> None:
    canary = Canary()
    assert canary.in_processes() == []
    text = canary.value.decode()
    script = "print(flush=True); import sys; sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", script, *([text] if where == "cmdline" else [])],
        env={"TOKEN": text} if where == "environ" else {},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    found = canary.in_processes()
    process.communicate()
    assert {f.where for f in found} == {f"/proc/{process.pid}/{where}"}


def test_two_canaries_are_not_confused() -> None:
    one, other = Canary(), Canary()
    assert not one.within(other.value)
    assert all(one.within(form) for form in one.forms.values())
