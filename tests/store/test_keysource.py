"""The launcher: what it hands in before each start, and that it always becomes the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.creds import stand_in
from support.stores import Box, protect

from agent_box.process.secret import Secret
from agent_box.store import keepers
from agent_box.store.contract import Protection

KEY = bytes(range(0xC0, 0xE0))

# What is started in place of the confined store: tells what it was given.
REPORT = """
import json, os, sys
from agent_box.store.handing import take
handed = take()
print(json.dumps({
    "key": None if handed.key is None else handed.key.reveal().hex(),
    "problem": handed.problem,
    "argv": open("/proc/self/cmdline").read(),
    "environ": open("/proc/self/environ").read(),
    "descriptors": sorted(int(n) for n in os.listdir("/proc/self/fd")),
    "pid": os.getpid(),
    "alarm": int(__import__("signal").alarm(0)),
}))
"""


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path / "store")


@pytest.fixture
def creds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    stand_in(directory)
    return directory


def keep(box: Box, protection: Protection) -> None:
    blob = keepers.creds_encrypt(Secret(KEY)) if protection == "systemd-creds" else b""
    with box.opened() as store:
        secret = None if protection == "key-file" else KEY
        protect(store, protection, secret, key="ab" * 16, blob=blob)


def launched(box: Box) -> dict[str, Any]:
    command = [
        *(sys.executable, "-I", "-B", "-m", "agent_box.store.keysource"),
        *("--keys", str(box.keys), "--", sys.executable, "-I", "-B", "-c", REPORT),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert err == b""
    report: dict[str, Any] = json.loads(out)
    assert report["pid"] == process.pid, "it becomes the command, and is not its parent"
    assert report["alarm"] == 0
    return report


def test_a_key_kept_by_systemd_creds_reaches_the_store_and_nothing_else(
    box: Box, creds: Path
) -> None:
    keep(box, "systemd-creds")
    report = launched(box)
    assert report["key"] == KEY.hex()
    assert KEY.hex() not in report["argv"] + report["environ"]
    assert max(report["descriptors"]) < 10, "the pipe is closed when it was read"


@pytest.mark.usefixtures("creds")
@pytest.mark.parametrize("protection", ["key-file", "passphrase"])
def test_for_other_protections_nothing_is_handed_in(box: Box, protection: Protection) -> None:
    keep(box, protection)
    report = launched(box)
    assert report["key"] is None
    assert "without its launcher" in report["problem"]


def test_a_key_that_cannot_be_had_is_a_reason(box: Box, creds: Path) -> None:
    keep(box, "systemd-creds")
    stand_in(creds, body="echo no TPM >&2; exit 1")
    assert launched(box)["problem"] == "systemd-creds decrypt failed: no TPM"
    stand_in(creds, version="systemd 252 (252.38-1~deb12u1)")
    assert "systemd 256" in launched(box)["problem"]


def test_a_keyring_that_is_not_there_is_a_reason(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the package is missing or finds no session bus."""
    monkeypatch.delenv("DBUS_SESSION_BUS_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nonexistent")
    keep(box, "keyring")
    report = launched(box)
    assert report["key"] is None
    assert "keyring" in report["problem"]


def test_without_a_store_or_with_a_damaged_one_it_only_becomes_the_command(box: Box) -> None:
    assert "without its launcher" in launched(box)["problem"]
    keep(box, "passphrase")
    os.truncate(box.keys / "custody.json", 20)
    assert "without its launcher" in launched(box)["problem"]


@pytest.mark.parametrize("words", [[], ["--keys"], ["--keys", "/x", "--"], ["a", "b", "c", "d"]])
def test_what_is_not_its_command_line_is_refused(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-m", "agent_box.store.keysource", *words],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    assert b"--keys DIR -- COMMAND" in done.stderr
