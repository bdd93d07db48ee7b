"""Heads of messages as they go on: the request with the credential, the reply without.

`request` is the one place where a credential is written into a head, and it asks for the
gate's `Inject`. Sources: RFC 9110 sections 7.2, 7.6.1 and 10.1.4; RFC 9112 section 9.6; RFC
6265 section 4.1; RFC 9111 says what a shared cache would do, and this is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

import h11

from agent_box.broker import kinds
from agent_box.broker.gate import Inject
from agent_box.broker.git import Access, Service
from agent_box.broker.head import Framing, Head, connection_options
from agent_box.broker.kinds import Headers
from agent_box.broker.refusal import Reason, Refuse
from agent_box.config.model import Binding, Upstream

HOP_BY_HOP: Final = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer"),
        *(b"transfer-encoding", b"upgrade", b"proxy-authenticate", b"proxy-authorization"),
        b"proxy-authentication-info",
    )
)
# Whatever a client uses to say who it is. None of it is a guest's to say.
AUTHENTICATION: Final = frozenset(
    (
        *(b"authorization", b"x-api-key", b"api-key", b"apikey", b"x-goog-api-key"),
        *(b"x-auth-token", b"x-auth-key", b"x-access-token", b"x-amz-security-token"),
        *(b"private-token", b"job-token", b"deploy-token", b"x-token", b"x-vault-token"),
        *(b"x-github-token", b"x-gitlab-token", b"x-csrf-token", b"authentication"),
        *(b"x-goog-iam-authorization-token", b"x-goog-user-project", b"x-authorization"),
        *(b"x-original-authorization", b"x-forwarded-authorization", b"x-forwarded-user"),
        *(b"x-remote-user", b"remote-user", b"x-forwarded-access-token", b"x-client-cert"),
    )
)
# By these, servers take another method, path, host or caller than the one that was judged.
OVERRIDES: Final = frozenset(
    (
        *(b"x-http-method-override", b"x-http-method", b"x-method-override", b"x-original-method"),
        *(b"x-original-url", b"x-original-uri", b"x-rewrite-url", b"x-forwarded-uri"),
        *(b"x-forwarded-path", b"x-forwarded-prefix", b"x-original-host", b"x-host"),
        *(b"x-forwarded-host", b"x-forwarded-server", b"x-forwarded-proto", b"x-forwarded-port"),
        *(b"x-forwarded-for", b"x-forwarded", b"x-real-ip", b"x-client-ip", b"forwarded", b"via"),
        *(b"true-client-ip", b"client-ip", b"x-cluster-client-ip", b"x-forwarded-method"),
    )
)
# Codings that the scanner of replies reads; others are not asked for.
CODINGS: Final = (b"gzip", b"x-gzip", b"deflate", b"br", b"zstd", b"identity")
_NEVER_UP: Final = HOP_BY_HOP | AUTHENTICATION | OVERRIDES | {b"host", b"content-length"}
# Of a request for an LFS object: what says what the bytes are, and which of them.
_OF_OBJECT: Final = frozenset(
    (b"accept", b"content-type", b"expect", b"range", b"if-range", b"user-agent")
)
_NEVER_DOWN: Final = HOP_BY_HOP | {b"alt-svc", b"strict-transport-security", b"content-length"}


def request(inject: Inject) -> h11.Request:
    """The head of the request that `inject` allows, and of no other."""
    head = inject.head
    if inject.issued is not None:
        given = _given(inject)
        named = {name for name, _ in given}
        kept = [(n, v) for n, v in head.headers if n in _OF_OBJECT and n not in named]
        headers = [*kept, *given]
        target = inject.issued.target
    else:
        kind = kinds.KINDS[inject.binding.kind]
        placed = kind.place(inject.binding, head, inject.credential.reveal())
        headers = [*_kept(inject, placed.headers), *placed.headers]
        target = _target(inject, placed.query)
    return h11.Request(
        method=head.method,
        target=target,
        headers=[
            (b"host", _host(inject.peer.upstream)),
            *headers,
            *_framing(head),
            *_hop(head),
        ],
    )


def _given(inject: Inject) -> Headers:
    """What opens an LFS object: what the reply said, and on the binding's own host, where it
    said nothing, the credential."""
    if inject.issued is None:
        return ()
    given = inject.issued.headers
    own = inject.issued.upstream == inject.binding.upstream
    if own and not any(name == b"authorization" for name, _ in given):
        kind = kinds.KINDS[inject.binding.kind]
        given += kind.place(inject.binding, inject.head, inject.credential.reveal()).headers
    return given


def _kept(inject: Inject, placed: Headers) -> Iterable[tuple[bytes, bytes]]:
    """What of the guest's headers goes on, in its order."""
    head, binding = inject.head, inject.binding
    service = inject.access.service if isinstance(inject.access, Access) else None
    # anthropic-beta is added to, not replaced
    gone = {name for name, _ in placed if name != b"anthropic-beta"}
    gone |= connection_options(head.headers) or frozenset()
    if binding.header is not None:
        gone.add(binding.header.encode())
    if binding.cookies == "strip":
        gone.add(b"cookie")
    if service is None:
        gone |= {b"range", b"if-range"}  # a part of a reply could hold a part of a credential
    if head.upgrade is not None:
        gone.add(b"sec-websocket-extensions")  # compressed frames could not be searched
    if service is Service.RECEIVE_PACK:
        gone.add(b"git-protocol")  # of a push, one version's format is understood here
    nonce = inject.running.nonces[binding.name].encode()
    for name, value in head.headers:
        plain = name.replace(b"_", b"-")
        if plain in _NEVER_UP or plain in gone or nonce in value:
            continue
        if name == b"accept-encoding":
            value = b"identity" if service is Service.LFS_BATCH else _codings(value)
        yield name, value


def _codings(untrusted: bytes) -> bytes:
    kept = [
        each.strip(b" \t")
        for each in untrusted.split(b",")
        if each.partition(b";")[0].strip(b" \t").lower() in CODINGS
    ]
    return b", ".join(kept) or b"identity"


def _target(inject: Inject, placed: Sequence[tuple[bytes, bytes]]) -> bytes:
    head, binding = inject.head, inject.binding
    never = kinds.KINDS[binding.kind].parameters(binding)
    nonce = inject.running.nonces[binding.name].encode()
    kept = [
        piece
        for piece in (head.target.query.split(b"&") if head.target.query else ())
        if not any(
            name.lower() in never or nonce in name or nonce in value
            for name, value in kinds.pairs(piece)
        )
    ]
    pieces = [piece for piece in kept if piece] + [n + b"=" + v for n, v in placed]
    query = b"?" + b"&".join(pieces) if pieces else b""
    return head.target.encoded() + query


def _host(upstream: Upstream) -> bytes:
    host = f"[{upstream.host}]" if ":" in upstream.host else upstream.host
    default = {"https": 443, "http": 80}[upstream.scheme]
    return (host if upstream.port == default else f"{host}:{upstream.port}").encode()


def _framing(head: Head) -> Headers:
    if head.framing is Framing.CHUNKED:
        return ((b"transfer-encoding", b"chunked"),)
    if head.framing is Framing.LENGTH:
        return ((b"content-length", str(head.length).encode()),)
    return ()


def _hop(head: Head) -> Headers:
    """Ours to say anew, hop by hop: an upgrade that was allowed, and that trailers are welcome."""
    if head.upgrade is not None:
        return ((b"connection", b"upgrade"), (b"upgrade", head.upgrade.encode()))
    if any(b"trailers" in value.lower() for value in head.get(b"te")):
        return ((b"connection", b"te"), (b"te", b"trailers"))
    return ()


def trailers(inject: Inject, untrusted: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Trailers of a request as they go on: nothing that would mean something in a head."""
    if not (untrusted := list(untrusted)):
        return []  # as nearly always
    gone = _NEVER_UP | {b"cookie", b"set-cookie", b"content-type", b"content-encoding", b"expect"}
    if inject.binding.header is not None:
        gone |= {inject.binding.header.encode()}
    nonce = inject.running.nonces[inject.binding.name].encode()
    return [
        (name.lower(), value)
        for name, value in untrusted
        if name.lower().replace(b"_", b"-") not in gone and nonce not in value
    ]


# ------------------------------------------------------------------------ replies

_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
# A cookie for the upstream's domain, or for TLS alone, would never come back to the endpoint.
_COOKIE_NOT_HERE: Final = re.compile(rb"(?i);\s*(?:domain=[^;]*|secure)(?=\s*(?:;|$))")


def reply(
    binding: Binding, status: int, untrusted: Iterable[tuple[bytes, bytes]], *, method: str
) -> list[tuple[bytes, bytes]] | Refuse:
    """The headers of a reply, also of an informational one, as the guest gets them.

    The framing is kept: a length where the upstream gave one, chunks where it sent chunks.
    Where it gave neither, so does this, and h11 chooses chunks.

    Args:
        method: of the request; a reply to HEAD may tell a length without having a body.
    """
    headers = tuple([(name.lower(), value) for name, value in untrusted])
    if _CONTROL.search(b" ".join([value for _, value in headers])):
        return Refuse(Reason.REPLY_BAD, 502, "a header of the reply has a control character")
    options = connection_options(headers)
    if options is None:
        return Refuse(Reason.REPLY_BAD, 502, "the reply's Connection header cannot be read")
    if status == 101 and (b"upgrade" not in options or _upgrade_to(headers) != [b"websocket"]):
        return Refuse(Reason.REPLY_BAD, 502, "the reply upgrades to something else")
    gone = _NEVER_DOWN if not options else _NEVER_DOWN | (options - {b"set-cookie"})
    kept: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        if name in gone:
            continue
        if name == b"set-cookie":
            if binding.cookies == "strip":
                continue
            value = _COOKIE_NOT_HERE.sub(b"", value)
        kept.append((name, value))
    if status == 101:
        return [*kept, (b"connection", b"upgrade"), (b"upgrade", b"websocket")]
    return [*kept, *_reply_framing(headers, status, method)]


def keeps(version: bytes, headers: Headers) -> bool:
    """Whether who sent such a reply keeps the connection after it (RFC 9112 section 9.3)."""
    options = connection_options(headers)
    return version == b"1.1" and options is not None and b"close" not in options


def _upgrade_to(headers: Headers) -> list[bytes]:
    """What the reply switches to. The gate lets nothing be asked for but a WebSocket."""
    return [value.lower() for name, value in headers if name == b"upgrade"]


def _reply_framing(headers: Headers, status: int, method: str) -> Headers:
    if status < 200 or status == 204:
        return ()
    names = [name for name, _ in headers]
    if b"transfer-encoding" in names:
        return ((b"transfer-encoding", b"chunked"),)
    lengths = {value for name, value in headers if name == b"content-length"}
    return tuple([(b"content-length", each) for each in sorted(lengths)])
