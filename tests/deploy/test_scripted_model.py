"""The scripted model: it does what the prompt's lines say, by each provider's API."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.source import ROOT

KEY = "sk-scripted-0123456789"
PROMPT = "Please\n$ echo one\n$ echo two"
SHELL = {"type": "object", "properties": {"command": {"type": "array"}}, "required": ["command"]}


class Model:
    def __init__(self, port: int, log: Path) -> None:
        self.port = port
        self.log = log

    def ask(
        self, path: str, body: dict[str, Any], auth: tuple[str, str] = ("x-api-key", KEY)
    ) -> tuple[int, str]:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        link.request("POST", path, json.dumps(body), dict([auth]))
        answer = link.getresponse()
        said = answer.read().decode()
        link.close()
        return answer.status, said


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    directory = tmp_path_factory.mktemp("model")
    (directory / "key").write_text(KEY + "\n")
    log = directory / "log"
    words = ["--key-file", str(directory / "key"), "--log", str(log)]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "deploy/scripted_model.py"), *words],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield Model(int(process.stdout.readline()), log)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_whoever_does_not_show_the_key_is_refused(model: Model) -> None:
    for auth in (("x-api-key", "nonce"), ("Authorization", "Bearer nonce"), ("X-Other", KEY)):
        assert model.ask("/v1/messages", {}, auth)[0] == 401
    assert KEY not in model.log.read_text()


def responses(results: int) -> dict[str, Any]:
    items: list[dict[str, Any]] = [{"role": "user", "content": [{"text": PROMPT}]}]
    items += [{"type": "function_call_output", "output": "x"}] * results
    tool = {"type": "function", "name": "shell", "parameters": SHELL}
    return {"model": "m", "input": items, "tools": [tool], "stream": False}


def test_responses(model: Model) -> None:
    bearer = ("Authorization", f"Bearer {KEY}")
    for number, command in enumerate(("echo one", "echo two")):
        status, said = model.ask("/v1/responses", responses(number), bearer)
        (item,) = json.loads(said)["output"]
        assert (status, item["type"], item["name"]) == (200, "function_call", "shell")
        assert json.loads(item["arguments"]) == {"command": ["bash", "-lc", command]}
    (item,) = json.loads(model.ask("/v1/responses", responses(2), bearer)[1])["output"]
    assert item["content"][0]["text"] == "2 commands of the script ran."
    _, said = model.ask("/v1/responses", responses(2) | {"stream": True}, bearer)
    events = [json.loads(x[6:]) for x in said.splitlines() if x.startswith("data: ")]
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.completed"


def test_messages(model: Model) -> None:
    tool = {"name": "Bash", "input_schema": {"properties": {"command": {"type": "string"}}}}
    body: dict[str, Any] = {
        "model": "m",
        "tools": [tool],
        "messages": [{"role": "user", "content": PROMPT}],
    }
    found = json.loads(model.ask("/v1/messages", body)[1])
    assert found["stop_reason"] == "tool_use"
    assert found["content"][0]["input"] == {"command": "echo one"}
    result = {"role": "user", "content": [{"type": "tool_result", "content": "x"}] * 2}
    body["messages"] += [{"role": "assistant", "content": found["content"]}, result]
    found = json.loads(model.ask("/v1/messages", body)[1])
    assert (found["stop_reason"], found["content"][0]["type"]) == ("end_turn", "text")


@pytest.mark.parametrize(("word", "reason"), [("TRUNCATE", "max_tokens"), ("REFUSE", "refusal")])
def test_other_ends(model: Model, word: str, reason: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": word}]}
    assert json.loads(model.ask("/v1/messages", body)[1])["stop_reason"] == reason


def test_google(model: Model) -> None:
    declared = {"name": "run_shell_command", "parameters": {"properties": {"command": {}}}}
    body = {
        "contents": [{"role": "user", "parts": [{"text": PROMPT}]}],
        "tools": [{"functionDeclarations": [declared]}],
    }
    auth = ("x-goog-api-key", KEY)
    found = json.loads(model.ask("/v1beta/models/m:generateContent", body, auth)[1])
    call = found["candidates"][0]["content"]["parts"][0]["functionCall"]
    assert call == {"name": "run_shell_command", "args": {"command": "echo one"}}


def test_an_answer_by_a_schema(model: Model) -> None:
    """Gemini's agent asks a small model which of the large ones it should ask."""
    properties = {
        "why": {"type": "string"},
        "score": {"type": "integer", "minimum": 1, "maximum": 100},
        "which": {"type": "STRING", "enum": ["flash", "pro"]},
    }
    schema = {"type": "object", "properties": properties, "required": ["why", "score", "which"]}
    body = {
        "contents": [{"role": "user", "parts": [{"text": PROMPT}]}],
        "generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": schema},
    }
    status, said = model.ask("/v1beta/models/x:generateContent", body, ("x-goog-api-key", KEY))
    text = json.loads(said)["candidates"][0]["content"]["parts"][0]["text"]
    assert status == 200
    assert json.loads(text) == {"why": "as the script says", "score": 1, "which": "flash"}
