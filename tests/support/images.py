"""Images of a few bytes, put into a cache as a build puts real ones."""

from __future__ import annotations

import tempfile
from pathlib import Path

from agent_box.engine.image import blobs
from agent_box.engine.image.manifest import (
    SCHEMA,
    Manifest,
    Signed,
    Source,
    local_key,
    sign,
    store,
)
from agent_box.process.paths import Paths


def plant(
    paths: Paths, name: str = "base", content: str = "one", guest_source: str = "1" * 64
) -> Manifest:
    """Makes an image that no machine can boot the current one of a variant."""
    blobs.make(paths)
    with blobs.locked(paths):
        return publish(paths, describe(paths, name, content, guest_source))


def describe(paths: Paths, name: str, content: str, guest_source: str) -> Manifest:
    """Its files are there, but no manifest names them yet."""

    def part(what: str, shared: bool = False) -> blobs.Part:
        text = f"{what} {'shared' if shared else f'{name} {content}'}\n" * 100
        with tempfile.TemporaryDirectory(dir=paths.images / "work") as work:
            return blobs.add_bytes(paths, Path(work), text.encode())

    return Manifest(
        schema=SCHEMA,
        name=name,
        description=f"{name} for a test",
        kernel=part("kernel", shared=True),
        initramfs=part("initramfs", shared=True),
        variant=part("variant"),
        guest=part("guest", shared=True),
        packages=part("packages"),
        source=Source(
            suite="trixie",
            architecture="amd64",
            kernel="6.12.0-test",
            packages=1,
            definition="0" * 64,
            guest=guest_source,
        ),
    )


def publish(paths: Paths, manifest: Manifest) -> Manifest:
    store(paths, Signed(manifest=manifest, signatures=[sign(manifest, local_key(paths))]))
    return manifest


def flip(file: Path, at: int = 10) -> None:
    """One bit of a file is another, as on a bad disk. A hard link elsewhere stays as it was."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    spoiled = file.with_name(f"{file.name}.spoiled")
    spoiled.write_bytes(data)
    spoiled.chmod(0o444)
    spoiled.rename(file)
