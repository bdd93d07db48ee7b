"""UDP between the guest and upstream, one socket for each flow that the policy allows."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Final

from agent_box.netstack.contract import Flow as Facts
from agent_box.netstack.packet import (
    GATEWAY,
    HOST_UNREACHABLE,
    IP_MAX,
    PORT_UNREACHABLE,
    UDP,
    ip_head,
    udp_frame,
    unreachable,
)
from agent_box.netstack.poller import Poller
from agent_box.netstack.wire import Wire

IDLE_S: Final = 60.0  # of a flow that never got an answer
IDLE_BOTH_S: Final = 180.0  # RFC 4787 §4.3: at least 2 minutes
_MULTICAST: Final = 224  # the first byte of such addresses, and of all beyond
DATA_MAX: Final = IP_MAX - 28
_WAITING_MAX: Final = 4  # datagrams kept while a name is looked up
_WAITING_BYTES: Final = 4096
_BATCH: Final = 32  # datagrams of one flow before others have their turn
_HIGH: Final = 512 << 10  # queued for the link: then datagrams are lost, as they may be


class UdpFlow:
    """One pair of ports and an address. `key` is as in `Tcp`."""

    __slots__ = ("answered", "facts", "heard", "key", "owner", "readable", "sock", "waiting")

    def __init__(self, owner: UdpFlows, key: bytes, facts: Facts, now: float) -> None:
        self.owner = owner
        self.key = key
        self.facts = facts
        self.sock: socket.socket | None = None
        self.waiting: list[bytes] | None = []
        self.heard = now
        self.answered = False
        self.readable = False

    def on_event(self, events: int) -> None:
        if not self.readable:
            self.readable = True
            self.owner.readable.append(self)


class UdpFlows:
    """All of an instance. The oldest idle one gives way when there are too many."""

    def __init__(self, poller: Poller, wire: Wire, most: int) -> None:
        self._poller = poller
        self._wire = wire
        self._most = most
        self.flows: dict[bytes, UdpFlow] = {}  # the one heard longest ago stands first
        self.readable: list[UdpFlow] = []
        self.total = 0
        self.bytes_up = 0
        self.bytes_down = 0

    def known(self, key: bytes, payload: bytes) -> bool:
        """Sends along a flow that exists. False: there is none."""
        flow = self.flows.get(key)
        if flow is None:
            return False
        flow.heard = self._poller.now
        self.flows[key] = self.flows.pop(key)
        if flow.sock is not None:
            self._send(flow, payload)
        elif (
            flow.waiting is not None
            and len(flow.waiting) < _WAITING_MAX
            and sum(map(len, flow.waiting)) < _WAITING_BYTES
        ):
            flow.waiting.append(payload)
        return True

    def open(self, key: bytes, facts: Facts, payload: bytes) -> UdpFlow:
        """A new flow, which the policy allows as far as it is known; `connect` comes next."""
        if len(self.flows) >= self._most:
            self.drop(next(iter(self.flows.values())))
        flow = UdpFlow(self, key, facts, self._poller.now)
        if flow.waiting is not None:
            flow.waiting.append(payload)
        self.flows[key] = flow
        self.total += 1
        return flow

    def connect(self, flow: UdpFlow, address: str, facts: Facts) -> int:
        """Gives the flow its upstream and sends what waits. Returns 0, or an errno: still none."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            return error.errno or errno.EIO
        try:
            sock.connect((address, facts.port))
            self._poller.watch(sock.fileno(), flow)
        except OSError as error:
            sock.close()
            return error.errno or errno.EIO
        flow.sock = sock
        flow.facts = facts
        waiting, flow.waiting = flow.waiting or [], None
        for payload in waiting:
            self._send(flow, payload)
        return 0

    def refuse(self, flow: UdpFlow, code: int) -> None:
        """Tells the guest that it leads nowhere, and forgets it."""
        self.drop(flow)
        self.unreachable(flow.key, code)

    def unreachable(self, key: bytes, code: int) -> None:
        """Tells the guest why a datagram went nowhere; never of one to many (RFC 1122 §3.2.2)."""
        if key[4] < _MULTICAST:
            packet = ip_head(key[:4], key[4:8], UDP, 8) + key[8:12] + b"\0\x08\0\0"
            self._wire.frame(unreachable(GATEWAY, key[:4], code, packet))

    def drop(self, flow: UdpFlow) -> None:
        if self.flows.get(flow.key) is flow:
            del self.flows[flow.key]
        sock, flow.sock = flow.sock, None
        flow.waiting = None
        if sock is not None:
            self._poller.forget(sock.fileno())
            sock.close()

    def pump(self) -> bool:
        """Passes on what upstreams sent. Returns whether there may be more."""
        flows, self.readable = self.readable, []
        for flow in flows:
            flow.readable = self._receive(flow)
            if flow.readable:
                self.readable.append(flow)
        return bool(self.readable)

    def sweep(self, now: float) -> None:
        """Forgets flows that nobody uses."""
        for flow in list(self.flows.values()):
            if now - flow.heard > (IDLE_BOTH_S if flow.answered else IDLE_S):
                self.drop(flow)

    def revoke(self, allowed: Callable[[Facts], bool]) -> int:
        """Ends the flows that are not allowed any more."""
        ended = [flow for flow in self.flows.values() if not allowed(flow.facts)]
        for flow in ended:
            self.drop(flow)
        return len(ended)

    def _send(self, flow: UdpFlow, payload: bytes) -> None:
        if flow.sock is None:
            return
        try:
            flow.sock.send(payload)
            self.bytes_up += len(payload)
        except BlockingIOError:
            return  # lost, as datagrams may be
        except OSError as error:
            self._failed(flow, error)

    def _failed(self, flow: UdpFlow, error: OSError) -> None:
        """An error of an earlier datagram; the flow goes on."""
        if error.errno == errno.ECONNREFUSED:
            self.unreachable(flow.key, PORT_UNREACHABLE)
        elif error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM):
            self.unreachable(flow.key, HOST_UNREACHABLE)

    def _receive(self, flow: UdpFlow) -> bool:
        key = flow.key
        for _ in range(_BATCH):
            if flow.sock is None:
                return False
            try:
                payload = flow.sock.recv(65535)
            except BlockingIOError:
                return False
            except OSError as error:
                self._failed(flow, error)
                continue
            flow.answered = True
            flow.heard = self._poller.now
            self.bytes_down += len(payload)
            if len(payload) <= DATA_MAX and self._wire.queued < _HIGH:
                ports = (key[10] << 8 | key[11], key[8] << 8 | key[9])
                self._wire.frame(udp_frame(key[4:8], key[:4], ports, payload))
        return True
