"""Runs against scripted agents, by the guest's own bridge and without a machine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support import harnessguest
from support.guests import call
from support.runs import ID, RUN, Scene, said

from agent_box.bus.errors import Reason, Refusal
from agent_box.channel import contract, harness, running
from agent_box.channel.contract import RunEnd, RunId, RunRead
from agent_box.channel.spool import Spool


def played(root: Path, play: Callable[[Scene], Awaitable[None]]) -> None:
    async def main(path: Path, process: subprocess.Popen[bytes]) -> None:
        scene = Scene(root, path, process)
        try:
            await play(scene)
        finally:
            await scene.end()

    with harnessguest.guest(root) as (path, process):
        asyncio.run(main(path, process))


def children(process: subprocess.Popen[bytes]) -> list[str]:
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return text.split()


async def no_children(scene: Scene) -> None:
    until = time.monotonic() + 30
    while children(scene.process):
        assert time.monotonic() < until, "a harness goes on"
        await asyncio.sleep(0.02)


async def none_live(scene: Scene) -> None:
    until = time.monotonic() + 30
    while any((scene.root / "data").rglob("*.live")):
        assert time.monotonic() < until, "a run is not put away"
        await asyncio.sleep(0.02)


def test_a_prompt_is_answered(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        await scene.run("good")
        updates, end = await scene.rest()
        assert end == RunEnd(how="stopped", stop_reason="end_turn", code=None, text="")
        assert said(updates) == "I will do: say hello"
        kinds = [u.kind for u in updates]
        assert kinds == [
            "box_session",
            "agent_message_chunk",
            "tool_call",
            "box_permission",
            "tool_call_update",
            "agent_message_chunk",
        ]
        assert json.loads(updates[0].body) == {"sessionId": "session-1", "loaded": False}
        assert json.loads(updates[4].body)["status"] == "completed"
        assert scene.noted("permission-allowed") == [
            {"run": RUN, "title": "write a file", "option": "once-1"}
        ]
        assert scene.noted("run-ended") == [
            {"run": RUN, "how": "stopped", "stop_reason": "end_turn", "session": "session-1"}
        ]
        await no_children(scene)
        rows = scene.harness.runs(contract.Instance(instance=ID), call(1)).runs
        assert [(r.run, r.session, r.live) for r in rows] == [(RUN, "session-1", False)]

    played(tmp_path, play)


def test_a_session_is_gone_on_with_and_its_past_is_not_told_again(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        await scene.run("good", session="session-1")
        updates, end = await scene.rest()
        assert end.how == "stopped"
        assert said(updates) == "I will do: say hello"
        assert json.loads(updates[0].body) == {"sessionId": "session-1", "loaded": True}

    played(tmp_path, play)


def test_the_same_id_again_is_the_same_run(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        await scene.run("good")
        await scene.run("good")
        await scene.rest()
        await scene.run("good")
        assert len(scene.noted("run-ended")) == 1

    played(tmp_path, play)


@pytest.mark.parametrize(
    ("script", "argument", "code", "text"),
    [
        ("dies", "3", "harness-exited", "ended with status 3: no space in my head [31m"),
        ("bad_json", "", "bad-json", "not JSON"),
        ("long_line", str(100 << 20), "line-too-long", "over 4194304 bytes"),
        ("forged_permission", "session", "protocol", "asked for leave where it cannot"),
        ("forged_permission", "id", "protocol", "with an id that is none"),
        ("forged_permission", "answer", "protocol", "answered what was not asked"),
        ("early", "", "protocol", "asked for leave where it cannot"),
        ("refuses", "", "harness-error", "the harness says: Authentication required"),
        ("old", "", "protocol", "does not speak version 1"),
    ],
)
def test_a_harness_that_misbehaves_fails(
    tmp_path: Path, script: str, argument: str, code: str, text: str
) -> None:
    async def play(scene: Scene) -> None:
        await scene.run(script, argument)
        _, end = await scene.rest()
        assert (end.how, end.code, end.stop_reason) == ("failed", code, None)
        assert text in end.text
        assert scene.noted("run-ended")[0]["code"] == code
        assert scene.noted("permission-allowed") == []
        await no_children(scene)

    played(tmp_path, play)


@pytest.mark.parametrize("script", ["flood", "many"])
def test_a_flood_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(running, "BYTES_MAX", 2 << 20)
    monkeypatch.setattr("agent_box.channel.acp.UPDATES_MAX", 5000)

    async def play(scene: Scene) -> None:
        await scene.run(script)
        updates, end = await scene.rest()
        assert (end.how, end.code) == ("failed", "too-much-output")
        assert len(updates) <= 5000
        await no_children(scene)
        size = sum(f.stat().st_size for f in (scene.root / "data").rglob("*") if f.is_file())
        assert size < 8 << 20

    played(tmp_path, play)


def test_a_harness_that_is_not_there(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        await scene.run("good", harness=["/nonexistent/agent"])
        _, end = await scene.rest()
        assert (end.how, end.code) == ("failed", "harness-missing")
        assert "/nonexistent/agent" in end.text

    played(tmp_path, play)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        await scene.run("good", directory="/nonexistent")
        _, end = await scene.rest()
        assert (end.how, end.code) == ("failed", "harness-exited")
        assert end.text == "the harness did not start: /nonexistent: No such file or directory"

    played(tmp_path, play)


def test_a_harness_without_sessions(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        await scene.run("forgets", session="session-1")
        _, end = await scene.rest()
        assert (end.how, end.code) == ("failed", "no-sessions")

    played(tmp_path, play)


@pytest.mark.parametrize("reason", ["max_tokens", "refusal", "max_turn_requests"])
def test_other_reasons_to_stop_are_told(tmp_path: Path, reason: str) -> None:
    async def play(scene: Scene) -> None:
        await scene.run("stops", reason)
        _, end = await scene.rest()
        assert (end.how, end.stop_reason) == ("stopped", reason)

    played(tmp_path, play)


def test_what_a_host_does_not_offer_is_refused_to_it(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        await scene.run("asks_for_files")
        updates, end = await scene.rest()
        assert end.stop_reason == "end_turn"
        assert said(updates) == "-32601"

    played(tmp_path, play)


def test_its_environment_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "no")

    async def play(scene: Scene) -> None:
        await scene.run("environment")
        updates, _ = await scene.rest()
        found = json.loads(said(updates))
        assert found["env"]["GIVEN"] == "yes"
        assert "INHERITED" not in found["env"]
        assert found["cwd"] == str(scene.root)

    played(tmp_path, play)


def test_it_is_cancelled_when_its_time_is_over(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        await scene.run("cancelled", timeout_ms=2000)
        _, end = await scene.rest()
        assert end.how == "timed-out"
        await no_children(scene)

    played(tmp_path, play)


def test_it_is_cancelled_by_the_operator(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        await scene.run("cancelled")
        await scene.until("working")
        scene.harness.run_cancel(RunId(run=RUN), call(1))
        scene.harness.run_cancel(RunId(run=RUN), call(1))
        _, end = await scene.rest()
        assert (end.how, end.text) == ("cancelled", "")

    played(tmp_path, play)


def test_one_that_hears_nothing_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "CANCEL_S", 0.2)

    async def play(scene: Scene) -> None:
        await scene.run("deaf")
        await scene.until("working")
        scene.harness.run_cancel(RunId(run=RUN), call(1))
        _, end = await scene.rest()
        assert (end.how, end.text) == ("cancelled", "the harness did not answer to the cancel")
        await no_children(scene)

    played(tmp_path, play)


def test_a_session_runs_one_prompt_at_a_time(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        await scene.run("slow", str(tmp_path / "go"))
        await scene.until("3 ")
        with pytest.raises(Refusal) as refused:
            await scene.run("good", run="2" * 32, session="session-1")
        assert refused.value.reason is Reason.RUN_BUSY
        await scene.run("good", run="3" * 32)  # in a session of its own
        assert (await scene.rest("3" * 32))[1].how == "stopped"
        (tmp_path / "go").touch()
        assert (await scene.rest())[1].how == "stopped"

    played(tmp_path, play)


@pytest.mark.parametrize("times", [1, 4])
def test_a_run_survives_the_service(tmp_path: Path, times: int) -> None:
    async def play(scene: Scene) -> None:
        await scene.run("slow", str(tmp_path / "go"))
        await scene.until("2 ")
        for _ in range(times):
            await scene.killed()
            scene.begin()
        await scene.until("3 ")
        await scene.killed()
        (tmp_path / "go").touch()  # it goes on while nobody listens
        scene.begin()
        updates, end = await scene.rest()
        assert end.stop_reason == "end_turn"
        assert said(updates) == "1 2 3 done"
        ids = {id for id, kind, _ in scene.notes if kind == "permission-allowed"}
        assert len(ids) == 1  # the same event, however often it was told
        await no_children(scene)

    played(tmp_path, play)


def test_an_ended_run_is_read_after_a_restart(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        await scene.run("good")
        before = await scene.rest()
        await no_children(scene)
        await scene.killed()
        scene.begin()
        scene.notes.clear()
        assert await scene.rest() == before
        assert scene.notes == []

    played(tmp_path, play)


def test_a_torn_record_is_dropped_and_asked_for_again(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        await scene.run("slow", str(tmp_path / "go"))
        await scene.until("3 ")
        await scene.killed()
        (file,) = (scene.root / "data" / "runs" / ID).glob("*.live")
        with file.open("ab") as spool:
            spool.write(b"\x02torn")
        scene.begin()
        (tmp_path / "go").touch()
        updates, end = await scene.rest()
        assert (end.stop_reason, said(updates)) == ("end_turn", "1 2 3 done")

    played(tmp_path, play)


def test_a_guest_that_lost_the_harness(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        await scene.run("slow", str(tmp_path / "go"))
        await scene.until("3 ")
        scene.process.kill()
        scene.process.wait()
        with harnessguest.guest(scene.root):
            _, end = await scene.rest()
            assert (end.how, end.code) == ("failed", "harness-exited")
            assert end.text.startswith("the guest lost the harness")
        (tmp_path / "go").touch()  # the orphan ends, too

    played(tmp_path, play)


def test_an_instance_that_stops_ends_its_runs(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        await scene.run("slow", str(tmp_path / "go"))
        await scene.until("3 ")
        scene.harness.left(ID)
        _, end = await scene.rest()
        assert end.how == "left-running"
        (tmp_path / "go").touch()

    played(tmp_path, play)


def test_a_machine_that_is_gone_ends_its_runs(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        scene.gone = Refusal(Reason.CONFLICT, "another boot")
        await scene.run("good")
        _, end = await scene.rest()
        assert end.how == "left-running"

    played(tmp_path, play)


def test_nothing_is_left_of_a_deleted_instance(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        await scene.run("slow", str(tmp_path / "go"))
        await scene.until("3 ")
        await scene.run("good", run="3" * 32)
        await scene.rest("3" * 32)
        files = list((scene.root / "data" / "runs" / ID).iterdir())
        assert files and all(f.stat().st_mode & 0o777 == 0o600 for f in files)
        scene.harness.forget(ID)
        assert list((scene.root / "data" / "runs").iterdir()) == []
        with pytest.raises(Refusal) as refused:
            await scene.harness.run_read(
                RunRead(run="3" * 32, cursor=0, limit=1, wait_ms=0), call(1)
            )
        assert refused.value.reason is Reason.NOT_FOUND
        (tmp_path / "go").touch()

    played(tmp_path, play)


def test_old_runs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "KEPT_MAX", 2)
    monkeypatch.setattr(harness, "OPEN_MAX", 1)

    async def play(scene: Scene) -> None:
        for number in range(5):
            await scene.run("good", run=f"{number:032x}")
            await scene.rest(f"{number:032x}")
            await no_children(scene)
            await none_live(scene)  # only what is put away counts, and is tidied at the next
        rows = scene.harness.runs(contract.Instance(instance=ID), call(1)).runs
        assert f"{4:032x}" in [r.run for r in rows]
        assert len(rows) <= 4
        assert len(os.listdir("/proc/self/fd")) < 60

    played(tmp_path, play)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run": "x"}, Reason.BAD_REQUEST),
        ({"run": "../" + "1" * 29}, Reason.BAD_REQUEST),
        ({"instance": "b" * 32}, Reason.WRONG_STATE),
        ({"instance": "../x"}, Reason.BAD_REQUEST),
        ({"prompt": " "}, Reason.BAD_REQUEST),
        ({"prompt": "x" * (harness.PROMPT_MAX + 1)}, Reason.BAD_REQUEST),
        ({"directory": "work"}, Reason.BAD_REQUEST),
        ({"harness": "gone"}, Reason.NOT_FOUND),
        ({"harness": []}, Reason.BAD_REQUEST),
        ({"timeout_ms": 0}, Reason.BAD_REQUEST),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], reason: Reason) -> None:
    async def play(scene: Scene) -> None:
        with pytest.raises(Refusal) as refused:
            await scene.run("good", **change)
        assert refused.value.reason is reason
        assert not (scene.root / "data" / "runs").exists()

    played(tmp_path, play)


def test_a_damaged_spool_is_told_and_harms_no_other(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        await scene.run("good")
        await scene.rest()
        await no_children(scene)
        await scene.killed()
        bad = scene.root / "data" / "runs" / ID / f"{'9' * 32}.live"
        bad.write_bytes(b"not a spool")
        Spool.create(bad.with_name(f"{'8' * 32}.live"), b"{}", 0).close()
        scene.begin()
        assert (await scene.rest())[1].how == "stopped"
        with pytest.raises(Refusal) as refused:
            await scene.rest("9" * 32)
        assert refused.value.reason is Reason.NOT_FOUND

    played(tmp_path, play)
