"""The words of a network policy: hosts, networks, ports, protocols; read once, in one way.

Pure. The config loader, the registry and the policy function of netstack all read targets
through this module, so what is accepted when a policy is written is what is enforced.

A host is kept in one form: lowercase A-labels without a trailing dot. A name that a resolver
or a C library might take for an address in disguise (``127.1``, ``0x7f000001``,
``2130706433``) is not a name and is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_network
from typing import Any, Final

from agent_box.config.addresses import Network, plain_network

NAME_MAX: Final = 253  # RFC 1035: 255 octets on the wire
PORTS_MAX: Final = 16  # ports and ranges in one rule; its id shows them all
RULES_MAX: Final = 512  # in one policy
PORT_DEFAULT: Final = 443
BROKER_ZONE: Final = "broker.internal"  # answered at the gateway; no policy speaks about it

# RFC 1123 labels; an underscore is no host name by the book, and real ones have it.
_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PROTOCOL: Final = re.compile(r"/([A-Za-z]+)$")


class Protocol(StrEnum):
    TCP = "tcp"
    UDP = "udp"


class Mode(StrEnum):
    DENY = "deny"  # nothing but the broker's endpoints
    ALLOWLIST = "allowlist"  # what a rule allows
    OPEN = "open"  # what no rule denies


class Action(StrEnum):
    ALLOW = "allow"
    DENY = "deny"


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a rule or a question is about. Exactly one of `host` and `network` is set.

    `host` is in the one form, possibly with a leading ``*.``; `ports` are inclusive ranges,
    sorted, disjoint and not adjacent.
    """

    host: str | None
    network: Network | None
    ports: tuple[tuple[int, int], ...]
    protocol: Protocol

    def __str__(self) -> str:
        """The text that `parse_target` reads back as this target, port and protocol in full."""
        if self.host is not None:
            where = self.host
        elif self.network is None:
            raise ValueError("a target has a host or a network")
        elif self.network.prefixlen == self.network.max_prefixlen:
            address = str(self.network.network_address)
            where = f"[{address}]" if self.network.version == 6 else address
        else:
            where = f"[{self.network}]" if self.network.version == 6 else str(self.network)
        return f"{where}:{ports_text(self.ports)}/{self.protocol}"


@dataclass(frozen=True, kw_only=True)
class Selector:
    """Which targets are meant: None for `ports` and `protocol` means whichever they have."""

    host: str | None
    network: Network | None
    ports: tuple[tuple[int, int], ...] | None
    protocol: Protocol | None

    def selects(self, target: Target) -> bool:
        return (
            (self.host, self.network) == (target.host, target.network)
            and self.ports in (None, target.ports)
            and self.protocol in (None, target.protocol)
        )


def rule_id(action: Action, target: Target, *, sni: bool, allow_reserved: bool) -> str:
    """The id of a rule: all that it says, readable, the same wherever it is computed."""
    return f"{action}:{target}{'' if sni else '+no-sni'}{'+reserved' if allow_reserved else ''}"


def rule_fields(
    action: Action, target: Target, *, sni: bool, allow_reserved: bool
) -> dict[str, Any]:
    """A rule as it crosses process borders: the fields of `Rule` and `PolicyRule`."""
    return {
        "id": rule_id(action, target, sni=sni, allow_reserved=allow_reserved),
        "action": action.value,
        "host": target.host,
        "network": None if target.network is None else str(target.network),
        "ports": list(target.ports),
        "protocol": target.protocol.value,
        "sni": sni,
        "allow_reserved": allow_reserved,
    }


def host(untrusted_name: str, *, wildcard: bool = False) -> str:
    """A host name in its one form.

    Args:
        untrusted_name: any case, U-labels or A-labels, with or without a trailing dot.
        wildcard: whether ``*.`` may lead. It stands for any depth below, not for the apex.

    Raises:
        ValueError: one line that says what is wrong with it.
    """
    name = untrusted_name[:-1] if untrusted_name.endswith(".") else untrusted_name
    prefix = ""
    if wildcard and name.startswith("*."):
        prefix, name = "*.", name[2:]
    if not name.isascii():
        name = _to_ascii(untrusted_name, name)
    name = name.lower()
    if not name or len(name) > NAME_MAX:
        raise ValueError(f"{_shown(untrusted_name)} is not a host name of 1 to 253 characters")
    labels = name.split(".")
    for label in labels:
        if not _LABEL.fullmatch(label):
            raise ValueError(f"{_shown(untrusted_name)} has the invalid label {_shown(label)}")
        if label.startswith("xn--"):
            _check_a_label(untrusted_name, label)
    if _NUMBER.fullmatch(labels[-1]):
        raise ValueError(f"{_shown(untrusted_name)} is neither a name nor a plain address")
    return prefix + name


def network(untrusted_text: str) -> Network:
    """A CIDR network or a single address, strictly: no host bits, no short IPv4 forms.

    Raises:
        ValueError: one line that says what is wrong with it.
    """
    try:
        if "%" in untrusted_text:
            raise ValueError("zone")
        found = ip_network(untrusted_text, strict=True)
    except ValueError:
        raise ValueError(
            f"{_shown(untrusted_text)} is not an address or a network like 192.0.2.0/24"
        ) from None
    if "/" in untrusted_text and not untrusted_text.rpartition("/")[2].isdigit():
        raise ValueError(f"{_shown(untrusted_text)}: write the mask as a number of bits")
    return plain_network(found)


def ports(untrusted_ports: object) -> tuple[tuple[int, int], ...]:
    """A list of ports (443) and ranges ("8000-8999") as sorted, merged, inclusive ranges.

    Raises:
        ValueError: one line that says what is wrong with it.
    """
    if not isinstance(untrusted_ports, (list, tuple)) or not untrusted_ports:
        raise ValueError("ports is a list of at least one port")
    if len(untrusted_ports) > PORTS_MAX:
        raise ValueError(f"more than {PORTS_MAX} ports in one rule: use ranges")
    ranges = sorted(_port_range(item) for item in untrusted_ports)
    merged = [ranges[0]]
    for first, last in ranges[1:]:
        if first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


def ports_text(ranges: tuple[tuple[int, int], ...]) -> str:
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def parse_target(untrusted_text: str, *, wildcard: bool) -> Target:
    """Reads ``HOST[:PORTS][/PROTOCOL]``, where HOST is a name, an address or a network.

    PORTS is a port, a range or a comma-separated list of them; 443 when left out, and the
    protocol is tcp when left out. An IPv6 address with a port stands in brackets.

    Raises:
        ValueError: one line that names the text and says what is wrong with it.
    """
    written = parse_selector(untrusted_text, wildcard=wildcard)
    return Target(
        host=written.host,
        network=written.network,
        ports=ports([PORT_DEFAULT]) if written.ports is None else written.ports,
        protocol=Protocol.TCP if written.protocol is None else written.protocol,
    )


def parse_selector(untrusted_text: str, *, wildcard: bool) -> Selector:
    """Reads the same text as `parse_target`; what was left out stands for all there is.

    Raises:
        ValueError: as `parse_target`.
    """
    text = untrusted_text
    protocol = None
    suffix = _PROTOCOL.search(text)
    if suffix:
        try:
            protocol = Protocol(suffix.group(1).lower())
        except ValueError:
            raise ValueError(f"{_shown(untrusted_text)}: the protocol is tcp or udp") from None
        text = text[: suffix.start()]
    if text.startswith("["):
        where, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")) or ":" not in where:
            raise ValueError(f"{_shown(untrusted_text)} is not [IPv6 ADDRESS]:PORT")
        port_text = rest[1:] if rest else None
    elif text.count(":") > 1:
        where, port_text = text, None
    else:
        where, colon, after = text.partition(":")
        port_text = after if colon else None
    ranges = None
    if port_text is not None:
        try:
            ranges = ports(port_text.split(","))
        except ValueError as error:
            raise ValueError(f"{_shown(untrusted_text)}: {error}") from None
    if ":" in where or "/" in where or _is_number(where):
        return Selector(host=None, network=network(where), ports=ranges, protocol=protocol)
    name = host(where, wildcard=wildcard)
    return Selector(host=name, network=None, ports=ranges, protocol=protocol)


def in_broker_zone(name: str) -> bool:
    """Whether a name in its one form, wildcard or not, lies in the broker's own zone."""
    bare = name.removeprefix("*.")
    return bare == BROKER_ZONE or bare.endswith("." + BROKER_ZONE)


def _is_number(text: str) -> bool:
    """Whether the last label is a number: then it is an address or nothing at all."""
    return bool(_NUMBER.fullmatch(text.removesuffix(".").rpartition(".")[2].lower()))


def _port_range(item: object) -> tuple[int, int]:
    if isinstance(item, int) and not isinstance(item, bool):
        first = last = item
    elif isinstance(item, str) and re.fullmatch(r"[0-9]{1,5}(-[0-9]{1,5})?", item, re.ASCII):
        low, _, high = item.partition("-")
        first, last = int(low), int(high or low)
    else:
        raise ValueError(f"{_shown(str(item))} is not a port or a range like 8000-8999")
    if not 1 <= first <= last <= 65535:
        raise ValueError(f"{_shown(str(item))} is not a port from 1 to 65535")
    return first, last


def _to_ascii(untrusted_name: str, name: str) -> str:
    import idna  # half a megabyte of tables, needed only for a name that is not ASCII

    if not name.isprintable():  # the mapping would drop invisible characters without a word
        raise ValueError(f"{_shown(untrusted_name)} has an invisible character")
    try:
        return idna.encode(name, uts46=True, transitional=False, std3_rules=True).decode()
    except (idna.IDNAError, UnicodeError) as error:
        raise ValueError(f"{_shown(untrusted_name)} is not a valid name: {error}") from None


def _check_a_label(untrusted_name: str, label: str) -> None:
    """An A-label must decode, and to something that is not ASCII; else it is a disguise."""
    try:
        decoded = label[4:].encode().decode("punycode")
    except UnicodeError:
        decoded = ""
    if not decoded or decoded.isascii():
        raise ValueError(f"{_shown(untrusted_name)} has the invalid label {_shown(label)}")


def _shown(untrusted_text: str) -> str:
    """A piece of somebody's text, short and in quotes, for a one-line message."""
    return repr(untrusted_text if len(untrusted_text) <= 80 else untrusted_text[:77] + "...")
