"""Which addresses are the host's own, as its kernel says.

A guest that reached one of them would reach whatever listens on the host, so the policy
counts them as reserved. Reading is a file each, so it is done for every question: addresses
come and go with networks.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Final

from agent_box.config.addresses import Network
from agent_box.netstack import routes

_LOCAL: Final = 0x80000000  # RTF_LOCAL of linux/ipv6_route.h
_ANYCAST: Final = 0x00100000  # RTF_ANYCAST
_LEAF: Final = re.compile(r"\|-- ([0-9.]+)\s*$")
_PREFIX: Final = re.compile(r"/([0-9]+) \w+ LOCAL\s*$")


def own(proc: Path = Path("/proc/self/net")) -> frozenset[Network]:
    """The networks that are delivered on this host itself, mostly of one address each.

    Raises:
        OSError: the kernel does not tell. Then nothing may be judged to be not ours.
    """
    try:
        found: set[Network] = set(local_v4((proc / "fib_trie").read_text(encoding="ascii")))
    except FileNotFoundError:
        return frozenset(routes.delivered())  # there is no /proc, as in the jail of a worker
    try:
        found |= local_v6((proc / "ipv6_route").read_text(encoding="ascii"))
    except FileNotFoundError:
        pass  # this kernel has no IPv6
    return frozenset(found)


def local_v4(fib_trie: str) -> set[IPv4Network]:
    """From the text of /proc/net/fib_trie: every prefix of type LOCAL, in each table."""
    found = set()
    address = None
    for line in fib_trie.splitlines():
        if leaf := _LEAF.search(line):
            address = leaf[1]
        elif address is not None and (prefix := _PREFIX.search(line)):
            found.add(IPv4Network((address, int(prefix[1])), strict=False))
    return found


def local_v6(ipv6_route: str) -> set[IPv6Network]:
    """From the text of /proc/net/ipv6_route: every local and anycast destination."""
    found = set()
    for line in ipv6_route.splitlines():
        fields = line.split()
        if len(fields) >= 9 and int(fields[8], 16) & (_LOCAL | _ANYCAST):
            network = ip_network((bytes.fromhex(fields[0]), int(fields[1], 16)), strict=False)
            if isinstance(network, IPv6Network):
                found.add(network)
    return found
