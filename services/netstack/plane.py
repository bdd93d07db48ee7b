"""All of one instance's network, between its guest's frames and the sockets of the host.

A plane has one epoll of its own and no thread; whoever owns it waits for that epoll's
descriptor and calls `run`. What it decides, it decides by `policy.Rules`; everything that a
guest or an upstream sends is untrusted here, and the worst that a packet can do is to be dropped
and counted.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Final, Literal

from agent_box.config.addresses import Network
from agent_box.netstack import contract, icmp
from agent_box.netstack.contract import Flow as Facts
from agent_box.netstack.contract import Verdict
from agent_box.netstack.datagrams import Datagrams
from agent_box.netstack.dnstcp import DnsStreams
from agent_box.netstack.flow import HIGH, Flow, Relay
from agent_box.netstack.forwardaccept import ForwardListeners
from agent_box.netstack.judge import Judge
from agent_box.netstack.link import Link, LinkBroken
from agent_box.netstack.names import Dns, Names
from agent_box.netstack.opening import DNS_PORT, Limits, Opener
from agent_box.netstack.own import own as own_addresses
from agent_box.netstack.packet import (
    ACK,
    FIN,
    GATEWAY,
    GUEST,
    ICMP,
    IP_TCP_READ,
    PORT_UNREACHABLE,
    PROHIBITED,
    RST,
    SYN,
    TCP,
    UDP,
    tcp_options,
    udp_frame,
    unreachable,
)
from agent_box.netstack.poller import OUT, UNSURE, Poller
from agent_box.netstack.reports import Report, Reporter
from agent_box.netstack.resolver import Resolver
from agent_box.netstack.sni import Hello
from agent_box.netstack.tcp import CALLING, DATA, OPEN, OPENED, RESET
from agent_box.netstack.timers import Timers
from agent_box.netstack.udp import UdpFlows
from agent_box.netstack.wire import Timed, Wire

SWEEP_S: Final = 10.0
HALF_CLOSED_S: Final = 600.0  # one side finished, and nothing moves any more
PROBE_S: Final = 7200.0  # RFC 9293 §3.8.4: keepalives no more often than every two hours
_LINK_HIGH: Final = 4 << 20  # queued for a guest that does not read: then we do not either
_ROUNDS: Final = 8
_M: Final = 0xFFFFFFFF
_DNS_PORT: Final = DNS_PORT.to_bytes(2, "big")
_FORGED: Final = Verdict(verdict="deny", rule="source:forged", why="not the guest's own address")
_ONLY_PING: Final = Verdict(verdict="deny", rule="icmp:gateway", why="ICMP goes to the gateway")
_MULTICAST6: Final = 0xFF
_IPV6: Final = Verdict(verdict="deny", rule="protocol:ipv6", why="there is no IPv6")
_PROTOCOL: Final = Verdict(verdict="deny", rule="protocol:unknown", why="only TCP, UDP and ICMP")


class Plane:
    """See the module. Not for use from two threads.

    Attributes:
        ended: why the last link ended, in one line; None while there is one or was none.
        closed: whether `close` was called.
    """

    def __init__(
        self,
        *,
        policy: contract.Policy,
        broker: str | None,
        report: Callable[[Report], None],
        limits: Limits = Limits(),
        etc: Path = Path("/etc"),
        dns_port: int = 53,
        own: Callable[[], frozenset[Network]] = own_addresses,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes a plane without a link.

        Args:
            policy: in force from the start.
            broker: path of the Unix socket behind port 80 of the gateway, or none.
            report: gets what there is to tell, from within `run` and `apply`.
            etc: where the host's resolv.conf and hosts are.
            dns_port: of the host's name servers.
            own: the host's own addresses.
            clock: seconds, only ever forward.

        Raises:
            PolicyInvalid: the policy cannot be enforced.
            OSError: no descriptor is left.
        """
        self._judge = Judge(policy, own)
        self._poller = Poller(clock)
        timers = Timers(self._poller, self._due)
        self._wire = Wire(
            now=self._poller.now, memory=limits.memory, arm=timers.arm, disarm=timers.disarm
        )
        self._reporter = Reporter(report)
        self._names = Names(limits.names)
        self._resolver = Resolver(
            self._poller, etc, dns_port, lambda: self._reporter.limit("lookups", self._poller.now)
        )
        self._dns = Dns(
            self._names,
            self._resolver,
            self._judge.name,
            self._name_denied,
            lambda: self._reporter.limit("names", self._poller.now),
        )
        self._streams = DnsStreams(self._poller, self._dns)
        self._relay = Relay(self._poller, self._wire, self._hello)
        self._flows = self._relay.flows
        self._opener = Opener(
            self._poller, self._wire, self._relay, self._judge, self._names, self._resolver,
            self._streams, self._reporter, limits, broker,
        )  # fmt: skip
        self._forwards = ForwardListeners(self._poller, self._relay, self._opener, self._reporter)
        self._udp = UdpFlows(self._poller, self._wire, limits.datagrams)
        self._datagrams = Datagrams(
            self._poller, self._judge, self._names, self._resolver, self._reporter, self._udp
        )
        self._link: Link | None = None
        self._dropped = 0
        self._captured_lost = 0
        self.ended: str | None = None
        self.closed = False
        self._poller.at(self._poller.now + SWEEP_S, self._sweep)

    def fileno(self) -> int:
        """Of the epoll: readable when `run` has work."""
        return self._poller.fileno()

    def run(self) -> float | None:
        """Does what there is to do, a bounded amount of it.

        Returns:
            Seconds until it wants to be called again even if the descriptor stays quiet.
        """
        for _ in range(_ROUNDS):
            self._wire.now = self._poller.tick()
            events = self._poller.poll()
            wire = self._wire
            try:
                link = self._link
                if link is not None and link.readable and wire.queued < _LINK_HIGH:
                    link.read(self._packet, self._relay.batch)
            except LinkBroken as broken:
                self._lost(str(broken))
            if self._relay.ready:
                self._relay.pump()
            if self._relay.overdue:
                self._relay.acknowledge()
            more_udp = self._udp.pump()
            if wire.out:
                self._flush()
            link = self._link
            if not (
                (link is not None and link.readable and wire.queued < _LINK_HIGH)
                or (self._relay.ready and wire.queued < HIGH)
                or more_udp
                or events
            ):
                return self._poller.wait()
        return 0.0

    def link(self, sock: socket.socket | None) -> None:
        """The guest's stream of frames, which is ours from now on, or none.

        Flows stay as they are: what was lost in between is sent again.
        """
        self._drop_link()
        self.ended = None
        if sock is None:
            return
        self._link = Link(sock, self._wire)
        self._poller.watch(sock.fileno(), self)
        self._wire.now = self._poller.tick()
        for flow in self._relay.flows.values():
            flow.nudge()

    @property
    def linked(self) -> bool:
        """Whether there is a link to the guest."""
        return self._link is not None

    def on_event(self, events: int) -> None:
        """Of the link, from the poller."""
        if self._link is not None:
            if events & ~OUT:
                self._link.readable = True
                if events & UNSURE:
                    self._link.unsure = True
            if events & OUT:
                self._link.writable = True

    def apply(self, policy: contract.Policy) -> int:
        """Puts a policy in force: new flows at once, and flows that it refuses end.

        Returns:
            How many ended, each with a RST.

        Raises:
            PolicyInvalid: it cannot be enforced; the old one stays in force.
        """
        self._judge.apply(policy)
        self._wire.now = self._poller.tick()
        revoked = 0
        for flow in list(self._relay.flows.values()):
            if flow.facts is None or self._allowed(flow.facts):
                continue
            self._opener.forget(flow)
            self._relay.cut(flow)
            revoked += 1
        revoked += self._udp.revoke(self._allowed)
        self._flush()
        return revoked

    def counters(self) -> contract.Counters:
        return contract.Counters(
            generation=self._judge.rules.generation,
            flows=len(self._relay.flows) + len(self._udp.flows),
            flows_total=self._opener.total + self._udp.total,
            denied=self._reporter.denied,
            bytes_up=self._relay.bytes_up + self._udp.bytes_up,
            bytes_down=self._relay.bytes_down + self._udp.bytes_down,
            dropped_frames=self._dropped,
        )

    def forward_add(self, listener: socket.socket, guest_port: int) -> None:
        """Connections to a bound and listening socket go to a port of the guest from now on.

        Raises:
            OSError: it cannot be watched.
        """
        self._forwards.add(listener, guest_port)

    def forward_remove(self, host_port: int) -> None:
        """Ends the forwards from a port of the host, and their connections."""
        self._forwards.remove(host_port)

    def capture(self, sink: Callable[[bytes, float], bool] | None, snap: int = 65535) -> None:
        """Shows each packet to the sink, cut to `snap` bytes, with the time since the epoch.

        A sink that returns False had no room; that is counted. None ends it. Checksums of what
        goes to the guest are not complete, since its kernel completes them.
        """
        self._captured_lost = 0
        if sink is None:
            self._wire.tap = None
            return

        def tap(packet: bytes) -> None:
            if not sink(packet[:snap], time.time()):
                self._captured_lost += 1

        self._wire.tap = tap

    @property
    def capture_dropped(self) -> int:
        """Packets that the present sink had no room for."""
        return self._captured_lost

    def close(self) -> None:
        """Ends everything at once; upstreams hear RST. What was gathered is reported."""
        self.closed = True
        for flow in list(self._relay.flows.values()):
            self._opener.forget(flow)
            flow.die()
            self._relay.drop(flow, hard=True)
        for udp in list(self._udp.flows.values()):
            self._udp.drop(udp)
        self._forwards.close()
        self._streams.close()
        self._resolver.close()
        self._drop_link()
        self._reporter.flush(self._poller.now, all_of_it=True)
        self._poller.close()

    # -- packets of the guest

    def _packet(self, view: memoryview, at: int, length: int) -> None:
        """One packet. Nearly all are whole segments of flows: the rest is `_other`."""
        if self._wire.tap is not None:
            self._wire.tap(bytes(view[at : at + length]))
        if length < 40:
            self._other(view, at, length)
            return
        first, total, fragment, protocol, key, seq, ack, offset, flags, window = (
            IP_TCP_READ.unpack_from(view, at)
        )
        if first != 0x45 or protocol != TCP or fragment & 0x3FFF or not 40 <= total <= length:
            self._other(view, at, length)
            return
        flow = self._flows.get(key)
        if flow is None and key[:4] != GUEST:
            self._deny(_FORGED, key[:4])
            return
        start = at + 20 + (offset >> 4 << 2)
        end = at + total
        if start < at + 40 or start > end or flags & (SYN | FIN) == SYN | FIN:
            self._dropped += 1
            return
        if flow is None:
            self._without_flow(view, at, key, seq, ack, flags, start, end)
            return
        if flags & SYN:
            if flow.state == CALLING:
                flow.options(*tcp_options(view, at + 40, start))
            elif flow.state == OPEN and flow.fin_sent and flow.finished and not flags & ACK:
                # Both sides are done but for the last ACK, and the guest begins anew.
                flow.die()
                self._relay.drop(flow, hard=False)
                self._without_flow(view, at, key, seq, ack, flags, start, end)
                return
        bits = flow.arrive(seq, ack, flags, window, view[start:end] if end > start else None)
        if not bits:
            return
        if bits & RESET:
            self._opener.forget(flow)
            self._relay.drop(flow, hard=True)
            return
        if bits & DATA:
            self._relay.mark(flow)
        if bits & OPENED:
            self._relay.wake(flow)
        if flow.fin_acked or flow.blocked or flow.resend is not None:
            self._relay.event(flow, bits)

    def _other(self, view: memoryview, at: int, length: int) -> None:
        if view[at] >> 4 == 6:
            self._six(bytes(view[at + 24 : at + 40]), length)
            return
        if length < 28 or view[at] != 0x45:
            self._dropped += 1
            return
        total = view[at + 2] << 8 | view[at + 3]
        if not 28 <= total <= length or view[at + 6] & 0x3F or view[at + 7]:
            self._dropped += 1  # cut short, or a fragment, which an MTU like ours needs not
            return
        key = bytes(view[at + 12 : at + 24])
        protocol = view[at + 9]
        if key[:4] != GUEST:
            self._deny(_FORGED, key[:4])
        elif protocol == TCP:
            self._dropped += 1  # its header is not all there
        elif protocol == UDP:
            self._datagram(view, at, total, key)
        elif protocol == ICMP:
            self._icmp(bytes(view[at : at + total]))
        else:
            self._deny(_PROTOCOL, key[4:8])

    def _six(self, target: bytes, length: int) -> None:
        """The guest has no IPv6, and its kernel says so to every program. What comes all the
        same was put on the link by hand, but for what a kernel tells its neighbours."""
        if length < 40:
            self._dropped += 1
        elif target[0] != _MULTICAST6:
            where = socket.inet_ntop(socket.AF_INET6, target)
            self._reporter.deny(_IPV6, address=where, protocol="ip", now=self._poller.now)

    def _without_flow(
        self,
        view: memoryview,
        at: int,
        key: bytes,
        seq: int,
        ack: int,
        flags: int,
        start: int,
        end: int,
    ) -> None:
        if flags & RST:
            return
        if flags & ACK:
            self._opener.reset(key, ack, 0, RST)
        elif flags & SYN:
            self._opener.called(key, seq, *tcp_options(view, at + 40, start))
        else:
            length = end - start + (flags & FIN)
            self._opener.reset(key, 0, (seq + length) & _M, RST | ACK)

    def _datagram(self, view: memoryview, at: int, total: int, key: bytes) -> None:
        length = view[at + 24] << 8 | view[at + 25]
        if not 8 <= length <= total - 20:
            self._dropped += 1
            return
        payload = bytes(view[at + 28 : at + 20 + length])
        if key[4:8] == GATEWAY:
            if key[10:12] == _DNS_PORT:
                self._dns.ask(payload, partial(self._dns_answer, key), udp=True)
            else:
                self._udp.unreachable(key, PORT_UNREACHABLE)
            return
        self._datagrams.arrived(key, payload)

    def _icmp(self, packet: bytes) -> None:
        if packet[16:20] == GATEWAY:
            reply = icmp.answer(packet[20:])
            if reply is not None:
                self._wire.frame(reply)
            return
        if packet[20] == icmp.ECHO:
            self._deny(_ONLY_PING, packet[16:20], "icmp")
            self._wire.frame(unreachable(GATEWAY, GUEST, PROHIBITED, packet))

    def _dns_answer(self, key: bytes, message: bytes) -> None:
        self._wire.frame(udp_frame(GATEWAY, GUEST, (DNS_PORT, key[8] << 8 | key[9]), message))

    # -- decisions

    def _hello(self, flow: Flow, hello: Hello) -> bool:
        return self._opener.hello(flow, hello)

    def _allowed(self, known: Facts) -> bool:
        verdict = self._judge.flow(known, self._poller.now)
        if verdict.verdict != "allow":
            self._reporter.revoke(verdict, known, self._poller.now)
        return verdict.verdict == "allow"

    def _name_denied(self, name: str, verdict: Verdict) -> None:
        self._reporter.deny(verdict, name=name[:256], protocol="dns", now=self._poller.now)

    def _deny(
        self, verdict: Verdict, address: bytes, protocol: Literal["icmp", "ip"] = "ip"
    ) -> None:
        self._reporter.deny(
            verdict, address=socket.inet_ntoa(address), protocol=protocol, now=self._poller.now
        )

    # -- time, and the link

    def _due(self, flow: Timed) -> None:
        if not isinstance(flow, Flow) or flow.deadline is inf:
            return
        if flow.deadline > self._poller.now:
            self._wire.arm(flow)
            return
        bits = flow.timer()
        if bits & RESET:
            self._relay.drop(flow, hard=True)
        elif bits:
            self._relay.event(flow, bits)

    def _sweep(self) -> None:
        now = self._poller.now
        self._poller.at(now + SWEEP_S, self._sweep)
        self._reporter.flush(now)
        self._udp.sweep(now)
        for flow in list(self._relay.flows.values()):
            quiet = now - flow.heard
            if flow.state != OPEN or quiet < HALF_CLOSED_S:
                continue
            if flow.finished or flow.fin_sent:
                self._relay.cut(flow)
            elif quiet >= PROBE_S:
                flow.heard = now
                flow.probe()

    def _flush(self) -> None:
        wire = self._wire
        if self._link is not None:
            try:
                self._link.flush()
            except LinkBroken as broken:
                self._lost(str(broken))
        if self._link is None:
            wire.out.clear()
            wire.queued = 0

    def _lost(self, why: str) -> None:
        self._relay.batch()
        self._drop_link()
        self.ended = why

    def _drop_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            self._poller.forget(link.sock.fileno())
            link.sock.close()
            self._wire.out.clear()
            self._wire.queued = 0
