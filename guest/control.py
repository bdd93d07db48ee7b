"""The control session as the guest sees it, without I/O: bytes in, actions and bytes out.

The host says hello, asks one thing at a time, and gets a reply to each. What an operation
does stands in agent.py; which exist, and what their fields must be, stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agent_box.guest.wire import VERSION, Decoder, FrameError, Kind, VersionError, pack, unpack

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from typing import Any, Final

Check = Callable[["Any"], bool]
Fields = dict[str, "Any"]


def _text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _flag(value: Any) -> bool:
    return type(value) is bool


def _hostname(value: Any) -> bool:
    """One label of RFC 1123."""
    return (
        _text(value)
        and 1 <= len(value) <= 63
        and value.isascii()
        and value.replace("-", "a").isalnum()
        and not value.startswith("-")
        and not value.endswith("-")
    )


def _variable(value: Any) -> bool:
    return _text(value) and value.isascii() and value.isidentifier()


def _maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _each(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(check(item) for item in value)


def _object(**fields: Check) -> Check:
    def check(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and value.keys() == fields.keys()
            and all(fields[name](value[name]) for name in fields)
        )

    return check


# The host's wall clock, and its boot clock, by which one that was held up on its way, as by a
# pause, is known to be older than the last.
_TIME: Final[Mapping[str, Check]] = {"time_ns": _count, "at_ns": _count}

# Every field of every request, no more and no fewer. An empty list says "none"; a field that
# is missing is a refusal, so that nothing can be lost on the way and go unnoticed.
OPERATIONS: Final[Mapping[str, Mapping[str, Check]]] = {
    "provision": {
        "boot": _count,
        "hostname": _hostname,
        "environment": _each(_object(name=_variable, value=_text)),
        "files": _each(_object(path=_text, mode=_count, content=_text, yields=_flag)),
        "harness": _maybe(_text),
        "hook": _maybe(_object(path=_text, expected=_flag)),
        "sudo": _flag,
        **_TIME,
    },
    "time": _TIME,
    "hook": {},
    "trim": {},
    "poweroff": {},
    "ping": {},
}


class Action:
    """An operation that the host asked for; answer it with `Session.reply`."""

    __slots__ = ("fields", "op")

    def __init__(self, op: str, fields: Fields) -> None:
        self.op = op
        self.fields = fields


class Session:
    """One control stream. After a `FrameError` it is dead and its stream must be closed.

    Args:
        greeting: the fields of our hello besides the versions.
    """

    def __init__(self, greeting: Fields) -> None:
        self._decoder = Decoder()
        self._sent = 0
        self._due = 0
        self._greeted = False
        self._asked = False
        self._out = bytearray()
        self._send(Kind.HELLO, {"versions": [VERSION], **greeting})

    def feed(self, untrusted: bytes) -> list[Action]:
        """What the host asks for.

        Raises:
            FrameError: a bad frame, one out of turn, or a version that we do not speak.
        """
        actions = []
        for kind, untrusted_payload in self._decoder.feed(untrusted):
            fields = unpack(untrusted_payload, self._due)
            self._due += 1
            if not self._greeted:
                if kind != Kind.HELLO or fields.keys() != {"version"}:
                    raise FrameError("the first frame is no hello")
                if fields["version"] != VERSION or type(fields["version"]) is not int:
                    raise VersionError(f"the host does not speak version {VERSION}, as we do")
                self._greeted = True
            elif kind != Kind.REQUEST or self._asked:
                raise FrameError("a frame out of turn")
            else:
                actions.append(self._action(fields))
                self._asked = True
        return actions

    @staticmethod
    def _action(fields: Fields) -> Action:
        op = fields.pop("op", None)
        wanted = OPERATIONS.get(op) if isinstance(op, str) else None
        if wanted is None or not isinstance(op, str):
            raise FrameError("an operation that does not exist")
        if fields.keys() != wanted.keys():
            raise FrameError(f"{op}: unknown or missing fields")
        for name, check in wanted.items():
            if not check(fields[name]):
                raise FrameError(f"{op}: bad {name}")
        return Action(op, fields)

    def reply(self, fields: Fields) -> None:
        """Answers the last action."""
        self._asked = False
        self._send(Kind.REPLY, {"ok": True, **fields})

    def refuse(self, text: str) -> None:
        """Says why the last action was not done."""
        self._asked = False
        self._send(Kind.REPLY, {"ok": False, "text": text[:500]})

    def outgoing(self) -> bytes:
        """Takes the bytes to send."""
        out = bytes(self._out)
        self._out.clear()
        return out

    def _send(self, kind: Kind, fields: Fields) -> None:
        self._out += pack(kind, self._sent, fields)
        self._sent += 1
