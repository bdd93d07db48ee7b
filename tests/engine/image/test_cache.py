"""What the cache holds, whether it is still what it was, and what may go."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from support import images

from agent_box.engine.image import blobs, cache, manifest
from agent_box.engine.image.manifest import ImageMissing
from agent_box.process.paths import Paths


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    made = Paths(tmp_path / "run", tmp_path / "state")
    blobs.make(made)
    return made


def silent(text: str) -> None:
    pass


def judge(paths: Paths) -> list[cache.Verdict]:
    return cache.verify(paths, cache.held(paths).images, {}, silent)


def files(paths: Paths) -> set[str]:
    return set(blobs.held(paths))


def test_the_current_image_of_a_variant_comes_first(paths: Paths) -> None:
    images.plant(paths, "rust")
    images.plant(paths, "base", "old")
    images.plant(paths, "base", "new")
    found = cache.held(paths)
    assert [(i.manifest.name, i.current) for i in found.images] == [
        ("base", True),
        ("base", False),
        ("rust", True),
    ]
    assert found.images[0].size == sum(p.size for p in found.images[0].manifest.parts.values())
    assert found.bad == {}


def test_nothing_was_ever_cached(tmp_path: Path) -> None:
    empty = Paths(tmp_path / "none", tmp_path / "none-state")
    assert cache.held(empty) == cache.Held([], {})


def test_a_bad_manifest_is_told_and_the_others_are_served(paths: Paths) -> None:
    images.plant(paths, "base")
    images.plant(paths, "rust")
    bad = manifest.current(paths)["base"]
    images.flip(paths.images / "manifests" / f"{bad}.json")
    (paths.images / "manifests" / "odd.json").write_text("{}")
    found = cache.held(paths)
    assert [i.manifest.name for i in found.images] == ["rust"]
    assert found.bad.keys() == {bad, "odd"}


def test_all_is_as_it_was(paths: Paths) -> None:
    images.plant(paths)
    (verdict,) = judge(paths)
    assert verdict.good
    assert verdict.signers == ["local"]
    assert set(verdict.files.values()) == {"verified"}


@pytest.mark.parametrize("what", ["kernel", "initramfs", "variant", "guest", "packages"])
def test_a_flipped_bit_is_found_and_the_file_removed(paths: Paths, what: str) -> None:
    part = images.plant(paths).parts[what]
    images.flip(paths.blob(part.sha256))
    (verdict,) = judge(paths)
    assert not verdict.good
    assert [k for k, tier in verdict.files.items() if tier == "mismatch"] == [what]
    cache.discard(paths, [part.sha256])
    assert part.sha256 not in files(paths)
    assert len(files(paths)) == 4
    with pytest.raises(ImageMissing):
        manifest.find(paths, "base")
    (verdict,) = judge(paths)
    assert verdict.files[what] == "missing"


def test_a_file_that_was_mended_meanwhile_is_not_removed(paths: Paths) -> None:
    part = images.plant(paths).variant
    cache.discard(paths, [part.sha256])
    assert part.sha256 in files(paths)


def test_a_file_that_two_images_share_is_hashed_once(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    images.plant(paths, "base")
    images.plant(paths, "rust")
    hashed = []
    real = blobs.hash_file
    monkeypatch.setattr(blobs, "hash_file", lambda f: hashed.append(f.name) or real(f))
    judge(paths)
    assert len(hashed) == len(set(hashed)) == 7


def test_what_an_instance_names_stays_whole_and_the_rest_goes(paths: Paths) -> None:
    used = images.plant(paths, "base", "old")
    newer = images.plant(paths, "base", "new")
    other = images.plant(paths, "rust")
    with blobs.locked(paths):
        removed = cache.collect(paths, {used.variant.sha256, used.guest.sha256})
    assert files(paths) == {part.sha256 for part in used.parts.values()}
    assert len(removed.manifests) == 2
    gone = {newer.variant, newer.packages, other.variant, other.packages}
    assert set(removed.blobs) == {part.sha256 for part in gone}
    assert removed.bytes == sum(part.size for part in gone)
    assert manifest.current(paths) == {}  # the newer one had the name
    assert [i.manifest for i in cache.held(paths).images] == [used]


def test_a_file_that_is_named_alone_stays(paths: Paths) -> None:
    planted = images.plant(paths)
    with blobs.locked(paths):
        cache.collect(paths, {planted.kernel.sha256, "f" * 64})
    assert files(paths) == {planted.kernel.sha256}


def test_without_instances_everything_goes(paths: Paths) -> None:
    images.plant(paths)
    partial = paths.images / "partial" / ("a" * 64)
    partial.write_bytes(b"x" * 1000)
    with blobs.locked(paths):
        removed = cache.collect(paths, ())
    assert files(paths) == set()
    assert cache.held(paths).images == []
    assert not partial.exists()
    assert removed.bytes > 1000
    with blobs.locked(paths):
        assert cache.collect(paths, ()) == cache.Removed([], [], 0)


def test_what_is_being_fetched_stays(paths: Paths) -> None:
    partial = paths.images / "partial" / ("a" * 64)
    with open(partial, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with blobs.locked(paths):
            cache.collect(paths, ())
        assert partial.exists()


def test_a_bad_manifest_of_a_used_image_does_not_cost_its_files(paths: Paths) -> None:
    planted = images.plant(paths)
    named = {part.sha256 for part in planted.parts.values()}
    images.flip(paths.images / "manifests" / f"{manifest.current(paths)['base']}.json")
    with blobs.locked(paths):
        cache.collect(paths, named)
    assert files(paths) == named
