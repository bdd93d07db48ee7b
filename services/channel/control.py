"""The control session as the host sees it, without I/O: the other half of guest/control.py.

What a guest says is its claim. It is checked for shape here, and every text in it is cut and
made printable.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from agent_box.guest.wire import VERSION, Decoder, FrameError, Kind, VersionError, pack, unpack

TEXT_MAX: Final = 500
FRAME_MAX: Final = 1 << 16  # bytes that are held of a guest; a hello or a reply has far fewer
TIMER_MOST: Final = 1 << 32  # in a hello
_NS_MAX: Final = 1 << 63


class Hello(NamedTuple):
    """What the guest claims of itself."""

    guest: str  # version of box-guest
    boot: int | None  # the boot it was provisioned for; None before that
    disk: str  # ok, absent, damaged
    disk_text: str
    timer: int | None = None  # what its kernel took for the timer's rate, in thousandths of it


class Session:
    """One control stream. After a `FrameError` it is dead, and its stream must be closed.

    One request is under way at a time; `feed` gives its reply.
    """

    def __init__(self) -> None:
        self._decoder = Decoder(FRAME_MAX)
        self._sent = 0
        self._due = 0
        self._waiting = False
        self.hello: Hello | None = None

    def feed(self, untrusted: bytes) -> dict[str, Any] | None:
        """Takes bytes; the reply when they completed it. `hello` is set before any reply.

        Raises:
            FrameError: no frame, or one that is out of turn or of another shape.
        VersionError: it speaks other versions than we.
        """
        reply = None
        for kind, untrusted_payload in self._decoder.feed(untrusted):
            untrusted_fields = unpack(untrusted_payload, self._due)
            self._due += 1
            if self.hello is None:
                if kind != Kind.HELLO:
                    raise FrameError("the first frame is no hello")
                self.hello = _hello(untrusted_fields)
            elif kind != Kind.REPLY or not self._waiting:
                raise FrameError("a frame out of turn")
            else:
                self._waiting = False
                reply = untrusted_fields
        return reply

    def greet(self) -> bytes:
        """Our hello, to be sent when the guest's has come."""
        return self._pack(Kind.HELLO, {"version": VERSION})

    def request(self, op: str, fields: dict[str, Any]) -> bytes:
        """The bytes of a request.

        Raises:
            RuntimeError: another one is under way.
        """
        if self._waiting:
            raise RuntimeError("a request is under way")
        self._waiting = True
        return self._pack(Kind.REQUEST, {"op": op, **fields})

    def _pack(self, kind: Kind, fields: dict[str, Any]) -> bytes:
        self._sent += 1
        return pack(kind, self._sent - 1, fields)


def refused(untrusted_reply: dict[str, Any]) -> str | None:
    """Why the guest did not do it, as it says; None when it says that it did.

    Raises:
        FrameError: it says neither.
    """
    if untrusted_reply.get("ok") is True:
        return None
    if untrusted_reply.get("ok") is False:
        return _text(untrusted_reply, "text")
    raise FrameError("a reply without an outcome")


def hook_end(untrusted_reply: dict[str, Any]) -> tuple[str, str]:
    """How the project hook ended, and its last lines.

    Raises:
        FrameError: it is no such reply.
    """
    state = untrusted_reply.get("state")
    if state not in ("none", "done", "failed"):
        raise FrameError("a hook that did not end")
    return str(state), _text(untrusted_reply, "line")


def clock(untrusted_reply: dict[str, Any]) -> int:
    """The guest's clock in a reply, Unix time in ns.

    Raises:
        FrameError: there is none.
    """
    value = untrusted_reply.get("now_ns")
    if type(value) is not int or not 0 <= value < _NS_MAX:
        raise FrameError("a reply without a clock")
    return value


def _hello(fields: dict[str, Any]) -> Hello:
    versions, disk = fields.get("versions"), fields.get("disk")
    if not isinstance(versions, list) or not all(type(version) is int for version in versions):
        raise FrameError("a hello without versions")
    if VERSION not in versions:
        theirs = ", ".join(map(str, versions[:8])) or "none"
        raise VersionError(
            f"box-guest speaks version {theirs} of the guest protocol, and this host {VERSION}"
        )
    if not isinstance(disk, dict) or disk.get("state") not in ("ok", "absent", "damaged"):
        raise FrameError("a hello without the state of the disk")
    boot = fields.get("boot")
    if boot is not None and (type(boot) is not int or boot < 0):
        raise FrameError("a hello with a bad boot")
    timer = fields.get("timer")  # one of an older image says nothing of it
    if timer is not None and (type(timer) is not int or not 0 <= timer <= TIMER_MOST):
        raise FrameError("a hello with a bad timer")
    return Hello(_text(fields, "guest"), boot, disk["state"], _text(disk, "text"), timer)


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise FrameError(f"no text in {name}")
    return "".join(c if c.isprintable() else "?" for c in value[:TEXT_MAX])
