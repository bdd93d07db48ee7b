"""The gate: leave is given when all eight conditions hold, and never otherwise."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import brokering as b
from support.source import ROOT

from agent_box.broker import forward, git, kinds, nonces
from agent_box.broker.gate import (
    _SEAL,
    Answer,
    Facts,
    Inject,
    Later,
    Peer,
    addresses,
    judge,
)
from agent_box.broker.head import Head, parse
from agent_box.broker.lfs import Issued
from agent_box.broker.refusal import Reason, Refuse
from agent_box.config.model import Binding, Repo, Route, Upstream
from agent_box.process.secret import Secret

OTHER = "f" * 32


@dataclass
class Case:
    """One request and its facts, which breaks may spoil."""

    kind: str
    raw: bytes
    facts: Facts
    nonce: str  # the right one
    of: Binding

    def judge(self) -> Inject | Later | Refuse:
        head = parse(self.raw, 7)
        return judge(head, self.facts) if isinstance(head, Head) else head


def sound(kind: str, **other: object) -> Case:
    of = b.binding(kind, **other)
    also = b.binding("openai" if kind != "openai" else "anthropic")
    now = b.running(of, also)
    nonce = now.nonces[kind]
    return Case(kind, b.raw(kind, nonce), b.facts(now, of), nonce, of)


def nonce_of(case: Case, **changed: object) -> None:
    """Puts another nonce into the request."""
    of = {"key": b.KEY, "instance": b.INSTANCE, "binding": case.kind, "boot": 1} | changed
    case.raw = b.raw(case.kind, nonces.make(**of))  # type: ignore[arg-type]
    assert case.nonce.encode() not in case.raw


def spoil(case: Case, **facts: object) -> None:
    case.facts = msgspec.structs.replace(case.facts, **facts)


def running_with(case: Case, **changed: object) -> None:
    if case.facts.running is not None:  # else another break was before
        spoil(case, running=replace(case.facts.running, **changed))  # type: ignore[arg-type]


def binding_with(case: Case, **changed: object) -> None:
    case.of = replace(case.of, **changed)  # type: ignore[arg-type]
    if case.facts.running is not None:
        running_with(case, bindings={**case.facts.running.bindings, case.kind: case.of})


def peer_with(case: Case, **changed: object) -> None:
    assert case.facts.peer is not None
    spoil(case, peer=replace(case.facts.peer, **changed))  # type: ignore[arg-type]


def resend(case: Case, **changed: object) -> None:
    case.raw = b.raw(case.kind, case.nonce, **changed)  # type: ignore[arg-type]


def bare(case: Case) -> None:
    """The request has no nonce."""
    path = "/org/repo.git/git-upload-pack" if case.kind == "git-basic" else "/v1/messages"
    line = f"POST {path} HTTP/1.1\r\nHost: {case.kind}.broker.internal\r\n\r\n"
    case.raw = line.encode()


def plain(case: Case) -> None:
    """The upstream is http, everywhere, without a word that it may be."""
    upstream = Upstream(scheme="http", host="api.example.com", port=80)
    binding_with(case, upstream=upstream)
    peer_with(case, upstream=upstream, verified=None)


Break = Callable[[Case], None]
BREAKS: dict[str, tuple[Break, Reason]] = {
    # 1
    "no such instance": (lambda c: spoil(c, running=None), Reason.NOT_RUNNING),
    "another's socket": (lambda c: spoil(c, socket=OTHER), Reason.NOT_RUNNING),
    "a binding more": (
        lambda c: running_with(c, declared=(c.kind, "openai", "anthropic", "third")),
        Reason.BINDINGS_INCOMPLETE,
    ),
    "no binding": (lambda c: running_with(c, bindings={}), Reason.BINDINGS_INCOMPLETE),
    "no nonces": (lambda c: running_with(c, nonces={}), Reason.BINDINGS_INCOMPLETE),
    # 2
    "host of nothing": (lambda c: resend(c, host="x.broker.internal"), Reason.HOST_UNKNOWN),
    "host of the upstream": (lambda c: resend(c, host="api.example.com"), Reason.HOST_UNKNOWN),
    "host with a dot": (
        lambda c: resend(c, host=f"{c.kind}.broker.internal."),
        Reason.HOST_UNKNOWN,
    ),
    "host with a port": (
        lambda c: resend(c, host=f"{c.kind}.broker.internal:8080"),
        Reason.HOST_UNKNOWN,
    ),
    "host twice": (
        lambda c: resend(c, more=f"Host: {c.kind}.broker.internal\r\n".encode()),
        Reason.HOST_BAD,
    ),
    # 3
    "path": (lambda c: resend(c, path="/v1/other"), Reason.PATH_UNKNOWN),
    "method": (lambda c: resend(c, method="DELETE"), Reason.METHOD),
    "upgrade": (
        lambda c: resend(c, method="GET", more=b"Connection: upgrade\r\nUpgrade: websocket\r\n"),
        Reason.UPGRADE,
    ),
    # 4
    "another key": (lambda c: nonce_of(c, key=bytes(32)), Reason.NONCE_WRONG),
    "another instance": (lambda c: nonce_of(c, instance=OTHER), Reason.NONCE_WRONG),
    "another binding": (lambda c: nonce_of(c, binding="other"), Reason.NONCE_WRONG),
    "another boot": (lambda c: nonce_of(c, boot=2), Reason.NONCE_WRONG),
    "no nonce": (bare, Reason.NONCE_MISSING),
    # 5
    "plain http": (plain, Reason.UPSTREAM_PLAIN),
    "another host": (
        lambda c: peer_with(c, upstream=Upstream(scheme="https", host="evil.example", port=443)),
        Reason.UPSTREAM_OTHER,
    ),
    "another port": (
        lambda c: peer_with(c, upstream=Upstream(scheme="https", host="api.example.com", port=444)),
        Reason.UPSTREAM_OTHER,
    ),
    # 6
    "no TLS": (lambda c: peer_with(c, verified=None), Reason.CERTIFICATE),
    "another name": (lambda c: peer_with(c, verified="evil.example"), Reason.CERTIFICATE),
    "another CA": (lambda c: peer_with(c, ca_file="other.pem"), Reason.CERTIFICATE),
    # 7
    "loopback": (lambda c: peer_with(c, address="127.0.0.1"), Reason.ADDRESS),
    "metadata": (lambda c: peer_with(c, address="169.254.169.254"), Reason.ADDRESS),
    "mapped": (lambda c: peer_with(c, address="::ffff:10.0.0.1"), Reason.ADDRESS),
    "NAT64": (lambda c: peer_with(c, address="64:ff9b::7f00:1"), Reason.ADDRESS),
    "no address": (lambda c: peer_with(c, address=""), Reason.ADDRESS),
    # 8
    "an answer for another": (
        lambda c: spoil(c, answer=Answer(8, Secret(b.CREDENTIAL))),
        Reason.STORE,
    ),
    "no credential": (lambda c: spoil(c, answer=Answer(7, None)), Reason.CREDENTIAL_MISSING),
    "a line in it": (
        lambda c: spoil(c, answer=Answer(7, Secret(b"key\r\nx: y"))),
        Reason.CREDENTIAL_UNUSABLE,
    ),
    "a NUL in it": (
        lambda c: spoil(c, answer=Answer(7, Secret(b"key\x00"))),
        Reason.CREDENTIAL_UNUSABLE,
    ),
    "an empty one": (lambda c: spoil(c, answer=Answer(7, Secret(b""))), Reason.CREDENTIAL_UNUSABLE),
}


@pytest.mark.parametrize("kind", b.KINDS)
def test_all_eight_give_leave(kind: str) -> None:
    case = sound(kind)
    leave = case.judge()
    assert isinstance(leave, Inject)
    written = forward.request(leave)
    assert b"sk-agentbox" not in b"".join(v for _, v in written.headers) + written.target


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.parametrize("kind", b.KINDS)
def test_each_alone_refuses(kind: str, name: str) -> None:
    case = sound(kind)
    BREAKS[name][0](case)
    refused = case.judge()
    assert isinstance(refused, Refuse)
    assert refused.reason is BREAKS[name][1]
    assert 400 <= refused.status < 600


@given(
    kind=st.sampled_from(b.KINDS),
    broken=st.lists(st.sampled_from(sorted(BREAKS)), max_size=4, unique=True),
)
@settings(max_examples=400, deadline=None)
def test_leave_is_given_exactly_when_nothing_is_broken(kind: str, broken: list[str]) -> None:
    case = sound(kind)
    for name in broken:
        BREAKS[name][0](case)
    # of two breaks of the request the later one may undo the earlier, and never itself
    assert isinstance(case.judge(), Inject) == (not broken)


@given(kind=st.sampled_from(b.KINDS), junk=st.binary(max_size=120), at=st.integers(0, 400))
@settings(max_examples=600, deadline=None)
def test_whatever_a_guest_sends_is_refused_or_was_in_order(kind: str, junk: bytes, at: int) -> None:
    case = sound(kind)
    now = case.facts.running
    assert now is not None
    at = min(at, len(case.raw))
    case.raw = case.raw[:at] + junk + case.raw[at + len(junk) :]
    leave = case.judge()
    if isinstance(leave, Inject):
        assert now.nonces[leave.binding.name].encode() in case.raw or b"Basic" in case.raw
        assert leave.head.get(b"host")[0].lower().startswith(leave.binding.name.encode())
        assert leave.binding is now.bindings[leave.binding.name]


@pytest.mark.parametrize("kind", b.KINDS)
def test_what_is_not_known_yet_is_waited_for(kind: str) -> None:
    case = sound(kind)
    for late in ({"peer": None}, {"answer": None}, {"peer": None, "answer": None}):
        spoil(case, **msgspec.structs.asdict(sound(kind).facts) | late)
        held = case.judge()
        assert isinstance(held, Later)
        assert held.way.upstream == held.binding.upstream
        assert not hasattr(held, "credential")


@pytest.mark.parametrize(
    "name", [n for n, (_, r) in BREAKS.items() if r.value < "r" and "answer" not in n]
)
def test_what_can_be_refused_early_is(name: str) -> None:
    """Before anything is resolved or connected."""
    case = sound("anthropic")
    BREAKS[name][0](case)
    reason = BREAKS[name][1]
    late = {
        *(Reason.UPSTREAM_OTHER, Reason.CERTIFICATE, Reason.ADDRESS, Reason.STORE),
        *(Reason.CREDENTIAL_MISSING, Reason.CREDENTIAL_UNUSABLE),
    }
    spoil(case, peer=None, answer=None)
    answer = case.judge()
    assert isinstance(answer, Later if reason in late else Refuse)


def test_leave_cannot_be_made_elsewhere() -> None:
    leave = sound("anthropic").judge()
    assert isinstance(leave, Inject)
    values = {name: getattr(leave, name) for name in leave.__dataclass_fields__ if name != "seal"}
    with pytest.raises(TypeError):
        Inject(seal=object(), **values)
    with pytest.raises((TypeError, ValueError)):
        replace(leave, head=leave.head)
    assert Inject(seal=_SEAL, **values).head is leave.head  # the values were not what failed


def test_the_credential_is_revealed_in_few_places() -> None:
    """Who makes an Inject, and who takes the value out of a Secret, is a short list."""
    makes, reveals = set(), set()
    for file in sorted((ROOT / "services/broker").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                called = node.func
                if isinstance(called, ast.Name) and called.id == "Inject":
                    makes.add(file.name)
                if isinstance(called, ast.Attribute) and called.attr == "reveal":
                    reveals.add(file.name)
    assert makes == {"gate.py"}
    assert {"gate.py", "forward.py"} <= reveals
    assert "adapter.py" not in reveals


@pytest.mark.parametrize("kind", kinds.UNBUILT)
def test_a_kind_that_is_not_built_is_refused(kind: str) -> None:
    case = sound("anthropic", routes=(Route(path="/", match="prefix", methods=("POST",)),))
    assert isinstance(case.judge(), Inject)
    binding_with(case, kind=kind)
    refused = case.judge()
    assert isinstance(refused, Refuse)
    assert refused.status == 501


def test_insecure_opens_http_and_nothing_else() -> None:
    upstream = Upstream(scheme="http", host="api.example.com", port=80)
    case = sound("anthropic", upstream=upstream, insecure=True)
    assert isinstance(case.judge(), Inject)
    peer_with(case, address="10.1.2.3")
    refused = case.judge()
    assert isinstance(refused, Refuse)
    assert refused.reason is Reason.ADDRESS
    # an https upstream stays verified whatever the word says
    https = sound("anthropic", insecure=True)
    peer_with(https, verified=None)
    refused = https.judge()
    assert isinstance(refused, Refuse)
    assert refused.reason is Reason.CERTIFICATE


def test_allow_reserved_opens_addresses_and_nothing_else() -> None:
    case = sound("anthropic", allow_reserved=True)
    peer_with(case, address="127.0.0.1")
    assert isinstance(case.judge(), Inject)
    peer_with(case, address="not an address")
    assert isinstance(case.judge(), Refuse)
    peer_with(case, address="127.0.0.1", verified=None)
    assert isinstance(case.judge(), Refuse)


def test_only_ordinary_addresses_are_connected_to() -> None:
    held = sound("anthropic")
    spoil(held, peer=None)
    later = held.judge()
    assert isinstance(later, Later)
    mixed = ["10.0.0.1", "93.184.215.14", "fe80::1%eth0", "::1", "2606:2800:21f::1"]
    assert addresses(later.way, mixed) == ("93.184.215.14", "2606:2800:21f::1")
    refused = addresses(later.way, ["127.0.0.1"])
    assert isinstance(refused, Refuse)
    assert refused.reason is Reason.ADDRESS
    assert isinstance(addresses(later.way, []), Refuse)


# ------------------------------------------------------------------------- pushes


def push(*refs: bytes, repo: str = "org/repo") -> Case:
    case = sound("git-basic")
    resend(case, path=f"/{repo}.git/git-receive-pack")
    spoil(case, commands=git.Commands(tuple(git.Command(ref, False) for ref in refs)))
    return case


def test_a_push_waits_for_its_commands() -> None:
    case = push(b"refs/heads/agent-box/work/x")
    assert isinstance(case.judge(), Inject)
    spoil(case, commands=None)
    later = case.judge()
    assert isinstance(later, Later)
    assert later.wants_commands


@given(
    refs=st.lists(st.sampled_from((b"refs/heads/agent-box/work/a", b"refs/heads/main")), max_size=5)
)
@settings(deadline=None)
def test_a_push_with_one_ref_elsewhere_is_refused(refs: list[bytes]) -> None:
    fine = b"refs/heads/main" not in refs and len(refs) == len(set(refs))
    assert isinstance(push(*refs).judge(), Inject) == fine


def test_a_push_where_none_is_allowed() -> None:
    refused = push(b"refs/heads/agent-box/work/x", repo="org/readonly").judge()
    assert isinstance(refused, Refuse)
    assert refused.reason is Reason.PUSH_OFF


def test_a_compressed_push_is_refused() -> None:
    case = push(b"refs/heads/agent-box/work/x")
    resend(case, path="/org/repo.git/git-receive-pack", more=b"Content-Encoding: gzip\r\n")
    refused = case.judge()
    assert isinstance(refused, Refuse)
    assert refused.reason is Reason.PUSH_COMMANDS


# ---------------------------------------------------------------------- LFS objects


def link(**changed: object) -> Case:
    case = sound("git-basic")
    now = case.facts.running
    assert now is not None
    elsewhere = Upstream(scheme="https", host="objects.example.net", port=443)
    issued = Issued(
        token="t0ken",
        instance=b.INSTANCE,
        boot=1,
        binding="git-basic",
        method="GET",
        upstream=elsewhere,
        target=b"/bucket/abc?sig=1",
        headers=((b"authorization", b"signed"),),
    )
    resend(case, method="GET", path="/.agent-box/lfs/t0ken", more=b"")
    spoil(
        case,
        issued=replace(issued, **changed),  # type: ignore[arg-type]
        peer=Peer(elsewhere, "93.184.215.14", elsewhere.host, None),
    )
    return case


def test_a_link_leads_where_it_was_issued_for_without_the_credential() -> None:
    leave = link().judge()
    assert isinstance(leave, Inject)
    written = forward.request(leave)
    assert written.target == b"/bucket/abc?sig=1"
    headers = dict(written.headers)
    assert headers[b"host"] == b"objects.example.net"
    assert headers[b"authorization"] == b"signed"
    assert b.CREDENTIAL not in b"".join(headers.values())


@pytest.mark.parametrize(
    "changed",
    [
        {"token": "other"},
        {"instance": OTHER},
        {"boot": 2},
        {"binding": "github"},
        {"method": "PUT"},
    ],
)
def test_a_link_of_another_is_refused(changed: dict[str, object]) -> None:
    refused = link(**changed).judge()
    assert isinstance(refused, Refuse)
    assert refused.reason is Reason.LFS_UNKNOWN


def test_a_link_has_none_of_the_bindings_leave() -> None:
    """A reply that names an internal address gets nobody there."""
    case = link()
    binding_with(case, allow_reserved=True, ca_file="own.pem")
    peer_with(case, address="169.254.169.254")
    refused = case.judge()
    assert isinstance(refused, Refuse)
    assert refused.reason is Reason.ADDRESS
    plain_link = link(upstream=Upstream(scheme="http", host="objects.example.net", port=80))
    refused = plain_link.judge()
    assert isinstance(refused, Refuse)
    assert refused.reason is Reason.UPSTREAM_PLAIN


def test_a_second_repository_on_the_same_connection_is_judged_anew() -> None:
    case = sound("git-basic")
    assert isinstance(case.judge(), Inject)
    resend(case, path="/org/third.git/git-upload-pack")
    refused = case.judge()
    assert isinstance(refused, Refuse)
    assert refused.reason is Reason.REPO
    assert Repo(name="org/third", push=False) not in b.REPOS


def test_a_link_takes_no_query() -> None:
    case = link()
    resend(case, method="GET", path="/.agent-box/lfs/t0ken?x=1", more=b"")
    refused = case.judge()
    assert isinstance(refused, Refuse)
    assert refused.reason is Reason.LFS_UNKNOWN


def test_an_upgrade_is_to_a_websocket() -> None:
    case = sound("anthropic", upgrade=True)
    lines = b"Connection: upgrade\r\nUpgrade: "
    resend(case, method="GET", path="/v1/files/x", more=lines + b"websocket\r\n")
    assert isinstance(case.judge(), Inject)
    resend(case, method="GET", path="/v1/files/x", more=lines + b"h2c\r\n")
    refused = case.judge()
    assert isinstance(refused, Refuse)
    assert refused.reason is Reason.UPGRADE
