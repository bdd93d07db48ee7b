"""A real image for tests, built once for each machine and account and kept between runs.

    built.install(paths)     # `base` is now an image of that state directory

It takes a minute or two the first time, and network access to a Debian mirror. Later runs
only make the drive with the guest's code anew when that code has changed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support import images

from agent_box.config import presets
from agent_box.engine.image import blobs, boxguest, build, definition, harness, layers, manifest
from agent_box.engine.image.layers import Layer
from agent_box.engine.image.manifest import ImageCorrupt, ImageMissing, Manifest
from agent_box.process.paths import Paths, make_private

VARIANT = "base"
RECIPE = ("init.sh", "initramfs.py", "inside.py")  # what decides the bytes beside the packages


def kept() -> Path:
    """A directory of this account that outlives a run, on a disk and not in memory."""
    directory = Path("/var/tmp") / f"agent-box-tests-{os.getuid()}"
    make_private(directory)
    return directory


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    with open(directory / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def ready() -> tuple[Paths, Manifest]:
    """The kept image, made when it is not there or not of this program."""
    directory = kept()
    paths = Paths(directory / "run", directory / "state")
    with _alone(directory):
        wanted = definition.load(VARIANT, None)
        recipe = directory / "recipe"
        try:
            found = manifest.find(paths, VARIANT)
            fresh = found.source.definition == wanted.sha256 and recipe.read_text() == _recipe()
        except (ImageMissing, ImageCorrupt, FileNotFoundError):
            fresh = False
        if not fresh:
            found = build.build(paths, wanted, mirror=None, tell=print).manifest
            recipe.write_text(_recipe())
        elif found.source.guest != boxguest.digest(boxguest.sources()):
            found = build.refresh(paths, VARIANT, tell=print).manifest
        return paths, found


def _recipe() -> str:
    code = Path(build.__file__).parent
    return " ".join(blobs.hash_file(code / name).sha256 for name in RECIPE)


def install(paths: Paths) -> Manifest:
    """Makes it the current image of `base` there; its files are shared where that can be."""
    source, found = ready()
    blobs.make(paths)
    with blobs.locked(paths):
        for part in found.parts.values():
            _share(source, paths, part.sha256)
        return images.publish(paths, found)


def _share(source: Paths, paths: Paths, sha256: str) -> None:
    target = paths.blob(sha256)
    if target.exists():
        return
    try:
        os.link(source.blob(sha256), target)
    except OSError:  # another file system
        shutil.copyfile(source.blob(sha256), target)
        target.chmod(0o444)


def codex() -> Path:
    """The program of the harness codex, from a layer that is built once and kept.

    It takes ten seconds the first time, and network access to whatever npm uses.
    """
    directory = kept()
    paths = Paths(directory / "run", directory / "state")
    preset = presets.load("codex")
    with _alone(directory):
        try:
            layer = layers.find(paths, "codex")
            fresh = layer.lock == presets.lock(preset).sha256
        except (ImageMissing, ImageCorrupt):
            fresh = False
        if not fresh:
            layer = harness.build(paths, preset, tell=print)[0].layer
        out = directory / "codex"
        program = out / preset.command[0].removeprefix("/")
        marker = directory / "codex.layer"
        if not marker.exists() or marker.read_text() != layer.drive.sha256:
            shutil.rmtree(out, ignore_errors=True)
            drive = str(paths.blob(layer.drive.sha256))
            subprocess.run(["fsck.erofs", f"--extract={out}", "--no-preserve", drive], check=True)
            marker.write_text(layer.drive.sha256)
    return program


def install_layer(paths: Paths) -> Layer:
    """Makes the kept layer of codex the current one there."""
    codex()
    source = Paths(kept() / "run", kept() / "state")
    layer = layers.find(source, "codex")
    blobs.make(paths)
    with blobs.locked(paths):
        for part in layer.parts.values():
            _share(source, paths, part.sha256)
        layers.store(paths, layer)
    return layer
