"""Packets of the link to a guest: IPv4, TCP, UDP and ICMP, built and read.

A frame is a u32 length (little-endian), a `virtio_net_hdr` of 10 bytes (little-endian: the
legacy form, which a Linux TUN takes) and an IP packet. What we send asks the guest's kernel to
complete checksums and to see a large segment as many small ones; what the guest says in its own
header is not read, since the IP packet has all that matters and lies no less.

Sources: RFC 791 (IPv4), RFC 9293 (TCP), RFC 768 (UDP), RFC 792 (ICMP), RFC 1071 (checksums),
linux/virtio_net.h.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

VNET: Final = 10  # bytes of virtio_net_hdr
LENGTH: Final = 4  # bytes of the length before it
IP_MAX: Final = 65535
FRAME_MAX: Final = VNET + IP_MAX
MTU: Final = 65520
IP_HEADER: Final = 20  # we send no options, and drop what has some
TCP_HEADER: Final = 20

GATEWAY: Final = socket.inet_aton("198.18.0.1")
GUEST: Final = socket.inet_aton("198.18.0.2")

ICMP: Final = 1
TCP: Final = 6
UDP: Final = 17

FIN: Final = 1
SYN: Final = 2
RST: Final = 4
PSH: Final = 8
ACK: Final = 16

# Codes of "destination unreachable" (RFC 792, RFC 1812 §5.2.7.1).
NET_UNREACHABLE: Final = 0
HOST_UNREACHABLE: Final = 1
PORT_UNREACHABLE: Final = 3
PROHIBITED: Final = 13

_NEEDS_CSUM: Final = 1
_GSO_TCPV4: Final = 1

LENGTH_READ: Final = struct.Struct("<I")
HEAD: Final = struct.Struct("<IBBHHHH")  # length, flags, gso type, hdr len, gso size, start, offset
IP_TCP: Final = struct.Struct(">BBHHHBBH4s4sHHIIBBHHH")
_IP: Final = struct.Struct(">BBHHHBBH4s4s")
_UDP: Final = struct.Struct(">HHHH")
WORDS4: Final = struct.Struct(">4H")
# Of an IPv4 and TCP header: version and length, total, fragment, protocol, addresses with ports,
# seq, ack, data offset, flags, window.
IP_TCP_READ: Final = struct.Struct(">BxHxxHxB2x12sIIBBH")
# Such headers of ours: version and length, total, fragment, time to live and protocol, checksum,
# addresses with ports, seq, ack, data offset and flags, window, checksum.
IP_TCP_SEND: Final = struct.Struct(">HH2xHHH12sIIHHHxx")
_MSS: Final = struct.Struct(">BBH")


def fold(total: int) -> int:
    """A sum of 16-bit words as one word in ones' complement arithmetic."""
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def checksum(data: bytes | bytearray | memoryview, start: int = 0) -> int:
    """The Internet checksum of the bytes, with `start` already summed (RFC 1071)."""
    words = int.from_bytes(data, "big")
    if len(data) & 1:
        words <<= 8
    # 2**16 is 1 modulo 65535, so the remainder is the folded sum, with 0 for 0xFFFF.
    total = (words + start) % 0xFFFF
    return ~(total or (0xFFFF if words or start else 0)) & 0xFFFF


def tcp_head(
    source: bytes,
    target: bytes,
    ports: tuple[int, int],
    seq: int,
    ack: int,
    flags: int,
    window: int,
    options: bytes = b"",
    length: int = 0,
    gso: int = 0,
) -> bytes:
    """A frame up to where the payload begins, for one of `length` bytes.

    Args:
        ports: source and target.
        options: of TCP, padded to words.
        gso: payload bytes of each segment that the guest's kernel shall see; 0: all in one.
    """
    header = TCP_HEADER + len(options)
    total = IP_HEADER + header + length
    addresses = sum(WORDS4.unpack(source + target))
    ip_sum = ~fold(addresses + 0x4500 + total + 0x4000 + 0x4000 + TCP) & 0xFFFF
    pseudo = fold(addresses + TCP + header + length)
    kind = _GSO_TCPV4 if gso and length > gso else 0
    return (
        HEAD.pack(VNET + total, _NEEDS_CSUM, kind, IP_HEADER + header, gso if kind else 0, 20, 16)
        + IP_TCP.pack(
            0x45, 0, total, 0, 0x4000, 64, TCP, ip_sum, source, target, ports[0], ports[1],
            seq, ack, header << 2, flags, window, pseudo, 0,
        )
        + options
    )  # fmt: skip


def ip_head(source: bytes, target: bytes, protocol: int, length: int) -> bytes:
    """An IPv4 header for `length` bytes of payload, its checksum included."""
    total = IP_HEADER + length
    bare = _IP.pack(0x45, 0, total, 0, 0x4000, 64, protocol, 0, source, target)
    return _IP.pack(0x45, 0, total, 0, 0x4000, 64, protocol, checksum(bare), source, target)


def udp_frame(source: bytes, target: bytes, ports: tuple[int, int], payload: bytes) -> bytes:
    """A whole frame with one datagram; the payload has at most 65,507 bytes."""
    length = 8 + len(payload)
    pseudo = fold(sum(WORDS4.unpack(source + target)) + UDP + length)
    return (
        HEAD.pack(VNET + IP_HEADER + length, _NEEDS_CSUM, 0, IP_HEADER + 8, 0, IP_HEADER, 6)
        + ip_head(source, target, UDP, length)
        + _UDP.pack(ports[0], ports[1], length, pseudo)
        + payload
    )


def icmp_frame(source: bytes, target: bytes, message: bytes) -> bytes:
    """A whole frame with an ICMP message, whose checksum field is 0 and gets filled."""
    done = message[:2] + checksum(message).to_bytes(2, "big") + message[4:]
    return (
        HEAD.pack(VNET + IP_HEADER + len(done), 0, 0, 0, 0, 0, 0)
        + ip_head(source, target, ICMP, len(done))
        + done
    )


def unreachable(source: bytes, target: bytes, code: int, untrusted_packet: bytes) -> bytes:
    """A frame that says why the packet went nowhere: its header and 8 bytes come along."""
    message = bytes((3, code, 0, 0, 0, 0, 0, 0)) + untrusted_packet[: IP_HEADER + 8]
    return icmp_frame(source, target, message)


def tcp_options(view: memoryview | bytes, start: int, end: int) -> tuple[int, int | None]:
    """MSS and window scale out of the untrusted options at view[start:end] (RFC 9293 §3.1).

    Returns:
        The MSS, 536 when none is named (RFC 9293 §3.7.1), and the shift, at most 14
        (RFC 7323 §2.3), or None. Reading ends quietly at what makes no sense.
    """
    mss, scale = 536, None
    at = start
    while at < end:
        kind = view[at]
        if kind == 0:
            break
        if kind == 1:
            at += 1
            continue
        if at + 1 >= end:
            break
        length = view[at + 1]
        if length < 2 or at + length > end:
            break
        if kind == 2 and length == 4:
            mss = view[at + 2] << 8 | view[at + 3]
        elif kind == 3 and length == 3:
            scale = min(view[at + 2], 14)
        at += length
    return mss, scale


def offer(mss: int, scale: int | None) -> bytes:
    """Our own options of a SYN."""
    return _MSS.pack(2, 4, mss) + (b"" if scale is None else bytes((1, 3, 3, scale)))
