"""Synthetic addresses: one for each name, never twice."""

from __future__ import annotations

from agent_box.netstack.names import Names, synthetic
from agent_box.netstack.packet import GATEWAY, GUEST


def test_each_name_has_one_address_and_each_address_one_name() -> None:
    names = Names()
    seen = {names.address(f"{i}.test") for i in range(2000)}
    assert len(seen) == 2000 == len(names)
    assert names.address("7.test") == names.address("7.test")
    for address in seen:
        assert address is not None and synthetic(address)
        assert address not in (GATEWAY, GUEST)
        assert names.address(names.name(address) or "") == address
    assert names.name(GATEWAY) is None


def test_there_is_an_end_to_them() -> None:
    names = Names(most=3)
    assert all(names.address(f"{i}.test") for i in range(3))
    assert names.address("4.test") is None
    assert names.address("0.test") is not None


def test_the_most_that_there_may_be_lies_within_the_range() -> None:
    names = Names()
    last = None
    for i in range(65536):
        last = names.address(str(i))
    assert last is not None and synthetic(last) and names.address("more") is None
