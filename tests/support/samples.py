"""A value of a wire type, for calls whose content does not matter."""

from __future__ import annotations

import enum
import types
import typing
from typing import Any

import msgspec


def sample(kind: Any) -> Any:
    """Some value of a type that a contract may use."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{f.name: sample(f.type) for f in msgspec.structs.fields(kind)})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _within(inside[0], inside[1:])
    if origin is typing.Literal:
        return inside[0]
    if origin in (typing.Union, types.UnionType):
        return None if type(None) in inside else sample(inside[0])
    if origin is tuple:
        return tuple(sample(i) for i in inside if i is not Ellipsis)
    made: Any = (origin or kind)()
    return made


def _within(kind: Any, notes: tuple[Any, ...]) -> Any:
    value = sample(kind)
    for note in notes:
        if isinstance(note, msgspec.Meta):
            least = note.min_length or 0
            if isinstance(value, str | bytes) and len(value) < least:
                value = (b"a" if isinstance(value, bytes) else "a") * least
            if isinstance(value, int) and note.ge is not None:
                value = max(value, int(note.ge))
    return value
