"""From the bytes of a config file to a `Config`, or to one line that says what is wrong.

Pure: no file is opened, nothing is looked up. All rules are checked here, at load, also for
tables that nothing refers to, because an operator who wrote a setting believes in it.
docs/cli.md describes every key; a test keeps the two the same.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from agent_box.config import egress
from agent_box.config.addresses import parse_address, reserved, reserved_network
from agent_box.config.errors import ConfigError
from agent_box.config.model import (
    DEFAULT,
    METERED,
    Binding,
    Config,
    Daemon,
    Defaults,
    Engine,
    Policy,
    Profile,
    Repo,
    Route,
    Rule,
    Upstream,
)
from agent_box.config.shape import (
    DAEMON,
    DEFAULTS,
    ENGINE,
    FILE,
    NEEDS,
    PARTICULAR,
    POLICY,
    PROFILE,
    VERSION,
)
from agent_box.config.tables import Table, read, refuse


def parse(untrusted: bytes, source: str) -> Config:
    """Reads a config file.

    Args:
        untrusted: its content.
        source: its path, for messages and for `Config.source`.

    Raises:
        ConfigError: naming the file, the key and its table.
    """
    got = read(FILE, _toml(untrusted, source), source)
    return _config(got, source)


def builtin() -> Config:
    """What applies when there is no config file."""
    return _config(read(FILE, {"version": VERSION}, ""), "")


def parse_policy(untrusted: bytes, source: str, name: str) -> Policy:
    """Reads a file that holds one policy: the keys of a `[policies.NAME]` table, and no more.

    Raises:
        ConfigError: naming the file and the key.
    """
    return _policy(name, read(POLICY, _toml(untrusted, source), source), source, ())


def _toml(untrusted: bytes, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(untrusted.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(source, f"not UTF-8 text, at byte {error.start}") from None
    except RecursionError:
        raise ConfigError(source, "nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        raise ConfigError(source, f"not TOML: {str(error)[:200]}") from None


def _config(got: dict[str, Any], source: str) -> Config:
    policies = {DEFAULT: _default_policy()}
    for name, table in got["policies"].items():
        policies[name] = _policy(name, table, source, ("policies", name))
    bindings = {n: _binding(n, t, source) for n, t in got["bindings"].items()}
    profiles = {DEFAULT: Profile(name=DEFAULT, **read(PROFILE, {}, source))}
    for name, table in got["profiles"].items():
        profiles[name] = _profile(name, table, source, policies, bindings)
    defaults = Defaults(**_whole(DEFAULTS, got["defaults"]))
    if defaults.profile not in profiles:
        _dangling(source, ("defaults",), "profile", "profile", defaults.profile, profiles)
    return Config(
        source=source,
        daemon=Daemon(**_whole(DAEMON, got["daemon"])),
        defaults=defaults,
        engine=Engine(**_whole(ENGINE, got["engine"])),
        profiles=MappingProxyType(profiles),
        policies=MappingProxyType(policies),
        bindings=MappingProxyType(bindings),
    )


def _whole(table: Table, got: dict[str, Any]) -> dict[str, Any]:
    """A table that was left out altogether has the defaults of its keys."""
    return got or {name: key.default for name, key in table.keys.items()}


def _default_policy() -> Policy:
    return Policy(name=DEFAULT, mode=egress.Mode.ALLOWLIST, allow_open=False, allow=(), deny=())


def _profile(
    name: str,
    got: dict[str, Any],
    source: str,
    policies: Mapping[str, Policy],
    bindings: Mapping[str, Binding],
) -> Profile:
    where = ("profiles", name)
    if got["policy"] not in policies:
        _dangling(source, where, "policy", "policy", got["policy"], policies)
    for binding in got["bindings"]:
        if binding not in bindings:
            _dangling(source, where, "bindings", "binding", binding, bindings)
    return Profile(name=name, **got)


def _dangling(
    source: str, where: tuple[str, ...], key: str, what: str, name: str, known: Mapping[str, Any]
) -> NoReturn:
    listed = ", ".join(sorted(known)[:10]) or "none"
    refuse(
        source, where, key, f'names the {what} "{name}", which does not exist (there is: {listed})'
    )


def _policy(name: str, got: dict[str, Any], source: str, where: tuple[str, ...]) -> Policy:
    mode = egress.Mode(got["mode"])
    if mode is egress.Mode.OPEN and not got["allow_open"]:
        refuse(source, where, "mode", '"open" needs allow_open = true')
    if len(got["allow"]) + len(got["deny"]) > egress.RULES_MAX:
        refuse(source, where, "allow", f"and deny have more than {egress.RULES_MAX} rules")
    rules: dict[str, tuple[Rule, ...]] = {}
    for action in egress.Action:
        seen: set[str] = set()
        rules[action] = tuple(
            _rule(action, table, source, (*where, str(action), i), seen)
            for i, table in enumerate(got[action])
        )
    return Policy(
        name=name,
        mode=mode,
        allow_open=got["allow_open"],
        allow=rules["allow"],
        deny=rules["deny"],
    )


def _rule(
    action: egress.Action,
    got: dict[str, Any],
    source: str,
    where: tuple[str | int, ...],
    seen: set[str],
) -> Rule:
    host, cidr = got["host"], got["cidr"]
    if (host is None) == (cidr is None):
        refuse(source, where, "host", "or cidr must be given, and not both")
    target = egress.Target(
        host=host, network=cidr, ports=got["ports"], protocol=egress.Protocol(got["protocol"])
    )
    sni, allow_reserved = got.get("sni", True), got.get("allow_reserved", False)
    if cidr is not None and action is egress.Action.ALLOW and not allow_reserved:
        within = reserved_network(cidr)
        if within is not None:
            refuse(source, where, "cidr", f"is reserved ({within}); it needs allow_reserved = true")
    id = egress.rule_id(action, target, sni=sni, allow_reserved=allow_reserved)
    if id in seen:
        refuse(source, where, "host" if host is not None else "cidr", "repeats an earlier rule")
    seen.add(id)
    return Rule(target=target, sni=sni, allow_reserved=allow_reserved)


def _binding(name: str, got: dict[str, Any], source: str) -> Binding:
    where = ("bindings", name)
    kind = got["kind"]
    needs = NEEDS.get(kind, ("routes",))
    for key in needs:
        if not got[key]:
            refuse(source, where, key, f'is missing; kind "{kind}" needs it')
    for key in PARTICULAR:
        if got[key] and key not in needs:
            refuse(source, where, key, f'is not of kind "{kind}"')
    _check_upstream(got, source, where)
    if got["upgrade"] and "routes" not in needs:
        refuse(source, where, "upgrade", f'is not of kind "{kind}"')
    for key in ("max_tokens", "max_cost"):
        if got[key] is not None and kind not in METERED:
            refuse(source, where, key, f'is not of kind "{kind}", whose replies tell no tokens')
    _refuse_twice([r["name"].lower() for r in got["repos"]], source, (*where, "repos"), "name")
    _refuse_twice(
        [(r["path"], r["match"]) for r in got["routes"]], source, (*where, "routes"), "path"
    )
    for i, repo in enumerate(got["repos"]):
        if repo["push"] and kind != "git-basic":
            refuse(source, (*where, "repos", i), "push", f'is not of kind "{kind}"')
    for i, route in enumerate(got["routes"]):
        _check_template(route, source, (*where, "routes", i))
    return Binding(
        name=name,
        **{
            **got,
            "routes": tuple(Route(**r) for r in got["routes"]),
            "repos": tuple(Repo(**r) for r in got["repos"]),
        },
    )


def _check_upstream(got: dict[str, Any], source: str, where: tuple[str, ...]) -> None:
    upstream: Upstream = got["upstream"]
    if upstream.scheme == "http" and not got["insecure"]:
        refuse(source, where, "upstream", "is plain http; it needs insecure = true")
    if upstream.scheme == "https" and got["insecure"]:
        refuse(
            source,
            where,
            "insecure",
            "goes with an http upstream only; certificates are "
            "always verified (ca_file adds an authority)",
        )
    if upstream.scheme == "http" and got["ca_file"] is not None:
        refuse(source, where, "ca_file", "needs an https upstream")
    try:
        within = reserved(parse_address(upstream.host))
    except ValueError:
        return  # a name: the broker judges what it resolves to, at each connection
    if within is not None and not got["allow_reserved"]:
        refuse(source, where, "upstream", f"is reserved ({within}); it needs allow_reserved = true")


def _check_template(route: dict[str, Any], source: str, where: tuple[str | int, ...]) -> None:
    segments = route["path"].split("/")
    holes = [s for s in segments if "{" in s or "}" in s]
    if route["match"] != "template":
        if holes:
            refuse(source, where, "path", 'has braces; that needs match = "template"')
    elif not holes or not all(re.fullmatch(r"\{[a-z][a-z0-9_]*\}", s) for s in holes):
        refuse(source, where, "path", "of a template has whole segments like {name}")


def _refuse_twice(values_: list[Any], source: str, where: tuple[str | int, ...], key: str) -> None:
    for i, value in enumerate(values_):
        if value in values_[:i]:
            refuse(source, (*where, i), key, "stands twice")
