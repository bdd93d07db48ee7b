"""How a TCP flow begins: judged, looked up, connected, and only then answered."""

from __future__ import annotations

import errno
import secrets
import socket
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from agent_box.netstack import flow as flows
from agent_box.netstack.contract import Flow as Facts
from agent_box.netstack.contract import Verdict
from agent_box.netstack.dial import Dial, full, usable
from agent_box.netstack.dnstcp import DnsStreams
from agent_box.netstack.flow import Flow, Relay, facts
from agent_box.netstack.judge import Judge
from agent_box.netstack.names import UNASSIGNED, Found, Names, synthetic
from agent_box.netstack.packet import (
    ACK,
    GATEWAY,
    GUEST,
    HOST_UNREACHABLE,
    NET_UNREACHABLE,
    PROHIBITED,
    RST,
    TCP,
    ip_head,
    tcp_head,
    unreachable,
)
from agent_box.netstack.policy import BROKER_PORT, TLS_PORT
from agent_box.netstack.poller import Poller
from agent_box.netstack.reports import Reporter
from agent_box.netstack.resolver import Resolver
from agent_box.netstack.sni import Hello, HelloReader
from agent_box.netstack.wire import Wire

DNS_PORT: Final = 53
CONNECT_S: Final = 30.0  # for look-up and connect together
_LOOK_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one instance may use. Beyond it new things are refused; old ones go on."""

    flows: int = 8192  # TCP
    pending: int = 512  # TCP flows that upstream has not accepted yet
    datagrams: int = 1024  # UDP flows; the one idle for longest gives way
    names: int = 65536
    memory: int = 128 << 20  # bytes held for either direction


class Opener:
    """Opens the flows of one instance."""

    def __init__(
        self,
        poller: Poller,
        wire: Wire,
        relay: Relay,
        judge: Judge,
        names: Names,
        resolver: Resolver,
        streams: DnsStreams,
        reporter: Reporter,
        limits: Limits,
        broker: str | None,
    ) -> None:
        self._poller = poller
        self._wire = wire
        self._relay = relay
        self._judge = judge
        self._names = names
        self._resolver = resolver
        self._streams = streams
        self._reporter = reporter
        self._limits = limits
        self._broker = broker
        self._waiting: dict[bytes, Flow] = {}  # the oldest first
        self._looking = False
        self._random: list[int] = []
        self.total = 0

    # -- the guest calls

    def called(self, key: bytes, seq: int, mss: int, scale: int | None) -> None:
        """The guest's SYN for a flow that does not exist."""
        target = key[4:8]
        port = key[10] << 8 | key[11]
        if target == GATEWAY:
            if port == BROKER_PORT and self._broker is not None:
                self._local(key, seq, mss, scale, flows.BROKER)
            elif port == DNS_PORT:
                self._local(key, seq, mss, scale, flows.RESOLVER)
            else:
                self._refuse_key(key, seq)  # nobody listens there, and no policy could change it
            return
        name = address = None
        if synthetic(target):
            name = self._names.name(target)
            if name is None:
                self._reporter.deny(
                    UNASSIGNED, address=socket.inet_ntoa(target), port=port, protocol="tcp",
                    now=self._poller.now,
                )  # fmt: skip
                self._prohibit(key, seq)
                return
        else:
            address = socket.inet_ntoa(target)
        known = facts(name, address, port)
        verdict = self._judge.flow(known, self._poller.now)
        if verdict.verdict != "allow":
            self._reporter.deny_flow(verdict, known, self._poller.now)
            self._prohibit(key, seq)
            return
        flow = self._begin(key, seq, mss, scale, flows.POLICY)
        if flow is None:
            return
        flow.facts = known
        if name is not None:
            self._resolver.lookup(name, partial(self._found, flow))
        elif address is not None:
            self._dial(flow, {address: known})

    def forget(self, flow: Flow) -> None:
        """A flow ended while it waited."""
        if self._waiting.get(flow.key) is flow:
            del self._waiting[flow.key]
        if isinstance(flow.dial, Dial):
            flow.dial.close()
        flow.dial = None

    def hello(self, flow: Flow, hello: Hello) -> bool:
        """Judges a flow once more, now that its TLS client spoke; tells of a denial."""
        if flow.facts is None:
            return True
        flow.facts = msgspec.structs.replace(flow.facts, hello=hello.kind, sni=hello.sni)
        verdict = self._judge.flow(flow.facts, self._poller.now)
        if verdict.verdict != "allow":
            self._reporter.deny_flow(verdict, flow.facts, self._poller.now)
        return verdict.verdict == "allow"

    # -- the host calls

    def forward(self, sock: socket.socket, guest_port: int, origin: int) -> bool:
        """A connection that a forward's listener accepted goes to the guest. False: it cannot."""
        if len(self._relay.flows) >= self._limits.flows:
            self._reporter.limit("flows", self._poller.now)
            return False
        key = self._free_key(guest_port)
        if key is None:
            return False
        flow = Flow(self._relay, self._wire, key, self._first_number(), flows.FORWARD)
        flow.origin = origin
        self._poller.watch(sock.fileno(), flow)
        flow.sock = sock
        self._relay.flows[key] = flow
        self.total += 1
        flow.call()
        return True

    def _free_key(self, guest_port: int) -> bytes | None:
        for _ in range(64):
            port = 20000 + secrets.randbelow(40000)
            key = GUEST + GATEWAY + guest_port.to_bytes(2, "big") + port.to_bytes(2, "big")
            if key not in self._relay.flows:
                return key
        return None

    # -- inside

    def _first_number(self) -> int:
        """An initial sequence number that nobody guesses (RFC 6528); one call gets many."""
        if not self._random:
            self._random.extend(memoryview(secrets.token_bytes(1024)).cast("I"))
        return self._random.pop()

    def _begin(self, key: bytes, seq: int, mss: int, scale: int | None, kind: int) -> Flow | None:
        now = self._poller.now
        if len(self._waiting) >= self._limits.pending:
            self._reporter.limit("pending", now)
            return None  # no answer: the guest's kernel tries again
        if len(self._relay.flows) >= self._limits.flows:
            self._reporter.limit("flows", now)
            self._refuse_key(key, seq)
            return None
        flow = Flow(self._relay, self._wire, key, self._first_number(), kind)
        flow.called(seq, mss, scale)
        self._relay.flows[key] = flow
        self._waiting[key] = flow
        self.total += 1
        if not self._looking:
            self._looking = True
            self._poller.at(now + _LOOK_S, self._look)
        return flow

    def _local(self, key: bytes, seq: int, mss: int, scale: int | None, kind: int) -> None:
        flow = self._begin(key, seq, mss, scale, kind)
        if flow is None:
            return
        sock = None
        try:
            if kind == flows.RESOLVER:
                sock = self._streams.connect()
            elif self._broker is not None:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                sock.connect(self._broker)
            if sock is None:
                raise OSError(errno.ECONNREFUSED, "nobody is there")
            self._poller.watch(sock.fileno(), flow)
        except OSError as error:
            if sock is not None:
                sock.close()
            self._failed(flow, errno.ECONNREFUSED if not full(error.errno or 0) else errno.EMFILE)
            return
        self._accept(flow, sock)

    def _found(self, flow: Flow, found: Found) -> None:
        known = flow.facts
        if self._waiting.get(flow.key) is not flow or known is None:
            return  # it ended meanwhile
        if not found.addresses:
            self._failed(flow, errno.EHOSTUNREACH)
            return
        now = self._poller.now
        for alias in found.aliases:
            verdict = self._judge.alias(known, alias, now)
            if verdict is not None:
                self._denied(flow, verdict, known)
                return
        allowed: dict[str, Facts] = {}
        refused: tuple[Verdict, Facts] | None = None
        for address in found.addresses:
            there = msgspec.structs.replace(known, address=address)
            verdict = self._judge.flow(there, now)
            if not usable(address):
                continue
            if verdict.verdict == "allow":
                allowed[address] = there
            elif refused is None:
                refused = verdict, there
        if allowed:
            self._dial(flow, allowed)
        elif refused is not None:
            self._denied(flow, *refused)
        else:
            self._failed(flow, errno.EHOSTUNREACH)

    def _dial(self, flow: Flow, allowed: dict[str, Facts]) -> None:
        port = flow.key[10] << 8 | flow.key[11]
        done = partial(self._dialled, flow, allowed)
        dial = Dial(self._poller, list(allowed), port, done)
        flow.dial = dial
        dial.start()

    def _dialled(
        self,
        flow: Flow,
        allowed: dict[str, Facts],
        sock: socket.socket | None,
        address: str | None,
        code: int,
    ) -> None:
        dial, flow.dial = flow.dial, None
        if sock is None or address is None:
            self._failed(flow, code)
            return
        known = allowed[address]
        verdict = self._judge.flow(known, self._poller.now)
        if verdict.verdict != "allow":  # the policy changed while it connected
            self._poller.forget(sock.fileno())
            sock.close()
            self._denied(flow, verdict, known)
            return
        flow.facts = known
        if known.port == TLS_PORT:
            flow.hello = HelloReader()
        self._poller.hand_over(sock.fileno(), flow)
        flow.readable = flow.unsure = isinstance(dial, Dial) and dial.spoken
        self._accept(flow, sock)

    def _accept(self, flow: Flow, sock: socket.socket) -> None:
        self._waiting.pop(flow.key, None)
        flow.sock = sock
        flow.accept()

    def _look(self) -> None:
        """Ends what waits for too long."""
        self._looking = False
        now = self._poller.now
        for flow in list(self._waiting.values()):
            if now - flow.heard < CONNECT_S:
                break
            self._failed(flow, errno.ETIMEDOUT)
        if self._waiting:
            self._looking = True
            self._poller.at(now + _LOOK_S, self._look)

    def _failed(self, flow: Flow, code: int) -> None:
        """Upstream is not to be had: the guest's connect fails, with an errno that says why."""
        self.forget(flow)
        seq = (flow.rcv_nxt - 1) & 0xFFFFFFFF
        if full(code):
            self._reporter.limit("descriptors", self._poller.now)
        if full(code) or code in (errno.ECONNREFUSED, errno.ECONNRESET):
            self._relay.cut(flow)
            return
        flow.die()
        self._relay.drop(flow, hard=True)
        unreach = NET_UNREACHABLE if code == errno.ENETUNREACH else HOST_UNREACHABLE
        self._unreachable(flow.key, seq, unreach)

    def _denied(self, flow: Flow, verdict: Verdict, known: Facts) -> None:
        self.forget(flow)
        self._reporter.deny_flow(verdict, known, self._poller.now)
        flow.die()
        self._relay.drop(flow, hard=True)
        self._prohibit(flow.key, (flow.rcv_nxt - 1) & 0xFFFFFFFF)

    def _prohibit(self, key: bytes, seq: int) -> None:
        """A denial looks different from a refusal upstream: EHOSTUNREACH, not ECONNREFUSED."""
        self._unreachable(key, seq, PROHIBITED)

    def _unreachable(self, key: bytes, seq: int, code: int) -> None:
        packet = ip_head(key[:4], key[4:8], TCP, 20) + key[8:12] + seq.to_bytes(4, "big")
        self._wire.frame(unreachable(GATEWAY, key[:4], code, packet))

    def _refuse_key(self, key: bytes, seq: int) -> None:
        self.reset(key, 0, (seq + 1) & 0xFFFFFFFF, RST | ACK)

    def reset(self, key: bytes, seq: int, ack: int, flags: int) -> None:
        """A RST without a flow."""
        ports = (key[10] << 8 | key[11], key[8] << 8 | key[9])
        self._wire.frame(tcp_head(key[4:8], key[:4], ports, seq, ack, flags, 0))
