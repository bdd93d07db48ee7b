"""A manifest: what it says, whose word it is, and that nothing else is believed."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from support import images

from agent_box.bus.errors import Reason
from agent_box.engine.image import blobs, manifest
from agent_box.engine.image.manifest import ImageCorrupt, ImageMissing, Signed
from agent_box.process.paths import Paths


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path / "run", tmp_path / "state")


def spoil(paths: Paths, change: Any) -> None:
    """Rewrites the current manifest of base, its own digest and its name kept right."""
    directory = paths.images / "manifests"
    old = directory / f"{(directory / 'base').read_text().strip()}.json"
    table = json.loads(old.read_text())
    change(table)
    import hashlib

    data = json.dumps(table).encode()
    name = hashlib.sha256(data).hexdigest()
    (directory / f"{name}.json").write_bytes(data)
    (directory / "base").write_text(name + "\n")


def test_what_was_stored_is_found(paths: Paths) -> None:
    planted = images.plant(paths)
    assert manifest.find(paths, "base") == planted
    assert manifest.current(paths).keys() == {"base"}
    assert manifest.all_of(paths) == list(manifest.current(paths).values())


def test_nothing_was_ever_built(paths: Paths) -> None:
    with pytest.raises(ImageMissing, match="`agent-box image build base` makes it") as caught:
        manifest.find(paths, "base")
    assert caught.value.exit == 3
    assert caught.value.reason is Reason.NOT_FOUND
    assert manifest.current(paths) == {}
    assert manifest.all_of(paths) == []


@pytest.mark.parametrize("name", ["", "../base", "Base", "a/b", ".base", "base.json"])
def test_a_name_that_is_none(paths: Paths, name: str) -> None:
    images.plant(paths)
    with pytest.raises(ImageMissing):
        manifest.find(paths, name)


def test_a_newer_image_takes_the_name_and_the_old_one_stays(paths: Paths) -> None:
    old = images.plant(paths, content="one")
    new = images.plant(paths, content="two")
    assert old.variant != new.variant
    assert manifest.find(paths, "base") == new
    assert len(manifest.all_of(paths)) == 2
    assert paths.blob(old.variant.sha256).is_file()


@pytest.mark.parametrize("what", ["kernel", "initramfs", "variant", "guest", "packages"])
def test_a_file_that_is_gone_or_cut_off_is_named(paths: Paths, what: str) -> None:
    part = images.plant(paths).parts[what]
    file = paths.blob(part.sha256)
    file.chmod(0o600)
    os.truncate(file, part.size - 1)
    for _ in range(2):
        with pytest.raises(ImageMissing, match=f"its {what}, {part.sha256}, is gone") as caught:
            manifest.find(paths, "base")
        assert caught.value.facts["digest"] == part.sha256
        file.unlink(missing_ok=True)


def test_every_file_is_hashed_once_and_again_when_it_was_touched(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = images.plant(paths)
    hashed: list[str] = []
    real = blobs.hash_file

    def noted(file: Path) -> blobs.Part:
        hashed.append(file.name)
        return real(file)

    monkeypatch.setattr(blobs, "hash_file", noted)
    checked = manifest.Checked()
    checked.check(paths, planted)
    assert sorted(hashed) == sorted(part.sha256 for part in planted.parts.values())
    checked.check(paths, planted)
    assert len(hashed) == 5
    os.utime(paths.blob(planted.variant.sha256))
    checked.check(paths, planted)
    assert hashed[5:] == [planted.variant.sha256]


@pytest.mark.parametrize("what", ["kernel", "initramfs", "variant", "guest", "packages"])
def test_a_flipped_bit_is_exit_3_and_the_digest_named(paths: Paths, what: str) -> None:
    planted = images.plant(paths)
    checked = manifest.Checked()
    checked.check(paths, planted)
    digest = planted.parts[what].sha256
    images.flip(paths.blob(digest))
    assert manifest.find(paths, "base") == planted  # the size is right
    with pytest.raises(ImageCorrupt, match=digest) as caught:
        checked.check(paths, planted)
    assert caught.value.exit == 3
    assert caught.value.facts == {"variant": "base", "digest": digest}


def test_files_of_a_record_are_checked_too(paths: Paths) -> None:
    planted = images.plant(paths)
    files = {"kernel": planted.kernel.sha256, "variant": planted.variant.sha256}
    manifest.Checked().files(paths, "base", files)
    paths.blob(planted.variant.sha256).unlink()
    with pytest.raises(ImageMissing, match="its variant"):
        manifest.Checked().files(paths, "base", files)


# ------------------------------------------------------------------------- signatures


def test_the_key_of_this_host_is_made_once_and_private(paths: Paths) -> None:
    blobs.make(paths)
    secret = manifest.local_key(paths)
    assert manifest.local_key(paths) == secret
    file = paths.images / "keys" / "local.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    public = Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw().hex()
    assert manifest.trusted(paths) == {public}
    (paths.images / "trusted" / "local.pub").unlink()  # it follows from the secret one
    manifest.local_key(paths)
    assert manifest.trusted(paths) == {public}


def test_a_key_file_that_is_none_is_refused(paths: Paths) -> None:
    blobs.make(paths)
    (paths.images / "keys" / "local.key").write_text("zz\n")
    with pytest.raises(ImageCorrupt, match="is no key: remove it"):
        manifest.local_key(paths)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["manifest"]["variant"].update(sha256="0" * 64),
        lambda t: t["manifest"]["variant"].update(size=1),
        lambda t: t["manifest"].update(name="other"),
        lambda t: t["manifest"].update(description="another"),
        lambda t: t["manifest"]["source"].update(kernel="9"),
        lambda t: t["signatures"][0].update(ed25519="0" * 128),
        lambda t: t["signatures"][0].update(ed25519="zz"),
        lambda t: t["signatures"][0].update(key="0" * 64),
        lambda t: t.update(signatures=[]),
    ],
)
def test_what_was_changed_is_not_signed(paths: Paths, change: Any) -> None:
    images.plant(paths)
    spoil(paths, change)
    with pytest.raises(ImageCorrupt, match="is not signed by this host"):
        manifest.find(paths, "base")


def test_the_signature_of_another_key_does_not_count(paths: Paths) -> None:
    images.plant(paths)
    (paths.images / "trusted" / "local.pub").write_text("ab" * 32 + "\n")
    with pytest.raises(ImageCorrupt, match="not signed"):
        manifest.find(paths, "base")


def test_bytes_that_were_changed_are_told_before_they_are_read(paths: Paths) -> None:
    images.plant(paths)
    (sha256,) = manifest.all_of(paths)
    images.flip(paths.images / "manifests" / f"{sha256}.json", at=0)
    with pytest.raises(ImageCorrupt, match="is not what it was"):
        manifest.find(paths, "base")


def test_signed_by_says_which(paths: Paths) -> None:
    planted = images.plant(paths)
    one, two = (Ed25519PrivateKey.generate() for _ in "ab")
    signed = Signed(planted, [manifest.sign(planted, k.private_bytes_raw()) for k in (one, two)])
    public = [k.public_key().public_bytes_raw().hex() for k in (one, two)]
    assert manifest.signed_by(signed, frozenset(public[1:])) == public[1]
    assert manifest.signed_by(signed, frozenset()) is None


# ------------------------------------------------------------------------------ bytes


def valid(paths: Paths) -> dict[str, Any]:
    planted = images.plant(paths)
    signed = Signed(planted, [manifest.sign(planted, bytes(32))])
    table: dict[str, Any] = msgspec.to_builtins(signed)
    return table


def test_it_reads_what_it_writes(paths: Paths) -> None:
    planted = images.plant(paths)
    signed = Signed(planted, [manifest.sign(planted, bytes(32))])
    assert manifest.decode(manifest.encode(signed)) == signed
    assert manifest.encode(signed) == manifest.encode(manifest.decode(manifest.encode(signed)))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["manifest"].update(schema=2),
        lambda t: t["manifest"].update(schema=True),
        lambda t: t["manifest"].update(name="../x"),
        lambda t: t["manifest"].update(more=1),
        lambda t: t["manifest"].pop("guest"),
        lambda t: t["manifest"]["source"].pop("guest"),
        lambda t: t["manifest"].update(description="a\nb"),
        lambda t: t["manifest"]["source"].update(suite="\x1b[2J"),
        lambda t: t["manifest"]["kernel"].update(size=0),
        lambda t: t["manifest"]["kernel"].update(size=1 << 41),
        lambda t: t["manifest"]["kernel"].update(size="7"),
        lambda t: t["manifest"]["kernel"].update(sha256="../../../etc/passwd"),
        lambda t: t.pop("signatures"),
    ],
)
def test_what_is_no_manifest(paths: Paths, change: Any) -> None:
    table = valid(paths)
    manifest.decode(json.dumps(table).encode())
    change(table)
    with pytest.raises(ValueError):
        manifest.decode(json.dumps(table).encode())


def test_a_huge_one_is_not_read() -> None:
    with pytest.raises(ValueError, match="larger"):
        manifest.decode(b" " * (manifest.SIZE_MAX + 1))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        manifest.decode(data)
