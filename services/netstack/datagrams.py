"""How a UDP flow begins: judged, looked up, connected; its first datagrams wait for that."""

from __future__ import annotations

import errno
import socket
from functools import partial

import msgspec

from agent_box.netstack.contract import Flow as Facts
from agent_box.netstack.contract import Verdict
from agent_box.netstack.dial import full, order, usable
from agent_box.netstack.flow import facts
from agent_box.netstack.judge import Judge
from agent_box.netstack.names import UNASSIGNED, Found, Names, synthetic
from agent_box.netstack.packet import HOST_UNREACHABLE, NET_UNREACHABLE, PROHIBITED
from agent_box.netstack.poller import Poller
from agent_box.netstack.reports import Reporter
from agent_box.netstack.resolver import Resolver
from agent_box.netstack.udp import UdpFlow, UdpFlows


class Datagrams:
    """Opens the UDP flows of one instance."""

    def __init__(
        self,
        poller: Poller,
        judge: Judge,
        names: Names,
        resolver: Resolver,
        reporter: Reporter,
        flows: UdpFlows,
    ) -> None:
        self._poller = poller
        self._judge = judge
        self._names = names
        self._resolver = resolver
        self._reporter = reporter
        self._flows = flows

    def arrived(self, key: bytes, payload: bytes) -> None:
        """A datagram of the guest's to anybody but the gateway."""
        if self._flows.known(key, payload):
            return
        now = self._poller.now
        target = key[4:8]
        port = key[10] << 8 | key[11]
        name = address = None
        if synthetic(target):
            name = self._names.name(target)
            if name is None:
                where = socket.inet_ntoa(target)
                self._reporter.deny(UNASSIGNED, address=where, port=port, protocol="udp", now=now)
                self._flows.unreachable(key, PROHIBITED)
                return
        else:
            address = socket.inet_ntoa(target)
        known = facts(name, address, port, "udp")
        verdict = self._judge.flow(known, now)
        if verdict.verdict != "allow":
            self._reporter.deny_flow(verdict, known, now)
            self._flows.unreachable(key, PROHIBITED)
            return
        flow = self._flows.open(key, known, payload)
        if name is not None:
            self._resolver.lookup(name, partial(self._found, flow))
        elif address is not None and (code := self._connect(flow, address, known)):
            net = code == errno.ENETUNREACH
            self._flows.refuse(flow, NET_UNREACHABLE if net else HOST_UNREACHABLE)

    def _found(self, flow: UdpFlow, found: Found) -> None:
        known = flow.facts
        now = self._poller.now
        if self._flows.flows.get(flow.key) is not flow:
            return  # it gave way meanwhile
        for alias in found.aliases:
            verdict = self._judge.alias(known, alias, now)
            if verdict is not None:
                self._refuse(flow, verdict, known)
                return
        refused: tuple[Verdict, Facts] | None = None
        failed = 0
        for address in order(found.addresses):
            if not usable(address):
                continue
            there = msgspec.structs.replace(known, address=address)
            verdict = self._judge.flow(there, now)
            if verdict.verdict == "allow":
                if not (failed := self._connect(flow, address, there)):
                    return
            elif refused is None:
                refused = verdict, there
        if refused is not None and not failed:
            self._refuse(flow, *refused)
        else:
            net = failed == errno.ENETUNREACH
            self._flows.refuse(flow, NET_UNREACHABLE if net else HOST_UNREACHABLE)

    def _refuse(self, flow: UdpFlow, verdict: Verdict, known: Facts) -> None:
        self._reporter.deny_flow(verdict, known, self._poller.now)
        self._flows.refuse(flow, PROHIBITED)

    def _connect(self, flow: UdpFlow, address: str, known: Facts) -> int:
        code = self._flows.connect(flow, address, known)
        if full(code):
            self._reporter.limit("descriptors", self._poller.now)
        return code
