"""A verb in bad surroundings: one line that names the thing, the documented code, no trace.

The verbs here reach a service, so without the fault they would start a daemon.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import procs
from support.cli import BINARY, Ran, environment, run
from support.live import Live

VERBS = [
    ["list"],
    ["create", "work"],
    ["inspect", "work"],
    ["logs", "work"],
    ["policy", "show", "work"],
    ["policy", "check", "work", "example.com"],
    ["secret", "list"],
    ["secret", "set", "k"],
    ["service", "list"],
]


@pytest.fixture
def home() -> Iterator[Path]:
    """Short, because sockets would lie below it."""
    path = Path(tempfile.mkdtemp(prefix="ab."))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.fixture(params=VERBS, ids=" ".join)
def verb(request: pytest.FixtureRequest) -> list[str]:
    words: list[str] = request.param
    return words


def refused(words: list[str], env: dict[str, str]) -> Ran:
    ran = run(*words, "--json", env=env, stdin="value")
    assert ran.exit == 2
    assert ran.err == f"agent-box: {ran.error['message']}\n"
    return ran


def nothing_below(home: Path, *expected: str) -> None:
    """Nothing was made, and nobody was left running."""
    assert sorted(str(p.relative_to(home)) for p in home.rglob("*")) == sorted(expected)
    assert procs.with_word(str(home)) == []


# ------------------------------------------------------------ the runtime directory


@pytest.mark.parametrize("value", [None, ""])
def test_no_runtime_directory(verb: list[str], home: Path, value: str | None) -> None:
    env = environment() | {"HOME": str(home)} | ({} if value is None else {"XDG_RUNTIME_DIR": ""})
    ran = refused(verb, env)
    assert ran.error["kind"] == "runtime-dir-missing"
    assert "XDG_RUNTIME_DIR is not set" in ran.error["message"]
    nothing_below(home)


def test_a_runtime_directory_that_cannot_be(home: Path) -> None:
    env = environment() | {"HOME": str(home)}
    (home / "open").mkdir()
    (home / "open").chmod(0o755)
    (home / "shut").mkdir(mode=0o500)
    (home / "file").touch()
    for value, words in (
        ("run", "is not an absolute path"),
        (str(home / "gone"), "No such file or directory"),
        (str(home / "file"), "is not a directory"),
        (str(home / "open"), "is open to others (mode 0755, not 0700)"),
        (str(home / "shut"), "not writable"),
        ("/etc", "belongs to another account"),
        (str(home / ("d" * 90)), ""),
    ):
        ran = refused(["service", "list"], env | {"XDG_RUNTIME_DIR": value})
        assert ran.error["kind"] == "runtime-dir-missing"
        assert words in ran.error["message"]
        assert "XDG_RUNTIME_DIR" in ran.error["message"]
    nothing_below(home, "open", "shut", "file")


# -------------------------------------------------------------- the state directory


def test_a_state_directory_that_cannot_be(home: Path) -> None:
    env = environment(home)
    (home / "open/agent-box").mkdir(parents=True)
    (home / "open/agent-box").chmod(0o755)
    (home / "shut").mkdir(mode=0o500)
    (home / "file").touch()
    before = sorted(home.rglob("*"))
    for value, words in (
        ("state", "XDG_STATE_HOME is not an absolute path: state"),
        (str(home / "shut"), f"{home}/shut/agent-box: Permission denied"),
        (
            str(home / "file"),
            f"cannot ask who holds {home}/file/agent-box/daemon.lock: Not a directory",
        ),
        (str(home / "open"), f"{home}/open/agent-box is open to others (mode 0755, not 0700)"),
        ("/etc", "/etc/agent-box: Permission denied"),
    ):
        ran = refused(["service", "list"], env | {"XDG_STATE_HOME": value})
        assert words in ran.error["message"]
        assert ran.error["message"].count(value) == 1
        assert "Errno" not in ran.error["message"]
    made = [p for p in sorted(home.rglob("*")) if p not in before]
    assert all(p.is_relative_to(home / "run/agent-box") for p in made)
    assert procs.with_word(str(home)) == []


def test_no_home_at_all() -> None:
    env = environment()
    ran = refused(["service", "list"], env | {"XDG_RUNTIME_DIR": "/nonexistent"})
    assert "/nonexistent" in ran.error["message"]


@pytest.fixture
def live() -> Iterator[Live]:
    """For faults that are met only once services start; whatever runs is ended."""
    made = Live()
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ro-bind", "/dev/null", "/usr/bin/bwrap"], "install the package bubblewrap"),
        (["--unshare-user", "--disable-userns"], "user namespaces"),
    ],
)
def test_a_host_that_builds_no_wall(live: Live, options: list[str], words: str) -> None:
    """Told in one line, before any service is started."""
    within = [shutil.which("bwrap") or "bwrap", "--dev-bind", "/", "/", *options, "--"]
    done = subprocess.run(
        [*within, BINARY, "list", "--json"],
        env=live.env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ran = Ran(("list",), done.returncode, done.stdout, done.stderr)
    assert (ran.exit, ran.error["kind"]) == (2, "confinement-failed")
    assert words in ran.error["message"]
    assert "\n" not in ran.err.rpartition("agent-box: ")[2].rstrip("\n")
    assert not live.pids()
    assert live.run("list").exit == 0  # nothing of that try stands in the way


@pytest.mark.parametrize("size", [4096, 40_960])
def test_a_full_state_directory(live: Live, size: int) -> None:
    """On a file system of a few pages: the keys of the services do not fit."""
    state = live.home / "state"
    state.mkdir(mode=0o700)
    within = [
        *(shutil.which("bwrap") or "bwrap", "--dev-bind", "/", "/"),
        *("--perms", "0700", "--size", str(size), "--tmpfs", str(state), "--"),
    ]
    done = subprocess.run(
        [*within, BINARY, "secret", "set", "k", "--json"],
        env=live.env,
        input="value",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ran = Ran(("secret", "set"), done.returncode, done.stdout, done.stderr)
    assert ran.exit == 2
    assert ran.error["message"] == f"{state}/agent-box: No space left on device"
    assert ran.err == f"agent-box: {state}/agent-box: No space left on device\n"
    assert not live.pids()


def test_a_state_directory_that_became_read_only(live: Live) -> None:
    """Nothing of it is changed, and the line names it."""
    assert live.run("secret", "set", "k", stdin="old").exit == 0
    assert live.run("daemon", "--stop").exit == 0
    held = {p: p.read_bytes() for p in live.paths.state.rglob("*") if p.is_file()}
    directories = [live.paths.state, *(p for p in live.paths.state.rglob("*") if p.is_dir())]
    for directory in directories:
        directory.chmod(0o500)
    try:
        ran = live.run("secret", "set", "k", "--json", stdin="value")
        assert ran.exit == 2
        assert str(live.paths.state) in ran.error["message"]
    finally:
        for directory in directories:
            directory.chmod(0o700)
    after = {p: p.read_bytes() for p in live.paths.state.rglob("*") if p.is_file()}
    changed = {p.name for p in after if held.get(p) != after[p]}
    assert changed <= {"daemon.log", "daemon.lock"}
    assert live.run("secret", "set", "k", stdin="value").exit == 0


# ------------------------------------------------------------------- the config file


def test_a_config_that_is_named_and_missing(verb: list[str], home: Path) -> None:
    env = environment(home, AGENT_BOX_CONFIG=str(home / "gone.toml"))
    ran = refused(verb, env)
    assert ran.error["kind"] == "config-invalid"
    assert ran.error["message"] == f"{home}/gone.toml: no such file (AGENT_BOX_CONFIG names it)"
    nothing_below(home, "run")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("version = 2", "version at the top level must be 1, not 2"),
        (
            'version = 1\n[daemon]\nlgo = "info"',
            'unknown key "lgo" in [daemon]; did you mean "log"?',
        ),
        ("version = ", "not TOML: "),
        ("\udcff", "not UTF-8 text, at byte 0"),
    ],
)
def test_a_config_that_is_refused(home: Path, content: str, words: str) -> None:
    path = home / "config.toml"
    path.write_bytes(os.fsencode(content))
    for words_ in (["service", "list"], ["daemon"]):
        ran = refused(words_, environment(home, AGENT_BOX_CONFIG=str(path)))
        assert ran.error["kind"] == "config-invalid"
        assert ran.error["message"].startswith(f"{path}: {words}")
    assert procs.with_word(str(home)) == []


def test_a_config_that_anybody_may_write(home: Path) -> None:
    path = home / "config.toml"
    path.write_text("version = 1")
    path.chmod(0o666)
    ran = refused(["service", "list"], environment(home, AGENT_BOX_CONFIG=str(path)))
    assert ran.error["message"] == f"{path}: anybody may write it: chmod o-w"


def test_the_working_directory_is_never_searched(home: Path, tmp_path: Path) -> None:
    """`doctor` tells which file is in use: none, though one lies here."""
    project = tmp_path / "project"
    for name in ("config.toml", "agent-box/config.toml", ".config/agent-box/config.toml"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("version = 2")
    ran = run("doctor", env=environment(home), cwd=project)
    assert "\nconfig: none\n" in ran.out


# ------------------------------------------------------------------------- the input


def test_closed_stdin_is_no_value(home: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", '"$BOX" secret set k --json <&-'],
        env=environment(home, BOX=str(BINARY)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ran = Ran(("secret", "set", "k"), done.returncode, done.stdout, done.stderr)
    assert ran.exit == 64
    assert "stdin" in ran.error["message"]
    nothing_below(home, "run")


@pytest.mark.parametrize("value", ["", "\n", "a\nb", "a\0b", "a\rb", "x" * 100_000], ids=repr)
def test_a_value_that_no_header_can_carry(home: Path, value: str) -> None:
    ran = run("secret", "set", "k", "--json", env=environment(home), stdin=value)
    assert ran.exit == 64
    assert ran.error["message"].startswith("k: the value ")
    nothing_below(home, "run")
