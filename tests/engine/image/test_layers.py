"""Layers of harnesses in the cache: found, told apart, believed only when this host wrote them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from support import images

from agent_box.engine.image import blobs, cache, layers
from agent_box.engine.image.layers import SCHEMA, Layer
from agent_box.engine.image.manifest import ImageCorrupt, ImageMissing
from agent_box.process.paths import Paths


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path / "run", tmp_path / "state")


def plant(paths: Paths, harness: str, content: str = "one") -> Layer:
    blobs.make(paths)
    with tempfile.TemporaryDirectory(dir=paths.images / "work") as work:
        layer = Layer(
            schema=SCHEMA,
            harness=harness,
            description="for a test",
            drive=blobs.add_bytes(paths, Path(work), f"drive {harness} {content}".encode() * 9),
            packages=blobs.add_bytes(paths, Path(work), f"a 1 {content}\n".encode()),
            lock="0" * 64,
            count=1,
        )
    layers.store(paths, layer)
    return layer


def test_none_is_there(paths: Paths) -> None:
    assert layers.held(paths) == layers.Held([], {})
    with pytest.raises(ImageMissing, match="image build --harness codex` makes it"):
        layers.find(paths, "codex")


def test_the_last_one_stored_is_the_current_one(paths: Paths) -> None:
    old, new = plant(paths, "codex", "old"), plant(paths, "codex", "new")
    other = plant(paths, "pi")
    assert layers.find(paths, "codex") == new
    held = layers.held(paths)
    assert [(k.layer, k.current) for k in held.layers] == [
        (new, True),
        (old, False),
        (other, True),
    ]
    assert held.layers[0].size == new.drive.size + new.packages.size


def test_one_whose_drive_is_gone_is_missing(paths: Paths) -> None:
    layer = plant(paths, "codex")
    paths.blob(layer.drive.sha256).unlink()
    with pytest.raises(ImageMissing, match="is gone"):
        layers.find(paths, "codex")


def test_one_that_somebody_else_wrote_is_not_believed(paths: Paths) -> None:
    plant(paths, "codex")
    sha256 = layers.current(paths)["codex"]
    images.flip(paths.images / "layers" / f"{sha256}.json", 20)
    with pytest.raises(ImageCorrupt, match="not what this host wrote"):
        layers.find(paths, "codex")
    assert list(layers.held(paths).bad) == [sha256]


def test_one_signed_by_another_key_is_not_believed(paths: Paths, tmp_path: Path) -> None:
    plant(paths, "codex")
    other = Paths(tmp_path / "run2", tmp_path / "state2")
    plant(other, "pi")
    (paths.images / "trusted" / "local.pub").write_bytes(
        (other.images / "trusted" / "local.pub").read_bytes()
    )
    with pytest.raises(ImageCorrupt):
        layers.find(paths, "codex")


def test_what_a_record_names_stays_whole(paths: Paths) -> None:
    old, new = plant(paths, "codex", "old"), plant(paths, "codex", "new")
    plant(paths, "pi")
    with blobs.locked(paths):
        removed = cache.collect(paths, {old.drive.sha256})
    held = layers.held(paths)
    assert [k.layer for k in held.layers] == [old]
    assert layers.current(paths) == {}
    assert set(blobs.held(paths)) == {p.sha256 for p in old.parts.values()}
    assert len(removed.manifests) == 2
    assert new.drive.sha256 in removed.blobs


def test_each_file_is_hashed_again(paths: Paths) -> None:
    layer = plant(paths, "codex")
    kept = layers.held(paths).layers
    assert cache.verify_layers(paths, kept) == {
        kept[0].sha256: {"harness": "verified", "packages": "verified"}
    }
    images.flip(paths.blob(layer.drive.sha256))
    assert cache.verify_layers(paths, kept)[kept[0].sha256]["harness"] == "mismatch"
