"""The verbs of network policies: show, set and check."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent_box.cli import link
from agent_box.cli.render import Failure, Render, table

if TYPE_CHECKING:
    from agent_box.config.egress import Target
    from agent_box.registry.contract import PolicyTable, PolicyView

FILE_MAX: Final = 1 << 20  # bytes of a file for --file


def show(out: Render, *, name: str) -> None:
    """The policy in force, its rules and its generation."""
    from agent_box.registry.contract import Name, PolicyView

    with link.service("registry", out) as registry:
        view = registry.call("policy_show", Name(name=name))
    assert isinstance(view, PolicyView)
    _tell(out, name, view)


def set_policy(
    out: Render,
    *,
    name: str,
    policy: str | None,
    mode: str | None,
    allow: list[Target],
    remove: list[str],
    file: str | None,
    allow_open: bool,
    allow_reserved: bool,
    reset: bool,
) -> None:
    """Moves an instance to another policy, or changes the one that it has."""
    from agent_box.registry.contract import PolicySet, PolicyView

    request = PolicySet(
        name=name,
        policy=policy,
        reset=reset,
        table=None if file is None else _read(file),
        mode=mode,  # type: ignore[arg-type]
        remove=remove,
        allow=[str(target) for target in allow],
        allow_open=allow_open,
        allow_reserved=allow_reserved,
    )
    with link.service("registry", out) as registry:
        view = registry.call("policy_set", request)
    assert isinstance(view, PolicyView)
    _tell(out, name, view)


def check(out: Render, *, name: str, destination: Target) -> None:
    """Whether a destination is allowed, by the function that enforces it.

    Raises:
        Failure: exit 1; it is denied. The rule stands in the error.
    """
    from agent_box.registry.contract import PolicyCheck, PolicyVerdict

    target = str(destination)
    with link.service("registry", out) as registry:
        said = registry.call("policy_check", PolicyCheck(name=name, target=target))
    assert isinstance(said, PolicyVerdict)
    facts = {
        "verdict": said.verdict,
        "rule": said.rule,
        "why": said.why,
        "generation": said.generation,
    }
    text = f"{said.verdict} {target} by {said.rule}"
    if said.verdict == "deny":
        message = f"{name}: {target} is denied by {said.rule}: {said.why}"
        raise Failure(1, "policy-denied", message, text=text, **facts)
    out.result(facts, text)


# -------------------------------------------------------------------------- below


def _tell(out: Render, name: str, view: PolicyView) -> None:
    rules = [
        {
            "id": rule.id,
            "action": rule.action,
            "host": rule.host,
            "network": rule.network,
            "ports": [list(pair) for pair in rule.ports],
            "protocol": rule.protocol,
            "sni": rule.sni,
            "allow_reserved": rule.allow_reserved,
        }
        for rule in view.rules
    ]
    result = {
        "name": name,
        "policy": view.policy,
        "generation": view.generation,
        "mode": view.mode,
        "changes": view.changes,
        "rules": rules,
        "endpoints": [f"http://{binding}.broker.internal" for binding in view.endpoints],
    }
    out.result(result, _text(result))


def _text(result: dict[str, Any]) -> str:
    changes = f", {result['changes']} changes on top" if result["changes"] else ""
    lines = [
        f"policy: {result['policy']}{changes}",
        f"generation: {result['generation']}",
        f"mode: {result['mode']}",
        f"endpoints: {', '.join(result['endpoints']) or 'none'}",
    ]
    rows = [
        (
            rule["action"],
            rule["host"] or rule["network"],
            ",".join(str(a) if a == b else f"{a}-{b}" for a, b in rule["ports"]),
            rule["protocol"],
            " ".join(
                word
                for word, said in (
                    ("no-sni", not rule["sni"]),
                    ("reserved", rule["allow_reserved"]),
                )
                if said
            ),
        )
        for rule in result["rules"]
    ]
    if not rows:
        return "\n".join([*lines, "rules: none"])
    return "\n".join([*lines, table(("RULE", "HOST", "PORTS", "PROTOCOL", "LEAVE"), rows)])


def _read(untrusted_file: str) -> PolicyTable:
    """The policy of a TOML file: the keys of a ``[policies.NAME]`` table.

    Raises:
        Failure: exit 64; it cannot be read or is no policy. Names the file and the key.
    """
    from agent_box.config import egress
    from agent_box.config.errors import ConfigError
    from agent_box.config.parse import parse_policy
    from agent_box.registry.contract import PolicyRule, PolicyTable

    try:
        with Path(untrusted_file).open("rb") as handle:
            content = handle.read(FILE_MAX + 1)
    except OSError as error:
        raise Failure(64, "usage", f"{untrusted_file}: {error.strerror}") from None
    if len(content) > FILE_MAX:
        raise Failure(64, "usage", f"{untrusted_file} is larger than {FILE_MAX} bytes")
    try:
        policy = parse_policy(content, untrusted_file, "file")
    except ConfigError as error:
        raise Failure(64, "usage", str(error)) from None
    rules = [
        PolicyRule(
            **egress.rule_fields(
                action, rule.target, sni=rule.sni, allow_reserved=rule.allow_reserved
            )
        )
        for action, group in (
            (egress.Action.ALLOW, policy.allow),
            (egress.Action.DENY, policy.deny),
        )
        for rule in group
    ]
    return PolicyTable(mode=policy.mode.value, allow_open=policy.allow_open, rules=rules)
