"""A build that fails, is killed or finds a full disk leaves the image that was there, and says
in one line why."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support import built, images, procs
from support.until import until

from agent_box.engine.image import blobs, boxguest, build, debian, definition, inside, manifest
from agent_box.engine.image.definition import Definition
from agent_box.engine.image.errors import BuildFailed
from agent_box.engine.image.manifest import ImageCorrupt, ImageMissing
from agent_box.process.paths import Paths

TINY = Definition("tiny", "", "trixie", ("python3",), None)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """A state directory with an old image, and a scratch directory of its own."""
    made = Paths(tmp_path / "run", tmp_path / "state")
    images.plant(made, "tiny", "old")
    scratch = Path("/var/tmp") / f"agent-box-test-scratch-{os.getpid()}"
    scratch.mkdir(mode=0o755)
    scratch.chmod(0o755)
    monkeypatch.setattr(debian, "scratch", lambda: scratch)
    yield made  # type: ignore[misc]
    left = os.listdir(scratch)
    blobs.remove_tree(scratch)
    assert left == []


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    """Programs of these names are scripts for the build."""
    directory = tmp_path / "bin"
    directory.mkdir(exist_ok=True)
    for name, script in programs.items():
        file = directory / name.replace("_", ".")
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
    monkeypatch.setattr(debian, "PATH", f"{directory}:{debian.PATH}")


def unharmed(paths: Paths) -> None:
    """The old image is whole, and nothing of the new one is there."""
    manifest.Checked().check(paths, manifest.find(paths, "tiny"))
    assert len(manifest.all_of(paths)) == 1
    assert len(list(blobs.held(paths))) == 5
    assert os.listdir(paths.images / "work") == []


def run(paths: Paths, told: list[str] | None = None) -> build.Built:
    return build.build(paths, TINY, mirror=None, tell=(told if told is not None else []).append)


def test_the_programs_own_words_are_the_reason(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(
        tmp_path,
        monkeypatch,
        mmdebstrap="echo 'I: running apt-get update...' >&2\n"
        "echo 'E: Unable to locate package nosuch' >&2\n"
        "echo 'E: apt-get failed' >&2\nexit 25",
    )
    told: list[str] = []
    with pytest.raises(BuildFailed, match=r"packages: .*; all of it is in .*build\.log") as caught:
        run(paths, told)
    assert "Unable to locate package nosuch" in str(caught.value)
    assert caught.value.exit == 1
    assert told == ["packages ...", "  running apt-get update..."]
    log = paths.images / "build.log"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert "nosuch" in log.read_text()
    unharmed(paths)


def test_who_we_are_to_a_mirror_is_in_no_log(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = debian.Repositories(
        ("deb http://joe:s3cret@m.test x main",), (), ("joe:s3cret", "s3cret")
    )
    monkeypatch.setattr(debian, "repositories", lambda suite, mirror: where)
    fake(
        tmp_path,
        monkeypatch,
        mmdebstrap='for word in "$@"; do echo "E: failed: $word" >&2; done\nexit 1',
    )
    with pytest.raises(BuildFailed) as caught:
        run(paths)
    log = (paths.images / "build.log").read_text()
    assert "http://***@m.test" in log
    assert "s3cret" not in log + str(caught.value)
    unharmed(paths)


def test_the_steps_after_the_packages_fail_in_one_line(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(
        tmp_path, monkeypatch, mmdebstrap="echo odd >kernel.deb; echo odd >busybox.deb; echo >list"
    )
    with pytest.raises(BuildFailed, match=r"kernel: kernel\.deb is no Debian package"):
        run(paths)
    unharmed(paths)
    monkeypatch.setattr(build, "_kernel", lambda fetched: (b"k", b"i", "6"))
    with pytest.raises(BuildFailed, match="drives: tar: "):
        run(paths)
    unharmed(paths)


def test_a_full_disk_is_one_line(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fetched: Path) -> None:
        raise OSError(28, "No space left on device", str(fetched))

    fake(tmp_path, monkeypatch, mmdebstrap="true")
    monkeypatch.setattr(build, "_kernel", full)
    with pytest.raises(BuildFailed, match="disk: no space left on device /"):
        run(paths)
    unharmed(paths)


PROGRAM = """
import sys
from pathlib import Path
from agent_box.engine.image import build, debian
from agent_box.engine.image.definition import Definition
from agent_box.process.paths import Paths
debian.PATH = sys.argv[3]
debian.scratch = lambda: Path(sys.argv[4])
build.build(
    Paths(Path(sys.argv[1]), Path(sys.argv[2])),
    Definition("tiny", "", "trixie", ("python3",), None), mirror=None, tell=print,
)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_half_way(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """By SIGKILL the next run removes what is left; by Ctrl-C it goes at once."""
    fake(
        tmp_path,
        monkeypatch,
        mmdebstrap=f"echo $$ >{tmp_path}/new\nmv {tmp_path}/new {tmp_path}/pid\nexec sleep 600",
    )
    scratch = debian.scratch()
    process = subprocess.Popen(
        [
            *(sys.executable, "-I", "-c", PROGRAM, str(paths.runtime), str(paths.state)),
            *(debian.PATH, str(scratch)),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until("mmdebstrap runs", lambda: (tmp_path / "pid").exists(), seconds=60)
    pid = int((tmp_path / "pid").read_text())
    process.send_signal(number)
    process.wait()
    if number == signal.SIGINT:
        until("it is gone too", lambda: procs.state(pid) in "XZ")
        unharmed(paths)
        return
    os.kill(pid, signal.SIGKILL)
    assert os.listdir(paths.images / "work") != []
    assert manifest.find(paths, "tiny") is not None
    fake(tmp_path, monkeypatch, mmdebstrap="echo 'E: no' >&2; exit 1")
    with pytest.raises(BuildFailed, match="packages: no"):
        run(paths)
    unharmed(paths)


def test_files_of_other_uids_are_removed_too(tmp_path: Path) -> None:
    """A killed build leaves files of subordinate uids in directories that are theirs."""
    left = tmp_path / "left"
    left.mkdir()
    script = f"mkdir {left}/d && touch {left}/d/f && chown -R 33:33 {left}/d && chmod 700 {left}/d"
    subprocess.run([*blobs.OWN_NAMESPACE, "sh", "-c", script], check=True, timeout=60)
    with pytest.raises(PermissionError):
        os.listdir(left / "d")
    blobs.remove_tree(left)
    assert not left.exists()


def test_there_is_nothing_to_refresh(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "run", tmp_path / "state")
    with pytest.raises(ImageMissing):
        build.refresh(paths, "base", tell=print)
    planted = images.plant(paths)
    images.flip(paths.blob(planted.variant.sha256))
    with pytest.raises(ImageCorrupt, match=planted.variant.sha256):
        build.refresh(paths, "base", tell=print)


# ---------------------------------------------------------------- inside the namespace


def test_packages_are_those_that_are_installed(tmp_path: Path) -> None:
    status = tmp_path / "var/lib/dpkg/status"
    status.parent.mkdir(parents=True)
    status.write_text(
        "Package: zlib\nStatus: install ok installed\nVersion: 1:2-3\nArchitecture: amd64\n"
        "Description: x\n more: y\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nVersion: 1\nArchitecture: all\n\n"
        "Package: apt\nStatus: install ok installed\nVersion: 3\nArchitecture: amd64\n"
    )
    assert inside.packages(tmp_path) == "apt 3 amd64\nzlib 1:2-3 amd64\n"


def test_a_credential_in_the_tree_ends_the_build_and_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "etc/apt").mkdir(parents=True)
    (tmp_path / "etc/apt/x").write_text("deb http://joe:s3cret@m.test/")
    inside.refuse_leaks(tmp_path, ["other", "m"])
    with pytest.raises(inside.JobError, match="/etc/apt/x holds") as caught:
        inside.refuse_leaks(tmp_path, ["joe:s3cret"])
    assert "s3cret" not in str(caught.value)


# ------------------------------------------------------------------------ a real build


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of a real image, with our uid instead of its own."""
    paths, image = built.ready()
    root = tmp_path_factory.mktemp("image") / "root"
    drive = paths.blob(image.variant.sha256)
    subprocess.run(
        ["fsck.erofs", f"--extract={root}", "--no-preserve-owner", "--preserve-perms", drive],
        check=True,
        capture_output=True,
        env={"PATH": debian.PATH},
        timeout=170,
    )
    return root


@pytest.mark.timeout(900)
def test_it_tells_nothing_of_this_host(tree: Path) -> None:
    """Neither its name, its account and home, nor how it reaches its mirrors."""
    import pwd
    import socket

    assert (tree / "etc/hostname").read_text() == "box\n"
    assert (tree / "etc/resolv.conf").read_text() == "nameserver 198.18.0.1\n"
    assert (tree / "etc/machine-id").read_text() == ""
    me = pwd.getpwuid(os.getuid())
    words = {
        me.pw_name,
        me.pw_dir,
        socket.gethostname(),
        *debian.repositories("trixie", None).secrets,
    }
    # A host may be called as Debian calls itself, and its image says that of every host.
    own = (tree / "etc/os-release").read_text() + " localhost"
    words = {word for word in words if len(word) > 4 and word not in own}
    files = [file for file in inside._texts(tree) if not file.name.endswith((".list", ".md5sums"))]
    assert len(files) > 100
    for file in files:
        content = file.read_bytes()
        assert [word for word in words if word.encode() in content] == [], file


@pytest.mark.timeout(900)
def test_what_is_in_it(tree: Path) -> None:
    accounts = dict(line.split(":", 1) for line in (tree / "etc/passwd").read_text().splitlines())
    assert accounts["agent"] == "x:1000:1000::/home/agent:/bin/bash"
    shadow = dict(line.split(":")[:2] for line in (tree / "etc/shadow").read_text().splitlines())
    assert all(word.startswith(("!", "*")) for word in shadow.values())  # nobody logs in
    assert "agent" not in "".join(
        line
        for file in [tree / "etc/sudoers", *(tree / "etc/sudoers.d").iterdir()]
        for line in file.read_text().splitlines()
        if not line.startswith("#")
    )
    for name in ("python3", "git", "curl", "bash", "sudo", "gcc", "make"):
        assert (tree / "usr/bin" / name).exists()
    assert (tree / "usr/sbin/resize2fs").exists()
    assert (tree / "home/agent/work").is_dir()
    assert (tree / "home/agent/.bashrc").is_file()
    assert (tree / "etc/ssl/certs/ca-certificates.crt").stat().st_size > 100_000
    (sources,) = (tree / "etc/apt/sources.list.d").iterdir()
    assert "Suites: trixie-security" in sources.read_text()
    for name in inside.EMPTIED:
        assert list((tree / name).iterdir()) == []
    assert not list((tree / "usr/share/man").rglob("*.gz"))
    assert (tree / "usr/share/doc/git/copyright").is_file()


@pytest.mark.timeout(900)
def test_its_python_is_compiled_and_never_checked_by_time(tree: Path) -> None:
    (library,) = (tree / "usr/lib").glob("python3.*")
    files = sorted(library.rglob("*.pyc"))
    assert len(files) > 500
    for file in files:
        with open(file, "rb") as code:
            assert int.from_bytes(code.read(8)[4:], "little") == 0b01, file
    assert (
        library / "__pycache__" / f"os.cpython-{library.name[6:].replace('.', '')}.pyc"
    ).exists()


@pytest.mark.timeout(900)
def test_the_parts_are_what_they_should_be() -> None:
    paths, image = built.ready()
    manifest.Checked().check(paths, image)
    with open(paths.blob(image.kernel.sha256), "rb") as kernel:
        assert kernel.read(4) == b"\x7fELF"
    assert image.source.kernel.encode() in paths.blob(image.kernel.sha256).read_bytes()
    for part in (image.variant, image.guest):
        with open(paths.blob(part.sha256), "rb") as drive:
            drive.seek(1024)
            assert drive.read(4) == 0xE0F5E1E2.to_bytes(4, "little")
    packages = paths.blob(image.packages.sha256).read_text().splitlines()
    assert len(packages) == image.source.packages
    assert packages == sorted(packages)
    names = {line.split()[0] for line in packages}
    assert {"python3", "git", "busybox-static", f"linux-image-{image.source.kernel}"} <= names


@pytest.mark.timeout(900)
def test_only_the_guests_drive_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = Paths(tmp_path / "run", tmp_path / "state")
    before = built.install(paths)
    again = build.refresh(paths, "base", tell=print)
    assert not again.changed  # the same code on the same Python is the same drive
    assert again.manifest == before
    texts = {**boxguest.sources(), "agent_box/guest/extra.py": "X = 1\n"}
    monkeypatch.setattr(boxguest, "sources", lambda: texts)
    after = build.refresh(paths, "base", tell=print)
    assert after.changed
    assert after.manifest.guest != before.guest
    assert after.manifest.variant == before.variant
    assert manifest.find(paths, "base").source.guest == boxguest.digest(texts)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_builds_are_the_same_bytes(tmp_path: Path) -> None:
    """Elsewhere, with another umask: what differs is found by digest."""
    first = Paths(tmp_path / "run", tmp_path / "one")
    second = Paths(tmp_path / "run", tmp_path / "two")
    wanted = definition.load("base", None)
    one = build.build(first, wanted, mirror=None, tell=print).manifest
    before = os.umask(0o077)
    try:
        two = build.build(second, wanted, mirror=None, tell=print).manifest
    finally:
        os.umask(before)
    assert one == two
