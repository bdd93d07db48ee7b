"""ICMP with the guest: the gateway answers pings, and that is all (RFC 792)."""

from __future__ import annotations

from typing import Final

from agent_box.netstack.packet import GATEWAY, GUEST, icmp_frame

ECHO: Final = 8
_ECHO_REPLY: Final = 0
_HEADER: Final = 8


def answer(untrusted_message: bytes) -> bytes | None:
    """The frame that answers a message sent to the gateway, or None for one without answer."""
    message = untrusted_message
    if len(message) < _HEADER or message[0] != ECHO or message[1]:
        return None
    return icmp_frame(GATEWAY, GUEST, bytes((_ECHO_REPLY, 0, 0, 0)) + message[4:])
