from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_box.process.paths import (
    ROLES,
    SERVICES,
    SOCKET_PATH_MAX,
    Paths,
    PathsError,
    make_private,
    told,
)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    yield {"XDG_RUNTIME_DIR": str(runtime), "HOME": str(tmp_path / "home")}


def test_both_roots_come_from_the_environment(env: dict[str, str]) -> None:
    paths = Paths.from_env(env)
    assert paths.runtime == Path(env["XDG_RUNTIME_DIR"]) / "agent-box"
    assert paths.state == Path(env["HOME"]) / ".local/state/agent-box"
    assert Paths.from_env({**env, "XDG_STATE_HOME": "/s"}).state == Path("/s/agent-box")


def test_looking_makes_nothing(env: dict[str, str]) -> None:
    paths = Paths.from_env(env)
    assert not paths.runtime.exists()
    assert not paths.state.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"XDG_RUNTIME_DIR": ""}, "XDG_RUNTIME_DIR is not set"),
        ({"XDG_RUNTIME_DIR": "run"}, "XDG_RUNTIME_DIR is not an absolute path: run"),
        ({"XDG_RUNTIME_DIR": "/nowhere/at/all"}, "XDG_RUNTIME_DIR /nowhere/at/all: No such file"),
        ({"XDG_RUNTIME_DIR": "/etc/hostname"}, "is not a directory"),
        ({"XDG_RUNTIME_DIR": "/usr"}, "XDG_RUNTIME_DIR /usr belongs to another account"),
        ({"XDG_STATE_HOME": "state"}, "XDG_STATE_HOME is not an absolute path: state"),
        ({"HOME": ""}, "neither XDG_STATE_HOME nor HOME is set"),
        ({"HOME": "home"}, "HOME is not an absolute path: home"),
        ({"XDG_STATE_HOME": "/s\x1b[31m"}, "control characters"),
    ],
)
def test_what_cannot_be_used_is_named(
    env: dict[str, str], change: dict[str, str], words: str
) -> None:
    with pytest.raises(PathsError, match=words.replace("(", r"\(")) as raised:
        Paths.from_env({**env, **change})
    assert "\n" not in str(raised.value)
    assert raised.value.exit == 2


def test_unset_is_as_empty(env: dict[str, str]) -> None:
    del env["XDG_RUNTIME_DIR"]
    with pytest.raises(PathsError, match="XDG_RUNTIME_DIR is not set"):
        Paths.from_env(env)


@pytest.mark.parametrize("mode", [0o755, 0o701, 0o770, 0o707])
def test_a_runtime_directory_open_to_others_is_refused(env: dict[str, str], mode: int) -> None:
    os.chmod(env["XDG_RUNTIME_DIR"], mode)
    with pytest.raises(PathsError, match=f"open to others .mode {mode:04o}"):
        Paths.from_env(env)


def test_a_read_only_runtime_directory_is_refused(env: dict[str, str]) -> None:
    os.chmod(env["XDG_RUNTIME_DIR"], 0o500)
    with pytest.raises(PathsError, match="is not writable"):
        Paths.from_env(env)


def test_a_path_that_no_socket_can_have_is_refused(tmp_path: Path) -> None:
    longest = len("/bus/registry/events")
    room = SOCKET_PATH_MAX - longest
    fits = Path("/" + "r" * (room - 1))
    assert len(os.fsencode(Paths.checked(fits, Path("/s")).doorbell("registry"))) == 107
    with pytest.raises(PathsError, match="would need 108 bytes, and 107 is the most"):
        Paths.checked(Path("/" + "r" * room), Path("/s"))
    assert all(
        len(os.fsencode(path)) <= SOCKET_PATH_MAX
        for service in SERVICES
        for path in (Paths(fits, fits).sock(service), Paths(fits, fits).doorbell(service))
    )


def test_sockets_of_instances_are_longer() -> None:
    room = SOCKET_PATH_MAX - len(f"/vm/broker/{'0' * 32}/sock")
    Paths(Path("/" + "r" * (room - 1)), Path("/s")).for_instances()
    with pytest.raises(PathsError, match="would need 108 bytes"):
        Paths(Path("/" + "r" * room), Path("/s")).for_instances()


def test_paths_are_normal(tmp_path: Path) -> None:
    assert Paths.checked(Path("/a/../b//c/."), Path("/s")).runtime == Path("/b/c")


def test_everything_lies_below_the_two_roots_and_apart() -> None:
    paths = Paths(Path("/r"), Path("/s"))
    named = [
        *(paths.bus(s) for s in SERVICES),
        *(paths.data(s) for s in SERVICES),
        *(paths.log(s) for s in SERVICES),
        *(paths.keys(r) for r in ROLES),
        *(paths.supervisor, paths.host_files, paths.lock, paths.public_keys),
    ]
    assert len(set(named)) == len(named)
    assert {path.parts[1] for path in named} == {"r", "s"}
    # What is mounted for one service must not hold what is another's.
    assert not [(a, b) for a in named for b in named if a != b and a.is_relative_to(b)]


def test_make_makes_private_directories_and_twice_is_as_once(env: dict[str, str]) -> None:
    os.umask(0)
    paths = Paths.from_env(env)
    paths.make()
    paths.make()
    made = [paths.runtime, *paths.runtime.rglob("*"), paths.state, *paths.state.rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}
    assert paths.bus("store").is_dir()
    assert paths.keys("operator").is_dir()


def test_make_refuses_what_is_there_and_is_not_private(env: dict[str, str]) -> None:
    paths = Paths.from_env(env)
    paths.make()
    os.chmod(paths.keys("store"), 0o755)  # noqa: S103 - that is the point
    with pytest.raises(PathsError, match=f"{paths.keys('store')} is open to others"):
        paths.make()


def test_make_refuses_a_link(env: dict[str, str], tmp_path: Path) -> None:
    paths = Paths.from_env(env)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    paths.state.parent.mkdir(parents=True)
    paths.state.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PathsError, match="is not a directory"):
        paths.make()


def test_make_names_what_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "sealed").mkdir(mode=0o500)
    with pytest.raises(PathsError, match=f"cannot make {tmp_path}/sealed/x: Permission denied"):
        make_private(tmp_path / "sealed" / "x")
    (tmp_path / "file").touch()
    with pytest.raises(PathsError, match=f"cannot make {tmp_path}/file/x: Not a directory"):
        make_private(tmp_path / "file" / "x")


def test_an_error_of_the_system_is_told_with_its_path_once() -> None:
    gone = NotADirectoryError(20, "Not a directory", "/a")
    assert told(gone) == "/a: Not a directory"
    assert told(OSError(28, "No space left on device")) == "No space left on device"
    assert told(FileNotFoundError(2, "No such file or directory", b"/\xff")) == (
        "/\udcff: No such file or directory"
    )
    assert told(ValueError("what it says")) == "what it says"
    assert told(TimeoutError()) == "TimeoutError"
