"""The rules of the config file, each by a file that breaks it."""

from __future__ import annotations

import copy
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import toml

from agent_box.broker import kinds
from agent_box.cli.demo import EXAMPLE
from agent_box.config import egress, presets, words
from agent_box.config.errors import ConfigError
from agent_box.config.model import KINDS, Repo, Route, Upstream
from agent_box.config.parse import builtin, parse, parse_policy
from agent_box.config.shape import BINDING, FILE
from agent_box.config.tables import Named, Table, Tables
from agent_box.engine.image import definition

SOURCE = "/etc/agent-box/config.toml"

# Everything that can be said, said once.
FULL = """
version = 1
[daemon]
log = "debug"
stop_grace_seconds = 5
[defaults]
profile = "all"
engine = "firecracker"
[engine]
accel = "kvm"
helper = "system"
[profiles.all]
image = "rust"
cpus = 4
memory = "8G"
disk = "512M"
policy = "p"
bindings = ["a", "b", "g", "hub", "h", "q"]
harness = "codex"
sudo = true
hook = "~/hook.sh"
hook_required = true
[profiles.command]
harness = ["my-agent", "acp", ""]
[policies.p]
mode = "open"
allow_open = true
allow = [
  { host = "*.Example.COM.", ports = [443, "8000-8002"], protocol = "tcp", sni = false },
  { cidr = "192.168.0.0/16", ports = [22], allow_reserved = true },
]
deny = [{ host = "bad.example.com" }, { cidr = "203.0.113.9", protocol = "udp", ports = [53] }]
[bindings.a]
upstream = "https://api.anthropic.com/"
kind = "anthropic"
credential = "a.key_1"
upgrade = true
cookies = "keep"
ca_file = "ca/root.pem"
max_requests = 1000
max_tokens = 2000000
max_cost = 12.5
routes = [
  { path = "/v1/messages", match = "exact", methods = ["POST"] },
  { path = "/v1/", match = "prefix", methods = ["GET", "HEAD"] },
  { path = "/v1/models/{model}", match = "template", methods = ["GET"] },
]
[bindings.b]
upstream = "http://10.0.0.7:8080"
kind = "basic"
credential = "b"
basic_user = "joe"
insecure = true
allow_reserved = true
routes = [{ path = "/", match = "prefix", methods = ["GET"] }]
[bindings.g]
upstream = "https://git.example.com:8443"
kind = "git-basic"
credential = "g"
basic_user = "x-access-token"
repos = [{ name = "o/r", push = true }, { name = "group/sub/r" }]
[bindings.hub]
upstream = "https://api.github.com"
kind = "github-api"
credential = "g"
repos = [{ name = "o/r" }]
[bindings.h]
upstream = "https://[2606:4700::1]:8443"
kind = "header"
header = "X-Token"
credential = "h"
routes = [{ path = "/", match = "exact", methods = ["GET"] }]
[bindings.q]
upstream = "https://q.example.com"
kind = "query"
query = "key"
credential = "q"
routes = [{ path = "/", match = "exact", methods = ["GET"] }]
"""


def refusal(text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text.encode() if isinstance(text, str) else text, SOURCE)
    line = str(caught.value)
    assert line.isprintable()
    assert line.startswith(f"{SOURCE}: ")
    return line.removeprefix(f"{SOURCE}: ")


# ---------------------------------------------------------------------- what is read


def test_the_example_says_what_it_says() -> None:
    config = parse(EXAMPLE.encode(), SOURCE)
    assert config.source == SOURCE
    assert config.defaults.profile == "rust"
    rust = config.profiles["rust"]
    assert (rust.cpus, rust.memory, rust.disk) == (4, 8 << 30, 30 << 30)
    assert rust.bindings == ("github", "openai")
    assert config.profiles["quiet"].harness is None
    dev = config.policies["dev"]
    assert [str(rule.target) for rule in dev.allow] == [
        "index.crates.io:443/tcp",
        "static.crates.io:443/tcp",
    ]
    assert all(rule.sni and not rule.allow_reserved for rule in dev.allow)
    assert config.policies["locked"].mode is egress.Mode.DENY
    anthropic = config.bindings["anthropic"]
    assert anthropic.upstream == Upstream(scheme="https", host="api.anthropic.com", port=443)
    assert anthropic.routes == (Route(path="/v1/messages", match="exact", methods=("POST",)),)
    openai = config.bindings["openai"]
    assert (openai.max_tokens, openai.max_requests) == (20_000_000, None)
    github = config.bindings["github"]
    assert github.repos == (Repo(name="example-org/example-repo", push=True),)
    assert github.routes == ()


def test_the_example_names_only_what_is_built() -> None:
    config = parse(EXAMPLE.encode(), SOURCE)
    assert (config.defaults.engine, config.engine.helper) == ("qemu", "user")
    assert {binding.kind for binding in config.bindings.values()} <= set(kinds.KINDS)
    for profile in config.profiles.values():
        definition.load(profile.image, None)
        if isinstance(profile.harness, str):
            wanted = presets.load(profile.harness).binding
            assert wanted in {config.bindings[name].kind for name in profile.bindings}


def test_everything_that_can_be_said() -> None:
    config = parse(FULL.encode(), SOURCE)
    assert config.daemon.log == "debug"
    assert config.daemon.stop_grace_seconds == 5
    assert config.engine.accel == "kvm"
    assert config.engine.helper == "system"
    assert config.defaults.engine == "firecracker"
    every = config.profiles["all"]
    assert every.disk == 512 << 20
    assert every.harness == "codex"
    assert every.sudo
    assert every.hook == "~/hook.sh"
    assert every.hook_required
    assert config.profiles["command"].harness == ("my-agent", "acp", "")
    policy = config.policies["p"]
    assert policy.allow_open
    assert str(policy.allow[0].target) == "*.example.com:443,8000-8002/tcp"
    assert not policy.allow[0].sni
    assert policy.allow[1].allow_reserved
    assert [str(rule.target) for rule in policy.deny] == [
        "bad.example.com:443/tcp",
        "203.0.113.9:53/udp",
    ]
    a, b, g, h = (config.bindings[name] for name in ("a", "b", "g", "h"))
    assert a.ca_file == "ca/root.pem"
    assert (a.max_requests, a.max_tokens, a.max_cost) == (1000, 2_000_000, 12_500_000)
    assert a.upgrade
    assert a.cookies == "keep"
    assert [route.match for route in a.routes] == ["exact", "prefix", "template"]
    assert b.upstream == Upstream(scheme="http", host="10.0.0.7", port=8080)
    assert g.upstream.port == 8443
    assert [repo.push for repo in g.repos] == [True, False]
    assert h.upstream.host == "2606:4700::1"
    assert h.header == "x-token"
    assert config.bindings["q"].query == "key"


def test_the_full_example_uses_every_key() -> None:
    """So the tests that change it at random reach every table."""
    seen = _used(FILE, tomllib.loads(FULL), "")
    assert seen == _declared(FILE, "")


def _declared(table: Table, path: str) -> set[str]:
    names = set()
    for name, key in table.keys.items():
        here = f"{path}.{name}"
        names.add(here)
        inner = key.reader.of if isinstance(key.reader, Named | Tables) else key.reader
        if isinstance(inner, Table):
            names |= _declared(inner, here)
    return names


def _used(table: Table, document: dict[str, Any], path: str) -> set[str]:
    names = set()
    for name, value in document.items():
        here = f"{path}.{name}"
        names.add(here)
        reader = table.keys[name].reader
        if isinstance(reader, Table):
            names |= _used(reader, value, here)
        elif isinstance(reader, Named | Tables):
            for each in value.values() if isinstance(value, dict) else value:
                names |= _used(reader.of, each, here)
    return names


def test_without_a_file_the_built_in_defaults_apply() -> None:
    config = builtin()
    assert config.source == ""
    profile = config.profiles[config.defaults.profile]
    assert (profile.name, profile.image, profile.cpus) == ("default", "base", 2)
    assert (profile.memory, profile.disk) == (4 << 30, 30 << 30)
    assert profile.bindings == ()
    policy = config.policies[profile.policy]
    assert policy.mode is egress.Mode.ALLOWLIST
    assert policy.allow == policy.deny == ()
    assert config.bindings == {}
    assert config.daemon.stop_grace_seconds == 30
    assert config.engine.accel is None  # setup measures it; nothing here guesses


def test_the_least_file() -> None:
    assert parse(b"version = 1", "").profiles.keys() == {"default"}


def test_what_the_file_says_of_default_stands() -> None:
    config = parse(b'version=1\n[policies.default]\nmode="deny"\n[profiles.default]\ncpus=1', "")
    assert config.policies["default"].mode is egress.Mode.DENY
    assert config.profiles["default"].cpus == 1


def test_it_is_frozen() -> None:
    config = parse(FULL.encode(), SOURCE)
    with pytest.raises(TypeError):
        config.profiles["x"] = config.profiles["all"]  # type: ignore[index]
    with pytest.raises(AttributeError):
        config.bindings["a"].insecure = True  # type: ignore[misc]


# ------------------------------------------------------------------ unknown keys


@pytest.mark.parametrize(
    ("was", "now", "line"),
    [
        ("[daemon]", "[daemn]", 'unknown key "daemn" at the top level; did you mean "daemon"?'),
        (
            'image = "rust"',
            'imge = "rust"',
            'unknown key "imge" in [profiles.all]; did you mean "image"?',
        ),
        (
            "push = true",
            "pusch = true",
            'unknown key "pusch" in [[bindings.g.repos]] number 1; did you mean "push"?',
        ),
        (
            'cidr = "192.168.0.0/16"',
            'net = "192.168.0.0/16"',
            'unknown key "net" in [[policies.p.allow]] number 2',
        ),
        ("cpus = 4", 'cpus = 4\nkey = "sk-canary"', 'unknown key "key" in [profiles.all]'),
        (
            'credential = "q"',
            'credential = "q"\nkey = "sk-canary"',
            'unknown key "key" in [bindings.q]',
        ),
        (
            'mode = "open"',
            'mode = "open"\n"a\\u001b[2J\\nb" = 1',
            'unknown key "a\\u001b[2J\\u000ab" in [policies.p]',
        ),
        (
            'host = "bad.example.com"',
            'host = "bad.example.com", allow_reserved = true',
            'unknown key "allow_reserved" in [[policies.p.deny]] number 1',
        ),
    ],
)
def test_an_unknown_key_is_named_with_its_table(was: str, now: str, line: str) -> None:
    assert was in FULL
    assert refusal(FULL.replace(was, now, 1)) == line


KEYS = st.text(st.characters(codec="utf-8"), max_size=80)
VALUES = st.one_of(st.booleans(), st.integers(-(2**62), 2**62), st.text(max_size=9), st.just({}))


def tables(document: dict[str, Any], shape: Table, path: str = "") -> list[tuple[Any, str, Table]]:
    """Every table of a document, with the words that a refusal names it by."""
    found = [(document, f"in [{path}]" if path else "at the top level", shape)]
    for name, value in document.items():
        reader = shape.keys[name].reader
        here = f"{path}.{name}" if path else name
        if isinstance(reader, Table):
            found += tables(value, reader, here)
        elif isinstance(reader, Named):
            for inner, table in value.items():
                found += tables(table, reader.of, f"{here}.{inner}")
        elif isinstance(reader, Tables):
            for number, table in enumerate(value, 1):
                found.append((table, f"in [[{here}]] number {number}", reader.of))
    return found


@given(st.data())
@settings(deadline=None)
def test_no_key_is_ever_let_through(data: st.DataObject) -> None:
    document = tomllib.loads(FULL)
    table, where, shape = data.draw(st.sampled_from(tables(document, FILE)))
    key = data.draw(KEYS.filter(lambda k: k not in shape.keys))
    table[key] = data.draw(VALUES)
    said = refusal(toml.dumps(document))
    assert said.startswith("unknown key ")
    assert where in said
    plain = key.isascii() and key.isalnum() and len(key) <= 64
    if plain:
        assert f'"{key}"' in said


# ------------------------------------------------------------------- wrong types


def typed(value: Any) -> str:
    """The TOML type, as far as a reader of ours tells types apart."""
    return type(value).__name__


OTHER: dict[str, list[Any]] = {
    "bool": [1, 0, "true", [], {}, 1.0],
    "int": [True, False, 1.0, "1", [], {}],
    "float": [True, False, "1.5", [], {}],
    "str": [1, True, 1.5, ["x"], {"a": "x"}],
    "list": ["x", 1, True, {"a": 1}, 1.5],
    "dict": ["x", 1, True, [1], []],
}


@given(st.data())
@settings(deadline=None)
def test_no_wrong_type_is_ever_let_through(data: st.DataObject) -> None:
    document = tomllib.loads(FULL)
    # `harness` takes two types: the wrong ones are tried below.
    places = [
        (table, key, where)
        for table, where, _ in tables(document, FILE)
        for key in table
        if key != "harness"
    ]
    table, key, where = data.draw(st.sampled_from(places))
    right = typed(table[key])
    table[key] = data.draw(st.sampled_from(OTHER[right]))
    said = refusal(toml.dumps(document))
    assert key in said
    # Named tables and arrays of tables are refused where their own key stands.
    assert where in said or key in ("profiles", "policies", "bindings")


@pytest.mark.parametrize("value", ["true", "1", "1.5", "[]", "[1]", "{}", '"kaag"', '[""]', '"x"'])
def test_a_harness_is_known_or_a_command(value: str) -> None:
    said = refusal(f"version = 1\n[profiles.a]\nharness = {value}")
    assert said.startswith("harness in [profiles.a] must be one of kage, codex,")


@pytest.mark.parametrize(
    ("was", "now", "line"),
    [
        ("cpus = 4", "cpus = 0", "cpus in [profiles.all] must be an integer from 1 to 64, not 0"),
        ("cpus = 4", "cpus = 65", "cpus in [profiles.all] must be an integer from 1 to 64, not 65"),
        (
            "cpus = 4",
            'cpus = "4"',
            'cpus in [profiles.all] must be an integer from 1 to 64, not "4"',
        ),
        ("sudo = true", "sudo = 1", "sudo in [profiles.all] must be true or false, not 1"),
        ("version = 1", "version = 2", "version at the top level must be 1, not 2"),
        ("version = 1", "version = true", "version at the top level must be 1, not true"),
        ("version = 1", "", "version is missing at the top level"),
        (
            "version = 1",
            "version = 1979-05-27",
            "version at the top level must be 1, not a date or a time",
        ),
        (
            'log = "debug"',
            'log = "loud"',
            'log in [daemon] must be one of error, warn, info, debug, not "loud"',
        ),
        (
            "stop_grace_seconds = 5",
            "stop_grace_seconds = -1",
            "stop_grace_seconds in [daemon] must be an integer from 0 to 3600, not -1",
        ),
        (
            'bindings = ["a", "b", "g", "hub", "h", "q"]',
            'bindings = "a"',
            'bindings in [profiles.all] must be an array of names, not "a"',
        ),
        (
            'bindings = ["a", "b", "g", "hub", "h", "q"]',
            'bindings = ["a", "a"]',
            'bindings in [profiles.all]: "a" stands twice',
        ),
        ("[daemon]", "[[daemon]]", "daemon at the top level must be a table, not an array"),
    ],
)
def test_a_wrong_value_is_named(was: str, now: str, line: str) -> None:
    assert was in FULL
    assert refusal(FULL.replace(was, now, 1)) == line


@pytest.mark.parametrize("size", ["", "0G", "10X", "1T", "8", "8g", "-1G", "1.5G", " 8G", "08G"])
def test_a_size_is_an_integer_and_a_unit(size: str) -> None:
    said = refusal(f'version = 1\n[profiles.a]\nmemory = "{size}"')
    assert said.startswith("memory in [profiles.a] must be an integer and a unit, M or G")


@pytest.mark.parametrize(
    ("key", "size"), [("memory", "127M"), ("memory", "1025G"), ("disk", "63M"), ("disk", "16385G")]
)
def test_a_size_has_bounds(key: str, size: str) -> None:
    said = refusal(f'version = 1\n[profiles.a]\n{key} = "{size}"')
    assert said.startswith(f"{key} in [profiles.a] must be a size from ")
    assert said.endswith(f'not "{size}"')


@pytest.mark.parametrize("name", ["Rust", "a_b", "-a", "a-", "", "a.b", "ä", "a" * 64])
@pytest.mark.parametrize(
    ("table", "what"), [("profiles", "profile"), ("policies", "policy"), ("bindings", "binding")]
)
def test_names_follow_the_rules_of_a_label(table: str, what: str, name: str) -> None:
    said = refusal(toml.dumps({"version": 1, table: {name: {}}}))
    assert f"in [{table}]: the name of a {what} is 1 to 63 lowercase" in said


# -------------------------------------------------------------------- references


@pytest.mark.parametrize(
    ("was", "now", "line"),
    [
        (
            'policy = "p"',
            'policy = "q"',
            'policy in [profiles.all] names the policy "q", which does not exist '
            "(there is: default, p)",
        ),
        (
            'bindings = ["a", ',
            'bindings = ["z", ',
            'bindings in [profiles.all] names the binding "z", which does not exist '
            "(there is: a, b, g, h, hub, q)",
        ),
        (
            'profile = "all"',
            'profile = "al"',
            'profile in [defaults] names the profile "al", which does not exist '
            "(there is: all, command, default)",
        ),
    ],
)
def test_a_name_of_what_is_not_there_is_refused_at_load(was: str, now: str, line: str) -> None:
    assert was in FULL
    assert refusal(FULL.replace(was, now, 1)) == line


# ----------------------------------------------------------------------- policies


def policy(body: str) -> str:
    return refusal(f"version = 1\n[policies.p]\n{body}")


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("", "mode is missing in [policies.p]"),
        ('mode = "open"', 'mode in [policies.p] "open" needs allow_open = true'),
        (
            'mode = "allowlist"\nallow = [{ports = [443]}]',
            "host in [[policies.p.allow]] number 1 or cidr must be given, and not both",
        ),
        (
            'mode = "allowlist"\nallow = [{host = "a.example", cidr = "1.2.3.4"}]',
            "host in [[policies.p.allow]] number 1 or cidr must be given, and not both",
        ),
        (
            'mode = "allowlist"\nallow = [{cidr = "10.0.0.0/8"}]',
            "cidr in [[policies.p.allow]] number 1 is reserved (private); "
            "it needs allow_reserved = true",
        ),
        (
            'mode = "allowlist"\nallow = [{host = "a.example"}, {host = "A.example.", '
            'ports = ["443"]}]',
            "host in [[policies.p.allow]] number 2 repeats an earlier rule",
        ),
        (
            'mode = "allowlist"\nallow = [{host = "x.broker.internal"}]',
            "host in [[policies.p.allow]] number 1: no policy speaks about broker.internal: "
            "bindings do",
        ),
        (
            'mode = "allowlist"\nallow = [{host = "127.1"}]',
            "host in [[policies.p.allow]] number 1: '127.1' is neither a name nor a plain address",
        ),
        (
            'mode = "allowlist"\nallow = [{cidr = "1.2.3.4/8"}]',
            "cidr in [[policies.p.allow]] number 1: '1.2.3.4/8' is not an address or a network "
            "like 192.0.2.0/24",
        ),
        (
            'mode = "allowlist"\nallow = [{host = "a.example", ports = []}]',
            "ports in [[policies.p.allow]] number 1: ports is a list of at least one port",
        ),
        (
            'mode = "allowlist"\nallow = [{host = "a.example", ports = [true]}]',
            "ports in [[policies.p.allow]] number 1: 'True' is not a port or a range "
            "like 8000-8999",
        ),
        (
            'mode = "allowlist"\nallow = [{host = "a.example", protocol = "icmp"}]',
            'protocol in [[policies.p.allow]] number 1 must be one of tcp, udp, not "icmp"',
        ),
    ],
)
def test_a_policy_that_cannot_be_enforced_is_refused(body: str, line: str) -> None:
    assert policy(body) == line


def test_a_deny_rule_may_speak_of_a_reserved_range() -> None:
    config = parse(b'version=1\n[policies.p]\nmode="deny"\ndeny=[{cidr="10.0.0.0/8"}]', "")
    assert str(config.policies["p"].deny[0].target) == "10.0.0.0/8:443/tcp"


def test_a_policy_has_a_most_of_rules() -> None:
    rules = ", ".join(f'{{host = "h{i}.example"}}' for i in range(egress.RULES_MAX + 1))
    assert policy(f'mode = "allowlist"\nallow = [{rules}]') == (
        f"allow in [policies.p] and deny have more than {egress.RULES_MAX} rules"
    )


def test_one_policy_in_a_file_of_its_own() -> None:
    read = parse_policy(b'mode = "allowlist"\nallow = [{host = "a.example"}]', "p.toml", "work")
    assert (read.name, str(read.allow[0].target)) == ("work", "a.example:443/tcp")
    with pytest.raises(ConfigError, match='^p.toml: unknown key "moed" at the top level'):
        parse_policy(b'moed = "deny"', "p.toml", "work")


# ----------------------------------------------------------------------- bindings


def binding(**changes: Any) -> str:
    """The refusal of a good anthropic binding with some keys changed; None takes one away."""
    table: dict[str, Any] = {
        "upstream": "https://api.example.com",
        "kind": "anthropic",
        "credential": "c",
        "routes": [{"path": "/a", "match": "exact", "methods": ["GET"]}],
    }
    table.update(changes)
    table = {key: value for key, value in table.items() if value is not None}
    document = toml.dumps({"version": 1, "bindings": {"x": table}})
    return refusal(document).replace(" in [bindings.x]", "")


@pytest.mark.parametrize("key", [k for k, v in BINDING.keys.items() if v.required])
def test_a_binding_needs(key: str) -> None:
    assert binding(**{key: None}) == f"{key} is missing"


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("git-basic", "github-api")])
@pytest.mark.parametrize("routes", [None, []])
def test_without_routes_nothing_may_be_asked(kind: str, routes: list[Any] | None) -> None:
    assert binding(kind=kind, routes=routes) == f'routes is missing; kind "{kind}" needs it'


REPOS = [{"name": "o/r"}]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"kind": "header"}, 'header is missing; kind "header" needs it'),
        ({"kind": "query"}, 'query is missing; kind "query" needs it'),
        ({"kind": "basic"}, 'basic_user is missing; kind "basic" needs it'),
        ({"kind": "git-basic", "routes": None}, 'repos is missing; kind "git-basic" needs it'),
        (
            {"kind": "git-basic", "routes": None, "repos": REPOS},
            'basic_user is missing; kind "git-basic" needs it',
        ),
        ({"kind": "github-api", "routes": None}, 'repos is missing; kind "github-api" needs it'),
        ({"kind": "github-api", "repos": REPOS}, 'routes is not of kind "github-api"'),
        ({"repos": REPOS}, 'repos is not of kind "anthropic"'),
        ({"header": "x-a"}, 'header is not of kind "anthropic"'),
        ({"query": "a"}, 'query is not of kind "anthropic"'),
        ({"basic_user": "a"}, 'basic_user is not of kind "anthropic"'),
        (
            {"kind": "github-api", "routes": None, "repos": REPOS, "upgrade": True},
            'upgrade is not of kind "github-api"',
        ),
        (
            {"kind": "github-api", "routes": None, "repos": [{"name": "o/r", "push": True}]},
            'push in [[bindings.x.repos]] number 1 is not of kind "github-api"',
        ),
        (
            {
                "kind": "git-basic",
                "routes": None,
                "basic_user": "u",
                "repos": [*REPOS, {"name": "O/R"}],
            },
            "name in [[bindings.x.repos]] number 2 stands twice",
        ),
        ({"key": "sk-canary"}, 'unknown key "key"'),
        ({"kind": "antropic"}, f"kind must be one of {', '.join(KINDS)}"),
        ({"cookies": "eat"}, "cookies must be one of strip, keep"),
    ],
)
def test_a_kind_has_its_own_keys(changes: dict[str, Any], line: str) -> None:
    assert binding(**changes) == line


@pytest.mark.parametrize("key", ["max_tokens", "max_cost"])
def test_a_budget_needs_replies_that_tell(key: str) -> None:
    line = f'{key} is not of kind "basic", whose replies tell no tokens'
    assert binding(kind="basic", basic_user="u", **{key: 5}) == line
    with pytest.raises(pytest.fail.Exception):
        binding(kind="basic", basic_user="u", max_requests=5)  # a good one


@pytest.mark.parametrize("cost", [0, -1, True, "5", 0.0000001, 1.0000001, 1e10])
def test_a_cost_that_is_no_budget(cost: Any) -> None:
    assert binding(max_cost=cost).startswith("max_cost must be a number above 0")


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), float("-inf")])
def test_a_cost_that_is_no_number(cost: float) -> None:
    with pytest.raises(ValueError, match="a number above 0"):
        words.cost(cost)


@pytest.mark.parametrize("key", ["max_requests", "max_tokens"])
@pytest.mark.parametrize("count", [0, -1, 1.5, 10**16, "1"])
def test_a_count_that_is_no_budget(key: str, count: Any) -> None:
    assert binding(**{key: count}).startswith(f"{key} must be an integer from 1 to")


@pytest.mark.parametrize(
    ("upstream", "line"),
    [
        ("http://api.example.com", "upstream is plain http; it needs insecure = true"),
        ("https://127.0.0.1", "upstream is reserved (loopback); it needs allow_reserved = true"),
        (
            "https://[::ffff:169.254.169.254]",
            "upstream is reserved (link-local); it needs allow_reserved = true",
        ),
        (
            "https://u:sk-canary@api.example.com",
            "upstream: it holds an @: no key of this file takes a user or a password",
        ),
        ("https://127.1", "upstream: the host is neither a name nor a plain address"),
        ("https://x.broker.internal", "upstream: names in broker.internal are the broker's own"),
        ("https://[::1::2]", "upstream: the address in brackets is not an IPv6 address"),
    ],
)
def test_an_upstream_that_must_not_be(upstream: str, line: str) -> None:
    assert binding(upstream=upstream) == line


@pytest.mark.parametrize(
    "upstream",
    [
        "",
        "api.example.com",
        "ftp://api.example.com",
        "HTTPS://api.example.com",
        "https://",
        "https://api.example.com/v1",
        "https://api.example.com?x",
        "https://api.example.com#x",
        "https://api.example.com:0",
        "https://api.example.com:65536",
        "https://api.example.com:x",
        "https://api.example.com\n",
        " https://api.example.com",
        "https://api example.com",
    ],
)
def test_an_upstream_is_a_url_without_a_path(upstream: str) -> None:
    assert binding(upstream=upstream).startswith("upstream must be like https://api.example.com or")


def test_insecure_is_no_way_round_certificates() -> None:
    assert binding(insecure=True).startswith("insecure goes with an http upstream only")
    said = binding(upstream="http://api.example.com", insecure=True, ca_file="ca.pem")
    assert said == "ca_file needs an https upstream"


@pytest.mark.parametrize(
    "path",
    [
        "",
        "a",
        "//",
        "/a//b",
        "/./a",
        "/a/..",
        "/%2e",
        "/a?b",
        "/a#b",
        "/a\\b",
        "/a b",
        "/é",
        "/a;b",
        "https://x/",
        "/" + "a" * 1024,
    ],
)
def test_a_route_has_a_plain_path(path: str) -> None:
    said = binding(routes=[{"path": path, "match": "exact", "methods": ["GET"]}])
    assert said.startswith("path in [[bindings.x.routes]] number 1 must be a path that begins")


@pytest.mark.parametrize("path", ["/a", "/{}", "/{A}", "/a{b}", "/{a}{b}", "/{a"])
def test_a_template_has_whole_segments(path: str) -> None:
    said = binding(routes=[{"path": path, "match": "template", "methods": ["GET"]}])
    assert said.endswith("of a template has whole segments like {name}")


@pytest.mark.parametrize("match", ["exact", "prefix"])
def test_braces_are_of_templates(match: str) -> None:
    said = binding(routes=[{"path": "/{a}", "match": match, "methods": ["GET"]}])
    assert said.endswith('has braces; that needs match = "template"')


@pytest.mark.parametrize("methods", [["get"], ["CONNECT"], ["TRACE"], [""], [1], ["GET", "GET"]])
def test_methods_are_listed_in_capitals(methods: list[Any]) -> None:
    said = binding(routes=[{"path": "/", "match": "exact", "methods": methods}])
    assert said.startswith("methods in [[bindings.x.routes]] number 1: ")


def test_a_route_leaves_nothing_out() -> None:
    for key in ("path", "match", "methods"):
        route: dict[str, Any] = {"path": "/", "match": "exact", "methods": ["GET"]}
        del route[key]
        said = binding(routes=[route])
        assert said == f"{key} is missing in [[bindings.x.routes]] number 1"
    route = {"path": "/", "match": "exact", "methods": []}
    assert "must be an array of at least 1 methods" in binding(routes=[route])
    route["methods"] = ["GET"]
    assert binding(routes=[route, copy.deepcopy(route)]).endswith("number 2 stands twice")


@pytest.mark.parametrize("header", ["", "Host", "content-length", "Transfer-Encoding", "a b", "a:"])
def test_a_header_that_cannot_carry(header: str) -> None:
    said = binding(kind="header", header=header)
    assert said.startswith("header must be the name of a header that may carry")


@pytest.mark.parametrize(
    "ca", ["", "/etc/ca.pem", "../ca.pem", "a/../b", "a//b", "./a", "a/", "a\nb"]
)
def test_a_ca_file_lies_in_the_directory(ca: str) -> None:
    assert binding(ca_file=ca).startswith("ca_file must be a file inside the config's directory")


@pytest.mark.parametrize(
    "repo", ["", "r", "o/r.git", "/o/r", "o//r", "../r", "o/..", "o/r/", "o r"]
)
def test_a_repository_is_owner_and_name(repo: str) -> None:
    said = binding(kind="git-basic", routes=None, basic_user="u", repos=[{"name": repo}])
    assert said.startswith("name in [[bindings.x.repos]] number 1 must be OWNER/NAME")


CANARY = "sk-CANARY-0123"
PASTED = [
    CANARY,
    f"Authorization: Bearer {CANARY}",
    f"key={CANARY}",
    f"user:{CANARY}",
    f"https://a.example/?key={CANARY}",
    f"https://{CANARY}_.example",
    f"https://{CANARY}@a.example",
    f"/../{CANARY}",
    f"/{{{CANARY}}}",
    f"o/{CANARY}.git",
    f"{CANARY}\n",
]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"credential": CANARY}, "credential must be 1 to 64 lowercase letters"),
        ({"kind": "header", "header": PASTED[1]}, "header must be the name of a header"),
        ({"kind": "query", "query": PASTED[2]}, "query must be the name of a query"),
        ({"kind": "basic", "basic_user": PASTED[3]}, "basic_user must be 1 to 128"),
        ({"upstream": PASTED[4]}, "upstream must be like https://api.example.com"),
        ({"routes": CANARY}, "routes must be an array of tables"),
        ({"routes": [CANARY]}, "routes number 1 must be a table"),
        ({"insecure": CANARY}, "insecure must be true or false"),
        ({"key": CANARY}, 'unknown key "key"'),
    ],
)
def test_a_pasted_secret_is_not_shown_and_the_rule_is(changes: dict[str, Any], line: str) -> None:
    said = binding(**changes)
    assert said.startswith(line) or line in said
    assert "anary" not in said.lower()


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place below a document's table or array, itself included."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = [path]
    for key, each in inner:
        here = (*path, key)
        found += _places(each, here) if isinstance(each, dict | list) else [here]
    return found


PLACES = _places(tomllib.loads(FULL)["bindings"])


@pytest.mark.parametrize("place", PLACES, ids=lambda p: ".".join(map(str, p)) or "bindings")
def test_no_refusal_repeats_a_value_of_the_bindings(place: tuple[Any, ...]) -> None:
    for secret in PASTED[::2]:
        for pasted in (secret, [secret], [secret, secret], {"x": secret}, {secret: secret}):
            document = tomllib.loads(FULL)
            inside: Any = document
            for key in ("bindings", *place)[:-1]:
                inside = inside[key]
            inside[("bindings", *place)[-1]] = pasted
            try:
                parse(toml.dumps(document).encode(), SOURCE)
            except ConfigError as error:
                said = str(error)
            else:
                continue  # where any text may stand
            if isinstance(pasted, dict) and secret in pasted:  # a key is named, once
                said = said.replace("unknown key", "", 1).replace(CANARY, "", 1)
            assert CANARY.lower() not in said.lower(), (pasted, said)
            assert "in [" in said or "at the top level" in said


@pytest.mark.parametrize("text", ["sk-CANARY-0123", '"x" sk-CANARY-0123', "'sk-CANARY-0123", "["])
def test_what_is_no_toml_is_not_shown(text: str) -> None:
    said = refusal(f"version = 1\n[bindings.a]\ncredential = {text}\nkind = 'sk-CANARY-0123'")
    assert said.startswith("not TOML: ")
    assert "CANARY" not in said


def test_a_command_with_a_token_is_not_shown() -> None:
    said = refusal('version = 1\n[profiles.a]\nharness = "codex --token sk-CANARY-0123"')
    assert said.startswith("harness in [profiles.a] must be one of kage")
    assert "CANARY" not in said


# --------------------------------------------------------------------- not even TOML


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "version is missing at the top level"),
        (b"\xff", "not UTF-8 text, at byte 0"),
        (b"version = 1\nversion = 1", "not TOML: "),
        (b"version = ", "not TOML: "),
        (b"\xef\xbb\xbfversion = 1", "not TOML: "),
        (b"a = " + b"[" * 50_000, "nested too deeply"),
        (b"a = " + b"9" * 5_000, "not TOML: "),
        (b"\0", "not TOML: "),
    ],
)
def test_what_is_no_config_at_all(content: bytes, line: str) -> None:
    assert refusal(content).startswith(line)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@settings(deadline=None)
def test_bytes_are_refused_or_read_and_nothing_else(content: bytes) -> None:
    try:
        parse(content, SOURCE)
    except ConfigError as error:
        assert str(error).isprintable()


@given(st.data())
@settings(deadline=None)
def test_a_flipped_byte_is_refused_or_read_and_nothing_else(data: st.DataObject) -> None:
    content = bytearray(FULL.encode())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        parse(bytes(content), SOURCE)
    except ConfigError as error:
        assert str(error).isprintable()
