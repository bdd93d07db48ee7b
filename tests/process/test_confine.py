"""The wall as it is written down: from the contract and nothing else, complete, and readable."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support import procs
from support.house import House, contract, inner_pid, python
from support.until import until

import agent_box
from agent_box import cli
from agent_box.bus.schema import Contract, Network, Wall
from agent_box.process import confine
from agent_box.process.confine import ConfineError, Gap
from agent_box.process.paths import SERVICES, Paths

CODE = ("/usr", "/etc/ld.so.cache")


def with_wall(**changes: object) -> Contract:
    """The store's contract with another wall."""
    wall = Wall(why="A test.", **changes)  # type: ignore[arg-type]
    return dataclasses.replace(contract("store"), wall=wall)


def seen(profile: confine.Profile, paths: Paths) -> dict[Path, bool]:
    """What of ours a profile shows, and whether it may be written."""
    return {
        m.path: m.writable
        for m in profile.mounts
        if m.path.is_relative_to(paths.runtime.parent.parent)
    }


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_sees_what_its_contract_says(house: House, service: str) -> None:
    wall, paths = contract(service).wall, house.paths
    expected = {
        paths.public_keys: False,
        paths.keys(service): True,
        paths.data(service): True,
        paths.bus(service): True,
        **{paths.bus(callee): False for callee in wall.calls},
        **{paths.runtime / name: True for name in wall.sockets},
        **{paths.runtime / name: False for name in wall.dials},
    }
    if wall.config:
        expected[house.config.parent] = False
    if wall.network is Network.HOST:
        expected[paths.host_files] = False
    assert seen(house.profile(service), paths) == expected


@pytest.mark.parametrize("service", SERVICES)
def test_nothing_outside_of_ours_can_be_written(house: House, service: str) -> None:
    profile = house.profile(service)
    ours = house.paths.runtime.parent.parent
    assert not [m for m in profile.mounts if m.writable and not m.path.is_relative_to(ours)]
    words = confine.bwrap_arguments(profile)
    assert words[-4:] == ["--remount-ro", "/", "--chdir", "/"]
    assert "--dev" not in words  # it would bring the terminal
    assert "--new-session" not in words


@pytest.mark.parametrize("service", SERVICES)
def test_the_network_is_what_the_contract_says(house: House, service: str) -> None:
    words = confine.bwrap_arguments(house.profile(service))
    assert ("--unshare-net" in words) is (contract(service).wall.network is Network.NONE)
    for word in ("user", "pid", "ipc", "uts"):
        assert f"--unshare-{word}" in words


def test_each_word_of_a_wall_does_its_part(house: House) -> None:
    def profile(**changes: object) -> confine.Profile:
        return confine.profile(with_wall(**changes), house.paths, house.config)

    bare = profile()
    paths = house.paths
    assert paths.bus("broker") not in seen(bare, paths)
    assert seen(profile(calls=("broker",)), paths)[paths.bus("broker")] is False
    assert house.config.parent not in seen(bare, paths)
    assert seen(profile(config=True), paths)[house.config.parent] is False
    assert seen(profile(sockets=("a/b",)), paths)[paths.runtime / "a/b"] is True
    assert seen(profile(dials=("a",)), paths)[paths.runtime / "a"] is False
    assert profile(network=Network.HOST).host_network
    assert not bare.host_network
    assert dict(profile(open_files=77).limits)["RLIMIT_NOFILE"] == 77
    assert dict(profile(memory_mib=3).limits)["RLIMIT_DATA"] == 3 << 20
    assert profile(syscalls=(("chmod", "why"),)).syscalls == ("chmod",)


def test_without_a_config_there_is_none_to_see(house: House) -> None:
    profile = confine.profile(with_wall(config=True), house.paths, None)
    assert house.config.parent not in seen(profile, house.paths)


@pytest.mark.parametrize(
    "name", ["", "/", "/etc", "..", "../x", "a/../b", "bus", "bus/store", "supervisor", "host",
             "host/x", "a b", "A", "a\n"]
)  # fmt: skip
@pytest.mark.parametrize("field", ["sockets", "dials"])
def test_no_contract_reaches_beyond_its_directories(house: House, field: str, name: str) -> None:
    with pytest.raises(ConfineError):
        confine.profile(with_wall(**{field: (name,)}), house.paths, None)


def test_a_call_that_no_contract_may_have_is_refused(house: House) -> None:
    with pytest.raises(ConfineError, match="store: a contract cannot ask for ptrace"):
        confine.profile(with_wall(syscalls=(("ptrace", "why"),)), house.paths, None)


def test_the_frames_of_the_guest_can_be_read_and_the_cli_is_not_there(house: House) -> None:
    """In a checkout, guest/ and cli/ lie beside services/."""
    code = (
        "import agent_box.bus, agent_box.guest\n"
        "try: import agent_box.cli\n"
        "except ModuleNotFoundError: print('no cli')"
    )
    ran = run(house, code)
    assert ran.returncode == 0, ran.stderr
    editable = not Path(cli.__file__).is_relative_to(Path(agent_box.__file__).parent)
    assert (ran.stdout == "no cli\n") is editable


# ---------------------------------------------------------------- what would show too much


def refusal(house: House, config: Path) -> str:
    with pytest.raises(ConfineError) as raised:
        confine.profile(with_wall(config=True), house.paths, config)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_config_in_the_home_directory_is_refused(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = house.root / "home" / "me"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    assert "give it a directory of its own" in refusal(house, home / "config.toml")
    assert "give it a directory of its own" in refusal(house, home.parent / "config.toml")
    assert "give it a directory of its own" in refusal(house, Path("/config.toml"))
    (home / ".config").mkdir()
    confine.profile(with_wall(config=True), house.paths, home / ".config" / "config.toml")


def test_a_config_beside_or_below_our_directories_is_refused(house: House) -> None:
    for directory in (
        house.root,
        house.paths.state,
        house.paths.state.parent,
        house.paths.runtime,
        house.paths.data("store"),
    ):
        assert "cannot lie in" in refusal(house, directory / "config.toml")


def test_a_config_that_lies_there_by_a_link_is_refused(house: House) -> None:
    link = house.root / "link"
    link.symlink_to(house.paths.state)
    assert "cannot lie in" in refusal(house, link / "config.toml")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o702])
def test_a_config_where_others_write_is_refused(house: House, mode: int) -> None:
    os.chmod(house.config.parent, mode)
    assert "which others can write to" in refusal(house, house.config)


def test_a_python_around_our_directories_is_refused(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A venv in ~/.local, say, of which `lib` holds everything."""
    (house.root / "state" / "lib").mkdir()
    monkeypatch.setattr(sys, "prefix", str(house.root / "state"))
    confine.profile(with_wall(), house.paths, None)  # lib and bin lie beside our directory
    inside = Paths(house.paths.runtime, house.root / "state" / "lib" / "agent-box")
    with pytest.raises(ConfineError, match="which every service sees"):
        confine.profile(with_wall(), inside, None)


# ---------------------------------------------------------------- the command line


def test_prepare_makes_private_directories(house: House) -> None:
    os.umask(0)
    confine.prepare(with_wall(sockets=("a/b",), dials=("c",)), house.paths)
    confine.prepare(with_wall(sockets=("a/b",), dials=("c",)), house.paths)
    for name in ("a", "a/b", "c"):
        assert stat.S_IMODE((house.paths.runtime / name).stat().st_mode) == 0o700


def test_the_services_own_words(house: House) -> None:
    words = confine.arguments(with_wall(), house.paths, house.config, {"key-fd": "63"})
    assert words[:5] == [sys.executable, "-I", "-B", "-m", "agent_box.store"]
    assert words[5:] == [
        *("--runtime", str(house.paths.runtime)),
        *("--state", str(house.paths.state)),
        *("--inner-filter", "4"),
        *("--key-fd", "63"),
    ]
    words = confine.arguments(with_wall(config=True), house.paths, house.config)
    assert words[words.index("--config") + 1] == str(house.config)
    assert "--config" not in confine.arguments(with_wall(config=True), house.paths, None)


def test_the_whole_wall_is_in_the_command_line(house: House) -> None:
    process = house.start("engine")
    profile = house.profile("engine")
    inner = until("the service is started", lambda: inner_pid(process))
    cmdline = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    program = confine.arguments(contract("engine"), house.paths, house.config)
    assert cmdline == [
        confine.BWRAP,
        *confine.bwrap_arguments(profile),
        *("--seccomp", "3", "--", *program),
    ]

    def become() -> bool:
        return Path(f"/proc/{inner}/cmdline").read_bytes().startswith(sys.executable.encode())

    until("the program runs", become)
    assert Path(f"/proc/{inner}/cmdline").read_bytes().decode().split("\0")[:-1] == program


@pytest.mark.parametrize("name", ["a b", "it's", '"q"', "$HOME", "100%", "a;b", "#a", "ä", "`id`"])
def test_any_path_survives_the_shell(name: str) -> None:
    house = House()
    try:
        house.paths = Paths.checked(house.root / name / "agent-box", house.root / name / "s")
        house.paths.runtime.parent.mkdir(mode=0o700)
        house.paths.make()
        code = "import sys; print(sys.argv[1:]); open(sys.argv[1] + '/x', 'w')"
        where = str(house.paths.data("store"))
        command = house.command("store", python("-c", code, where, "", "$1"))
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (ran.stdout, ran.stderr) == (f"{[where, '', '$1']}\n", "")
        assert (house.paths.data("store") / "x").exists()
        assert shlex.split(command[2])[:4] == ["trap", "", "TERM;", "exec"]
    finally:
        house.close()


def run(house: House, code: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = house.command("store", python("-c", code))
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("code", [0, 1, 71])
def test_the_exit_status_comes_through(house: House, code: int) -> None:
    assert run(house, f"import sys; sys.exit({code})").returncode == code


def test_a_program_that_is_killed_is_told_as_shells_do(house: House) -> None:
    ran = run(house, "import ctypes; ctypes.string_at(0)")
    assert ran.returncode == 128 + signal.SIGSEGV


def test_a_descriptor_of_the_launcher_comes_through(house: House) -> None:
    ours, theirs = os.pipe()
    os.write(theirs, b"a key")
    os.close(theirs)
    os.dup2(ours, 63)
    try:
        ran = run(house, "import os; print(os.read(63, 9))", pass_fds=[63])
    finally:
        os.close(63)
        os.close(ours)
    assert ran.stdout == "b'a key'\n"


def test_what_was_begun_under_bubblewrap_dies_with_it(house: House) -> None:
    process = house.start("engine")
    inner = until("the service is started", lambda: inner_pid(process))
    assert inner is not None
    # While bubblewrap still builds, its child has not asked to die with it: what is begun then
    # ends by its lifeline (tests/process/test_lifeline.py), which this one has not.
    until("it is the program", lambda: procs.cmdline(inner)[:1] == [sys.executable])
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until("the service is gone too", lambda: procs.state(inner) in "XZ")


# ---------------------------------------------------------------- the probe


def test_the_probe_confines_a_program(tmp_path: Path) -> None:
    assert confine.probe(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_without_bubblewrap_the_gap_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confine, "BWRAP", str(tmp_path / "bwrap"))
    found = confine.probe(tmp_path)
    assert found is not None
    assert found.name == "bwrap-missing"
    assert "install the package bubblewrap" in found.fix
    with pytest.raises(ConfineError, match="install the package bubblewrap"):
        confine.command(
            confine.profile(with_wall(), Paths(Path("/r"), Path("/s")), None),
            ["true"],
            confine.Filters(tmp_path, tmp_path),
        )


def test_without_libseccomp_the_gap_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agent_box.process import seccomp

    def without() -> None:
        raise seccomp.SeccompError("libseccomp is missing: install the package libseccomp2")

    monkeypatch.setattr(seccomp, "_libseccomp", without)
    assert confine.probe(tmp_path) == Gap(
        "libseccomp-missing", "libseccomp is missing: install the package libseccomp2"
    )


@pytest.mark.parametrize(
    ("says", "name"),
    [
        ("bwrap: Unknown option --size", "bwrap-too-old"),
        ("bwrap: setting up uid map: Permission denied", "userns-denied"),  # AppArmor, 24.04
        ("bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted", "userns-denied"),
        ("bwrap: No permissions to create new namespace, likely because", "userns-denied"),
        ("bwrap: Creating new namespace failed: No space left on device", "userns-denied"),
        ("bwrap: Can't find source path /usr: No such file", "confinement-failed"),
        ("", "confinement-failed"),
        ("\x1b[31mbwrap: \x07odd", "confinement-failed"),
    ],
)
def test_what_bubblewrap_says_becomes_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, name: str
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text(f"#!/bin/sh\nprintf '%s\\n' {shlex.quote(says)} >&2\nexit 1\n")
    fake.chmod(0o700)
    monkeypatch.setattr(confine, "BWRAP", str(fake))
    found = confine.probe(tmp_path)
    assert found is not None
    assert found.name == name
    assert found.fix.isprintable()


@pytest.mark.parametrize(
    ("knob", "value", "words"),
    [
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor forbids user namespaces"),
        ("kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "sysctl user.max_user_namespaces="),
        ("", "", "forbids user namespaces to this account"),
    ],
)
def test_the_fix_is_the_one_for_this_host(
    monkeypatch: pytest.MonkeyPatch, knob: str, value: str, words: str
) -> None:
    monkeypatch.setattr(confine, "_sysctl", lambda name: value if name == knob else "")
    assert words in confine._userns_fix()


DENIED = """
import errno, sys
from pathlib import Path
import pyseccomp
from agent_box.process import confine
wall = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
wall.add_rule(pyseccomp.ERRNO(errno.EPERM), "unshare")
wall.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
wall.add_rule(
    pyseccomp.ERRNO(errno.EPERM),
    "clone",
    pyseccomp.Arg(0, pyseccomp.MASKED_EQ, 0x10000000, 0x10000000),
)
wall.load()
print(confine.probe(Path(sys.argv[1])))
"""


def test_a_host_that_really_denies_user_namespaces_is_noticed(tmp_path: Path) -> None:
    """As a container does, by a filter of its own."""
    ran = subprocess.run(
        python("-c", DENIED, str(tmp_path)), capture_output=True, text=True, check=False
    )
    assert "name='userns-denied'" in ran.stdout, ran.stderr
