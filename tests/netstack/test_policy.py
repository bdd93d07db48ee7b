"""The policy function: what it must hold for every policy and every flow."""

from __future__ import annotations

import random
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_box.config import egress
from agent_box.config.addresses import reserved
from agent_box.config.egress import Action
from agent_box.netstack.contract import Flow, Policy, Rule
from agent_box.netstack.policy import PolicyInvalid, load

Hello = Literal["unread", "no-name", "named"]
NAMES = ["example.com", "a.example.com", "b.a.example.com", "example.org", "localhost"]
WILD = ["*.example.com", "*.a.example.com", "*.org", "*.com"]
NETWORKS = ["192.0.2.0/24", "8.8.8.0/24", "8.8.8.8", "8.8.0.0/16", "10.0.0.0/8", "0.0.0.0/0",
            "2606:4700::/32", "::/0", "64:ff9b::/96"]  # fmt: skip
ADDRESSES = ["8.8.8.8", "8.8.4.4", "10.1.2.3", "127.0.0.1", "169.254.169.254", "1.1.1.1",
             "2606:4700::1", "64:ff9b::808:808", "64:ff9b::7f00:1", "::ffff:8.8.8.8",
             "2002:808:808::1", "198.18.0.7", "::1"]  # fmt: skip


def rule(
    action: str,
    target: str,
    *,
    sni: bool = True,
    allow_reserved: bool = False,
) -> Rule:
    read = egress.parse_target(target, wildcard=True)
    fields = egress.rule_fields(Action(action), read, sni=sni, allow_reserved=allow_reserved)
    return Rule(**fields)


def policy(mode: str, *rules: Rule, endpoints: tuple[str, ...] = (), generation: int = 1) -> Policy:
    return msgspec.convert(
        {
            "generation": generation,
            "mode": mode,
            "allow_open": mode == "open",
            "rules": list(rules),
            "endpoints": list(endpoints),
        },
        Policy,
    )


def flow(
    where: str, *, address: str | None = None, hello: Hello = "unread", sni: str | None = None
) -> Flow:
    """`where` is HOST[:PORT][/proto]; of a name, `address` is what it resolved to."""
    target = egress.parse_target(where, wildcard=False)
    if target.network is not None:
        address = str(target.network.network_address)
    return Flow(
        name=target.host,
        address=address,
        port=target.ports[0][0],
        protocol=target.protocol.value,
        hello=hello,
        sni=sni,
    )


def says(policy_: Policy, flow_: Flow, own: tuple[str, ...] = ()) -> tuple[str, str]:
    verdict = load(policy_).decide(flow_, own={ip_network(a) for a in own})
    return verdict.verdict, verdict.rule


RULE = st.builds(
    lambda action, where, ports, proto, sni, leave: rule(
        action,
        f"[{where}]:{ports}/{proto}" if ":" in where else f"{where}:{ports}/{proto}",
        sni=sni or action == "deny",
        allow_reserved=leave and action == "allow",
    ),
    st.sampled_from(["allow", "allow", "deny"]),
    st.sampled_from(NAMES + WILD + NETWORKS),
    st.sampled_from(["443", "80", "443,80", "1-65535", "442-444"]),
    st.sampled_from(["tcp", "tcp", "udp"]),
    st.booleans(),
    st.booleans(),
)
POLICY = st.builds(
    lambda mode, rules, ends: policy(mode, *{r.id: r for r in rules}.values(), endpoints=ends),
    st.sampled_from(["deny", "allowlist", "allowlist", "open"]),
    st.lists(RULE, max_size=8),
    st.sampled_from([(), ("github",)]),
)


@st.composite
def flows(draw: st.DrawFn) -> Flow:
    name = draw(st.none() | st.sampled_from([*NAMES, "github.broker.internal", "Example.COM."]))
    address = draw(
        st.sampled_from(ADDRESSES) if name is None else st.none() | st.sampled_from(ADDRESSES)
    )
    hello: Hello = draw(st.sampled_from(["unread", "no-name", "named"]))
    return Flow(
        name=name,
        address=address,
        port=draw(st.sampled_from([443, 80, 442, 22])),
        protocol=draw(st.sampled_from(["tcp", "tcp", "udp"])),
        hello=hello,
        sni=draw(st.sampled_from(NAMES)) if hello == "named" else None,
    )


@given(POLICY, flows(), st.randoms(use_true_random=False))
def test_the_order_of_rules_means_nothing(p: Policy, f: Flow, shuffle: random.Random) -> None:
    rules = list(p.rules)
    shuffle.shuffle(rules)
    other = msgspec.structs.replace(p, rules=rules)
    assert load(p).decide(f, own=()) == load(other).decide(f, own=())


@given(POLICY, flows(), RULE)
def test_a_further_deny_rule_never_allows(p: Policy, f: Flow, r: Rule) -> None:
    before = load(p).decide(f, own=())
    deny = egress.rule_id(Action.DENY, _target(r), sni=True, allow_reserved=False)
    r = msgspec.structs.replace(r, action="deny", id=deny, sni=True, allow_reserved=False)
    if any(old.id == r.id for old in p.rules):
        return
    after = load(msgspec.structs.replace(p, rules=[*p.rules, r])).decide(f, own=())
    if before.verdict == "deny":
        assert after.verdict == "deny"
    else:
        assert after == before or after.rule == r.id


@given(POLICY, flows())
def test_deny_wins(p: Policy, f: Flow) -> None:
    """Whatever else the policy says, a deny rule that matches by itself denies."""
    if f.name is not None and "broker.internal" in f.name:
        return
    rules = load(p)
    verdict = rules.decide(f, own=())
    for r in p.rules:
        alone = load(msgspec.structs.replace(p, mode="open", allow_open=True, rules=[r]))
        if r.action == "deny" and alone.decide(f, own=()).rule == r.id:
            assert verdict.verdict == "deny"
            assert verdict.rule.startswith("deny:")


@given(POLICY, flows())
def test_to_know_more_never_allows(p: Policy, f: Flow) -> None:
    """A flow is judged by its name, then its address, then its ClientHello."""
    rules = load(p)
    full = rules.decide(f, own=())
    if full.verdict == "allow":
        early = msgspec.structs.replace(f, hello="unread", sni=None)
        assert rules.decide(early, own=()).verdict == "allow"
        if f.name is not None:
            earlier = msgspec.structs.replace(early, address=None)
            assert rules.decide(earlier, own=()).verdict == "allow"
            assert rules.decide_name(f.name).verdict == "allow"


@settings(max_examples=60)
@given(POLICY, st.sampled_from([*NAMES, "x.org", "github.broker.internal", "bad_.127.1"]))
def test_a_name_may_be_looked_up_when_some_flow_to_it_may_be(p: Policy, name: str) -> None:
    rules = load(p)
    some = any(
        rules.decide(
            Flow(name=name, address=None, port=port, protocol=proto, hello="unread", sni=None),
            own=(),
        ).verdict
        == "allow"
        for port in (1, 79, 80, 81, 441, 442, 443, 444, 445, 65535)
        for proto in ("tcp", "udp")
    )
    assert (rules.decide_name(name).verdict == "allow") is some


@given(POLICY, flows())
def test_a_reserved_destination_needs_leave(p: Policy, f: Flow) -> None:
    verdict = load(p).decide(f, own=())
    if f.address is None or (f.name or "").endswith("broker.internal"):
        return
    if reserved(ip_address(f.address)) is not None and verdict.verdict == "allow":
        assert verdict.rule.endswith("+reserved")


@given(POLICY, flows())
def test_deny_and_allowlist_allow_nothing_by_themselves(p: Policy, f: Flow) -> None:
    verdict = load(p).decide(f, own=())
    if verdict.verdict == "allow" and p.mode != "open":
        assert verdict.rule.startswith("broker:") or (
            p.mode == "allowlist" and verdict.rule in {r.id for r in p.rules if r.action == "allow"}
        )


@given(
    POLICY,
    st.builds(
        Flow,
        name=st.none() | st.text(max_size=80),
        address=st.none() | st.text(max_size=50),
        port=st.integers(-(2**63), 2**63),
        protocol=st.sampled_from(["tcp", "udp"]),
        hello=st.sampled_from(["unread", "no-name", "named"]),
        sni=st.none() | st.text(max_size=80),
    ),
)
def test_text_of_a_guest_is_never_more_than_denied(p: Policy, f: Flow) -> None:
    verdict = load(p).decide(f, own=())
    if verdict.verdict == "allow":
        assert f.name is not None or f.address is not None
        assert f.name is None or egress.host(f.name)
        assert f.address is None or ip_address(f.address)


@given(POLICY)
def test_it_is_the_same_after_a_way_over_the_wire(p: Policy) -> None:
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(p), type=Policy, strict=True)
    assert again == p
    load(again)


def _target(r: Rule) -> egress.Target:
    host = r.host if r.host is not None else str(r.network)
    where = f"[{host}]" if ":" in host else host
    return egress.parse_target(
        f"{where}:{egress.ports_text(tuple(r.ports))}/{r.protocol}", wildcard=True
    )


@pytest.mark.parametrize(
    ("where", "verdict"),
    [
        ("a.example.com", "allow"),
        ("b.a.example.com", "allow"),
        ("A.EXAMPLE.com.", "allow"),
        ("example.com", "deny"),  # the apex is not below itself
        ("notexample.com", "deny"),
        ("example.com.evil.test", "deny"),
        ("a.example.com:80", "deny"),
        ("a.example.com/udp", "deny"),
    ],
)
def test_a_wildcard(where: str, verdict: str) -> None:
    assert says(policy("allowlist", rule("allow", "*.example.com")), flow(where))[0] == verdict


def test_a_name_in_another_alphabet_is_its_a_label() -> None:
    p = policy("allowlist", rule("allow", "bücher.example"))
    assert says(p, flow("xn--bcher-kva.example"))[0] == "allow"
    assert says(p, flow("XN--BCHER-KVA.EXAMPLE."))[0] == "allow"
    assert says(p, flow("bucher.example"))[0] == "deny"


def test_the_most_specific_allow_rule_governs() -> None:
    wide = rule("allow", "*.example.com", sni=False, allow_reserved=True)
    p = policy(
        "allowlist", wide, rule("allow", "*.a.example.com"), rule("allow", "x.a.example.com:443,80")
    )
    assert says(p, flow("z.example.com", address="10.0.0.1")) == ("allow", wide.id)
    assert says(p, flow("z.a.example.com", address="10.0.0.1")) == ("deny", "reserved:private")
    assert says(p, flow("x.a.example.com"))[1].startswith("allow:x.a.example.com:80,443/tcp")
    narrow = rule("allow", "8.8.8.8", sni=False)
    p = policy("allowlist", rule("allow", "8.8.0.0/16"), narrow)
    assert says(p, flow("8.8.8.8", hello="no-name")) == ("allow", narrow.id)
    assert says(p, flow("8.8.8.9", hello="no-name")) == ("deny", "sni:missing")


def test_of_two_that_are_alike_the_stricter_governs() -> None:
    p = policy("allowlist", rule("allow", "example.com", sni=False), rule("allow", "example.com"))
    assert says(p, flow("example.com", hello="no-name")) == ("deny", "sni:missing")


@pytest.mark.parametrize("form", ["10.0.0.5", "::ffff:10.0.0.5", "64:ff9b::a00:5", "2002:a00:5::1",
                                  "2001:0:101:101::f5ff:fffa", "127.0.0.1", "::1"])  # fmt: skip
def test_a_name_that_leads_into_a_reserved_range_is_refused(form: str) -> None:
    p = policy("allowlist", rule("allow", "example.com"))
    assert says(p, flow("example.com"))[0] == "allow"
    verdict, why = says(p, flow("example.com", address=form))
    assert verdict == "deny" and why.startswith("reserved:")
    assert says(policy("open"), flow("example.com", address=form))[0] == "deny"
    leave = policy("allowlist", rule("allow", "example.com", allow_reserved=True))
    assert says(leave, flow("example.com", address=form))[0] == "allow"


@pytest.mark.parametrize("form", ["10.0.0.5", "::ffff:10.0.0.5", "64:ff9b::a00:5", "2002:a00:5::1"])
def test_a_deny_rule_meets_every_form_of_its_addresses(form: str) -> None:
    everything = rule("allow", "example.com", allow_reserved=True)
    bare = [
        rule("allow", "0.0.0.0/0", allow_reserved=True),
        rule("allow", "::/0", allow_reserved=True),
    ]
    denied = rule("deny", "10.0.0.0/24")
    p = policy("allowlist", everything, *bare, denied)
    assert says(p, flow("example.com", address=form)) == ("deny", denied.id)
    assert says(p, flow(f"[{form}]:443" if ":" in form else form)) == ("deny", denied.id)


def test_the_hosts_own_addresses_are_reserved() -> None:
    p = policy("open", rule("allow", "1.1.1.1:22"))
    assert says(p, flow("1.1.1.1:22"))[0] == "allow"
    assert says(p, flow("1.1.1.1:22"), own=("1.1.1.1",)) == ("deny", "reserved:own")
    assert says(p, flow("[64:ff9b::101:101]:22"), own=("1.1.1.1",)) == ("deny", "reserved:own")
    leave = policy("open", rule("allow", "1.1.1.1:22", allow_reserved=True))
    assert says(leave, flow("1.1.1.1:22"), own=("1.1.1.1",))[0] == "allow"


def test_localhost_is_this_host_whatever_it_resolves_to() -> None:
    for name in ("localhost", "a.localhost", "LOCALHOST."):
        assert says(policy("open"), flow(name)) == ("deny", "reserved:loopback")


def test_a_network_rule_does_not_open_names() -> None:
    p = policy("allowlist", rule("allow", "8.8.8.0/24"))
    assert says(p, flow("8.8.8.8"))[0] == "allow"
    assert says(p, flow("example.com", address="8.8.8.8")) == ("deny", "mode:allowlist")


def test_sni() -> None:
    p = policy("allowlist", rule("allow", "example.com"), rule("allow", "example.com:8443"))
    assert says(p, flow("example.com", hello="named", sni="example.com"))[0] == "allow"
    assert says(p, flow("example.com", hello="named", sni="EXAMPLE.com."))[0] == "allow"
    assert says(p, flow("example.com", hello="named", sni="evil.test")) == ("deny", "sni:mismatch")
    assert says(p, flow("example.com", hello="named", sni="a b")) == ("deny", "sni:invalid")
    assert says(p, flow("example.com", hello="no-name")) == ("deny", "sni:missing")
    assert says(p, flow("example.com:8443", hello="no-name"))[0] == "allow"
    loose = policy("allowlist", rule("allow", "example.com", sni=False))
    assert says(loose, flow("example.com", hello="no-name"))[0] == "allow"
    assert says(loose, flow("example.com", hello="named", sni="evil.test"))[0] == "deny"


def test_a_denied_name_is_not_reached_by_naming_it_in_tls_only() -> None:
    denied = rule("deny", "*.evil.test")
    p = policy("open", denied)
    assert says(p, flow("1.1.1.1", hello="named", sni="x.evil.test")) == ("deny", denied.id)
    assert says(p, flow("fine.test", hello="named", sni="x.evil.test")) == ("deny", denied.id)


def test_broker_endpoints() -> None:
    p = policy("deny", endpoints=("github",))
    assert says(p, flow("github.broker.internal:80")) == ("allow", "broker:github")
    assert says(p, flow("github.broker.internal")) == ("deny", "broker:github")
    assert says(p, flow("other.broker.internal:80")) == ("deny", "broker:unknown")
    assert says(policy("open"), flow("broker.internal:80")) == ("deny", "broker:unknown")


def test_modes() -> None:
    allow = rule("allow", "example.com")
    assert says(policy("deny", allow), flow("example.com")) == ("deny", "mode:deny")
    assert says(policy("allowlist", allow), flow("example.com")) == ("allow", allow.id)
    assert says(policy("allowlist"), flow("example.com")) == ("deny", "mode:allowlist")
    assert says(policy("open"), flow("example.com:22")) == ("allow", "mode:open")
    assert says(policy("open"), flow("example.com/udp")) == ("allow", "mode:open")


def test_ids_are_readable_and_hold_everything() -> None:
    assert rule("allow", "Example.com").id == "allow:example.com:443/tcp"
    assert rule("deny", "[::ffff:10.0.0.0/104]:443").id == "deny:10.0.0.0/8:443/tcp"
    assert rule("allow", "[2606:4700::/32]:53/udp", sni=False, allow_reserved=True).id == (
        "allow:[2606:4700::/32]:53/udp+no-sni+reserved"
    )


def changed(r: Rule, **fields: Any) -> Policy:
    return policy("allowlist", msgspec.structs.replace(r, **fields))


@pytest.mark.parametrize(
    "p",
    [
        changed(rule("allow", "example.com"), host="Example.com"),
        changed(rule("allow", "example.com"), host=None),
        changed(rule("allow", "example.com"), network="10.0.0.0/8"),
        changed(rule("allow", "example.com"), id="x"),
        changed(rule("allow", "example.com"), allow_reserved=True),
        changed(rule("allow", "example.com"), sni=False),
        policy("allowlist", rule("deny", "example.com", sni=False)),
        policy("allowlist", rule("deny", "example.com", allow_reserved=True)),
        changed(rule("allow", "example.com"), ports=[]),
        changed(rule("allow", "example.com"), ports=[(443, 80)]),
        changed(rule("allow", "example.com"), ports=[(0, 443)]),
        changed(rule("allow", "10.0.0.0/8"), network="10.0.0.1/8"),
        changed(rule("allow", "10.0.0.0/8"), network="0x0a000000/8"),
        changed(rule("allow", "github.broker.internal")),
        changed(rule("allow", "*.broker.internal")),
        policy("allowlist", rule("allow", "example.com"), rule("allow", "example.com")),
        policy("allowlist", endpoints=("a", "a")),
        policy("allowlist", endpoints=("a b",)),
        policy("allowlist", generation=0),
        msgspec.structs.replace(policy("open"), allow_open=False),
        policy("allowlist", *(rule("allow", f"h{n}.example") for n in range(egress.RULES_MAX + 1))),
    ],
)
def test_a_policy_that_is_not_fully_understood_is_refused(p: Policy) -> None:
    with pytest.raises(PolicyInvalid) as error:
        load(p)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", [f.name for f in msgspec.structs.fields(Policy)])
def test_a_policy_without_a_field_is_not_a_policy(field: str) -> None:
    built = msgspec.to_builtins(policy("open"))
    del built[field]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(built, Policy, strict=True)


def test_addresses_of_both_families() -> None:
    p = policy("allowlist", rule("allow", "2606:4700::/32"), rule("allow", "1.0.0.0/8"))
    assert says(p, flow("[2606:4700::1]:443"))[0] == "allow"
    assert says(p, flow("1.2.3.4"))[0] == "allow"
    assert says(p, flow("2.2.3.4"))[0] == "deny"
    assert IPv4Address("1.2.3.4") != IPv6Address("::102:304")
