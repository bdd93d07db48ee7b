"""What curl, git, apt, pip and npm fetch in tests: one small thing each, in a directory of files.

git   /git/boxed.git        a repository with a file, for `git http-backend`
apt   /apt                  a flat repository with the package `boxed`
pip   /simple               an index with the distribution `boxed`
npm   /npm                  a registry with the package `boxed`
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

SAYS = "said by what was fetched"
BACKEND = "/usr/lib/git-core/git-http-backend"


def stock(root: Path, url: str) -> None:
    """Fills a directory, which is served at `url`."""
    _git(root / "git" / "boxed.git")
    _apt(root / "apt")
    _pip(root / "simple" / "boxed")
    _npm(root / "npm", url)


def _git(repository: Path) -> None:
    repository.mkdir(parents=True)

    def git(*words: str, stdin: str = "") -> str:
        who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.org",
               "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@example.org"}  # fmt: skip
        done = subprocess.run(
            ["git", "-C", str(repository), *words],
            env={"PATH": os.environ["PATH"], "HOME": str(repository), **who},
            input=stdin, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    git("init", "--quiet", "--bare", "--initial-branch=main")
    blob = git("hash-object", "-w", "--stdin", stdin=SAYS)
    tree = git("mktree", stdin=f"100644 blob {blob}\tsaying\n")
    git("update-ref", "refs/heads/main", git("commit-tree", tree, "-m", "first"))


def git_answer(root: Path, method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
    """What `git http-backend` says, with its head (RFC 3875)."""
    where, _, query = path.partition("?")
    done = subprocess.run(
        [BACKEND],
        env={
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(root / "git"),
            "GIT_HTTP_EXPORT_ALL": "1",
            "REQUEST_METHOD": method,
            "PATH_INFO": where.removeprefix("/git"),
            "QUERY_STRING": query,
            "CONTENT_TYPE": headers.get("content-type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": headers.get("content-encoding", ""),
            "GIT_PROTOCOL": headers.get("git-protocol", ""),
            "REMOTE_ADDR": "127.0.0.1",
        },
        input=body,
        capture_output=True,
        check=True,
    )
    return done.stdout


def _apt(shelf: Path) -> None:
    shelf.mkdir()
    control = (
        "Package: boxed\nVersion: 1.0\nArchitecture: all\nMaintainer: a <a@example.org>\n"
        "Description: for a test\n"
    )
    script = f"#!/bin/sh\necho {SAYS}\n".encode()
    members = (
        ("debian-binary", b"2.0\n"),
        ("control.tar.gz", _tar({"./control": control.encode()})),
        ("data.tar.gz", _tar({"./usr/bin/boxed": script})),
    )
    deb = b"!<arch>\n"
    for name, content in members:  # deb(5), ar(5)
        head = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n"
        deb += head.encode() + content + b"\n" * (len(content) & 1)
    (shelf / "boxed_1.0_all.deb").write_bytes(deb)
    (shelf / "Packages").write_text(
        f"{control}Filename: ./boxed_1.0_all.deb\nSize: {len(deb)}\n"
        f"SHA256: {hashlib.sha256(deb).hexdigest()}\n"
    )


def _pip(shelf: Path) -> None:
    shelf.mkdir(parents=True)
    name = "boxed-1.0-py3-none-any.whl"
    about = "boxed-1.0.dist-info"
    with zipfile.ZipFile(shelf / name, "w") as wheel:
        wheel.writestr("boxed.py", f"print({SAYS!r})\n")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: boxed\nVersion: 1.0\n")
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(
            f"{about}/RECORD",
            f"boxed.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n",
        )
    (shelf / "index.html").write_text(f'<!DOCTYPE html><a href="{name}">{name}</a>\n')


def _npm(shelf: Path, url: str) -> None:
    shelf.mkdir()
    package = {"name": "boxed", "version": "1.0.0", "main": "index.js"}
    tarball = _tar(
        {
            "package/package.json": json.dumps(package).encode(),
            "package/index.js": f"console.log({SAYS!r})\n".encode(),
        }
    )
    (shelf / "boxed-1.0.0.tgz").write_bytes(tarball)
    digest = base64.b64encode(hashlib.sha512(tarball).digest()).decode()
    there = {"tarball": f"{url}/npm/boxed-1.0.0.tgz", "integrity": f"sha512-{digest}"}
    (shelf / "boxed").write_text(
        json.dumps(
            {
                "name": "boxed",
                "dist-tags": {"latest": "1.0.0"},
                "versions": {"1.0.0": {**package, "dist": there}},
            }
        )
    )


def _tar(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
    return made.getvalue()
