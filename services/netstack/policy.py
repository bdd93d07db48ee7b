"""The network policy: may this flow be? One pure function, for the question and for the deed.

`load` reads a policy that came over a wire, once, and refuses what it does not fully
understand; `Rules.decide` answers for a flow, `Rules.decide_name` for a look-up.

A decision in order, the first that says no or has the last word:

1. Text that is no name, address or port is denied.
2. A broker endpoint is allowed when the instance has the binding.
3. A matching deny rule denies. A name, the SNI and every form of the address count.
4. The mode: `deny` denies all; `allowlist` needs an allow rule; `open` does not.
5. The most specific matching allow rule governs: an exact host before a wildcard, a longer
   wildcard or network before a shorter one, fewer ports before more, the stricter of two
   that are alike.
6. A reserved destination needs `allow_reserved` on the rule that governs.
7. On port 443 a TLS client must name its server, unless that rule says `sni = false`, and
   must name the one it asked the resolver for.

A flow is judged as its facts arrive: the name, then the address, then the ClientHello. Each
fact can only turn an allow into a deny, so judging early is safe. A network rule speaks
about bare addresses; a flow to a name needs a host rule (or the mode `open`), because what
the name resolves to is not the operator's choice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from agent_box.config import egress
from agent_box.config.addresses import Address, Network, embedded, parse_address, reserved
from agent_box.config.egress import Action, Mode, Protocol, Target
from agent_box.netstack.contract import Flow, Policy, Rule, Verdict

TLS_PORT: Final = 443
BROKER_PORT: Final = 80
_LOCAL_NAME: Final = "localhost"  # RFC 6761: it and all below it are this host


class PolicyInvalid(ValueError):
    """A policy that cannot be enforced as it stands. Its instance gets no network."""


@dataclass(frozen=True)
class _Loaded:
    id: str
    action: Action
    target: Target
    sni: bool
    allow_reserved: bool

    def speaks_of(self, protocol: Protocol, port: int) -> bool:
        target = self.target
        return target.protocol is protocol and any(a <= port <= b for a, b in target.ports)

    def rank(self) -> tuple[int, int, int, bool, bool, str]:
        """Smallest governs. Total, so that the order in which rules stand means nothing."""
        target = self.target
        if target.host is not None:
            labels = target.host.count(".")
            kind, width = (1, -labels) if target.host.startswith("*.") else (0, 0)
        elif target.network is not None:
            kind, width = 2, target.network.max_prefixlen - target.network.prefixlen
        else:
            raise PolicyInvalid(f"rule {self.id!r} has neither a host nor a network")
        ports = sum(b - a + 1 for a, b in target.ports)
        return (kind, width, ports, self.allow_reserved, not self.sni, self.id)


class Rules:
    """A policy, understood. Immutable; make a new one for a new generation.

    Attributes:
        generation: of the policy it was made from.
    """

    def __init__(self, untrusted_policy: Policy) -> None:
        """Raises `PolicyInvalid`, in one line that names the rule or field."""
        policy = untrusted_policy
        self.generation = policy.generation
        self._mode = Mode(policy.mode)
        if policy.generation < 1:
            raise PolicyInvalid("the generation of a policy counts from 1")
        if self._mode is Mode.OPEN and not policy.allow_open:
            raise PolicyInvalid("mode open needs allow_open")
        if len(policy.rules) > egress.RULES_MAX:
            raise PolicyInvalid(f"more than {egress.RULES_MAX} rules")
        self._exact: dict[str, list[_Loaded]] = {}
        self._below: dict[str, list[_Loaded]] = {}
        self._networks: list[tuple[Network, _Loaded]] = []
        seen: set[str] = set()
        for rule in policy.rules:
            loaded = _load_rule(rule)
            if loaded.id in seen:
                raise PolicyInvalid(f"rule {loaded.id!r} stands twice")
            seen.add(loaded.id)
            name = loaded.target.host
            if loaded.target.network is not None:
                self._networks.append((loaded.target.network, loaded))
            elif name is not None and name.startswith("*."):
                self._below.setdefault(name[2:], []).append(loaded)
            elif name is not None:
                self._exact.setdefault(name, []).append(loaded)
        self._endpoints: dict[str, str] = {}
        for binding in policy.endpoints:
            try:
                name = egress.host(f"{binding}.{egress.BROKER_ZONE}")
            except ValueError as error:
                raise PolicyInvalid(f"binding {binding!r}: {error}") from None
            if name in self._endpoints:
                raise PolicyInvalid(f"binding {binding!r} stands twice")
            self._endpoints[name] = binding

    def decide(self, flow: Flow, *, own: Collection[Network]) -> Verdict:
        """Whether the flow may be, by all that is known of it now.

        Args:
            flow: the facts; text in it may come straight from a guest.
            own: networks of the host itself, which count as reserved; see `own`.

        Never raises: what cannot be understood is denied.
        """
        try:
            facts = _Facts.read(flow)
        except _Unclear as unclear:
            return _deny(unclear.rule, unclear.why)
        if facts.name is not None and egress.in_broker_zone(facts.name):
            return self._broker(facts.name, facts.protocol, facts.port)
        denying = _first(r for r in self._matching(facts, Action.DENY))
        if denying is not None:
            return _deny(denying.id, "a deny rule matches")
        if self._mode is Mode.DENY:
            return _deny("mode:deny", "the policy allows nothing but the broker's endpoints")
        governing = _first(r for r in self._matching(facts, Action.ALLOW))
        if governing is None and self._mode is Mode.ALLOWLIST:
            return _deny("mode:allowlist", "no rule allows it")
        within = facts.reserved(own)
        if within is not None and not (governing is not None and governing.allow_reserved):
            return _deny(f"reserved:{within}", f"the destination is reserved ({within})")
        if facts.protocol is Protocol.TCP and facts.port == TLS_PORT:
            if facts.hello == "no-name" and (governing is None or governing.sni):
                return _deny("sni:missing", "on port 443 a TLS client must name its server")
            if facts.sni is not None and facts.name is not None and facts.sni != facts.name:
                return _deny("sni:mismatch", "the TLS client names another server")
        if governing is None:
            return Verdict(verdict="allow", rule="mode:open", why="no rule denies it")
        return Verdict(verdict="allow", rule=governing.id, why="an allow rule matches")

    def decide_name(self, untrusted_name: str) -> Verdict:
        """Whether a look-up of the name may leave the host: whether any flow to it could be.

        Returns the verdict of such a flow, or, when there is none, of one to port 443.
        """

        def ask(protocol: Protocol, port: int) -> Verdict:
            flow = Flow(
                name=untrusted_name,
                address=None,
                port=port,
                protocol=protocol.value,
                hello="unread",
                sni=None,
            )
            return self.decide(flow, own=())

        usual = ask(Protocol.TCP, TLS_PORT)
        try:
            name = egress.host(untrusted_name)
        except ValueError:
            return usual
        if egress.in_broker_zone(name):
            return ask(Protocol.TCP, BROKER_PORT)
        # Between two edges of the rules' ranges the verdict is the same for every port.
        edges = {(Protocol.TCP, 1), (Protocol.UDP, 1)}
        for rule in self._for_name(name):
            for first, last in rule.target.ports:
                edges.add((rule.target.protocol, first))
                edges.add((rule.target.protocol, min(last + 1, 65535)))
        for protocol, port in [(Protocol.TCP, TLS_PORT), *sorted(edges)]:
            verdict = ask(protocol, port)
            if verdict.verdict == "allow":
                return verdict
        return usual

    def _broker(self, name: str, protocol: Protocol, port: int) -> Verdict:
        binding = self._endpoints.get(name)
        if binding is None:
            return _deny("broker:unknown", "the instance has no such binding")
        if protocol is not Protocol.TCP or port != BROKER_PORT:
            return _deny(f"broker:{binding}", "a broker endpoint is tcp port 80")
        return Verdict(verdict="allow", rule=f"broker:{binding}", why="an endpoint of the broker")

    def _for_name(self, name: str) -> Iterable[_Loaded]:
        yield from self._exact.get(name, ())
        rest = name
        while "." in rest:
            rest = rest.partition(".")[2]
            yield from self._below.get(rest, ())

    def _matching(self, facts: _Facts, action: Action) -> Iterable[_Loaded]:
        if action is Action.DENY:
            names, addresses = facts.all_names(), facts.all_addresses()
        else:
            names = () if facts.name is None else (facts.name,)
            bare = facts.name is None and facts.address is not None
            addresses = (facts.address,) if bare and facts.address is not None else ()
        for name in names:
            for rule in self._for_name(name):
                if rule.action is action and rule.speaks_of(facts.protocol, facts.port):
                    yield rule
        if addresses:
            for network, rule in self._networks:
                if (
                    rule.action is action
                    and rule.speaks_of(facts.protocol, facts.port)
                    and any(_within(address, network) for address in addresses)
                ):
                    yield rule


def load(untrusted_policy: Policy) -> Rules:
    """Reads a policy that came over a wire.

    Raises:
        PolicyInvalid: it cannot be enforced as it stands; one line names the rule or field.
    """
    return Rules(untrusted_policy)


class _Unclear(Exception):
    def __init__(self, rule: str, why: str) -> None:
        super().__init__(why)
        self.rule = rule
        self.why = why


@dataclass(frozen=True)
class _Facts:
    """A flow in the one form of everything."""

    name: str | None
    address: Address | None
    port: int
    protocol: Protocol
    hello: Literal["unread", "no-name", "named"]
    sni: str | None

    @classmethod
    def read(cls, flow: Flow) -> _Facts:
        name = sni = None
        address = None
        if flow.name is not None:
            name = _name(flow.name, "name:invalid")
        if flow.address is not None:
            try:
                address = parse_address(flow.address)
            except ValueError as error:
                raise _Unclear("address:invalid", str(error)) from None
        if name is None and address is None:
            raise _Unclear("address:missing", "the flow has neither a name nor an address")
        if not 1 <= flow.port <= 65535:
            raise _Unclear("port:invalid", f"{flow.port} is not a port from 1 to 65535")
        if (flow.hello == "named") != (flow.sni is not None):
            raise _Unclear("sni:invalid", "the flow's TLS facts contradict each other")
        if flow.sni is not None:
            sni = _name(flow.sni, "sni:invalid")
        return cls(name, address, flow.port, Protocol(flow.protocol), flow.hello, sni)

    def all_names(self) -> tuple[str, ...]:
        return tuple({n for n in (self.name, self.sni) if n is not None})

    def all_addresses(self) -> tuple[Address, ...]:
        return () if self.address is None else (self.address, *embedded(self.address))

    def reserved(self, own: Collection[Network]) -> str | None:
        if self.name == _LOCAL_NAME or (self.name or "").endswith("." + _LOCAL_NAME):
            return "loopback"
        if self.address is None:
            return None
        if any(_within(address, network) for address in self.all_addresses() for network in own):
            return "own"
        return reserved(self.address)


def _within(address: Address, network: Network) -> bool:
    return address.version == network.version and address in network


def _name(untrusted_name: str, rule: str) -> str:
    try:
        return egress.host(untrusted_name)
    except ValueError as error:
        raise _Unclear(rule, str(error)) from None


def _deny(rule: str, why: str) -> Verdict:
    return Verdict(verdict="deny", rule=rule, why=why)


def _first(rules: Iterable[_Loaded]) -> _Loaded | None:
    return min(rules, key=_Loaded.rank, default=None)


def _load_rule(rule: Rule) -> _Loaded:
    """Reads one rule; every field must already be in its one form, and the id its own."""
    try:
        if (rule.host is None) == (rule.network is None):
            raise ValueError("needs a host or a network, and not both")
        ports = egress.ports([f"{first}-{last}" for first, last in rule.ports])
        target = Target(
            host=None if rule.host is None else egress.host(rule.host, wildcard=True),
            network=None if rule.network is None else egress.network(rule.network),
            ports=ports,
            protocol=Protocol(rule.protocol),
        )
        if target.host is not None and egress.in_broker_zone(target.host):
            raise ValueError(f"names in {egress.BROKER_ZONE} are the broker's")
        written = (rule.host, rule.network, [tuple(pair) for pair in rule.ports])
        network = None if target.network is None else str(target.network)
        if written != (target.host, network, list(ports)):
            raise ValueError(f"is not written in the one form of {str(target)!r}")
        action = Action(rule.action)
        if action is Action.DENY and (rule.allow_reserved or not rule.sni):
            raise ValueError("gives leave, and is a deny rule")
        proper = egress.rule_id(action, target, sni=rule.sni, allow_reserved=rule.allow_reserved)
        if rule.id != proper:
            raise ValueError(f"its id should be {proper!r}")
    except ValueError as error:
        raise PolicyInvalid(f"rule {rule.id[:200]!r}: {error}") from None
    return _Loaded(rule.id, action, target, rule.sni, rule.allow_reserved)
