"""The scripts of deploy/ as a shell sees them, as far as that can be tried without root."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.source import ROOT

SCRIPTS = [
    ".ci/run",
    "deploy/install",
    "deploy/packages.sh",
    "deploy/quickstart",
    "deploy/test",
    "deploy/typecheck",
]
COMMANDS = [
    ".ci/run",
    "deploy/docs.py",
    "deploy/install",
    "deploy/quickstart",
    "deploy/test",
    "deploy/typecheck",
]


def run(*command: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ)
    if path is not None:
        env["PATH"] = f"{path}:{env['PATH']}"
    return subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_bash_can_read_it(script: str) -> None:
    done = run("bash", "-n", script)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_it_can_be_run(command: str) -> None:
    assert os.access(ROOT / command, os.X_OK)
    assert (ROOT / command).read_text().startswith("#!/usr/bin/env ")


def test_help_tells_how_it_is_used() -> None:
    done = run("deploy/test", "--help")
    assert done.returncode == 0
    assert "deploy/test [--slow] [PYTEST_ARGUMENTS...]" in done.stdout


@pytest.mark.parametrize("command", ["deploy/test", "deploy/install", "deploy/quickstart"])
def test_missing_packages_are_named_when_root_is_out_of_reach(command: str, tmp_path: Path) -> None:
    for name, does in (("dpkg-query", "echo not-installed"), ("sudo", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    done = run(command, path=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{command}: as root, run: apt-get update && apt-get install ")
    assert "python3-venv bubblewrap libseccomp2" in done.stderr


APT = """\
[ "$1" = install ] || exit 100
echo of no interest
for told in dlstatus:1:3.1:a dlstatus:1:7.9:b pmstatus:libc6:amd64:62.5:c pmerror:x:66:e; do
  echo $told >&3
done
exit 100
"""


def test_progress_is_shown_and_sudo_asked_once(tmp_path: Path) -> None:
    sudo = f'[ "$1" = -n ] && exit 0; echo . >>{tmp_path}/asked; exec "$@"'
    for name, does in (("dpkg-query", "echo not-installed"), ("sudo", sudo), ("apt-get", APT)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    done = run("deploy/quickstart", path=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("deploy/quickstart: apt-get could not install python3 ")
    told = done.stdout.splitlines()
    assert told[told.index("apt-get update had errors, going on") + 1 :] == [
        "  downloading 0 %",
        "  installing 60 %",
        "pmerror:x:66:e",
    ]
    assert (tmp_path / "asked").read_text() == ".\n"


def test_an_interrupt_waits_for_apt_and_ends_the_script(tmp_path: Path) -> None:
    apt = f"""\
    [ "$1" = install ] || exit 0
    trap '' INT
    echo pmstatus:x:20.0:y >&3
    until [ -e {tmp_path}/interrupted ]; do sleep 0.05; done
    echo pmstatus:x:90.0:y >&3
    """
    sudo = '[ "$1" = -n ] || exec "$@"'
    for name, does in (("dpkg-query", "echo not-installed"), ("sudo", sudo), ("apt-get", apt)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    with subprocess.Popen(
        ["deploy/quickstart"],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/nonexistent"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as at a terminal: a Ctrl-C is for all of them
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line == "  installing 20 %\n":
                break
        os.killpg(running.pid, signal.SIGINT)
        (tmp_path / "interrupted").touch()
        assert running.stdout.read() == "  installing 90 %\n"
    assert running.returncode == -signal.SIGINT


@pytest.mark.parametrize("pip", ["exit 0", "exit 1", None])
def test_a_venv_without_a_pip_that_runs_is_made_anew(tmp_path: Path, pip: str | None) -> None:
    venv, maker = tmp_path / "venv", tmp_path / "maker"
    (venv / "bin").mkdir(parents=True)
    maker.write_text('#!/bin/sh\nmkdir "$3"\n')
    maker.chmod(0o755)
    if pip is not None:
        (venv / "bin/python").write_text(f"#!/bin/sh\n{pip}\n")
        (venv / "bin/python").chmod(0o755)
    done = run("bash", "-c", f". deploy/packages.sh; python={maker}; make_sound {venv}")
    assert (done.returncode, done.stderr) == (0, "")
    assert (venv / "bin").exists() == (pip == "exit 0")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--harness", "kage"], "--harness codex, claude-code, opencode, pi or gemini"),
        (["--provider", "x"], "--provider openai, anthropic or google"),
        (["--upstream", "https://gateway"], "--upstream VALUE, with --provider"),
        (["--provider", "openai", "--ca-file", "no.pem"], f"cannot read {ROOT}/no.pem"),
        (["--key", "sk-x"], "there is no --key"),
        (["--remove", "--provider"], "--remove stands alone"),
        (["--provider", "openai", "--remove"], "--remove stands alone"),
    ],
)
def test_what_the_quickstart_does_not_take(words: list[str], told: str) -> None:
    done = run("deploy/quickstart", *words)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"deploy/quickstart: {told}")


def test_continuous_integration_runs_what_developers_run() -> None:
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith('/../deploy/test"')
