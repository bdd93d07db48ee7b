"""The filter of `capture`: what it shows, and what is no filter."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.cli.packets import BadFilter, facts, parse


def packet(
    source: str = "198.18.0.2",
    destination: str = "198.18.0.9",
    protocol: int = 6,
    ports: tuple[int, int] | None = (40000, 443),
) -> bytes:
    from ipaddress import IPv4Address

    body = b"" if ports is None else struct.pack(">HH", *ports) + bytes(16)
    head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(body), 0, 0, 64, protocol, 0)
    return head + IPv4Address(source).packed + IPv4Address(destination).packed + body


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("tcp", True),
        ("udp", False),
        ("not udp", True),
        ("! tcp", False),
        ("port 443", True),
        ("src port 443", False),
        ("dst port 443 and tcp", True),
        ("host 198.18.0.9", True),
        ("src host 198.18.0.9", False),
        ("net 198.18.0.0/15 and not host 198.18.0.9", False),
        ("dst net 198.18.0.8/29", True),
        ("udp or tcp and port 80", False),
        ("(udp or tcp) and port 443", True),
        ("udp||tcp&&port 443", True),
        ("not (tcp and port 443)", False),
        ("not not tcp", True),
    ],
)
def test_what_is_shown(expression: str, shown: bool) -> None:
    seen = facts(packet())
    assert seen is not None
    assert parse(expression)(seen) is shown


@pytest.mark.parametrize(
    "expression",
    [
        "", " ", "tcp tcp", "port", "port x", "port 0", "port 65536", "host example.com",
        "host 1.2.3", "net 10.0.0.1/8", "net 10.0.0.0/33", "and", "tcp and", "or tcp", "(tcp",
        "tcp)", "not", "src", "src tcp", "ether", "tcp[13] & 2", "&", "|", "tcp & udp",
        "(" * 60 + "tcp" + ")" * 60, "not " * 60 + "tcp", "tcp or " * 200 + "tcp",
    ],
)  # fmt: skip
def test_what_is_no_filter(expression: str) -> None:
    with pytest.raises(BadFilter):
        parse(expression)


def test_icmp_and_fragments_have_no_ports() -> None:
    for data in (packet(protocol=1), packet()[:6] + b"\x00\x10" + packet()[8:], packet(ports=None)):
        seen = facts(data)
        assert seen is not None and seen.source_port is None
        assert not parse("port 443")(seen)
    assert facts(b"\x60" + bytes(60)) is None and facts(b"") is None


@given(st.binary(max_size=80))
def test_any_bytes_have_facts_or_none(data: bytes) -> None:
    seen = facts(data)
    assert seen is None or parse("tcp or not tcp")(seen)


@given(st.text(max_size=60))
def test_any_text_is_a_filter_or_none(text: str) -> None:
    try:
        made = parse(text)
    except BadFilter:
        return
    seen = facts(packet())
    assert seen is not None and made(seen) in (True, False)
