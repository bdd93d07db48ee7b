"""Machines that run: what is there of them, what ends them, and what does not."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from support import procs as proc_facts
from support import tinykernel
from support.helperhouse import Client, HelperHouse, fresh
from support.until import until

from agent_box.helper import capped, machine
from agent_box.helper.wire import Refused

MIB = 1 << 20


def refused(code: str) -> Any:
    return pytest.raises(Refused, match=f"^{code}: ")


def recorded(place: HelperHouse, name: str) -> dict[str, Any]:
    path = place.state / "instances" / name / "state.json"
    if not path.exists():
        path = place.runtime / "vm" / "shim" / name / "state.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def pid(place: HelperHouse, name: str, which: str) -> int:
    found: int = recorded(place, name)["procs"][which]["pid"]
    return found


def until_exited(place: HelperHouse, client: Client, name: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        state = place.look(client, name)
        return state if state["state"] == "exited" and not state["shim"] else None

    found = until("it has exited", look)
    assert found is not None
    return found


def console(client: Client, name: str) -> bytes:
    return base64.b64decode(client.ask("console", id=name, offset=0)["data"])


def ended(fd: int) -> bool:
    """A pipe is at its end, whatever lies in it before."""
    while select.select([fd], [], [], 20)[0]:
        if not os.read(fd, 4096):
            return True
    return False


# ------------------------------------------------------------------------ a life


def test_a_whole_life(place: HelperHouse, client: Client) -> None:
    name, launch = place.machine(client)
    state = place.look(client, name)
    assert (state["state"], state["shim"], state["device"]) == ("running", True, True)
    assert state["vmm"]["pid"] == pid(place, name, "vmm")
    until("it said something", lambda: console(client, name) == b"up\n")
    stream = socket.socket(fileno=client.ask_fd("dial", id=name, launch_id=launch))
    assert stream.getpeername().endswith("vsock")
    monitor = socket.socket(fileno=client.ask_fd("monitor", id=name, launch_id=launch))
    monitor.settimeout(20)
    assert b'"QMP"' in monitor.recv(4096)
    _, (watch,) = client.ask_fds("watch", id=name, launch_id=launch)
    killed = client.ask("kill", id=name, launch_id=launch)
    assert killed["state"] == "exited"
    assert killed["exit"] | {"at_ms": 0} == {"code": None, "signal": 9, "by": "kill", "at_ms": 0}
    assert abs(killed["exit"]["at_ms"] / 1000 - time.time()) < 60
    assert ended(watch)
    assert not [p for p in place.processes() if p != place.process.pid]  # type: ignore[union-attr]
    assert console(client, name) == b"up\n"
    assert client.ask("kill", id=name, launch_id=launch) == killed
    client.ask("release", id=name)
    assert place.leftovers() == []
    for end in (stream, monitor):
        end.close()
    os.close(watch)


def test_the_same_launch_again_is_the_same_also_after_its_end(
    place: HelperHouse, client: Client
) -> None:
    name, launch = place.machine(client)
    before = place.look(client, name)
    asked = {"id": name, "launch_id": launch, "profile": place.profile()}
    assert client.ask("launch", **asked) == before
    with refused("conflict"):
        client.ask("launch", **{**asked, "launch_id": fresh()})
    with refused("conflict"):
        client.ask("kill", id=name, launch_id=fresh())
    with refused("precondition"):
        client.ask("release", id=name)
    assert place.look(client, name) == before
    over = client.ask("kill", id=name, launch_id=launch)
    assert client.ask("launch", **asked) == over
    again = client.ask("launch", **{**asked, "launch_id": fresh()})
    assert again["state"] == "running"
    assert again["exit"] is None


def test_one_that_powers_off_is_told_by_the_watch(place: HelperHouse, client: Client) -> None:
    name = fresh()
    client.ask("allocate", id=name, disk_bytes=64 * MIB)
    launch = fresh()
    client.ask("launch", id=name, launch_id=launch, profile=place.profile(tinykernel.EXIT))
    over = until_exited(place, client, name)
    assert over["exit"] | {"at_ms": 0} == {"code": 0, "signal": None, "by": "guest", "at_ms": 0}
    for op in ("dial", "monitor", "watch"):
        with refused("precondition"):
            client.ask_fds(op, id=name, launch_id=launch)


def test_two_share_their_images_and_nothing_else(place: HelperHouse, client: Client) -> None:
    one, _ = place.machine(client)
    two, _ = place.machine(client)
    files = {}
    for name in (one, two):
        root = Path(f"/proc/{pid(place, name, 'vmm')}/root")
        files[name] = {p.name: p.stat().st_ino for p in (root / "machine").iterdir()}
        links = [os.readlink(p) for p in Path(f"/proc/{pid(place, name, 'vmm')}/fd").iterdir()]
        assert not [
            link for link in links
            if not re.match(r"/dev/null$|pipe:|socket:|anon_inode:|/memfd:|/machine/|.*/data\.img$",
                            link)
        ]  # fmt: skip
        disks = {link for link in links if link.endswith("data.img")}
        assert disks == {str(place.state / "instances" / name / "data.img")}
    assert files[one] == files[two]
    assert set(files[one]) == {"kernel", "initramfs", "variant", "guest"}


def test_its_processes_are_apart_from_the_host_and_within_their_limits(
    place: HelperHouse, client: Client
) -> None:
    name, _ = place.machine(client, memory_mib=96)
    for which in ("vmm", "device"):
        number = pid(place, name, which)
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{number}/status").read_text().splitlines()
            if ":\t" in line
        )
        assert status["NSpid"].split() == [str(number), "1"]
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
        assert status["NoNewPrivs"] == "1"
        assert int(status["Seccomp_filters"]) >= 2  # ours, and its own
        limits = Path(f"/proc/{number}/limits").read_text().splitlines()
        hard = {line[:25].strip(): line[47:68].strip() for line in limits}
        assert hard["Max core file size"] == "0"
        assert int(hard["Max address space"]) < 4 << 30
        assert int(hard["Max file size"]) == (96 << 20 if which == "vmm" else 0)
        assert int(hard["Max processes"]) <= 512
    mine = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("user", "pid", "net", "ipc",
            "uts", "mnt", "cgroup")}  # fmt: skip
    for kind, host in mine.items():
        assert os.readlink(f"/proc/{pid(place, name, 'vmm')}/ns/{kind}") != host
    shim_sid = os.getsid(pid(place, name, "shim"))
    assert shim_sid == pid(place, name, "shim")
    assert os.getsid(pid(place, name, "vmm")) != shim_sid


def test_a_console_that_never_stops_is_kept_within_its_size(
    place: HelperHouse, client: Client
) -> None:
    name, launch = place.machine(client, does=tinykernel.SPAM)
    directory = place.state / "instances" / name
    until(
        "it has been cut",
        lambda: client.ask("console", id=name, offset=1 << 50)["end"] > 600_000,
        seconds=60,
    )
    shape = capped.CONSOLE
    for path in directory.glob("console.*"):
        number = shape.parse(path.name)
        assert number is not None
        assert path.stat().st_size <= shape.size(number)
    assert len(list(directory.glob("console.*"))) <= 3
    assert console(client, name).startswith(b"up\n####")
    client.ask("kill", id=name, launch_id=launch)


def test_a_kernel_that_is_none_is_told_in_qemus_words(place: HelperHouse, client: Client) -> None:
    name, launch = fresh(), fresh()
    client.ask("allocate", id=name, disk_bytes=64 * MIB)
    profile = place.profile() | {"kernel": place.add(b"")}
    for _ in range(2):  # the same launch again is the same failure
        with refused("launch_failed") as caught:
            client.ask("launch", id=name, launch_id=launch, profile=profile)
        assert "vmm ended" in caught.value.detail and "kernel" in caught.value.detail
    state = place.look(client, name)
    assert (state["state"], state["vmm"]) == ("failed", None)
    assert state["error"] == caught.value.detail
    assert not [p for p in place.processes() if p != place.process.pid]  # type: ignore[union-attr]
    again = client.ask("launch", id=name, launch_id=fresh(), profile=place.profile())
    assert (again["state"], again["error"]) == ("running", None)


def test_what_lies_in_its_room_from_before_does_not_stop_a_start(
    place: HelperHouse, client: Client
) -> None:
    name = fresh()
    client.ask("allocate", id=name, disk_bytes=64 * MIB)
    room = place.runtime / "vm" / "shim" / name
    room.mkdir(0o700)
    for each in ("vsock", "qmp", "ctl"):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(room / each))
    client.ask("launch", id=name, launch_id=fresh(), profile=place.profile())


# ------------------------------------------------------------------------ who is killed


def test_the_helper_may_be_killed_and_finds_all_again(place: HelperHouse, client: Client) -> None:
    name, launch = place.machine(client)
    before = place.look(client, name)
    _, (watch,) = client.ask_fds("watch", id=name, launch_id=launch)
    for _ in range(3):
        place.stop()
        place.start()
        with place.client() as again:
            assert place.look(again, name) == before
            os.close(again.ask_fd("dial", id=name, launch_id=launch))
    assert not select.select([watch], [], [], 0)[0]  # nothing happened to the machine
    with place.client() as again:
        over = again.ask("kill", id=name, launch_id=launch)
        assert (over["exit"]["signal"], over["exit"]["by"]) == (9, "kill")
        assert ended(watch)
        os.close(watch)
        again.ask("release", id=name)
    assert place.leftovers() == []


def test_a_killed_shim_is_replaced_and_the_machine_does_not_notice(
    place: HelperHouse, client: Client
) -> None:
    name, launch = place.machine(client)
    vmm = pid(place, name, "vmm")
    for _ in range(3):
        shim = pid(place, name, "shim")
        _, (watch,) = client.ask_fds("watch", id=name, launch_id=launch)
        os.kill(shim, signal.SIGKILL)
        assert ended(watch)
        os.close(watch)
        until("another one is there", lambda shim=shim: pid(place, name, "shim") != shim
              and place.look(client, name)["shim"])  # fmt: skip
        assert place.look(client, name)["vmm"]["pid"] == vmm
        os.close(client.ask_fd("dial", id=name, launch_id=launch))
    over = client.ask("kill", id=name, launch_id=launch)
    assert (over["state"], over["exit"]["by"]) == ("exited", "kill")
    client.ask("release", id=name)
    assert place.leftovers() == []


@pytest.mark.parametrize("asked_late", [False, True])
def test_a_worker_that_starts_anew_when_its_shim_is_killed(
    place: HelperHouse, client: Client, asked_late: bool
) -> None:
    """At the gate, or on its way from there: it ends with its shim and another comes, or lives."""
    name, launch = place.machine(client)
    vmm = pid(place, name, "vmm")
    for _ in range(3):
        worker, shim = pid(place, name, "worker"), pid(place, name, "shim")
        os.kill(worker, signal.SIGKILL)
        until("another one is begun", lambda worker=worker: pid(place, name, "worker") != worker)
        if asked_late:  # it is past its gate, and has not said yet that it serves
            new = pid(place, name, "worker")
            until("it is past its gate", lambda new=new: "-I" in proc_facts.cmdline(new))
        os.kill(shim, signal.SIGKILL)
        until("another shim is there", lambda shim=shim: pid(place, name, "shim") != shim
              and place.look(client, name)["shim"])  # fmt: skip
        until("a worker serves", lambda: _serves(place, name))
        state = place.look(client, name)
        assert (state["vmm"]["pid"], state["worker"]) == (vmm, True)
    client.ask("kill", id=name, launch_id=launch)
    client.ask("release", id=name)
    assert place.leftovers() == []


def _serves(place: HelperHouse, name: str) -> bool:
    """Whether the worker answers whoever comes to its socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        try:
            sock.connect(str(place.runtime / "vm" / "worker" / name / "ctl"))
            return bool(sock.recv(1))
        except OSError:
            return False


def test_shim_and_helper_may_be_killed_together(place: HelperHouse, client: Client) -> None:
    name, launch = place.machine(client)
    vmm = pid(place, name, "vmm")
    place.stop()
    os.kill(pid(place, name, "shim"), signal.SIGKILL)
    place.start()
    with place.client() as again:
        assert place.look(again, name)["vmm"]["pid"] == vmm
        until("another shim is there", lambda: place.look(again, name)["shim"])
        os.kill(pid(place, name, "device"), signal.SIGKILL)  # the new one watches as the old did
        assert until_exited(place, again, name)["exit"]["by"] == "device-died"
        again.ask("release", id=name)
    assert place.leftovers() == []


def test_a_device_that_died_with_nobody_watching_ends_the_machine(
    place: HelperHouse, client: Client
) -> None:
    name, _ = place.machine(client)
    place.stop()
    for which in ("shim", "device"):
        os.kill(pid(place, name, which), signal.SIGKILL)
    place.start()
    with place.client() as again:
        # QEMU itself gives up, too, when it misses its device early in a boot.
        assert until_exited(place, again, name)["exit"]["by"] in ("device-died", "vmm")
    assert [p for p in place.processes() if p != place.process.pid] == []  # type: ignore[union-attr]


def test_all_but_the_machine_itself_may_be_killed(place: HelperHouse, client: Client) -> None:
    """Helper, shim and every bubblewrap: it runs on, and is ended by its record alone."""
    name, launch = place.machine(client)
    vmm = pid(place, name, "vmm")
    place.stop()
    for which in ("shim", "vmm_jail", "device_jail"):
        os.kill(pid(place, name, which), signal.SIGKILL)
    place.start()
    with place.client() as again:
        assert place.look(again, name)["vmm"]["pid"] == vmm
        over = again.ask("kill", id=name, launch_id=launch)
        assert (over["exit"]["by"], over["exit"]["code"]) == ("kill", None)
        again.ask("release", id=name)
    assert place.leftovers() == []


def test_a_killed_machine_has_ended_by_that_signal(place: HelperHouse, client: Client) -> None:
    name, _ = place.machine(client)
    os.kill(pid(place, name, "vmm"), signal.SIGKILL)
    over = until_exited(place, client, name)
    assert (over["exit"]["signal"], over["exit"]["by"]) == (9, "vmm")


def test_its_signal_is_known_also_when_its_bubblewrap_was_killed(
    place: HelperHouse, client: Client
) -> None:
    name, _ = place.machine(client)
    os.kill(pid(place, name, "vmm_jail"), signal.SIGKILL)
    assert place.look(client, name)["state"] == "running"
    os.kill(pid(place, name, "vmm"), signal.SIGKILL)
    over = until_exited(place, client, name)
    assert (over["exit"]["signal"], over["exit"]["by"]) == (9, "vmm")


def test_a_killed_device_ends_its_machine(place: HelperHouse, client: Client) -> None:
    name, launch = place.machine(client)
    _, (watch,) = client.ask_fds("watch", id=name, launch_id=launch)
    os.kill(pid(place, name, "device"), signal.SIGKILL)
    assert ended(watch)
    os.close(watch)
    over = until_exited(place, client, name)
    assert over["exit"]["by"] == "device-died"


def test_a_machine_that_died_with_nobody_watching_is_known(
    place: HelperHouse, client: Client
) -> None:
    name, _ = place.machine(client)
    place.stop()
    for which in ("shim", "vmm"):
        os.kill(pid(place, name, which), signal.SIGKILL)
    place.start()
    with place.client() as again:
        over = until_exited(place, again, name)
        assert over["exit"]["by"] == "vmm"
        again.ask("release", id=name)
    assert place.leftovers() == []


def test_a_shim_takes_no_notice_of_what_ends_others(place: HelperHouse, client: Client) -> None:
    name, _ = place.machine(client)
    shim = pid(place, name, "shim")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1,
                   signal.SIGUSR2, signal.SIGPIPE, signal.SIGALRM):  # fmt: skip
        os.kill(shim, number)
    assert place.look(client, name)["shim"]
    ignored = int(
        next(
            line.split()[1]
            for line in Path(f"/proc/{pid(place, name, 'vmm')}/status").read_text().splitlines()
            if line.startswith("SigIgn")
        ),
        16,
    )
    assert not ignored & 1 << (signal.SIGTERM - 1)  # that is its own affair and not left to it


# ------------------------------------------------------------------------ who is stopped


def test_a_stopped_machine_delays_no_list_and_can_be_killed(
    place: HelperHouse, client: Client
) -> None:
    name, launch = place.machine(client)
    os.kill(pid(place, name, "vmm"), signal.SIGSTOP)
    begun = time.monotonic()
    assert place.look(client, name)["state"] == "running"
    os.close(client.ask_fd("dial", id=name, launch_id=launch))
    assert time.monotonic() - begun < 1
    over = client.ask("kill", id=name, launch_id=launch)
    assert (over["state"], over["exit"]["signal"]) == ("exited", 9)


@pytest.mark.parametrize("which", ["shim", "device", "vmm_jail", "device_jail"])
def test_whoever_of_them_is_stopped_it_can_be_killed(
    place: HelperHouse, client: Client, which: str
) -> None:
    name, launch = place.machine(client)
    os.kill(pid(place, name, which), signal.SIGSTOP)
    begun = time.monotonic()
    place.look(client, name)
    assert time.monotonic() - begun < 1
    over = client.ask("kill", id=name, launch_id=launch)
    assert (over["state"], over["exit"]["by"]) == ("exited", "kill")
    client.ask("release", id=name)
    assert place.leftovers() == []


def test_a_shim_that_does_not_answer_is_no_reason_to_wait(
    place: HelperHouse, client: Client
) -> None:
    name, launch = place.machine(client)
    shim = pid(place, name, "shim")
    os.kill(shim, signal.SIGSTOP)
    with refused("unavailable"):
        client.ask_fds("watch", id=name, launch_id=launch)
    os.kill(shim, signal.SIGCONT)
    state, (watch,) = client.ask_fds("watch", id=name, launch_id=launch)
    assert state["state"] == "running"
    os.close(watch)


# ------------------------------------------------------------------------ what is removed


def test_its_room_may_be_removed_by_hand(place: HelperHouse, client: Client) -> None:
    name, launch = place.machine(client)
    shutil.rmtree(place.runtime / "vm" / "shim" / name)
    assert place.look(client, name)["state"] == "running"
    with refused("unavailable"):
        client.ask_fds("dial", id=name, launch_id=launch)
    over = client.ask("kill", id=name, launch_id=launch)
    assert (over["state"], over["vmm"], over["exit"]["by"]) == ("exited", None, "kill")
    client.ask("launch", id=name, launch_id=fresh(), profile=place.profile())


def test_its_directory_may_be_removed_by_hand(place: HelperHouse, client: Client) -> None:
    """While it runs: it is still known, and still ended."""
    name, launch = place.machine(client)
    shutil.rmtree(place.state / "instances" / name)
    state = place.look(client, name)
    assert (state["state"], state["disk_bytes"], state["shim"]) == ("running", None, True)
    with refused("precondition"):
        client.ask("release", id=name)
    client.ask("kill", id=name, launch_id=launch)
    assert place.look(client, name)["state"] == "partial"
    client.ask("release", id=name)
    assert place.leftovers() == []


def test_a_helper_leaves_no_zombies(place: HelperHouse, client: Client) -> None:
    name = fresh()
    client.ask("allocate", id=name, disk_bytes=64 * MIB)
    for _ in range(3):
        client.ask("launch", id=name, launch_id=fresh(), profile=place.profile(tinykernel.EXIT))
        until_exited(place, client, name)
    assert place.process is not None
    helper = place.process.pid
    until("all are reaped", lambda: not proc_facts.descendants(helper))


def test_no_name_of_a_program_is_searched_for() -> None:
    """Absolute names only: PATH is nobody's way in."""
    assert all(path.startswith("/usr/") for path in machine.PROGRAMS)
