"""`agent-box doctor`: every probe, one line each, and the gaps by name.

It starts nothing and changes nothing. A probe of this host does the real thing itself
(`probes`); what only a service can know is asked of a daemon that runs, and said to be
unknown when none does. A gap means that something will be refused, and never that something
weaker is used in its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agent_box.cli import link, probes, version
from agent_box.cli.gaps import GAPS
from agent_box.cli.probes import Line, gap, note, ok
from agent_box.cli.render import Failure, Render
from agent_box.config import search
from agent_box.config.errors import ConfigError
from agent_box.config.load import load
from agent_box.engine import chosen
from agent_box.process.paths import SERVICES, Paths, PathsError

if TYPE_CHECKING:
    from agent_box.bus.base import Hello
    from agent_box.bus.client import Client
    from agent_box.config.model import Config
    from agent_box.process.lock import Holder
    from agent_box.registry.contract import Rows

SYSTEM_HELPER: Final = Path("/run/agent-box/helper.sock")
ANSWER_S: Final = 3.0  # for a service: long for one that works, short for a report
PROBE_S: Final = 15.0  # for the engine: the helper behind it runs programs to know
LOOKED_AT: Final = 1_000  # of the newest events
FORGERIES: Final = ("forgery-refused", "nonce-refused")  # a bad frame of a guest, a wrong nonce


def doctor(out: Render, *, strict: bool) -> None:
    lines = list(report(os.environ))
    told, shown = facts(lines), text(lines)
    gaps = told["gaps"]
    if strict and gaps:
        message = f"{len(gaps)} gap{'s' if len(gaps) > 1 else ''}: {', '.join(gaps)}"
        raise Failure(1, "gaps", message, text=shown, **told)
    out.result(told, shown)


def facts(lines: list[Line]) -> dict[str, Any]:
    """The report for a program."""
    return {
        "lines": [asdict(line) for line in lines],
        "gaps": _names(lines, "gap"),
        "notes": _names(lines, "note"),
    }


def text(lines: list[Line]) -> str:
    """The report for a person."""
    gaps = ", ".join(_names(lines, "gap")) or "none"
    return "\n".join([*map(_text, lines), f"gaps: {gaps}"])


def _names(lines: list[Line], status: str) -> list[str]:
    return list(dict.fromkeys(line.name for line in lines if line.status == status and line.name))


def _text(line: Line) -> str:
    return f"{line.key}: {line.value}" + (f" [{line.status} {line.name}]" if line.name else "")


def report(env: Mapping[str, str]) -> Iterator[Line]:
    """The lines of the report, each as soon as its probe is done.

    Raises:
        ConfigError: AGENT_BOX_CONFIG names a file that is missing: whose report would it be?
    """
    config, lines = _config(env)
    paths, missing = _paths(env)
    yield ok("agent-box", f"{version.line().partition(' ')[2]}, {probes.triple()}", "this program")
    yield from lines
    yield from probes.account()
    yield from probes.host()
    accel = config.engine.accel or chosen.read(_state(env) / "services/engine" / chosen.FILE)
    yield from _engine(config, accel)
    daemon = _Daemon.look(paths, config) if paths is not None else None
    yield from _helper(daemon, config)
    yield from probes.jail()
    yield from probes.seccomp()
    yield from probes.landlock()
    yield from probes.cgroup(needed=config.engine.helper == "system")
    yield from probes.thp()
    yield from _machines(accel)
    yield from _images(_state(env), config, daemon)
    yield from probes.disk(_state(env))
    yield from probes.swap()
    yield _egress(config)
    if daemon is None:
        yield ok("credentials", "unknown: there is no runtime directory", "none")
        yield ok("forgery", "unknown: there is no runtime directory", "none")
        yield missing
        yield ok("instances", "unknown: there is no runtime directory", "none")
        return
    yield from daemon.credentials(config)
    yield from daemon.forgery()
    yield from daemon.line()
    for name in SERVICES:
        yield from daemon.service(name)
    yield from daemon.instances()


# ------------------------------------------------------------- before anything is asked


def _config(env: Mapping[str, str]) -> tuple[Config, list[Line]]:
    """The config in force, or the built-in one beside the line that says why not yours."""
    try:
        path = search.find(env)
    except ConfigError as error:
        if env.get(search.VARIABLE):
            raise
        return load(None), [gap("config", str(error), "config-invalid", "search")]
    try:
        return load(path), [ok("config", "none" if path is None else str(path), "search and load")]
    except ConfigError as error:
        return load(None), [gap("config", str(error), "config-invalid", f"load {path}")]


def _paths(env: Mapping[str, str]) -> tuple[Paths | None, Line]:
    """Where everything lies; or None, and the line about the daemon that then cannot be."""
    try:
        return Paths.from_env(env).for_instances(), ok("daemon", "not running", "none")
    except PathsError as error:
        return None, gap("daemon", str(error), "runtime-dir-missing", "stat the directories")


def _state(env: Mapping[str, str]) -> Path:
    """The state directory, also where the runtime directory is missing."""
    home = env.get("HOME") or os.path.expanduser("~")
    return Path(env.get("XDG_STATE_HOME") or f"{home}/.local/state") / "agent-box"


# --------------------------------------------------------------- engine and its surroundings


def _engine(config: Config, accel: str | None) -> Iterator[Line]:
    if config.defaults.engine == "firecracker":
        yield from probes.host_kernel()
        yield from probes.virtualization(needed=True)
        yield from probes.firecracker()
    else:
        yield from probes.virtualization(needed=accel == "kvm")
        yield from probes.qemu(accel)


def _machines(accel: str | None) -> Iterator[Line]:
    """What holds of every machine by construction."""
    reaches = {
        "tcg": "the guest reaches QEMU's emulator",
        "kvm": "the guest reaches KVM in the host kernel",
        None: "the guest reaches KVM in the host kernel, or QEMU's emulator",
    }[accel]
    yield ok("isolation", f"{reaches}; virtio-blk in QEMU, vsock in a process of ours", "design")


def _images(state: Path, config: Config, daemon: _Daemon | None) -> Iterator[Line]:
    """What may be booted, hashed anew. Who uses it, a registry that answers is asked."""
    from agent_box.cli import images

    asked = daemon is not None and daemon.holder is not None
    rows = None
    if asked and daemon is not None and not isinstance(daemon.said["registry"], str):
        rows = images.recorded(daemon.place)
    yield from images.report(Paths(state / "unused", state), config, rows)


def _egress(config: Config) -> Line:
    from agent_box.cli import egress

    policy = config.policies[config.profiles[config.defaults.profile].policy]
    value = (
        "machines have no NIC and no shared filesystem; a name that no rule allows was refused by "
        f"the data plane; default policy {policy.mode}"
    )
    if (problem := egress.problem()) is not None:
        return gap("egress", problem, "egress-unsafe", "look a name up")
    return ok("egress", value, "look a name up, load the config")


def _public(registry: Client, rows: Rows) -> list[str]:
    """The forwards that listen on more than loopback, of every instance that runs."""
    from agent_box.registry.contract import Instance, Name

    found = []
    for row in rows.instances:
        if row.state in ("running", "paused"):
            told = registry.call("inspect", Name(name=row.name), deadline_s=ANSWER_S)
            assert isinstance(told, Instance)
            found += [
                f"{row.name}:{each.guest_port} by {each.address}:{each.host_port}"
                for each in told.forwards or ()
                if each.public
            ]
    return found


def _forged(registry: Client) -> Iterator[Line]:
    """What no guest of ours sends, counted in the newest part of the journal."""
    from agent_box.registry.contract import Entries, Read

    newest = Read(
        after=0, tail=LOOKED_AT, since_ms=None, source="host-observed", name=None,
        limit=LOOKED_AT, wait_ms=0,
    )  # fmt: skip
    found = registry.call("logs", newest, deadline_s=ANSWER_S)
    assert isinstance(found, Entries)
    counts = dict.fromkeys(FORGERIES, 0)
    for entry in found.events:
        if entry.kind in counts:
            count = entry.facts.get("count")
            counts[entry.kind] += count if isinstance(count, int) else 1
    told = ", ".join(f"{kind} {count}" for kind, count in counts.items())
    value = f"{told}; in the last {len(found.events)} host-observed events of `agent-box logs`"
    yield ok("forgery", value, "registry.logs")


def _helper(daemon: _Daemon | None, config: Config) -> Iterator[Line]:
    """The helper shows itself to the engine alone, so the engine is asked."""
    mode = config.engine.helper
    if daemon is None and mode == "user":
        yield ok("helper", "user mode; unknown: there is no runtime directory", "none")
        return
    if daemon is None or daemon.holder is None:
        socket = SYSTEM_HELPER
        if daemon is not None and mode == "user":
            socket = daemon.place.paths.helper_sock
        yield from probes.helper(mode, socket)
        return
    said = daemon.said["engine"]
    if isinstance(said, str):  # which is a gap of the engine's own line
        yield ok("helper", f"{mode} mode; unknown, the engine cannot be asked: {said}", "none")
        return
    from agent_box.bus.schema import Empty
    from agent_box.engine.contract import Probed

    def ask(engine: Client) -> Iterator[Line]:
        probed = engine.call("probe", Empty(), deadline_s=PROBE_S)
        assert isinstance(probed, Probed)
        for found in probed.gaps:
            name = found.name if found.name in GAPS else "engine-missing"
            yield gap("helper", found.text, name, "engine.probe")
        if not probed.gaps and mode == "user":
            value = (
                f"user mode, protocol {probed.protocol}: each VM in its own user namespace, "
                "but no uid of its own and no cgroup limits"
            )
            yield note("helper", value, "helper-user-mode", "engine.probe")
        elif not probed.gaps:
            yield ok("helper", f"system mode, protocol {probed.protocol}", "engine.probe")

    yield from daemon.ask(
        "engine",
        ask,
        lambda why: gap("helper", f"{mode} mode; {why}", "helper-missing", "engine.probe"),
    )


# ------------------------------------------------------------------ what a daemon can tell


def _down(paths: Paths) -> dict[str, str]:
    """The services that supervisord has given up, and why; the others may be asked."""
    from agent_box.process.supervision import Control, ControlError

    try:
        statuses = Control(paths.supervisor).statuses()
    except ControlError:
        return {}  # it may be on its way up or down: the services themselves will tell
    return {
        name: f"it stays down: {status.reason}"
        for name, status in statuses.items()
        if status.state == "fatal"
    }


def _greet(place: link.Place, name: str) -> Hello | str:
    """What a service says of itself, or why it says nothing."""
    from agent_box.bus.base import Hello
    from agent_box.bus.errors import Refusal
    from agent_box.bus.schema import Empty

    try:
        client = link.connect(place, name)
    except Failure as failure:
        return str(failure)
    try:
        hello = client.call("hello", Empty(), deadline_s=ANSWER_S)
        assert isinstance(hello, Hello)
        return hello
    except Refusal as refusal:
        return refusal.message
    finally:
        client.close()


class _Daemon(NamedTuple):
    """A daemon that runs, or the place where one would.

    Attributes:
        agrees: it was started with the config file that our search finds.
        said: by each service, of itself; or why it said nothing, and then it is not asked
            again, so that one that is stuck is waited for only once.
    """

    place: link.Place
    holder: Holder | None
    agrees: bool
    said: dict[str, Hello | str]

    @classmethod
    def look(cls, paths: Paths, config: Config) -> _Daemon:
        place = link.Place(paths, Path(config.source) if config.source else None)
        holder = link.holder(place)
        if holder is None:
            return cls(place, None, True, {})
        down = _down(paths)
        said = {name: down.get(name) or _greet(place, name) for name in SERVICES}
        return cls(place, holder, (holder.config or "") == config.source, said)

    def line(self) -> Iterator[Line]:
        evidence = "/proc/locks"
        if self.holder is None:
            yield ok("daemon", "not running; the next verb starts it", evidence)
            return
        value = f"running, pid {self.holder.pid}, {self.place.paths.runtime}"
        if self.agrees:
            yield ok("daemon", value, evidence)
        else:
            theirs = f"the config {self.holder.config}" if self.holder.config else "no config"
            yield gap("daemon", f"{value}, with {theirs}", "config-mismatch", evidence)

    def ask(
        self,
        name: str,
        question: Callable[[Client], Iterator[Line]],
        otherwise: Callable[[str], Line],
    ) -> Iterator[Line]:
        """The lines of `question`, put to a service; or one line with why there is no answer."""
        from agent_box.bus.errors import Refusal

        if self.holder is None:
            yield otherwise("unknown: no daemon runs")
            return
        said = self.said[name]
        if isinstance(said, str):
            yield otherwise(said)
            return
        client = link.connect(self.place, name)
        try:
            lines = list(question(client))
        except Refusal as refusal:
            lines = [otherwise(refusal.message)]
        finally:
            client.close()
        yield from lines

    def service(self, name: str) -> Iterator[Line]:
        key, evidence = f"service-{name}", f"{name}.hello"
        if self.holder is None:
            yield ok(key, "not running", evidence)
            return
        said = self.said[name]
        if isinstance(said, str):
            yield gap(key, said, "service-failed", evidence)
        elif not said.ready:
            why = said.problem or "it does not say why"
            yield gap(key, f"not ready: {why}", "service-failed", evidence)
        elif said.problem is not None:
            value = f"ready, epoch {said.epoch.hex()}; {said.problem}"
            yield note(key, value, "service-problem", evidence)
        else:
            yield ok(key, f"ready, epoch {said.epoch.hex()}", evidence)

    def credentials(self, config: Config) -> Iterator[Line]:
        from agent_box.bus.schema import Empty
        from agent_box.store.contract import Credentials

        used: dict[str, list[str]] = {}
        for binding in config.bindings.values():
            used.setdefault(binding.credential, []).append(binding.name)

        def ask(store: Client) -> Iterator[Line]:
            held = store.call("list", Empty(), deadline_s=ANSWER_S)
            assert isinstance(held, Credentials)
            where = f"store {self.place.paths.data('store')}, {held.protection}"
            if held.problem is not None:
                yield gap("credentials", f"{where}: {held.problem}", "store-failed", "store.list")
                return
            names = [c.name for c in held.credentials]
            told = [f"{n} ({', '.join(used.get(n, ['no binding']))})" for n in names]
            value = f"{where}{', locked' if held.locked else ''}; {', '.join(told) or 'none'}"
            bad = [c.name for c in held.credentials if c.problem is not None]
            missing = [f"{n} (for {', '.join(b)})" for n, b in used.items() if n not in names]
            if bad:
                value += f"; cannot be used: {', '.join(bad)}"
                yield note("credentials", value, "credential-unusable", "store.list")
            elif missing:
                value += f"; missing: {', '.join(missing)}"
                yield note("credentials", value, "credential-missing", "store.list")
            elif held.locked:
                value += "; `agent-box secret unlock` opens it"
                yield note("credentials", value, "store-locked", "store.list")
            else:
                yield ok("credentials", value, "store.list")

        yield from self.ask("store", ask, lambda why: ok("credentials", why, "store.list"))

    def forgery(self) -> Iterator[Line]:
        """How often a guest was caught, in the newest part of the journal."""
        yield from self.ask("registry", _forged, lambda why: ok("forgery", why, "registry.logs"))

    def instances(self) -> Iterator[Line]:
        from agent_box.bus.schema import Empty
        from agent_box.registry.contract import Rows

        def ask(registry: Client) -> Iterator[Line]:
            rows = registry.call("list", Empty(), deadline_s=ANSWER_S)
            assert isinstance(rows, Rows)
            counts: dict[str, int] = {}
            for row in rows.instances:
                counts[row.state] = counts.get(row.state, 0) + 1
            told = ", ".join(f"{state} {counts[state]}" for state in sorted(counts))
            value = f"{len(rows.instances)}" + (f" ({told})" if told else "")
            if rows.strays:
                value += f"; held by the engine without a record: {', '.join(rows.strays)}"
            if rows.problems:
                names = ", ".join(problem.name for problem in rows.problems)
                value += f"; records that cannot be used: {names}"
                yield gap("instances", value, "record-unusable", "registry.list")
            elif rows.strays:
                yield note("instances", value, "instance-stray", "registry.list")
            elif "unknown" in counts:
                yield note("instances", value, "instance-state-unknown", "registry.list")
            elif public := _public(registry, rows):
                value += f"; others reach {', '.join(public)}"
                yield note("instances", value, "forward-public", "registry.inspect")
            else:
                yield ok("instances", value, "registry.list")

        yield from self.ask("registry", ask, lambda why: ok("instances", why, "registry.list"))
