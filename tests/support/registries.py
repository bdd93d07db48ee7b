"""A world for the registry's plans: a disk, an engine and a netstack that can fail or end at
any command."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.schema import Wire
from agent_box.config.model import Config
from agent_box.config.parse import builtin, parse
from agent_box.engine import contract as engine
from agent_box.netstack import contract as net
from agent_box.registry import contract as api
from agent_box.registry import core as deciding
from agent_box.registry import journal, record
from agent_box.registry.core import Command, Core, Found, Plan
from agent_box.registry.journal import New

R = TypeVar("R")

CONFIG = parse(
    b"""
version = 1
[defaults]
profile = "rust"
[profiles.rust]
image = "rust"
cpus = 4
memory = "8G"
disk = "30G"
policy = "dev"
bindings = ["github"]
harness = ["my-agent", "acp"]
[profiles.quiet]
image = "base"
policy = "locked"
[policies.dev]
mode = "allowlist"
allow = [{ host = "index.crates.io" }, { host = "static.crates.io", ports = [443, 80] }]
deny = [{ host = "*.evil.test" }]
[policies.locked]
mode = "deny"
[policies.wide]
mode = "open"
allow_open = true
[bindings.github]
upstream = "https://github.com"
kind = "git-basic"
credential = "github-token"
basic_user = "x-access-token"
repos = [{ name = "example-org/example-repo", push = true }]
""",
    "config.toml",
)


class Crash(Exception):
    """The process ends here."""


def refuse(reason: Reason = Reason.UNAVAILABLE) -> Refusal:
    return Refusal(reason, "no")


@dataclass
class World:
    """What outlives the registry, and how it fails.

    Attributes:
        records: on disk, by id, with the hash that the journal has.
        holds: what the engine has allocated; by id, the state of the VMM.
        fail: asked before each command with its number from 0; what it gives is raised
            instead of doing it.
        after: the same, after it was done: the reply is lost.
    """

    config: Config = field(default_factory=builtin)
    records: dict[str, tuple[str, bytes, str]] = field(default_factory=dict)
    events: list[New] = field(default_factory=list)
    holds: dict[str, str] = field(default_factory=dict)
    applied: list[tuple[str, net.Policy]] = field(default_factory=list)
    done: list[Command] = field(default_factory=list)
    replies: list[Wire] = field(default_factory=list)
    fail: Callable[[int, Command], Exception | None] = lambda number, command: None
    after: Callable[[int, Command], Exception | None] = lambda number, command: None

    def core(self) -> Core:
        """A registry that starts on this disk."""
        core = Core({"engine": frozenset({"vmm-ended"}), "channel": frozenset({"run-ended"})})
        core.load(
            Found(id, name, packed, hash) for id, (name, packed, hash) in self.records.items()
        )
        return core

    def play(self, plan: Plan[R]) -> R:
        """Carries out a plan to its end. Raises what it raises, or `Crash`."""
        result: object = None
        refusal: Refusal | None = None
        while True:
            try:
                command = plan.send(result) if refusal is None else plan.throw(refusal)
            except StopIteration as stop:
                done: R = stop.value
                return done
            result, refusal = None, None
            number = len(self.done)
            self.done.append(command)
            try:
                if (error := self.fail(number, command)) is not None:
                    raise error
                result = self._do(command)
                if (error := self.after(number, command)) is not None:
                    raise error
            except Refusal as error:
                refusal = error

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def _do(self, command: Command) -> object:
        match command:
            case deciding.ReadConfig():
                return self.config
            case deciding.Commit():
                self._commit(command)
            case deciding.EngineList():
                return engine.Observations(instances=[self._seen(id) for id in self.holds])
            case deciding.EngineQuery():
                if command.instance not in self.holds:
                    raise Refusal(Reason.NOT_FOUND, "no such instance")
                return self._seen(command.instance)
            case deciding.EngineCreate():
                self.holds[command.instance] = "stopped"
            case deciding.EngineDelete():
                self.holds.pop(command.instance, None)
            case deciding.ApplyPolicy():
                self.applied.append((command.instance, command.policy))
            case deciding.CheckFlow():
                from agent_box.netstack.policy import load

                return load(command.policy).decide(command.flow, own=())
            case deciding.ListForwards():
                forward = net.Forward(
                    address="127.0.0.1", host_port=8080, guest_port=80, public=False
                )
                return net.Forwards(forwards=[forward])
        return None

    def _commit(self, command: deciding.Commit) -> None:
        hashes = {
            event.instance: event.facts.get(journal.RECORD)
            for event in command.events
            if journal.RECORD in event.facts
        }
        for event in command.events:
            journal.check(event)
        if command.put is not None:
            put, packed = command.put, record.pack(command.put)
            hash = hashes[put.id]
            assert isinstance(hash, str)
            assert all(
                name != put.name or id == put.id for id, (name, _, _) in self.records.items()
            )
            self.records[put.id] = (put.name, packed, hash)
        if command.remove is not None:
            assert hashes[command.remove] == ""
            del self.records[command.remove]
        self.events += command.events
        if command.reply is not None:
            self.replies.append(command.reply)

    def _seen(self, id: str) -> engine.Observed:
        return engine.Observed(
            instance=id, state=self.holds[id], boot=None, exit_status=None, exit_signal=None
        )


def create(name: str = "web1", **fields: object) -> api.Create:
    given: dict[str, object] = {"profile": None, "cpus": None, "memory": None, "disk": None}
    return api.Create(name=name, **{**given, **fields})  # type: ignore[arg-type]


def made(world: World, name: str = "web1", *, state: str = "stopped") -> tuple[Core, str]:
    """A registry with one instance that exists and was seen; its id."""
    core = world.core()
    id = f"{len(world.records) + 1:032x}"
    world.play(core.create(create(name), id=id, now_ms=1))
    if state != "stopped":
        world.holds[id] = state
        world.play(core.reconcile())
    world.events.clear()
    world.done.clear()
    world.replies.clear()
    return core, id


def policy_set(name: str = "web1", **fields: object) -> api.PolicySet:
    given: dict[str, object] = {
        "policy": None,
        "reset": False,
        "table": None,
        "mode": None,
        "remove": [],
        "allow": [],
        "allow_open": False,
        "allow_reserved": False,
    }
    return api.PolicySet(name=name, **{**given, **fields})  # type: ignore[arg-type]


def seed(path: Path, *names: str) -> dict[str, str]:
    """Puts stopped instances into the database of a registry that does not run; their ids."""
    from agent_box.registry.database import Database

    before = os.umask(0o077)  # parents take the umask, whatever the mode
    path.parent.mkdir(parents=True, exist_ok=True)
    os.umask(before)
    world = World(config=CONFIG)
    core = world.core()
    database = Database(path)
    ids = {}
    for name in names:
        id = os.urandom(16).hex()
        world.done.clear()
        world.play(core.create(create(name), id=id, now_ms=1_700_000_000_000))
        for command in world.done:
            if isinstance(command, deciding.Commit):
                database.commit(put=command.put, events=command.events, time_ms=1_700_000_000_000)
        ids[name] = id
    database.close()
    return ids
