"""Remove each prerequisite in turn: doctor names it, and still makes the report."""

from __future__ import annotations

import ctypes.util
import inspect
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.live import Live
from support.until import until

from agent_box.cli import doctor, gaps, images, probes
from agent_box.helper import probe as helper_probe
from agent_box.process import confine, linux, lock
from agent_box.process.paths import SERVICES

KEYS = [
    *("agent-box", "config", "account", "host", "virtualization", "engine", "accel", "helper"),
    *("jail", "seccomp", "landlock", "cgroup", "thp", "isolation", "guest-kernel", "image"),
    *("disk", "swap", "egress", "credentials", "forgery", "daemon"),
    *(f"service-{name}" for name in SERVICES),
    "instances",
]
TCG = '[engine]\naccel = "tcg"\n'


@dataclass
class Result:
    exit: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)

    @property
    def text(self) -> dict[str, str]:
        """The report, by key."""
        return dict(line.split(": ", 1) for line in self.stdout.splitlines())

    @property
    def gaps(self) -> list[str]:
        last = self.stdout.splitlines()[-1]
        assert last.startswith("gaps: ")
        return [] if last == "gaps: none" else last.removeprefix("gaps: ").split(", ")


@dataclass
class Host:
    """An operator's environment, and a host from which things can be taken away."""

    home: Path
    runtime: Path
    bin: Path
    env: dict[str, str] = field(default_factory=dict)
    wrapper: list[str] = field(default_factory=list)

    def doctor(self, *args: str) -> Result:
        done = subprocess.run(
            [
                *self.wrapper,
                sys.executable,
                "-I",
                "-B",
                "-m",
                "agent_box.cli.main",
                "doctor",
                *args,
            ],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "Traceback" not in done.stderr
        return Result(done.returncode, done.stdout, done.stderr)

    def config(self, text: str) -> Path:
        file = self.home / ".config" / "agent-box" / "config.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("version = 1\n" + text)
        return file

    def without(self, *options: str | Path) -> None:
        """Runs doctor behind a mount namespace of the test's own."""
        self.wrapper = ["bwrap", "--dev-bind", "/", "/", *map(str, options), "--"]

    def hide(self, *files: str | Path) -> None:
        self.without(*(word for file in files for word in ("--ro-bind", "/dev/null", file)))

    def program(self, name: str, script: str) -> None:
        file = self.bin / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def qemu(
        self, *, devices: str = "vhost-user-vsock-device options:", machine: str = "cat"
    ) -> None:
        """A QEMU that says what the real one does, as far as doctor asks."""
        self.program(
            "qemu-system-x86_64",
            'case "$*" in\n'
            '--version) echo "QEMU emulator version 9.9.9" ;;\n'
            f"*,help) echo '{devices}' ;;\n"
            f"*) {machine} ;;\n"
            "esac",
        )


@pytest.fixture
def host() -> Iterator[Host]:
    top = Path(tempfile.mkdtemp(prefix="ab."))  # short: sockets lie below it
    made = Host(top / "home", top / "run", top / "bin")
    made.home.mkdir(mode=0o700)
    made.runtime.mkdir(mode=0o700)
    made.bin.mkdir()
    made.env = {
        "HOME": str(made.home),
        "XDG_RUNTIME_DIR": str(made.runtime),
        "PATH": f"{made.bin}:/usr/bin:/bin",
        "LANG": "C.UTF-8",
    }
    made.qemu()
    made.config(TCG)
    yield made
    shutil.rmtree(top)


def test_every_line_is_there_and_the_last_names_the_gaps(host: Host) -> None:
    result = host.doctor()
    assert result.exit == 0
    assert [line.split(": ")[0] for line in result.stdout.splitlines()] == [*KEYS, "gaps"]
    assert result.gaps == []  # without a daemon the helper is not expected
    assert result.stderr == ""


def test_json_says_the_same_with_its_evidence(host: Host) -> None:
    answer = host.doctor("--json").json
    assert {key: answer[key] for key in ("schema", "verb", "ok")} == {
        "schema": 1,
        "verb": "doctor",
        "ok": True,
    }
    result = answer["result"]
    assert set(result) == {"lines", "gaps", "notes"}
    assert [line["key"] for line in result["lines"]] == KEYS
    for line in result["lines"]:
        assert set(line) == {"key", "value", "status", "name", "evidence"}
        assert line["status"] in ("ok", "gap", "note")
        assert (line["name"] is None) == (line["status"] == "ok")
        assert line["value"] and line["evidence"]
    named = [line["name"] for line in result["lines"] if line["status"] == "gap"]
    assert result["gaps"] == named
    assert result["notes"] == ["image-not-pulled", *result["notes"][1:]]


def test_strict_holds_nothing_against_a_host_whose_daemon_does_not_run(host: Host) -> None:
    result = host.doctor("--strict")
    assert (result.exit, result.stderr) == (0, "")
    assert result.text["helper"].startswith("user mode; not running, because the daemon is not")


def test_strict_exits_1_with_gaps_and_still_tells_all(host: Host) -> None:
    host.config("")
    result = host.doctor("--strict")
    assert result.exit == 1
    assert result.text.keys() == {*KEYS, "gaps"}
    assert result.stderr == "agent-box: 1 gap: engine-accel\n"
    error = host.doctor("--strict", "--json").json["error"]
    assert (error["exit"], error["kind"], error["gaps"]) == (1, "gaps", ["engine-accel"])
    assert [line["key"] for line in error["lines"]] == KEYS


def test_it_starts_and_leaves_nothing(host: Host) -> None:
    before = sorted(host.home.rglob("*"))
    result = host.doctor()
    assert result.text["daemon"].startswith("not running")
    assert sorted(host.home.rglob("*")) == before
    assert list(host.runtime.iterdir()) == []


# ----------------------------------------------------------------- configuration and places


def test_an_invalid_config_is_a_gap_that_names_the_key(host: Host) -> None:
    host.config("[daemon]\nlgo = 1\n")
    result = host.doctor()
    assert result.exit == 0
    assert "lgo" in result.text["config"]
    assert "config-invalid" in result.gaps


def test_no_config_is_not_a_gap(host: Host) -> None:
    shutil.rmtree(host.home / ".config")
    result = host.doctor()
    assert result.text["config"] == "none"
    assert result.text["accel"].endswith("[gap engine-accel]")  # nobody has chosen
    assert "`agent-box setup`" in result.text["accel"]


def test_a_named_config_that_is_missing_ends_it(host: Host) -> None:
    host.env["AGENT_BOX_CONFIG"] = str(host.home / "absent.toml")
    result = host.doctor()
    assert (result.exit, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "absent.toml" in result.stderr


@pytest.mark.parametrize("directory", [None, "", "relative", "/nonexistent"])
def test_no_runtime_directory_is_a_gap(host: Host, directory: str | None) -> None:
    del host.env["XDG_RUNTIME_DIR"]
    if directory is not None:
        host.env["XDG_RUNTIME_DIR"] = directory
    result = host.doctor()
    assert result.exit == 0
    assert result.gaps == ["runtime-dir-missing"]
    assert result.text["helper"] == "user mode; unknown: there is no runtime directory"
    assert result.text["daemon"].endswith("[gap runtime-dir-missing]")


def test_a_runtime_directory_open_to_others_is_a_gap(host: Host) -> None:
    host.runtime.chmod(0o755)
    assert "runtime-dir-missing" in host.doctor().gaps


def test_a_state_directory_that_cannot_be_written_is_a_gap(host: Host) -> None:
    state = host.home / "state" / "agent-box"
    state.mkdir(parents=True)
    host.env["XDG_STATE_HOME"] = str(state.parent)
    state.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        result = host.doctor()
    finally:
        state.chmod(0o700)
    assert result.text["disk"].endswith("[gap state-unwritable]")
    assert str(state) in result.text["disk"]


def test_root_is_told_to_be_somebody_else(host: Host) -> None:
    host.without("--unshare-user", "--uid", "0", "--gid", "0")
    assert "account-root" in host.doctor().gaps


# ------------------------------------------------------------------------------ the walls


def test_no_bubblewrap(host: Host) -> None:
    host.hide(confine.BWRAP)
    result = host.doctor()
    assert "bwrap-missing" in result.gaps
    assert "install the package bubblewrap" in result.text["jail"]


def test_no_user_namespaces(host: Host) -> None:
    host.without("--unshare-user", "--disable-userns")
    result = host.doctor()
    assert result.text["jail"].endswith("[gap userns-denied]")
    assert result.gaps == ["userns-denied"]


def test_a_full_disk_is_named_by_the_walls_that_cannot_be_tried(host: Host) -> None:
    host.env["TMPDIR"] = "/mnt"
    host.without("--size", "4096", "--tmpfs", "/mnt")
    result = host.doctor()
    told = r"cannot be tried: /mnt/\S+/probe\S*\.bpf: No space left on device \[gap \S+\]"
    assert re.fullmatch(told, result.text["jail"])
    assert result.text["seccomp"].endswith("the kernel holds to them")  # it needs no disk
    assert result.gaps == ["confinement-failed"]


def test_no_libseccomp(host: Host) -> None:
    names = ("libseccomp.so.2", ctypes.util.find_library("seccomp"))
    libraries = {p for d in ("/usr/lib", "/lib") for n in names if n for p in Path(d).rglob(n)}
    files = {library.resolve() for library in libraries}
    assert files
    host.hide(*files)
    result = host.doctor()
    assert result.text["seccomp"].endswith("[gap libseccomp-missing]")
    assert result.text["jail"].endswith("]")  # bubblewrap has no filter to load either


def test_no_landlock_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "landlock_abi", lambda: 0)
    (line,) = probes.landlock()
    assert (line.status, line.name) == ("note", "landlock-missing")


@pytest.mark.parametrize("abi", [1, 5])
def test_a_landlock_without_scopes_is_a_note(monkeypatch: pytest.MonkeyPatch, abi: int) -> None:
    monkeypatch.setattr(linux, "landlock_abi", lambda: abi)
    (line,) = probes.landlock()
    assert (line.status, line.name) == ("note", "landlock-old")
    assert "broker and netstack can reach abstract sockets" in line.value


def test_a_landlock_with_scopes_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "landlock_abi", lambda: 6)
    (line,) = probes.landlock()
    assert (line.status, line.value) == ("ok", "ABI 6")


# ---------------------------------------------------------------------------- the engine


def test_no_qemu(host: Host) -> None:
    host.env["PATH"] = str(host.bin)
    (host.bin / "qemu-system-x86_64").unlink()
    result = host.doctor()
    assert result.text["engine"] == "qemu-system-x86_64 is not on PATH [gap engine-missing]"
    assert "accel" not in result.text  # there is nothing that could have one


def test_a_qemu_that_does_not_run(host: Host) -> None:
    host.program("qemu-system-x86_64", "echo libfoo.so.1: cannot open >&2; exit 127")
    result = host.doctor()
    assert "libfoo.so.1: cannot open [gap engine-missing]" in result.text["engine"]


def test_a_qemu_without_our_device(host: Host) -> None:
    host.qemu(devices="Device not found")
    result = host.doctor()
    assert "has no vhost-user-vsock-device" in result.text["engine"]
    assert "engine-missing" in result.gaps


def test_a_machine_that_does_not_start(host: Host) -> None:
    host.qemu(machine="echo failed to initialize; exit 1")
    result = host.doctor()
    assert result.text["accel"] == "tcg: failed to initialize [gap engine-accel]"
    assert result.text["engine"].startswith("qemu 9.9.9")


def test_a_qemu_that_hangs_is_given_up(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.qemu(machine="exec sleep 600")
    monkeypatch.setenv("PATH", host.env["PATH"])
    monkeypatch.setattr(probes, "PATIENCE_S", 0.5)
    _, accel = probes.qemu("tcg")
    assert accel.name == "engine-accel"
    assert "did not end within 0.5 s" in accel.value


@pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="no QEMU is installed")
def test_the_real_qemu_starts_our_machine(host: Host) -> None:
    (host.bin / "qemu-system-x86_64").unlink()
    result = host.doctor()
    assert result.text["engine"].endswith("vhost-user-vsock-device")
    assert result.text["accel"] == "tcg; the machine microvm starts"


def test_kvm_is_a_gap_only_where_it_is_needed(host: Host) -> None:
    host.without("--dev", "/dev")
    assert "the configured engine needs no KVM" in host.doctor().text["virtualization"]
    host.config('[engine]\naccel = "kvm"\n')
    result = host.doctor()
    assert result.text["virtualization"].endswith("[gap no-kvm]")
    assert "no-kvm" in result.gaps


def test_firecracker_is_said_to_be_missing(host: Host) -> None:
    host.config('[defaults]\nengine = "firecracker"\n')
    result = host.doctor()
    assert result.text["engine"].endswith("[gap engine-missing]")
    assert "Firecracker validated set" in result.text["host-kernel"]


def test_the_helper_is_looked_for_where_the_config_says(host: Host) -> None:
    where = host.runtime / "agent-box" / "helper"
    assert "not running" in host.doctor().text["helper"]
    where.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(where / "sock"))
        listener.listen()
        assert host.doctor().text["helper"] == f"user mode; {where}/sock is listened on"
    assert "not running" in host.doctor().text["helper"]  # its socket outlived it
    host.config('[engine]\naccel = "tcg"\nhelper = "system"\n')
    result = host.doctor()
    assert result.text["helper"].startswith("system mode; ")
    assert "helper-missing" in result.gaps
    assert "cgroup" in result.text


# ------------------------------------------------------------------------------- the disk


def test_a_disk_that_cannot_punch_holes_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_punch", lambda *_: os.strerror(95))
    (line,) = probes.disk(tmp_path)
    assert (line.status, line.name) == ("note", "discard-unsupported")
    assert "Operation not supported" in line.value


def test_a_hole_that_frees_nothing_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_punch", lambda *_: None)
    (line,) = probes.disk(tmp_path)
    assert line.name == "discard-unsupported"


def test_a_hole_is_really_punched(tmp_path: Path) -> None:
    (line,) = probes.disk(tmp_path / "not" / "made" / "yet")
    assert line.status == "ok"
    assert list(tmp_path.iterdir()) == []


def test_each_file_system_of_instances_and_images_is_looked_at(host: Host) -> None:
    state = host.home / ".local/state/agent-box"
    for name in ("instances", "images"):
        (state / name).mkdir(parents=True)
    assert {"disk-instances", "disk-images"}.isdisjoint(host.doctor().text)
    own = ("--size", str(8 << 20), "--tmpfs", state / "instances")
    host.without(*own, "--size", "4096", "--tmpfs", state / "images")
    result = host.doctor()
    found = f"0 GiB free at {state}/instances, sparse files, hole punching works"
    assert result.text["disk-instances"] == found
    full = f"{state}/images: No space left on device [gap state-unwritable]"
    assert result.text["disk-images"] == full
    assert result.gaps == ["state-unwritable"]


# ------------------------------------------------------------------------------ the daemon


def test_a_daemon_is_told_by_its_lock_and_its_config(host: Host) -> None:
    state = host.home / ".local" / "state" / "agent-box"
    state.mkdir(parents=True, mode=0o700)
    held = lock.acquire(state / "daemon.lock", config=Path("/elsewhere.toml"), version="1")
    try:
        result = host.doctor()
    finally:
        held.release()
    assert f"running, pid {os.getpid()}" in result.text["daemon"]
    assert result.text["daemon"].endswith("with the config /elsewhere.toml [gap config-mismatch]")
    # a daemon without keys answers nothing, and each service is named for it
    assert "service-failed" in result.gaps
    assert all(result.text[f"service-{s}"].endswith("[gap service-failed]") for s in SERVICES)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    made = Live()
    try:
        config = Path(made.env["XDG_CONFIG_HOME"]) / "agent-box" / "config.toml"
        config.parent.mkdir(parents=True)
        config.write_text(
            f'version = 1\n{TCG}[bindings.anthropic]\nupstream = "https://api.anthropic.com"\n'
            'kind = "anthropic"\ncredential = "anthropic-api-key"\n'
            'routes = [{ path = "/v1/messages", match = "exact", methods = ["POST"] }]\n'
        )
        made.up()
        yield made
    finally:
        made.close()


def live_lines(live: Live) -> dict[str, dict[str, Any]]:
    return {line["key"]: line for line in live.run("doctor", "--json").result["lines"]}


def test_each_service_says_for_itself_that_it_is_ready(live: Live) -> None:
    lines = live_lines(live)
    for name, row in live.services().items():
        if row["epoch"] is None:
            continue  # the helper is no service, and has a line of its own
        assert lines[f"service-{name}"]["status"] != "gap", lines[f"service-{name}"]
        assert lines[f"service-{name}"]["value"].startswith(f"ready, epoch {row['epoch']}")
    assert f"pid {live.daemon_pid()}" in lines["daemon"]["value"]
    assert lines["instances"]["value"] == "0"
    assert lines["forgery"]["value"].startswith("forgery-refused 0, nonce-refused 0; in the last ")
    assert lines["helper"]["evidence"] == "engine.probe"
    assert lines["helper"]["name"] != "helper-missing"


def test_credentials_are_told_by_name_and_by_use_and_never_by_value(live: Live) -> None:
    before = live_lines(live)["credentials"]
    assert (before["status"], before["name"]) == ("note", "credential-missing")
    assert "missing: anthropic-api-key (for anthropic)" in before["value"]
    for name in ("anthropic-api-key", "spare"):
        assert live.run("secret", "set", name, stdin="canary-4711").exit == 0
    report = live.run("doctor", "--json")
    assert "canary" not in report.out + report.err
    after = live_lines(live)["credentials"]
    assert after["status"] == "ok"
    assert after["value"].endswith("; anthropic-api-key (anthropic), spare (no binding)")


def test_a_daemon_with_another_config_is_a_gap(live: Live) -> None:
    other = live.home / "other.toml"
    other.write_text("version = 1\n")
    result = live.run("doctor", "--json", AGENT_BOX_CONFIG=str(other)).result
    (line,) = [line for line in result["lines"] if line["key"] == "daemon"]
    assert line["name"] == "config-mismatch"


def test_a_stuck_service_is_a_gap_and_holds_up_nothing_else(live: Live) -> None:
    (pid,) = live.inner("store")
    os.kill(pid, signal.SIGSTOP)
    try:
        lines = live_lines(live)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert lines["service-store"]["name"] == "service-failed"
    assert lines["service-engine"]["name"] != "service-failed"
    assert lines["credentials"]["status"] == "ok"  # unknown, which is not the store's fault
    assert lines["service-registry"]["status"] != "gap"


def test_a_stuck_engine_is_no_gap_of_the_helper(live: Live) -> None:
    (pid,) = live.inner("engine")
    os.kill(pid, signal.SIGSTOP)
    try:
        lines = live_lines(live)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert lines["service-engine"]["name"] == "service-failed"
    assert lines["helper"]["status"] == "ok"
    assert lines["helper"]["value"].startswith("user mode; unknown, the engine cannot be asked: ")


def test_a_helper_that_is_down_is_a_gap_while_the_daemon_runs(live: Live) -> None:
    live.control.stop("helper")
    try:
        line = live_lines(live)["helper"]
    finally:
        live.control.start("helper")
    assert (line["status"], line["name"]) == ("gap", "helper-missing")
    assert line["evidence"] == "engine.probe"

    def there() -> bool:
        return bool(live_lines(live)["helper"]["name"] != "helper-missing")

    until("the helper answers again", there, seconds=30)


def test_a_service_that_stays_down_is_a_gap_with_its_reason(live: Live) -> None:
    killed: set[int] = set()

    def down() -> bool:
        for pid in live.inner("netstack"):
            if pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
        return live.statuses()["netstack"].state == "fatal"

    until("netstack is given up", down, seconds=60)
    line = live_lines(live)["service-netstack"]
    assert line["name"] == "service-failed"
    assert line["value"].startswith("it stays down: ")


# ------------------------------------------------------------------------------- the names


def test_only_declared_names_are_given() -> None:
    with pytest.raises(KeyError):
        probes.gap("key", "value", "no-such-gap", "nothing")
    with pytest.raises(KeyError):
        probes.note("key", "value", "no-kvm", "nothing")  # that is a gap


def test_every_declared_name_is_given_somewhere() -> None:
    givers = (doctor, probes, images, confine, helper_probe)
    code = "".join(inspect.getsource(module) for module in givers)
    unused = [name for name in {**gaps.GAPS, **gaps.NOTES} if f'"{name}"' not in code]
    assert unused == []


def test_every_gap_of_the_helper_is_declared() -> None:
    given = set(re.findall(r'gap\(\s*"([a-z-]+)"', inspect.getsource(helper_probe)))
    assert given and given <= gaps.GAPS.keys()


def test_every_gap_of_the_walls_is_declared() -> None:
    given = set(re.findall(r'Gap\(\s*"([a-z-]+)"', inspect.getsource(confine)))
    assert given and given <= gaps.GAPS.keys()


def test_public_forwards_are_told() -> None:
    from types import SimpleNamespace

    from support.registries import World, create

    from agent_box.netstack.contract import Forward
    from agent_box.registry.contract import Rows
    from agent_box.registry.life import Life

    world = World(surrounded=True)
    core = world.core()
    row = world.play(core.create(create("web1"), id="a" * 32, now_ms=1))
    life = Life(core)
    world.play(life.start("web1", now_ms=2))
    world.play(life.drive("a" * 32))
    found = world.play(core.inspect("web1", now_ms=3))
    forwards = [
        Forward(address="192.0.2.1", host_port=80, guest_port=3000, public=True),
        Forward(address="127.0.0.1", host_port=81, guest_port=3001, public=False),
    ]
    told = msgspec.structs.replace(found, forwards=forwards)
    asked = SimpleNamespace(call=lambda *_, **__: told)
    rows = Rows(
        instances=[msgspec.structs.replace(row, state=state) for state in ("running", "stopped")],
        problems=[],
        strays=[],
    )
    assert doctor._public(asked, rows) == ["web1:3000 by 192.0.2.1:80"]  # type: ignore[arg-type]


def test_forgeries_are_counted_from_the_journal() -> None:
    from types import SimpleNamespace

    from agent_box.registry.contract import Entries, Entry

    def entry(kind: str, **facts: int) -> Entry:
        return Entry(
            seq=1, time_ms=1, instance=None, name=None, source="host-observed", kind=kind,
            by="channel", facts=dict(facts), prev="0" * 64, hash="0" * 64,
        )  # fmt: skip

    events = [
        entry("forgery-refused", count=1),
        entry("forgery-refused", count=40),
        entry("guest-ready"),
        entry("nonce-refused", count=2),
    ]
    page = Entries(epoch=b"", first=1, events=events, next=5)
    (line,) = doctor._forged(SimpleNamespace(call=lambda *_, **__: page))  # type: ignore[arg-type]
    assert line.value.startswith("forgery-refused 41, nonce-refused 2; in the last 4 ")
