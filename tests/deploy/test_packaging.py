"""What a user gets is the wheel, and an editable install hides what the wheel lacks."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.source import ROOT, ours

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: the checkout may be read-only, and is nobody's workshop."""
    source = tmp_path_factory.mktemp("source")
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("services", "cli", "guest"):
        shutil.copytree(ROOT / name, source / name, ignore=leave)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", "out", cwd=source)
    (built,) = (source / "out").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh venv with the wheel in it.

    Third-party packages come from the venv of the tests, as a plain path: the links of its
    editable install are then not followed. That each is declared is a test of its own.
    """
    venv = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=venv.parent)
    python = venv / "bin" / "python"
    packages = Path(
        run(python, "-c", "import sysconfig as s; print(s.get_path('purelib'))", cwd=venv).strip()
    )
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run(*pip, "--no-deps", "--no-index", wheel, cwd=venv)
    (packages / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_every_package_on_disk_is_listed() -> None:
    on_disk = {m.name for m in ours() if m.file == "__init__.py"}
    assert sorted(on_disk) == sorted(PROJECT["tool"]["setuptools"]["packages"])


def test_every_directory_with_code_is_a_package() -> None:
    packages = {m.name for m in ours() if m.file == "__init__.py"}
    assert {m.name.rpartition(".")[0] for m in ours() if m.file != "__init__.py"} <= packages


def test_the_wheel_holds_every_module_and_every_file_that_they_read(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {"agent_box/py.typed", "agent_box/bus/policy.toml", "agent_box/engine/image/init.sh"}
    for variant in (ROOT / "services/engine/image/variants").glob("*.toml"):
        wanted.add(f"agent_box/engine/image/variants/{variant.name}")
    for file in (ROOT / "services/config/harnesses").iterdir():
        if file.suffix in (".toml", ".json"):
            wanted.add(f"agent_box/config/harnesses/{file.name}")
    for module in ours():
        parts = module.path.split("/")
        wanted.add("/".join(["agent_box", *(parts[1:] if parts[0] == "services" else parts)]))
    assert wanted <= held
    assert {n for n in held if n.startswith("agent_box/")} == wanted


def test_every_module_is_imported_from_the_installed_wheel(python: Path, tmp_path: Path) -> None:
    names = [m.name for m in ours() if m.file != "__main__.py"]
    assert len(names) > 20
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    print(importlib.import_module(name).__file__)\n"
    )
    files = run(python, "-I", "-c", program, *names, cwd=tmp_path).split("\n")[:-1]
    assert len(files) == len(names)
    assert [f for f in files if not f.startswith(str(python.parents[1]))] == []


def test_the_policy_is_read_from_the_installed_wheel(python: Path, tmp_path: Path) -> None:
    program = (
        "import importlib.resources as r\n"
        "print(r.files('agent_box.bus').joinpath('policy.toml').read_text())"
    )
    told = run(python, "-I", "-c", program, cwd=tmp_path)
    assert tomllib.loads(told) == tomllib.loads((ROOT / "services/bus/policy.toml").read_text())


def test_the_console_script_runs(python: Path, tmp_path: Path) -> None:
    told = run(python.parent / "agent-box", "--version", cwd=tmp_path)
    assert PROJECT["project"]["version"] in told


def test_every_third_party_import_is_declared() -> None:
    providers = importlib.metadata.packages_distributions()
    declared = {plain(d) for d in PROJECT["project"]["dependencies"]}
    optional = PROJECT["project"]["optional-dependencies"]
    lazily = declared | {plain(d) for extra in optional if extra != "test" for d in optional[extra]}
    undeclared = []
    for module in ours():
        for name, line, early in module.imports:
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top == "agent_box":
                continue
            by = {plain(d) for d in providers.get(top, [top])}
            if not by & (declared if early else lazily):
                undeclared.append(f"{module.path}:{line}: {top}")
    assert undeclared == []


def plain(requirement: str) -> str:
    """The normalised name in a requirement: `PyNaCl>=1.5` is pynacl."""
    name = requirement.replace("[", ">").replace(";", ">").replace("~", ">").replace("<", ">")
    return name.split(">")[0].split("=")[0].strip().lower().replace("_", "-").replace(".", "-")
