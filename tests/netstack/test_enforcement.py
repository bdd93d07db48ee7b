"""`policy check` says what is enforced: random policies and flows, through the real worker.

The worker runs in its jail and in a network namespace where nothing is but the loopback
address, so an allowed flow is refused or finds no way at once, and a denied one is told apart
by its ICMP code. What is expected comes from the service's own answer to `policy check`.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scapy.layers.dns import DNS, DNSQR
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.packet import Packet
from support.jailed import WAIT_S, Jailed, Talk
from support.planes import policy, rule

from agent_box.netstack import control
from agent_box.netstack import policy as deciding
from agent_box.netstack.contract import Flow, Policy, Rule

GUEST, GATEWAY = "198.18.0.2", "198.18.0.1"
OWN = frozenset({ip_network("127.0.0.0/8"), ip_network("::1/128")})  # of that namespace
NAMES = {
    "a.test": ["127.0.0.1"],
    "b.a.test": ["203.0.114.1"],
    "c.b.a.test": ["10.0.0.1"],
    "two.test": ["127.0.0.1", "203.0.114.2"],
    "six.test": ["::1"],
    "old.test": ["64:ff9b::a00:1"],
    "localhost": ["127.0.0.1"],
}
ADDRESSES = ["127.0.0.1", "127.0.0.2", "203.0.114.1", "203.0.114.2", "10.0.0.1", "169.254.169.254"]
TARGETS = [
    *NAMES, "*.test", "*.a.test", "127.0.0.0/8", "127.0.0.1", "203.0.114.0/24", "203.0.114.1",
    "10.0.0.0/8", "0.0.0.0/0", "169.254.169.254", "::1", "64:ff9b::/96",
]  # fmt: skip
PORTS = ["443", "80", "80,443", "1-65535", "442-444"]


def some_policy(rng: random.Random, generation: int) -> Policy:
    rules: dict[str, Rule] = {}
    for _ in range(rng.randrange(7)):
        target = rng.choice(TARGETS)
        target = f"[{target}]" if ":" in target else target
        udp = "/udp" if rng.random() < 0.3 else ""
        if rng.random() < 0.35:
            found = rule(f"{target}:{rng.choice(PORTS)}{udp}", action="deny")
        else:
            found = rule(
                f"{target}:{rng.choice(PORTS)}{udp}",
                sni=rng.random() < 0.8,
                allow_reserved=rng.random() < 0.5,
            )
        rules[found.id] = found
    mode = rng.choice(["deny", "allowlist", "allowlist", "allowlist", "open"])
    return policy(*rules.values(), mode=mode, generation=generation)


class Enforced:
    """A worker, and its guest's end of the link."""

    def __init__(self, root: Path) -> None:
        self.jailed = Jailed(root, alone=True)
        hosts = "".join(f"{ip} {name}\n" for name, all in NAMES.items() for ip in all)
        (root / "host" / "hosts").write_text(hosts)
        self.talk: Talk = self.jailed.dial()
        self.link, theirs = socket.socketpair()
        self.link.settimeout(WAIT_S)
        self.told: list[dict[str, Any]] = []
        self.n = 0
        self._port = 1024
        assert isinstance(self.talk.next(), control.Hello)
        self.done(control.Up(n=self.number(), boot=1, name="web", policy=policy(generation=1)))
        with theirs:
            answer = self.talk.give(control.Link(n=self.number()), theirs.fileno())
        assert isinstance(answer, control.Done), answer

    def close(self) -> None:
        self.talk.sock.close()
        self.link.close()
        self.jailed.close()

    def number(self) -> int:
        self.n += 1
        return self.n

    def done(self, message: control.ToWorker) -> control.Done:
        answer = self.talk.ask(message)
        while isinstance(answer, control.Notice):
            self.told.append({"kind": answer.kind, **answer.facts})
            self.talk.sock.sendall(control.frame(control.Ack(seq=answer.seq)))
            answer = self.talk.next()
        assert isinstance(answer, control.Done), answer
        return answer

    def denied(self) -> int:
        counters = self.done(control.Count(n=self.number())).counters
        assert counters is not None
        return counters.denied

    def exchange(self, packet: Packet) -> IP:
        data = bytes(packet)
        self.link.sendall((10 + len(data)).to_bytes(4, "little") + bytes(10) + data)
        length = int.from_bytes(self._exactly(4), "little")
        return IP(self._exactly(length)[10:])

    def _exactly(self, count: int) -> bytes:
        got = b""
        while len(got) < count:
            more = self.link.recv(count - len(got))
            assert more, "the worker ended the link"
            got += more
        return got

    def port(self) -> int:
        self._port = self._port + 1 if self._port < 65535 else 1024
        return self._port

    def address(self, name: str) -> str | None:
        """What stands for a name in the guest; None: it is told that there is no such name."""
        ask = DNS(rd=1, qd=DNSQR(qname=name))
        found = self.exchange(IP(src=GUEST, dst=GATEWAY) / UDP(sport=self.port(), dport=53) / ask)
        answer = DNS(bytes(found[UDP].payload))
        if answer.rcode:
            assert answer.rcode == 3
            return None
        return str(answer.an[0].rdata)

    def allows(self, where: str, port: int, protocol: str) -> bool:
        head = IP(src=GUEST, dst=where)
        if protocol == "tcp":
            found = self.exchange(head / TCP(sport=self.port(), dport=port, flags="S"))
        else:
            found = self.exchange(head / UDP(sport=self.port(), dport=port) / b"?")
        if ICMP in found:
            assert found[ICMP].type == 3 and found[ICMP].code in (0, 1, 3, 13)
            return bool(found[ICMP].code != 13)
        assert str(found[TCP].flags) == "RA"  # nobody listens there
        return True


@pytest.fixture
def enforced(tmp_path: Path) -> Iterator[Enforced]:
    made = Enforced(tmp_path)
    try:
        yield made
    finally:
        made.close()


def check(enforced: Enforced, seed: int, policies: int, flows: int) -> None:
    rng = random.Random(seed)
    expected: set[str] = set()
    verdicts = {True: 0, False: 0}
    for generation in range(2, policies + 2):
        p = some_policy(rng, generation)
        rules = deciding.load(p)
        enforced.done(control.Apply(n=enforced.number(), policy=p))
        before, denials = enforced.denied(), 0
        for _ in range(flows):
            port = rng.choice([443, 80, 442, 22])
            protocol = rng.choice(["tcp", "tcp", "udp"])
            name = rng.choice(list(NAMES)) if rng.random() < 0.5 else None
            address = None if name is not None else rng.choice(ADDRESSES)
            asked = Flow(
                name=name, address=address, port=port, protocol=protocol,  # type: ignore[arg-type]
                hello="unread", sni=None,
            )  # fmt: skip
            said = rules.decide(asked, own=OWN)
            where = address
            if name is not None:
                where = enforced.address(name)
                if where is None:
                    assert said.verdict == "deny", (p, asked, said)
                    expected.add(rules.decide_name(name).rule)
                    denials += 1
                    continue
            assert where is not None
            allowed = enforced.allows(where, port, protocol)
            verdicts[allowed] += 1
            if name is not None and said.verdict == "allow":
                # The question does not say where the name leads; with that, it does again.
                led = [msgspec.structs.replace(asked, address=there) for there in NAMES[name]]
                answers = [rules.decide(each, own=OWN) for each in led]
                usable = [each for each in answers if each.verdict == "allow"]
                said = (usable or answers)[0]
            assert allowed == (said.verdict == "allow"), (p, asked, said)
            if not allowed:
                expected.add(said.rule)
                denials += 1
        assert enforced.denied() - before == denials, p
    rules_told = {each["rule"] for each in enforced.told if each["kind"] == "flow-denied"}
    if policies > 100:
        rules_told.discard("many")  # how the rest is told when there are too many kinds at a time
    assert rules_told and rules_told <= expected
    assert min(verdicts.values()) > policies * flows // 20, verdicts


def test_what_policy_check_says_is_what_the_worker_does(enforced: Enforced) -> None:
    check(enforced, seed=1, policies=60, flows=15)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_what_policy_check_says_is_what_the_worker_does_for_long(enforced: Enforced) -> None:
    check(enforced, seed=2, policies=1_000, flows=50)
