"""The control session, played frame by frame."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.guest.agent import _OPERATIONS
from agent_box.guest.control import OPERATIONS, Session
from agent_box.guest.wire import VERSION, Decoder, FrameError, Kind, VersionError, pack, unpack

PROVISION: dict[str, Any] = {
    "op": "provision",
    "boot": 1,
    "hostname": "work",
    "environment": [{"name": "A", "value": "1"}],
    "files": [{"path": "/home/agent/x", "mode": 0o600, "content": "", "yields": False}],
    "harness": None,
    "hook": None,
    "sudo": False,
    "time_ns": 1_700_000_000_000_000_000,
    "at_ns": 5_000_000_000,
}


class Host:
    """Speaks the host's side and keeps count for both."""

    def __init__(self) -> None:
        self.session = Session({"guest": "0"})
        self.sent = 0
        self.heard = 0
        self.decoder = Decoder()

    def say(self, kind: Kind, **fields: Any) -> list[Any]:
        self.sent += 1
        return self.session.feed(pack(kind, self.sent - 1, fields))

    def hear(self) -> list[tuple[int, dict[str, Any]]]:
        said = []
        for kind, payload in self.decoder.feed(self.session.outgoing()):
            said.append((kind, unpack(payload, self.heard)))
            self.heard += 1
        return said

    def greeted(self) -> Host:
        self.say(Kind.HELLO, version=VERSION)
        self.hear()
        return self


def test_it_says_hello_first() -> None:
    assert Host().hear() == [(Kind.HELLO, {"versions": [VERSION], "guest": "0"})]


def test_a_request_is_an_action_and_has_one_reply() -> None:
    host = Host().greeted()
    (action,) = host.say(Kind.REQUEST, **PROVISION)
    assert action.op == "provision"
    assert action.fields == {k: v for k, v in PROVISION.items() if k != "op"}
    host.session.reply({"now_ns": 3})
    assert host.hear() == [(Kind.REPLY, {"ok": True, "now_ns": 3})]
    host.say(Kind.REQUEST, op="ping")
    host.session.refuse("no\n" * 400)
    ((_, said),) = host.hear()
    assert said["ok"] is False
    assert len(said["text"]) == 500


@pytest.mark.parametrize("kind", [Kind.REQUEST, Kind.REPLY])
def test_nothing_comes_before_hello(kind: Kind) -> None:
    with pytest.raises(FrameError):
        Host().say(kind, op="ping")


@pytest.mark.parametrize("fields", [{}, {"version": VERSION, "more": 1}, {"versions": [VERSION]}])
def test_a_hello_of_another_shape_is_none(fields: dict[str, Any]) -> None:
    with pytest.raises(FrameError, match="no hello"):
        Host().say(Kind.HELLO, **fields)


@pytest.mark.parametrize("version", [0, VERSION + 1, True, None, "1"])
def test_another_version_is_refused_by_name(version: object) -> None:
    with pytest.raises(VersionError, match=f"speak version {VERSION}"):
        Host().say(Kind.HELLO, version=version)


def test_a_second_request_waits_for_the_first_reply() -> None:
    host = Host().greeted()
    host.say(Kind.REQUEST, op="ping")
    with pytest.raises(FrameError, match="turn"):
        host.say(Kind.REQUEST, op="ping")


@pytest.mark.parametrize("op", ["", "perform", "__init__", "Provision", None, 1, ["ping"]])
def test_only_declared_operations_exist(op: object) -> None:
    with pytest.raises(FrameError, match="does not exist"):
        Host().greeted().say(Kind.REQUEST, op=op)


@pytest.mark.parametrize("name", sorted(set(PROVISION) - {"op"}))
def test_a_lost_field_is_a_refusal(name: str) -> None:
    lost = {k: v for k, v in PROVISION.items() if k != name}
    with pytest.raises(FrameError, match="missing"):
        Host().greeted().say(Kind.REQUEST, **lost)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("boot", -1),
        ("boot", True),
        ("boot", "1"),
        ("boot", 1 << 63),
        ("hostname", None),
        ("hostname", "a\0b"),
        ("hostname", ""),
        ("hostname", "-a"),
        ("hostname", "a-"),
        ("hostname", "a.b"),
        ("hostname", "a b"),
        ("hostname", "a\nb"),
        ("hostname", "\u00e4"),
        ("hostname", "a" * 64),
        ("environment", [{"name": "A=B", "value": "1"}]),
        ("environment", [{"name": "", "value": "1"}]),
        ("environment", [{"name": "A", "value": "a\0b"}]),
        ("at_ns", None),
        ("environment", None),
        ("environment", {}),
        ("environment", [{"name": "A"}]),
        ("environment", [{"name": "A", "value": "1", "more": 1}]),
        ("files", [{"path": "/x", "mode": "600", "content": ""}]),
        ("harness", 1),
        ("hook", []),
        ("sudo", 1),
        ("time_ns", 1.5),
    ],
)
def test_a_wrong_field_is_named(name: str, value: object) -> None:
    with pytest.raises(FrameError, match=f"bad {name}"):
        Host().greeted().say(Kind.REQUEST, **{**PROVISION, name: value})


def test_an_extra_field_is_a_refusal() -> None:
    with pytest.raises(FrameError, match="unknown"):
        Host().greeted().say(Kind.REQUEST, op="ping", more=1)


def test_every_declared_operation_is_performed_by_the_agent() -> None:
    assert OPERATIONS.keys() == _OPERATIONS.keys()


@given(st.lists(st.binary(max_size=64), max_size=20))
def test_any_bytes_are_actions_or_end_the_stream(pieces: list[bytes]) -> None:
    session = Session({})
    try:
        for untrusted in pieces:
            session.feed(untrusted)
    except FrameError:
        pass
