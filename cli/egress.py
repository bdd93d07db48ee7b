"""Whether the data plane refuses what a policy does not allow: tried on one of our own, whose
guest is this program. Nothing leaves the host.
"""

from __future__ import annotations

import select
import socket
import struct
from typing import Final

ANSWER_S: Final = 5.0  # of a plane in this process; a bound on a hang
_NAME: Final = "doctor.invalid"  # RFC 2606: nobody has it
_ID: Final = 0xD0C7
_NXDOMAIN: Final = 3
_HEAD: Final = 10  # of a virtio-net header
_GUEST: Final = socket.inet_aton("198.18.0.2")
_GATEWAY: Final = socket.inet_aton("198.18.0.1")


def problem() -> str | None:
    """One line about what is wrong; None when the name was refused and reported."""
    from agent_box.netstack.contract import Policy
    from agent_box.netstack.plane import Plane

    told: list[object] = []
    policy = Policy(generation=1, mode="allowlist", allow_open=False, rules=[], endpoints=[])
    try:
        plane = Plane(policy=policy, broker=None, report=told.append)
        guest, host = socket.socketpair()
    except OSError as error:
        return f"no data plane can be made: {error.strerror}"
    try:
        host.setblocking(False)
        plane.link(host)
        guest.sendall(_query())
        poll = select.poll()
        for fd in (plane.fileno(), guest.fileno()):
            poll.register(fd, select.POLLIN)
        for _ in range(20):
            ready = poll.poll(ANSWER_S * 1000)
            if not ready:
                return f"a data plane says nothing in {ANSWER_S:.0f} s"
            plane.run()
            if any(fd == guest.fileno() for fd, _ in ready):
                return _judged(guest.recv(65536), told)
        return "a data plane does not answer"
    finally:
        plane.close()
        guest.close()


def _judged(answer: bytes, told: list[object]) -> str | None:
    dns = answer[4 + _HEAD + 28 :]
    if len(dns) < 12 or int.from_bytes(dns[:2], "big") != _ID:
        return "a data plane answers what was not asked"
    if dns[3] & 15 != _NXDOMAIN:
        return f"a data plane did not refuse {_NAME}"
    return None if told else f"a data plane refused {_NAME} and did not report it"


def _query() -> bytes:
    """A frame with a look-up of the name."""
    labels = b"".join(bytes([len(part)]) + part.encode() for part in _NAME.split("."))
    dns = struct.pack(">HHHHHH", _ID, 0x0100, 1, 0, 0, 0) + labels + b"\0\0\1\0\1"
    udp = struct.pack(">HHHH", 40000, 53, 8 + len(dns), 0) + dns
    head = bytearray(
        struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(udp), 1, 0, 64, 17, 0) + _GUEST + _GATEWAY
    )
    total = sum(struct.unpack(">10H", head))
    total = (total & 0xFFFF) + (total >> 16)
    head[10:12] = (~((total & 0xFFFF) + (total >> 16)) & 0xFFFF).to_bytes(2, "big")
    packet = bytes(_HEAD) + bytes(head) + udp
    return len(packet).to_bytes(4, "little") + packet
