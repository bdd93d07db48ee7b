"""Operations on an instance that does not run: its disk, its directories, what is left."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.helperhouse import Client, HelperHouse, fresh
from support.spoil import fill

from agent_box.helper import capped, images, procs, record
from agent_box.helper.places import Places, remove
from agent_box.helper.record import Record
from agent_box.helper.wire import Refused

MIB = 1 << 20
GIB = 1 << 30


def refused(code: str) -> Any:
    return pytest.raises(Refused, match=f"^{code}: ")


def directory(place: HelperHouse, name: str) -> Path:
    return place.state / "instances" / name


# ------------------------------------------------------------------------ allocate


def test_a_disk_is_sparse_whole_and_an_ext4(place: HelperHouse, client: Client) -> None:
    name = fresh()
    state = client.ask("allocate", id=name, disk_bytes=30 * GIB)
    assert (state["state"], state["disk_bytes"], state["launch_id"]) == (
        "allocated",
        30 * GIB,
        None,
    )
    disk = directory(place, name) / "data.img"
    found = disk.stat()
    assert found.st_size == 30 * GIB
    assert found.st_blocks * 512 < 32 * MIB
    assert stat.S_IMODE(found.st_mode) == 0o600
    checked = subprocess.run(["/usr/sbin/e2fsck", "-fn", str(disk)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    told = subprocess.run(
        ["/usr/sbin/dumpe2fs", "-h", str(disk)], capture_output=True, text=True, check=True
    ).stdout
    assert "agent-box-data" in told
    assert "metadata_csum" in told and "has_journal" in told
    assert [p.name for p in directory(place, name).iterdir()] == ["data.img"]


def test_the_same_again_is_the_same_and_another_size_is_a_conflict(
    place: HelperHouse, client: Client
) -> None:
    name = fresh()
    first = client.ask("allocate", id=name, disk_bytes=64 * MIB)
    inode = (directory(place, name) / "data.img").stat().st_ino
    assert client.ask("allocate", id=name, disk_bytes=64 * MIB) == first
    assert (directory(place, name) / "data.img").stat().st_ino == inode
    with refused("conflict"):
        client.ask("allocate", id=name, disk_bytes=65 * MIB)


def test_what_an_interrupted_one_left_is_finished(place: HelperHouse, client: Client) -> None:
    name = fresh()
    directory(place, name).mkdir(0o700)
    (directory(place, name) / "data.img.new").write_text("half")
    assert place.look(client, name)["state"] == "partial"
    client.ask("allocate", id=name, disk_bytes=64 * MIB)
    assert place.look(client, name)["state"] == "allocated"
    assert [p.name for p in directory(place, name).iterdir()] == ["data.img"]


def test_what_an_interrupted_one_left_is_released(place: HelperHouse, client: Client) -> None:
    name = fresh()
    directory(place, name).mkdir(0o700)
    client.ask("release", id=name)
    assert place.leftovers() == []


def test_a_size_that_the_file_system_cannot_hold_is_told(
    place: HelperHouse, client: Client
) -> None:
    """16 TiB: whether it can is the host's affair; either answer leaves nothing half made."""
    name = fresh()
    try:
        client.ask("allocate", id=name, disk_bytes=16 << 40)
    except Refused as refusal:
        assert refusal.code in ("exhausted", "host")
        assert place.leftovers() == []


# ------------------------------------------------------------------------ a full disk


@pytest.fixture
def small() -> Iterator[HelperHouse]:
    """A helper whose instances lie on a file system of 40 MiB."""
    made = HelperHouse(instances_bytes=40 * MIB)
    made.start()
    try:
        yield made
    finally:
        made.close()


def test_a_full_disk_is_told_before_anything_is_made(small: HelperHouse) -> None:
    filler = fill(small.instances(), leave=MIB)
    with small.client() as client:
        with refused("exhausted") as caught:
            client.ask("allocate", id=fresh(), disk_bytes=GIB)
        assert caught.value.detail == "the host's disk is full"
        assert client.ask("list", after=None)["instances"] == []
        assert os.listdir(small.instances()) == ["filler"]
        filler.unlink()
        client.ask("allocate", id=fresh(), disk_bytes=GIB)


def test_a_disk_that_gets_full_meanwhile_is_told_and_nothing_is_left(small: HelperHouse) -> None:
    """So large a file system that its bare outline is more than there is room for."""
    with small.client() as client:
        with refused("exhausted") as caught:
            client.ask("allocate", id=fresh(), disk_bytes=16 << 40)
        assert caught.value.detail == "the host's disk is full"
        assert client.ask("list", after=None)["instances"] == []
    assert os.listdir(small.instances()) == []


def test_a_disk_that_is_full_at_the_start_or_while_it_runs(small: HelperHouse) -> None:
    name, launch = fresh(), fresh()
    with small.client() as client:
        client.ask("allocate", id=name, disk_bytes=64 * MIB)
        filler = fill(small.instances(), leave=0)
        with refused("exhausted"):
            client.ask("launch", id=name, launch_id=launch, profile=small.profile())
        assert small.look(client, name)["state"] == "allocated"
        filler.unlink()
        client.ask("launch", id=name, launch_id=launch, profile=small.profile())
        filler = fill(small.instances(), leave=0)
        # The end is known although it cannot be written where the disk is full.
        ended = client.ask("kill", id=name, launch_id=launch)
        assert (ended["state"], ended["exit"]["by"]) == ("exited", "kill")
        assert small.look(client, name)["state"] == "exited"
        client.ask("release", id=name)
        assert os.listdir(small.instances()) == ["filler"]


# ------------------------------------------------------------------------ release


def test_release_gives_the_space_back_and_is_done_once(place: HelperHouse, client: Client) -> None:
    name = fresh()
    client.ask("allocate", id=name, disk_bytes=64 * MIB)
    (directory(place, name) / "extra").mkdir()
    (directory(place, name) / "extra" / "file").write_text("x")
    client.ask("release", id=name)
    assert place.leftovers() == []
    client.ask("release", id=name)
    client.ask("release", id=fresh())


def test_release_follows_no_link(place: HelperHouse, client: Client) -> None:
    outside = place.root / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    name = fresh()
    client.ask("allocate", id=name, disk_bytes=64 * MIB)
    (directory(place, name) / "link").symlink_to(outside)
    (directory(place, name) / "console.0").symlink_to(outside / "kept")
    with client:
        client.ask("release", id=name)
    assert (outside / "kept").read_text() == "kept"
    assert place.leftovers() == []


def test_a_link_in_the_place_of_an_instance_is_removed_not_followed(
    place: HelperHouse, client: Client
) -> None:
    outside = place.root / "outside"
    outside.mkdir(0o700)
    (outside / "data.img").write_text("kept")
    name = fresh()
    directory(place, name).symlink_to(outside)
    state = place.look(client, name)
    assert state["state"] == "partial"
    assert "not usable" in state["error"]
    for op, more in (("launch", {"launch_id": fresh(), "profile": place.profile()}),
                     ("allocate", {"disk_bytes": 64 * MIB})):  # fmt: skip
        with refused("host"):
            client.ask(op, id=name, **more)
    assert (outside / "data.img").read_text() == "kept"
    os.unlink(directory(place, name))


def test_one_bad_directory_does_not_hide_the_others(place: HelperHouse, client: Client) -> None:
    bad, good = sorted((fresh(), fresh()))
    client.ask("allocate", id=good, disk_bytes=64 * MIB)
    directory(place, bad).mkdir(0o755)
    directory(place, bad).chmod(0o755)
    states = {s["id"]: s["state"] for s in client.ask("list", after=None)["instances"]}
    assert states == {bad: "partial", good: "allocated"}
    directory(place, bad).chmod(0o700)


def test_a_directory_removed_by_hand_is_gone(place: HelperHouse, client: Client) -> None:
    name = fresh()
    client.ask("allocate", id=name, disk_bytes=64 * MIB)
    shutil.rmtree(directory(place, name))
    assert client.ask("list", after=None)["instances"] == []
    with refused("not_found"):
        client.ask("launch", id=name, launch_id=fresh(), profile=place.profile())
    client.ask("release", id=name)


def test_remove_tells_whether_it_is_gone(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    assert remove(fd, "none")
    (tmp_path / "file").write_text("x")
    assert remove(fd, "file")
    (tmp_path / "deep" / "er" / "still").mkdir(parents=True)
    (tmp_path / "deep" / "last").write_text("x")
    assert remove(fd, "deep", frozenset({"last", "never-there"}))
    assert os.listdir(tmp_path) == []
    os.close(fd)


# ------------------------------------------------------------------------ list


def test_a_long_list_comes_in_pages_and_whole(place: HelperHouse, client: Client) -> None:
    names = sorted(fresh() for _ in range(150))
    for name in names:
        directory(place, name).mkdir(0o700)
    seen: list[str] = []
    while True:
        page = client.ask("list", after=seen[-1] if seen else None)
        seen += [state["id"] for state in page["instances"]]
        if not page["more"]:
            break
    assert seen == names
    for name in names:
        os.rmdir(directory(place, name))


def test_pages_are_cut_where_long_errors_would_not_fit(place: HelperHouse, client: Client) -> None:
    names = sorted(fresh() for _ in range(20))
    for name in names:
        directory(place, name).mkdir(0o700)
        fd = os.open(directory(place, name), os.O_RDONLY)
        record.write([fd], Record(fresh(), "failed", "x", {}, error="\U0001f4a9" * 1000))
        os.close(fd)
    first = client.ask("list", after=None)
    assert first["more"]
    assert 0 < len(first["instances"]) < 20
    for name in names:
        client.ask("release", id=name)


def test_what_is_no_id_is_nobody(place: HelperHouse, client: Client) -> None:
    (place.state / "instances" / "notes.txt").write_text("mine")
    (place.state / "instances" / fresh().upper()).mkdir()
    (place.state / "instances" / (fresh() + "0")).mkdir()
    assert client.ask("list", after=None)["instances"] == []
    shutil.rmtree(place.state / "instances")
    (place.state / "instances").mkdir(0o700)


def written(place: HelperHouse, name: str, found: Record) -> None:
    fd = os.open(directory(place, name), os.O_RDONLY)
    record.write([fd], found)
    os.close(fd)


@pytest.mark.parametrize(
    ("state", "boot", "seen", "by"),
    [
        ("running", "before", "exited", "host"),
        ("running", None, "exited", "vmm"),
        ("starting", "before", "failed", None),
        ("starting", None, "failed", None),
    ],
)
def test_a_launch_that_nobody_ended_is_told_as_over(
    place: HelperHouse, client: Client, state: str, boot: str | None, seen: str, by: str | None
) -> None:
    """After a restart of the host, and after everything was killed."""
    name, launch = fresh(), fresh()
    client.ask("allocate", id=name, disk_bytes=64 * MIB)
    me = procs.find(os.getpid())
    assert me is not None
    proc = me if boot else me._replace(start=me.start + 1)  # a number that somebody else has
    written(
        place, name, Record(launch, state, boot or procs.boot_id(), {"shim": proc, "vmm": proc})
    )
    found = place.look(client, name)
    assert (found["state"], found["vmm"], found["shim"]) == (seen, None, False)
    assert (found["exit"] or {"by": None})["by"] == by
    killed = client.ask("kill", id=name, launch_id=launch)
    assert killed["state"] == seen
    client.ask("launch", id=name, launch_id=fresh(), profile=place.profile())


def test_a_launch_is_not_meant_that_is_not_the_last(place: HelperHouse, client: Client) -> None:
    name = fresh()
    client.ask("allocate", id=name, disk_bytes=64 * MIB)
    for op in ("kill", "dial", "monitor", "watch"):
        with refused("conflict"):
            client.ask_fds(op, id=name, launch_id=fresh())
        with refused("not_found"):
            client.ask_fds(op, id=fresh(), launch_id=fresh())


def test_the_console_of_one_that_never_ran_is_empty(place: HelperHouse, client: Client) -> None:
    name = fresh()
    client.ask("allocate", id=name, disk_bytes=64 * MIB)
    empty = {"launch_id": None, "offset": 0, "end": 0, "data": ""}
    assert client.ask("console", id=name, offset=7) == empty
    fd = os.open(directory(place, name), os.O_RDONLY)
    writer = capped.Writer(fd, capped.CONSOLE)
    writer.write(b"y" * 500_000)
    writer.close()
    os.close(fd)
    at = 0
    total = 0
    while at < 500_000:
        part = client.ask("console", id=name, offset=at)
        total += len(part["data"]) * 3 // 4
        import base64

        at = part["offset"] + len(base64.b64decode(part["data"]))
    assert part["end"] == 500_000
    assert 64 * 1024 + 128 * 1024 < total < 330_000


# ------------------------------------------------------------------------ images


def launch(place: HelperHouse, client: Client, **more: Any) -> None:
    name = fresh()
    client.ask("allocate", id=name, disk_bytes=64 * MIB)
    profile = place.profile()
    profile |= more
    client.ask("launch", id=name, launch_id=fresh(), profile=profile)


@pytest.mark.parametrize("part", ["kernel", "initramfs", "variant", "guest", "harness"])
def test_a_missing_image_is_told_by_its_digest(
    place: HelperHouse, client: Client, part: str
) -> None:
    digest = "ab" * 32
    with refused("image_missing") as caught:
        launch(place, client, **{part: digest})
    assert caught.value.detail == digest


def test_a_flipped_byte_is_told_by_its_digest(place: HelperHouse, client: Client) -> None:
    launch(place, client)
    digest = place.profile()["variant"]
    path = place.blobs / digest
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    before = path.stat()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with refused("image_corrupt") as caught:
        launch(place, client)
    assert caught.value.detail == digest
    data[100] ^= 1
    path.write_bytes(data)
    launch(place, client)


@pytest.mark.parametrize("what", ["link", "directory", "pipe"])
def test_an_image_that_is_no_plain_file_is_refused(
    place: HelperHouse, client: Client, what: str
) -> None:
    digest = "cd" * 32
    path = place.blobs / digest
    if what == "link":
        path.symlink_to("/etc/passwd")
    elif what == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    with refused("host"):
        launch(place, client, guest=digest)


def test_what_was_verified_is_remembered_until_it_changes(place: HelperHouse) -> None:
    found = Places(place.runtime, place.state)
    digest = place.add(b"x" * 5000)
    seen = images.Images(found)
    path = seen.path(digest)
    assert path == str(place.blobs / digest)
    hashed: list[int] = []
    original = images._hash
    images._hash = lambda fd: hashed.append(fd) or original(fd)  # type: ignore[func-returns-value]
    try:
        seen.path(digest)
        images.Images(found).path(digest)  # after a restart
        assert hashed == []
        (place.blobs / digest).touch()
        seen.path(digest)
        assert len(hashed) == 1
    finally:
        images._hash = original


def test_more_memory_than_the_host_has_is_told(place: HelperHouse, client: Client) -> None:
    with refused("exhausted") as caught:
        launch(place, client, memory_mib=1 << 20)
    assert "MiB" in caught.value.detail


def test_kvm_is_not_replaced_by_another_accelerator(place: HelperHouse, client: Client) -> None:
    if client.ask("probe")["kvm"]:
        pytest.skip("this host has KVM")
    with pytest.raises(Refused) as caught:
        launch(place, client, accel="kvm")
    assert caught.value.code == "launch_failed"
    assert "kvm" in caught.value.detail.lower()
    assert [s["state"] for s in client.ask("list", after=None)["instances"]] == ["failed"]
