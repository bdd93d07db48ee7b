"""Reserved ranges in every form in which an address can be written into a packet."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.config.addresses import (
    RESERVED,
    embedded,
    parse_address,
    plain,
    plain_network,
    reserved,
    reserved_network,
)

V4_RANGES = [(name, net) for name, net in RESERVED if isinstance(net, IPv4Network)]
ORDINARY = [
    "1.1.1.1",
    "8.8.8.8",
    "100.63.255.255",
    "100.128.0.0",
    "172.15.255.255",
    "172.32.0.0",
    "198.17.255.255",
    "198.20.0.0",
    "2606:4700::1111",
    "2001:4860:4860::8888",
    "2a00::1",
]


def encodings(address: IPv4Address) -> dict[str, IPv6Address]:
    """The IPv6 addresses that carry this one, by the scheme that makes them."""
    value = int(address)
    return {
        "mapped": IPv6Address((0xFFFF << 32) | value),
        "translated": IPv6Address((0xFFFF << 48) | value),
        "nat64": IPv6Address((0x0064FF9B << 96) | value),
        "6to4": IPv6Address((0x2002 << 112) | (value << 80) | 1),
        "teredo-client": IPv6Address(
            (0x20010000 << 96) | (0x01010101 << 64) | (value ^ 0xFFFFFFFF)
        ),
        "teredo-server": IPv6Address((0x20010000 << 96) | (value << 64) | 0xFEFEFEFE),
        "isatap": IPv6Address((0x2A00 << 112) | (0x5EFE << 32) | value),
    }


@given(st.data())
def test_a_reserved_address_is_reserved_in_every_encoding(data: st.DataObject) -> None:
    name, network = data.draw(st.sampled_from(V4_RANGES))
    first, last = int(network.network_address), int(network.broadcast_address)
    address = IPv4Address(data.draw(st.integers(first, last)))
    assert reserved(address) is not None
    for scheme, form in encodings(address).items():
        assert reserved(form) is not None, scheme
        assert reserved(parse_address(str(form))) is not None, scheme
    assert name in {n for n, net in V4_RANGES if address in net}


@pytest.mark.parametrize("text", ORDINARY)
def test_an_ordinary_address_is_not(text: str) -> None:
    address = ip_address(text)
    assert reserved(address) is None
    if isinstance(address, IPv4Address):
        for scheme in ("mapped", "translated", "nat64", "6to4", "isatap"):
            assert reserved(encodings(address)[scheme]) is None, scheme


@given(st.ip_addresses(v=4))
def test_what_hides_in_an_address_is_found(address: IPv4Address) -> None:
    for scheme, form in encodings(address).items():
        assert address in embedded(form), scheme
    assert embedded(address) == ()
    assert plain(encodings(address)["mapped"]) == address


@given(st.ip_addresses(v=4))
def test_the_table_agrees_with_the_standard_library(address: IPv4Address) -> None:
    """What Python calls not global is reserved here; we know a few ranges more."""
    if not address.is_global or address.is_multicast:
        exceptions = [ip_network("192.0.0.9/32"), ip_network("192.0.0.10/32")]
        assert reserved(address) or any(address in net for net in exceptions)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("169.254.169.254", "link-local"),
        ("fd00:ec2::254", "unique-local"),
        ("168.63.129.16", "metadata"),
        ("100.100.100.200", "cgnat"),
        ("::ffff:169.254.169.254", "link-local"),
        ("64:ff9b::a9fe:a9fe", "link-local"),
        ("2002:a9fe:a9fe::1", "link-local"),
        ("::127.0.0.1", "loopback"),
        ("0.0.0.1", "this-host"),
        ("::", "this-host"),
        ("::1", "loopback"),
        ("255.255.255.255", "reserved"),
        ("198.18.0.1", "benchmark"),
        ("fe80::1", "link-local"),
        ("ff02::1", "multicast"),
        ("64:ff9b:1::808:808", "nat64-local"),
    ],
)
def test_the_well_known_ones_by_name(text: str, name: str) -> None:
    assert reserved(parse_address(text)) == name


@pytest.mark.parametrize(
    "text",
    ["127.1", "0177.0.0.1", "0x7f.0.0.1", "2130706433", "1.2.3", "1.2.3.4.5", "fe80::1%eth0",
     "01.2.3.4", " 1.2.3.4", "1.2.3.4/32", "", "::ffff:1.2.3.4.5", "1.2.3.04"],
)  # fmt: skip
def test_no_other_spelling_is_read(text: str) -> None:
    with pytest.raises(ValueError):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("10.0.0.0/8", "private"),
        ("10.1.2.3/32", "private"),
        ("8.0.0.0/6", None),  # holds 10/8, and much else
        ("0.0.0.0/0", None),
        ("::/0", None),
        ("::ffff:10.0.0.0/104", "private"),
        ("64:ff9b::a00:0/104", "private"),
        ("64:ff9b::/96", None),
        ("2002:a00::/24", "private"),
        ("2002:a00:1::/48", "private"),
        ("2002::/16", None),
        ("fc00::/8", "unique-local"),
        ("2606:4700::/32", None),
    ],
)
def test_a_network_is_reserved_when_all_of_it_is(text: str, name: str | None) -> None:
    assert reserved_network(ip_network(text)) == name


@given(st.ip_addresses(v=4), st.integers(0, 32))
def test_a_mapped_network_is_the_plain_one(address: IPv4Address, bits: int) -> None:
    inner = ip_network((address, bits), strict=False)
    mapped = ip_network(f"::ffff:{inner.network_address}/{96 + bits}")
    assert plain_network(mapped) == inner
