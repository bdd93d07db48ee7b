"""`run` as a person and a program see it: what is shown, and with which code it ends."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from agent_box.bus.errors import Reason, Refusal
from agent_box.channel import contract
from agent_box.channel.contract import Run, RunEnd, RunRow, RunRows, Update, Updates
from agent_box.cli import link, run
from agent_box.cli.render import Failure, Render, Usage
from agent_box.cli.values import Place

ID = "a" * 32
OK = RunEnd(how="stopped", stop_reason="end_turn", code=None, text="")


def update(kind: str, **body: Any) -> Update:
    return Update(at_ms=1, kind=kind, body=json.dumps(body))


def text(words: str) -> Update:
    return update("agent_message_chunk", content={"type": "text", "text": words})


class Fake:
    """A registry and a channel. Each page is what `run_read` answers next: updates, an end, a
    refusal, or something to do first."""

    def __init__(self, *pages: Any) -> None:
        self.pages = list(pages)
        self.state = "running"
        self.harness: Any = "codex"
        self.runs: list[RunRow] = []
        self.asked: list[Run] = []
        self.cancels = 0
        self.cursor = 0

    def call(self, method: str, request: Any, **_: Any) -> Any:
        return getattr(self, f"_{method}")(request)

    def close(self) -> None:
        """As a client."""

    def _inspect(self, request: Any) -> Any:
        from agent_box.registry.contract import Instance

        row = SimpleNamespace(state=self.state, name=request.name)
        unsaid: dict[str, Any] = dict.fromkeys(Instance.__struct_fields__)
        return Instance(**unsaid | {"row": row, "id": ID, "harness": self.harness})

    def _run(self, request: Run) -> Any:
        self.asked.append(request)
        return contract.RunId(run=request.run)

    def _runs(self, _: Any) -> RunRows:
        return RunRows(runs=self.runs)

    def _run_cancel(self, _: Any) -> Any:
        self.cancels += 1

    def _run_read(self, request: Any) -> Updates:
        assert request.cursor == self.cursor
        page = self.pages.pop(0)
        while callable(page):
            page()
            page = self.pages.pop(0)
        if isinstance(page, Refusal):
            raise page
        end = page if isinstance(page, RunEnd) else None
        updates = [] if end is not None else page
        self.cursor += len(updates)
        return Updates(updates=updates, cursor=self.cursor, end=end)


class Said:
    """What came of one `run`."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, fake: Fake, as_json: bool = False, **given: Any
    ) -> None:
        monkeypatch.setattr(link, "place", lambda: None)
        monkeypatch.setattr(link, "ready", lambda here, name, out: (fake, None))
        stdout, stderr = io.StringIO(), io.StringIO()
        out = Render("run", json=as_json, stdout=stdout, stderr=stderr)
        out.streaming = True  # as the verb says of itself
        fields: dict[str, Any] = {
            "target": Place("web1", None),
            "prompt": "hello",
            "timeout": None,
            "session": None,
            "start": False,
            "follow": False,
            "list": False,
        }
        self.failure: Failure | None = None
        try:
            run.run(out, **fields | given)
        except Failure as failure:
            self.failure = failure
        self.out, self.err = stdout.getvalue(), stderr.getvalue()

    @property
    def code(self) -> tuple[int, str]:
        return (0, "") if self.failure is None else (self.failure.exit, self.failure.kind)


def test_the_reply_is_stdout_and_the_rest_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(
        [update("box_session", sessionId="s1", loaded=False), text("I will ")],
        [update("tool_call", toolCallId="t", title="edit\x1b[2J x", status="pending")],
        [update("box_permission", title="edit x", allowed=True)],
        [update("agent_thought_chunk", content={"type": "text", "text": "hm"})],
        [update("tool_call_update", toolCallId="t", title="edit x", status="failed")],
        [update("plan", entries=[]), text("stop.\x1b[31m")],
        OK,
    )
    said = Said(monkeypatch, fake, target=Place("web1", "/srv"), session="s0", timeout=5)
    assert said.code == (0, "")
    assert said.out == "I will \nstop.\\x1b[31m\n"
    assert said.err.splitlines() == [
        "tool: edit\\x1b[2J x",
        "allowed once: edit x",
        "tool: edit x",
        "tool failed: edit x",
    ]
    (asked,) = fake.asked
    assert (asked.instance, asked.harness, asked.prompt) == (ID, "codex", "hello")
    assert (asked.session, asked.directory, asked.timeout_ms) == ("s0", "/srv", 5000)


def test_lines_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake([update("box_session", sessionId="s1", loaded=False), text("hi")], OK)
    said = Said(monkeypatch, fake, as_json=True)
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [line["type"] for line in lines] == ["run", "session", "update", "end"]
    assert lines[2]["update"]["content"] == {"type": "text", "text": "hi"}
    assert lines[3] == {
        "type": "end",
        "ok": True,
        "exit": 0,
        "run": lines[0]["run"],
        "session": "s1",
        "stop_reason": "end_turn",
    }
    assert said.err == ""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (RunEnd(how="stopped", stop_reason="refusal", code=None, text=""), (20, "run-failed")),
        (RunEnd(how="failed", stop_reason=None, code="bad-json", text="x"), (20, "bad-json")),
        (RunEnd(how="timed-out", stop_reason=None, code=None, text=""), (21, "run-timed-out")),
        (RunEnd(how="left-running", stop_reason=None, code=None, text=""), (23, "left-running")),
        (RunEnd(how="cancelled", stop_reason=None, code=None, text=""), (20, "run-cancelled")),
    ],
)
def test_how_it_ends(monkeypatch: pytest.MonkeyPatch, end: RunEnd, code: tuple[int, str]) -> None:
    said = Said(monkeypatch, Fake([text("half")], end))
    assert said.code == code
    assert said.out == "half\n"
    assert said.failure is not None and said.failure.facts["run"]


def test_an_interrupt_cancels_and_the_end_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    end = RunEnd(how="cancelled", stop_reason=None, code=None, text="")
    fake = Fake([text("x")], lambda: os.kill(os.getpid(), signal.SIGINT), [text("y")], end)
    said = Said(monkeypatch, fake)
    assert said.code == (130, "interrupted")
    assert fake.cancels == 1
    assert said.out == "x" + "y\n"
    assert "once more" in said.err


def test_two_interrupts_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        Said(monkeypatch, Fake(interrupt, [], interrupt, [], OK))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_channel_that_starts_again_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    away = Refusal(Reason.UNAVAILABLE, "nobody")
    lost = Refusal(Reason.CONNECTION_LOST, "gone")
    said = Said(monkeypatch, Fake([text("a")], away, lost, [text("b")], OK))
    assert (said.code, said.out) == ((0, ""), "ab\n")


def test_a_channel_that_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LOST_S", -1.0)
    said = Said(monkeypatch, Fake([text("a")], Refusal(Reason.UNAVAILABLE, "nobody")))
    assert said.code == (14, "connection-lost")
    assert said.failure is not None and "--follow" in said.failure.message


@pytest.mark.parametrize("state", ["paused", "stopped"])
def test_an_instance_that_leaves_running(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    monkeypatch.setattr(run, "LOOK_S", 0.0)
    fake = Fake()
    fake.pages = [[text("a")], lambda: setattr(fake, "state", state), []]
    said = Said(monkeypatch, fake)
    assert said.code == (23, "left-running")
    assert said.failure is not None and state in said.failure.message


@pytest.mark.parametrize(
    ("state", "code"), [("stopped", 4), ("paused", 4), ("unknown", 12), ("starting", 4)]
)
def test_an_instance_that_does_not_run(
    monkeypatch: pytest.MonkeyPatch, state: str, code: int
) -> None:
    fake = Fake()
    fake.state = state
    said = Said(monkeypatch, fake)
    assert said.code[0] == code
    assert fake.asked == []
    assert said.failure is not None
    assert ("--start" in said.failure.message) == (state == "stopped")


def test_an_instance_without_a_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake()
    fake.harness = None
    assert Said(monkeypatch, fake).code == (4, "no-harness")


def test_start_starts_one_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(OK)
    fake.state = "stopped"

    def bring_up(out: Render, name: str, *, within_s: float) -> None:
        assert name == "web1" and within_s > 60
        fake.state = "running"

    monkeypatch.setattr("agent_box.cli.lifecycle.bring_up", bring_up)
    assert Said(monkeypatch, fake, start=True).code == (0, "")


def test_the_runs_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance need not run for it."""
    fake = Fake()
    fake.state = "stopped"
    fake.runs = [
        RunRow(run="b" * 32, session=None, begun_ms=2000, live=True),
        RunRow(run="c" * 32, session="s\x1b[2J", begun_ms=1000, live=False),
    ]
    said = Said(monkeypatch, fake, prompt=None, list=True)
    assert said.out.splitlines() == [
        "BEGUN                     STATE    SESSION",
        "1970-01-01T00:00:02.000Z  goes on  -",
        "1970-01-01T00:00:01.000Z  ended    s\\x1b[2J",
    ]
    lines = Said(monkeypatch, fake, prompt=None, list=True, as_json=True).out.splitlines()
    kept = [json.loads(line) for line in lines]
    assert [(k["type"], k.get("session"), k.get("live")) for k in kept[:2]] == [
        ("kept", None, True),
        ("kept", "s\x1b[2J", False),
    ]
    assert kept[2] == {"type": "end", "ok": True, "exit": 0}
    fake.runs = []
    assert Said(monkeypatch, fake, prompt=None, list=True).out == "no runs\n"
    fake.harness = None  # nothing needs it
    assert Said(monkeypatch, fake, prompt=None, list=True).code == (0, "")


def test_follow_shows_the_newest_that_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake([text("from the beginning")], OK)
    fake.runs = [
        RunRow(run="3" * 32, session=None, begun_ms=3, live=False),
        RunRow(run="2" * 32, session=None, begun_ms=2, live=True),
        RunRow(run="1" * 32, session=None, begun_ms=1, live=True),
    ]
    said = Said(monkeypatch, fake, prompt=None, follow=True, as_json=True)
    assert json.loads(said.out.splitlines()[0])["run"] == "2" * 32
    assert fake.asked == []
    fake.runs = fake.runs[:1]
    assert Said(monkeypatch, fake, prompt=None, follow=True).code == (3, "not-found")


@pytest.mark.parametrize(("piped", "prompt"), [(b"do it\n", "do it"), ("ü\n\n".encode(), "ü\n")])
def test_a_prompt_from_stdin(monkeypatch: pytest.MonkeyPatch, piped: bytes, prompt: str) -> None:
    fake = Fake(OK)
    with _stdin(piped):
        assert Said(monkeypatch, fake, prompt="-").code == (0, "")
    assert fake.asked[0].prompt == prompt


@pytest.mark.parametrize("piped", [b"", b"\n", b"\xff\n"])
def test_a_prompt_from_stdin_that_is_none(monkeypatch: pytest.MonkeyPatch, piped: bytes) -> None:
    with _stdin(piped):
        said = Said(monkeypatch, Fake(), prompt="-")
    assert isinstance(said.failure, Usage)


class _stdin:
    """Descriptor 0 gives these bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __enter__(self) -> None:
        self._kept = os.dup(0)
        reader, writer = os.pipe()
        os.write(writer, self._data)
        os.close(writer)
        os.dup2(reader, 0)
        os.close(reader)

    def __exit__(self, *_: object) -> None:
        os.dup2(self._kept, 0)
        os.close(self._kept)
