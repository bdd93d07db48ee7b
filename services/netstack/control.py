"""What the service and a worker say to each other, without I/O.

One stream socket in the worker's room. A frame is a little-endian u32 that counts what
follows and one msgpack map, tagged by `op`; descriptors lie beside the frames that are
declared to bring some (SCM_RIGHTS, unix(7)), in order. Each side refuses what is not exactly
declared, and a refused frame ends the connection, which costs nothing: the newest connection
wins, and everything that must not be lost is kept by the worker until it is acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, TypeAlias

import msgspec

from agent_box.netstack.contract import Applied, Counters, Forward, Policy

VERSION: Final = 1
FRAME_MAX: Final = 4 << 20  # bytes; a policy of the most rules is far below
FDS_MAX: Final = 8  # that may wait for the frames that they belong to
NOTICES_MAX: Final = 512  # that a worker keeps while nobody takes them
CAPTURES_MAX: Final = 4  # of one instance at a time
SNAP_MAX: Final = 65535

Fact: TypeAlias = str | int | bool
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]


class ControlError(ValueError):
    """Bytes that are no frame of this protocol. The connection ends. One line."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all; no field has a default."""


class Up(_Message, frozen=True, tag_field="op", tag="up"):
    """This boot's policy. Again for the same boot, it is `Apply`."""

    n: Number
    boot: Number
    name: str  # of the instance, for people
    policy: Policy


class Down(_Message, frozen=True, tag_field="op", tag="down"):
    """Ends all flows and forwards. Nothing passes until the next `Up`."""

    n: Number


class Apply(_Message, frozen=True, tag_field="op", tag="apply"):
    n: Number
    policy: Policy


class Link(_Message, frozen=True, tag_field="op", tag="link"):
    """Brings the stream to the guest; one descriptor."""

    n: Number


class Count(_Message, frozen=True, tag_field="op", tag="count"):
    n: Number


class Listen(_Message, frozen=True, tag_field="op", tag="listen"):
    """Brings a listening socket; one descriptor."""

    n: Number
    forward: Forward


class Unlisten(_Message, frozen=True, tag_field="op", tag="unlisten"):
    """Ends every listener of that port, and their connections."""

    n: Number
    host_port: Number


class Capture(_Message, frozen=True, tag_field="op", tag="capture"):
    """Brings a packet socket; one descriptor. Its end is the capture's. What it does not
    take at once is counted and lost."""

    n: Number
    snap: Annotated[int, msgspec.Meta(ge=1, le=SNAP_MAX)]


class Ack(_Message, frozen=True, tag_field="op", tag="ack"):
    """All notices up to this one are in the journal."""

    seq: Number


class Hello(_Message, frozen=True, tag_field="op", tag="hello"):
    """The worker's first frame: what it is, and what it knows."""

    version: Number
    instance: str
    epoch: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]  # of this process
    restarts: Number  # how many were there before it, for this machine
    boot: Number | None  # None: it has no policy yet, and lets nothing pass
    name: str | None
    policy: Policy | None
    linked: bool
    forwards: list[Forward]


class Done(_Message, frozen=True, tag_field="op", tag="done"):
    n: Number
    applied: Applied | None  # with up and apply
    counters: Counters | None  # with count


class Refused(_Message, frozen=True, tag_field="op", tag="refused"):
    n: Number
    why: str


class Notice(_Message, frozen=True, tag_field="op", tag="notice"):
    """Something for the journal. Sent again on each connection until it is acknowledged."""

    seq: Number
    kind: str
    facts: dict[str, Fact]


class Unlinked(_Message, frozen=True, tag_field="op", tag="unlinked"):
    """The stream to the guest has ended; another is wanted."""


ToWorker: TypeAlias = (
    Up | Down | Apply | Link | Count | Listen | Unlisten | Capture | Ack
)  # fmt: skip
FromWorker: TypeAlias = Hello | Done | Refused | Notice | Unlinked
BRINGS: Final = (Link, Listen, Capture)  # one descriptor each

_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)
_encode = msgspec.msgpack.Encoder().encode


def frame(message: ToWorker | FromWorker) -> bytes:
    """Raises:
    ControlError: it is larger than `FRAME_MAX`.
    """
    body = _encode(message)
    if len(body) > FRAME_MAX:
        raise ControlError(f"{type(message).__name__} is larger than {FRAME_MAX} bytes")
    return len(body).to_bytes(4, "little") + body


class Reader:
    """Takes bytes as they come and gives their frames.

    Args:
        worker: whether it reads what is said to a worker.
    """

    def __init__(self, *, worker: bool) -> None:
        self._decoder: msgspec.msgpack.Decoder[ToWorker] | msgspec.msgpack.Decoder[FromWorker]
        self._decoder = _to_worker if worker else _from_worker
        self._held = bytearray()

    def feed(self, untrusted: bytes) -> Iterator[ToWorker | FromWorker]:
        """Raises:
        ControlError: no frame of the protocol; nothing more can be read.
        """
        self._held += untrusted
        while len(self._held) >= 4:
            size = int.from_bytes(self._held[:4], "little")
            if size > FRAME_MAX:
                raise ControlError(f"a frame of {size} bytes")
            if len(self._held) < 4 + size:
                return
            body = bytes(self._held[4 : 4 + size])
            del self._held[: 4 + size]
            try:
                yield self._decoder.decode(body)
            except (ValueError, msgspec.MsgspecError, RecursionError) as error:
                raise ControlError(f"not a message of this protocol: {error}") from None
