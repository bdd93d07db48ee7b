"""Frames between host and guest, without I/O. Both ends import this module.

A frame is a little-endian u32 that counts what follows, one byte that says what it is, then
JSON for control or raw bytes for data (docs/guest.md). What arrives is
hostile on either side: the guest's root may send anything, and PID 1 must survive anything.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from enum import IntEnum

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from typing import Any, Final

VERSION: Final = 1
CONTROL_PORT: Final = 5000
NETWORK_PORT: Final = 5003
PORTS: Final = (5000, 5001, 5002, 5003, 5004, 5005)  # all bound before anything else runs
HOST_CID: Final = 2  # VMADDR_CID_HOST: the only peer that is ever accepted

CONTROL_MAX: Final = 1 << 20  # bytes of one control frame, the kind's byte included
DEPTH_MAX: Final = 8

_HEAD: Final = struct.Struct("<IB")


class Kind(IntEnum):
    """What a frame of the control port is."""

    HELLO = 1  # the first frame of each side
    REQUEST = 2  # host to guest
    REPLY = 3  # guest to host


class FrameError(ValueError):
    """Bytes that are no frame, or a frame that does not belong here. The stream ends."""


class VersionError(FrameError):
    """The other end speaks other versions. One line for the operator."""


def encode(kind: int, payload: bytes) -> bytes:
    """One frame.

    Raises:
        FrameError: the payload is too large to be accepted at the other end.
    """
    if len(payload) + 1 > CONTROL_MAX:
        raise FrameError(f"a frame of {len(payload) + 1} bytes is over {CONTROL_MAX}")
    return _HEAD.pack(len(payload) + 1, kind) + payload


class Decoder:
    """Cuts a byte stream into frames; holds at most one frame of `cap` bytes."""

    def __init__(self, cap: int = CONTROL_MAX) -> None:
        self._cap = cap
        self._held = bytearray()

    def feed(self, untrusted: bytes) -> Iterator[tuple[int, bytes]]:
        """Yields each frame that is complete as (kind, payload).

        Raises:
            FrameError: a length of nothing, or over the cap, told from its first four bytes.
        """
        self._held += untrusted
        while len(self._held) >= 4:
            length = int.from_bytes(self._held[:4], "little")
            if not 1 <= length <= self._cap:
                raise FrameError(f"a frame says that it has {length} bytes")
            if len(self._held) < 4 + length:
                return
            kind, payload = self._held[4], bytes(self._held[5 : 4 + length])
            del self._held[: 4 + length]
            yield kind, payload

    @property
    def empty(self) -> bool:
        """Whether the stream may end here without having lost part of a frame."""
        return not self._held


def pack(kind: int, seq: int, fields: dict[str, Any]) -> bytes:
    """A control frame: `fields` as JSON beside its sequence number."""
    body = json.dumps({"seq": seq, **fields}, ensure_ascii=True, separators=(",", ":"))
    return encode(kind, body.encode())


def unpack(untrusted: bytes, expect: int) -> dict[str, Any]:
    """The fields of a control frame, without its sequence number.

    Raises:
        FrameError: not strict JSON, no object, a key twice, too deep, or another sequence
            number than `expect`: frames must neither skip nor repeat.
    """
    try:
        value = json.loads(untrusted, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FrameError("a control frame is not strict JSON") from error
    if not isinstance(value, dict):
        raise FrameError("a control frame is no JSON object")
    if _deeper(value, DEPTH_MAX):
        raise FrameError("a control frame nests too deep")
    seq = value.pop("seq", None)
    if type(seq) is not int or seq != expect:
        raise FrameError(f"frame {expect} was due")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key stands twice")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _deeper(value: Any, allowed: int) -> bool:
    if isinstance(value, dict):
        return allowed == 0 or any(_deeper(inner, allowed - 1) for inner in value.values())
    if isinstance(value, list):
        return allowed == 0 or any(_deeper(inner, allowed - 1) for inner in value)
    return False
