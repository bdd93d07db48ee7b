"""The drive with the guest's code: all of it, compiled, the same bytes each time."""

from __future__ import annotations

import ast
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import agent_box.guest
from agent_box.engine.image import boxguest, inside

ALLOWED = {"agent_box", "__future__"}


def compiled(directory: Path) -> Path:
    """What a build has before it packs, with this interpreter for the image's."""
    boxguest.lay_out(boxguest.sources(), directory)
    subprocess.run(
        [sys.executable, "-S", "-B", "-c", inside.COMPILE, directory], check=True, timeout=60
    )
    return directory


def test_all_of_the_guest_is_in_it_and_nothing_else() -> None:
    names = set(boxguest.sources())
    package = Path(agent_box.guest.__path__[0])
    wanted = {f"agent_box/guest/{file.name}" for file in package.glob("*.py")}
    assert names == (wanted - {"agent_box/guest/__main__.py"}) | {
        "__main__.py",
        "agent_box/__init__.py",
    }


def test_the_guest_needs_the_standard_library_alone() -> None:
    for name, text in boxguest.sources().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found = [node.module or ""]
            else:
                continue
            for module in found:
                top = module.split(".")[0]
                assert top in ALLOWED | set(sys.stdlib_module_names), f"{name}: {module}"
                if top == "agent_box":
                    assert module == "agent_box.guest" or module.startswith("agent_box.guest.")


def test_the_digest_tells_of_every_change() -> None:
    texts = boxguest.sources()
    digest = boxguest.digest(texts)
    assert digest == boxguest.digest(dict(reversed(texts.items())))
    assert digest != boxguest.digest({**texts, "agent_box/guest/wire.py": "#"})
    assert digest != boxguest.digest({**texts, "agent_box/guest/more.py": ""})


def test_two_drives_are_the_same_bytes(tmp_path: Path) -> None:
    files = []
    for name in ("one", "two"):
        drive = tmp_path / f"{name}-drive"
        boxguest.pack(compiled(tmp_path / name), drive)
        files.append((drive / boxguest.NAME).read_bytes())
        assert stat.S_IMODE(drive.stat().st_mode) == 0o755
        assert stat.S_IMODE((drive / boxguest.NAME).stat().st_mode) == 0o444
    assert files[0] == files[1]


def test_modules_are_compiled_and_the_sources_are_not_asked(tmp_path: Path) -> None:
    boxguest.pack(compiled(tmp_path / "code"), tmp_path / "drive")
    archive = zipfile.ZipFile(tmp_path / "drive" / boxguest.NAME)
    names = archive.namelist()
    assert names == sorted(names)
    for name in boxguest.sources():
        code = archive.read(f"{name}c")
        flags = int.from_bytes(code[4:8], "little")
        assert flags == 0b01  # by hash, and not checked (PEP 552)
        assert str(tmp_path).encode() not in code
    assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())


def test_a_python_runs_it(tmp_path: Path) -> None:
    """As far as a module of it can be run outside of a machine: the frames are imported."""
    boxguest.pack(compiled(tmp_path / "code"), tmp_path / "drive")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import agent_box.guest.wire as w; "
        "print(w.__file__, w.__cached__, w.VERSION)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", program, tmp_path / "drive" / boxguest.NAME],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    file, _, version = done.stdout.split()
    assert file.endswith("box-guest.pyz/agent_box/guest/wire.pyc")
    assert version == "1"
