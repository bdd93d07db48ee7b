"""The record of one instance, and the policy in it: what is kept, and how it is changed.

Pure. A record is packed to bytes that are the same every time, because their hash stands in
the journal: a row that somebody else wrote is noticed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from agent_box.bus.schema import Wire
from agent_box.config import egress
from agent_box.config.addresses import reserved_network
from agent_box.config.egress import Action, Mode, Protocol, Target
from agent_box.config.model import Config, Profile
from agent_box.config.model import Policy as NamedPolicy
from agent_box.netstack import contract as net
from agent_box.registry import contract as api
from agent_box.registry.states import State

FORMAT: Final = 3  # of the packed record


class ModeChange(Wire, frozen=True):
    mode: Literal["deny", "allowlist", "open"]
    allow_open: bool


class Changes(Wire, frozen=True):
    """What `policy set` changed on top of the named policy. Sorted, so equal means equal."""

    table: api.PolicyTable | None  # in the place of the named one
    mode: ModeChange | None
    removed: list[str]  # ids of rules of the named policy, or of the table
    added: list[api.PolicyRule]


class Policy(Wire, frozen=True):
    """The named policy as the config had it when it was last read, and the changes."""

    name: str
    named: api.PolicyTable
    changes: Changes
    generation: int  # counts up with every change of what is in force


class Record(Wire, frozen=True):
    """See `contract.Instance` for the fields that it shows."""

    format: int
    id: str
    name: str
    kind: Literal["persistent", "ephemeral"]
    state: str  # of `states.State`, never unknown
    allocated: bool  # the engine was asked to allocate, so it may hold something of ours
    profile: str
    image: str
    cpus: int
    memory: int
    disk: int
    harness: str | list[str] | None
    sudo: bool
    hook: str | None
    hook_required: bool
    bindings: list[str]
    policy: Policy
    boots: int  # the number of the last boot
    images: api.Images  # chosen at create
    no_hook: bool  # the boot goes without its project hook
    intent: int  # counts up with every verb that was accepted
    doing: api.Doing | None  # what is left to do of the last one
    grace_ms: int  # for the guest, while it is being stopped; 0: it is killed
    failed: api.Failed | None  # why the last one did not come to its end
    created_ms: int
    changed_ms: int


class _Format(msgspec.Struct, frozen=True):
    format: int


NO_CHANGES: Final = Changes(table=None, mode=None, removed=[], added=[])

_STATES: Final = frozenset(s.value for s in State if s is not State.UNKNOWN)
_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")
_DECODER: Final = msgspec.msgpack.Decoder(Record, strict=True)
_FORMAT: Final = msgspec.msgpack.Decoder(_Format, strict=True)
_ANY: Final = msgspec.msgpack.Decoder(dict[str, object])


def pack(record: Record) -> bytes:
    return _ENCODER.encode(record)


def unpack(untrusted: bytes) -> Record:
    """Reads a packed record.

    Raises:
        ValueError: it is not one that `pack` made.
    """
    found = _FORMAT.decode(untrusted).format
    if found not in (2, FORMAT):
        raise ValueError(f"the record has format {found}; this version knows {FORMAT}, and 2")
    if found == 2:  # it had one field more
        fields = _ANY.decode(untrusted)
        if fields.pop("network", "missing") is not None:
            raise ValueError("the record has a network that cannot be")
        untrusted = _ENCODER.encode({**fields, "format": FORMAT})
    record = _DECODER.decode(untrusted)
    if record.state not in _STATES:
        raise ValueError("the record has a state that cannot be")
    return record


def draft(
    request: api.Create, profile: Profile, policy: NamedPolicy, *, id: str, now_ms: int
) -> Record:
    """The record of a new instance: the profile's values are copied, the request's win."""
    harness = profile.harness
    return Record(
        format=FORMAT,
        id=id,
        name=request.name,
        kind="persistent",
        state=State.CREATING.value,
        allocated=False,
        profile=profile.name,
        image=profile.image,
        cpus=profile.cpus if request.cpus is None else request.cpus,
        memory=profile.memory if request.memory is None else request.memory,
        disk=profile.disk if request.disk is None else request.disk,
        harness=list(harness) if isinstance(harness, tuple) else harness,
        sudo=profile.sudo,
        hook=profile.hook,
        hook_required=profile.hook_required,
        bindings=sorted(profile.bindings),
        policy=Policy(name=policy.name, named=table(policy), changes=NO_CHANGES, generation=1),
        boots=0,
        images=request.images,
        no_hook=False,
        intent=0,
        doing=None,
        grace_ms=0,
        failed=None,
        created_ms=now_ms,
        changed_ms=now_ms,
    )


# ------------------------------------------------------------------------- policy


def table(policy: NamedPolicy) -> api.PolicyTable:
    """A policy of the config as it is kept."""
    rules = [
        rule(action, each.target, sni=each.sni, allow_reserved=each.allow_reserved)
        for action, group in ((Action.ALLOW, policy.allow), (Action.DENY, policy.deny))
        for each in group
    ]
    return api.PolicyTable(
        mode=policy.mode.value, allow_open=policy.allow_open, rules=_in_order(rules)
    )


def rule(action: Action, target: Target, *, sni: bool, allow_reserved: bool) -> api.PolicyRule:
    fields = egress.rule_fields(action, target, sni=sni, allow_reserved=allow_reserved)
    return api.PolicyRule(**fields)


def in_force(policy: Policy) -> api.PolicyTable:
    """The named policy with the changes on top."""
    changes = policy.changes
    base = policy.named if changes.table is None else changes.table
    mode = ModeChange(mode=base.mode, allow_open=base.allow_open)
    if changes.mode is not None:
        mode = changes.mode
    replaced = {_key(r) for r in changes.added}
    kept = [r for r in base.rules if r.id not in changes.removed and _key(r) not in replaced]
    return api.PolicyTable(
        mode=mode.mode, allow_open=mode.allow_open, rules=_in_order([*kept, *changes.added])
    )


def network_up(record: Record) -> net.InstanceUp:
    """What netstack is told of an instance whose machine runs."""
    return net.InstanceUp(
        instance=record.id,
        name=record.name,
        boot=record.boots,
        policy=for_netstack(record),
    )


def for_netstack(record: Record) -> net.Policy:
    """The policy in force, in the words of netstack."""
    force = in_force(record.policy)
    return net.Policy(
        generation=record.policy.generation,
        mode=force.mode,
        allow_open=force.allow_open,
        rules=[net.Rule(**msgspec.structs.asdict(r)) for r in force.rules],
        endpoints=record.bindings,
    )


def view(record: Record) -> api.PolicyView:
    force, changes = in_force(record.policy), record.policy.changes
    return api.PolicyView(
        policy=record.policy.name,
        generation=record.policy.generation,
        mode=force.mode,
        rules=force.rules,
        changes=count(changes),
        endpoints=record.bindings,
    )


def count(changes: Changes) -> int:
    alone = (changes.table, changes.mode)
    return sum(c is not None for c in alone) + len(changes.removed) + len(changes.added)


def changed(policy: Policy, request: api.PolicySet, config: Config) -> Policy:
    """The policy after a `policy set`. The same generation when nothing is different.

    The named policy is read from the config again, as at a start.

    Raises:
        LookupError: the config has no policy of that name; names it.
        ValueError: a change that cannot be made; one line names it.
    """
    name = policy.name if request.policy is None else request.policy
    named = config.policies.get(name)
    if named is None:
        raise LookupError(f"there is no policy {name!r} in the config")
    fresh = request.reset or request.policy is not None or request.table is not None
    changes = NO_CHANGES if fresh else policy.changes
    if request.table is not None:
        changes = msgspec.structs.replace(changes, table=checked(request.table))
    after = msgspec.structs.replace(policy, name=name, named=table(named), changes=changes)
    after = _with_mode(after, request)
    for text in request.remove:
        after = _without(after, text)
    for text in request.allow:
        after = _with_rule(after, text, allow_reserved=request.allow_reserved)
    force = in_force(after)
    if len(force.rules) > egress.RULES_MAX:
        raise ValueError(f"a policy has at most {egress.RULES_MAX} rules")
    if after == policy:
        return policy
    return msgspec.structs.replace(after, generation=policy.generation + 1)


def checked(untrusted_table: api.PolicyTable) -> api.PolicyTable:
    """A policy in full that came over the wire, in its one form.

    Raises:
        ValueError: a rule that cannot be; one line names it.
    """
    if untrusted_table.mode == Mode.OPEN.value and not untrusted_table.allow_open:
        raise ValueError("mode open needs --allow-open")
    rules: dict[str, api.PolicyRule] = {}
    for each in untrusted_table.rules:
        target = _target(each)
        made = rule(Action(each.action), target, sni=each.sni, allow_reserved=each.allow_reserved)
        if made != each:
            raise ValueError(f"the rule {each.id[:200]!r} is not in its one form")
        _may_stand(target, each.action, allow_reserved=each.allow_reserved)
        rules[made.id] = made
    if len(rules) != len(untrusted_table.rules):
        raise ValueError("a rule stands twice")
    return msgspec.structs.replace(untrusted_table, rules=_in_order(rules.values()))


def _with_mode(policy: Policy, request: api.PolicySet) -> Policy:
    if request.mode is None:
        return policy
    if request.mode == Mode.OPEN.value and not request.allow_open:
        raise ValueError("mode open needs --allow-open")
    base = policy.named if policy.changes.table is None else policy.changes.table
    mode = ModeChange(mode=request.mode, allow_open=request.mode == Mode.OPEN.value)
    same = (base.mode, base.allow_open) == (mode.mode, mode.allow_open)
    return _change(policy, mode=None if same else mode)


def _without(policy: Policy, untrusted_text: str) -> Policy:
    """Takes away the rule of that id, or the allow rules for that destination."""
    force = in_force(policy)
    gone = {r.id for r in force.rules if r.id == untrusted_text}
    if not gone:
        if untrusted_text.startswith(("allow:", "deny:")):
            raise ValueError(f"there is no rule {untrusted_text[:200]!r}")
        selector = egress.parse_selector(untrusted_text, wildcard=True)
        gone = {
            r.id
            for r in force.rules
            if r.action == Action.ALLOW.value and selector.selects(_target(r))
        }
    if not gone:
        raise ValueError(f"no rule allows {untrusted_text[:200]!r}")
    base = policy.named if policy.changes.table is None else policy.changes.table
    keys = {_key(r) for r in force.rules if r.id in gone}
    of_base = {r.id for r in base.rules if _key(r) in keys}
    return _change(
        policy,
        removed=sorted({*policy.changes.removed, *of_base}),
        added=[r for r in policy.changes.added if r.id not in gone],
    )


def _with_rule(policy: Policy, untrusted_text: str, *, allow_reserved: bool) -> Policy:
    target = egress.parse_target(untrusted_text, wildcard=True)
    _may_stand(target, Action.ALLOW.value, allow_reserved=allow_reserved)
    new = rule(Action.ALLOW, target, sni=True, allow_reserved=allow_reserved)
    base = policy.named if policy.changes.table is None else policy.changes.table
    added = {_key(r): r for r in policy.changes.added} | {_key(new): new}
    of_base = {r.id for r in base.rules if _key(r) == _key(new)}
    removed = set(policy.changes.removed)
    if new.id in of_base:  # it is in the named policy as it is: nothing to keep on top
        del added[_key(new)]
        removed -= {new.id}
    return _change(policy, added=_in_order(added.values()), removed=sorted(removed))


def _may_stand(target: Target, action: str, *, allow_reserved: bool) -> None:
    if target.host is not None and egress.in_broker_zone(target.host):
        raise ValueError(f"{target.host}: names in {egress.BROKER_ZONE} are the broker's")
    if target.network is not None and action == Action.ALLOW.value and not allow_reserved:
        within = reserved_network(target.network)
        if within is not None:
            raise ValueError(
                f"{target.network} is a reserved range ({within}); it needs --allow-reserved"
            )


def _change(policy: Policy, **fields: object) -> Policy:
    changes = msgspec.structs.replace(policy.changes, **fields)
    return msgspec.structs.replace(policy, changes=changes)


def _target(untrusted_rule: api.PolicyRule) -> Target:
    each = untrusted_rule
    if (each.host is None) == (each.network is None):
        raise ValueError(f"the rule {each.id[:200]!r} needs a host or a network, and not both")
    return Target(
        host=None if each.host is None else egress.host(each.host, wildcard=True),
        network=None if each.network is None else egress.network(each.network),
        ports=egress.ports([f"{first}-{last}" for first, last in each.ports]),
        protocol=Protocol(each.protocol),
    )


def _key(rule: api.PolicyRule) -> tuple[object, ...]:
    """Rules with the same key differ in their leave only: the later one stands for both."""
    return (rule.action, rule.host, rule.network, tuple(rule.ports), rule.protocol)


def _in_order(rules: Iterable[api.PolicyRule]) -> list[api.PolicyRule]:
    return sorted(rules, key=lambda r: r.id)
