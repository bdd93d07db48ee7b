"""Builds the layer of a harness: its pinned packages as one read-only drive.

npm fetches them, by its own configuration and from wherever that says, checks each by the
integrity in the lock, and runs nothing of what it fetched. The same lock gives the same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Final

from agent_box.config import presets
from agent_box.config.presets import Preset
from agent_box.engine.image import blobs, debian, layers
from agent_box.engine.image.build import Tell
from agent_box.engine.image.errors import BuildFailed, HostUnfit
from agent_box.engine.image.layers import SCHEMA, Kept, Layer
from agent_box.process.paths import Paths

UUID: Final = "626f7868-6172-4e65-8373-000000000001"
PLACE: Final = "usr/lib/harness"  # in the guest's root
PROGRAMS: Final = {"npm": "npm", "mkfs.erofs": "erofs-utils"}  # and the package that brings it
NPM: Final = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--omit=dev")
# Of npm itself, what it wrote down about this installation.
NOTES: Final = "node_modules/.package-lock.json"


def check() -> None:
    """That this host can build a layer.

    Raises:
        HostUnfit: with what to install.
    """
    if (machine := os.uname().machine) not in debian.ARCHITECTURES:
        raise HostUnfit(f"layers are built on x86_64 alone; this machine is {machine}")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        packages = " ".join(PROGRAMS[name] for name in missing)
        raise HostUnfit(f"{', '.join(missing)} missing: apt-get install {packages}")


def build(paths: Paths, preset: Preset, *, tell: Tell) -> tuple[Kept, bool, dict[str, float]]:
    """Builds the layer and makes it the current one of its harness.

    Returns:
        It, whether it differs from the one before, and the seconds that each step took.

    Raises:
        HostUnfit: something is missing on this host.
        BuildFailed: the network, a package that is not what the lock says, the disk.
        PathsError: the state directory cannot be used.
    """
    if preset.layer != "npm":
        raise BuildFailed(f"{preset.name} has no layer: {preset.description}")
    check()
    blobs.make(paths)
    lock = presets.lock(preset)
    phases: dict[str, float] = {}
    try:
        with blobs.workshop(paths.images / "work") as work:
            begun = time.monotonic()
            tell(f"packages of {preset.name} ...")
            tree = work / "tree"
            place = tree / PLACE
            _directories(tree, place)
            (place / "package.json").write_text(lock.package)
            (place / "package-lock.json").write_text(lock.lock)
            _run([*NPM], place)
            for name in (NOTES, "package.json", "package-lock.json"):
                (place / name).unlink(missing_ok=True)
            phases["packages"] = time.monotonic() - begun
            begun = time.monotonic()
            tell("drive ...")
            drive = work / "harness.erofs"
            _run(
                ["mkfs.erofs", "-T0", "-x-1", "--all-root", "-U", UUID, str(drive), str(tree)],
                work,
            )
            listed = _packages(lock.lock)
            with blobs.locked(paths):
                layer = Layer(
                    schema=SCHEMA,
                    harness=preset.name,
                    description=preset.description,
                    drive=blobs.add(paths, drive),
                    packages=blobs.add_bytes(paths, work, "".join(listed).encode()),
                    lock=lock.sha256,
                    count=len(listed),
                )
                before = layers.current(paths).get(preset.name)
                after = layers.store(paths, layer)
            phases["drive"] = time.monotonic() - begun
    except OSError as error:
        what = f" {error.filename}" if error.filename else ""
        raise BuildFailed(f"disk: {(error.strerror or 'failed').lower()}{what}") from None
    return Kept(after, layer, current=True), before != after, phases


def _directories(tree: Path, place: Path) -> None:
    """Each as it is in Debian, whatever our umask: it is laid over the variant's."""
    place.mkdir(parents=True)
    for directory in (place, *place.parents[: len(Path(PLACE).parts)]):
        directory.chmod(0o755)


def _packages(lock: str) -> list[str]:
    found = []
    for path, each in json.loads(lock)["packages"].items():
        if path:
            name = path.rpartition("node_modules/")[2]
            found.append(f"{name} {each['version']} {each['integrity']}\n")
    return sorted(found)


def _run(command: list[str], directory: Path) -> None:
    """npm finds its configuration and proxies in our environment, as when a person calls it.

    Raises:
        BuildFailed: with the program's first word of why.
    """
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "npm_config_update_notifier": "false", "LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        umask=0o022,
        check=False,
    )
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in said if line.startswith(("npm ERR!", "npm error"))]
        word = (errors or said[-1:] or [f"exit {done.returncode}"])[0]
        if len(errors) > 1 and " code " in errors[0]:
            word = f"{errors[0]}: {errors[1].removeprefix('npm error ').removeprefix('npm ERR! ')}"
        raise BuildFailed(f"{command[0]}: {word}")
