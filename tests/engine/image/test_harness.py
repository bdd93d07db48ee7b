"""Building a layer, with a program in the place of npm: what it is asked, what comes of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from agent_box.config import presets
from agent_box.engine.image import blobs, harness, layers
from agent_box.engine.image.errors import BuildFailed, HostUnfit
from agent_box.process.paths import Paths

NPM = """#!/bin/sh
set -e
test "$1" = ci && case "$*" in *--ignore-scripts*) ;; *) exit 9 ;; esac
test -s package.json && test -s package-lock.json
mkdir -p node_modules/a/bin
echo "{}" >node_modules/.package-lock.json
printf program >node_modules/a/bin/a
chmod 755 node_modules/a/bin/a
"""


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path / "run", tmp_path / "state")


def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/npm").write_text(text)
    (tmp_path / "bin/npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")


def test_the_same_packages_give_the_same_drive(
    tmp_path: Path, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm(tmp_path, monkeypatch, NPM)
    told: list[str] = []
    preset = presets.load("codex")
    kept, changed, phases = harness.build(paths, preset, tell=told.append)
    assert changed
    assert list(phases) == ["packages", "drive"]
    assert layers.find(paths, "codex") == kept.layer
    again, changed, _ = harness.build(paths, preset, tell=told.append)
    assert not changed
    assert again.layer == kept.layer
    listed = paths.blob(kept.layer.packages.sha256).read_text().splitlines()
    assert len(listed) == kept.layer.count
    assert listed[0].startswith("@zed-industries/codex-acp-linux-x64 0.16.0 sha512-")
    # nothing of npm's own notes is in it, and everything is root's
    drive, out = paths.blob(kept.layer.drive.sha256), tmp_path / "out"
    subprocess.run(["fsck.erofs", f"--extract={out}", "--no-preserve", str(drive)], check=True)
    files = {str(f.relative_to(out)) for f in out.rglob("*") if f.is_file()}
    assert files == {"usr/lib/harness/node_modules/a/bin/a"}
    assert list((paths.images / "work").iterdir()) == []


def test_what_npm_says_is_told_and_nothing_is_left(
    tmp_path: Path, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm(
        tmp_path,
        monkeypatch,
        "#!/bin/sh\necho 'npm error code EINTEGRITY' >&2\necho 'npm error sha512 differs' >&2\n"
        "exit 1\n",
    )
    with pytest.raises(BuildFailed, match="EINTEGRITY: sha512 differs"):
        harness.build(paths, presets.load("codex"), tell=lambda _: None)
    assert layers.held(paths).layers == []
    assert list(blobs.held(paths)) == []
    assert list((paths.images / "work").iterdir()) == []


def test_what_is_missing_is_named(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(HostUnfit, match="apt-get install npm erofs-utils"):
        harness.build(paths, presets.load("codex"), tell=lambda _: None)


def test_a_harness_that_the_variant_brings_has_no_layer(paths: Paths) -> None:
    with pytest.raises(BuildFailed, match="kage has no layer"):
        harness.build(paths, presets.load("kage"), tell=lambda _: None)
