"""What a guest may try in order to get out: all refused, and all counted.

The guest is the test itself, which writes packets onto the link; scapy builds them. Upstream is
this host's loopback. A decoy listens wherever a packet might be meant to arrive, and nobody may
ever have come.
"""

from __future__ import annotations

import random
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from ipaddress import ip_network
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.layers.dns import DNS, DNSQR
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import ICMPv6ND_RS, IPv6
from scapy.packet import Packet, Raw
from support.nameserver import NameServer
from support.planes import etc, here, policy, rule
from support.until import until

from agent_box.netstack import opening
from agent_box.netstack import policy as deciding
from agent_box.netstack.contract import Flow, Rule
from agent_box.netstack.plane import Plane
from agent_box.netstack.policy import load
from agent_box.netstack.reports import Denied, Report

GUEST, GATEWAY = "198.18.0.2", "198.18.0.1"


class Bare:
    """A plane that the test steps, and the guest's end of its link."""

    def __init__(self, directory: Path, *rules: Rule, mode: str = "allowlist", **more) -> None:
        self.reports: list[Report] = []
        more.setdefault("own", lambda: frozenset({ip_network("127.0.0.0/8")}))
        self.etc = etc(directory / "etc", more.pop("hosts", {}), more.pop("nameserver", ""))
        self.plane = Plane(
            policy=policy(*rules, mode=mode), broker=None, report=self.reports.append,
            etc=self.etc, **more,
        )  # fmt: skip
        self.link, theirs = socket.socketpair()
        self.link.setblocking(False)
        self.plane.link(theirs)
        self._got = b""
        self._port = 30000

    def close(self) -> None:
        self.plane.close()
        self.link.close()

    def send(self, *packets: Packet | bytes) -> None:
        for packet in packets:
            data = bytes(packet)
            self.link.setblocking(True)
            self.link.sendall((10 + len(data)).to_bytes(4, "little") + bytes(10) + data)
            self.link.setblocking(False)
            self.plane.run()

    def packets(self) -> list[IP]:
        """What the plane answered since."""
        self.plane.run()
        try:
            while data := self.link.recv(1 << 20):
                self._got += data
        except BlockingIOError:
            pass
        found = []
        while self._got:
            length = int.from_bytes(self._got[:4], "little")
            found.append(IP(self._got[14 : 4 + length]))
            self._got = self._got[4 + length :]
        return found

    def answer(self) -> IP:
        """The one packet that comes."""
        found: list[IP] = []

        def look() -> bool:
            found.extend(self.packets())
            return bool(found)

        until("an answer", look)
        (only,) = found
        return only

    def ask(self, name: str | bytes, kind: str | int = "A") -> DNS:
        question = DNSQR(qname=name, qtype=kind)
        self.send(IP(src=GUEST, dst=GATEWAY) / UDP(sport=5353, dport=53) / DNS(rd=1, qd=question))
        return DNS(bytes(self.answer()[UDP].payload))

    def syn(self, address: str, port: int, **more: object) -> IP:
        self._port += 1
        fields = {"src": GUEST, "dst": address, **more}
        self.send(IP(**fields) / TCP(sport=self._port, dport=port, flags="S", seq=1000))
        return self.answer()

    def verdict(self, address: str, port: int) -> str:
        """`allow`, or how it was refused."""
        found = self.syn(address, port)
        if ICMP in found:
            assert (found[ICMP].type, found[ICMP].code) == (3, 13)
            return "deny"
        return {"SA": "allow", "RA": "refused"}[str(found[TCP].flags)]

    def denials(self) -> list[str]:
        return [report.rule for report in self.reports if isinstance(report, Denied)]


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Callable[..., Bare]]:
    made: list[Bare] = []

    def make(*rules: Rule, **more: object) -> Bare:
        made.append(Bare(tmp_path, *rules, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def decoy() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener
        with pytest.raises(BlockingIOError):
            listener.accept()


ANY = "0.0.0.0"  # noqa: S104
RESERVED = [
    "127.0.0.1", "127.1.2.3", ANY, "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1",
    "169.254.169.254", "224.0.0.1", "239.255.255.250", "255.255.255.255", "240.0.0.1",
    "192.0.0.1", "198.51.100.1",
]  # fmt: skip


@pytest.mark.parametrize("mode", ["allowlist", "open", "deny"])
def test_reserved_addresses_by_their_number(
    bare: Callable[..., Bare], decoy: socket.socket, mode: str
) -> None:
    plane = bare(rule("0.0.0.0/0:1-65535"), mode=mode)
    for address in RESERVED:
        assert plane.verdict(address, decoy.getsockname()[1]) == "deny", address
    assert plane.plane.counters().denied == len(RESERVED)
    assert plane.plane.counters().flows == 0


@pytest.mark.parametrize(
    "name",
    [
        "0x7f000001", "2130706433", "0177.0.0.1", "127.1", "0x7f.1", "127.0.0.1", "169.254.169.254",
        "0xa9fea9fe", "2852039166", "localhost", "x.localhost", "LOCALHOST.", "::1",
        "[::ffff:127.0.0.1]",
    ],
)  # fmt: skip
def test_addresses_in_disguise_are_no_names(bare: Callable[..., Bare], name: str) -> None:
    for mode in ("allowlist", "open"):
        plane = bare(rule("*.test:1-65535"), mode=mode, hosts={"localhost": "127.0.0.1"})
        assert plane.ask(name).rcode == 3
        assert len(plane.denials()) == 1


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "::ffff:127.0.0.1", "::127.0.0.1",
        "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a9fe:a9fe::1", "fe80::1",
        "fc00::1", "ff02::1", "::", ANY, "::ffff:169.254.169.254",
    ],
)  # fmt: skip
def test_names_that_lead_to_reserved_addresses(
    bare: Callable[..., Bare], decoy: socket.socket, address: str
) -> None:
    port = decoy.getsockname()[1]
    for mode in ("allowlist", "open"):
        plane = bare(rule(f"evil.test:{port}"), mode=mode, hosts={"evil.test": address})
        there = plane.ask("evil.test").an[0].rdata
        assert plane.verdict(there, port) == "deny"
        assert plane.denials()[0].startswith("reserved:")


def test_rebinding_between_the_look_up_and_the_connect(
    bare: Callable[..., Bare], decoy: socket.socket
) -> None:
    port = decoy.getsockname()[1]
    server = NameServer()
    server.records = {"evil.test": [("A", "203.0.113.1", 0)]}
    late = [0.0]
    plane = bare(
        rule(f"evil.test:{port}"), nameserver="127.0.0.1", dns_port=server.port,
        clock=lambda: late[0],
    )  # fmt: skip
    there = plane.ask("evil.test").an[0].rdata
    server.records = {"evil.test": [("A", "127.0.0.1", 0)]}
    late[0] += 5
    assert plane.verdict(there, port) == "deny"
    assert plane.denials() == ["reserved:own"]
    server.close()


def test_an_alias_of_what_a_deny_rule_names(
    bare: Callable[..., Bare], decoy: socket.socket
) -> None:
    port = decoy.getsockname()[1]
    server = NameServer()
    server.records = {
        "nice.test": [("CNAME", "cdn.test", 9)],
        "cdn.test": [("CNAME", "x.bad.test", 9)],
        "x.bad.test": [("A", "127.0.0.1", 9)],
    }
    plane = bare(
        here(f"nice.test:{port}"), rule(f"*.bad.test:{port}", action="deny"),
        nameserver="127.0.0.1", dns_port=server.port,
    )  # fmt: skip
    there = plane.ask("nice.test").an[0].rdata
    assert plane.verdict(there, port) == "deny"
    assert plane.denials() == [f"deny:*.bad.test:{port}/tcp"]
    server.close()


def test_names_near_an_allowed_one(bare: Callable[..., Bare]) -> None:
    server = NameServer()
    plane = bare(
        rule("*.good.test"), rule("exact.test"), nameserver="127.0.0.1", dns_port=server.port
    )
    for name in (
        "good.test", "xgood.test", "good.test.evil.test", "a.exact.test", "exact.test.x",
        "exact", "test", "exact.tes", "exact\0.test", "exact.test\0.evil.test",
        "a.good\u3002test", "ex\u00e4ct.test", "xn--exct-loa.test", "xn--.test", "x" * 63 + ".evil",
    ):  # fmt: skip
        assert plane.ask(name.encode()).rcode == 3, name
    assert server.asked == [], "something left the host"
    for name in ("EXACT.test", "exact.test.", "a.B.good.test", "_x.good.test"):
        assert plane.ask(name).rcode == 3  # truthfully: the server knows no such name
    assert len(server.asked) >= 4
    server.close()


def test_labels_that_are_too_long_end_nothing(bare: Callable[..., Bare]) -> None:
    plane = bare(rule("*.good.test"))
    head = bytes(DNS(rd=1, qd=[]))[:5] + b"\x01" + bytes(6)
    for labels in (b"\x3f" + b"a" * 63, b"\x40" + b"a" * 64, b"\x3f" + b"a" * 20, b"\xc0\x0c"):
        for count in (1, 5, 30):
            query = head + labels * count + b"\0\0\1\0\1"
            plane.send(IP(src=GUEST, dst=GATEWAY) / UDP(sport=5353, dport=53) / Raw(query))
            answer = DNS(bytes(plane.answer()[UDP].payload))
            assert answer.rcode in (1, 3)
    assert plane.ask("x.good.test").rcode in (2, 3)


def test_nothing_is_smuggled_out_in_questions(bare: Callable[..., Bare]) -> None:
    server = NameServer()
    server.records = {"good.test": [("A", "203.0.113.1", 1)]}
    plane = bare(rule("good.test"), nameserver="127.0.0.1", dns_port=server.port)
    rng = random.Random(1)
    for kind in ("A", "AAAA", "TXT", "NULL", "MX", "CNAME", 255, "SRV"):
        secret = rng.randbytes(20).hex()
        for name in (f"{secret}.evil.test", f"{secret}.good.test", f"{secret}"):
            assert plane.ask(name, kind).rcode == 3
    assert plane.ask("good.test", "TXT").ancount == 0
    assert set(server.asked) <= {"good.test"}
    query = DNS(rd=1, qd=DNSQR(qname="x.evil.test"))
    plane.send(IP(src=GUEST, dst="203.0.113.53") / UDP(sport=5, dport=53) / query)
    assert plane.answer()[ICMP].code == 13, "other resolvers are for UDP rules"
    server.close()


def test_addresses_that_were_never_handed_out(bare: Callable[..., Bare]) -> None:
    plane = bare(rule("*.test:1-65535"), rule("0.0.0.0/0:1-65535"), mode="open")
    for address in ("198.18.1.0", "198.18.1.1", "198.18.0.3", "198.19.255.255", "198.18.0.0"):
        assert plane.verdict(address, 443) == "deny"
    assert set(plane.denials()) == {"address:unassigned"}
    plane.send(IP(src=GUEST, dst="198.18.9.9") / UDP(sport=1, dport=9) / b"x")
    assert plane.answer()[ICMP].code == 13


def test_forged_sources(bare: Callable[..., Bare]) -> None:
    plane = bare(rule("0.0.0.0/0:1-65535"), mode="open")
    for source in ("198.18.0.1", "198.18.0.3", "127.0.0.1", "203.0.113.9", ANY):
        for layer in (TCP(flags="S", dport=80), UDP(dport=53), ICMP()):
            plane.send(IP(src=source, dst=GATEWAY) / layer)
    assert plane.packets() == []
    assert plane.plane.counters().denied == 15
    assert set(plane.denials()) == {"source:forged"}


def test_what_is_no_packet_for_us(bare: Callable[..., Bare]) -> None:
    plane = bare()
    whole = bytes(IP(src=GUEST, dst=GATEWAY) / TCP(dport=80, flags="S"))
    bad = [
        whole[:20],
        whole[:39],
        b"\x46" + whole[1:20] + bytes(4) + whole[20:],  # options: source routes and such
        b"\x4f" + whole[1:],
        b"\x05" + whole[1:],
        whole[:2] + b"\xff\xff" + whole[4:],
        whole[:2] + b"\0\x14" + whole[4:],
        whole[:6] + b"\x20\0" + whole[8:],  # fragments
        whole[:6] + b"\0\1" + whole[8:],
        whole[:32] + b"\x40" + whole[33:],  # a TCP header that is too short, or too long
        whole[:32] + b"\xf0" + whole[33:],
        whole[:33] + b"\x03" + whole[34:],  # SYN and FIN
        bytes(IP(src=GUEST, dst=GATEWAY) / UDP(dport=53, len=7) / b"x"),
        bytes(IP(src=GUEST, dst=GATEWAY) / UDP(dport=53, len=999) / b"x"),
    ]
    for packet in bad:
        plane.send(packet)
    assert plane.packets() == []
    assert plane.plane.counters().dropped_frames == len(bad)
    for number in (2, 41, 47, 50, 132):
        plane.send(IP(src=GUEST, dst="203.0.113.1", proto=number) / Raw(bytes(40)))
    assert plane.packets() == [] and set(plane.denials()) == {"protocol:unknown"}
    assert plane.verdict(GATEWAY, 80) == "refused", "and it lives"


def test_ipv6_that_is_put_on_the_link_by_hand(bare: Callable[..., Bare]) -> None:
    plane = bare(rule("[::/0]:1-65535"), mode="open")
    for number, target in enumerate(("2001:db8::1", "::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1")):
        for layer in (TCP(dport=80, flags="S"), UDP(dport=53) / b"x", ICMP()):
            plane.send(IPv6(src="fd00::2", dst=target) / layer)
        assert plane.plane.counters().denied == 3 * (number + 1)
    assert set(plane.denials()) == {"protocol:ipv6"}
    plane.send(IPv6(src="fe80::2", dst="ff02::2") / ICMPv6ND_RS())  # a kernel's own noise
    plane.send(bytes(IPv6(src="fd00::2", dst="::1"))[:39])
    assert plane.packets() == []
    assert (plane.plane.counters().denied, plane.plane.counters().dropped_frames) == (12, 1)


def test_what_another_instance_may_reach_is_nobody_elses(
    bare: Callable[..., Bare], decoy: socket.socket
) -> None:
    """Every instance has the same addresses for itself, and names have addresses by instance."""
    port = decoy.getsockname()[1]
    one = bare(here(f"app.test:{port}"), hosts={"app.test": "203.0.113.1"})
    there = one.ask("app.test").an[0].rdata
    other = bare(rule(f"*.test:{port}"), rule("0.0.0.0/0:1-65535"), mode="open")
    assert other.verdict(there, port) == "deny"
    assert other.denials() == ["address:unassigned"]
    other.send(IP(src=GUEST, dst=GUEST) / TCP(dport=port, flags="S"))
    other.send(IP(src=there, dst=GATEWAY) / TCP(dport=80, flags="S"))
    assert other.plane.counters().denied == 3
    assert one.plane.counters().denied == 0 and one.packets() == []


# -- TLS


def client_hello(name: str | None) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    out = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return out.read()


@pytest.mark.parametrize(
    ("first", "sni_rule", "expected"),
    [
        (client_hello("app.test"), True, "allow"),
        (client_hello("APP.test"), True, "allow"),
        (client_hello("other.test"), True, "sni:mismatch"),
        (client_hello("other.test"), False, "sni:mismatch"),
        (client_hello("a.app.test"), True, "sni:mismatch"),
        (client_hello(None), True, "sni:missing"),
        (client_hello(None), False, "allow"),
        (b"GET / HTTP/1.0\r\n\r\n", True, "sni:missing"),
        (b"SSH-2.0-x\r\n", False, "allow"),
    ],
)
def test_the_server_that_a_tls_client_names(
    bare: Callable[..., Bare],
    monkeypatch: pytest.MonkeyPatch,
    first: bytes,
    sni_rule: bool,
    expected: str,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for module in (opening, deciding):  # no test may listen on 443 itself
            monkeypatch.setattr(module, "TLS_PORT", port)
        plane = bare(here(f"app.test:{port}", sni=sni_rule), hosts={"app.test": "127.0.0.1"})
        there = plane.ask("app.test").an[0].rdata
        found = plane.syn(there, port)
        upstream, _ = listener.accept()
        upstream.settimeout(20)
        seq, ack = 1001, found.seq + 1
        rest = first
        while rest:  # in pieces: nothing may go upstream before the name is known
            piece, rest = rest[:50], rest[50:]
            segment = TCP(sport=plane._port, dport=port, flags="A", seq=seq, ack=ack, window=9000)
            plane.send(IP(src=GUEST, dst=there) / segment / Raw(piece))
            seq += len(piece)
        if expected == "allow":
            got = b""
            while len(got) < len(first):
                got += upstream.recv(65536)
            assert got == first and plane.denials() == []
        else:
            assert plane.denials() == [expected]
            assert "R" in str(plane.packets()[-1][TCP].flags)
            with pytest.raises(ConnectionResetError):
                upstream.recv(1)
        upstream.close()


# -- `policy check` is what is enforced

PORTS = [1, 80, 443, 8080]
NAMES = ["app.test", "b.app.test", "other.test"]
TARGETS = [*NAMES, "*.app.test", "*.test", "127.0.0.0/8", "10.0.0.0/8", "127.0.0.1", "0.0.0.0/0"]


@st.composite
def policies(draw: st.DrawFn) -> tuple[str, list[Rule]]:
    rules: dict[str, Rule] = {}
    for _ in range(draw(st.integers(0, 5))):
        allow = draw(st.booleans())
        ports = draw(st.sampled_from([*map(str, PORTS), "1-65535", "80,443"]))
        made = rule(
            f"{draw(st.sampled_from(TARGETS))}:{ports}", action="allow" if allow else "deny",
            allow_reserved=allow and draw(st.booleans()),
        )  # fmt: skip
        rules[made.id] = made
    return draw(st.sampled_from(["deny", "allowlist", "open"])), list(rules.values())


@settings(max_examples=150, deadline=None)
@given(policies(), st.sampled_from([*NAMES, "127.0.0.1", "10.0.0.1"]), st.sampled_from(PORTS))
def test_what_check_says_is_what_happens(
    tmp_path_factory: pytest.TempPathFactory,
    chosen: tuple[str, list[Rule]],
    where: str,
    port: int,
) -> None:
    mode, rules = chosen
    own = frozenset({ip_network("127.0.0.0/8")})
    bare = Bare(
        tmp_path_factory.mktemp("p"), *rules, mode=mode, hosts=dict.fromkeys(NAMES, "127.0.0.1")
    )
    try:
        named = where in NAMES
        asked = Flow(
            name=where if named else None, address=None if named else where, port=port,
            protocol="tcp", hello="unread", sni=None,
        )  # fmt: skip
        decided = load(policy(*rules, mode=mode))
        expected = decided.decide(asked, own=own)
        if named and expected.verdict == "allow":
            resolved = Flow(
                name=where, address="127.0.0.1", port=port, protocol="tcp", hello="unread", sni=None
            )
            expected = decided.decide(resolved, own=own)
        if named:
            found = bare.ask(where)
            assert (found.rcode == 0) == (decided.decide_name(where).verdict == "allow")
            if found.rcode:
                assert expected.verdict == "deny"
                return
            address = str(found.an[0].rdata)
        else:
            address = where
        told = len(bare.reports)
        if not named and where.startswith("10.") and expected.verdict == "allow":
            return  # it would leave this host, where a test sends nothing
        got = bare.syn(address, port)
        if expected.verdict == "deny":
            assert ICMP in got and got[ICMP].code == 13
            (report,) = bare.reports[told:]
            assert isinstance(report, Denied) and report.rule == expected.rule
        else:
            assert TCP in got and bare.reports[told:] == []
    finally:
        bare.close()


# -- whatever comes


GROWTH = 32 << 20  # bytes, of the plane and of what the test keeps


def _resident() -> int:
    """Of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _fuzz(plane: Bare, count: int, seed: int) -> None:
    rng = random.Random(seed)
    seeds = [
        bytes(IP(src=GUEST, dst=GATEWAY) / UDP(sport=5, dport=53) / DNS(qd=DNSQR(qname="a.test"))),
        bytes(IP(src=GUEST, dst=GATEWAY) / TCP(sport=9, dport=53, flags="S")),
        bytes(IP(src=GUEST, dst=GATEWAY) / TCP(sport=9, dport=53, flags="A") / Raw(bytes(99))),
        bytes(IP(src=GUEST, dst=GATEWAY) / ICMP() / Raw(bytes(30))),
        bytes(IP(src=GUEST, dst="198.18.1.0") / UDP(sport=5, dport=9) / Raw(bytes(30))),
    ]
    batch, settled = b"", 0
    for number in range(count):
        if number == count // 10:
            settled = _resident()
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randrange(0, 5)):
            # The addresses stay, so that nothing leaves this host and much gets in.
            at = rng.choice([*range(12), *range(20, len(data))])
            data[at] = rng.choice([rng.randrange(256), 0, 255, 128])
        if rng.random() < 0.1:
            del data[rng.randrange(len(data)) :]
        if data:
            batch += (10 + len(data)).to_bytes(4, "little") + rng.randbytes(10) + data
        if number % 100 == 99:
            plane.link.setblocking(True)
            plane.link.sendall(batch)
            batch = b""
            plane.plane.run()
            plane.link.setblocking(False)
            try:
                while plane.link.recv(1 << 20):
                    pass
            except BlockingIOError:
                pass
    counted = plane.plane.counters()
    assert counted.flows <= 8192 and plane.plane.linked
    assert _resident() - settled < GROWTH
    assert len(plane.reports) < count / 10 + 200, "the journal was flooded"


def test_no_packets_break_it(bare: Callable[..., Bare]) -> None:
    _fuzz(bare(here("a.test"), hosts={"a.test": "127.0.0.1"}, clock=lambda: 0.0), 20_000, 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_million_packets_break_it(bare: Callable[..., Bare]) -> None:
    _fuzz(bare(here("a.test"), hosts={"a.test": "127.0.0.1"}), 3_000_000, 2)


def test_frames_in_any_pieces(bare: Callable[..., Bare]) -> None:
    plane = bare()
    echo = bytes(IP(src=GUEST, dst=GATEWAY) / ICMP(id=1) / Raw(bytes(500)))
    frame = (10 + len(echo)).to_bytes(4, "little") + bytes(10) + echo
    rng = random.Random(3)
    stream = frame * 40
    while stream:
        size = rng.choice([1, 2, 3, 5, 100, 1000])
        plane.link.sendall(stream[:size])
        stream = stream[size:]
        plane.plane.run()
    assert len(plane.packets()) == 40


def _garbage(bare: Callable[..., Bare], links: int, seed: int) -> int:
    """Streams of frames that are right, bent or random; the plane takes the next one after
    each that it ends. Returns how many bytes there were."""
    rng = random.Random(seed)
    plane = bare(here("a.test"), hosts={"a.test": "127.0.0.1"}, clock=lambda: 0.0)
    echo = bytes(IP(src=GUEST, dst=GATEWAY) / ICMP(id=1) / Raw(bytes(60)))
    total = ended = settled = 0
    for number in range(links):
        if number == links // 10:
            settled = _resident()
        ours, theirs = socket.socketpair()
        plane.plane.link(theirs)
        ours.setblocking(False)
        stream = b""
        for _ in range(rng.randrange(60)):
            frame = bytearray((10 + len(echo)).to_bytes(4, "little") + bytes(10) + echo)
            if rng.random() < 0.5:
                frame[rng.choice([0, 0, 0, *range(len(frame))])] = rng.randrange(256)
            if rng.random() < 0.02:
                frame = bytearray(rng.randbytes(rng.randrange(1, 200)))
            if rng.random() < 0.01:
                frame[:4] = rng.choice([0, 10, 11, 65546, 1 << 20, 1 << 31, 0xFFFFFFFF]).to_bytes(
                    4, "little"
                )
            stream += frame
        total += len(stream)
        while stream and plane.plane.linked:
            size = rng.choice([1, 3, 100, 5000, 50_000])
            ours.sendall(stream[:size])
            stream = stream[size:]
            plane.plane.run()
        with ours:
            ended += not plane.plane.linked
    assert links // 10 < ended < links, "one of both was not tried"
    assert _resident() - settled < GROWTH
    assert plane.plane.counters().flows <= 8192
    assert len(plane.reports) < links + 200, "the journal was flooded"
    return total


def test_no_stream_of_frames_breaks_it(bare: Callable[..., Bare]) -> None:
    _garbage(bare, 300, 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_million_frames_break_it(bare: Callable[..., Bare]) -> None:
    """Thirty frames for each link."""
    assert _garbage(bare, 40_000, 2) > 100_000_000


def test_a_flood_costs_what_it_may(bare: Callable[..., Bare]) -> None:
    """SYNs to closed ports, look-ups of denied names, datagrams to nowhere: no state stays."""
    plane = bare(clock=lambda: 0.0)
    for number in range(300):
        plane.send(
            IP(src=GUEST, dst="203.0.113.1") / TCP(sport=1024 + number, dport=80, flags="S"),
            IP(src=GUEST, dst="203.0.113.1") / UDP(sport=1024 + number, dport=80) / b"x",
        )
        query = DNS(qd=DNSQR(qname=f"{number}.evil.test"))
        plane.send(IP(src=GUEST, dst=GATEWAY) / UDP(sport=5, dport=53) / query)
        plane.packets()
    counted = plane.plane.counters()
    assert counted.flows == 0 and counted.denied == 900
    assert len(plane.reports) < 100, "the journal was flooded"
