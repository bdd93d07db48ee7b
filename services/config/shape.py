"""Every table and key of the config file: the one list. docs/cli.md is checked against it.

What a key means together with others (a kind's own keys, names that must exist) is checked
in `parse`; here stands what it may be by itself, and what it is when it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agent_box.config import egress, values, words
from agent_box.config.model import DEFAULT, HARNESSES, KINDS
from agent_box.config.tables import (
    BOOLEAN,
    Key,
    Named,
    Reader,
    Table,
    Tables,
    choice,
    integer,
    several,
    text,
)

VERSION: Final = 1

_NAME: Final = text(values.name, "name")
_SIZE: Final = 'size, e.g. "8G"'

_DENY_RULE: Final = {
    "host": Key(text(words.rule_host, "host, or *.host for all below it"), "this or cidr", None),
    "cidr": Key(text(words.said(egress.network), "address or network"), "this or host", None),
    "ports": Key(
        Reader("array of ports and ranges", words.said(egress.ports)),
        'e.g. `[443, "8000-8999"]`',
        ((egress.PORT_DEFAULT, egress.PORT_DEFAULT),),
    ),
    "protocol": Key(choice("tcp", "udp"), "of the flow", "tcp"),
}
_ALLOW_RULE: Final = {
    **_DENY_RULE,
    "sni": Key(BOOLEAN, "on port 443 a TLS client must name its server", True),
    "allow_reserved": Key(BOOLEAN, "the rule may lead into a reserved range", False),
}

POLICY: Final = Table(
    {
        "mode": Key(choice("deny", "allowlist", "open"), "deny: broker endpoints only"),
        "allow_open": Key(BOOLEAN, "mode open needs it", False),
        "allow": Key(Tables(Table(_ALLOW_RULE)), "what may be reached", ()),
        "deny": Key(Tables(Table(_DENY_RULE)), "what may not, whatever allows it", ()),
    }
)

PROFILE: Final = Table(
    {
        "image": Key(_NAME, "an image variant", "base"),
        "cpus": Key(integer(1, values.CPUS_MAX), "virtual CPUs", 2),
        "memory": Key(text(values.memory, _SIZE), "of the instance", 4 << 30),
        "disk": Key(text(values.disk, _SIZE), "the data disk, sparse", 30 << 30),
        "policy": Key(_NAME, "of `[policies]`, or the built-in `default`", DEFAULT),
        "bindings": Key(several(_NAME, "names"), "of `[bindings]`", ()),
        "harness": Key(
            Reader("name, or array with a command", words.harness, private=True),
            ", ".join(HARNESSES),
            None,
        ),
        "sudo": Key(BOOLEAN, "the agent may become root in the guest", False),
        "hook": Key(
            text(words.guest_path, "path in the guest"), "else ~/work/.agent-box/hook.sh", None
        ),
        "hook_required": Key(BOOLEAN, "a failing hook stops the start", False),
    }
)

ROUTE: Final = Table(
    {
        "path": Key(text(words.route_path, "path"), "a template's segment is {name}"),
        "match": Key(choice("exact", "prefix", "template"), "how the path is compared"),
        "methods": Key(several(text(words.method, "method"), "methods", least=1), "in capitals"),
    }
)

REPO: Final = Table(
    {
        "name": Key(text(words.repo, "OWNER/NAME"), "without .git"),
        "push": Key(BOOLEAN, "to the instance's own namespace; git-basic only", False),
    }
)

BINDING: Final = Table(
    {
        "upstream": Key(text(words.upstream, "URL without a path"), "where the broker connects to"),
        "kind": Key(choice(*KINDS), "how the credential travels"),
        "credential": Key(text(values.credential, "name"), "its name in the store"),
        "routes": Key(Tables(ROUTE), "what may be asked; where the kind has no own", ()),
        "repos": Key(Tables(REPO), "of kinds git-basic and github-api", ()),
        "header": Key(text(words.header, "header name"), "of kind header", None),
        "query": Key(text(words.query, "parameter name"), "of kind query", None),
        "basic_user": Key(text(words.basic_user, "text"), "of kinds basic and git-basic", None),
        "insecure": Key(BOOLEAN, "an http upstream needs it", False),
        "allow_reserved": Key(BOOLEAN, "the upstream may have a reserved address", False),
        "upgrade": Key(BOOLEAN, "WebSocket may be asked for", False),
        "cookies": Key(choice("strip", "keep"), "of replies, kept per instance", "strip"),
        "ca_file": Key(text(words.ca_file, "file"), "in the config's directory", None),
        "max_requests": Key(integer(1, values.COUNT_MAX), "of each instance, in all", None),
        "max_tokens": Key(integer(1, values.COUNT_MAX), "in and out, where replies tell", None),
        "max_cost": Key(Reader("number above 0", words.cost), "by prices.toml", None),
    },
    private=True,
)

DAEMON: Final = Table(
    {
        "log": Key(choice("error", "warn", "info", "debug"), "what services write", "info"),
        "stop_grace_seconds": Key(integer(0, 3600), "default of `stop --grace`", 30),
    }
)
DEFAULTS: Final = Table(
    {
        "profile": Key(_NAME, "used by `create` without `--profile`", DEFAULT),
        "engine": Key(choice("qemu", "firecracker"), "what runs instances", "qemu"),
    }
)
ENGINE: Final = Table(
    {
        "accel": Key(choice("kvm", "tcg"), "else what setup found to work", None),
        "helper": Key(choice("user", "system"), "the privileged helper's mode", "user"),
    }
)

FILE: Final = Table(
    {
        "version": Key(integer(VERSION, VERSION), "of this format"),
        "daemon": Key(DAEMON, "the services", {}),
        "defaults": Key(DEFAULTS, "where a verb says nothing", {}),
        "engine": Key(ENGINE, "the virtual machines", {}),
        "profiles": Key(Named(PROFILE, "profile"), "templates for `create`", {}),
        "policies": Key(Named(POLICY, "policy"), "egress rule sets", {}),
        "bindings": Key(Named(BINDING, "binding"), "broker endpoints", {}),
    }
)

# What a kind needs beside upstream and credential, and what it alone may have.
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "header": ("routes", "header"),
    "query": ("routes", "query"),
    "basic": ("routes", "basic_user"),
    "git-basic": ("repos", "basic_user"),
    "github-api": ("repos",),
}
PARTICULAR: Final = ("routes", "repos", "header", "query", "basic_user")
