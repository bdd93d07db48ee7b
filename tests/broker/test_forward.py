"""What goes on of a head: the credential once, nothing of the guest's own, and no hop's affairs."""

from __future__ import annotations

from base64 import b64decode, b64encode

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import brokering as b

from agent_box.broker import forward
from agent_box.broker.gate import Inject, judge
from agent_box.broker.head import parse
from agent_box.broker.refusal import Reason, Refuse
from agent_box.config.model import Upstream

KEY = b.CREDENTIAL
OAUTH = b"sk-ant-oat01-abcdefghijklmnop"


def sent(kind: str, more: bytes = b"", **other: object) -> h11.Request:
    return forward.request(b.injected(kind, more, **other))


def values(request: h11.Request, name: bytes) -> list[bytes]:
    return [value for each, value in request.headers if each == name]


def basic(user: bytes, password: bytes) -> bytes:
    return b"Basic " + b64encode(user + b":" + password)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("anthropic", b"x-api-key", KEY),
        ("openai", b"authorization", b"Bearer " + KEY),
        ("google", b"x-goog-api-key", KEY),
        ("header", b"x-secret", KEY),
        ("basic", b"authorization", basic(b"x-access-token", KEY)),
        ("git-basic", b"authorization", basic(b"x-access-token", KEY)),
    ],
)
def test_the_credential_goes_where_its_kind_carries_it(
    kind: str, name: bytes, value: bytes
) -> None:
    assert values(sent(kind), name) == [value]


def test_the_credential_in_a_query_is_encoded() -> None:
    request = sent("query", path="/v1/messages", credential_value=b"a+b/c&d=e f")
    assert request.target == b"/v1/messages?token=a%2Bb%2Fc%26d%3De%20f"


@pytest.mark.parametrize("shown", [b"x-api-key: %s", b"Authorization: Bearer %s"])
def test_an_oauth_token_goes_as_bearer_and_a_key_as_x_api_key(shown: bytes) -> None:
    """Whichever way the client presents its nonce."""
    of = b.binding("anthropic")
    now = b.running(of)
    line = shown % now.nonces["anthropic"].encode() + b"\r\n"
    start = b"POST /v1/messages HTTP/1.1\r\nHost: anthropic.broker.internal\r\n"
    head = b.head(start + line + b"anthropic-beta: a-1, b-2\r\n\r\n")
    key = judge(head, b.facts(now, of))
    assert isinstance(key, Inject)
    request = forward.request(key)
    assert values(request, b"x-api-key") == [KEY]
    assert values(request, b"authorization") == []
    assert values(request, b"anthropic-beta") == [b"a-1, b-2"]
    token = judge(head, b.facts(now, of, credential=OAUTH))
    assert isinstance(token, Inject)
    request = forward.request(token)
    assert values(request, b"authorization") == [b"Bearer " + OAUTH]
    assert values(request, b"x-api-key") == []
    assert values(request, b"anthropic-beta") == [b"a-1, b-2", b"oauth-2025-04-20"]


def test_a_scheme_before_the_nonce_stands_before_the_credential() -> None:
    of = b.binding("header", header="authorization")
    now = b.running(of)
    for scheme in (b"token ", b"Bearer ", b""):
        line = b"authorization: " + scheme + now.nonces["header"].encode() + b"\r\n"
        start = b"POST /v1/messages HTTP/1.1\r\nHost: header.broker.internal\r\n"
        leave = judge(b.head(start + line + b"\r\n"), b.facts(now, of))
        assert isinstance(leave, Inject)
        assert values(forward.request(leave), b"authorization") == [scheme + KEY]


OWN = [
    *(b"Authorization: Bearer own", b"AUTHORIZATION: Basic b3duOm93bg==", b"authorization: own"),
    *(b"X-Api-Key: own", b"x_api_key: own", b"X-API_KEY: own", b"Api-Key: own"),
    *(b"X-Goog-Api-Key: own", b"Proxy-Authorization: Basic own", b"X-Auth-Token: own"),
    *(b"Private-Token: own", b"X-Amz-Security-Token: own", b"Cookie: session=own"),
    *(b"X-Forwarded-For: own", b"X-HTTP-Method-Override: own", b"X-Original-URL: /own"),
    *(b"X-Rewrite-Url: /own", b"Forwarded: host=own", b"X-Forwarded-Host: own", b"Via: 1.1 own"),
    *(b"Range: bytes=0-own", b"X-Remote-User: own", b"TE: own", b"Keep-Alive: own"),
    *(b"Proxy-Connection: own", b"Trailer: own", b"X-Secret: own"),
]


@pytest.mark.parametrize("kind", b.KINDS)
def test_nothing_of_the_guests_own_authentication_goes_on(kind: str) -> None:
    """In any case, twice, and under the names that CGI makes of headers."""
    lines = b"\r\n".join(OWN * 2) + b"\r\n"
    if kind == "git-basic":
        lines = lines.replace(b"Range: bytes=0-own\r\n", b"")  # packs and objects come in parts
    if kind != "header":
        lines = lines.replace(b"X-Secret: own\r\n", b"")
    request = sent(kind, lines)
    everything = request.target + b"\n".join(n + b": " + v for n, v in request.headers)
    assert b"own" not in everything
    carriers = KEY in everything or KEY in b64decode(
        (values(request, b"authorization") or [b"Basic "])[0].removeprefix(b"Basic ")
    )
    assert carriers


@pytest.mark.parametrize("kind", b.KINDS)
def test_the_nonce_reaches_no_origin(kind: str) -> None:
    of = b.binding(kind, cookies="keep")
    nonce = b.running(of).nonces[kind].encode()
    lines = b"X-Own: a %s b\r\nCookie: n=%s\r\nX-Fine: c\r\n" % (nonce, nonce)
    path = None if kind in ("git-basic", "query") else f"/v1/messages?a={nonce.decode()}&b=c"
    request = sent(kind, lines, cookies="keep", path=path)
    assert nonce not in request.target + b"".join(v for _, v in request.headers)
    assert values(request, b"x-fine") == [b"c"]
    if path is not None:
        assert request.target.endswith(b"?b=c")


def test_what_is_no_hops_affair_goes_on_as_it_is() -> None:
    lines = (
        b"User-Agent: x/1\r\nAccept: text/event-stream\r\nanthropic-version: 2023-06-01\r\n"
        b"Content-Type: application/json\r\nx-stainless-os: Linux\r\nX_Own: kept\r\n"
    )
    request = sent("anthropic", lines)
    assert request.method == b"POST"
    for name, value in (
        (b"user-agent", b"x/1"),
        (b"accept", b"text/event-stream"),
        (b"anthropic-version", b"2023-06-01"),
        (b"content-type", b"application/json"),
        (b"x-stainless-os", b"Linux"),
        (b"x_own", b"kept"),
        (b"host", b"api.example.com"),
    ):
        assert values(request, name) == [value]


def test_headers_that_connection_names_stay_here() -> None:
    request = sent("anthropic", b"Connection: close, X-Own\r\nX-Own: 1\r\nX-Other: 2\r\n")
    assert values(request, b"x-own") == values(request, b"connection") == []
    assert values(request, b"x-other") == [b"2"]


@pytest.mark.parametrize(
    ("more", "name", "value"),
    [
        (b"Content-Length: 12\r\n", b"content-length", [b"12"]),
        (b"Content-Length: 0\r\n", b"content-length", [b"0"]),
        (b"Transfer-Encoding: chunked\r\n", b"transfer-encoding", [b"chunked"]),
        (b"", b"content-length", []),
        (b"", b"transfer-encoding", []),
        (b"TE: trailers\r\n", b"te", [b"trailers"]),
        (
            b"Accept-Encoding: gzip, br;q=0.5, x-own, zstd\r\n",
            b"accept-encoding",
            [b"gzip, br;q=0.5, zstd"],
        ),
        (b"Accept-Encoding: compress\r\n", b"accept-encoding", [b"identity"]),
        (b"Expect: 100-continue\r\nContent-Length: 1\r\n", b"expect", [b"100-continue"]),
    ],
)
def test_framing_and_codings(more: bytes, name: bytes, value: list[bytes]) -> None:
    assert values(sent("anthropic", more), name) == value


def test_an_upgrade_that_is_allowed() -> None:
    lines = (
        b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Extensions: permessage-deflate\r\n"
    )
    request = sent("anthropic", lines, upgrade=True, method="GET", path="/v1/files/x")
    assert values(request, b"connection") == [b"upgrade"]
    assert values(request, b"upgrade") == [b"websocket"]
    assert values(request, b"sec-websocket-version") == [b"13"]
    assert values(request, b"sec-websocket-extensions") == []


@pytest.mark.parametrize(
    ("query", "kept"),
    [
        ("a=1&key=guest&b=2", b"?a=1&b=2"),
        ("KEY=guest&a", b"?a"),
        ("%6bey=guest", b""),
        ("access_token=guest", b""),
        ("a=%2F+", b"?a=%2F+"),
        ("", b""),
    ],
)
def test_a_key_in_the_query_does_not_go_on(query: str, kept: bytes) -> None:
    request = sent("google", path=f"/v1/messages?{query}")
    assert request.target == b"/v1/messages" + kept


def test_a_semicolon_hides_no_parameter() -> None:
    of = b.binding("google")
    now = b.running(of)
    raw = b.raw("google", now.nonces["google"], path="/v1/messages?a=1;key=guest")
    refused = judge(b.head(raw), b.facts(now, of))
    assert isinstance(refused, Refuse)
    assert refused.reason is Reason.TARGET_BAD


def test_a_push_speaks_the_version_that_is_understood_here() -> None:
    lines = b"Git-Protocol: version=2\r\n"
    assert values(sent("git-basic", lines), b"git-protocol") == [b"version=2"]
    push = sent("git-basic", lines, path="/org/repo.git/git-receive-pack")
    assert values(push, b"git-protocol") == []


def test_the_host_with_another_port() -> None:
    for host, port, name in (
        ("api.example.com", 8443, b"api.example.com:8443"),
        ("2606:4700::1", 443, b"[2606:4700::1]"),
        ("2606:4700::1", 444, b"[2606:4700::1]:444"),
    ):
        upstream = Upstream(scheme="https", host=host, port=port)
        assert values(sent("anthropic", upstream=upstream), b"host") == [name]


def test_trailers_mean_nothing_more_than_they_may() -> None:
    leave = b.injected("header")
    nonce = leave.running.nonces["header"].encode()
    kept = forward.trailers(
        leave,
        [
            (b"X-Checksum", b"1"),
            (b"Authorization", b"own"),
            (b"x_api_key", b"own"),
            (b"X-Secret", b"own"),
            (b"Content-Length", b"5"),
            (b"Transfer-Encoding", b"chunked"),
            (b"Host", b"own"),
            (b"X-Nonce", nonce),
        ],
    )
    assert kept == [(b"x-checksum", b"1")]


# ----------------------------------------------------------------------------- replies


def reply(
    headers: list[tuple[bytes, bytes]], *, status: int = 200, method: str = "POST", **other: object
) -> list[tuple[bytes, bytes]] | Refuse:
    return forward.reply(b.binding("anthropic", **other), status, headers, method=method)


def test_a_reply_keeps_what_is_no_hops_affair() -> None:
    headers = [
        (b"Content-Type", b"text/event-stream"),
        (b"X-Request-Id", b"7"),
        (b"Connection", b"close, X-Own"),
        (b"X-Own", b"1"),
        (b"Keep-Alive", b"timeout=5"),
        (b"Alt-Svc", b'h3=":443"'),
        (b"Strict-Transport-Security", b"max-age=1"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Set-Cookie", b"a=b"),
        (b"Location", b"https://elsewhere.example/"),
    ]
    assert reply(headers) == [
        (b"content-type", b"text/event-stream"),
        (b"x-request-id", b"7"),
        (b"location", b"https://elsewhere.example/"),
        (b"transfer-encoding", b"chunked"),
    ]


@pytest.mark.parametrize(
    ("status", "method", "headers", "framing"),
    [
        (200, "GET", [(b"content-length", b"5")], [(b"content-length", b"5")]),
        (200, "HEAD", [(b"content-length", b"5")], [(b"content-length", b"5")]),
        (200, "GET", [], []),
        (204, "GET", [(b"content-length", b"0")], []),
        (103, "GET", [], []),
    ],
)
def test_the_framing_of_a_reply_is_kept(
    status: int,
    method: str,
    headers: list[tuple[bytes, bytes]],
    framing: list[tuple[bytes, bytes]],
) -> None:
    assert reply(headers, status=status, method=method) == framing


def test_cookies_come_back_to_the_endpoint() -> None:
    headers = [
        (b"set-cookie", b"a=b; Path=/; Domain=.example.com; Secure; HttpOnly"),
        (b"set-cookie", b"secure=domain; secure;domain=x"),
    ]
    assert reply(headers, cookies="keep") == [
        (b"set-cookie", b"a=b; Path=/; HttpOnly"),
        (b"set-cookie", b"secure=domain"),
    ]


@pytest.mark.parametrize("value", [b"a\nb", b"a\rb", b"a\x00b", b"a\x1bb"])
def test_a_reply_with_control_characters_is_refused(value: bytes) -> None:
    refused = reply([(b"x", value)])
    assert isinstance(refused, Refuse)
    assert (refused.reason, refused.status) == (Reason.REPLY_BAD, 502)


def test_an_upgrade_is_answered() -> None:
    headers = [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket"), (b"Sec-X", b"1")]
    assert reply(headers, status=101) == [
        (b"sec-x", b"1"),
        (b"connection", b"upgrade"),
        (b"upgrade", b"websocket"),
    ]
    assert isinstance(reply([], status=101), Refuse)


NAMES = st.sampled_from(
    [b"Authorization", b"x-api-key", b"X-Own", b"Connection", b"te", b"Cookie", b"X_Api_Key"]
)
VALUES = st.sampled_from([b"own", b"close", b"x-own", b"keep-alive, te", b"trailers", b"a=b"])


@given(headers=st.lists(st.tuples(NAMES, VALUES), max_size=12), kind=st.sampled_from(b.KINDS))
@settings(deadline=None)
def test_whatever_headers_there_are_one_credential_goes_on(
    headers: list[tuple[bytes, bytes]], kind: str
) -> None:
    of = b.binding(kind)
    now = b.running(of)
    more = b"".join(n + b": " + v + b"\r\n" for n, v in headers)
    head = parse(b.raw(kind, now.nonces[kind], more=more), 7)
    leave = head if isinstance(head, Refuse) else judge(head, b.facts(now, of))
    if isinstance(leave, Inject):
        request = forward.request(leave)
        for name in (b"authorization", b"x-api-key", b"x_api_key", b"x-secret"):
            found = values(request, name)
            assert len(found) <= 1
            assert b"own" not in found
