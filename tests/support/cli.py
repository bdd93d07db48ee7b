"""Runs the real `agent-box`, and holds whatever it prints to the documented shapes."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from agent_box.cli.verbs import GROUPS

BINARY = Path(sys.executable).parent / "agent-box"
SCHEMAS = Path(__file__).parent.parent / "cli" / "schemas"


@dataclass(frozen=True)
class Ran:
    """One run that has ended."""

    args: tuple[str, ...]
    exit: int
    out: str
    err: str

    @property
    def object(self) -> dict[str, Any]:
        """The one object of `--json`, its shape checked."""
        assert self.out.count("\n") == 1, self
        value: dict[str, Any] = json.loads(self.out)
        check(value, self)
        return value

    @property
    def result(self) -> dict[str, Any]:
        value = self.object
        assert value["ok"], self
        result: dict[str, Any] = value["result"]
        return result

    @property
    def error(self) -> dict[str, Any]:
        value = self.object
        assert not value["ok"], self
        error: dict[str, Any] = value["error"]
        return error

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of a stream, their shapes checked, the end line last."""
        lines = [json.loads(line) for line in self.out.splitlines()]
        check_stream(lines, self)
        return lines


def run(
    *args: str,
    env: dict[str, str] | None = None,
    stdin: str | bytes = b"",
    cwd: Path | None = None,
    timeout: float = 60.0,
) -> Ran:
    """One command line, to its end. A run that fails must say why on exactly one line, and
    nothing that it prints may be able to drive a terminal."""
    done = subprocess.run(
        [BINARY, *args],
        env=environment() if env is None else env,
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        cwd=cwd,
        capture_output=True,
        timeout=timeout,
        check=False,
    )
    ran = Ran(args, done.returncode, done.stdout.decode(), done.stderr.decode())
    for text in (ran.out, ran.err):
        assert all(c.isprintable() or c in "\n\t" for c in text), ran
    told = [line for line in ran.err.splitlines() if line.startswith("agent-box: ")]
    if ran.exit != 0:
        assert len(told) == 1, ran
    assert "Traceback" not in ran.err, ran
    if "--json" in args and ran.out.count("\n") == 1:
        json.loads(ran.out)
    return ran


def environment(home: Path | None = None, **more: str) -> dict[str, str]:
    """A bare environment; with `home`, all directories of agent-box lie below it."""
    env = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "PYTHONPYCACHEPREFIX": _compiled()}
    if home is not None:
        runtime = home / "run"
        runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
        env |= {
            "HOME": str(home),
            "XDG_RUNTIME_DIR": str(runtime),
            "XDG_STATE_HOME": str(home / "state"),
            "XDG_CONFIG_HOME": str(home / "config"),
        }
    return env | more


@cache
def _compiled() -> str:
    """Where the code may not be written, every run would compile it anew: half its time."""
    directory = tempfile.mkdtemp(prefix="ab-compiled.")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@cache
def schema(name: str) -> Any:
    return json.loads((SCHEMAS / f"{name}.json").read_text())


def check(value: dict[str, Any], ran: Ran) -> None:
    """The envelope, the agreement with the exit code, and the verb's own result."""
    jsonschema.validate(value, schema("success" if value.get("ok") else "error"))
    if not value["ok"]:
        assert value["error"]["exit"] == ran.exit, ran
        return
    assert ran.exit == 0, ran
    own = SCHEMAS / "results" / f"{value['verb'].replace(' ', '-')}.json"
    assert own.exists(), f"no schema for what {value['verb']} answers: {own}"
    jsonschema.validate(value["result"], schema(f"results/{own.stem}"))


def check_stream(lines: list[dict[str, Any]], ran: Ran) -> None:
    own = f"lines/{'-'.join(ran.args[: 1 + (ran.args[0] in GROUPS)])}"
    for line in lines:
        jsonschema.validate(line, schema("line"))
        if line["type"] != "end":
            jsonschema.validate(line, schema(own))
    assert [line["type"] == "end" for line in lines] == [False] * (len(lines) - 1) + [True], ran
    end = lines[-1]
    assert end["exit"] == ran.exit, ran
    assert end["ok"] == (ran.exit == 0), ran
