"""DNS messages, with scapy as the other side."""

from __future__ import annotations

import random

import pytest
from scapy.layers.dns import DNS, DNSQR, DNSRR, DNSRROPT

from agent_box.netstack import dnswire
from agent_box.netstack.dnswire import (
    AAAA,
    NOERROR,
    NXDOMAIN,
    A,
    Malformed,
    ask,
    encode_name,
    error,
    pointer_reply,
    read_query,
    read_reply,
    reply,
)


def query(name: str, kind: str = "A", **more: object) -> bytes:
    return bytes(DNS(id=77, rd=1, qd=DNSQR(qname=name, qtype=kind), **more))


def test_a_question_is_read() -> None:
    found = read_query(query("Files.Example.COM"))
    assert (found.id, found.name, found.kind, found.size) == (77, "files.example.com", A, None)
    assert found.internet and found.standard
    sized = read_query(query("a.test", ar=DNSRROPT(rclass=1232)))
    assert sized.size == 1232
    assert read_query(query("a.test", ar=DNSRROPT(rclass=100))).size == 512
    assert read_query(query("a.test", ar=DNSRROPT(rclass=65535))).size == 4096


def test_bytes_that_no_host_name_has_are_spelled_out() -> None:
    labels = [b"a.b", b"c\0", "é".encode(), b"d\\"]
    wire = b"".join(bytes((len(label),)) + label for label in labels) + b"\0"
    message = query("x")[:12] + wire + b"\0\1\0\1"
    assert read_query(message).name == "a\\046b.c\\000.\\195\\169.d\\092"


@pytest.mark.parametrize(
    "message",
    [
        b"",
        bytes(11),
        bytes(12),
        query("a.test")[:-1],
        query("a.test", qr=1),
        query("a.test")[:4] + b"\0\2" + query("a.test")[6:],
        query("a.test")[:12] + b"\xc0\x0c\0\1\0\1",
        query("a.test")[:12] + b"\x40" + bytes(70),
        query("a.test")[:12] + b"\x3f" + bytes(20),
        query("a.test")[:12] + b"\x01a" * 200 + b"\0\0\1\0\1",
        query("a.test", an=DNSRR(rrname="a", rdata="1.2.3.4")),
    ],
)
def test_what_is_no_question_is_refused(message: bytes) -> None:
    with pytest.raises(Malformed):
        read_query(message)


def test_an_answer_is_what_scapy_reads() -> None:
    asked = read_query(query("Files.test", ar=DNSRROPT(rclass=1232)))
    found = DNS(reply(asked, NOERROR, (b"\xc6\x12\1\0",), ttl=60))
    assert (found.id, found.qr, found.rd, found.ra, found.rcode) == (77, 1, 1, 1, 0)
    assert found.qd[0].qname == b"Files.test." and found.an[0].rrname == b"Files.test."
    assert (found.an[0].rdata, found.an[0].ttl) == ("198.18.1.0", 60)
    assert found.ar[0].type == 41
    empty = DNS(reply(asked, NXDOMAIN))
    assert (empty.rcode, empty.ancount) == (3, 0)
    named = DNS(pointer_reply(read_query(query("1.1.18.198.in-addr.arpa", "PTR")), "a.test", ttl=9))
    assert named.an[0].rdata == b"a.test."


def test_what_does_not_fit_is_marked() -> None:
    asked = read_query(query("a.test"))
    many = tuple(bytes((1, 2, 3, i)) for i in range(90))
    found = DNS(reply(asked, NOERROR, many, limit=512))
    assert found.tc == 1 and found.ancount == 0
    assert DNS(reply(asked, NOERROR, many)).ancount == 90


def test_an_error_needs_no_question_and_answers_no_answer() -> None:
    found = DNS(error(b"\0\7\1\0" + bytes(8), dnswire.FORMERR) or b"")
    assert (found.id, found.qr, found.rcode, found.qdcount) == (7, 1, 1, 0)
    assert error(b"\0\7\x81\0" + bytes(8), 1) is None
    assert error(bytes(5), 1) is None


def test_our_question_is_what_scapy_reads() -> None:
    found = DNS(ask(5, "files.example.com", AAAA))
    assert (found.id, found.rd, found.qd[0].qname) == (5, 1, b"files.example.com.")
    assert found.qd[0].qtype == 28 and found.ar[0].rclass == 4096


def test_names_that_do_not_fit() -> None:
    for name in ("a..b", ".", "x" * 64, ".".join(["abcdefgh"] * 30)):
        with pytest.raises(Malformed):
            encode_name(name)
    assert encode_name("") == b"\0"


def answer(*records: DNSRR, name: str = "a.test", **more: object) -> bytes:
    return bytes(DNS(id=5, qr=1, qd=DNSQR(qname=name), an=list(records), **more))


def test_addresses_are_found_along_aliases_and_nowhere_else() -> None:
    found = read_reply(
        answer(
            DNSRR(rrname="A.test", type="CNAME", rdata="b.test", ttl=50),
            DNSRR(rrname="evil.test", rdata="6.6.6.6", ttl=1),
            DNSRR(rrname="b.test", type="CNAME", rdata="c.test", ttl=40),
            DNSRR(rrname="c.test", rdata="192.0.2.1", ttl=300),
            DNSRR(rrname="c.test", rdata="192.0.2.2", ttl=200),
            DNSRR(rrname="c.test", type="AAAA", rdata="2001:db8::1", ttl=1),
        ),
        5, "a.test", A,
    )  # fmt: skip
    assert found.addresses == ("192.0.2.1", "192.0.2.2")
    assert found.aliases == ("b.test", "c.test") and found.ttl == 40


def test_aliases_in_a_circle_end() -> None:
    found = read_reply(
        answer(
            DNSRR(rrname="a.test", type="CNAME", rdata="b.test"),
            DNSRR(rrname="b.test", type="CNAME", rdata="a.test"),
        ),
        5, "a.test", A,
    )  # fmt: skip
    assert found.addresses == ()


def test_an_answer_to_something_else_is_refused() -> None:
    good = answer(DNSRR(rrname="a.test", rdata="192.0.2.1"))
    for number, name, kind in ((6, "a.test", A), (5, "b.test", A), (5, "a.test", AAAA)):
        with pytest.raises(Malformed):
            read_reply(good, number, name, kind)
    with pytest.raises(Malformed):
        read_reply(ask(5, "a.test", A), 5, "a.test", A)


def test_a_cut_answer_may_end_anywhere() -> None:
    whole = answer(DNSRR(rrname="a.test", rdata="192.0.2.1"), tc=1)
    for end in range(24, len(whole)):
        assert read_reply(whole[:end], 5, "a.test", A).truncated


def _fuzz(count: int, seed: int) -> None:
    rng = random.Random(seed)
    seeds = [
        query("files.example.com", ar=DNSRROPT(rclass=1232)),
        answer(
            DNSRR(rrname="a.test", type="CNAME", rdata="b.test"),
            DNSRR(rrname="b.test", rdata="192.0.2.1"),
        ),
    ]
    for _ in range(count):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(data))
            if rng.random() < 0.7:
                data[at] = rng.choice([rng.randrange(256), 0xC0, 0, 255])
            else:
                del data[at : at + rng.randrange(1, 9)]
            if not data:
                break
        for read in (read_query, lambda m: read_reply(m, 5, "a.test", A)):
            try:
                found = read(bytes(data))
            except Malformed:
                continue
            if isinstance(found, dnswire.Query):
                assert len(found.name) <= 4 * 255
                DNS(reply(found, NOERROR, (b"\1\2\3\4",)))
            else:
                assert len(found.addresses) <= 256
        out = error(bytes(data), 1)
        assert out is None or len(out) == 12


def test_nothing_breaks_it() -> None:
    _fuzz(3_000, 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_of_a_million_breaks_it() -> None:
    _fuzz(1_000_000, 2)
