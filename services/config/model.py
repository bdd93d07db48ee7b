"""A config that passed every rule: frozen, typed, complete.

What an operator left out has its default here, so no reader of these types ever asks
"and if it is missing?". The registry copies a profile into a record at `create`; policy and
bindings are taken from the file again at every `start`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agent_box.config.egress import Mode, Target

KINDS: Final = (
    "anthropic",
    "openai",
    "google",
    "header",
    "basic",
    "query",
    "git-basic",
    "github-api",
    "oauth",
)
METERED: Final = ("anthropic", "openai", "google")  # their replies tell tokens
HARNESSES: Final = ("kage", "codex", "claude-code", "opencode", "gemini", "pi")
DEFAULT: Final = "default"  # the built-in profile, and the built-in policy


@dataclass(frozen=True, kw_only=True)
class Daemon:
    log: str  # error, warn, info or debug
    stop_grace_seconds: int


@dataclass(frozen=True, kw_only=True)
class Defaults:
    profile: str  # used by `create` without --profile
    engine: str  # qemu or firecracker


@dataclass(frozen=True, kw_only=True)
class Engine:
    accel: str | None  # kvm or tcg; None: what setup found out by running a guest
    helper: str  # user or system


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A template for `create`. `memory` and `disk` are bytes."""

    name: str
    image: str
    cpus: int
    memory: int
    disk: int
    policy: str
    bindings: tuple[str, ...]
    harness: str | tuple[str, ...] | None  # one of `HARNESSES`, or a command with its arguments
    sudo: bool
    hook: str | None  # path in the guest; None: ~/work/.agent-box/hook.sh if it is there
    hook_required: bool


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of a policy. In a deny rule `sni` is True and `allow_reserved` False."""

    target: Target
    sni: bool
    allow_reserved: bool


@dataclass(frozen=True, kw_only=True)
class Policy:
    name: str
    mode: Mode
    allow_open: bool
    allow: tuple[Rule, ...]
    deny: tuple[Rule, ...]


@dataclass(frozen=True, kw_only=True)
class Route:
    path: str
    match: str  # exact, prefix or template
    methods: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Repo:
    name: str  # OWNER/NAME, without .git
    push: bool


@dataclass(frozen=True, kw_only=True)
class Upstream:
    scheme: str  # https, or http with the binding's `insecure`
    host: str  # a name in the one form of `egress.host`, or a plain address
    port: int


@dataclass(frozen=True, kw_only=True)
class Binding:
    """One broker endpoint, http://NAME.broker.internal in the guest."""

    name: str
    upstream: Upstream
    kind: str  # one of `KINDS`
    credential: str  # its name in the store
    routes: tuple[Route, ...]  # empty where the kind defines them
    repos: tuple[Repo, ...]  # of git-basic and github-api
    header: str | None  # of kind header
    query: str | None  # of kind query
    basic_user: str | None  # of basic and git-basic
    insecure: bool
    allow_reserved: bool
    upgrade: bool  # WebSocket
    cookies: str  # strip or keep
    ca_file: str | None  # relative to the config's directory, and inside it
    max_requests: int | None  # each instance may send so many through this binding, ever
    max_tokens: int | None  # in and out together
    max_cost: int | None  # in millionths of the currency of prices.toml


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole config. `source` is the file's path, or empty for the built-in defaults."""

    source: str
    daemon: Daemon
    defaults: Defaults
    engine: Engine
    profiles: Mapping[str, Profile]
    policies: Mapping[str, Policy]
    bindings: Mapping[str, Binding]
