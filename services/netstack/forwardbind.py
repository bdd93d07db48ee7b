"""The service's side of forwards: checked, and bound on this host; the worker accepts."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Final

from agent_box.bus.errors import Reason, Refusal
from agent_box.config.addresses import plain
from agent_box.netstack.contract import Forward

BACKLOG: Final = 1024
TRIES: Final = 16  # for a port that is free on both loopback addresses
FORWARDS_MAX: Final = 128  # of one instance
_LOOPBACK: Final = ("127.0.0.1", "::1")


def checked(untrusted: Forward) -> Forward:
    """Raises:
    Refusal: BAD_REQUEST, no address or port, or one that is not loopback and not public.
    """
    try:
        address = plain(ipaddress.ip_address(untrusted.address))
    except ValueError:
        raise Refusal(Reason.BAD_REQUEST, f"{untrusted.address!r} is not an address") from None
    if not 0 <= untrusted.host_port <= 65535 or not 1 <= untrusted.guest_port <= 65535:
        raise Refusal(Reason.BAD_REQUEST, "a port is from 1 to 65535, on the host also 0")
    if untrusted.public == address.is_loopback:
        what = "is" if address.is_loopback else "is not"
        raise Refusal(Reason.BAD_REQUEST, f"{address} {what} a loopback address")
    return Forward(
        address=str(address),
        host_port=untrusted.host_port,
        guest_port=untrusted.guest_port,
        public=untrusted.public,
    )


def bind(forward: Forward) -> tuple[Forward, list[socket.socket]]:
    """Listens, and says on which port. 127.0.0.1 brings ::1 with it, where there is IPv6.

    Raises:
        Refusal: CONFLICT with fact `port` when it is taken; BAD_REQUEST, the host has no such
            address; DENIED, the host does not give it to this account.
    """
    for _ in range(TRIES):
        listeners: list[socket.socket] = []
        try:
            first = _listen(forward.address, forward.host_port)
            listeners.append(first)
            port = first.getsockname()[1]
            if forward.address == _LOOPBACK[0]:
                try:
                    listeners.append(_listen(_LOOPBACK[1], port))
                except OSError as error:
                    if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                        raise
        except OSError as error:
            for listener in listeners:
                listener.close()
            if error.errno == errno.EADDRINUSE and forward.host_port == 0:
                continue
            raise _refused(forward, error) from None
        made = Forward(
            address=forward.address,
            host_port=port,
            guest_port=forward.guest_port,
            public=forward.public,
        )
        return made, listeners
    raise Refusal(Reason.CONFLICT, "no port is free on both loopback addresses")


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _refused(forward: Forward, error: OSError) -> Refusal:
    where = f"[{forward.address}]" if ":" in forward.address else forward.address
    where = f"{where}:{forward.host_port}"
    if error.errno == errno.EADDRINUSE:
        facts = {"port": str(forward.host_port), "address": forward.address}
        return Refusal(Reason.CONFLICT, f"{where} is taken", facts=facts)
    if error.errno in (errno.EACCES, errno.EPERM):
        return Refusal(Reason.DENIED, f"{where}: {error.strerror}")
    return Refusal(Reason.BAD_REQUEST, f"{where}: {error.strerror}")
