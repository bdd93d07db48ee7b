"""What the host's apt says is taken over, what it must not tell stays here, and what is missing
is named with its fix."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent_box.engine.image import debian
from agent_box.engine.image.errors import BadMirror, HostUnfit


def apt(monkeypatch: pytest.MonkeyPatch, targets: str, options: str = "") -> None:
    """The host's apt says this of itself."""

    def answer(*command: str) -> list[str]:
        return (targets if command[0] == "apt-get" else options).splitlines()

    monkeypatch.setattr(debian, "_apt", answer)
    monkeypatch.setattr(debian, "KEYRING", Path("/usr/share/keyrings/ours.gpg"))
    monkeypatch.setattr(Path, "is_file", lambda self: self == debian.KEYRING)
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


SIGNED = "[signed-by=/usr/share/keyrings/ours.gpg]"


def test_the_mirrors_of_a_debian_host(monkeypatch: pytest.MonkeyPatch) -> None:
    apt(
        monkeypatch,
        "http://m.test/debian/\tbookworm\tmain\t$(SIGNED_BY)\n"
        "http://m.test/debian/\tbookworm-updates\tmain\t$(SIGNED_BY)\n"
        "http://m.test/debian/\tbookworm\tcontrib\t$(SIGNED_BY)\n"
        "http://s.test/debian-security/\tbookworm-security\tmain\t/k/security.gpg\n"
        "https://third.test/apt\tnodistro\tmain\t/k/third.gpg\n",
    )
    found = debian.repositories("trixie", None)
    both = "[signed-by=/usr/share/keyrings/ours.gpg,/k/security.gpg]"
    assert found.lines == (
        f"deb {SIGNED} http://m.test/debian/ trixie main",
        f"deb {SIGNED} http://m.test/debian/ trixie-updates main",
        f"deb {both} http://s.test/debian-security/ trixie-security main",
    )
    assert found.secrets == ()


def test_a_host_that_is_no_debian_leaves_the_choice_to_mmdebstrap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apt(
        monkeypatch,
        "http://u.test/ubuntu/\tnoble\tmain\t$(SIGNED_BY)\n"
        "http://u.test/ubuntu/\tnoble-security\tmain\t$(SIGNED_BY)\n",
    )
    assert debian.repositories("trixie", None).lines == ()


def test_a_mirror_that_was_named_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    apt(monkeypatch, "http://m.test/debian/\tbookworm\tmain\t$(SIGNED_BY)\n")
    found = debian.repositories("trixie", "https://named.test/debian")
    assert found.lines == (
        f"deb {SIGNED} https://named.test/debian trixie main",
        f"deb {SIGNED} https://named.test/debian trixie-updates main",
    )


@pytest.mark.parametrize(
    "mirror",
    [
        "named.test/debian",
        "ftp://named.test/debian",
        "http://named.test/a b",
        "http://named.test/[trusted=yes]",
        "http://named.test/\n",
        "",
        "copy:/x",
    ],
)
def test_what_is_no_mirror(monkeypatch: pytest.MonkeyPatch, mirror: str) -> None:
    apt(monkeypatch, "")
    with pytest.raises(BadMirror) as caught:
        debian.repositories("trixie", mirror)
    assert caught.value.exit == 64


def test_how_to_fetch_is_taken_over_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    apt(
        monkeypatch,
        "",
        'Acquire::http::Proxy "http://me:pw@proxy.test:3128/";\n'
        'Acquire::Check-Valid-Until "false";\n'
        'Acquire::AllowInsecureRepositories "1";\n'
        'Acquire::GzipIndexes "true";\n'
        'Acquire::https::CAInfo "/etc/ca.pem";\n',
    )
    found = debian.repositories("trixie", None)
    assert found.options == (
        'Acquire::http::Proxy "http://me:pw@proxy.test:3128/";',
        'Acquire::Check-Valid-Until "false";',
        'Acquire::https::CAInfo "/etc/ca.pem";',
    )
    assert found.secrets == ("me:pw@proxy.test:3128",)


def test_what_must_not_be_found_in_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    apt(monkeypatch, "https://joe:s3cret@m.test/debian/\tbookworm\tmain\t$(SIGNED_BY)\n")
    monkeypatch.setenv("https_proxy", "http://p.test:8080")
    found = debian.repositories("trixie", None)
    assert set(found.secrets) == {"joe:s3cret", "s3cret", "p.test:8080"}
    assert debian.environment(7)["https_proxy"] == "http://p.test:8080"


def test_the_environment_tells_nothing_of_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setenv("HOME", "/somewhere")
    kept = {k: v for k, v in debian.environment(7).items() if not k.lower().endswith("_proxy")}
    assert kept == {"PATH": debian.PATH, "LC_ALL": "C.UTF-8", "SOURCE_DATE_EPOCH": "7"}


def test_this_hosts_own_apt_is_understood() -> None:
    for uri, release, keyrings in debian._targets():
        assert "://" in uri
        assert release
        assert not keyrings or keyrings.startswith("/")


# ------------------------------------------------------------------------- what lacks


def test_this_host_can_build() -> None:
    debian.check()


@pytest.mark.parametrize(
    ("program", "package"),
    [
        ("mmdebstrap", "mmdebstrap"),
        ("mkfs.erofs", "erofs-utils"),
        ("newuidmap", "uidmap"),
        ("fsck.erofs", "erofs-utils"),
    ],
)
def test_a_program_that_is_missing_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, program: str, package: str
) -> None:
    real = shutil.which

    def without(name: str, path: str) -> str | None:
        return None if name == program else real(name, path=path)

    monkeypatch.setattr(shutil, "which", without)
    with pytest.raises(HostUnfit) as caught:
        debian.check()
    assert str(caught.value) == f"{program} missing: apt-get install {package}"
    assert (caught.value.exit, caught.value.kind) == (2, "host-unfit")


def test_missing_subordinate_ids_are_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(debian, "subordinates", lambda file: 0)
    with pytest.raises(HostUnfit, match=r"no 65536 subordinate ids in /etc/subuid: as root, run"):
        debian.check()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("ME:100000:65536\n", 65536),
        ("other:100000:65536\nME:1:5\nME:9:70000\n", 70000),
        ("UID:100000:65536\n", 65536),
        ("ME\nME:\nME:1:x\nME:1:\n::\n", 0),
        ("MEE:100000:65536\n", 0),
    ],
)
def test_the_ranges_of_this_account(tmp_path: Path, text: str, count: int) -> None:
    file = tmp_path / "subuid"
    file.write_text(text.replace("ME", debian._account()).replace("UID", str(os.getuid())))
    assert debian.subordinates(file) == count
    assert debian.subordinates(tmp_path / "none") == 0


def test_a_host_that_forbids_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run

    def refuse(command: list[str], **more: Any) -> Any:
        if command[0] == "unshare":
            command = ["sh", "-c", "echo 'unshare: Operation not permitted' >&2; exit 1"]
        return real(command, **more)

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(HostUnfit, match="no user namespace .*: unshare: Operation not permitted"):
        debian.check()


def test_missing_keys_of_debian(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian, "KEYRING", Path("/nonexistent"))
    monkeypatch.setattr(debian, "_trusts_debian", lambda: False)
    with pytest.raises(HostUnfit, match="apt-get install debian-archive-keyring"):
        debian.check()


def test_another_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian, "ARCHITECTURES", {})
    with pytest.raises(HostUnfit, match="on x86_64 alone"):
        debian.check()


def test_a_directory_that_others_cannot_enter_is_no_scratch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    (closed / "inner").mkdir(parents=True)
    closed.chmod(0o700)
    assert not debian._open_to_all(closed / "inner")
    assert not debian._open_to_all(tmp_path / "none")
    monkeypatch.setenv("TMPDIR", str(closed / "inner"))
    assert debian.scratch() in (Path("/var/tmp"), Path("/tmp"))
    monkeypatch.setattr(debian, "_open_to_all", lambda directory: False)
    with pytest.raises(HostUnfit, match="set TMPDIR"):
        debian.scratch()
