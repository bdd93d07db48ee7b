"""Names, networks and ports as operators write them, each in one form or refused."""

from __future__ import annotations

import re
from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.config import egress
from agent_box.config.egress import Protocol, Target

LABEL = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True).filter(
    lambda label: not label.startswith("xn--")
)
NAME = st.builds(
    lambda labels, top: ".".join([*labels, top]),
    st.lists(LABEL, min_size=0, max_size=4),
    st.from_regex(r"[a-z]{2,10}", fullmatch=True),
)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("Example.COM", "example.com"),
        ("example.com.", "example.com"),
        ("a_b.example.com", "a_b.example.com"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
        ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
        ("faß.example", "xn--fa-hia.example"),  # a name of its own, not fass
        ("例え。テスト", "xn--r8jz45g.xn--zckzah"),
        ("localhost", "localhost"),
        ("1password.com", "1password.com"),
        ("x" * 63 + ".example", "x" * 63 + ".example"),
    ],
)
def test_a_name_has_one_form(text: str, form: str) -> None:
    assert egress.host(text) == form
    assert egress.host(form) == form


@pytest.mark.parametrize(
    "text",
    [
        "", ".", "..", ".example.com", "example..com", "example.com..", "-a.example", "a-.example",
        "x" * 64 + ".example", ".".join(["x" * 49] * 6), "a b.example", "a\x00.example", "a/b",
        "a\n.example", "exa\u202emple.com", "*.example.com", "*", "127.1", "0x7f000001",
        "2130706433", "0177.0.0.1", "1.2.3.4", "256.256.256.256", "foo.0x1f", "foo.1",
        "xn--.example", "xn--a-.example", "xn--zzzzzzzzzzzzzzzzzz9999999.example", "xn--example-.c",
        "[::1]", "::1", "exa%6dple.com", "http://example.com", "user@example.com", "example.com:1",
        "\u2100.example", "a\u200bb.example", "ex\u0430mple\u0000.com",
    ],
)  # fmt: skip
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError) as error:
        egress.host(text)
    assert "\n" not in str(error.value)


@given(NAME)
def test_case_and_a_trailing_dot_mean_nothing(name: str) -> None:
    assert egress.host(name.upper() + ".") == egress.host(name) == name


@given(st.text(max_size=300))
def test_any_text_is_a_name_in_one_form_or_refused(text: str) -> None:
    try:
        form = egress.host(text, wildcard=True)
    except ValueError:
        return
    assert re.fullmatch(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*", form)
    assert egress.host(form, wildcard=True) == form


@pytest.mark.parametrize("text", ["*.example.com", "*.EXAMPLE.com."])
def test_a_wildcard_only_where_it_may_be(text: str) -> None:
    assert egress.host(text, wildcard=True) == "*.example.com"
    with pytest.raises(ValueError):
        egress.host(text)


@pytest.mark.parametrize(
    "text", ["*", "*.", "*.*.example.com", "a*.example.com", "a.*.example.com"]
)
def test_no_other_wildcard(text: str) -> None:
    with pytest.raises(ValueError):
        egress.host(text, wildcard=True)


def target(host: str | None, network: str | None, ports: object, protocol: str) -> Target:
    return Target(
        host=host,
        network=None if network is None else ip_network(network),
        ports=egress.ports(ports),
        protocol=Protocol(protocol),
    )


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("example.com", target("example.com", None, [443], "tcp")),
        ("example.com:80", target("example.com", None, [80], "tcp")),
        ("example.com/udp", target("example.com", None, [443], "udp")),
        ("example.com:53/UDP", target("example.com", None, [53], "udp")),
        ("*.example.com:80,90-99", target("*.example.com", None, [80, "90-99"], "tcp")),
        ("192.0.2.1", target(None, "192.0.2.1/32", [443], "tcp")),
        ("192.0.2.0/24", target(None, "192.0.2.0/24", [443], "tcp")),
        ("192.0.2.0/24:22/tcp", target(None, "192.0.2.0/24", [22], "tcp")),
        ("2001:db8::1", target(None, "2001:db8::1/128", [443], "tcp")),
        ("[2001:db8::1]:22", target(None, "2001:db8::1/128", [22], "tcp")),
        ("[2001:db8::/32]:22/udp", target(None, "2001:db8::/32", [22], "udp")),
        ("2001:db8::/32", target(None, "2001:db8::/32", [443], "tcp")),
        ("[::ffff:192.0.2.1]:80", target(None, "192.0.2.1/32", [80], "tcp")),
    ],
)  # fmt: skip
def test_targets(text: str, read: Target) -> None:
    assert egress.parse_target(text, wildcard=True) == read
    assert egress.parse_target(str(read), wildcard=True) == read


@pytest.mark.parametrize(
    "text",
    [
        "", ":443", "example.com:", "example.com:0", "example.com:65536", "example.com:-1",
        "example.com:443:80", "example.com:http", "example.com:+80", "example.com:８０",
        "example.com/icmp", "example.com:80/", "192.0.2.1/24", "192.0.2.0/255.255.255.0",
        "[192.0.2.1]:80", "[::1", "[::1]80", "[example.com]:80", "127.1:80", "0x7f.1:80",
        "example.com:9-8", "example.com:1,", "fe80::1%lo", "[fe80::1%lo]:80",
        "example.com:" + ",".join(map(str, range(1, 40, 2))),
    ],
)  # fmt: skip
def test_what_is_no_target_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError) as error:
        egress.parse_target(text, wildcard=True)
    assert "\n" not in str(error.value)


@given(st.lists(st.tuples(st.integers(1, 65535), st.integers(0, 300)), min_size=1, max_size=16))
def test_ports_are_merged_and_lose_nothing(pairs: list[tuple[int, int]]) -> None:
    ranges = [(first, min(first + more, 65535)) for first, more in pairs]
    read = egress.ports([f"{a}-{b}" for a, b in ranges])
    assert {p for a, b in ranges for p in range(a, b + 1)} == {
        p for a, b in read for p in range(a, b + 1)
    }
    assert all(a[1] + 1 < b[0] for a, b in zip(read, read[1:], strict=False))


@pytest.mark.parametrize(
    "value", [[], "443", 443, [True], [None], [1.5], [0], [65536], ["a"], [[1]]]
)
def test_what_are_no_ports_is_refused(value: object) -> None:
    with pytest.raises(ValueError):
        egress.ports(value)


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("broker.internal", True),
        ("*.broker.internal", True),
        ("a.broker.internal", True),
        ("*.a.broker.internal", True),
        ("notbroker.internal", False),
        ("broker.internal.example", False),
        ("*.internal", False),
    ],
)
def test_the_brokers_zone(name: str, inside: bool) -> None:
    assert egress.in_broker_zone(name) is inside
