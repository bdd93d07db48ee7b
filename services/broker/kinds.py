"""The kinds of binding: where a guest puts its nonce, and where the credential then goes.

The one table of kinds that are built. What each row says is told in docs/broker.md, which is
made from it.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote_to_bytes

import msgspec

from agent_box.broker.head import Head
from agent_box.config.model import KINDS as CONFIGURABLE
from agent_box.config.model import Binding

Headers = tuple[tuple[bytes, bytes], ...]


class Placed(msgspec.Struct, frozen=True):
    """What carries the credential upstream: headers, and pairs to add to the query."""

    headers: Headers
    query: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True)
class Kind:
    """One kind.

    `presented` gives everything that the guest sent where this kind's nonce belongs; `place`
    takes the credential. `parameters` are query parameters that never come from a guest.
    """

    nonce_in: str  # for people
    credential_in: str
    presented: Callable[[Binding, Head], Iterator[bytes]]
    place: Callable[[Binding, Head, bytes], Placed]
    parameters: Callable[[Binding], frozenset[bytes]]
    git: bool = False  # its paths are git's, from `repos`


_BEARER: Final = re.compile(rb"(?i:bearer) +([!-~]+)")
_BASIC: Final = re.compile(rb"(?i:basic) +([A-Za-z0-9+/]+={0,2})")
_SCHEMED: Final = re.compile(rb"([A-Za-z][A-Za-z0-9-]{0,31}) +([!-~]+)")
# What the provider gives to those who log in, instead of to those who pay by key.
_ANTHROPIC_OAUTH: Final = b"sk-ant-oat"
_ANTHROPIC_OAUTH_BETA: Final = b"oauth-2025-04-20"


def _bearer(head: Head) -> Iterator[bytes]:
    for value in head.get(b"authorization"):
        found = _BEARER.fullmatch(value)
        if found is not None:
            yield found[1]


def _basic(binding: Binding, head: Head) -> Iterator[bytes]:
    """The password; the user is the client's affair."""
    for value in head.get(b"authorization"):
        found = _BASIC.fullmatch(value)
        if found is not None:
            try:
                pair = b64decode(found[1], validate=True)
            except ValueError:
                continue  # no nonce then, which is a refusal
            yield pair.partition(b":")[2]


def _parameter(name: bytes, head: Head) -> Iterator[bytes]:
    for each, value in pairs(head.target.query):
        if each == name:
            yield value


def pairs(query: bytes | None) -> Iterator[tuple[bytes, bytes]]:
    """The parameters of a query, decoded once."""
    for piece in (query or b"").split(b"&"):
        name, _, value = piece.partition(b"=")
        yield _decoded(name), _decoded(value)


def _decoded(text: bytes) -> bytes:
    return unquote_to_bytes(text.replace(b"+", b" "))


def _place_anthropic(binding: Binding, head: Head, credential: bytes) -> Placed:
    if not credential.startswith(_ANTHROPIC_OAUTH):
        return Placed(((b"x-api-key", credential),))
    headers: Headers = ((b"authorization", b"Bearer " + credential),)
    asked = b",".join(head.get(b"anthropic-beta"))
    if _ANTHROPIC_OAUTH_BETA not in (each.strip() for each in asked.split(b",")):
        headers += ((b"anthropic-beta", _ANTHROPIC_OAUTH_BETA),)
    return Placed(headers)


def _place_bearer(binding: Binding, head: Head, credential: bytes) -> Placed:
    return Placed(((b"authorization", b"Bearer " + credential),))


def _place_google(binding: Binding, head: Head, credential: bytes) -> Placed:
    return Placed(((b"x-goog-api-key", credential),))


def _of_header(binding: Binding) -> bytes:
    if binding.header is None:
        raise ValueError("a binding of kind header has a header")
    return binding.header.encode()


def _presented_header(binding: Binding, head: Head) -> Iterator[bytes]:
    """The value, or what follows its scheme, as in `Authorization: token NONCE`."""
    for value in head.get(_of_header(binding)):
        found = _SCHEMED.fullmatch(value)
        yield value if found is None else found[2]


def _place_header(binding: Binding, head: Head, credential: bytes) -> Placed:
    """With the scheme that the guest wrote before its nonce, if any."""
    name = _of_header(binding)
    schemed = next((_SCHEMED.fullmatch(value) for value in head.get(name)), None)
    scheme = b"" if schemed is None else schemed[1] + b" "
    return Placed(((name, scheme + credential),))


def _place_basic(binding: Binding, head: Head, credential: bytes) -> Placed:
    if binding.basic_user is None:
        raise ValueError("a binding of this kind has a basic_user")
    pair = b64encode(binding.basic_user.encode() + b":" + credential)
    return Placed(((b"authorization", b"Basic " + pair),))


def _of_query(binding: Binding) -> bytes:
    if binding.query is None:
        raise ValueError("a binding of kind query has a query")
    return binding.query.encode()


def _place_query(binding: Binding, head: Head, credential: bytes) -> Placed:
    return Placed((), ((_of_query(binding), quote(credential, safe="").encode()),))


def _presented_anthropic(binding: Binding, head: Head) -> Iterator[bytes]:
    yield from head.get(b"x-api-key")
    yield from _bearer(head)


def _presented_google(binding: Binding, head: Head) -> Iterator[bytes]:
    yield from head.get(b"x-goog-api-key")
    yield from _parameter(b"key", head)


def _none(binding: Binding) -> frozenset[bytes]:
    return frozenset()


KINDS: Final[Mapping[str, Kind]] = {
    "anthropic": Kind(
        nonce_in="`x-api-key`, or `Authorization: Bearer`",
        credential_in="`x-api-key`; `Authorization: Bearer` for an OAuth token (`sk-ant-oat…`)",
        presented=_presented_anthropic,
        place=_place_anthropic,
        parameters=_none,
    ),
    "openai": Kind(
        nonce_in="`Authorization: Bearer`",
        credential_in="the same",
        presented=lambda binding, head: _bearer(head),
        place=_place_bearer,
        parameters=_none,
    ),
    "google": Kind(
        nonce_in="`x-goog-api-key`, or the query's `key`",
        credential_in="`x-goog-api-key`",
        presented=_presented_google,
        place=_place_google,
        parameters=lambda binding: frozenset((b"key", b"access_token")),
    ),
    "header": Kind(
        nonce_in="the binding's `header`, alone or after a scheme (`token NONCE`)",
        credential_in="the same header, after the same scheme",
        presented=_presented_header,
        place=_place_header,
        parameters=_none,
    ),
    "basic": Kind(
        nonce_in="the password of `Authorization: Basic`, after any user",
        credential_in="the password, after `basic_user`",
        presented=_basic,
        place=_place_basic,
        parameters=_none,
    ),
    "query": Kind(
        nonce_in="the binding's `query` parameter",
        credential_in="the same parameter",
        presented=lambda binding, head: _parameter(_of_query(binding), head),
        place=_place_query,
        parameters=lambda binding: frozenset((_of_query(binding).lower(),)),
    ),
    "git-basic": Kind(
        nonce_in="the password of `Authorization: Basic`, after any user",
        credential_in="the password, after `basic_user`",
        presented=_basic,
        place=_place_basic,
        parameters=_none,
        git=True,
    ),
}
# The config knows them and this version serves none: an instance with one is not started.
UNBUILT: Final = tuple(kind for kind in CONFIGURABLE if kind not in KINDS)
