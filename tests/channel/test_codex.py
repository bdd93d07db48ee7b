"""The real codex, by the real bridge and driver, against a scripted model: no machine.

It runs in a namespace of its own whose network is a loopback alone.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from support import built, harnessguest
from support.runs import RUN, Scene, said
from support.source import ROOT

from agent_box.config import presets

KEY = "sk-scripted-0123456789"
PORT = 4080
MODEL = Path(__file__).parents[2] / "deploy" / "scripted_model.py"
INSIDE = f"""
import subprocess, sys
model = subprocess.Popen(
    [sys.executable, "{MODEL}", "--key-file", "/home/agent/key", "--port", "{PORT}",
     "--log", "/home/agent/model.log"], stdout=subprocess.PIPE)
model.stdout.readline()
sys.exit(subprocess.run(sys.argv[1:]).returncode)
"""


@pytest.fixture(scope="module")
def program() -> Iterator[Path]:
    yield built.codex()


def played(root: Path, program: Path, play: Callable[[Scene], Awaitable[None]]) -> None:
    preset = presets.load("codex")
    endpoint = f"http://127.0.0.1:{PORT}"
    home = root / "home"
    (home / "work").mkdir(parents=True)
    (home / "key").write_text(KEY)
    for file in preset.configuration(endpoint, KEY):
        (home / file.path).parent.mkdir(parents=True, exist_ok=True)
        (home / file.path).write_text(file.content)
    (root / "run").mkdir()
    places = program.parents[len(Path(preset.command[0]).parts) - 2]
    wrap = [
        *("bwrap", "--unshare-all", "--die-with-parent", "--dev-bind", "/", "/"),
        *("--tmpfs", "/home", "--bind", str(home), "/home/agent"),
        # the checkout and its venv may lie in /home, as a person's do
        *("--ro-bind", str(ROOT), str(ROOT), "--ro-bind", sys.prefix, sys.prefix),
        *("--proc", "/proc", "--", sys.executable, "-c", INSIDE),
    ]
    given = [f"{k}={v}" for k, v in preset.settings(endpoint, KEY).items()]

    async def main(path: Path, process: subprocess.Popen[bytes]) -> None:
        scene = Scene(root / "run", path, process)
        scene.command = [str(places / preset.command[0].removeprefix("/"))]
        try:
            await play(scene)
        finally:
            await scene.end()

    with harnessguest.guest(root / "run", wrap, given) as (path, process):
        asyncio.run(main(path, process))


def test_it_does_what_the_model_says_and_asks_before(tmp_path: Path, program: Path) -> None:
    async def play(scene: Scene) -> None:
        await scene.prompt("Please:\n$ echo one >/home/agent/work/new.txt\n$ cat /home/agent/key")
        updates, end = await scene.rest()
        assert (end.how, end.stop_reason, end.text) == ("stopped", "end_turn", "")
        assert said(updates) == "2 commands of the script ran."
        assert (tmp_path / "home/work/new.txt").read_text() == "one\n"
        assert len(scene.noted("permission-allowed")) >= 1
        kinds = {u.kind for u in updates}
        assert {"tool_call", "box_permission"} <= kinds
        session = json.loads(updates[0].body)["sessionId"]
        # and the session is gone on with, by another process
        await scene.prompt("again", run="2" * 32, session=session)
        updates, end = await scene.rest("2" * 32)
        assert (end.how, end.stop_reason, end.text) == ("stopped", "end_turn", "")
        assert "nothing to say" in said(updates)

    played(tmp_path, program, play)


def test_it_is_cancelled_and_the_service_may_be_killed(tmp_path: Path, program: Path) -> None:
    async def play(scene: Scene) -> None:
        await scene.prompt("SLOW")
        await scene.until("tick")
        for _ in range(2):
            await scene.killed()
            scene.begin()
        await scene.until("tick")
        from support.guests import call

        from agent_box.channel.contract import RunId

        scene.harness.run_cancel(RunId(run=RUN), call(5))
        updates, end = await scene.rest()
        assert (end.how, end.text) == ("cancelled", "")
        assert said(updates).count("tick") >= 1

    played(tmp_path, program, play)


def test_a_wrong_key_is_told(tmp_path: Path, program: Path) -> None:
    async def play(scene: Scene) -> None:
        (tmp_path / "home/key").write_text("x")
        await scene.prompt("hello")
        _, end = await scene.rest()
        assert end.how in ("failed", "stopped")

    played(tmp_path, program, play)
