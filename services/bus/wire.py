"""The envelope: three frames, `AB1`, a header and a body, and every way to refuse them.

No socket here. What arrives is `untrusted_...` until one of the decoders returned. The order
of the refusals is the order of their cost: bytes are counted before they are parsed (the
transport cuts what is larger than `FRAME_MAX` and never hands it over), parsed under caps
before they are looked at, looked at before they are given a type.

A header says which of a few things the message is (`op`), to which call it belongs (`id`,
chosen by the caller, unique on a connection) and which process it was meant for or came from
(`epoch`, random at every start). A request that was meant for an earlier process is answered
`Stale` and not begun, so a caller can always tell "not begun" from "begun and lost".
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum
from math import isfinite
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import msgpack
import msgspec

from agent_box.bus.errors import MESSAGE_MAX, Reason, Refusal
from agent_box.bus.schema import Wire

MAGIC: Final = b"AB1"
EPOCH_BYTES: Final = 16
REQUEST_ID_BYTES: Final = 16
HEADER_MAX: Final = 512  # bytes
BODY_MAX: Final = 1 << 20  # bytes; what is larger is read in pieces with a cursor
FRAME_MAX: Final = BODY_MAX + 128  # what CURVE adds to a frame, rounded up
DEPTH_MAX: Final = 16  # maps and lists inside each other
STR_MAX: Final = 256 * 1024  # bytes of one string
ITEMS_MAX: Final = 65_536  # of one list
FIELDS_MAX: Final = 4_096  # of one map
ID_MAX: Final = (1 << 53) - 1
NS: Final = 1_000_000_000
OPEN_S: Final = 30.0  # the longest that a stream may wait for being accepted


class WireError(ValueError):
    """Bytes that are not a message of this protocol.

    Its text names the place and the rule that was broken, never a value.
    """


def now_ns() -> int:
    """CLOCK_BOOTTIME in nanoseconds: one clock for all processes of a host, suspend included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


Id: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=ID_MAX)]
Epoch: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=EPOCH_BYTES, max_length=EPOCH_BYTES)]
RequestId: TypeAlias = Annotated[
    bytes, msgspec.Meta(min_length=REQUEST_ID_BYTES, max_length=REQUEST_ID_BYTES)
]
MethodName: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Time: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="op"):
    version: Literal[1]
    id: Id


# From the caller.


class Greet(Header, frozen=True, tag="greet"):
    """Asks for the epoch, first of all on a connection. Any authenticated role may."""


class Call(Header, frozen=True, tag="call"):
    epoch: Epoch
    method: MethodName
    deadline: Time  # CLOCK_BOOTTIME, nanoseconds
    request_id: RequestId | None  # with `Kind.ONCE`, and only then


class Open(Header, frozen=True, tag="open"):
    """Opens a stream; the items that the callee may send at once are `credit`."""

    epoch: Epoch
    method: MethodName
    deadline: Time
    credit: Count


class Cancel(Header, frozen=True, tag="cancel"):
    """The caller is no longer interested in this call or stream."""


# From the callee.


class Welcome(Header, frozen=True, tag="welcome"):
    epoch: Epoch


class Reply(Header, frozen=True, tag="reply"):
    """The end of a call or a stream; the body is the method's reply type."""

    epoch: Epoch


class Failure(Header, frozen=True, tag="failure"):
    """The end of a call or a stream; the body is a `Problem`."""

    epoch: Epoch


class Stale(Header, frozen=True, tag="stale"):
    """Not begun: the request was meant for an earlier process."""

    epoch: Epoch


class Away(Header, frozen=True, tag="away"):
    """Not begun: this process finishes and takes no more. The next one will."""

    epoch: Epoch


class Probe(Header, frozen=True, tag="probe"):
    """Means nothing; whether it can be sent tells the callee if the caller is still there."""


# Both ways, within a stream.


class Item(Header, frozen=True, tag="item"):
    """One item; the body is the stream's `up` or `down` type."""


class Credit(Header, frozen=True, tag="credit"):
    """The receiver of a direction has room for `n` more."""

    n: Count


class End(Header, frozen=True, tag="end"):
    """The caller sends no more items on this stream."""


FromCaller: TypeAlias = Greet | Call | Open | Cancel | Item | Credit | End
FromCallee: TypeAlias = Welcome | Reply | Failure | Stale | Away | Probe | Item | Credit

# msgspec converts to one type several times as fast as to one of a union.


class _Kinds:
    """The headers of one direction. msgspec converts to one type several times as fast as to
    one of a union, so the slow way picks the type first."""

    def __init__(self, union: Any) -> None:
        self.decoder = msgspec.msgpack.Decoder(union)
        self.by_op: dict[str, Any] = {t.__struct_config__.tag: t for t in get_args(union)}


_FROM_CALLER: Final = _Kinds(FromCaller)
_FROM_CALLEE: Final = _Kinds(FromCallee)
_CANONICAL_MAX: Final = FIELDS_MAX  # bytes: too few for more items than any cap allows


class Problem(Wire, frozen=True):
    """A `Refusal` on its way."""

    reason: Reason
    message: Annotated[str, msgspec.Meta(max_length=MESSAGE_MAX)]
    facts: Annotated[dict[str, str], msgspec.Meta(max_length=32)]
    id: Annotated[str, msgspec.Meta(max_length=64)] | None


H = TypeVar("H")
W = TypeVar("W", bound=Wire)

_encode = msgspec.msgpack.Encoder().encode


def encode_header(header: Header) -> bytes:
    """The bytes of a header. Raises WireError when a field is out of its range."""
    try:
        encoded = _encode(header)
    except (ValueError, OverflowError) as error:
        raise WireError("the header cannot be encoded") from error
    if len(encoded) > HEADER_MAX:
        raise WireError("the header is too large")
    return encoded


def encode_body(value: Wire) -> bytes:
    """The bytes of a body.

    Raises:
        WireError: larger than `BODY_MAX`, or text that is not Unicode.
    """
    try:
        encoded = _encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{type(value).__name__} cannot be encoded") from error
    if len(encoded) > BODY_MAX:
        raise WireError(f"{type(value).__name__} is larger than {BODY_MAX} bytes")
    return encoded


def decode_from_caller(untrusted_frames: Sequence[bytes]) -> tuple[FromCaller, bytes]:
    """The header of a request and its body, still packed and untrusted.

    Raises:
        WireError: anything else than a request of this protocol.
    """
    return _decode(untrusted_frames, _FROM_CALLER)


def decode_from_callee(untrusted_frames: Sequence[bytes]) -> tuple[FromCallee, bytes]:
    """The header of a reply and its body, still packed and untrusted.

    Raises:
        WireError: anything else than a reply of this protocol.
    """
    return _decode(untrusted_frames, _FROM_CALLEE)


def decode_body(untrusted_body: bytes, into: type[W]) -> W:
    """A body as its declared type.

    Raises:
        WireError: malformed, too large, too deep, a duplicate, unknown or missing field, a
            value of another type, NaN or an infinity.
    """
    size = len(untrusted_body)
    if size > BODY_MAX:
        raise WireError(f"the body is larger than {BODY_MAX} bytes")
    if size <= _CANONICAL_MAX:
        try:
            decoder = _decoders[into]
        except KeyError:
            flat = _is_flat(into, ())
            decoder = _decoders[into] = msgspec.msgpack.Decoder(into) if flat else None
        if decoder is not None:
            value: W | None = _canonical(untrusted_body, decoder)
            if value is not None:
                return value
    tree = _unpack(untrusted_body, size)
    if type(tree) is not dict:
        raise WireError("the body is not a map")
    if tree:
        _look(tree, 1)
    return _convert(tree, into)


def to_refusal(untrusted_body: bytes) -> Refusal:
    """What a `Failure` says. Raises WireError."""
    problem = decode_body(untrusted_body, Problem)
    return Refusal(problem.reason, problem.message, facts=problem.facts, id=problem.id)


def encode_refusal(refusal: Refusal) -> bytes:
    """The body of a `Failure`. Facts that do not fit are left out rather than the answer."""
    problem = Problem(
        reason=refusal.reason,
        message=refusal.message,
        facts=dict(list(refusal.facts.items())[:32]),
        id=refusal.id,
    )
    try:
        return encode_body(problem)
    except WireError:
        message = refusal.message.encode("utf-8", "replace").decode()
        return _encode(
            Problem(reason=refusal.reason, message=message[:MESSAGE_MAX], facts={}, id=refusal.id)
        )


def _decode(untrusted_frames: Sequence[bytes], kinds: _Kinds) -> tuple[Any, bytes]:
    if len(untrusted_frames) != 3:
        raise WireError("a message has three frames")
    magic, untrusted_header, untrusted_body = untrusted_frames
    if magic != MAGIC:
        raise WireError("another protocol or version")
    size = len(untrusted_header)
    if size > HEADER_MAX:
        raise WireError("the header is too large")
    header = _canonical(untrusted_header, kinds.decoder)
    if header is not None:
        return header, untrusted_body
    tree = _unpack(untrusted_header, size)
    op = tree.get("op") if type(tree) is dict else None
    into = kinds.by_op.get(op) if type(op) is str else None
    if into is None:
        raise WireError("an unknown kind of message")
    # Every field of a header is a scalar, so its type alone refuses depth and NaN.
    return _convert(tree, into), untrusted_body


def _canonical(untrusted: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    """The value, if the bytes are exactly those that our own encoder makes of it.

    Then they cannot hold anything that the long way would refuse: the encoder writes each
    declared field once, no other, and no extension type. What could still pass, a NaN or a
    nesting without end, takes the long way by its type (`_is_flat`), and what could be more
    than the caps allow by its size. This is the way of nearly all messages, at a fifth of the
    cost. None: the long way decides.
    """
    try:
        value = decoder.decode(untrusted)
    except (ValueError, msgspec.MsgspecError):
        return None
    return value if _encode(value) == untrusted else None


_decoders: Final[dict[Any, msgspec.msgpack.Decoder[Any] | None]] = {}


def _is_flat(kind: Any, outer: tuple[Any, ...]) -> bool:
    """Whether a type can hold neither a float nor itself, nor anything that we do not know."""
    if kind in (bool, int, str, bytes, NoneType):
        return True
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        return kind not in outer and all(_is_flat(f.type, (*outer, kind)) for f in fields)
    origin = get_origin(kind)
    if origin is Annotated:
        return _is_flat(get_args(kind)[0], outer)
    if origin in (Union, UnionType, list, dict, tuple):
        return all(_is_flat(inner, outer) for inner in get_args(kind) if inner is not Ellipsis)
    return origin is Literal or (isinstance(kind, type) and issubclass(kind, StrEnum))


def _unpack(untrusted: bytes, size: int) -> Any:
    try:
        return msgpack.unpackb(
            untrusted,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_no_duplicates,
            ext_hook=_no_ext,
            max_ext_len=0,
            max_str_len=min(size, STR_MAX),
            max_bin_len=size,
            max_array_len=min(size, ITEMS_MAX),
            max_map_len=min(size, FIELDS_MAX),
        )
    except WireError:
        raise
    except (ValueError, RecursionError) as error:
        raise WireError(f"not msgpack within the caps ({type(error).__name__})") from None


def _no_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise WireError("a key stands twice in a map")
    return made


def _no_ext(_code: int, _data: bytes) -> Any:
    raise WireError("an extension type")


def _look(value: Any, depth: int) -> None:
    if depth > DEPTH_MAX:
        raise WireError(f"nested deeper than {DEPTH_MAX}")
    for inner in value.values() if type(value) is dict else value:
        kind = type(inner)
        if kind is dict or kind is list:
            if inner:
                _look(inner, depth + 1)
        elif kind is float and not isfinite(inner):
            raise WireError("a number that is not finite")


def _convert(tree: Any, into: type[H]) -> H:
    try:
        return msgspec.convert(tree, into, strict=True, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise WireError(_without_value(str(error))) from None


def _without_value(text: str) -> str:
    """msgspec quotes a value that is not in an enumeration. A value may be a secret."""
    what, at, where = text.partition(" - at ")
    if what.startswith("Invalid "):
        what = "Invalid value"
    return f"{what}{at}{where}"[:MESSAGE_MAX]
