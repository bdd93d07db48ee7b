"""From inside each service's wall, everything that its contract does not grant is refused.

One process per service runs every attack behind the wall that the contract builds; the same
program runs outside of any wall too, so that an attack which could not work anyway is noticed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support import attacks
from support.house import House, contract, inner_pid, python
from support.until import until

from agent_box.bus.schema import Network
from agent_box.process import landlock, linux
from agent_box.process.paths import ROLES, SERVICES

VICTIM = f"""
import ctypes, os, signal, sys
memory = ctypes.create_string_buffer({attacks.CANARY!r})
print(ctypes.addressof(memory), flush=True)
sys.stdin.read()
"""
# Need rights that an ordinary account has only in a user namespace of its own.
ROOTED = {
    "open_packet_socket",
    "open_raw_socket",
    "open_raw_socket_v6",
    "mount",
    "make_network_namespace",
}
# Whether these work outside depends on how the host's kernel is built and set up.
HOST_DEPENDENT = {
    "dial_vsock",
    "load_bpf",
    "open_crypto_socket",
    "open_perf_event",
    "read_memory_of_another",
    "read_memory_of_another_by_call",
    "write_memory_of_another_by_call",
    "trace_another",
    "set_up_io_uring",
    "set_up_userfaultfd",
    "see_interfaces",
    "tcp_to_loopback_v6",
}
# Show that something is not there; outside it depends on what the test runs in.
ABSENCE = {"use_an_inherited_descriptor", "read_the_environment", "write_to_the_system"}
WITH_NETWORK = {
    "tcp_to_loopback",
    "tcp_to_loopback_v6",
    "udp_to_loopback",
    "listen_on_tcp",
    "see_interfaces",
}


class Scene:
    """A house with something to attack in each room."""

    def __init__(self, house: House, stack: ExitStack) -> None:
        self.house = house
        self._stack = stack
        paths = house.paths
        for service in SERVICES:
            house.profile(service)  # makes the directories of its sockets
            (paths.data(service) / "credentials.db").write_bytes(b"sealed")
            paths.log(service).write_bytes(b"a line\n")
        paths.lock.write_bytes(b"{}")
        self.home_file = house.root / "home" / "private"
        self.home_file.parent.mkdir()
        self.home_file.write_bytes(b"private")
        self.sockets: dict[str, str] = {}
        for name in sorted({n for s in SERVICES for n in _granted(s)}):
            self.sockets[name] = self._listen(paths.runtime / name / "probe")
        self.supervisord = self._listen(paths.supervisor / "sock")
        self.dbus = self._listen(paths.runtime.parent / "bus")
        self.abstract = f"agent-box-test-{os.getpid()}"
        self._listen(f"\0{self.abstract}")
        self._datagram(f"\0{self.abstract}.d")
        self.tcp = self._tcp(socket.AF_INET, "127.0.0.1")
        self.tcp6 = self._tcp(socket.AF_INET6, "::1")
        self.udp = self._udp()
        self.victim, self.address = self._victim()
        self.others = [house.start("engine"), house.start("channel")]
        self._outcomes = cache(self._run)

    def _keep(self, made: socket.socket) -> socket.socket:
        return self._stack.enter_context(made)

    def _listen(self, path: Path | str) -> str:
        """Nobody accepts: a connection in the backlog is a connection."""
        made = self._keep(socket.socket(socket.AF_UNIX))
        made.bind(str(path))
        made.listen(256)
        return str(path)

    def _datagram(self, path: str) -> None:
        self._keep(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(path)

    def _tcp(self, family: int, address: str) -> int:
        made = self._keep(socket.socket(family))
        made.bind((address, 0))
        made.listen(256)
        return int(made.getsockname()[1])

    def _udp(self) -> int:
        made = self._keep(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])

    def _victim(self) -> tuple[int, int]:
        process = self._stack.enter_context(
            subprocess.Popen(
                python("-c", VICTIM),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={"CANARY": "in the environment"},
            )
        )
        assert process.stdout is not None
        return process.pid, int(process.stdout.readline())

    def facts(self, service: str | None) -> dict[str, Any]:
        """What is there to attack, seen from a service, or from outside."""
        paths = self.house.paths
        others = [s for s in SERVICES if s != service]
        granted = set() if service is None else _granted(service)
        pids = [self.victim, os.getpid()]
        for process in self.others:
            inner = until("a service runs", lambda process=process: inner_pid(process))
            pids += [process.pid, inner]
        return {
            "runtime": str(paths.runtime),
            "state": str(paths.state),
            "config": str(self.house.config),
            "own_directory": str(
                self.house.root / "outside" if service is None else paths.data(service)
            ),
            "keys": [str(paths.keys(r) / "curve.secret") for r in ROLES if r != service],
            "key_directory": str(paths.keys("store").parent),
            "public_key": str(paths.public_keys / "operator"),
            "data": [str(paths.data(s) / "credentials.db") for s in others],
            "logs": [str(paths.log(s)) for s in SERVICES],
            "lock": str(paths.lock),
            "supervisor": str(paths.supervisor),
            "planted": f"planted-by-{service}",
            "home_file": str(self.home_file),
            "beside": [
                *(str(paths.bus(s)) for s in others),
                *(str(d) for d in (paths.public_keys, paths.supervisor, paths.lock.parent)),
                str(paths.runtime),
                str(self.house.config.parent),
            ],
            "victim": self.victim,
            "address": self.address,
            "pids": [str(pid) for pid in pids],
            "supervisord_socket": self.supervisord,
            "dbus_socket": self.dbus,
            "sockets_granted": [self.sockets[name] for name in sorted(granted)],
            "sockets_not_granted": [p for n, p in sorted(self.sockets.items()) if n not in granted],
            "abstract": self.abstract,
            "abstract_datagram": f"{self.abstract}.d",
            "tcp": self.tcp,
            "tcp6": self.tcp6,
            "udp": self.udp,
        }

    def outcome(self, service: str | None, rooted: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = self._outcomes(service, rooted)
        assert "failed" not in found, found["failed"]
        return found

    def _run(self, service: str | None, rooted: bool) -> dict[str, Any]:
        source = Path(attacks.__file__).read_text()
        facts = self.facts(service)
        if rooted:
            facts["only"] = sorted(ROOTED)
        words = python("-c", source, json.dumps(facts))
        if service is not None:
            words = self.house.command(service, [*words, service])
        if rooted:
            words = ["unshare", "--user", "--map-root-user", "--net", "--mount", *words]
        ran = subprocess.run(
            words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=60
        )
        if ran.returncode != 0:
            return {"attacks": {}, "granted": {}, "failed": ran.stderr}
        found: dict[str, Any] = json.loads(ran.stdout)
        if "write_beside" in found["attacks"]:
            planted = [Path(d) / facts["planted"] for d in facts["beside"]]
            there = [str(p) for p in planted if p.exists()]
            found["attacks"]["write_beside"] = [bool(there), f"left {there}"]
        return found


def _granted(service: str) -> set[str]:
    """The directories of sockets, below the runtime directory, that the contract grants."""
    wall = contract(service).wall
    bus = {f"bus/{name}" for name in (service, *wall.calls)}
    return {*bus, *wall.sockets, *wall.dials}


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    house = House()
    with ExitStack() as stack:
        stack.callback(house.close)
        yield Scene(house, stack)


def _expected(service: str) -> set[str]:
    """The attacks that the contract grants."""
    wall = contract(service).wall
    expected = set()
    if wall.network is Network.HOST:
        expected |= WITH_NETWORK
    if wall.config:
        expected.add("read_config")
    if "socket.netlink" in dict(wall.syscalls):
        expected.add("open_netlink_socket")
    return expected


@pytest.mark.parametrize("name", attacks.ATTACKS)
@pytest.mark.parametrize("service", SERVICES)
def test_what_the_contract_does_not_grant_is_refused(scene: Scene, service: str, name: str) -> None:
    shared = contract(service).wall.network is Network.HOST
    if "abstract" in name and shared and linux.landlock_abi() < landlock.SCOPE_ABI:
        pytest.skip("this kernel's Landlock has no scopes, and doctor says so")
    if name in WITH_NETWORK and shared and not scene.outcome(None)["attacks"][name][0]:
        pytest.skip("this host has none either")
    succeeded, seen = scene.outcome(service)["attacks"][name]
    assert succeeded == (name in _expected(service)), seen


# Refused by the filter itself, whatever else would stand in the way.
BY_FILTER = {
    "be_traced": "EPERM",
    "change_mode": "EPERM",
    "change_mode_of_descriptor": "EPERM",
    "change_owner": "EPERM",
    "set_attribute": "EPERM",
    "make_device": "EPERM",
    "read_own_memory_by_call": "EPERM",
    "trace_another": "EPERM",
    "open_own_pidfd": "EPERM",
    "fork": "ENOSYS",
    "fork_by_clone": "ENOSYS",
    "execute": "EPERM",
    "leave_the_process_group": "EPERM",
    "dial_vsock": "EPERM",
    "open_packet_socket": "EPERM",
    "open_raw_socket": "EPERM",
    "open_raw_socket_v6": "EPERM",
    "open_netlink_socket": "EPERM",
    "open_crypto_socket": "EPERM",
    "make_user_namespace": "EPERM",
    "make_network_namespace": "EPERM",
    "clone_into_namespace": "ENOSYS",
    "enter_namespace": "EPERM",
    "mount": "EPERM",
    "load_bpf": "EPERM",
    "use_keyring": "EPERM",
    "add_key": "EPERM",
    "set_up_io_uring": "EPERM",
    "set_up_userfaultfd": "EPERM",
    "open_perf_event": "EPERM",
    "change_personality": "EPERM",
    "make_memory_file": "EPERM",
    "name_handle": "EPERM",
    "type_for_the_operator": "EPERM",
    "type_for_the_operator_with_high_bits": "EPERM",
    "paste_for_the_operator": "EPERM",
    "become_dumpable": "EPERM",
    "outlive_the_supervisor": "EPERM",
    "raise_a_limit": "EPERM",
    "change_the_filter": "EPERM",
}
BY_FILTER_WITHOUT_NETWORK = {"tcp_to_loopback", "tcp_to_loopback_v6", "udp_to_loopback"}


@pytest.mark.parametrize("name", BY_FILTER)
@pytest.mark.parametrize("service", SERVICES)
def test_the_filter_is_what_refuses(scene: Scene, service: str, name: str) -> None:
    if name in _expected(service):
        pytest.skip("the contract grants it")
    assert scene.outcome(service)["attacks"][name][1].startswith(BY_FILTER[name])


@pytest.mark.parametrize("service", SERVICES)
def test_without_a_network_there_are_no_internet_sockets(scene: Scene, service: str) -> None:
    if contract(service).wall.network is Network.HOST:
        pytest.skip("the contract grants the network")
    for name in sorted(BY_FILTER_WITHOUT_NETWORK):
        assert scene.outcome(service)["attacks"][name][1].startswith("EPERM")


@pytest.mark.parametrize("service", SERVICES)
def test_the_sockets_that_the_contract_grants_are_reached(scene: Scene, service: str) -> None:
    granted = scene.outcome(service)["granted"]
    assert granted == dict.fromkeys(granted)
    assert len(granted) == len(_granted(service))


@pytest.mark.parametrize("name", attacks.ATTACKS)
def test_the_attack_works_outside(scene: Scene, name: str) -> None:
    succeeded, seen = scene.outcome(None, name in ROOTED)["attacks"][name]
    if not succeeded and name in HOST_DEPENDENT | ABSENCE:
        pytest.skip(f"this host refuses it to everybody: {seen}")
    assert succeeded, seen


X32 = """
import ctypes, os, sys
if len(sys.argv) > 1:
    from pathlib import Path
    from importlib import import_module
    from agent_box.process import confine, inside
    from agent_box.process.paths import Paths
    contract = import_module(f"agent_box.{sys.argv[1]}.contract").CONTRACT
    paths = Paths(Path(sys.argv[2]), Path(sys.argv[3]))
    inside.enter(confine.profile(contract, paths, Path(sys.argv[4])), 4)
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.syscall(ctypes.c_long(0x40000000 | 39))  # getpid by the x32 table
print("alive")
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x32 is of x86_64")
@pytest.mark.parametrize("service", SERVICES)
def test_a_call_by_another_table_kills(scene: Scene, service: str) -> None:
    outside = subprocess.run(python("-c", X32), capture_output=True, text=True, check=False)
    assert outside.stdout == "alive\n"
    paths = scene.house.paths
    words = [service, str(paths.runtime), str(paths.state), str(scene.house.config)]
    inside = subprocess.run(
        scene.house.command(service, python("-c", X32, *words)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert inside.stdout == ""
    assert inside.returncode == 128 + 31, inside.stderr  # SIGSYS


def test_nothing_starts_without_its_wall(scene: Scene) -> None:
    """The program of a service, run by hand, outside."""
    paths = scene.house.paths
    empty = os.open("/dev/null", os.O_RDONLY)
    try:
        ran = subprocess.run(
            [
                *python("-m", "agent_box.engine", "--runtime", str(paths.runtime)),
                *("--state", str(paths.state), "--inner-filter", str(empty)),
            ],
            pass_fds=[empty],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        os.close(empty)
    assert ran.returncode == 71
    assert "was not started behind its wall" in ran.stderr
    assert ran.stderr.count("\n") == 1
