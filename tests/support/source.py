"""The project's own source, for tests that read it: modules by name, imports, floors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIP = {"build", "dist", "__pycache__"}  # besides every hidden directory but .ci


@dataclass(frozen=True)
class Module:
    name: str  # as it is imported, e.g. agent_box.bus.wire; of a test, tests.bus.test_wire
    path: str  # relative to the project
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def room(self) -> str:
        """Of agent_box.bus.wire it is bus; of agent_box itself, nothing."""
        parts = self.name.split(".")
        return parts[1] if parts[0] == "agent_box" and len(parts) > 1 else ""

    @property
    def file(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    @cached_property
    def imports(self) -> tuple[tuple[str, int, bool], ...]:
        """Every module that may be imported here, with its line, and whether at import time.

        `from a import b` may mean the module a.b as well as a name in a, so both are told.
        """
        return tuple(_imports(self))


def _imports(module: Module) -> Iterator[tuple[str, int, bool]]:
    lazy: set[ast.AST] = set()
    for node in ast.walk(module.tree):
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        if inside:
            lazy.update(ast.walk(node))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, node not in lazy
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative: resolved against the package of this module
                package = module.name.split(".")
                if module.file != "__init__.py":
                    package = package[:-1]
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, base]).strip(".")
            yield base, node.lineno, node not in lazy
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno, node not in lazy


def texts() -> Iterator[tuple[str, str]]:
    """Every file of the project that is text: its path and what it says."""
    for path in sorted(ROOT.rglob("*")):
        relative = path.relative_to(ROOT)
        hidden = any(part.startswith(".") and part != ".ci" for part in relative.parts[:-1])
        if hidden or SKIP & set(relative.parts) or not path.is_file():
            continue
        if any(part.endswith(".egg-info") for part in relative.parts):
            continue
        try:
            yield str(relative), path.read_text()
        except UnicodeDecodeError:
            continue


def module_name(path: str) -> str:
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    if parts[0] == "services":
        return ".".join(["agent_box", *parts[1:]])
    if parts[0] in ("cli", "guest"):
        return ".".join(["agent_box", *parts])
    return ".".join(parts)


@lru_cache
def modules() -> tuple[Module, ...]:
    """Every Python module of the project, tests included."""
    return tuple(
        Module(module_name(path), path, text) for path, text in texts() if path.endswith(".py")
    )


def ours() -> tuple[Module, ...]:
    """What ships: services, cli and guest."""
    return tuple(m for m in modules() if m.name.split(".")[0] == "agent_box")
