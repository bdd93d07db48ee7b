"""No byte of what goes to the broker is in a capture, however it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scapy.layers.inet import IP, TCP, UDP, fragment

from agent_box.netstack.masking import masked

SECRET = b"nonce-of-this-instance"


def to_broker(payload: bytes, **more: object) -> bytes:
    return bytes(IP(src="198.18.0.2", dst="198.18.0.1") / TCP(sport=4, dport=80, **more) / payload)


def test_what_goes_to_the_broker_keeps_its_headers_alone() -> None:
    packet = to_broker(b"Authorization: Bearer " + SECRET, options=[("MSS", 1460)], flags="PA")
    shown = masked(packet)
    assert SECRET not in shown and len(shown) == len(packet)
    read, was = IP(shown), IP(packet)
    assert (read[TCP].flags, read[TCP].seq, read.len) == (was[TCP].flags, was[TCP].seq, was.len)
    assert bytes(read[TCP].payload) == bytes(len(bytes(was[TCP].payload)))


def test_fragments_show_nothing() -> None:
    whole = IP(src="198.18.0.2", dst="198.18.0.1") / TCP(dport=80) / (SECRET * 20)
    for piece in fragment(whole, fragsize=64):
        assert SECRET[:6] not in masked(bytes(piece))


@pytest.mark.parametrize(
    "packet",
    [
        bytes(IP(dst="198.18.0.9") / TCP(dport=80) / SECRET),
        bytes(IP(dst="198.18.0.1") / UDP(dport=53) / SECRET),
        bytes(IP(dst="198.18.0.1") / TCP(dport=53) / SECRET),
        bytes(IP(src="198.18.0.1", dst="198.18.0.2") / TCP(sport=80) / SECRET),
        b"",
        b"\x60" + bytes(50),
    ],
)
def test_everything_else_is_as_it_was(packet: bytes) -> None:
    assert masked(packet) == packet


@given(st.binary(max_size=100), st.integers(0, 120))
def test_any_bytes_keep_their_length(data: bytes, cut: int) -> None:
    assert len(masked(data)) == len(data)
    packet = to_broker(SECRET)[:cut]
    assert len(masked(packet)) == len(packet) and SECRET not in masked(packet)
