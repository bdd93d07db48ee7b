"""What root in a machine may try in order to get past its network; runs in the guest.

`python3 - FACTS < THIS FILE`, with a JSON object of facts. Prints a JSON object: each attempt,
and how it was refused: the name of an errno, of a DNS answer, or `silence`. What got through
is `THROUGH`. Stdlib only; no attempt waits for longer than a bound that an answer ends.
"""

from __future__ import annotations

import errno
import json
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

GATEWAY, GUEST = "198.18.0.1", "198.18.0.2"
WAIT_S = 20.0
TXT, A = 16, 1


def refused(work: Callable[[], object]) -> str:
    try:
        work()
    except TimeoutError:
        return "silence"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return "THROUGH"


def tcp(where: str, port: int) -> str:
    """As most programs do: the resolver's functions read what stands for an address."""
    return refused(lambda: socket.create_connection((where, port), WAIT_S).close())


def udp(where: str, port: int, data: bytes = b"?") -> str:
    def work() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(WAIT_S)
            sock.connect((where, port))
            sock.send(data)
            sock.recv(4096)

    return refused(work)


def ask(name: str, kind: int) -> str:
    """A question to the resolver that carries whatever it likes."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    query = struct.pack(">6H", 7, 0x100, 1, 0, 0, 0) + labels + struct.pack(">BHH", 0, kind, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(WAIT_S)
        sock.sendto(query, (GATEWAY, 53))
        answer = sock.recv(4096)
    return f"rcode {answer[3] & 15}" if answer[3] & 15 else "THROUGH"


def _sum(data: bytes) -> int:
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def packet(source: str, target: str, port: int, protocol: int = socket.IPPROTO_TCP) -> bytes:
    """A SYN, or the same bytes as another protocol."""
    ends = socket.inet_aton(source) + socket.inet_aton(target)
    syn = bytearray(struct.pack(">HHIIBBHHH", 4444, port, 1, 0, 0x50, 2, 9000, 0, 0))
    pseudo = ends + struct.pack(">BBH", 0, protocol, len(syn))
    syn[16:18] = _sum(pseudo + syn).to_bytes(2, "big")
    return struct.pack(">BBHHHBBH", 0x45, 0, 40, 0, 0, 64, protocol, 0) + ends + bytes(syn)


def forged(source: str, target: str, port: int, protocol: int = socket.IPPROTO_TCP) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        sock.sendto(packet(source, target, port, protocol), (target, 0))


def six(target: str, port: int) -> None:
    """Puts an IPv6 packet onto the link by hand: the kernel has no way for it."""
    ends = socket.inet_pton(socket.AF_INET6, "fd00::2") + socket.inet_pton(socket.AF_INET6, target)
    datagram = struct.pack(">HHHH", 4444, port, 9, 0) + b"?"
    head = struct.pack(">IHBB", 6 << 28, len(datagram), socket.IPPROTO_UDP, 64)
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0) as sock:
        sock.sendto(head + ends + datagram, ("tun0", 0x86DD))


def main(facts: dict[str, Any]) -> dict[str, str]:
    port = facts["port"]
    found = {}
    for where in facts["addresses"]:
        found[f"tcp {where}"] = tcp(where, port)
    for where in facts["numbers"]:
        found[f"udp {where}"] = udp(where, port)
    for name in facts["names"]:
        found[f"name {name}"] = tcp(name, port)
    for name in facts["questions"]:
        found[f"TXT {name}"] = ask(name, TXT)
        found[f"A {name}"] = ask(name, A)
    there = socket.gethostbyname(facts["allowed"])
    for source in facts["sources"]:
        forged(source, there, port)
    for number in facts["protocols"]:
        forged(GUEST, there, port, number)
    for where in facts["six"]:
        six(where, port)
    return found


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
