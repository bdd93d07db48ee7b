"""The image cache: what is in it, whether it is still what it was, and what may go."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from agent_box.engine.image import blobs, layers, manifest
from agent_box.engine.image.manifest import ImageCorrupt, ImageMissing, Manifest, Signed
from agent_box.process.paths import Paths

FORMAT: Final = "erofs"
NO_VERIFIER: Final = "no verifier installed"

Tier = Literal["verified", "mismatch", "missing"]


@dataclass(frozen=True)
class Image:
    """One manifest of the cache.

    Attributes:
        sha256: of the manifest.
        current: whether it is what its variant means now.
    """

    sha256: str
    signed: Signed
    current: bool

    @property
    def manifest(self) -> Manifest:
        return self.signed.manifest

    @property
    def size(self) -> int:
        """Bytes of all its files; images share those that are the same."""
        return sum(part.size for part in self.manifest.parts.values())


@dataclass(frozen=True)
class Held:
    """What the cache holds.

    Attributes:
        bad: manifests that cannot be used: sha256, and why in one line.
    """

    images: list[Image]  # by variant, the current one first
    bad: dict[str, str]


@dataclass(frozen=True)
class Verdict:
    """What hashing an image again gave.

    Attributes:
        files: of each file, by what it is for.
        signers: keys that signed the manifest and that we trust, by name; `local` is this
            host's.
    """

    image: Image
    files: dict[str, Tier]
    signers: list[str]

    @property
    def good(self) -> bool:
        return set(self.files.values()) == {"verified"}


@dataclass(frozen=True)
class Removed:
    """Files that are gone now, and their bytes."""

    manifests: list[str]
    blobs: list[str]
    bytes: int


def held(paths: Paths) -> Held:
    """Every image of the cache whose manifest is good."""
    current = manifest.current(paths)
    images, bad = [], {}
    for sha256 in manifest.all_of(paths):
        try:
            signed = manifest.load(paths, blobs.digest(sha256))
        except (ImageCorrupt, ImageMissing) as error:
            bad[sha256] = error.message
        except ValueError:
            bad[sha256] = f"{sha256!r} is not the name of a manifest"
        else:
            images.append(Image(sha256, signed, current.get(signed.manifest.name) == sha256))
    images.sort(key=lambda image: (image.manifest.name, not image.current, image.sha256))
    return Held(images, bad)


def verify(
    paths: Paths, images: Iterable[Image], keys: dict[str, str], tell: Callable[[str], None]
) -> list[Verdict]:
    """Hashes the files of images, each once. Changes nothing.

    Args:
        keys: names of the public keys of publishers that the operator trusts.
        tell: gets a line about each file that is large.
    """
    known: dict[str, Tier] = {}
    verdicts = []
    names = keys | dict.fromkeys(manifest.trusted(paths), manifest.LOCAL)
    for image in images:
        files: dict[str, Tier] = {}
        for what, part in image.manifest.parts.items():
            if part.sha256 not in known:
                if part.size > 100 << 20:
                    tell(f"{image.manifest.name}: hashing its {what}, {part.size >> 20} MiB ...")
                known[part.sha256] = _tier(paths, part.sha256)
            files[what] = known[part.sha256]
        signers = [
            name
            for key, name in names.items()
            if manifest.signed_by(image.signed, frozenset({key})) is not None
        ]
        verdicts.append(Verdict(image, files, signers))
    return verdicts


def verify_layers(paths: Paths, kept: Iterable[layers.Kept]) -> dict[str, dict[str, Tier]]:
    """The same for layers of harnesses: of each, by its sha256, how each of its files is."""
    return {
        each.sha256: {w: _tier(paths, part.sha256) for w, part in each.layer.parts.items()}
        for each in kept
    }


def _tier(paths: Paths, sha256: str) -> Tier:
    try:
        found = blobs.hash_file(paths.blob(sha256))
    except FileNotFoundError:
        return "missing"
    except OSError:
        return "mismatch"  # a bad sector, or something else than a file
    return "verified" if found.sha256 == sha256 else "mismatch"


def discard(paths: Paths, digests: Collection[str]) -> None:
    """Removes blobs that are not what their names say. A machine that runs keeps its file.

    Raises:
        OSError: one cannot be removed.
    """
    with blobs.locked(paths):
        for sha256 in digests:
            file = paths.blob(blobs.digest(sha256))
            if _tier(paths, sha256) == "mismatch":
                file.unlink()
        blobs.sync_directory(paths.images / "blobs" / "sha256")


def collect(paths: Paths, used: Collection[str]) -> Removed:
    """Removes what is not in use. The caller holds `blobs.locked`, since before it asked what is.

    Args:
        used: sha256 of each file that a record of an instance names. An image whose variant
            drive is one of them stays whole, and so does a harness's layer.

    Raises:
        OSError: one cannot be removed.
    """
    files, manifests = set(used), set()
    for image in held(paths).images:
        if image.manifest.variant.sha256 in used:
            manifests.add(image.sha256)
            files |= {part.sha256 for part in image.manifest.parts.values()}
    forgotten, of_layers = layers.collect(paths, used)
    files |= of_layers
    for name, sha256 in manifest.current(paths).items():
        if sha256 not in manifests:
            (paths.images / "manifests" / name).unlink()
    removed = Removed(forgotten, [], 0)
    for sha256 in manifest.all_of(paths):
        if sha256 not in manifests:
            (paths.images / "manifests" / f"{sha256}.json").unlink()
            removed.manifests.append(sha256)
    blobs.sync_directory(paths.images / "manifests")  # no manifest ever names what is gone
    total = 0
    for sha256 in list(blobs.held(paths)):
        if sha256 not in files:
            file = paths.blob(sha256)
            total += os.lstat(file).st_size
            file.unlink()
            removed.blobs.append(sha256)
    for left in (paths.images / "partial").iterdir():
        total += _abandoned(left)
    return Removed(removed.manifests, removed.blobs, total)


def _abandoned(left: Path) -> int:
    """Removes the beginning of a file that nobody goes on with. Returns its bytes."""
    with open(left, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        size = os.fstat(file.fileno()).st_size
        left.unlink(missing_ok=True)
        return size
