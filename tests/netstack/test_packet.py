"""Packets as we build them, taken apart by scapy; and scapy's, read by us."""

from __future__ import annotations

import random
import struct

import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.packet import Raw

from agent_box.netstack import icmp, packet
from agent_box.netstack.packet import (
    ACK,
    GATEWAY,
    GUEST,
    HEAD,
    PROHIBITED,
    PSH,
    SYN,
    VNET,
    checksum,
    icmp_frame,
    offer,
    tcp_head,
    tcp_options,
    udp_frame,
    unreachable,
)

TARGET = bytes((198, 18, 1, 0))


def complete(frame: bytes) -> bytes:
    """The packet of a frame, after what the guest's kernel does to it: the checksum."""
    length, flags, _, _, _, start, offset = HEAD.unpack_from(frame)
    assert length == len(frame) - 4
    data = bytearray(frame[14:])
    if flags & 1:
        data[start + offset : start + offset + 2] = checksum(data[start:]).to_bytes(2, "big")
    return bytes(data)


def assert_as_scapy_builds_it(data: bytes) -> None:
    """Scapy computes each length and checksum anew and must come to the same bytes."""
    found = IP(data)
    for layer in (IP, TCP, UDP, ICMP):
        if layer in found:
            del found[layer].chksum
    for layer in (IP, UDP):
        if layer in found:
            del found[layer].len
    assert bytes(found) == data


@pytest.mark.parametrize("seed", range(30))
def test_tcp(seed: int) -> None:
    rng = random.Random(seed)
    payload = rng.randbytes(rng.choice([0, 1, 2, 999, 1460, 40000, 65495]))
    options = rng.choice([b"", offer(65480, 7), offer(1460, None)])
    payload = payload[: 65535 - 40 - len(options)]
    head = tcp_head(
        TARGET, GUEST, (443, 40000), rng.randrange(1 << 32), rng.randrange(1 << 32),
        rng.choice([SYN, ACK | PSH]), rng.randrange(65536), options, len(payload), gso=1460,
    )  # fmt: skip
    data = complete(head + payload)
    assert_as_scapy_builds_it(data)
    found = IP(data)
    assert (found.src, found.dst) == ("198.18.1.0", "198.18.0.2")
    assert bytes(found[TCP].payload) == payload
    assert (head[5] == 1) == (len(payload) > 1460), "split by the guest's kernel"


@pytest.mark.parametrize("size", [0, 1, 2, 3, 511, 1472, 65507])
def test_udp(size: int) -> None:
    payload = random.Random(size).randbytes(size)
    data = complete(udp_frame(GATEWAY, GUEST, (53, 5353), payload))
    assert_as_scapy_builds_it(data)
    found = IP(data)
    assert bytes(found[UDP].payload) == payload and found[UDP].sport == 53


def test_an_echo_is_answered_as_it_came() -> None:
    for size in (0, 1, 56, 1001):
        asked = bytes(ICMP(id=7, seq=9) / Raw((bytes(range(256)) * 4)[:size]))
        frame = icmp.answer(asked)
        assert frame is not None
        data = complete(frame)
        assert_as_scapy_builds_it(data)
        found = IP(data)
        assert found[ICMP].type == 0 and bytes(found[ICMP])[4:] == asked[4:]
        assert (found.src, found.dst) == ("198.18.0.1", "198.18.0.2")


def test_what_is_no_echo_is_not_answered() -> None:
    for message in (b"", b"\x08", bytes(7), bytes(8), b"\x08\x01" + bytes(6), b"\x03\x00" * 4):
        assert icmp.answer(message) is None


def test_unreachable_carries_what_it_is_about() -> None:
    about = bytes(IP(src="198.18.0.2", dst="192.0.2.1") / TCP(sport=40000, dport=80, seq=77))
    data = complete(unreachable(GATEWAY, GUEST, PROHIBITED, about))
    assert_as_scapy_builds_it(data)
    found = IP(data)
    assert (found[ICMP].type, found[ICMP].code) == (3, 13)
    inner = IP(bytes(found[ICMP].payload))
    assert inner.dst == "192.0.2.1" and bytes(inner.payload)[:8] == about[20:28]
    assert len(bytes(found[ICMP].payload)) == 28


def test_the_checksum_is_scapys() -> None:
    from scapy.utils import checksum as theirs

    rng = random.Random(4)
    for size in range(200):
        for data in (rng.randbytes(size), bytes(size), b"\xff" * size):
            assert checksum(data) == theirs(data), data


def test_options_of_a_syn() -> None:
    for mss, scale in ((1460, 7), (65480, 0), (536, None), (9, 14)):
        options = [("MSS", mss), ("NOP", None), ("SAckOK", b""), ("Timestamp", (1, 2))]
        if scale is not None:
            options += [("NOP", None), ("WScale", scale)]
        data = bytes(IP() / TCP(flags="S", options=options))
        end = 20 + (data[32] >> 4 << 2)
        assert tcp_options(data, 40, end) == (mss, scale)


def test_a_scale_beyond_what_there_is_counts_as_the_most() -> None:
    assert tcp_options(b"\x03\x03\xff", 0, 3) == (536, 14)


def test_options_that_make_no_sense_end_quietly() -> None:
    rng = random.Random(5)
    for _ in range(20_000):
        data = rng.randbytes(rng.randrange(0, 41))
        mss, scale = tcp_options(data, 0, len(data))
        assert 0 <= mss <= 65535 and (scale is None or 0 <= scale <= 14)


def test_the_frame_head_is_what_virtio_has() -> None:
    frame = icmp_frame(GATEWAY, GUEST, bytes(8))
    length, *header = struct.unpack_from("<IBBHHHH", frame)
    assert length == len(frame) - 4 and VNET == 10 and header == [0] * 6
    assert packet.FRAME_MAX == 65545
