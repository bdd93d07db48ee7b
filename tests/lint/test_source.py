"""Rules of the house that ruff does not know. Each is shown to catch an offender."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

import pytest
from support.source import Module, module_name, modules, ours, texts

Found = Iterator[tuple[int, str]]
SANS_IO = {"core.py", "peer.py", "wire.py", "states.py", "policy.py", "gate.py"}
IO = {"zmq", "asyncio", "os", "time", "socket", "select", "selectors", "subprocess", "threading"}
# Where tasks are made: in TaskSet, and in the bus server, which must not know `process`, holds
# each in its table until it is done, and logs what it raised.
TASKS = {"services/process/tasks.py", "services/bus/server.py"}
# The one clock of all deadlines is read beside the format that carries them.
CLOCKS = {("services/bus/wire.py", "time")}
HEAVY = {"scapy", "acp", "pydantic"}


def double_import(module: Module) -> Found:
    """From the repository's root this would load a second copy under a wrong name."""
    for name, line, _ in module.imports:
        if name.split(".")[0] in ("services", "cli", "guest"):
            yield line, f"imports {name}: say agent_box"


def bare_task(module: Module) -> Found:
    """A task that nobody holds is collected in flight, and its exception is lost."""
    if module.path in TASKS:
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("create_task", "ensure_future"):
            yield node.lineno, f"{node.attr}: use agent_box.process.tasks"
        if isinstance(node, ast.ImportFrom) and node.module == "asyncio":
            for alias in node.names:
                if alias.name in ("create_task", "ensure_future"):
                    yield node.lineno, f"{alias.name}: use agent_box.process.tasks"


def wire_default(module: Module) -> Found:
    """A field that got lost on the way must be an error, not the usual."""
    wires = {"Wire"}
    for node in module.tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        if not wires & {ast.unparse(base).rsplit(".", 1)[-1] for base in node.bases}:
            continue
        wires.add(node.name)
        for field in node.body:
            if not isinstance(field, ast.AnnAssign) or field.value is None:
                continue
            if "ClassVar" not in ast.unparse(field.annotation):
                yield field.lineno, f"{node.name}.{ast.unparse(field.target)} has a default"


def impure_core(module: Module) -> Found:
    """What decides is kept apart from what acts, so that it can be tested and read alone."""
    if module.file in SANS_IO:
        for name, line, _ in module.imports:
            if name.split(".")[0] in IO and (module.path, name.split(".")[0]) not in CLOCKS:
                yield line, f"a sans-I/O module imports {name}"


def sleeping(module: Module) -> Found:
    """Wait for the event."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "time.sleep":
            yield node.lineno, "time.sleep"
    for name, line, _ in module.imports:
        if name == "time.sleep":
            yield line, name


def swallowed(module: Module) -> Found:
    """An exception that nobody hears of is a defect that nobody finds."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            empty = all(
                isinstance(s, (ast.Pass, ast.Continue))
                or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
                for s in node.body
            )
            if node.type is None or (broad and empty):
                yield node.lineno, "an exception of any kind is swallowed"
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("suppress"):
            continue
        if any(ast.unparse(a) in ("Exception", "BaseException") for a in node.args):
            yield node.lineno, "an exception of any kind is swallowed"


def heavy_import(module: Module) -> Found:
    """0.3 s and 40 MB each: only where a person asked for it, and then when it is used."""
    for name, line, early in module.imports:
        if name.split(".")[0] in HEAVY and early:
            yield line, f"imports {name} when it is itself imported"
        if name.split(".")[0] == "typer" and module.room != "cli":
            yield line, "typer belongs to the CLI"


def version_specific(module: Module) -> Found:
    """The same code runs on every Python that we support, so that testing one tells of all."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in (
            "sys.version_info",
            "sys.hexversion",
            "platform.python_version",
        ):
            yield node.lineno, ast.unparse(node)


def unfinished(module: Module) -> Found:
    """What is not built is refused by name, with its exit code; nothing is half there."""
    for number, line in enumerate(module.text.splitlines(), 1):
        if re.search(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|NotImplemented" r"Error)\b", line):
            yield number, line.strip()


def contract_import(module: Module) -> Found:
    """A contract is read alone, and lies on the ground floor wherever its folder lies."""
    if module.file == "contract.py":
        for name, line, _ in module.imports:
            if name.split(".")[0] in ("__future__", "typing"):
                continue
            if not (name + ".").startswith("agent_box.bus.schema."):
                yield line, f"a contract imports {name}"


RULES: dict[str, tuple[Callable[[Module], Found], str, str]] = {
    # name: (the rule, the path of an offender, an offender)
    "double import": (double_import, "services/x/y.py", "from services.bus import wire"),
    "double import, plain": (double_import, "tests/x/test_y.py", "import cli.main"),
    "bare task": (bare_task, "services/x/y.py", "group.create_task(f())"),
    "bare future": (bare_task, "services/x/y.py", "from asyncio import ensure_future"),
    "wire default": (wire_default, "services/x/y.py", "class A(Wire, frozen=True):\n  n: int = 3"),
    "wire default, child": (
        wire_default,
        "services/x/y.py",
        "class A(Wire):\n  n: int\nclass B(A):\n  m: str | None = None",
    ),
    "impure core": (impure_core, "services/x/core.py", "def f():\n  import time"),
    "impure gate": (impure_core, "services/x/gate.py", "from os import path"),
    "sleep": (sleeping, "services/x/y.py", "time.sleep(1)"),
    "sleep, imported": (sleeping, "cli/y.py", "from time import sleep"),
    "bare except": (swallowed, "services/x/y.py", "try: f()\nexcept: raise"),
    "swallowed": (swallowed, "services/x/y.py", "try: f()\nexcept Exception: pass"),
    "suppressed": (swallowed, "services/x/y.py", "with contextlib.suppress(Exception): f()"),
    "heavy import": (heavy_import, "cli/y.py", "import scapy.all"),
    "heavy import, typer": (heavy_import, "services/x/y.py", "def f():\n  import typer"),
    "version": (version_specific, "services/x/y.py", "if sys.version_info >= (3, 12): f()"),
    "unfinished": (unfinished, "services/x/y.py", "f()  # TODO later"),
    "contract": (contract_import, "services/x/contract.py", "import os"),
    "contract, sibling": (
        contract_import,
        "services/x/contract.py",
        "from agent_box.bus import wire",
    ),
}


def scope(rule: Callable[[Module], Found]) -> tuple[Module, ...]:
    return modules() if rule in (double_import,) else ours()


@pytest.mark.parametrize("name", RULES)
def test_each_rule_catches_an_offender(name: str) -> None:
    rule, path, text = RULES[name]
    assert list(rule(Module(module_name(path), path, text)))


@pytest.mark.parametrize("rule", {rule: None for rule, _, _ in RULES.values()})
def test_the_source_keeps_the_rule(rule: Callable[[Module], Found]) -> None:
    looked_at = scope(rule)
    assert looked_at
    assert [f"{m.path}:{line}: {what}" for m in looked_at for line, what in rule(m)] == []


# But the guest's agent, and the account whose terminal was recorded.
PLACES = re.compile(
    r"(?<![\w.$}~-])/(?:work|root|opt|Users|home/(?!(?:agent|demo)\b|<)\w+)(?:/|\b)"
)


@pytest.mark.parametrize("text", ["see /opt/x/bin", "cd /root", "'/home/alice/x'", "(/work/y)"])
def test_a_path_of_one_machine_is_noticed(text: str) -> None:
    assert PLACES.search(text)


@pytest.mark.parametrize("text", ["/home/agent/work", "a/opt/b", "~/work/x", "$HOME/root/"])
def test_a_path_of_the_guest_or_below_another_is_not(text: str) -> None:
    assert not PLACES.search(text)


def test_no_text_of_the_project_names_a_path_of_one_machine() -> None:
    found = [
        f"{path}:{number}: {line.strip()}"
        for path, text in texts()
        if path != "tests/lint/test_source.py"
        for number, line in enumerate(text.splitlines(), 1)
        if PLACES.search(line)
    ]
    assert found == []
