"""The manifest of an image: which files make it, by digest, and whose word that is.

A manifest is signed (Ed25519). This host signs what it built and what it admitted from a
registry, so at a start one key decides; the publisher's signature stays beside it. Nothing
in it tells of the host or the time of the build: the same packages give the same bytes.

Under `STATE/images`: ``manifests/<sha256>.json`` are all that were ever current,
``manifests/<variant>`` names the current one, ``keys/local.key`` signs, and
``trusted/local.pub`` is what it is checked with. Only the first two and the last are needed
by whoever starts a machine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from agent_box.bus.errors import Reason, Refusal
from agent_box.config.values import name as variant_name
from agent_box.engine.image import blobs
from agent_box.engine.image.blobs import Part
from agent_box.process.paths import Paths

SCHEMA: Final = 1
SIZE_MAX: Final = 1 << 20  # bytes of a manifest
LOCAL: Final = "local"


class ImageMissing(Refusal):
    """There is no such image, or a file of it is gone. Exit 3; the line says what to do."""

    def __init__(self, message: str, **facts: str) -> None:
        super().__init__(Reason.NOT_FOUND, message, facts=facts)


class ImageCorrupt(Refusal):
    """A file or a manifest is not what it was. Exit 3; the line names the digest."""

    def __init__(self, message: str, **facts: str) -> None:
        super().__init__(Reason.NOT_FOUND, message, facts=facts)


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an image was made from."""

    suite: str
    architecture: str  # Debian's word, e.g. amd64
    kernel: str  # the version that `uname -r` gives
    packages: int  # how many; the list itself is a file of the image
    definition: str  # sha256 of the variant's definition
    guest: str  # sha256 of the guest's source


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One image. `name` is the variant; the rest are its files."""

    schema: int
    name: str
    description: str
    kernel: Part  # vmlinux, not compressed
    initramfs: Part  # newc cpio, not compressed
    variant: Part  # erofs, the read-only root
    guest: Part  # erofs with box-guest.pyz
    packages: Part  # text, a line `NAME VERSION ARCHITECTURE` for each package
    source: Source

    @property
    def parts(self) -> dict[str, Part]:
        """Its files by what they are for."""
        return {
            "kernel": self.kernel,
            "initramfs": self.initramfs,
            "variant": self.variant,
            "guest": self.guest,
            "packages": self.packages,
        }


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str  # the public key, 64 hex digits
    ed25519: str  # 128 hex digits


class Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    manifest: Manifest
    signatures: list[Signature]


_DECODER: Final = msgspec.json.Decoder(Signed, strict=True)


def canonical(manifest: msgspec.Struct) -> bytes:
    """The bytes that are signed: JSON, keys sorted, no space, ASCII."""
    return json.dumps(
        msgspec.to_builtins(manifest), sort_keys=True, separators=(",", ":"), ensure_ascii=True
    ).encode()


def encode(signed: Signed) -> bytes:
    return json.dumps(msgspec.to_builtins(signed), sort_keys=True, indent=1).encode() + b"\n"


def decode(untrusted: bytes) -> Signed:
    """A manifest and its signatures, which are not checked yet.

    Raises:
        ValueError: it is none, or one of another version.
    """
    if len(untrusted) > SIZE_MAX:
        raise ValueError(f"it is larger than {SIZE_MAX} bytes")
    signed = _DECODER.decode(untrusted)
    manifest = signed.manifest
    if manifest.schema != SCHEMA:
        raise ValueError(f"it has version {manifest.schema}; this program knows {SCHEMA}")
    variant_name(manifest.name)
    for part in manifest.parts.values():
        blobs.digest(part.sha256)
        if not 0 < part.size < 1 << 40:
            raise ValueError("a file of it has no sensible size")
    if not all(t.isprintable() for t in (manifest.description, *_texts(manifest.source))):
        raise ValueError("it has control characters")
    return signed


def _texts(source: Source) -> tuple[str, ...]:
    return (source.suite, source.architecture, source.kernel, source.definition, source.guest)


# ------------------------------------------------------------------------- signatures


def local_key(paths: Paths) -> bytes:
    """The secret key of this host, 32 bytes; made when there is none.

    Raises:
        OSError: it cannot be written or read.
        ImageCorrupt: it is no key.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    file = paths.images / "keys" / "local.key"
    public = paths.images / "trusted" / "local.pub"
    try:
        text = file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        made = Ed25519PrivateKey.generate()
        blobs.write_atomic(file, made.private_bytes_raw().hex().encode() + b"\n")
        text = made.private_bytes_raw().hex()
    try:
        secret = bytes.fromhex(text)
        key = Ed25519PrivateKey.from_private_bytes(secret)
    except ValueError:
        raise ImageCorrupt(f"{file} is no key: remove it, then build the images again") from None
    shown = key.public_key().public_bytes_raw().hex()
    if _public(public) != shown:
        blobs.write_atomic(public, shown.encode() + b"\n")
    return secret


def _public(file: Path) -> str | None:
    """The key in a file, 64 hex digits; None when there is none."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return text if len(text) == 64 and all(c in "0123456789abcdef" for c in text) else None


def sign(manifest: msgspec.Struct, secret: bytes) -> Signature:
    """The signature of an image's manifest, or of a layer's."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(secret)
    public = key.public_key().public_bytes_raw().hex()
    return Signature(key=public, ed25519=key.sign(canonical(manifest)).hex())


def signed_by(signed: Signed, keys: frozenset[str]) -> str | None:
    """Which of the keys (64 hex digits each) signed it; None when none did."""
    return signer(signed.manifest, signed.signatures, keys)


def signer(
    manifest: msgspec.Struct, signatures: Iterable[Signature], keys: frozenset[str]
) -> str | None:
    """The same for whatever was signed by `sign`."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    content = canonical(manifest)
    for signature in signatures:
        if signature.key not in keys:
            continue
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.key))
            key.verify(bytes.fromhex(signature.ed25519), content)
        except (InvalidSignature, ValueError):
            continue
        return signature.key
    return None


def trusted(paths: Paths) -> frozenset[str]:
    """The key of this host, as a set; empty before the first build."""
    key = _public(paths.images / "trusted" / "local.pub")
    return frozenset() if key is None else frozenset({key})


# --------------------------------------------------------------------------- the cache


def store(paths: Paths, signed: Signed) -> str:
    """Writes a manifest and makes it the current one of its variant. Returns its sha256.

    Raises:
        OSError: the disk is full, or the like.
    """
    data = encode(signed)
    name = hashlib.sha256(data).hexdigest()
    blobs.write_atomic(paths.images / "manifests" / f"{name}.json", data, 0o444)
    current = paths.images / "manifests" / signed.manifest.name
    blobs.write_atomic(current, name.encode() + b"\n")
    return name


def current(paths: Paths) -> dict[str, str]:
    """The sha256 of the current manifest of each variant, by the variant's name."""
    found = {}
    try:
        names = sorted(os.listdir(paths.images / "manifests"))
    except FileNotFoundError:
        return {}
    for name in names:
        if name.startswith(".") or name.endswith(".json"):
            continue
        found[name] = (paths.images / "manifests" / name).read_text(encoding="ascii").strip()
    return found


def all_of(paths: Paths) -> list[str]:
    """The sha256 of every manifest that is kept."""
    try:
        names = sorted(os.listdir(paths.images / "manifests"))
    except FileNotFoundError:
        return []
    return [n.removesuffix(".json") for n in names if n.endswith(".json") and n[0] != "."]


def load(paths: Paths, sha256: str) -> Signed:
    """A manifest of the cache, whose own digest and signature are good.

    Raises:
        ImageMissing: there is none of that digest.
        ImageCorrupt: it is not as it was written, or this host never signed it.
    """
    file = paths.images / "manifests" / f"{blobs.digest(sha256)}.json"
    try:
        with open(file, "rb") as handle:
            untrusted = handle.read(SIZE_MAX + 1)
    except FileNotFoundError:
        raise ImageMissing(f"the manifest {sha256} is gone", digest=sha256) from None
    if hashlib.sha256(untrusted).hexdigest() != sha256:
        raise ImageCorrupt(f"the manifest {sha256} is not what it was", digest=sha256)
    try:
        signed = decode(untrusted)
    except ValueError as error:
        raise ImageCorrupt(f"the manifest {sha256}: {error}", digest=sha256) from None
    if signed_by(signed, trusted(paths)) is None:
        raise ImageCorrupt(f"the manifest {sha256} is not signed by this host", digest=sha256)
    return signed


def find(paths: Paths, variant: str) -> Manifest:
    """The current image of a variant. Its signature is good, and its files are there, with
    their sizes; that their bytes are right is for `check`.

    Raises:
        ImageMissing: it was never built or pulled, or a file of it is gone.
        ImageCorrupt: its manifest is not what this host signed.
    """
    how = f"`agent-box image build {variant}` makes it"
    try:
        sha256 = blobs.digest(
            (paths.images / "manifests" / variant_name(variant)).read_text("ascii").strip()
        )
    except (FileNotFoundError, ValueError):
        raise ImageMissing(f"there is no image {variant}; {how}", variant=variant) from None
    manifest = load(paths, sha256).manifest
    for what, part in manifest.parts.items():
        try:
            size = os.lstat(paths.blob(part.sha256)).st_size
        except FileNotFoundError:
            size = -1
        if size != part.size:
            raise ImageMissing(
                f"image {variant}: its {what}, {part.sha256}, is gone; {how} again",
                variant=variant,
                digest=part.sha256,
            )
    return manifest


class Checked:
    """Remembers which blobs this process has hashed, and that they were not touched since.

    What writes to a file changes its ctime, which only the kernel sets; so this is as good as
    hashing each time, unless the disk itself lies.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, ...]] = {}

    def check(self, paths: Paths, manifest: Manifest) -> None:
        """Hashes each file of an image that was not hashed before, or was written since.

        Raises:
            ImageMissing: a file is gone.
            ImageCorrupt: a file is not what its digest says.
        """
        files = {what: part.sha256 for what, part in manifest.parts.items()}
        self.files(paths, manifest.name, files)

    def files(self, paths: Paths, variant: str, files: Mapping[str, str]) -> None:
        """The same for files that a record names: what each is for, and its sha256.

        Raises:
            ImageMissing, ImageCorrupt: as `check`.
        """
        how = f"`agent-box image build {variant}` makes it again"
        for what, sha256 in files.items():
            file = paths.blob(blobs.digest(sha256))
            try:
                before = _stamp(os.lstat(file))
                if self._seen.get(sha256) == before:
                    continue
                found = blobs.hash_file(file)
            except FileNotFoundError:
                raise ImageMissing(
                    f"image {variant}: its {what}, {sha256}, is gone; {how}",
                    variant=variant,
                    digest=sha256,
                ) from None
            if found.sha256 != sha256:
                raise ImageCorrupt(
                    f"image {variant}: its {what} is not {sha256} any more; "
                    f"`agent-box image verify` removes it, {how}",
                    variant=variant,
                    digest=sha256,
                )
            self._seen[sha256] = before


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
