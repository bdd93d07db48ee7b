"""What a capture does not show: the guest's requests to the broker, which carry nonces."""

from __future__ import annotations

import socket
from typing import Final

GATEWAY: Final = socket.inet_aton("198.18.0.1")
BROKER_PORT: Final = (80).to_bytes(2, "big")
_TCP: Final = 6
_OFFSET: Final = 0x1FFF


def masked(packet: bytes) -> bytes:
    """The packet with zeros in the place of what it sends to the broker. Its headers stay,
    and so do its length and checksums, which then do not fit any more.

    A fragment that is not the first has no port, so all of its content is masked.
    """
    if len(packet) < 20 or packet[0] >> 4 != 4 or packet[16:20] != GATEWAY:
        return packet
    if packet[9] != _TCP:
        return packet
    start = (packet[0] & 15) * 4
    if not int.from_bytes(packet[6:8], "big") & _OFFSET:
        if len(packet) >= start + 4 and packet[start + 2 : start + 4] != BROKER_PORT:
            return packet
        if len(packet) > start + 12:
            start += (packet[start + 12] >> 4) * 4
    return packet[:start] + bytes(max(0, len(packet) - start))
