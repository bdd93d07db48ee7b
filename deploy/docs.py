#!/usr/bin/env python3
"""Writes the pages of docs/ that are made from the code. `--check` only says what is stale.

    .venv/bin/python deploy/docs.py [--check]

A test runs the check, so a page that no longer tells the truth fails the build.
"""

from __future__ import annotations

import ast
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from agent_box.broker import kinds
from agent_box.bus import base, errors, policy
from agent_box.bus.schema import Contract, Data, Method, Network, Stream, Wire
from agent_box.cli import gaps, manual
from agent_box.process import confine, seccomp
from agent_box.process.paths import SERVICES, Paths

DOCS = Path(__file__).resolve().parents[1] / "docs"
# Placeholders: what lies below them is the same everywhere, what lies above is the host's.
PATHS = Paths(Path("/RUNTIME"), Path("/STATE"))


def contracts() -> dict[str, Contract]:
    return {name: import_module(f"agent_box.{name}.contract").CONTRACT for name in SERVICES}


def interfaces() -> str:
    """docs/interfaces.md: for an auditor, all that a process can be asked and can touch."""
    all_ = contracts()
    grants = policy.load(None, all_.values(), complete=True)
    lines = [
        "# Interfaces",
        "",
        "Made by `deploy/docs.py` from each service's `contract.py`, from `bus/policy.toml` and "
        "from the code that builds the walls. Not written by hand: change those instead.",
        "",
        "`RUNTIME` is `$XDG_RUNTIME_DIR/agent-box`, `STATE` is `~/.local/state/agent-box` "
        "(below `$XDG_STATE_HOME` where that is set).",
        "",
        *_data_classes(),
        *_of_every_service(grants),
        *_walls_of_all(),
    ]
    for contract in all_.values():
        lines += _service(contract, grants)
    return "\n".join(lines).rstrip() + "\n"


def architecture() -> str:
    """docs/architecture.md: written by hand but for the rooms between the two markers."""
    page = (DOCS / "architecture.md").read_text()
    before, begin, rest = page.partition("<!-- rooms:")
    comment, middle, rest = rest.partition("-->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not (begin and middle and end):
        raise SystemExit("docs/architecture.md has lost its markers")
    return "".join([before, begin, comment, middle, "\n".join(_rooms()), end, after])


def doctor() -> str:
    """docs/doctor.md: the names that the report may give."""
    lines = [
        "# Doctor",
        "",
        "`agent-box doctor` runs every probe and prints one line for each fact, `KEY: VALUE`. A "
        "line that ends in `[gap NAME]` means that something will be refused; `[note NAME]` is "
        "a fact to know. The last line names all gaps. It starts nothing: what only a service "
        "knows is asked of a daemon that runs. With `--json` each line names its evidence, "
        "the operation that was really done. The names, made by `deploy/docs.py` from "
        "`cli/gaps.py`:",
        "",
    ]
    for title, names in (("gap", gaps.GAPS), ("note", gaps.NOTES)):
        rows = ((f"`{n}`", about.meaning, about.remedy) for n, about in sorted(names.items()))
        lines += _table((title, "meaning", "what to do"), rows)
    return "\n".join(lines).rstrip() + "\n"


def cli() -> str:
    """docs/cli.md: written by hand but for the parts between markers."""
    return manual.fill((DOCS / "cli.md").read_text())


def broker() -> str:
    """docs/broker.md: written by hand but for the table of kinds."""
    page = (DOCS / "broker.md").read_text()
    before, begin, rest = page.partition("<!-- made: kinds -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not (begin and end):
        raise SystemExit("docs/broker.md has lost its markers")
    rows = ((f"`{n}`", k.nonce_in, k.credential_in) for n, k in kinds.KINDS.items())
    table = _table(("kind", "where the guest puts its nonce", "where the credential goes"), rows)
    return "".join([before, begin, "\n".join(table), "\n", end, after])


FLOORS = (
    (5, "cli"),
    (4, "services/registry"),
    (3, "services/broker"),
    (2, "services/netstack"),
    (2, "services/channel"),
    (2, "services/store"),
    (2, "services/engine"),
    (1, "services/bus"),
    (1, "services/process"),
    (1, "services/config"),
    (1, "services/helper"),
    (1, "guest"),
)


def _rooms() -> Iterator[str]:
    top = DOCS.parent
    known = {room for _, room in FLOORS}
    on_disk = {f"services/{p.parent.name}" for p in (top / "services").glob("*/__init__.py")}
    if missing := sorted(on_disk - known):
        raise SystemExit(f"{missing[0]} is on no floor: say so in deploy/docs.py")
    for floor, room in FLOORS:
        yield ""
        yield f"### Floor {floor}: {room}/"
        yield ""
        modules = sorted((top / room).rglob("*.py"))
        rows = []
        for module in modules:
            text = ast.get_docstring(ast.parse(module.read_text())) or ""
            name = str(module.relative_to(top / room).with_suffix(""))
            if text and name != "__init__":
                rows.append((f"`{name}`", " ".join(text.split("\n\n")[0].split())))
        if rows:
            yield from list(_table(("module", "what it is for"), rows))[:-1]
        else:
            yield "Nothing yet."
    yield ""


def _data_classes() -> Iterator[str]:
    says = {
        Data.STATUS: "health, versions, counts",
        Data.RECORD: "names, sizes, states and policies of instances",
        Data.JOURNAL: "events; text in them may be a guest's claim",
        Data.SEALED: "a credential, sealed to the key of its one reader",
        Data.NONCE: "stand-ins that only one guest can use",
        Data.GUEST: "bytes of a guest, hostile",
    }
    yield "## Classes of data"
    yield ""
    yield "The most sensitive thing that a method carries."
    yield ""
    yield from _table(("class", "what"), ((d.value, says[d]) for d in Data))


def _of_every_service(grants: policy.Policy) -> Iterator[str]:
    yield "## What every service answers"
    yield ""
    yield from _methods(base.METHODS, None, grants)
    yield from _reasons(grants.grants(), {m.name for m in base.METHODS} - {"outcome"})
    yield from _types(base.METHODS)
    yield "`outcome` may be asked by whoever may make a call that must not be repeated."
    yield ""
    yield "An answer is a reply or one of these; nothing else crosses a process border."
    yield ""
    yield from _table(
        ("code", "reasons (exit code of the CLI)"),
        (
            (
                code.value,
                ", ".join(
                    f"{r.value} ({m.exit})" for r, m in errors.MEANING.items() if m.code is code
                ),
            )
            for code in errors.Code
        ),
    )


def _walls_of_all() -> Iterator[str]:
    yield "## What stands around every service"
    yield ""
    yield (
        "Each runs in a bubblewrap of its own: its own user, mount, PID, IPC, UTS and cgroup "
        "namespaces, no capabilities, no new privileges, a seccomp filter from before its "
        "first instruction and a second one once it has started, and Landlock inside where "
        "the kernel has it. It sees /usr, its Python and our code read-only, /proc of its own "
        "namespace, "
        + ", ".join(f"/dev/{name}" for name in confine.DEVICES)
        + ", an empty /tmp, and what is listed at the service."
    )
    yield ""
    yield (
        "System calls: an allow-list. All others answer ENOSYS, or EPERM where an attacker "
        "would want them. `ioctl`, `prctl`, `socket` and `socketpair` are judged by their "
        "arguments."
    )
    yield ""
    yield "```"
    yield from _wrapped(sorted(seccomp.BASE))
    yield "```"
    yield ""
    yield (
        "Once started, nothing can be executed any more (`execve`, `execveat`), and limits, "
        "filters and rules stay as they are."
    )
    yield ""


def _service(contract: Contract, grants: policy.Policy) -> Iterator[str]:
    wall = contract.wall
    profile = confine.profile(contract, PATHS, None)
    yield f"## {contract.service}"
    yield ""
    yield f"Trusts: {contract.trusts}"
    yield ""
    yield "### Methods"
    yield ""
    yield from _methods(contract.methods, contract.service, grants)
    named = {m.name for m in contract.methods} | {policy.DOORBELL}
    yield from _reasons((g for g in grants.grants() if g.callee == contract.service), named)
    yield from _types(contract.methods)
    if contract.events:
        yield "### Events that it causes"
        yield ""
        yield from _table(("kind", "what"), ((e.name, e.summary) for e in contract.events))
    yield "### What it can touch"
    yield ""
    yield wall.why
    yield ""
    network = {
        Network.NONE: "none: a namespace with nothing in it",
        Network.HOST: "the host's: TCP and UDP over IPv4 and IPv6, no raw sockets",
    }[wall.network]
    rows = [("network", network)]
    if wall.launcher:
        rows.append(("started by", f"`{wall.launcher}`, outside of the wall"))
    for mount in profile.mounts:
        if mount.path.is_relative_to(PATHS.runtime) or mount.path.is_relative_to(PATHS.state):
            how = "reads and writes" if mount.writable else "reads"
            rows.append((how, f"`{str(mount.path)[1:]}`"))
        elif mount.path.is_relative_to("/etc"):
            rows.append(("reads, if there", f"`{mount.path}`"))
    for link, target in profile.links:
        if link.is_relative_to("/etc"):
            rows.append(("link", f"`{link}` to `{target[1:]}`"))
    if wall.config:
        rows.append(("reads", "the directory of the config file"))
    rows += [("calls", callee) for callee in wall.calls]
    rows += [
        ("listens below", f"`RUNTIME/{name}`")
        for name in ("bus/" + contract.service, *wall.sockets)
    ]
    rows += [("connects below", f"`RUNTIME/{name}`") for name in wall.dials]
    rows += [("system call", f"`{name}`: {why}") for name, why in wall.syscalls]
    rows += [("limit", f"{name} {value}") for name, value in profile.limits]
    yield from _table(("", ""), rows)


def _reasons(grants: Iterable[policy.Grant], named: set[str]) -> Iterator[str]:
    """Why each may call: one line for each reason of the policy file."""
    by_why: dict[tuple[str, str], set[str]] = {}
    for grant in grants:
        if grant.method in named:
            by_why.setdefault((grant.caller, grant.why), set()).add(grant.method)
    for (caller, why), methods in sorted(by_why.items()):
        yield f"- {caller} ({', '.join(sorted(methods))}): {why}"
    yield ""


def _methods(
    methods: Iterable[Method | Stream], service: str | None, grants: policy.Policy
) -> Iterator[str]:
    rows = []
    for method in methods:
        # of a base method the grants are the same for every service but for who is left out
        callers = {
            c for s in ([service] if service else SERVICES) for c in grants.callers(s, method.name)
        }
        if isinstance(method, Method):
            kind, most = method.kind.value, f"{method.deadline_s:g} s"
        else:
            kind, most = "stream", f"{method.window} items in flight"
        rows.append(
            (
                f"`{method.name}`",
                kind,
                ", ".join(sorted(callers)) if service or method.name != "outcome" else "see below",
                method.data.value,
                most,
                f"{_signature(method)}. {method.summary}",
            )
        )
    yield from _table(("method", "kind", "callers", "data", "at most", "what it does"), rows)


def _signature(method: Method | Stream) -> str:
    if isinstance(method, Method):
        return f"{method.request.__name__} → {method.reply.__name__}"
    up, down = method.up.__name__, method.down.__name__
    return f"{method.request.__name__}, then {up} up and {down} down → {method.reply.__name__}"


def _types(methods: Iterable[Method | Stream]) -> Iterator[str]:
    seen: dict[str, type[Wire]] = {}
    for method in methods:
        streams = (method.up, method.down) if isinstance(method, Stream) else ()
        for wire in (method.request, *streams, method.reply):
            _collect(wire, seen)
    shown = [wire for wire in seen.values() if msgspec.structs.fields(wire)]
    for wire in shown:
        fields = (f"`{f.name}` {_type(f.type)}" for f in msgspec.structs.fields(wire))
        yield f"- **{wire.__name__}**: {', '.join(fields)}"
    if shown:
        yield ""


def _collect(kind: Any, seen: dict[str, type[Wire]]) -> None:
    if isinstance(kind, type) and issubclass(kind, Wire):
        if kind.__name__ in seen:
            return
        seen[kind.__name__] = kind
        for field in msgspec.structs.fields(kind):
            _collect(field.type, seen)
    for inner in typing.get_args(kind):
        _collect(inner, seen)


def _type(kind: Any) -> str:
    """A type as it is written in a contract."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is types.NoneType:
        return "none"
    if origin is typing.Literal:
        return " or ".join(f"“{a}”" for a in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(a) for a in arguments)
    if origin is dict:
        return f"map of {_type(arguments[0])} to {_type(arguments[1])}"
    if origin is not None:
        inner = ", ".join(_type(a) for a in arguments)
        return f"{origin.__name__} of {inner}"
    return str(kind.__name__)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + " --- |" * len(head)
    for row in rows:
        cells = [cell.replace("|", "\\|") for cell in row]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _wrapped(words: Iterable[str], width: int = 95) -> Iterator[str]:
    line = ""
    for word in words:
        if line and len(line) + len(word) + 1 > width:
            yield line
            line = ""
        line = f"{line} {word}".strip()
    yield line


PAGES = {
    "architecture.md": architecture,
    "broker.md": broker,
    "cli.md": cli,
    "doctor.md": doctor,
    "interfaces.md": interfaces,
}


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    stale = []
    for name, make in PAGES.items():
        page, wanted = DOCS / name, make()
        if not page.exists() or page.read_text() != wanted:
            stale.append(name)
            if not arguments:
                page.write_text(wanted)
    for name in stale:
        print(f"docs/{name}: {'stale; run deploy/docs.py' if arguments else 'written'}")
    return 1 if stale and arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
