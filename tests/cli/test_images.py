"""The verbs of images, by the real program: what they show, remove, refuse and leave alone."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support import cli, images, ociregistry, registries
from support.live import Live

from agent_box.engine.image import blobs, boxguest, debian, manifest
from agent_box.engine.image.manifest import Manifest, Signed
from agent_box.process.paths import Paths
from agent_box.registry import contract as registry

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
PUBLIC = KEY.public_key().public_bytes_raw().hex()


class Home:
    """Directories of an operator, and no daemon."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.env = cli.environment(directory)
        self.paths = Paths.from_env(self.env)
        self.config = directory / "config" / "agent-box"

    def run(self, *words: str, timeout: float = 60.0, **env: str) -> cli.Ran:
        return cli.run(*words, env=self.env | env, timeout=timeout)

    @property
    def idle(self) -> bool:
        return not self.paths.lock.exists()


@pytest.fixture
def home() -> Iterator[Home]:
    """Short, because sockets would lie below it."""
    with tempfile.TemporaryDirectory(prefix="ab.") as directory:
        yield Home(Path(directory))


def files(paths: Paths) -> set[str]:
    return set(blobs.held(paths))


# -------------------------------------------------------------------------------- list


def test_nothing_is_cached(home: Home) -> None:
    assert home.run("image", "list", "--json").result == {
        "images": [],
        "layers": [],
        "problems": [],
    }
    assert home.run("image", "list").out == (
        "no image is cached; `agent-box image build` makes one\n"
    )
    assert home.run("image", "verify").out == "no image is cached\n"
    assert home.idle


def test_the_list_starts_no_daemon_and_then_does_not_know_who_uses_them(home: Home) -> None:
    old = images.plant(home.paths, "base", "old")
    new = images.plant(home.paths, "base", "new")
    found = home.run("image", "list", "--json").result["images"]
    assert [(i["digest"], i["current"], i["instances"]) for i in found] == [
        (new.variant.sha256, True, None),
        (old.variant.sha256, False, None),
    ]
    assert found[0]["size"] == sum(part.size for part in new.parts.values())
    assert found[0]["files"]["kernel"] == {"sha256": new.kernel.sha256, "size": new.kernel.size}
    lines = home.run("image", "list").out.splitlines()
    assert lines[0].split() == ["VARIANT", "SHA256", "FORMAT", "SIZE", "INSTANCES"]
    assert lines[1].startswith(f"base          {new.variant.sha256[:12]}  erofs")
    assert lines[2].startswith(f"base (older)  {old.variant.sha256[:12]}  erofs")
    assert lines[1].endswith("unknown: no daemon runs")
    assert home.idle


def test_a_manifest_that_is_bad_is_told_beside_the_others(home: Home) -> None:
    images.plant(home.paths, "base")
    images.plant(home.paths, "rust")
    bad = manifest.current(home.paths)["base"]
    images.flip(home.paths.images / "manifests" / f"{bad}.json")
    ran = home.run("image", "list", "--json")
    assert [i["variant"] for i in ran.result["images"]] == ["rust"]
    assert [p["manifest"] for p in ran.result["problems"]] == [bad]
    assert "warning" in ran.err
    error = home.run("image", "verify", "--json").error
    assert (error["exit"], error["kind"]) == (3, "image-digest-mismatch")
    assert bad in error["message"]


# ------------------------------------------------------------------------------ verify


def test_a_flipped_byte_is_exit_3_the_digest_named_and_the_file_gone(home: Home) -> None:
    planted = images.plant(home.paths, "base")
    images.plant(home.paths, "rust")
    assert home.run("image", "verify", "--json").result["corrupt"] == []
    digest = planted.variant.sha256
    images.flip(home.paths.blob(digest))
    ran = home.run("image", "verify", "--json")
    assert ran.exit == 3
    assert ran.error["kind"] == "image-digest-mismatch"
    assert ran.error["corrupt"] == [digest]
    assert digest in ran.error["message"]
    tiers = {i["variant"]: i["tiers"] for i in ran.error["images"]}
    assert tiers == {
        "base": {"tier_1": "failed", "tier_2": "verified", "tier_3": "no verifier installed"},
        "rust": {"tier_1": "verified", "tier_2": "verified", "tier_3": "no verifier installed"},
    }
    assert digest not in files(home.paths)
    again = home.run("image", "verify", "base", "--json").error
    assert again["missing"] == [digest]
    assert home.run("image", "verify", "rust").exit == 0
    assert home.idle


def test_a_variant_that_is_not_there(home: Home) -> None:
    error = home.run("image", "verify", "base", "--json").error
    assert (error["exit"], error["kind"]) == (3, "not-found")
    assert "`agent-box image build base` makes it" in error["message"]


def test_verify_says_who_signed(home: Home) -> None:
    planted = images.plant(home.paths)
    both = [
        manifest.sign(planted, b"k" * 32),
        manifest.sign(planted, manifest.local_key(home.paths)),
    ]
    manifest.store(home.paths, Signed(planted, both))
    (home.config / "image-keys").mkdir(parents=True)
    (home.config / "image-keys" / "publisher.pub").write_text(PUBLIC)
    found = home.run("image", "verify", "--json").result["images"]
    assert {tuple(sorted(i["signers"])) for i in found} == {("local",), ("local", "publisher")}


# ---------------------------------------------------------------------------------- gc


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Live, Manifest]]:
    """An agent-box with the instance web1, which boots an image that is no longer current."""
    made = Live()
    try:
        used = images.plant(made.paths, "base", "used")
        digests = {what: part.sha256 for what, part in used.parts.items() if what != "packages"}
        monkeypatch.setattr(registries, "IMAGES", registry.Images(harness=None, **digests))
        registries.seed(made.paths.data("registry") / "registry.db", "web1")
        yield made, used
    finally:
        made.close()


def test_gc_never_takes_what_an_instance_records(live: tuple[Live, Manifest]) -> None:
    box, used = live
    newer = images.plant(box.paths, "base", "newer")
    other = images.plant(box.paths, "rust")
    ran = box.run("image", "gc", "--json")  # it starts the daemon: somebody has to know
    assert len(ran.result["manifests"]) == 2
    assert files(box.paths) == {part.sha256 for part in used.parts.values()}
    gone = {newer.variant.sha256, newer.packages.sha256, other.variant.sha256}
    assert gone <= set(ran.result["blobs"])
    found = box.run("image", "list", "--json").result["images"]
    assert [(i["digest"], i["instances"]) for i in found] == [(used.variant.sha256, ["web1"])]
    assert box.run("image", "list").out.rstrip().endswith("web1")
    assert box.run("image", "gc").out == "0 images removed, 0 MiB freed\n"


def test_gc_removes_nothing_when_nobody_can_say_what_is_used(live: tuple[Live, Manifest]) -> None:
    box, _ = live
    images.plant(box.paths, "rust")
    before = files(box.paths)
    database = box.paths.data("registry") / "registry.db"
    kept = database.read_bytes()
    database.write_bytes(b"no database at all")
    ran = box.run("image", "gc", "--json", timeout=120)
    assert ran.exit != 0
    assert files(box.paths) == before
    assert len(manifest.all_of(box.paths)) == 2
    box.run("daemon", "--stop")
    database.write_bytes(kept)


# ------------------------------------------------------------------------------- build


def test_a_host_that_cannot_build_says_what_to_install(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`doctor` says the same where an image is missing."""
    program = (
        "import sys\n"
        "from agent_box.engine.image import debian\n"
        "debian.PROGRAMS['no-such-program'] = 'its-package'\n"
        "from agent_box.cli import main\n"
        "sys.exit(main.main(sys.argv[1:]))\n"
    )
    file = tmp_path / "program.py"
    file.write_text(program)
    monkeypatch.setattr(cli, "BINARY", cli.BINARY.parent / "python")
    ran = home.run(str(file), "image", "build")
    assert (ran.exit, ran.out) == (2, "")
    assert ran.err == ("agent-box: no-such-program missing: apt-get install its-package\n")
    report = home.run(str(file), "doctor").out
    (line,) = (x for x in report.splitlines() if x.startswith("image: "))
    assert "`agent-box image build base` makes it, which this host cannot: no-such" in line
    assert line.endswith("[note image-not-pulled]")
    assert home.idle


@pytest.mark.parametrize(
    ("words", "exit", "said"),
    [
        ("base --mirror nonsense", 64, "the mirror must be an http, https or file URL"),
        ("nosuch", 3, "no image variant is named nosuch"),
        ("mine", 2, "variants/mine.toml: packages must be a list of names"),
        ("base nosuch", 3, "no image variant is named nosuch"),  # before the first is built
        ("base --guest", 3, "there is no image base"),
    ],
)
def test_a_build_that_cannot_begin(home: Home, words: str, exit: int, said: str) -> None:
    (home.config / "variants").mkdir(parents=True)
    (home.config / "variants" / "mine.toml").write_text('suite = "trixie"\npackages = 1')
    ran = home.run("image", "build", *words.split(), "--json")
    assert ran.exit == exit
    assert said in ran.error["message"]
    assert files(home.paths) == set()
    assert home.idle


def test_root_builds_nothing(home: Home) -> None:
    from agent_box.cli import link
    from agent_box.cli.render import Failure

    if os.geteuid() == 0:
        pytest.fail("these tests are for an ordinary account")
    real = os.geteuid
    os.geteuid = lambda: 0
    try:
        with pytest.raises(Failure, match="does not run as root"):
            link.place(home.env)
    finally:
        os.geteuid = real


@pytest.mark.timeout(900)
def test_only_the_guests_drive(home: Home) -> None:
    """The image itself takes long and is built once for all tests; this is quick."""
    from support import built

    image = built.install(home.paths)
    ran = home.run("image", "build", "--guest", "--json", timeout=600)
    (made,) = ran.result["images"]
    assert made["digest"] == image.variant.sha256
    assert not made["changed"]
    assert set(made["phases"]) == {"guest", "checksums"}
    text = home.run("image", "build", "--guest", timeout=600)
    assert text.out == (
        f"base: sha256 {image.variant.sha256}, {image.source.packages} packages, "
        f"kernel {image.source.kernel}, as it was\n"
    )
    assert text.err.splitlines()[0] == "guest ..."


# -------------------------------------------------------------------------------- pull


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ociregistry.Registry]:
    with ociregistry.registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def published(tmp_path: Path, shop: ociregistry.Registry) -> tuple[str, Manifest]:
    """A reference to an image of `base`, and what it is."""
    far = Paths(tmp_path / "far-run", tmp_path / "far")
    planted = images.plant(far)
    signed = Signed(planted, [manifest.sign(planted, b"k" * 32)])
    return str(shop.push(far, "agent-box/base", signed)), planted


def trust(home: Home) -> None:
    (home.config / "image-keys").mkdir(parents=True, exist_ok=True)
    (home.config / "image-keys" / "publisher.pub").write_text(PUBLIC + "\n")


def test_a_published_image(home: Home, published: tuple[str, Manifest]) -> None:
    where, image = published
    error = home.run("image", "pull", where, "--json").error
    assert (error["exit"], error["kind"]) == (1, "image-untrusted")
    assert files(home.paths) == set()
    trust(home)
    (pulled,) = home.run("image", "pull", where, "--json").result["images"]
    assert pulled["reference"] == where
    assert pulled["digest"] == image.variant.sha256
    assert pulled["fetched"] == sum(part.size for part in image.parts.values())
    assert manifest.find(home.paths, "base") == image
    (found,) = home.run("image", "verify", "--json").result["images"]
    assert sorted(found["signers"]) == ["local", "publisher"]
    assert home.idle


def test_a_variant_that_says_where_it_is(home: Home, published: tuple[str, Manifest]) -> None:
    trust(home)
    where, image = published
    (home.config / "variants").mkdir(parents=True)
    (home.config / "variants" / "base.toml").write_text(f'pull = "{where}"\n')
    assert home.run("image", "pull").out == (
        f"base: sha256 {image.variant.sha256}, 1 packages, kernel 6.12.0-test\n"
    )
    (home.config / "variants" / "rust.toml").write_text(f'pull = "{where}"\n')
    error = home.run("image", "pull", "rust", "--json").error
    assert "is an image of base, not of rust" in error["message"]


@pytest.mark.parametrize(
    ("words", "exit", "said"),
    [
        ("", 3, "no place to pull base from is known"),
        ("rust", 3, "no place to pull rust from is known"),
        ("nosuch", 3, "no image variant is named nosuch"),
        (f"127.0.0.1:1/x@sha256:{'0' * 64}", 1, "127.0.0.1:1/x@sha256:"),
        ("base:latest", 64, "image pull: IMAGE must be"),
    ],
)
def test_a_pull_that_cannot_begin(home: Home, words: str, exit: int, said: str) -> None:
    ran = home.run("image", "pull", *words.split(), "--json")
    assert ran.exit == exit
    assert said in ran.error["message"]


def test_a_key_that_is_none(home: Home) -> None:
    (home.config / "image-keys").mkdir(parents=True)
    (home.config / "image-keys" / "bad.pub").write_text("x")
    error = home.run("image", "pull", f"127.0.0.1:1/x@sha256:{'0' * 64}", "--json").error
    assert (error["exit"], error["kind"]) == (2, "config-invalid")


# ------------------------------------------------------------------------------ doctor


def lines(home: Home) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for line in home.run("doctor", "--json").result["lines"]:
        found.setdefault(line["key"], []).append(line)
    return found


def test_doctor_hashes_what_machines_boot(home: Home) -> None:
    code = boxguest.digest(boxguest.sources())
    planted = images.plant(home.paths, guest_source=code)
    found = lines(home)
    (kernel,), (image,) = found["guest-kernel"], found["image"]
    assert kernel["value"] == (
        f"vmlinux 6.12.0-test, sha256 {planted.kernel.sha256}, verified (tier 2)"
    )
    assert image["value"] == (
        f"base, sha256 {planted.variant.sha256}, erofs, tier 1 verified, tier 2 verified, "
        "tier 3 no verifier installed, used by: unknown"
    )
    assert kernel["status"] == image["status"] == "ok"


def test_doctor_names_what_is_corrupt_and_changes_nothing(home: Home) -> None:
    planted = images.plant(home.paths)
    for part in (planted.kernel, planted.variant):
        images.flip(home.paths.blob(part.sha256))
    found = lines(home)
    (kernel,), (image,) = found["guest-kernel"], found["image"]
    assert kernel["name"] == image["name"] == "image-digest-mismatch"
    assert kernel["value"].endswith(f"{planted.kernel.sha256}, mismatch")
    assert "tier 1 failed" in image["value"]
    assert "kernel mismatch, variant mismatch" in image["value"]
    assert {planted.kernel.sha256, planted.variant.sha256} <= files(home.paths)


def test_doctor_knows_an_image_with_other_code_of_ours(home: Home) -> None:
    images.plant(home.paths)
    (image,) = lines(home)["image"]
    assert (image["status"], image["name"]) == ("note", "image-outdated")


def test_doctor_names_each_variant_that_a_profile_lacks(home: Home) -> None:
    from agent_box.cli.demo import EXAMPLE

    home.config.mkdir(parents=True)
    (home.config / "config.toml").write_text(EXAMPLE)
    images.plant(home.paths, "base", guest_source=boxguest.digest(boxguest.sources()))
    found = lines(home)
    assert [line["name"] for line in found["image"]] == [None, "image-not-pulled"]
    assert found["image"][1]["value"].startswith("rust: none is installed; `agent-box image build")
    assert found["guest-kernel"][0]["name"] == "image-not-pulled"  # of the default profile


def test_this_hosts_tools_are_there() -> None:
    """Else the tests above would tell nothing."""
    assert all(shutil.which(name, path=debian.PATH) for name in debian.PROGRAMS)
