"""Heads, bindings and facts for tests of the broker, with all that the gate asks for in place."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import msgspec

from agent_box.broker import git, nonces
from agent_box.broker.gate import Answer, Facts, Inject, Peer, Running, judge
from agent_box.broker.head import Head, parse
from agent_box.config.model import Binding, Repo, Route, Upstream
from agent_box.process.secret import Secret

KEY = bytes(range(32))
INSTANCE = "0123456789abcdef0123456789abcdef"
CREDENTIAL = b"sk-ant-api03-Zq8vLw2KxT5nR7mB4cY9dH6fJ3gP1sAe"
ROUTES = (
    Route(path="/v1/messages", match="exact", methods=("POST",)),
    Route(path="/v1/files", match="prefix", methods=("GET", "POST")),
    Route(path="/v1/models/{model}", match="template", methods=("GET",)),
)
REPOS = (Repo(name="org/repo", push=True), Repo(name="org/readonly", push=False))
KINDS = ("anthropic", "openai", "google", "header", "basic", "query", "git-basic")


def binding(kind: str, **other: Any) -> Binding:
    """A binding of a kind, named as the kind is."""
    values: dict[str, Any] = {
        "name": kind,
        "upstream": Upstream(scheme="https", host="api.example.com", port=443),
        "kind": kind,
        "credential": f"{kind}-key",
        "routes": () if kind == "git-basic" else ROUTES,
        "repos": REPOS if kind == "git-basic" else (),
        "header": "x-secret" if kind == "header" else None,
        "query": "token" if kind == "query" else None,
        "basic_user": "x-access-token" if kind in ("basic", "git-basic") else None,
        "insecure": False,
        "allow_reserved": False,
        "upgrade": False,
        "cookies": "strip",
        "ca_file": None,
        "max_requests": None,
        "max_tokens": None,
        "max_cost": None,
    }
    return Binding(**(values | other))


def running(*bindings: Binding, boot: int = 1, instance: str = INSTANCE) -> Running:
    return Running(
        instance=instance,
        name="work",
        boot=boot,
        declared=tuple(each.name for each in bindings),
        bindings={each.name: each for each in bindings},
        nonces={each.name: nonces.make(KEY, instance, each.name, boot) for each in bindings},
    )


def carried(kind: str, nonce: str) -> tuple[str, bytes]:
    """How a client of this kind presents its nonce: a query, and header lines."""
    pair = b64encode(f"user:{nonce}".encode()).decode()
    lines = {
        "anthropic": f"x-api-key: {nonce}",
        "openai": f"Authorization: Bearer {nonce}",
        "google": f"x-goog-api-key: {nonce}",
        "header": f"X-Secret: {nonce}",
        "basic": f"Authorization: Basic {pair}",
        "query": "",
        "git-basic": f"Authorization: Basic {pair}",
    }
    line = lines[kind]
    return (f"?token={nonce}" if kind == "query" else ""), (line + "\r\n" if line else "").encode()


def raw(
    kind: str,
    nonce: str,
    *,
    method: str = "POST",
    path: str | None = None,
    host: str | None = None,
    more: bytes = b"Content-Length: 2\r\n",
) -> bytes:
    """The raw head of a request that a well-behaved client sends."""
    query, line = carried(kind, nonce)
    if path is None:
        path = "/org/repo.git/git-upload-pack" if kind == "git-basic" else "/v1/messages"
    start = f"{method} {path}{query} HTTP/1.1\r\nHost: {host or kind + '.broker.internal'}\r\n"
    return start.encode() + line + more + b"\r\n"


def head(untrusted: bytes, serial: int = 7) -> Head:
    parsed = parse(untrusted, serial)
    assert isinstance(parsed, Head), parsed
    return parsed


def facts(
    now: Running, of: Binding, *, serial: int = 7, credential: bytes = CREDENTIAL, **other: Any
) -> Facts:
    """All facts, as they are when everything is in order."""
    verified = of.upstream.host if of.upstream.scheme == "https" else None
    whole = Facts(
        socket=now.instance,
        running=now,
        peer=Peer(of.upstream, "93.184.215.14", verified, of.ca_file),
        answer=Answer(serial, Secret(credential)),
        commands=git.Commands(()),
        issued=None,
    )
    return msgspec.structs.replace(whole, **other)


def injected(kind: str, more: bytes = b"Content-Length: 2\r\n", **other: Any) -> Inject:
    """Leave for an ordinary request of a kind; `other` goes to `binding`."""
    credential = other.pop("credential_value", CREDENTIAL)
    path, method = other.pop("path", None), other.pop("method", "POST")
    of = binding(kind, **other)
    now = running(of)
    request = head(raw(kind, now.nonces[of.name], path=path, method=method, more=more))
    leave = judge(request, facts(now, of, credential=credential))
    assert isinstance(leave, Inject), leave
    return leave
