from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
import pytest

from agent_box.bus.schema import (
    BASE_METHODS,
    Contract,
    Data,
    Empty,
    Kind,
    Method,
    Stream,
    Wall,
    Wire,
)


class Colour(StrEnum):
    RED = "red"


class Inner(Wire, frozen=True):
    n: int


class Good(Wire, frozen=True):
    a: str | None
    b: list[Inner]
    c: dict[str, Inner]
    d: tuple[int, ...]
    e: Colour
    f: Literal["x", "y"]
    g: Annotated[int, msgspec.Meta(ge=0)]
    h: float
    i: bool
    j: bytes


class Defaulted(Wire, frozen=True):
    a: int = 0


class Deep(Wire, frozen=True):
    a: dict[str, list[Defaulted | None]]


class Loose(msgspec.Struct):
    a: int


class Unknowing(Wire, frozen=True, forbid_unknown_fields=False):
    a: int


class Listed(Wire, frozen=True, array_like=True):
    a: int


class Anything(Wire, frozen=True):
    a: Any


class Bare(Wire, frozen=True):
    a: list


class Keyed(Wire, frozen=True):
    a: dict[int, str]


class Objects(Wire, frozen=True):
    a: set[int]


class Endless(Wire, frozen=True):
    a: list[Endless]


def contract(*wires: type[Wire], names: tuple[str, ...] = ("one",)) -> Contract:
    wire = wires[0] if wires else Empty
    return Contract(
        service="engine",
        trusts="Nobody.",
        methods=tuple(
            Method(
                name=name,
                kind=Kind.READ,
                request=wire,
                reply=Empty,
                deadline_s=1,
                data=Data.STATUS,
                summary="",
            )
            for name in names
        ),
        events=(),
        wall=Wall(why=""),
    )


def test_what_comes_out_as_it_went_in_may_be_declared() -> None:
    contract(Good)
    contract(Endless)


@pytest.mark.parametrize(
    ("wire", "named"),
    [
        (Defaulted, r"Defaulted\.a has a default"),
        (Deep, r"Deep\.a\.a has a default"),
        (Loose, "Loose is not a Wire type"),
        (Unknowing, "gives up"),
        (Listed, "gives up"),
        (Anything, r"Anything\.a has a type that cannot be sent"),
        (Bare, r"Bare\.a has a type"),
        (Keyed, r"Keyed\.a has a type"),
        (Objects, r"Objects\.a has a type"),
    ],
)
def test_what_could_lose_a_field_may_not_be_declared(wire: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        contract(wire)


def test_all_types_of_a_stream_are_looked_at() -> None:
    for bad in ("request", "up", "down", "reply"):
        types: dict[str, Any] = dict.fromkeys(("request", "up", "down", "reply"), Empty)
        stream = Stream(
            name="s", window=4, data=Data.STATUS, summary="", **{**types, bad: Defaulted}
        )
        with pytest.raises(ValueError, match="default"):
            Contract(service="engine", trusts="", methods=(stream,), events=(), wall=Wall(why=""))


def test_a_name_stands_for_one_method() -> None:
    with pytest.raises(ValueError, match="declared twice: one"):
        contract(names=("one", "two", "one"))
    for base in BASE_METHODS:
        with pytest.raises(ValueError, match=f"declared twice: {base}"):
            contract(names=(base,))


def test_the_base_methods_are_the_declared_ones() -> None:
    from agent_box.bus import base

    assert tuple(m.name for m in base.METHODS) == BASE_METHODS
    Contract(
        service="none",
        trusts="",
        methods=tuple(msgspec_free(m) for m in base.METHODS),
        events=(),
        wall=Wall(why=""),
    )


def msgspec_free(method: Method) -> Method:
    """The same method under a name that a contract may declare."""
    from dataclasses import replace

    return replace(method, name=f"x_{method.name}")
