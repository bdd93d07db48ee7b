"""The frames of port 5001, without I/O: one stream for each attachment of a terminal or command.

Both ends import this. The host opens; the guest answers OPENED or REFUSED; then output,
input and what steers them flow, each byte with its absolute offset: an offset that skips or
repeats is a bad frame and ends the stream, as a sequence number does elsewhere.
"""

from __future__ import annotations

import json
import struct
from enum import IntEnum

from agent_box.guest.wire import FrameError, encode

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from typing import Any, Final

STREAM_VERSION: Final = 1
PORT: Final = 5001
HARNESS_PORT: Final = 5004  # the same frames for harnesses
FRAME_MAX: Final = 1 << 18  # bytes of one frame, either way; an opening one is the largest
CHUNK_MAX: Final = 1 << 16  # bytes of data in one frame
INPUT_MAX: Final = 1 << 18  # bytes of input that may be beyond what was taken
SIZE_MAX: Final = 65535  # rows or columns
ID_MAX: Final = 32

_OUT: Final = struct.Struct("<BQ")
_IN: Final = struct.Struct("<Q")
_SIZE: Final = struct.Struct("<HH")


class Frame(IntEnum):
    """What a frame of port 5001 is."""

    OPEN = 1  # host, first: JSON
    OPENED = 2  # guest: JSON with what is there
    REFUSED = 3  # guest, last: JSON with reason and text
    INPUT = 4  # host: u64 offset, bytes
    INPUT_END = 5  # host: u64 offset; nothing follows
    SEEN = 6  # host: u8 source, u64 offset up to which it has the output
    SIZE = 7  # host: u16 rows, u16 columns
    SIGNAL = 8  # host: u8
    LEAVE = 9  # host, last: it goes of its own accord, and will not come back for this
    OUTPUT = 10  # guest: u8 source, u64 offset, bytes
    TAKEN = 11  # guest: u64 offset up to which the program has the input
    ENDED = 12  # guest, last: JSON


class Refused(Exception):
    """Why an opening is not granted. `reason` is a word of the bus: bad-request, not-found,
    exhausted."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def note(kind: Frame, fields: dict[str, Any]) -> bytes:
    """A frame of JSON."""
    return encode(kind, json.dumps(fields, separators=(",", ":")).encode())


def data(kind: Frame, offset: int, content: bytes, source: int | None = None) -> bytes:
    """An INPUT, INPUT_END or TAKEN frame; with a source, an OUTPUT or SEEN one."""
    head = _IN.pack(offset) if source is None else _OUT.pack(source, offset)
    return encode(kind, head + content)


def size(rows: int, columns: int) -> bytes:
    """A SIZE frame."""
    return encode(Frame.SIZE, _SIZE.pack(rows, columns))


def signal(number: int) -> bytes:
    """A SIGNAL frame."""
    return encode(Frame.SIGNAL, bytes((number,)))


def leave() -> bytes:
    """A LEAVE frame."""
    return encode(Frame.LEAVE, b"")


def read_note(untrusted: bytes) -> dict[str, Any]:
    """The fields of a frame of JSON.

    Raises:
        FrameError: it is no JSON object.
    """
    try:
        value = json.loads(untrusted)
    except (ValueError, RecursionError):
        raise FrameError("a frame is not JSON") from None
    if not isinstance(value, dict):
        raise FrameError("a frame is no JSON object")
    return value


def read_output(untrusted: bytes) -> tuple[int, int, bytes]:
    """Source, offset and content of an OUTPUT frame, or source and offset of a SEEN one.

    Raises:
        FrameError: it is too short or too long.
    """
    if not _OUT.size <= len(untrusted) <= _OUT.size + CHUNK_MAX:
        raise FrameError("a frame of a bad length")
    source, offset = _OUT.unpack_from(untrusted)
    return source, offset, untrusted[_OUT.size :]


def read_input(untrusted: bytes) -> tuple[int, bytes]:
    """Offset and content of an INPUT frame, or the offset of INPUT_END or TAKEN.

    Raises:
        FrameError: it is too short or too long.
    """
    if not _IN.size <= len(untrusted) <= _IN.size + CHUNK_MAX:
        raise FrameError("a frame of a bad length")
    return _IN.unpack_from(untrusted)[0], untrusted[_IN.size :]


def read_size(untrusted: bytes) -> tuple[int, int]:
    """Rows and columns.

    Raises:
        FrameError: it is no size.
    """
    if len(untrusted) != _SIZE.size:
        raise FrameError("a size of a bad length")
    rows, columns = _SIZE.unpack(untrusted)
    if not rows or not columns:
        raise FrameError("a size of nothing")
    return rows, columns


class Opening:
    """What the host asks for with its first frame. All is checked.

    Attributes:
        offsets: of the first output byte wanted, for each source.
    """

    __slots__ = (
        "argv", "directory", "environment", "id", "new", "offsets", "op", "size", "term",
        "timeout_ms", "user",
    )  # fmt: skip

    def __init__(self, fields: dict[str, Any]) -> None:
        """Raises:
        FrameError: a field is missing, unknown or of another shape.
        """
        if fields.keys() != {"version", *self.__slots__}:
            raise FrameError("an opening with unknown or missing fields")
        if fields["version"] != STREAM_VERSION:
            raise FrameError(f"the host does not speak version {STREAM_VERSION} of streams")
        if not _good(fields):
            raise FrameError("an opening with a bad field")
        self.op: str = fields["op"]
        self.id: str = fields["id"]
        self.new: bool = fields["new"]
        self.offsets: list[int] = fields["offsets"]
        self.argv = _argv(fields["argv"])
        self.user: str = fields["user"]
        self.directory: str | None = fields["directory"]
        self.environment: list[list[str]] = fields["environment"]
        self.timeout_ms: int | None = fields["timeout_ms"]
        self.term: str = fields["term"]
        self.size: list[int] | None = fields["size"]


def opening(
    op: str,
    id: str,
    *,
    new: bool,
    offsets: list[int],
    argv: list[bytes],
    user: str,
    directory: str | None,
    environment: list[tuple[str, str]],
    timeout_ms: int | None,
    term: str,
    size: tuple[int, int] | None,
) -> bytes:
    """The OPEN frame. Words are latin-1 text in JSON, which holds any byte.

    Raises:
        FrameError: it is too large.
    """
    fields = {
        "version": STREAM_VERSION,
        "op": op,
        "id": id,
        "new": new,
        "offsets": offsets,
        "argv": [word.decode("latin-1") for word in argv],
        "user": user,
        "directory": directory,
        "environment": environment,
        "timeout_ms": timeout_ms,
        "term": term,
        "size": size,
    }
    frame = note(Frame.OPEN, fields)
    if len(frame) > FRAME_MAX:
        raise FrameError(f"arguments and environment are over {FRAME_MAX} bytes")
    return frame


def _good(f: dict[str, Any]) -> bool:
    sources = {"terminal": 1, "command": 2, "list": 0}.get(str(f["op"]))
    return (
        isinstance(f["op"], str)
        and sources is not None
        and (f["op"] == "list" or _good_id(f["id"]))
        and type(f["new"]) is bool
        and isinstance(f["offsets"], list)
        and len(f["offsets"]) == sources
        and all(_good_count(offset) for offset in f["offsets"])
        and (f["op"] != "command" or not f["new"] or bool(f["argv"]))
        and f["user"] in ("agent", "root")
        and (f["directory"] is None or _good_text(f["directory"]))
        and isinstance(f["environment"], list)
        and all(_good_variable(variable) for variable in f["environment"])
        and (f["timeout_ms"] is None or (_good_count(f["timeout_ms"]) and f["timeout_ms"] > 0))
        and _good_text(f["term"])
        and (f["size"] is None or _good_size(f["size"]))
        and (f["op"] != "terminal" or f["size"] is not None)
    )


def _argv(value: Any) -> list[bytes]:
    if not isinstance(value, list) or not all(_good_text(word) for word in value):
        raise FrameError("an opening with bad arguments")
    try:
        return [word.encode("latin-1") for word in value]
    except UnicodeEncodeError:
        raise FrameError("an opening with bad arguments") from None


def _good_id(value: Any) -> bool:
    return (
        isinstance(value, str)
        and 1 <= len(value) <= ID_MAX
        and all(c in "0123456789abcdef" for c in value)
    )


def _good_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _good_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _good_variable(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(_good_text(part) for part in value)
        and bool(value[0])
        and "=" not in value[0]
    )


def _good_size(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(part) is int and 1 <= part <= SIZE_MAX for part in value)
    )
