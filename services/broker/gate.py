"""The gate: whether a request gets a credential.

This module decides, and nothing else does. `judge` takes a request's head and the facts that
are known, and answers in one of three ways:

- `Refuse`: a condition does not hold. The guest gets an error; nothing goes upstream.
- `Later`: all conditions that can be known yet hold. Resolve, connect and ask the store, then
  judge again, with everything. A `Later` is good for nothing else.
- `Inject`: all eight hold. It cannot be made anywhere but here, and nothing can write the
  head of a request to an upstream without one (`forward.request`).

The eight conditions of the design, in the order of `judge`:

1. The connection came in on the socket of an instance that runs, and the bindings of this
   boot are here, all of them.
2. There is one Host, and it is the endpoint of one of them.
3. Method and path match a route of that binding; for git, the repository is listed, and a
   push stays in the instance's namespace. An upgrade is asked for only where it may be.
4. The nonce stands where this kind carries it, and is this instance's, binding's and boot's.
5. The upstream is https, or the binding says `insecure`.
6. The upstream's certificate was verified for the upstream's name.
7. The address that the connection really leads to is not reserved, or the binding allows it.
8. The store answered for this very request, with a credential that can be sent.

Everything is judged anew for each request, on a connection that is kept alive too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Final

import msgspec

from agent_box.broker import git, kinds, nonces, routes
from agent_box.broker.head import Head
from agent_box.broker.lfs import Batch, BatchReader, Issued
from agent_box.broker.refusal import Reason, Refuse
from agent_box.config.addresses import parse_address, reserved
from agent_box.config.egress import BROKER_ZONE
from agent_box.config.model import Binding, Route, Upstream
from agent_box.process.secret import Secret


@dataclass(frozen=True)
class Running:
    """An instance that runs, as this boot of it was told to the broker."""

    instance: str
    name: str
    boot: int
    declared: tuple[str, ...]  # the names of all its bindings, from the registry
    bindings: Mapping[str, Binding]  # what they are, from the config file
    nonces: Mapping[str, str]  # by binding


@dataclass(frozen=True)
class Peer:
    """A connection to an upstream that stands, told by the socket and by TLS themselves."""

    upstream: Upstream
    address: str  # what the socket is connected to
    verified: str | None  # the name that its certificate was verified for; None: no TLS
    ca_file: str | None  # the binding's, which the verification also trusted


class Answer(msgspec.Struct, frozen=True):
    """What the store said when it was asked for one request."""

    serial: int  # of that request's head
    credential: Secret | None  # None: it has none of this name, or cannot read it


class Facts(msgspec.Struct, frozen=True):
    """What is known about a request beside itself. None: not known yet, or not there."""

    socket: str  # id of the instance whose socket it came in on
    running: Running | None
    peer: Peer | None
    answer: Answer | None
    commands: git.Commands | Batch | None  # of a push or an LFS batch call, from its body
    issued: Issued | None  # what the request's LFS link stands for

    def with_upstream(self, peer: Peer, answer: Answer) -> Facts:
        """These, and what was found out last."""
        return Facts(self.socket, self.running, peer, answer, self.commands, self.issued)


Access = Route | git.Access


class Way(msgspec.Struct, frozen=True):
    """Where a request goes: the binding's upstream, or what an LFS link stands for."""

    upstream: Upstream
    insecure: bool
    allow_reserved: bool
    ca_file: str | None


class Later(msgspec.Struct, frozen=True):
    """What can be known yet holds: time to connect, and to ask the store."""

    binding: Binding
    access: Access
    way: Way
    wants_commands: bool  # `Facts.commands` has to be filled in as well, by `reader`


_SEAL: Final = object()


@dataclass(frozen=True)
class Inject:
    """Leave to send one request, with one credential, over one connection."""

    seal: InitVar[object]  # known to `judge` alone, and not kept
    head: Head
    running: Running
    binding: Binding
    access: Access
    issued: Issued | None
    peer: Peer
    credential: Secret

    def __post_init__(self, seal: object) -> None:
        if seal is not _SEAL:
            raise TypeError("only the gate gives leave")


def judge(head: Head, facts: Facts) -> Inject | Later | Refuse:
    """The gate. See the module for what it answers."""
    # 1: whose socket
    running = facts.running
    if running is None or running.instance != facts.socket:
        return Refuse(Reason.NOT_RUNNING, 503, "the instance of this socket does not run")
    if not set(running.declared) == running.bindings.keys() == running.nonces.keys():
        return Refuse(Reason.BINDINGS_INCOMPLETE, 503, "the instance's bindings are not known")
    # 2: which binding
    binding = _binding(head, running)
    if isinstance(binding, Refuse):
        return binding
    # 3: which route
    access = _access(head, binding)
    if isinstance(access, Refuse):
        return access
    refused = _pushed(access, facts.commands, running.name)
    if refused is not None:
        return refused
    issued = _issued(head, access, facts.issued, running, binding)
    if isinstance(issued, Refuse):
        return issued
    # 4: the nonce
    refused = _nonce(head, binding, running.nonces[binding.name])
    if refused is not None:
        return refused
    # 5: https, or an explicit word
    way = _way(binding, issued)
    if way.upstream.scheme != "https" and not way.insecure:
        return Refuse(Reason.UPSTREAM_PLAIN, 502, "the upstream is not https")
    if facts.peer is None or facts.answer is None or _unread(access, facts.commands):
        return Later(binding, access, way, _service(access) in _BODY_READ)
    # 5, 6, 7: this connection
    refused = _peer(facts.peer, way)
    if refused is not None:
        return refused
    # 8: the store's answer to this very request
    credential = _credential(head, facts.answer)
    if isinstance(credential, Refuse):
        return credential
    return Inject(_SEAL, head, running, binding, access, issued, facts.peer, credential)


def _binding(head: Head, running: Running) -> Binding | Refuse:
    hosts = head.get(b"host")
    if len(hosts) != 1:
        return Refuse(Reason.HOST_BAD, 400, "there must be one Host header")
    host = hosts[0].lower().removesuffix(b":80")
    for name, binding in running.bindings.items():
        if name == binding.name and host == f"{name}.{BROKER_ZONE}".encode():
            return binding
    return Refuse(Reason.HOST_UNKNOWN, 421, "Host is the endpoint of no binding of this instance")


def _access(head: Head, binding: Binding) -> Access | Refuse:
    kind = kinds.KINDS.get(binding.kind)
    if kind is None:
        return Refuse(Reason.PATH_UNKNOWN, 501, "this kind of binding is not built")
    if head.upgrade is not None and not (binding.upgrade and head.upgrade == "websocket"):
        return Refuse(Reason.UPGRADE, 403, "the binding does not allow this upgrade")
    if kind.parameters(binding) and b";" in (head.target.query or b""):
        # some servers part parameters there too, and would see one more than we do
        return Refuse(Reason.TARGET_BAD, 400, "the query has a semicolon")
    if not kind.git:
        return routes.find(binding.routes, head.method, head.target)
    access = git.access(binding.repos, head.method, head.target)
    if _service(access) in _BODY_READ and head.get(b"content-encoding"):
        return Refuse(Reason.PUSH_COMMANDS, 415, "this body must come uncompressed")
    return access


# The two whose bodies say what they do, and what they are read to.
_BODY_READ: Final = {
    git.Service.RECEIVE_PACK: git.Commands,
    git.Service.LFS_BATCH: Batch,
}


def _service(access: Access | Refuse) -> git.Service | None:
    return access.service if isinstance(access, git.Access) else None


def _unread(access: Access, commands: git.Commands | Batch | None) -> bool:
    service = _service(access)
    return service in _BODY_READ and not isinstance(commands, _BODY_READ[service])


def _pushed(access: Access, commands: git.Commands | Batch | None, name: str) -> Refuse | None:
    """A push goes to the instance's namespace, and LFS objects where a push may go at all."""
    if _service(access) is git.Service.RECEIVE_PACK and isinstance(commands, git.Commands):
        return git.allowed(commands, name)
    uploads = isinstance(commands, Batch) and commands.upload
    if uploads and _service(access) is git.Service.LFS_BATCH and not _may_push(access):
        return Refuse(Reason.PUSH_OFF, 403, "the binding has no push = true for this repository")
    return None


def _may_push(access: Access) -> bool:
    return isinstance(access, git.Access) and access.repo is not None and access.repo.push


def reader(head: Head, later: Later) -> git.CommandReader | BatchReader:
    """What reads `Facts.commands` from the body of a request that wants them.

    `feed` it the body's bytes until it answers, keep them, and `finish` it when the body ends.
    """
    if _service(later.access) is git.Service.LFS_BATCH:
        return BatchReader(head.length)
    return git.CommandReader()


def _issued(
    head: Head, access: Access, issued: Issued | None, running: Running, binding: Binding
) -> Issued | Refuse | None:
    if _service(access) is not git.Service.LFS_OBJECT:
        return None
    mine = (
        issued is not None
        and isinstance(access, git.Access)
        and access.token == issued.token
        and (issued.instance, issued.boot) == (running.instance, running.boot)
        and (issued.binding, issued.method) == (binding.name, head.method)
        and head.target.query is None
    )
    if issued is None or not mine:
        return Refuse(Reason.LFS_UNKNOWN, 404, "no such link, or its time is over")
    return issued


def _nonce(head: Head, binding: Binding, nonce: str) -> Refuse | None:
    presented = list(kinds.KINDS[binding.kind].presented(binding, head))
    if not presented:
        return Refuse(Reason.NONCE_MISSING, 401, "the key is missing where this binding takes it")
    # each is compared, whatever the others are
    if True not in [nonces.same(each, nonce) for each in presented]:
        return Refuse(Reason.NONCE_WRONG, 401, "the key is not this instance's for this binding")
    return None


def _way(binding: Binding, issued: Issued | None) -> Way:
    """What the binding grants is granted to its own upstream, and not to where a link leads."""
    if issued is None or issued.upstream == binding.upstream:
        return Way(binding.upstream, binding.insecure, binding.allow_reserved, binding.ca_file)
    return Way(issued.upstream, insecure=False, allow_reserved=False, ca_file=None)


def _peer(peer: Peer, way: Way) -> Refuse | None:
    if peer.upstream != way.upstream:
        return Refuse(Reason.UPSTREAM_OTHER, 502, "the connection leads to another upstream")
    plain = way.upstream.scheme == "http" and way.insecure
    if not plain and (peer.verified != way.upstream.host or peer.ca_file != way.ca_file):
        return Refuse(Reason.CERTIFICATE, 502, "the upstream's certificate is not verified")
    if not _reachable(peer.address, way):
        return Refuse(Reason.ADDRESS, 502, "the upstream's address is reserved")
    return None


def _reachable(untrusted_address: str, way: Way) -> bool:
    public = _public(untrusted_address)
    return public is not None and (public or way.allow_reserved)


@functools.lru_cache(maxsize=1024)  # a fact of the address alone
def _public(untrusted_address: str) -> bool | None:
    """Whether an address lies in no reserved range; None for what is no address."""
    try:
        return reserved(parse_address(untrusted_address)) is None
    except ValueError:
        return None  # no address at all, or one with a zone


def addresses(way: Way, untrusted_resolved: Sequence[str]) -> tuple[str, ...] | Refuse:
    """Those of a name's addresses that may be connected to, in the resolver's order."""
    found = tuple(each for each in untrusted_resolved if _reachable(each, way))
    return found or Refuse(Reason.ADDRESS, 502, "the upstream has no address that may be used")


# Visible ASCII with spaces inside: no CR, LF or NUL, nothing that a header cannot carry.
_SENDABLE: Final = re.compile(rb"[!-~](?:[ -~]{0,16382}[!-~])?")


def _credential(head: Head, answer: Answer) -> Secret | Refuse:
    if answer.serial != head.serial:
        return Refuse(Reason.STORE, 503, "the store has not answered for this request")
    if answer.credential is None:
        return Refuse(Reason.CREDENTIAL_MISSING, 503, "the store has no credential to use here")
    if not _SENDABLE.fullmatch(answer.credential.reveal()):
        return Refuse(
            Reason.CREDENTIAL_UNUSABLE, 503, "the credential has characters that no header carries"
        )
    return answer.credential
