"""kill -9 of helper and shim wherever they change anything. Afterwards nothing is left that a
new helper does not show and remove."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest
from support import syscalls, tinykernel
from support.helperhouse import Client, HelperHouse, fresh
from support.until import until

from agent_box.helper import procs, shim
from agent_box.helper.ops import Ops, user_mode
from agent_box.helper.places import Places
from agent_box.helper.wire import Refused

pytestmark = [
    pytest.mark.skipif(not syscalls.CAN_INJECT, reason="needs x86-64 to count system calls"),
]
MIB = 1 << 20


@pytest.fixture
def still() -> Iterator[HelperHouse]:
    """Directories without a helper."""
    made = HelperHouse()
    Places(made.runtime, made.state)
    try:
        yield made
    finally:
        made.close()


def ops(place: HelperHouse) -> Ops:
    found = Places(place.runtime, place.state)
    return Ops(user_mode(), found, log=lambda text: None, on_end=lambda fd, do: os.close(fd))


def settle(place: HelperHouse, name: str, allowed: set[str]) -> None:
    """A new helper shows what there is, ends it and removes it."""
    place.start()
    with place.client() as client:
        for state in client.ask("list", after=None)["instances"]:
            assert state["id"] == name
            until("it is settled", lambda: place.look(client, name)["state"] != "starting")
            state = place.look(client, name)
            assert state["state"] in allowed, state
            if state["launch_id"] is not None:
                client.ask("kill", id=name, launch_id=state["launch_id"])
        client.ask("release", id=name)
        assert client.ask("list", after=None)["instances"] == []
    until("nothing is left", lambda: place.leftovers() == [], seconds=30)
    place.stop(signal.SIGTERM)


def points(work: Callable[[], None], again: Callable[[], None], most: int) -> list[int]:
    """At which of the effects of `work` to act: all, or so many of them."""
    syscalls.run(work, at=-1)  # the first one also imports and remembers
    again()
    count = syscalls.run(work, at=-1).reached
    again()
    assert count > 3
    if count <= most:
        return list(range(count))
    return sorted(random.Random(7).sample(range(count), most))


# ------------------------------------------------------------------------ without a machine


def test_allocate_may_be_killed_at_any_point(still: HelperHouse) -> None:
    name = fresh()
    made = ops(still)

    def work() -> None:
        made.allocate({"id": name, "disk_bytes": 64 * MIB})

    for at in points(work, lambda: settle(still, name, {"allocated"}), 40):
        syscalls.run(work, at=at)
        made.allocate({"id": name, "disk_bytes": 64 * MIB})  # finished by the next one
        settle(still, name, {"allocated"})
        syscalls.run(work, at=at)
        settle(still, name, {"allocated", "partial"})


def test_allocate_whose_disk_fails_leaves_nothing(still: HelperHouse) -> None:
    name = fresh()
    made = ops(still)

    def work() -> None:
        try:
            made.allocate({"id": name, "disk_bytes": 64 * MIB})
        except Refused as refused:
            assert refused.code in ("exhausted", "host"), refused
            raise syscalls.Refused(3) from None

    for at in points(work, lambda: settle(still, name, {"allocated"}), 40):
        ended = syscalls.run(work, at=at, error=errno.ENOSPC)
        code = os.waitstatus_to_exitcode(ended.status)
        assert code in (0, 3), ended
        if code == 3 and ended.acted not in ("unlink", "unlinkat"):
            assert not (still.state / "instances" / name).exists(), ended
        settle(still, name, {"allocated", "partial"})


def test_release_may_be_killed_at_any_point(still: HelperHouse) -> None:
    name = fresh()
    made = ops(still)

    def work() -> None:
        made.release({"id": name})

    def again() -> None:
        made.allocate({"id": name, "disk_bytes": 64 * MIB})
        for role in ("shim", "worker", "broker"):
            (still.runtime / "vm" / role / name).mkdir(0o700, exist_ok=True)
        for each in ("console.0", "messages.0", "lock"):
            (still.state / "instances" / name / each).touch()

    again()
    for at in points(work, again, 40):
        syscalls.run(work, at=at)
        settle(still, name, {"allocated", "partial"})
        again()


# ------------------------------------------------------------------------ with one


def test_the_helper_may_be_killed_at_any_point_of_a_launch(still: HelperHouse) -> None:
    name = fresh()
    profile = still.profile()
    made = ops(still)
    made.probe({})  # measures and remembers, so that each launch is alike
    made.allocate({"id": name, "disk_bytes": 64 * MIB})

    def work() -> None:
        made.launch({"id": name, "launch_id": fresh(), "profile": profile})

    def again() -> None:
        settle(still, name, {"allocated", "running", "failed"})
        made.allocate({"id": name, "disk_bytes": 64 * MIB})

    for at in points(work, again, 14):
        syscalls.run(work, at=at)
        again()


SETUP = 4  # effects of `shim_of` before the shim's own


def shim_of(place: HelperHouse, name: str) -> Callable[[], None]:
    """What a helper would start, to be run in a child of the test."""
    for role in ("shim", "worker", "broker"):
        (place.runtime / "vm" / role / name).mkdir(0o700, exist_ok=True)
    profile = place.profile()
    images = [
        {"name": part, "path": str(place.blobs / profile[part])}
        for part in ("kernel", "initramfs", "variant", "guest")
    ]
    instance = place.state / "instances" / name

    def run() -> None:
        fds = {
            "lock": os.open(instance / "lock", os.O_RDWR | os.O_CREAT, 0o600),
            "instance": os.open(instance, os.O_RDONLY),
            "room": os.open(place.runtime / "vm" / "shim" / name, os.O_RDONLY),
            "note": os.open("/dev/null", os.O_WRONLY),
        }
        assert len(fds) == SETUP
        fcntl.flock(fds["lock"], fcntl.LOCK_EX)
        os.setsid()
        procs.prctl(procs.PR_SET_CHILD_SUBREAPER, 1)
        made = shim.Shim(
            {"adopt": False, "id": name, "launch_id": fresh(), "profile": profile,
             "images": images, "disk_bytes": 64 * MIB, "tsc_khz": 2_000_000, **fds}
        )  # fmt: skip
        os._exit(shim.keep(made, adopt=False, until=made.running))

    return run


def rehearsed(
    place: HelperHouse, name: str
) -> tuple[Callable[[], Callable[[], None]], Callable[[], None]]:
    """Gets a launch ready; and clears up after one, so that there can be another."""
    made = ops(place)

    def prepared() -> Callable[[], None]:
        made.allocate({"id": name, "disk_bytes": 64 * MIB})
        return shim_of(place, name)

    def again() -> None:
        settle(place, name, {"running", "exited", "failed"})
        made.allocate({"id": name, "disk_bytes": 64 * MIB})
        for role in ("shim", "worker", "broker"):
            (place.runtime / "vm" / role / name).mkdir(0o700, exist_ok=True)

    return prepared, again


def test_the_shim_may_be_killed_at_any_point_of_a_launch(still: HelperHouse) -> None:
    name = fresh()
    prepared, again = rehearsed(still, name)
    for at in points(prepared(), again, 20):
        syscalls.run(prepared(), at=at)
        settle(still, name, {"allocated", "running", "exited", "failed"})


def test_a_shim_whose_disk_fails_tells_and_leaves_nothing_running(still: HelperHouse) -> None:
    name = fresh()
    prepared, again = rehearsed(still, name)
    for at in points(prepared(), again, 16):
        if at < SETUP:
            continue
        ended = syscalls.run(prepared(), at=at, error=errno.ENOSPC)
        assert os.waitstatus_to_exitcode(ended.status) in (0, 1), ended
        settle(still, name, {"allocated", "running", "exited", "failed"})


def test_the_helper_may_be_killed_while_it_finds_again_what_runs(still: HelperHouse) -> None:
    """The machine lost its shim, and then the helper again and again."""
    still.start()
    with still.client() as client:
        name, launch = still.machine(client)
        vmm = still.look(client, name)["vmm"]
    still.stop()
    made = ops(still)

    def lose() -> None:
        found = json.loads((still.state / "instances" / name / "state.json").read_text())
        shim_proc = procs.Proc(**found["procs"]["shim"])
        procs.end([shim_proc], 10)

    lose()
    for at in points(made.recover, lose, 20):
        syscalls.run(made.recover, at=at)
        lose()
    still.start()
    with still.client() as client:
        until("it has a shim again", lambda: still.look(client, name)["shim"])
        assert still.look(client, name)["vmm"] == vmm
        assert client.ask("kill", id=name, launch_id=launch)["state"] == "exited"
        client.ask("release", id=name)
    until("nothing is left", lambda: still.leftovers() == [], seconds=30)


@pytest.mark.parametrize("seed", range(3))
def test_the_helper_may_be_killed_at_any_moment_of_any_operation(seed: int) -> None:
    """As a whole process, while several work with it, again and again."""
    place = HelperHouse()
    place.start()
    dice = random.Random(seed)
    names = [fresh() for _ in range(3)]
    over = threading.Event()
    answered = [0]

    def work(name: str, number: int) -> None:
        mine = random.Random(seed * 10 + number)
        while not over.is_set():
            try:
                with place.client() as client:
                    step(client, name, mine)
                    answered[0] += 1
            except (OSError, Refused):
                over.wait(0.01)  # the helper is gone, or it is another step's turn

    def step(client: Client, name: str, mine: random.Random) -> None:
        state = next(
            (s for s in client.ask("list", after=None)["instances"] if s["id"] == name), None
        )
        if state is None or state["state"] == "partial":
            client.ask("allocate", id=name, disk_bytes=64 * MIB)
        elif state["state"] == "running":
            os.close(client.ask_fd("dial", id=name, launch_id=state["launch_id"]))
            client.ask("kill", id=name, launch_id=state["launch_id"])
        elif mine.random() < 0.3:
            client.ask("release", id=name)
        else:
            does = tinykernel.IDLE if mine.random() < 0.8 else tinykernel.EXIT
            client.ask("launch", id=name, launch_id=fresh(), profile=place.profile(does))

    threads = [threading.Thread(target=work, args=(n, i)) for i, n in enumerate(names)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(12):
            over.wait(dice.uniform(0.05, 0.6))
            place.stop()
            place.start()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert answered[0] > 10
    with place.client() as client:
        for state in client.ask("list", after=None)["instances"]:
            if state["launch_id"] is not None:
                client.ask("kill", id=state["id"], launch_id=state["launch_id"])
            client.ask("release", id=state["id"])
    until("nothing is left", lambda: place.leftovers() == [], seconds=30)
    place.close()


def test_the_leftovers_are_seen(still: HelperHouse) -> None:
    """The tests above would notice a process or a directory."""
    assert still.leftovers() == []
    directory = os.open(still.state / "instances", os.O_RDONLY)
    child = subprocess.Popen(["/usr/bin/sleep", "60"], pass_fds=[directory])
    os.close(directory)
    assert any("sleep" in each for each in still.leftovers())
    child.kill()
    child.wait()
    (still.runtime / "vm" / "shim" / fresh()).mkdir(0o700)
    assert len(still.leftovers()) == 1
