"""Reserved address ranges, and the forms in which an IPv4 address hides inside an IPv6 one.

Pure. Used wherever a destination is judged: the network policy, the loader of policies, and
the broker before it connects to an upstream. A table and two functions, so that all of them
refuse the same addresses.

Sources: the IANA special-purpose address registries for IPv4 and IPv6 (RFC 6890 and its
updates), RFC 4291 (mapped, compatible), RFC 6052 and RFC 8215 (NAT64), RFC 3056 (6to4),
RFC 4380 (Teredo), RFC 5214 (ISATAP), RFC 2765 (translated).
"""

from __future__ import annotations

from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Final

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# Each with the name that a refusal shows. Longest match is not needed: one match is enough.
RESERVED: Final[tuple[tuple[str, Network], ...]] = tuple(
    (name, ip_network(text))
    for name, text in (
        ("this-host", "0.0.0.0/8"),
        ("private", "10.0.0.0/8"),
        ("cgnat", "100.64.0.0/10"),
        ("loopback", "127.0.0.0/8"),
        ("link-local", "169.254.0.0/16"),  # cloud metadata lives here
        ("private", "172.16.0.0/12"),
        ("protocol", "192.0.0.0/24"),
        ("documentation", "192.0.2.0/24"),
        ("6to4-relay", "192.88.99.0/24"),
        ("private", "192.168.0.0/16"),
        ("benchmark", "198.18.0.0/15"),  # our own synthetic addresses are in here
        ("documentation", "198.51.100.0/24"),
        ("documentation", "203.0.113.0/24"),
        ("metadata", "168.63.129.16/32"),  # a public address that one cloud serves its hosts on
        ("multicast", "224.0.0.0/4"),
        ("reserved", "240.0.0.0/4"),  # and limited broadcast
        ("this-host", "::/128"),
        ("loopback", "::1/128"),
        ("nat64-local", "64:ff9b:1::/48"),  # where the IPv4 part lies is a local matter
        ("discard", "100::/64"),
        ("dummy", "100:0:0:1::/64"),
        ("protocol", "2001::/23"),  # Teredo, benchmarking, ORCHID and others
        ("documentation", "2001:db8::/32"),
        ("documentation", "3fff::/20"),
        ("segment-routing", "5f00::/16"),
        ("unique-local", "fc00::/7"),
        ("link-local", "fe80::/10"),
        ("site-local", "fec0::/10"),
        ("multicast", "ff00::/8"),
    )
)

_MAPPED: Final = 0xFFFF << 32  # ::ffff:0:0/96
_TRANSLATED: Final = 0xFFFF << 48  # ::ffff:0:0:0/96
_NAT64: Final = 0x0064FF9B << 96  # 64:ff9b::/96
_LOW: Final = (1 << 32) - 1
_V4: Final = tuple((name, net) for name, net in RESERVED if isinstance(net, IPv4Network))
_V6: Final = tuple((name, net) for name, net in RESERVED if isinstance(net, IPv6Network))


def parse_address(untrusted_text: str) -> Address:
    """Reads an address strictly: no octal, no hexadecimal, no short IPv4 form, no zone.

    A v4-mapped IPv6 address is the IPv4 address itself: a connection to one is a connection
    to the other, so they must not be judged apart.

    Raises:
        ValueError: it is not an address.
    """
    if "%" in untrusted_text:
        raise ValueError(f"{untrusted_text!r} names a zone")
    return plain(ip_address(untrusted_text))


def plain(address: Address) -> Address:
    """The IPv4 address for a v4-mapped IPv6 one; else the address itself."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def plain_network(network: Network) -> Network:
    """The IPv4 network for one that lies within the v4-mapped range; else itself."""
    if (
        isinstance(network, IPv6Network)
        and network.prefixlen >= 96
        and int(network.network_address) >> 32 == _MAPPED >> 32
    ):
        low = IPv4Address(int(network.network_address) & _LOW)
        return IPv4Network((low, network.prefixlen - 96))
    return network


def embedded(address: Address) -> tuple[IPv4Address, ...]:
    """The IPv4 addresses that a packet to this IPv6 address may end up at; none for IPv4.

    NAT64, 6to4, Teredo (its server and its client), ISATAP, v4-mapped, v4-compatible and
    v4-translated. The caller judges each as if it had been named itself.
    """
    if isinstance(address, IPv4Address):
        return ()
    value = int(address)
    low = IPv4Address(value & _LOW)
    high = value & ~_LOW
    found: list[IPv4Address] = []
    if high in (_MAPPED, _TRANSLATED, _NAT64) or (high == 0 and value > 1):
        found.append(low)
    if value >> 112 == 0x2002:
        found.append(IPv4Address((value >> 80) & _LOW))
    if value >> 96 == 0x20010000:
        found.append(IPv4Address((value >> 64) & _LOW))
        found.append(IPv4Address((value & _LOW) ^ _LOW))
    if (value >> 32) & 0xFDFFFFFF == 0x00005EFE:
        found.append(low)
    return tuple(found)


def reserved(address: Address) -> str | None:
    """The name of the reserved range that the address, or one hidden in it, lies in.

    Returns:
        A name of `RESERVED`, or None when every form of the address is an ordinary one.
    """
    address = plain(address)
    if isinstance(address, IPv4Address):
        for name, net4 in _V4:
            if address in net4:
                return name
        return None
    for name, net6 in _V6:
        if address in net6:
            return name
    for inner in embedded(address):
        within = reserved(inner)
        if within is not None:
            return within
    return None


def reserved_network(network: Network) -> str | None:
    """The reserved range that holds the *whole* network; None when any part is ordinary.

    A rule for such a network is of no use without leave for reserved addresses, so it is
    refused when it is written. A wider network may hold reserved parts; those are judged
    address by address.
    """
    network = plain_network(network)
    if isinstance(network, IPv4Network):
        for name, net4 in _V4:
            if network.subnet_of(net4):
                return name
        return None
    for name, net6 in _V6:
        if network.subnet_of(net6):
            return name
    # Forms that hide an IPv4 network: ordinary unless that IPv4 network is reserved whole.
    first = int(network.network_address)
    if network.prefixlen >= 96 and first & ~_LOW in (_TRANSLATED, _NAT64, 0):
        return reserved_network(IPv4Network((first & _LOW, network.prefixlen - 96)))
    if network.prefixlen >= 16 and first >> 112 == 0x2002:
        inner = IPv4Network(((first >> 80) & _LOW, min(network.prefixlen - 16, 32)))
        return reserved_network(inner)
    return None
