"""What a service does to itself, and that what it tells of its walls is what stands."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.house import House, contract, inner_pid, python
from support.until import until

from agent_box.bus import base
from agent_box.bus.schema import Network
from agent_box.process import confine, inside, linux
from agent_box.process.paths import SERVICES

TELL = """
import json, sys
from importlib import import_module
from pathlib import Path
from agent_box.process import confine, inside
from agent_box.process.paths import Paths
service, runtime, state, config = sys.argv[1:5]
contract = import_module(f"agent_box.{service}.contract").CONTRACT
profile = confine.profile(contract, Paths(Path(runtime), Path(state)), Path(config))
entered = inside.enter(profile, confine.INNER_FD)
print(json.dumps(inside.facts(entered)))
"""


def program(house: House, service: str, code: str = TELL) -> list[str]:
    paths = house.paths
    words = [service, str(paths.runtime), str(paths.state), str(house.config)]
    return house.command(service, python("-c", code, *words))


def tell(house: House, service: str) -> dict[str, Any]:
    ran = subprocess.run(program(house, service), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("service", SERVICES)
def test_what_it_tells_is_what_the_profile_says(house: House, service: str) -> None:
    profile, found = house.profile(service), tell(house, service)
    there = [m for m in profile.mounts if m.path.exists()]
    expected = {f"{m.path} {'rw' if m.writable else 'ro'}" for m in there}
    expected |= {"/ ro", "/dev ro", "/proc ro", "/tmp rw"}
    expected |= {f"/dev/{name} rw" for name in ("null", "zero", "full", "random", "urandom")}
    assert set(found["mounts"]) == expected
    host = contract(service).wall.network is Network.HOST
    for name in ("mnt", "user", "pid", "ipc", "uts", "net", "cgroup"):
        same = found["namespaces"][name] == os.readlink(f"/proc/self/ns/{name}")
        assert same is (host and name == "net"), name
    assert (found["interfaces"] == ["lo"]) is not (host and len(os.listdir("/sys/class/net")) > 1)
    for name, value in profile.limits:
        assert found["limits"][name] == value
    assert found["limits"]["RLIMIT_CORE"] == 0
    assert (found["uid"], found["gid"]) == (os.getuid(), os.getgid())
    assert found["no_new_privs"] is True
    assert (found["seccomp_mode"], found["seccomp_filters"]) == (2, 2)
    assert int(found["capabilities_effective"], 16) == 0
    assert found["dumpable"] is False
    assert found["landlock_abi"] == linux.landlock_abi()
    assert found["landlock_enforced"] is (linux.landlock_abi() > 0)


def test_it_is_what_the_bus_carries(house: House) -> None:
    found = base.Confinement(**tell(house, "store"))
    assert found.dumpable is False


def test_proc_says_the_same_from_outside(house: House) -> None:
    """What an operator can check without asking the service."""
    process = house.start("engine")
    until("it is ready", lambda: '"ready"' in house.log("engine"))
    inner = inner_pid(process)
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{inner}/status").read_text().splitlines()
    )
    assert status["NoNewPrivs"].strip() == "1"
    assert status["Seccomp"].strip() == "2"
    assert status["Seccomp_filters"].strip() == "2"
    assert {int(status[f"Cap{s}"], 16) for s in ("Inh", "Prm", "Eff", "Amb")} == {0}
    assert status["NSpid"].split() == [str(inner), "1"]
    mounts = set(inside.mounts(Path(f"/proc/{inner}/mountinfo").read_text()))
    with house.client("engine") as client:
        told = client.call("confinement", base_request())
    assert isinstance(told, base.Confinement)
    assert mounts == set(told.mounts)
    limits = Path(f"/proc/{inner}/limits").read_text()
    assert f"Max open files            {told.limits['RLIMIT_NOFILE']} " in limits
    assert "Max core file size        0 " in limits


def base_request() -> Any:
    from agent_box.bus.schema import Empty

    return Empty()


def test_a_host_that_allows_less_is_no_reason_to_fail(house: House) -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    ran = subprocess.run(
        program(house, "store"), capture_output=True, text=True, check=False, preexec_fn=lower
    )
    assert json.loads(ran.stdout)["limits"]["RLIMIT_NOFILE"] == 256


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("", "was not started behind its wall"),
        (
            "import pyseccomp; pyseccomp.SyscallFilter(pyseccomp.ALLOW).load()",
            "a wall cannot be put up",  # the filter given is none
        ),
    ],
)
def test_outside_of_the_outer_wall_it_refuses(house: House, change: str, words: str) -> None:
    empty = os.open("/dev/null", os.O_RDONLY)
    code = f"{change}\n" + TELL.replace("confine.INNER_FD", str(empty))
    paths = house.paths
    try:
        ran = subprocess.run(
            python("-c", code, "store", str(paths.runtime), str(paths.state), str(house.config)),
            capture_output=True,
            text=True,
            check=False,
            pass_fds=[empty],
        )
    finally:
        os.close(empty)
    assert ran.stdout == ""
    assert "EnterError: " in ran.stderr and words in ran.stderr


def test_with_capabilities_it_refuses(house: House) -> None:
    profile = house.profile("store")
    filters = confine.write_filters(profile, house.paths.supervisor)
    paths = house.paths
    words = ["store", str(paths.runtime), str(paths.state), str(house.config)]
    command = confine.command(profile, python("-c", TELL, *words), filters)
    command[2] = command[2].replace("--cap-drop ALL", "--cap-add CAP_NET_ADMIN")
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "EnterError: this process has capabilities" in ran.stderr


TWICE = TELL + "\ninside.enter(profile, confine.INNER_FD)"


def test_the_filter_is_closed_and_cannot_be_read_again(house: House) -> None:
    ran = subprocess.run(
        program(house, "store", TWICE), capture_output=True, text=True, check=False
    )
    assert "Bad file descriptor" in ran.stderr


def test_threads_that_come_later_are_behind_the_wall_too(house: House) -> None:
    code = TELL.replace(
        "print(json.dumps(inside.facts(entered)))",
        """
import os, socket, threading
results = []
def attempt():
    for work in (
        lambda: os.execv("/usr/bin/true", ["true"]),
        lambda: os.listdir("/"),
        lambda: socket.socket(socket.AF_INET),
    ):
        try: work(); results.append("done")
        except PermissionError: results.append("refused")
thread = threading.Thread(target=attempt); thread.start(); thread.join()
print(json.dumps(results))
""",
    )
    ran = subprocess.run(program(house, "store", code), capture_output=True, text=True, check=False)
    listed = "refused" if linux.landlock_abi() else "done"
    assert json.loads(ran.stdout) == ["refused", listed, "refused"]


MOUNTINFO = """\
83 44 0:50 /newroot / ro,nosuid,nodev,relatime - tmpfs tmpfs rw
104 83 254:0 /usr /usr ro,nosuid,nodev,relatime shared:1 master:2 - ext4 /dev/vda rw,discard
105 83 254:0 /x /a\\040b\\134c rw,relatime - ext4 /dev/vda rw
106 83 254:0 /x /\xc3\xa4 rw - ext4 /dev/vda ro
"""


def test_mountinfo_is_read_by_the_mount_and_not_by_the_disk() -> None:
    text = MOUNTINFO.encode("latin-1").decode()
    assert inside.mounts(text) == ["/ ro", "/a b\\c rw", "/usr ro", "/ä rw"]


def test_interfaces_are_read() -> None:
    text = "Inter-| Receive\n face |bytes\n    lo: 1 2 3\neth0:9 9\n wl-p3.7: 0\n"
    assert inside.interfaces(text) == ["eth0", "lo", "wl-p3.7"]
