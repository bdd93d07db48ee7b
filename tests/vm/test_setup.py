"""setup and uninstall by the real program: a guest really runs, and nothing stays behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import vm
from support.cli import Ran
from support.vm import Machines

from agent_box.engine import chosen

pytestmark = [pytest.mark.timeout(600)]
LEAN = "version = 1\n[profiles.default]\nmemory = '256M'\ndisk = '256M'\ncpus = 1\n"


@pytest.fixture
def home() -> Iterator[Machines]:
    made = Machines(config=LEAN, with_image=False)
    try:
        yield made
    finally:
        made.close()


def files(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*"))


def told(ran: Ran) -> str:
    assert ran.exit == 0, ran
    return ran.err


def test_setup_runs_a_guest_and_uninstall_leaves_nothing(home: Machines) -> None:
    before = files(home.home)
    config = (home.home / "config/agent-box/config.toml").read_bytes()
    home.paths.state.mkdir(mode=0o700, parents=True)
    shutil.copytree(vm.images(), home.paths.images)
    ran = home.run("setup", "--json", timeout=vm.START_S)
    assert ran.exit == 0, ran
    result = ran.result
    works = "kvm" if os.access("/dev/kvm", os.R_OK | os.W_OK) else "tcg"
    assert result["accel"]["by"] == "setup"
    if works == "tcg":
        assert result["accel"]["accel"] == "tcg"
        assert "/dev/kvm" in result["accel"]["why"]
    assert chosen.read(chosen.file(home.paths)) == result["accel"]["accel"]
    assert "engine-accel" not in result["gaps"]
    assert home.run("list", "--json").result["instances"] == []
    assert home.left() == []

    again = home.run("setup", "--no-pull", "--json", timeout=vm.START_S)  # twice is as once
    assert again.result["accel"]["accel"] == result["accel"]["accel"]

    assert home.run("create", "work").exit == 0
    refused = home.run("uninstall", "--purge", "--json")
    assert (refused.exit, refused.error["kind"]) == (4, "instances-exist")
    assert home.state("work") == "stopped"
    home.start("work")
    assert home.run("uninstall", "--purge", "--delete-instances", timeout=120).exit == 0
    home.paths.state.parent.rmdir()  # XDG_STATE_HOME itself is not ours
    assert files(home.home) == before
    assert (home.home / "config/agent-box/config.toml").read_bytes() == config
    assert home.walls() == [] and home.daemon_pid() == 0


def test_without_an_image_nothing_is_chosen_and_uninstall_keeps_the_state(home: Machines) -> None:
    err = told(home.run("setup", "--no-pull"))
    assert "there is no image base" in err and "not tried" in err
    assert chosen.read(chosen.file(home.paths)) is None
    assert home.run("secret", "set", "k", stdin="value").exit == 0
    ran = home.run("uninstall", "--json")
    assert ran.result["purged"] is False
    assert (home.paths.data("store") / "credentials.db").exists()
    assert not home.paths.runtime.exists()


def test_the_system_part_is_not_there_yet(home: Machines) -> None:
    for verb in ("setup", "uninstall"):
        assert home.run(verb, "--system", "--json").error["exit"] == 70
