"""Only what is declared is a message, and whatever else comes is told from it without harm."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_box.helper import contract, wire
from agent_box.helper.contract import Bool, Hex, Int, Many, Maybe, Struct, Text, Type, Word
from agent_box.helper.wire import WireError

ID = "0123456789abcdef" * 2
PROFILE = {
    "engine": "qemu", "accel": "tcg", "cpus": 1, "memory_mib": 256, "harness": None,
    **dict.fromkeys(("kernel", "initramfs", "variant", "guest"), ID * 2),
}  # fmt: skip
LAUNCH: dict[str, Any] = {"id": ID, "launch_id": ID, "profile": PROFILE}


def values(kind: Type) -> st.SearchStrategy[Any]:
    """All values of a type."""
    match kind:
        case Hex(digits):
            return st.text("0123456789abcdef", min_size=digits, max_size=digits)
        case Int(low, high):
            return st.integers(low, high)
        case Bool():
            return st.booleans()
        case Text(most):
            return st.text(max_size=min(most, 40))
        case Word(words):
            return st.sampled_from(words)
        case Maybe(of):
            return st.none() | values(of)
        case Many(of, most):
            return st.lists(values(of), max_size=min(most, 3))
        case Struct(fields):
            return st.fixed_dictionaries({name: values(of) for name, of in fields})


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=70) | st.just(ID),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # busy hosts are slow
@given(st.data(), st.sampled_from(contract.OPS), st.integers(0, 2**53 - 1))
def test_every_request_arrives_as_it_was_sent(data: Any, op: contract.Op, number: int) -> None:
    args = data.draw(values(op.request))
    assert wire.read_request(wire.request(number, op, args)) == (
        number,
        wire.Request(number, op, args),
    )


@settings(suppress_health_check=[HealthCheck.too_slow])  # busy hosts are slow
@given(st.data(), st.sampled_from(contract.OPS), st.integers(0, 2**53 - 1))
def test_every_reply_arrives_as_it_was_sent(data: Any, op: contract.Op, number: int) -> None:
    reply = data.draw(values(op.reply))
    answer = wire.read_answer(wire.reply(number, op, reply))
    assert (answer.req, answer.refused) == (number, None)
    assert wire.check(op.reply, answer.untrusted_reply) == reply


@given(st.sampled_from(sorted(contract.ERRORS)), st.text(max_size=3000))
def test_every_refusal_arrives_as_one_line(code: str, detail: str) -> None:
    refused = wire.read_answer(wire.refusal(7, code, detail)).refused
    assert refused is not None
    assert refused.code == code
    assert len(refused.detail) <= 1000
    assert refused.detail.isprintable()


@given(st.binary(max_size=300))
def test_bytes_are_a_request_or_an_error(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.read_request(data)


@given(ANY, ANY, st.sampled_from([*(op.name for op in contract.OPS), "open", ""]))
def test_whatever_is_well_formed_is_answered_by_number(req: Any, args: Any, op: str) -> None:
    data = json.dumps({"v": 1, "req": req, "op": op, "args": args}).encode()
    try:
        number, asked = wire.read_request(data)
    except WireError:
        assert type(req) is not int or not 0 <= req < 2**53 or len(data) > 300 or "[[" in str(args)
        return
    assert number == req
    if isinstance(asked, wire.Request):
        assert wire.check(asked.op.request, args) == asked.args == args


def broken(**changes: Any) -> bytes:
    args = {**LAUNCH, **changes}
    return json.dumps({"v": 1, "req": 1, "op": "launch", "args": args}).encode()


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"id": ID.upper()}, "args.id"),
        ({"id": ID[1:]}, "args.id"),
        ({"id": ID + "\n"}, "args.id"),
        ({"id": "../" + ID[3:]}, "args.id"),
        ({"id": "١" * 32}, "args.id"),
        ({"id": None}, "args.id"),
        ({"id": 1}, "args.id"),
        ({"path": "/etc/passwd"}, "unknown"),
        ({"profile": {**PROFILE, "cpus": True}}, "profile.cpus"),
        ({"profile": {**PROFILE, "cpus": 0}}, "profile.cpus"),
        ({"profile": {**PROFILE, "cpus": "1"}}, "profile.cpus"),
        ({"profile": {**PROFILE, "memory_mib": 1 << 40}}, "profile.memory_mib"),
        ({"profile": {**PROFILE, "accel": "hvf"}}, "profile.accel"),
        ({"profile": {**PROFILE, "kernel": "/boot/vmlinuz"}}, "profile.kernel"),
        ({"profile": {**PROFILE, "append": "init=/bin/sh"}}, "unknown"),
        ({"profile": {k: v for k, v in PROFILE.items() if k != "harness"}}, "harness is missing"),
        ({"profile": []}, "profile is not an object"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(args: dict[str, Any], why: str) -> None:
    number, error = wire.read_request(broken(**args))
    assert number == 1
    assert isinstance(error, WireError)
    assert why in str(error)


def test_a_missing_argument_is_refused_by_name() -> None:
    data = json.dumps({"v": 1, "req": 1, "op": "launch", "args": {"id": ID}}).encode()
    _, error = wire.read_request(data)
    assert "launch_id is missing" in str(error)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'{"v":1,"req":1,"op":"probe","args":{},"args":{}}', "twice"),
        (b'{"v":1,"req":1,"op":"list","args":{"after":null,"after":null}}', "twice"),
        (b'{"v":1,"req":NaN,"op":"probe","args":{}}', "not an integer"),
        (b'{"v":1,"req":1.0,"op":"probe","args":{}}', "not an integer"),
        (b'{"v":1,"req":Infinity,"op":"probe","args":{}}', "not an integer"),
        (b'{"v":1,"req":' + b"9" * 5000 + b',"op":"probe","args":{}}', "too long"),
        (b'{"v":1,"req":-1,"op":"probe","args":{}}', "req"),
        (b'{"v":true,"req":1,"op":"probe","args":{}}', "v is not"),
        (b'{"v":2,"req":1,"op":"probe","args":{}}', "v is not"),
        (b'{"v":1,"req":1,"op":"probe"}', "not a request"),
        (b'{"v":1,"req":1,"op":"probe","args":{},"fd":3}', "not a request"),
        (b"[" * 60000, "nested"),
        (b'{"a":' * 9 + b"1" + b"}" * 9, "nested"),
        (b'"' + b"[" * 60000 + b'"', "not a request"),
        (b"\xff\xfe", "not JSON"),
        (b"", "not JSON"),
        (b'{"v":1} {"v":1}', "not JSON"),
        (b" " * 70000, "too long"),
    ],
)
def test_what_is_no_request_at_all_ends_it(data: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        wire.read_request(data)


def test_what_the_helper_must_not_say_is_refused_before_it_is_sent() -> None:
    op = wire.OPS["list"]
    with pytest.raises(WireError, match="more is missing"):
        wire.reply(1, op, {"instances": []})
    with pytest.raises(WireError):
        wire.request(1, op, {"after": "x"})
    with pytest.raises(KeyError):
        wire.refusal(1, "surprise", "")


def test_an_answer_is_a_reply_or_a_refusal() -> None:
    for data in (
        b'{"v":1,"req":1}',
        b'{"v":1,"req":1,"reply":{},"error":{"code":"internal","detail":""}}',
        b'{"v":1,"req":1,"error":{"code":"surprise","detail":""}}',
        b'{"v":1,"req":1,"error":{"code":"internal"}}',
        b"[]",
    ):
        with pytest.raises(WireError):
            wire.read_answer(data)


def test_the_longest_state_fits_a_message_with_room_for_more() -> None:
    """`list` counts on it."""
    state = {
        "id": ID, "state": "allocated", "launch_id": ID, "disk_bytes": contract.MAX_DISK,
        "vmm": {"pid": 4194304, "start": 2**62}, "shim": False, "device": False,
        "worker": False, "restarts": 2**31, "error": "\U0001f4a9" * 1000,
        "exit": {"code": 255, "signal": 64, "by": "device-died", "at_ms": 2**53},
    }  # fmt: skip
    wire.check(contract.STATE, state)
    assert len(wire.encode(state)) < contract.MESSAGE_BYTES - 49152


def test_the_page_names_every_operation_field_state_and_refusal() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "helper.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*)\|", page, re.MULTILINE))
    for op in contract.OPS:
        assert rows[op.name].strip() == ", ".join(name for name, _ in op.request.fields)
    states = dict(contract.STATE.fields)["state"]
    ends = dict(contract.EXIT.fields)["by"]
    assert isinstance(states, Word) and isinstance(ends, Word)
    for word in (*states.words, *ends.words, *contract.ERRORS):
        assert f"`{word}`" in page, word


def test_no_operation_takes_a_path_or_a_descriptor() -> None:
    """The trust of the contract's page, field by field."""

    def kinds(kind: Type) -> set[type]:
        match kind:
            case Maybe(of) | Many(of, _):
                return kinds(of)
            case Struct(fields):
                return {found for _, of in fields for found in kinds(of)}
        return {type(kind)}

    for op in contract.OPS:
        assert kinds(op.request) <= {Hex, Int, Word}
