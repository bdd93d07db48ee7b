"""The verbs of records: create, list and inspect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent_box.cli import link
from agent_box.cli.render import Failure, Render, clean, size_text, table, time_text

if TYPE_CHECKING:
    from agent_box.bus.client import Client
    from agent_box.config.model import Profile
    from agent_box.process.paths import Paths
    from agent_box.registry.contract import Counters, Images, Instance, Row


def create(
    out: Render,
    *,
    name: str,
    profile: str | None,
    cpus: int | None,
    memory: int | None,
    disk: int | None,
) -> None:
    """Makes a persistent instance and does not start it."""
    row = make(out, name, profile=profile, cpus=cpus, memory=memory, disk=disk)
    out.result(
        {"name": row.name, "state": row.state, "kind": row.kind},
        f"{row.name} created: {row.image}, {row.cpus} cpus, memory {size_text(row.memory)}, "
        f"disk {size_text(row.disk)}",
    )


def make(
    out: Render,
    name: str,
    *,
    profile: str | None,
    cpus: int | None,
    memory: int | None,
    disk: int | None,
) -> Row:
    """As `create`, without an answer of its own. Raises Failure, Refusal, ConfigError."""
    from agent_box.bus.errors import Refusal
    from agent_box.engine.image import blobs
    from agent_box.registry.contract import Create, Row

    here = link.place()
    chosen = _profile(here, profile)
    _refuse_more_than_the_host(memory if memory is not None else chosen.memory)
    with link.service("registry", out) as registry:
        try:  # whether there is one, before anything is locked
            _images(here.paths, chosen)
        except Refusal:
            _refuse_taken(registry, name)
            raise
        with blobs.locked(here.paths):  # so that nobody removes it before it is on record
            request = Create(
                name=name,
                profile=profile,
                cpus=cpus,
                memory=memory,
                disk=disk,
                image=chosen.image,
                images=_images(here.paths, chosen),
            )
            row = registry.call("create", request)
    assert isinstance(row, Row)
    return row


def list_instances(out: Render) -> None:
    """One row per instance."""
    from agent_box.bus.schema import Empty
    from agent_box.registry.contract import Rows

    with link.service("registry", out) as registry:
        rows = registry.call("list", Empty())
    assert isinstance(rows, Rows)
    for problem in rows.problems:
        out.warning(f"{problem.name}: {problem.problem}")
    for stray in rows.strays:
        out.warning(f"the engine holds {stray}, which no record knows; see agent-box doctor")
    out.result(
        {
            "instances": [_row(row) for row in rows.instances],
            "problems": [{"name": p.name, "problem": p.problem} for p in rows.problems],
            "strays": rows.strays,
        },
        _table(rows.instances) if rows.instances else "no instances",
    )


def inspect(out: Render, *, name: str) -> None:
    """The full record, and what the engine and netstack say now."""
    from agent_box.registry.contract import Instance, Name

    with link.service("registry", out) as registry:
        found = registry.call("inspect", Name(name=name))
    assert isinstance(found, Instance)
    result = _instance(found)
    out.result(result, _lines(result))


# ------------------------------------------------------------------------- create


def _profile(here: link.Place, name: str | None) -> Profile:
    """The profile that `create` takes.

    Raises:
        ConfigError: the config is none.
        Failure: it has no such profile.
    """
    from agent_box.config.load import load

    config = load(here.config)
    wanted = config.defaults.profile if name is None else name
    found = config.profiles.get(wanted)
    if found is None:
        why = f"there is no profile {wanted!r} in the config"
        raise Failure(3, "not-found", why, profile=wanted)
    return found


def _images(paths: Paths, profile: Profile) -> Images:
    """The files that the variant and the layer of the harness are now. Whoever starts a machine
    hashes each.

    Raises:
        Refusal: there is no such image or layer, or a file of it is gone; says what to do.
    """
    from agent_box.engine.image import manifest
    from agent_box.registry.contract import Images

    found = manifest.find(paths, profile.image)
    return Images(
        kernel=found.kernel.sha256,
        initramfs=found.initramfs.sha256,
        variant=found.variant.sha256,
        guest=found.guest.sha256,
        harness=_layer(paths, profile.harness),
    )


def _layer(paths: Paths, harness: str | tuple[str, ...] | None) -> str | None:
    """The drive of a harness; None where the variant brings what there is.

    Raises:
        Refusal: it is not built; says what to do.
    """
    if not isinstance(harness, str):
        return None
    from agent_box.config import presets
    from agent_box.engine.image import layers

    if presets.load(harness).layer == "none":
        return None
    return layers.find(paths, harness).drive.sha256


def _refuse_taken(registry: Client, name: str) -> None:
    """That the name is taken is to be told before anything about images."""
    from agent_box.bus.schema import Empty
    from agent_box.registry.contract import Rows

    rows = registry.call("list", Empty())
    assert isinstance(rows, Rows)
    if name in (*(row.name for row in rows.instances), *(p.name for p in rows.problems)):
        raise Failure(5, "exists", f"{name} exists already", name=name)


def _refuse_more_than_the_host(memory: int) -> None:
    """A machine with more memory than there is would be killed at some time, or kill others."""
    import os

    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory > there:
        raise Failure(
            64,
            "usage",
            f"create: {size_text(memory)} of memory is more than this host has "
            f"({there >> 20}M); give --memory, or a smaller one in the profile",
        )


# --------------------------------------------------------------------------- rows


def _row(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "state": row.state,
        "kind": row.kind,
        "profile": row.profile,
        "image": row.image,
        "cpus": row.cpus,
        "memory": row.memory,
        "disk": row.disk,
    }


def _table(rows: list[Row]) -> str:
    header = ("NAME", "STATE", "KIND", "PROFILE", "IMAGE", "CPUS", "MEMORY", "DISK")
    lines = [
        (
            r.name,
            r.state,
            r.kind,
            r.profile,
            r.image,
            r.cpus,
            size_text(r.memory),
            size_text(r.disk),
        )
        for r in rows
    ]
    return table(header, lines)


def _instance(found: Instance) -> dict[str, Any]:
    machine, images = found.machine, found.images
    return {
        **_row(found.row),
        "id": found.id,
        "created": time_text(found.created_ms),
        "changed": time_text(found.changed_ms),
        "boots": found.boots,
        "harness": found.harness,
        "sudo": found.sudo,
        "hook": found.hook,
        "hook_required": found.hook_required,
        "bindings": found.bindings,
        "policy": {
            "name": found.policy,
            "mode": found.policy_mode,
            "generation": found.policy_generation,
            "changes": found.policy_changes,
        },
        "doing": found.doing,
        "phase": found.phase or None,
        "failed": None
        if found.failed is None
        else {
            "verb": found.failed.doing,
            "kind": found.failed.reason,
            "message": found.failed.message,
            "time": time_text(found.failed.at_ms),
        },
        "digests": {
            "kernel": images.kernel,
            "initramfs": images.initramfs,
            "variant": images.variant,
            "guest": images.guest,
            "harness": images.harness,
        },
        "engine": None
        if machine is None
        else {
            "state": machine.state,
            "boot": machine.boot,
            "exit_status": machine.exit_status,
            "exit_signal": machine.exit_signal,
            "observed": time_text(machine.observed_ms),
        },
        "forwards": None
        if found.forwards is None
        else [
            {
                "address": f.address,
                "host_port": f.host_port,
                "guest_port": f.guest_port,
                "public": f.public,
            }
            for f in found.forwards
        ],
        "counters": None if found.counters is None else _counters(found.counters),
    }


def _counters(counted: Counters) -> dict[str, int]:
    return {
        "generation": counted.generation,
        "flows": counted.flows,
        "flows_total": counted.flows_total,
        "denied": counted.denied,
        "bytes_up": counted.bytes_up,
        "bytes_down": counted.bytes_down,
        "dropped_frames": counted.dropped_frames,
    }


def _lines(result: dict[str, Any]) -> str:
    """The same for people: a line for each fact, in the same order."""
    shown = dict(result)
    for size in ("memory", "disk"):
        shown[size] = size_text(result[size])
    policy = result["policy"]
    changes = f", {policy['changes']} changes" if policy["changes"] else ""
    shown["policy"] = (
        f"{policy['name']}, mode {policy['mode']}, generation {policy['generation']}{changes}"
    )
    harness = result["harness"]
    shown["harness"] = " ".join(harness) if isinstance(harness, list) else harness
    shown["hook"] = result["hook"] or "the usual one"
    shown["engine"] = _engine_text(result["engine"])
    forwards = result["forwards"]
    shown["forwards"] = (
        "netstack has not answered"
        if forwards is None
        else [f"{f['address']}:{f['host_port']} to {f['guest_port']}" for f in forwards]
    )
    digests = result["digests"]
    shown["digests"] = [f"{part} {digest}" for part, digest in digests.items() if digest]
    failed = result["failed"]
    shown["failed"] = failed and f"{failed['verb']} at {failed['time']}: {failed['message']}"
    counted = result["counters"]
    shown["network"] = "no counters: no machine runs, or netstack has not answered"
    shown["counters"] = counted and ", ".join(
        f"{k.replace('_', ' ')} {v}" for k, v in counted.items()
    )
    if counted:
        shown["network"] = "connected"
    return "\n".join(f"{key.replace('_', '-')}: {_text(value)}" for key, value in shown.items())


def _engine_text(engine: dict[str, Any] | None) -> str:
    if engine is None:
        return "has not answered"
    ended = ""
    if engine["exit_signal"] is not None:
        ended = f", ended by signal {engine['exit_signal']}"
    elif engine["exit_status"] is not None:
        ended = f", ended with status {engine['exit_status']}"
    boot = "" if engine["boot"] is None else f", boot {engine['boot']}"
    return f"{engine['state']}{boot}{ended}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == []:
        return "none"
    return ", ".join(map(clean, value)) if isinstance(value, list) else clean(value)
