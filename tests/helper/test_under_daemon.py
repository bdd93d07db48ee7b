"""The helper as the daemon runs it: it comes and goes, and machines stay."""

from __future__ import annotations

import hashlib
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import procs, tinykernel
from support.helperhouse import Client, fresh
from support.live import Live
from support.until import until

MIB = 1 << 20


class Machine:
    """One that was started through the daemon's helper, with the engine's key."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self.name, self.launch = fresh(), fresh()
        blobs = live.paths.images / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        profile: dict[str, Any] = {"engine": "qemu", "accel": "tcg", "cpus": 1, "memory_mib": 64}
        profile["harness"] = None
        for part in ("kernel", "initramfs", "variant", "guest"):
            data = tinykernel.kernel() if part == "kernel" else part.encode() * 1000
            profile[part] = hashlib.sha256(data).hexdigest()
            (blobs / profile[part]).write_bytes(data)
        with self.client() as client:
            client.ask("allocate", id=self.name, disk_bytes=64 * MIB)
            client.ask("launch", id=self.name, launch_id=self.launch, profile=profile)
        self.pid = self.state()["vmm"]["pid"]

    def client(self) -> Client:
        key = bytes.fromhex(self._live.paths.helper_key.read_text().strip())
        return Client(self._live.paths.helper_sock, key)

    def state(self) -> dict[str, Any]:
        with self.client() as client:
            (found,) = client.ask("list", after=None)["instances"]
        assert isinstance(found, dict)
        return found

    def same(self) -> bool:
        """It runs as it did, with a shim."""
        try:
            state = self.state()
        except OSError:
            return False
        assert state["vmm"] is not None
        return bool(state["vmm"]["pid"] == self.pid and state["shim"])

    def end(self) -> None:
        with self.client() as client:
            client.ask("kill", id=self.name, launch_id=self.launch)
            client.ask("release", id=self.name)


@pytest.fixture
def live() -> Iterator[Live]:
    made = Live()
    made.up()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def machine(live: Live) -> Iterator[Machine]:
    made = Machine(live)
    try:
        yield made
    finally:
        live.up()
        until("the helper serves", made.same)
        made.end()


def test_it_is_shown_with_the_services_and_only_it_and_the_engine_know_the_key(
    live: Live,
) -> None:
    row = live.service("helper")
    assert (row["state"], row["ready"], row["epoch"]) == ("running", True, None)
    assert [row["pid"]] == live.inner("helper")
    key = live.paths.helper_key
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert len(bytes.fromhex(key.read_text().strip())) == 32
    assert "serves" in live.run("service", "logs", "helper").out
    # It stands behind no wall, and is no service that one could look into.
    assert os.readlink(f"/proc/{row['pid']}/ns/user") == os.readlink("/proc/self/ns/user")
    assert live.run("service", "inspect", "helper").exit == 64


def test_a_restart_of_the_helper_leaves_the_machine(live: Live, machine: Machine) -> None:
    before = live.service("helper")["pid"]
    (row,) = live.run("service", "restart", "helper", "--json").result["services"]
    assert row["name"] == "helper"
    assert machine.same()
    assert live.service("helper")["pid"] != before


def test_a_killed_helper_comes_back_and_finds_the_machine(live: Live, machine: Machine) -> None:
    os.kill(live.service("helper")["pid"], signal.SIGKILL)
    until("it is back", machine.same)
    until("it is counted", lambda: live.service("helper")["restarts"] == 1)


def test_a_killed_daemon_takes_the_helper_with_it_and_not_the_machine(
    live: Live, machine: Machine
) -> None:
    helper = live.service("helper")["pid"]
    os.kill(live.daemon_pid(), signal.SIGKILL)
    until("the helper is gone", lambda: procs.state(helper) in "XZ", seconds=10)
    assert procs.state(machine.pid) not in "XZ"
    live.up()
    until("it is found again", machine.same)


def test_a_daemon_that_is_stopped_leaves_the_machine(live: Live, machine: Machine) -> None:
    key = live.paths.helper_key.read_text()
    assert live.run("daemon", "--stop").exit == 0
    assert procs.state(machine.pid) not in "XZ"
    assert not live.paths.helper_sock.is_socket() or not live.inner("helper")
    live.up()
    until("it is found again", machine.same)
    assert live.paths.helper_key.read_text() == key


def test_with_the_system_helper_none_is_started() -> None:
    other = Live()
    try:
        config = Path(other.env["HOME"]) / ".config" / "agent-box"
        config.mkdir(parents=True, mode=0o700)
        (config / "config.toml").write_text('version = 1\n[engine]\nhelper = "system"\n')
        rows = other.services()
        assert "helper" not in rows
        assert other.inner("helper") == []
    finally:
        other.close()
