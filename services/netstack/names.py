"""The names that a guest may reach, and the address that stands for each of them.

The guest's resolver is the gateway. A name that the policy allows gets an address of its own
out of 198.18.0.0/15 (RFC 2544: no network uses it), the same for as long as the VM runs, and a
flow to that address is a flow to that name. Addresses are never used again within a boot, so an
old answer never leads somewhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ipaddress import IPv4Address
from typing import Final, Literal, Protocol

from agent_box.config import egress
from agent_box.netstack import dnswire
from agent_box.netstack.contract import Verdict
from agent_box.netstack.dnswire import AAAA, PTR, A, Query
from agent_box.netstack.packet import GATEWAY

RANGE_FIRST: Final = int(IPv4Address("198.18.0.0"))
RANGE_LAST: Final = int(IPv4Address("198.19.255.255"))
_HANDED_FIRST: Final = int(IPv4Address("198.18.1.0"))
NAMES_MAX: Final = 65536  # of one boot
TTL_S: Final = 60
UNASSIGNED: Final = Verdict(
    verdict="deny", rule="address:unassigned", why="no name has this address"
)
_ARPA: Final = re.compile(r"(\d{1,3})\.(\d{1,3})\.(\d{1,3})\.(\d{1,3})\.in-addr\.arpa")


class Names:
    """The map of one boot."""

    def __init__(self, most: int = NAMES_MAX) -> None:
        self._most = most
        self._address: dict[str, bytes] = {}
        self._name: dict[bytes, str] = {}

    def __len__(self) -> int:
        return len(self._name)

    def address(self, name: str) -> bytes | None:
        """The address of a name in its one form; None when there are no more."""
        known = self._address.get(name)
        if known is None:
            if len(self._name) >= self._most:
                return None
            known = (_HANDED_FIRST + len(self._name)).to_bytes(4, "big")
            self._address[name] = known
            self._name[known] = name
        return known

    def name(self, address: bytes) -> str | None:
        """The name behind an address that was handed out."""
        return self._name.get(address)


def synthetic(address: bytes) -> bool:
    """Whether the address lies where only we hand addresses out."""
    return RANGE_FIRST <= int.from_bytes(address, "big") <= RANGE_LAST


class Upstream(Protocol):
    """The host's resolver, as `Dns` needs it."""

    def lookup(self, name: str, done: Callable[[Found], None]) -> None: ...


class Found:
    """What a look-up of a name's addresses came to."""

    __slots__ = ("addresses", "aliases", "status", "ttl")

    def __init__(
        self,
        status: Literal["found", "no-such-name", "failed"],
        addresses: tuple[str, ...] = (),
        aliases: tuple[str, ...] = (),
        ttl: float = 0.0,
    ) -> None:
        self.status = status
        self.addresses = addresses
        self.aliases = aliases
        self.ttl = ttl


class Dns:
    """Answers the guest's queries.

    Args:
        judge: the policy about a name.
        denied: gets each refusal.
        full: called when there is no more address to hand out.
    """

    def __init__(
        self,
        names: Names,
        upstream: Upstream,
        judge: Callable[[str], Verdict],
        denied: Callable[[str, Verdict], None],
        full: Callable[[], None],
    ) -> None:
        self._names = names
        self._upstream = upstream
        self._judge = judge
        self._denied = denied
        self._full = full

    def ask(self, untrusted_message: bytes, answer: Callable[[bytes], None], *, udp: bool) -> bool:
        """Calls `answer` once, now or later. False: never, since it deserves no answer."""
        try:
            query = dnswire.read_query(untrusted_message)
        except dnswire.Malformed:
            bare = dnswire.error(untrusted_message, dnswire.FORMERR)
            if bare is None:
                return False
            answer(bare)
            return True
        limit = (query.size or dnswire.UDP_PLAIN) if udp else 65535
        if not query.standard:
            answer(dnswire.reply(query, dnswire.NOTIMP, limit=limit))
            return True
        if not query.internet:
            answer(dnswire.reply(query, dnswire.REFUSED, limit=limit))
            return True
        if (arpa := _ARPA.fullmatch(query.name)) is not None:
            reverse = self._reverse(query, ".".join(reversed(arpa.groups())), limit)
            if reverse is not None:
                answer(reverse)
                return True
        verdict = self._judge(query.name)
        if verdict.verdict != "allow":
            self._denied(query.name, verdict)
            answer(dnswire.reply(query, dnswire.NXDOMAIN, limit=limit))
            return True
        name = egress.host(query.name)
        if egress.in_broker_zone(name):
            here = (GATEWAY,) if query.kind == A else ()
            answer(dnswire.reply(query, dnswire.NOERROR, here, ttl=TTL_S, limit=limit))
            return True
        if query.kind not in (A, AAAA):
            answer(dnswire.reply(query, dnswire.NOERROR, limit=limit))
            return True
        self._upstream.lookup(name, lambda found: answer(self._answer(query, name, found, limit)))
        return True

    def _answer(self, query: Query, name: str, found: Found, limit: int) -> bytes:
        if found.status == "no-such-name":
            return dnswire.reply(query, dnswire.NXDOMAIN, limit=limit)
        if found.status == "failed":
            return dnswire.reply(query, dnswire.SERVFAIL, limit=limit)
        if query.kind != A or not found.addresses:
            return dnswire.reply(query, dnswire.NOERROR, limit=limit)
        address = self._names.address(name)
        if address is None:
            self._full()
            return dnswire.reply(query, dnswire.SERVFAIL, limit=limit)
        return dnswire.reply(query, dnswire.NOERROR, (address,), ttl=TTL_S, limit=limit)

    def _reverse(self, query: Query, text: str, limit: int) -> bytes | None:
        """About one of our own addresses; such a question never leaves the host."""
        try:
            address = IPv4Address(text).packed
        except ValueError:
            return None
        if not synthetic(address):
            return None
        name = self._names.name(address)
        if name is None:
            return dnswire.reply(query, dnswire.NXDOMAIN, limit=limit)
        if query.kind != PTR:
            return dnswire.reply(query, dnswire.NOERROR, limit=limit)
        return dnswire.pointer_reply(query, name, ttl=TTL_S, limit=limit)
