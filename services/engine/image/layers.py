"""Layers of harnesses in the image cache: a read-only drive each, which goes with any variant.

Kept as images are: ``layers/<sha256>.json`` are all that were ever current, signed by this
host, and ``layers/<harness>`` names the current one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from agent_box.config.values import name as harness_name
from agent_box.engine.image import blobs
from agent_box.engine.image.blobs import Part
from agent_box.engine.image.manifest import (
    ImageCorrupt,
    ImageMissing,
    Signature,
    local_key,
    sign,
    signer,
    trusted,
)
from agent_box.process.paths import Paths

SCHEMA: Final = 1
SIZE_MAX: Final = 1 << 16  # bytes of a file that describes one


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer: its drive, and what it was made from."""

    schema: int
    harness: str
    description: str
    drive: Part  # erofs, laid over the root of the variant
    packages: Part  # text, a line `NAME VERSION INTEGRITY` for each package
    lock: str  # sha256 of the lock that pinned them
    count: int  # of packages

    @property
    def parts(self) -> dict[str, Part]:
        """Its files by what they are for."""
        return {"harness": self.drive, "packages": self.packages}


class _Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layer: Layer
    signatures: list[Signature]


_DECODER: Final = msgspec.json.Decoder(_Signed, strict=True)


@dataclass(frozen=True)
class Kept:
    """A layer of the cache.

    Attributes:
        sha256: of what describes it.
        current: whether it is what its harness means now.
    """

    sha256: str
    layer: Layer
    current: bool

    @property
    def size(self) -> int:
        return sum(part.size for part in self.layer.parts.values())


@dataclass(frozen=True)
class Held:
    """The layers of a cache.

    Attributes:
        layers: by harness, the current one first.
        bad: what cannot be used: sha256, and why in one line.
    """

    layers: list[Kept]
    bad: dict[str, str]


def store(paths: Paths, layer: Layer) -> str:
    """Signs a layer and makes it the current one of its harness. Returns its sha256.

    Raises:
        OSError: the disk is full, or the like.
    """
    signed = _Signed(layer=layer, signatures=[sign(layer, local_key(paths))])
    data = json.dumps(msgspec.to_builtins(signed), sort_keys=True, indent=1).encode() + b"\n"
    name = hashlib.sha256(data).hexdigest()
    blobs.write_atomic(paths.images / "layers" / f"{name}.json", data, 0o444)
    blobs.write_atomic(paths.images / "layers" / layer.harness, name.encode() + b"\n")
    return name


def load(paths: Paths, sha256: str) -> Layer:
    """A layer whose own digest and signature are good.

    Raises:
        ImageMissing: there is none of that digest.
        ImageCorrupt: it is not as it was written, or this host never signed it.
    """
    file = paths.images / "layers" / f"{blobs.digest(sha256)}.json"
    try:
        with open(file, "rb") as handle:
            untrusted = handle.read(SIZE_MAX + 1)
    except FileNotFoundError:
        raise ImageMissing(f"the layer {sha256} is gone", digest=sha256) from None
    bad = f"the description of the layer {sha256} is not what this host wrote"
    if hashlib.sha256(untrusted).hexdigest() != sha256:
        raise ImageCorrupt(bad, digest=sha256)
    try:
        signed = _DECODER.decode(untrusted)
        harness_name(signed.layer.harness)
        for part in signed.layer.parts.values():
            blobs.digest(part.sha256)
    except (ValueError, msgspec.MsgspecError):
        raise ImageCorrupt(bad, digest=sha256) from None
    if signed.layer.schema != SCHEMA or not signer(signed.layer, signed.signatures, trusted(paths)):
        raise ImageCorrupt(bad, digest=sha256)
    return signed.layer


def find(paths: Paths, harness: str) -> Layer:
    """The current layer of a harness; its files are there, with their sizes.

    Raises:
        ImageMissing: it was never built, or a file of it is gone.
        ImageCorrupt: as `load`.
    """
    how = f"`agent-box image build --harness {harness}` makes it"
    try:
        sha256 = (paths.images / "layers" / harness_name(harness)).read_text("ascii").strip()
        layer = load(paths, blobs.digest(sha256))
    except (FileNotFoundError, ValueError):
        why = f"there is no layer of the harness {harness}; {how}"
        raise ImageMissing(why, harness=harness) from None
    for part in layer.parts.values():
        try:
            size = os.lstat(paths.blob(part.sha256)).st_size
        except FileNotFoundError:
            size = -1
        if size != part.size:
            why = f"the layer of the harness {harness}, {part.sha256}, is gone; {how} again"
            raise ImageMissing(why, harness=harness, digest=part.sha256)
    return layer


def current(paths: Paths) -> dict[str, str]:
    """The sha256 of the current layer of each harness, by its name."""
    return {
        name: (paths.images / "layers" / name).read_text(encoding="ascii").strip()
        for name in _names(paths)
        if not name.startswith(".") and not name.endswith(".json")
    }


def held(paths: Paths) -> Held:
    """Every layer of the cache."""
    now = current(paths)
    kept, bad = [], {}
    for name in _names(paths):
        if not name.endswith(".json") or name.startswith("."):
            continue
        sha256 = name.removesuffix(".json")
        try:
            layer = load(paths, sha256)
        except (ImageCorrupt, ImageMissing) as error:
            bad[sha256] = error.message
        except ValueError:
            bad[sha256] = f"{sha256!r} is not the name of a layer"
        else:
            kept.append(Kept(sha256, layer, now.get(layer.harness) == sha256))
    kept.sort(key=lambda each: (each.layer.harness, not each.current, each.sha256))
    return Held(kept, bad)


def collect(paths: Paths, used: Collection[str]) -> tuple[list[str], set[str]]:
    """Forgets the layers whose drive nobody uses. The caller holds `blobs.locked`.

    Args:
        used: sha256 of each file that a record of an instance names.

    Returns:
        The sha256 of what was forgotten, and the files of what stays.

    Raises:
        OSError: one cannot be removed.
    """
    files: set[str] = set()
    stay = set()
    for kept in held(paths).layers:
        if kept.layer.drive.sha256 in used:
            stay.add(kept.sha256)
            files |= {part.sha256 for part in kept.layer.parts.values()}
    for name, sha256 in current(paths).items():
        if sha256 not in stay:
            _file(paths, name).unlink()
    gone = []
    for name in _names(paths):
        sha256 = name.removesuffix(".json")
        if name.endswith(".json") and sha256 not in stay:
            _file(paths, name).unlink()
            gone.append(sha256)
    if gone:
        blobs.sync_directory(paths.images / "layers")
    return gone, files


def _file(paths: Paths, name: str) -> Path:
    return paths.images / "layers" / name


def _names(paths: Paths) -> list[str]:
    try:
        return sorted(os.listdir(paths.images / "layers"))
    except FileNotFoundError:
        return []
