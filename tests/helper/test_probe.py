"""What a host lacks is told by name, after it was really tried."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.helperhouse import HelperHouse

from agent_box.helper import bpf, contract, disk, jail, machine, probe, procs, wire
from agent_box.helper.places import Places
from agent_box.helper.probe import Probe
from agent_box.helper.wire import Refused


@pytest.fixture(scope="module")
def found() -> Iterator[Places]:
    made = HelperHouse()
    yield Places(made.runtime, made.state)
    made.close()


def gaps(found: Places) -> dict[str, str]:
    told = Probe("user", found).run()
    wire.check(contract.PROBED, told)
    return {gap["name"]: gap["text"] for gap in told["gaps"]}


def test_a_good_host_has_no_gap(found: Places) -> None:
    told = Probe("user", found).run()
    wire.check(contract.PROBED, told)
    assert told["gaps"] == []
    assert told["jail"]
    assert told["uid"] == os.geteuid()
    assert "QEMU" in told["qemu"] and "bubblewrap" in told["bwrap"] and "mke2fs" in told["mkfs"]


@pytest.mark.parametrize(
    ("module", "name", "value", "gap"),
    [
        (jail, "BWRAP", "/usr/bin/no-such-bwrap", "bwrap-missing"),
        (machine, "PROGRAMS", (), "engine-missing"),
        (machine, "PROGRAMS", ("/usr/bin/false",), "engine-missing"),
        (machine, "VSOCK", "vhost-user-nothing-device", "engine-missing"),
        (disk, "PROGRAMS", (), "mkfs-missing"),
        (jail, "_DEVICES", ("no-such-device",), "jail-unavailable"),
        (bpf, "_X86_64", 0x40000003, "jail-unavailable"),  # the filter kills everything
    ],
)
def test_what_is_missing_is_told_by_name(
    found: Places, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: Any, gap: str
) -> None:
    monkeypatch.setattr(module, name, value)
    told = gaps(found)
    assert set(told) == {gap}
    assert told[gap]


def test_a_machine_without_a_filter_has_no_jail(
    found: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_families: object) -> bytes:
        raise bpf.FilterError("no filter of system calls for riscv64")

    monkeypatch.setattr(bpf, "program", refuse)
    assert "riscv64" in gaps(found)["jail-unavailable"]


def test_the_counter_is_measured_once_for_each_start_of_the_host(
    found: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Probe("user", found).tsc_khz()
    assert 100_000 < first < 10_000_000
    monkeypatch.setattr(probe, "_run", lambda _command: (1, "not again"))
    assert Probe("user", found).tsc_khz() == first  # another helper, later
    monkeypatch.setattr(procs, "boot_id", lambda: "another")
    with pytest.raises(Refused, match="not again"):
        Probe("user", found).tsc_khz()
    assert gaps(found) == {
        "bwrap-missing": gaps(found)["bwrap-missing"],
        "tsc-unknown": "the time stamp counter cannot be measured: not again",
        "engine-missing": gaps(found)["engine-missing"],
        "mkfs-missing": gaps(found)["mkfs-missing"],
    }


def test_the_counter_is_measured_well() -> None:
    from agent_box.helper import tsc

    one, two = tsc.measure(), tsc.measure()
    assert abs(one - two) < one / 1000


def test_of_many_readings_the_least_disturbed_counts() -> None:
    from agent_box.helper import tsc

    readings = iter(range(1, 10 * tsc.READINGS))
    asked = 0

    def counter() -> int:
        nonlocal asked
        asked += 1
        disturbed = asked % 2 == 0 and asked != 20
        return next(readings) * 10 + (5_000_000 if disturbed else 0)

    middle, _, spread = tsc._both(counter)
    assert (middle, spread) == (195.0, 10)


def test_a_spoiled_measurement_is_made_anew(found: Places) -> None:
    state = Path(os.readlink(f"/proc/self/fd/{found.own}"))
    for spoilt in ("", "x", f"{procs.boot_id()} x", "a b c"):
        (state / probe.TSC_FILE).write_text(spoilt)
        assert Probe("user", found).tsc_khz() > 100_000


def test_without_mkfs_no_disk_is_made_and_nothing_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    for programs, why in (((), "e2fsprogs"), (("/usr/bin/false",), "mkfs.ext4")):
        monkeypatch.setattr(disk, "PROGRAMS", programs)
        with pytest.raises(Refused, match=why) as caught:
            disk.make(fd, contract.MIN_DISK)
        assert caught.value.code == "host"
        assert os.listdir(tmp_path) == []
    os.close(fd)
