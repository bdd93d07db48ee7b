"""A world for the registry's plans: a disk, an engine and a netstack that can fail or end at
any command."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.schema import Wire
from agent_box.channel import contract as channel
from agent_box.config.model import Config
from agent_box.config.parse import builtin, parse
from agent_box.engine import contract as engine
from agent_box.netstack import contract as net
from agent_box.registry import commands as deciding
from agent_box.registry import contract as api
from agent_box.registry import journal, record
from agent_box.registry.commands import Command, Plan
from agent_box.registry.core import Core, Found
from agent_box.registry.journal import New

R = TypeVar("R")

CONFIG = parse(
    b"""
version = 1
[defaults]
profile = "rust"
[profiles.rust]
image = "base"
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
        boots: the number of its last boot; by id.
        exits: how a VMM that is stopped ended: status and signal; by id.
        guests: ids whose guest answers; None: all do.
        surrounded: whether the broker serves instances.
        offline: whether no network worker answers.
        woken: ids for which something is left to do.
        now_ms: the time.
        overtake: done while a guest is waited for; what comes of it is noticed.
        fail: asked before each command with its number from 0; what it gives is raised
            instead of doing it.
        after: the same, after it was done: the reply is lost.
    """

    config: Config = field(default_factory=builtin)
    records: dict[str, tuple[str, bytes, str]] = field(default_factory=dict)
    events: list[New] = field(default_factory=list)
    holds: dict[str, str] = field(default_factory=dict)
    boots: dict[str, int] = field(default_factory=dict)
    exits: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)
    guests: set[str] | None = None
    surrounded: bool = False
    offline: bool = False
    woken: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    now_ms: int = 1_000
    overtake: Callable[[], None] | None = None
    core_now: Core | None = None
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
        self.core_now = core
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
                if self.holds.get(command.instance, "stopped") != "stopped":
                    raise Refusal(Reason.CONFLICT, "its machine is running")
                self.holds.pop(command.instance, None)
                self.boots.pop(command.instance, None)
                self.exits.pop(command.instance, None)
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
            case deciding.ReadCounters():
                return net.Counters(
                    generation=1, flows=2, flows_total=3, denied=4, bytes_up=5, bytes_down=6,
                    dropped_frames=7,
                )  # fmt: skip
            case _:
                return self._live(command)
        return None

    def _live(self, command: Command) -> object:
        match command:
            case deciding.Clock():
                return self.now_ms
            case deciding.Tell():
                self.phases.append(command.phase)
            case deciding.Wake():
                self.woken.append(command.instance)
            case deciding.WasRemoved():
                return any(
                    e.kind == "removed" and e.instance == command.instance for e in self.events
                )
            case deciding.NetUp():
                if self.offline:
                    raise Refusal(Reason.UNAVAILABLE, "the network worker does not answer")
            case deciding.Down():
                pass
            case deciding.BrokerUp():
                if not self.surrounded:
                    raise Refusal(Reason.UNAVAILABLE, "this version serves no instances yet")
            case deciding.EngineBoot():
                return self._boot(command.boot)
            case deciding.EngineChange():
                return self._change(command.change, command.vmm)
            case deciding.Provision():
                asked = command.provision
                return self._guest(asked.instance, asked.boot, command.intent)
            case deciding.SetTime():
                return self._guest(command.guest.instance, command.guest.boot, None)
            case deciding.PowerOff():
                said = self._guest(command.guest.instance, command.guest.boot, command.intent)
                if not isinstance(said, channel.Provisioned):
                    return said if isinstance(said, deciding.Overtaken) else None
                self.end(command.guest.instance, 0, None)
            case deciding.AwaitEnd():
                if self._overtaken(command.vmm.instance, command.intent):
                    return deciding.Overtaken()
                there = self._seen(command.vmm.instance)
                return there if there.state == "stopped" else None
        return None

    def end(self, id: str, status: int | None, signal: int | None) -> None:
        """The VMM ends."""
        self.holds[id], self.exits[id] = "stopped", (status, signal)

    def _boot(self, boot: engine.Boot) -> engine.Observed:
        id = boot.instance
        if id not in self.holds:
            raise Refusal(Reason.NOT_FOUND, "no such instance")
        if self.boots.get(id) != boot.boot:
            if self.holds[id] != "stopped":
                raise Refusal(Reason.CONFLICT, "another boot runs")
            assert boot.boot > self.boots.get(id, 0)
            self.holds[id], self.boots[id] = "running", boot.boot
            self.exits.pop(id, None)
        return self._seen(id)

    def _change(self, change: str, vmm: engine.Vmm) -> engine.Observed:
        id = vmm.instance
        if self.boots.get(id) != vmm.boot:
            raise Refusal(Reason.CONFLICT, "another boot is meant")
        if change == "kill" and self.holds[id] != "stopped":
            self.end(id, None, 9)
        elif self.holds[id] in ("running", "paused"):
            self.holds[id] = {"pause": "paused", "resume": "running"}[change]
        return self._seen(id)

    def _overtaken(self, id: str, intent: int | None) -> bool:
        if self.overtake is not None:
            overtake, self.overtake = self.overtake, None
            overtake()
        assert self.core_now is not None
        now = self.core_now.by_id(id)
        return intent is not None and (now is None or now.intent != intent)

    def _guest(self, id: str, boot: int, intent: int | None) -> object:
        if self._overtaken(id, intent):
            return deciding.Overtaken()
        if self.holds.get(id) == "stopped" or self.boots.get(id) != boot:
            return self._seen(id)
        if self.holds[id] != "running" or (self.guests is not None and id not in self.guests):
            raise Refusal(Reason.DEADLINE, "the guest does not answer")
        return channel.Provisioned(version="1", skew_ms=3)

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
        ended = self.holds[id] == "stopped"
        status, signal = self.exits.get(id, (None, None)) if ended else (None, None)
        return engine.Observed(
            instance=id,
            state=self.holds[id],  # type: ignore[arg-type]
            boot=self.boots.get(id),
            exit_status=status,
            exit_signal=signal,
        )


IMAGES = api.Images(
    kernel="1" * 64, initramfs="2" * 64, variant="3" * 64, guest="4" * 64, harness=None
)

DIGESTS = msgspec.structs.asdict(IMAGES)  # as `inspect --json` shows them


def create(name: str = "web1", **fields: object) -> api.Create:
    given: dict[str, object] = {
        "profile": None,
        "cpus": None,
        "memory": None,
        "disk": None,
        "image": "base",
        "images": IMAGES,
    }
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
