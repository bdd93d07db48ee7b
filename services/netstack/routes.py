"""Which destinations the kernel delivers on this host, asked over netlink: for a process that
has no /proc. Source: rtnetlink(7), linux/rtnetlink.h.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from ipaddress import ip_network
from typing import Final

from agent_box.config.addresses import Network

_GET: Final = 26  # RTM_GETROUTE
_ROUTE: Final = 24  # RTM_NEWROUTE
_ERROR, _DONE = 2, 3
_DUMP: Final = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_DESTINATION: Final = 1  # RTA_DST
_OURS: Final = frozenset((2, 4))  # RTN_LOCAL, RTN_ANYCAST
_HEAD: Final = struct.Struct("=IHHII")
_BODY: Final = struct.Struct("=BBBBBBBBI")
_ATTRIBUTE: Final = struct.Struct("=HH")
_WAIT_S: Final = 5.0  # for a kernel, which answers at once


def delivered() -> set[Network]:
    """The networks of every route of type local or anycast, in each table.

    Raises:
        OSError: the kernel does not tell.
    """
    found: set[Network] = set()
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as asking:
            asking.settimeout(_WAIT_S)
            body = _BODY.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)
            asking.send(_HEAD.pack(_HEAD.size + len(body), _GET, _DUMP, 1, 0) + body)
            while (read := read_routes(asking.recv(1 << 18))) is not None:
                found |= read
    return found


def read_routes(answer: bytes) -> set[Network] | None:
    """What one datagram of a dump says; None at its end.

    Raises:
        OSError: it says that there was an error.
    """
    found: set[Network] = set()
    for kind, content in _messages(answer):
        if kind == _DONE:
            return None
        if kind == _ERROR:
            number = -int(struct.unpack_from("=i", content)[0])
            raise OSError(number, "the kernel does not list its routes")
        if kind == _ROUTE and (network := _network(content)) is not None:
            found.add(network)
    return found


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while len(data) - at >= _HEAD.size:
        size, kind, _, _, _ = _HEAD.unpack_from(data, at)
        if size < _HEAD.size:
            return
        yield kind, data[at + _HEAD.size : at + size]
        at += (size + 3) & ~3


def _network(content: bytes) -> Network | None:
    family, bits, _, _, _, _, _, kind, _ = _BODY.unpack_from(content)
    if kind not in _OURS or family not in (socket.AF_INET, socket.AF_INET6):
        return None
    address = bytes(4 if family == socket.AF_INET else 16)
    at = _BODY.size
    while len(content) - at >= _ATTRIBUTE.size:
        size, which = _ATTRIBUTE.unpack_from(content, at)
        if size < _ATTRIBUTE.size:
            break
        if which == _DESTINATION:
            address = content[at + _ATTRIBUTE.size : at + size]
        at += (size + 3) & ~3
    return ip_network((address, bits), strict=False)
