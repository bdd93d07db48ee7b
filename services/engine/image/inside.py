"""The part of a build that needs to own files of many uids: run in a user namespace.

`python -I -m agent_box.engine.image.inside`, a job as JSON on stdin. Root here is the
operator; the other uids are the operator's subordinate ones. It unpacks Debian's tree,
settles what must not differ from build to build or tell of the host, and makes the drive.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

AGENT_UID: Final = 1000
HOSTS: Final = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
FILES: Final = {  # what an image says of itself, whatever the host said
    "etc/hostname": "box\n",
    "etc/hosts": HOSTS,
    "etc/machine-id": "",
    "etc/resolv.conf": "nameserver 198.18.0.1\n",
}
REMOVED: Final = (  # of the build, or of the host it was done on
    *("etc/apt/apt.conf.d/99mmdebstrap", "etc/dpkg/dpkg.cfg.d/99mmdebstrap"),
    *("etc/apt/sources.list", "etc/apt/sources.list.d", "etc/apt/auth.conf"),
    *("etc/apt/auth.conf.d", "etc/apt/trusted.gpg", "etc/.pwd.lock", "var/lib/dbus/machine-id"),
    *("etc/passwd-", "etc/group-", "etc/shadow-", "etc/gshadow-", "etc/subuid-", "etc/subgid-"),
    *("var/cache/ldconfig/aux-cache", "var/lib/dpkg/status-old", "var/lib/dpkg/available-old"),
    *("var/lib/systemd", "var/lib/dpkg/lock", "var/lib/dpkg/lock-frontend"),
)
EMPTIED: Final = ("var/log", "var/cache/apt", "var/lib/apt/lists", "var/tmp", "tmp", "run", "dev")
# apt's own example names Debian's servers; a guest's policy decides whether they are reached
SOURCES: Final = "usr/share/doc/apt/examples/debian.sources"
COMPILE: Final = """
import os, py_compile, sys
for directory, names, files in os.walk(sys.argv[1]):
    names.sort()
    for name in sorted(files):
        if name.endswith(".py"):
            path = os.path.join(directory, name)
            py_compile.compile(
                path, path + "c", os.path.relpath(path, sys.argv[1]), doraise=True,
                invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            )
"""


class JobError(Exception):
    """What went wrong, in one line."""


def main() -> None:
    job = json.loads(sys.stdin.read())
    os.umask(0o022)  # whatever the operator's is: what is made here goes into the image
    try:
        root = Path(job["directory"])
        if job["tar"] is not None:
            unpack(Path(job["tar"]), root)
            settle(root, job["epoch"])
            refuse_leaks(root, job["secrets"])
            Path(job["packages"]).write_text(packages(root))
            erofs(root, Path(job["variant"]), job["uuid"])
        compile_guest(root, Path(job["sources"]))
    except (JobError, OSError) as error:
        sys.exit(f"{error}")


def run(command: Sequence[str], environment: dict[str, str] | None = None) -> None:
    """Raises JobError with the program's last word."""
    env = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"} | (environment or {})
    done = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise JobError(f"{command[0]}: {said[-1] if said else f'exit {done.returncode}'}")


def unpack(tar: Path, root: Path) -> None:
    root.mkdir(mode=0o755)
    run(
        ["tar", "-C", str(root), "-xpf", str(tar), "--numeric-owner", "--exclude=./dev/*"],
    )
    tar.unlink()


def packages(root: Path) -> str:
    """A line `NAME VERSION ARCHITECTURE` for each package that is installed."""
    lines = []
    for entry in (root / "var/lib/dpkg/status").read_text().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in entry.splitlines() if ": " in line)
        if fields.get("Status", "").endswith(" installed"):
            lines.append(" ".join(fields[key] for key in ("Package", "Version", "Architecture")))
    return "".join(f"{line}\n" for line in sorted(lines))


def in_root(root: Path, *command: str, epoch: int) -> None:
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "SOURCE_DATE_EPOCH": str(epoch),
        "PYTHONHASHSEED": "0",
    }
    run(["chroot", str(root), *command], environment)


def settle(root: Path, epoch: int) -> None:
    """Makes the tree the same whenever and wherever it was built."""
    sources = (root / SOURCES).read_bytes() if (root / SOURCES).is_file() else None
    if not (root / "etc/passwd").read_text().count(":/home/agent:"):
        uid = str(AGENT_UID)
        in_root(
            root,
            *("useradd", "--create-home", "--user-group", "--uid", uid, "--shell", "/bin/bash"),
            "agent",
            epoch=epoch,
        )
    work = root / "home/agent/work"
    work.mkdir(mode=0o755, exist_ok=True)
    os.chown(work, AGENT_UID, AGENT_UID)
    for name in REMOVED:
        _remove(root / name)
    for name in EMPTIED:
        directory = root / name
        if directory.is_dir():
            for entry in directory.iterdir():
                _remove(entry)
    for name, text in FILES.items():
        _remove(root / name)
        (root / name).write_text(text)
        (root / name).chmod(0o644)
    (root / "etc/apt/sources.list.d").mkdir(parents=True, exist_ok=True)
    if sources is not None:
        (root / "etc/apt/sources.list.d/debian.sources").write_bytes(sources)
    for directory in sorted((root / "usr").glob("lib/python3*")):
        for cache in sorted(directory.rglob("__pycache__")):
            shutil.rmtree(cache)
        inside = f"/{directory.relative_to(root)}"
        # some packages bring files for other versions, which do not compile: no harm
        in_root(
            root,
            *("python3", "-S", "-c", _COMPILE_ALL, inside),
            epoch=epoch,
        )


_COMPILE_ALL: Final = """
import compileall, py_compile, sys
compileall.compile_dir(
    sys.argv[1], quiet=2, force=True, maxlevels=40,
    invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
)
"""


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def refuse_leaks(root: Path, secrets: Sequence[str]) -> None:
    """Looks for what must not be there wherever a build writes configuration.

    Raises:
        JobError: it was found; the line names the file, not the secret.
    """
    wanted = [secret.encode() for secret in secrets if len(secret) >= 4]
    for file in _texts(root):
        if wanted and any(each in file.read_bytes() for each in wanted):
            raise JobError(f"/{file.relative_to(root)} holds a mirror's or a proxy's credential")


def _texts(root: Path) -> Iterator[Path]:
    for name in ("etc", "var", "home", "root"):
        for directory, _, files in os.walk(root / name):
            for file in files:
                path = Path(directory, file)
                if path.is_file() and not path.is_symlink():
                    yield path


def erofs(root: Path, target: Path, uuid: str) -> None:
    """A plain image: nothing compressed, no times, no extended attributes."""
    run(["mkfs.erofs", "-T0", "-x-1", "-U", uuid, str(target), str(root)])


def compile_guest(root: Path, sources: Path) -> None:
    """Compiles each module in `sources` with the Python of the image, beside itself."""
    place = root / "tmp" / "box-guest"
    shutil.copytree(sources, place)
    in_root(root, "python3", "-S", "-B", "-c", COMPILE, "/tmp/box-guest", epoch=0)
    shutil.rmtree(sources)
    shutil.move(place, sources)


if __name__ == "__main__":
    main()
