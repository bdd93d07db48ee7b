"""The driver of one prompt: its messages are the protocol's, and nothing that comes breaks it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from acp import schema
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_box.channel.acp import (
    LINE_MAX,
    Allowed,
    Code,
    Driver,
    Effect,
    End,
    Send,
    Update,
    Wanted,
)

WANTED = Wanted(
    prompt="say hello",
    session=None,
    directory="/home/agent/work",
    mode=None,
    authenticate=None,
    version="1.2.3",
)
INIT = {"protocolVersion": 1, "agentCapabilities": {"loadSession": True}}


def line(**fields: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **fields}).encode() + b"\n"


def sent(effects: list[Effect]) -> list[dict[str, Any]]:
    data = b"".join(e.data for e in effects if isinstance(e, Send))
    return [json.loads(each) for each in data.splitlines()]


def update(**fields: Any) -> bytes:
    body = {"sessionUpdate": "agent_message_chunk", **fields}
    return line(method="session/update", params={"sessionId": "s1", "update": body})


def ask(id: Any = 1, **more: Any) -> bytes:
    options = [
        {"optionId": "a", "name": "A", "kind": "allow_always"},
        {"optionId": "b", "name": "B", "kind": "allow_once"},
    ]
    fields = {"sessionId": "s1", "toolCall": {"toolCallId": "t"}, "options": options}
    return line(id=id, method="session/request_permission", params=fields | more)


def prompted(wanted: Wanted = WANTED) -> Driver:
    driver = Driver(wanted)
    driver.begin()
    driver.feed(line(id=0, result=INIT))
    driver.feed(line(id=1, result={"sessionId": "s1"}))
    assert driver.end is None and driver.session == "s1"
    return driver


def code(driver: Driver) -> str | None:
    assert driver.end is not None and driver.end.how == "failed"
    return driver.end.code


def test_its_messages_are_those_of_the_protocol() -> None:
    """Held to the types of the protocol's own library."""
    wanted = Wanted("hi", "s1", "/w", "default", "api-key", "1")
    driver = Driver(wanted)
    (first,) = sent(driver.begin())
    assert schema.InitializeRequest.model_validate(first["params"]).protocol_version == 1
    (authenticate,) = sent(driver.feed(line(id=0, result=INIT)))
    assert schema.AuthenticateRequest.model_validate(authenticate["params"])
    (load,) = sent(driver.feed(line(id=1, result=None)))
    assert load["method"] == "session/load"
    assert schema.LoadSessionRequest.model_validate(load["params"]).session_id == "s1"
    (mode,) = sent(driver.feed(line(id=2, result=None)))
    assert schema.SetSessionModeRequest.model_validate(mode["params"]).mode_id == "default"
    (prompt,) = sent(driver.feed(line(id=3, result={})))
    assert schema.PromptRequest.model_validate(prompt["params"]).session_id == "s1"
    (allowed,) = sent(driver.feed(ask("x")))
    answer = schema.RequestPermissionResponse.model_validate(allowed["result"])
    assert answer.outcome.model_dump(by_alias=True, exclude_none=True) == {
        "outcome": "selected",
        "optionId": "b",
    }
    (cancel,) = sent(driver.cancel("cancelled"))
    assert "id" not in cancel
    assert schema.CancelNotification.model_validate(cancel["params"]).session_id == "s1"
    (refused,) = sent(driver.feed(ask("y")))
    assert schema.RequestPermissionResponse.model_validate(refused["result"])
    assert refused["result"] == {"outcome": {"outcome": "cancelled"}}
    (new,) = sent(Driver(WANTED).begin()) and sent(_until_new())
    assert schema.NewSessionRequest.model_validate(new["params"]).cwd == "/home/agent/work"


def _until_new() -> list[Effect]:
    driver = Driver(WANTED)
    driver.begin()
    return driver.feed(line(id=0, result=INIT))


def test_leave_is_given_once_and_told() -> None:
    driver = prompted()
    effects = driver.feed(ask(1, toolCall={"title": "rm\n-rf\x1b[2J"}))
    assert [e for e in effects if isinstance(e, Allowed)] == [Allowed("rm -rf [2J", "b")]
    assert [e.kind for e in effects if isinstance(e, Update)] == ["box_permission"]
    effects = driver.feed(ask(2, options=[{"optionId": "a", "kind": "allow_always"}]))
    assert [e for e in effects if isinstance(e, Allowed)] == [
        Allowed("something without a title", None)
    ]
    assert sent(effects)[0]["result"]["outcome"] == {"outcome": "cancelled"}


@pytest.mark.parametrize(
    ("bad", "wanted"),
    [
        (b"{\n", Code.BAD_JSON),
        (b"\xff\xfe\n", Code.BAD_JSON),
        (b'{"a": NaN}\n', Code.BAD_JSON),
        (b"[" * 100_000 + b"\n", Code.BAD_JSON),
        (b"[]\n", Code.PROTOCOL),
        (b"1\n", Code.PROTOCOL),
        (b'{"jsonrpc": "1.0"}\n', Code.PROTOCOL),
        (line(method=1), Code.PROTOCOL),
        (line(), Code.PROTOCOL),
        (line(id=2), Code.PROTOCOL),
        (line(id=3, result={}), Code.PROTOCOL),
        (line(id=True, result={}), Code.PROTOCOL),
        (line(id="2", result={}), Code.PROTOCOL),
        (line(id=2, result={}), Code.PROTOCOL),
        (line(id=2, result={"stopReason": "a\nb"}), Code.PROTOCOL),
        (line(id=2, error={"code": -1, "message": "no"}), Code.ERROR),
        (line(id=None, method="session/request_permission"), Code.PROTOCOL),
        (ask(1, sessionId="s2"), Code.PROTOCOL),
        (ask(1, options={}), Code.PROTOCOL),
        (ask({}), Code.PROTOCOL),
        (ask("x" * 513), Code.PROTOCOL),
        (line(method="session/update", params={}), Code.PROTOCOL),
        (update(sessionUpdate="box_session"), Code.PROTOCOL),
        (update(sessionUpdate="Bad kind"), Code.PROTOCOL),
        (b"a" * (LINE_MAX + 1), Code.LONG_LINE),
        (b"a" * (LINE_MAX + 1) + b"\n", Code.LONG_LINE),
    ],
)
def test_what_it_does_not_take(bad: bytes, wanted: str) -> None:
    driver = prompted()
    effects = driver.feed(bad)
    assert isinstance(effects[-1], End)
    assert code(driver) == wanted
    assert driver.end is not None and driver.end.text.isprintable()
    assert driver.feed(update()) == []  # and nothing comes after it


def test_what_it_passes_over() -> None:
    driver = prompted()
    assert driver.feed(b"\n  \n") == []
    assert driver.feed(line(method="_vendor/thing", params=[1])) == []
    assert driver.feed(line(method="session/update", params={"sessionId": "other", "update": {
        "sessionUpdate": "plan"}})) == []  # fmt: skip
    assert sent(driver.feed(line(id=9, method="terminal/create", params={})))[0]["error"]
    assert driver.end is None


def test_an_update_is_told_as_it_came() -> None:
    driver = prompted()
    text = "é\u2028😀\x00"
    (told,) = driver.feed(update(content={"type": "text", "text": text}))
    assert isinstance(told, Update)
    assert json.loads(told.body)["content"]["text"] == text


def test_a_cancel_before_the_prompt_ends_it_at_once() -> None:
    driver = Driver(WANTED)
    driver.begin()
    assert driver.cancel("timed-out") == [End("timed-out", None, None, "")]
    assert driver.cancel("cancelled") == []


@pytest.mark.parametrize("reason", ["cancelled", "end_turn"])
def test_what_answers_to_a_cancel_ends_it(reason: str) -> None:
    driver = prompted()
    driver.cancel("timed-out")
    driver.cancel("cancelled")  # the first reason stays
    assert driver.feed(line(id=2, result={"stopReason": reason})) == [
        End("timed-out", None, None, "")
    ]


def test_an_error_after_a_cancel_is_its_answer() -> None:
    driver = prompted()
    driver.cancel("cancelled")
    driver.feed(line(id=2, error={"code": -1, "message": "aborted"}))
    assert driver.end == End("cancelled", None, None, "")


def conversation() -> bytes:
    return b"".join(
        [
            line(id=0, result=INIT),
            line(id=1, result={"sessionId": "s1"}),
            update(content={"type": "text", "text": "wörds"}),
            ask(5),
            line(id=6, method="fs/read_text_file", params={}),
            update(content={"type": "text", "text": "more"}),
            line(id=2, result={"stopReason": "end_turn"}),
        ]
    )


@settings(max_examples=200)
@given(st.lists(st.integers(0, len(conversation())), max_size=12))
def test_however_it_is_cut_the_effects_are_the_same(cuts: list[int]) -> None:
    data = conversation()
    whole = Driver(WANTED)
    wanted = whole.begin() + whole.feed(data)
    driver = Driver(WANTED)
    found = driver.begin()
    places = sorted({0, *cuts, len(data)})
    for start, end in zip(places, places[1:], strict=False):
        found += driver.feed(data[start:end])
    assert found == wanted
    assert driver.end == End("stopped", "end_turn", None, "")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "jsonrpc",
                    "id",
                    "method",
                    "params",
                    "result",
                    "error",
                    "sessionId",
                    "update",
                    "options",
                    "toolCall",
                    "stopReason",
                    "sessionUpdate",
                    "kind",
                    "optionId",
                ]
            ),  # fmt: skip
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=400)
@given(st.lists(JSON | st.binary(max_size=20), max_size=6), st.integers(0, 2))
def test_nothing_breaks_it(messages: list[Any], stage: int) -> None:
    driver = Driver(WANTED)
    driver.begin()
    for step in (line(id=0, result=INIT), line(id=1, result={"sessionId": "s1"}))[:stage]:
        driver.feed(step)
    ended = False
    for message in messages:
        if isinstance(message, dict):
            message.setdefault("jsonrpc", "2.0")
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        effects = driver.feed(data + b"\n")
        assert not (ended and effects)
        ended = driver.end is not None
        assert all(isinstance(e, Send | Update | Allowed | End) for e in effects)
    assert driver.left() == ([] if ended else [End("left-running", None, None,
                             "the instance left running")])  # fmt: skip
