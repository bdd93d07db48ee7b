"""The image boots: what a process finds there, and what the console says when it cannot be.

One machine at a time, under emulation, with a program of the test's own as box-guest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import built, microvm

from agent_box.engine.image.manifest import Manifest
from agent_box.process.paths import Paths

pytestmark = [pytest.mark.timeout(900)]

PROBE = r"""
import ctypes, json, os, socket, stat, subprocess, sys
facts = {}
try:
    facts["pid"] = os.getpid()
    facts["argv"] = sys.orig_argv
    facts["flags"] = [sys.flags.isolated, sys.flags.no_site, sys.flags.dont_write_bytecode]
    facts["mounts"] = [line.split()[:4] for line in open("/proc/mounts")]
    facts["modules"] = sorted(line.split()[0] for line in open("/proc/modules"))
    facts["filesystems"] = open("/proc/filesystems").read().split()
    facts["home"] = [(s := os.lstat("/home/agent")).st_uid, s.st_gid, stat.S_IMODE(s.st_mode)]
    facts["work"] = os.lstat("/home/agent/work").st_uid
    facts["sudo"] = [(s := os.lstat("/usr/bin/sudo")).st_uid, stat.S_IMODE(s.st_mode)]
    facts["shadow"] = [(s := os.lstat("/etc/shadow")).st_gid, stat.S_IMODE(s.st_mode)]
    facts["tun"] = os.path.exists("/dev/net/tun")
    facts["hwrng"] = open("/sys/class/misc/hw_random/rng_available").read().split()
    facts["root"] = sorted(os.listdir("/"))
    listener = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    listener.bind((socket.VMADDR_CID_ANY, 5000))
    listener.close()
    facts["vsock"] = True
    env = {"PATH": "/usr/bin:/bin", "HOME": "/run"}
    run = lambda *w: subprocess.run(w, env=env, capture_output=True, text=True).stdout.strip()
    facts["git"] = run("git", "--version")
    facts["id"] = run("id", "agent")
    facts["tmpfs"] = subprocess.run(["touch", "/run/x"]).returncode
    facts["readonly"] = subprocess.run(["touch", "/x"], capture_output=True).returncode
except BaseException as error:
    facts["error"] = repr(error)
print("FACTS " + json.dumps(facts), flush=True)
ctypes.CDLL(None).reboot(0x4321FEDC)
"""


@pytest.fixture(scope="module")
def image() -> tuple[Paths, Manifest]:
    return built.ready()


def drives(image: tuple[Paths, Manifest]) -> dict[str, Path]:
    paths, manifest = image
    return {name: paths.blob(getattr(manifest, name).sha256) for name in ("guest", "variant")}


@pytest.fixture(scope="module")
def facts(
    image: tuple[Paths, Manifest], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the program found. Its drive comes first: drives are known by serial, not order."""
    probe = microvm.guest_drive(tmp_path_factory.mktemp("probe"), PROBE)
    status, console = microvm.boot(*image, {**drives(image), "guest": probe})
    lines = [line for line in console.splitlines() if line.startswith("FACTS ")]
    assert status == 0, console
    assert len(lines) == 1, console
    found: dict[str, Any] = json.loads(lines[0].removeprefix("FACTS "))
    assert "error" not in found, found
    return found


def test_it_is_pid_1_and_isolated(facts: dict[str, Any]) -> None:
    assert facts["pid"] == 1
    assert facts["argv"] == [
        *("/usr/bin/python3", "-I", "-S", "-B", "/run/box/guest/box-guest.pyz"),
    ]
    assert facts["flags"] == [1, 1, 1]


def test_what_is_mounted(facts: dict[str, Any]) -> None:
    mounted = {place: (kind, options.split(",")) for _, place, kind, options in facts["mounts"]}
    assert mounted["/"][0] == mounted["/run/box/guest"][0] == "erofs"
    assert "ro" in mounted["/"][1]
    assert {"ro", "nosuid", "nodev"} <= set(mounted["/run/box/guest"][1])
    assert {place: mounted[place][0] for place in ("/run", "/dev", "/proc", "/sys")} == {
        "/run": "tmpfs",
        "/dev": "devtmpfs",
        "/proc": "proc",
        "/sys": "sysfs",
    }
    assert {"nosuid", "nodev"} <= set(mounted["/run"][1])
    assert facts["tmpfs"] == 0
    assert facts["readonly"] != 0


def test_what_a_machine_needs_of_its_kernel(facts: dict[str, Any]) -> None:
    assert {"ext4", "erofs", "overlay"} <= set(facts["filesystems"])
    assert {"virtio_blk", "virtio_mmio", "virtio_balloon", "tun"} <= set(facts["modules"])
    assert facts["tun"]
    assert facts["vsock"]


def test_whose_files_are_whose(facts: dict[str, Any]) -> None:
    assert facts["home"] == [1000, 1000, 0o700]
    assert facts["work"] == 1000
    assert facts["sudo"] == [0, 0o4755]
    assert facts["shadow"] == [42, 0o640]  # Debian's group shadow
    assert facts["id"].startswith("uid=1000(agent) gid=1000(agent) groups=1000(agent)")


def test_programs_run(facts: dict[str, Any]) -> None:
    assert facts["git"].startswith("git version 2.")


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("variant", "box-init: no drive has the serial variant"),
        ("guest", "box-init: no drive has the serial guest"),
    ],
)
def test_a_drive_that_is_missing_is_named_and_the_machine_goes_off(
    image: tuple[Paths, Manifest], missing: str, said: str
) -> None:
    given = {name: file for name, file in drives(image).items() if name != missing}
    status, console = microvm.boot(*image, given)
    assert status == 0
    assert said in console


def test_a_drive_that_holds_nothing_is_named(image: tuple[Paths, Manifest], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_bytes(bytes(1 << 20))
    status, console = microvm.boot(*image, {**drives(image), "variant": empty})
    assert status == 0
    assert "box-init: cannot mount the drive variant, /dev/vd" in console


def test_a_guest_drive_without_its_program_is_named(image: tuple[Paths, Manifest]) -> None:
    given = drives(image)
    status, console = microvm.boot(*image, {**given, "guest": given["variant"]})
    assert status == 0
    assert "box-init: the drive guest has no box-guest.pyz" in console
