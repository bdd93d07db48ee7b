"""A real image for tests, built once for each machine and account and kept between runs.

    built.install(paths)     # `base` is now an image of that state directory

It takes a minute or two the first time, and network access to a Debian mirror. Later runs
only make the drive with the guest's code anew when that code has changed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support import images

from agent_box.engine.image import blobs, boxguest, build, definition, manifest
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
            target = paths.blob(part.sha256)
            if target.exists():
                continue
            try:
                os.link(source.blob(part.sha256), target)
            except OSError:  # another file system
                shutil.copyfile(source.blob(part.sha256), target)
                target.chmod(0o444)
        return images.publish(paths, found)
