"""What netlink says of this host is what /proc says, and what cannot be read is no crash."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.netstack import routes
from agent_box.netstack.own import own


def test_it_says_what_proc_says() -> None:
    assert routes.delivered() == own()


def test_without_proc_netlink_is_asked(tmp_path: Path) -> None:
    assert own(tmp_path) == own() != frozenset()


def test_an_error_is_raised() -> None:
    answer = struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -1)
    with pytest.raises(PermissionError):
        routes.read_routes(answer)


@given(st.binary(max_size=200))
def test_anything_can_be_read(data: bytes) -> None:
    try:
        read = routes.read_routes(data)
    except (OSError, struct.error, ValueError):
        return
    assert read is None or isinstance(read, set)
