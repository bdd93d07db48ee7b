"""This host as a place to build: its apt configuration, its programs, its subordinate uids."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from agent_box.engine.image.errors import BadMirror, HostUnfit

# Debian's own names: whether a repository of the host is Debian's is told by what it serves.
CODENAMES: Final = frozenset(
    (
        *("buster", "bullseye", "bookworm", "trixie", "forky", "sid"),
        *("oldstable", "stable", "testing", "unstable"),
    )
)
KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
ARCHITECTURES: Final = {"x86_64": "amd64"}
PROGRAMS: Final = {  # and the package that brings it
    "mmdebstrap": "mmdebstrap",
    "mkfs.erofs": "erofs-utils",
    "fsck.erofs": "erofs-utils",
    "newuidmap": "uidmap",
    "newgidmap": "uidmap",
    "apt-get": "apt",
    "dpkg": "dpkg",
    "unshare": "util-linux",
    "tar": "tar",
}
SUBORDINATES: Final = 65536  # uids and gids that an installed Debian needs
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Of apt's options, how something is fetched; all else is the host's own affair.
FETCHING: Final = re.compile(
    r"Acquire::(?:(?:http|https|ftp)::|Check-Date|Check-Valid-Until|Max-ValidTime|Retries"
    r"|ForceIPv[46]|By-Hash|EnableSrvRecords)"
)


@dataclass(frozen=True)
class Repositories:
    """Where packages come from.

    Attributes:
        lines: of sources.list; empty leaves the choice to mmdebstrap, which knows Debian's
            own servers.
        options: of apt, how to fetch.
        secrets: texts that must not be found in an image: who we are to a mirror, a proxy.
    """

    lines: tuple[str, ...]
    options: tuple[str, ...]
    secrets: tuple[str, ...]


def check() -> None:
    """That this host can build.

    Raises:
        HostUnfit: with what to install or set, the first thing that is missing.
    """
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise HostUnfit(f"images are built on x86_64 alone; this machine is {machine}")
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        packages = " ".join(dict.fromkeys(PROGRAMS[name] for name in missing))
        raise HostUnfit(f"{', '.join(missing)} missing: apt-get install {packages}")
    if not KEYRING.is_file() and not _trusts_debian():
        raise HostUnfit("Debian's keys are missing: apt-get install debian-archive-keyring")
    for file in ("/etc/subuid", "/etc/subgid"):
        if subordinates(Path(file)) < SUBORDINATES:
            who = _account()
            raise HostUnfit(
                f"{who} has no {SUBORDINATES} subordinate ids in {file}: as root, run "
                f"usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {who} "
                "(another range where that one is taken)"
            )
    # The plain one first: where namespaces are forbidden, the other would leave a process that
    # waits for ever for its mapping.
    for options in ((), ("--map-auto", "--map-root-user", "--mount")):
        tried = subprocess.run(
            ["unshare", "--user", *options, "true"],
            env={"PATH": PATH, "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if tried.returncode != 0:
            said = tried.stderr.strip().splitlines()
            raise HostUnfit(
                f"no user namespace with subordinate ids: {said[-1] if said else 'no word'}; "
                + _forbidden()
            )


def _forbidden() -> str:
    """Why user namespaces are refused, as far as the host's settings say."""
    try:
        apparmor = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").read_text()
    except OSError:
        apparmor = ""
    if apparmor.strip() == "1":
        return (
            "AppArmor forbids it; while you build, as root: "
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0"
        )
    return "`agent-box doctor` says whether the host forbids them"


def _trusts_debian() -> bool:
    """Keys that apt trusts for everything, by their files' usual names."""
    return any(Path("/etc/apt/trusted.gpg.d").glob("debian-archive-*"))


def _account() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def subordinates(file: Path) -> int:
    """How many ids the largest range of this account has (subuid(5)). 0: none."""
    us = {_account(), str(os.getuid())}
    largest = 0
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    for line in lines:
        who, _, rest = line.partition(":")
        count = rest.rpartition(":")[2]
        if who in us and count.isascii() and count.isdigit():
            largest = max(largest, int(count))
    return largest


def scratch() -> Path:
    """Where an unpacked Debian lies while it is built: a directory that subordinate uids can
    enter. TMPDIR when that is one, else /var/tmp, else /tmp.

    Raises:
        HostUnfit: there is none.
    """
    named = os.environ.get("TMPDIR", "")
    for directory in (named, "/var/tmp", "/tmp"):
        if directory and os.path.isabs(directory) and _open_to_all(Path(directory)):
            return Path(directory)
    raise HostUnfit(
        "no temporary directory that subordinate ids can enter: set TMPDIR to one whose "
        "directories all have mode o+x"
    )


def _open_to_all(directory: Path) -> bool:
    try:
        directory = directory.resolve(strict=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            return False
        mount = os.statvfs(directory)
        if mount.f_flag & (os.ST_NODEV | os.ST_NOEXEC) == os.ST_NOEXEC:
            return False
        return all(d.stat().st_mode & stat.S_IXOTH for d in (directory, *directory.parents))
    except OSError:
        return False


def repositories(suite: str, mirror: str | None) -> Repositories:
    """Where packages of a suite come from: a mirror that was named, else those of this host's
    own apt configuration that serve Debian.

    Args:
        suite: e.g. trixie.
        mirror: a URL without the suite; nothing else is then asked for packages, so security
            updates come only if that mirror has them in its point releases.

    Raises:
        BadMirror: the URL is none.
    """
    options = tuple(_options())
    if mirror is not None:
        parts = urlsplit(mirror)
        if parts.scheme not in ("http", "https", "file") or not mirror.isprintable():
            raise BadMirror("the mirror must be an http, https or file URL")
        if any(c in mirror for c in ' []"'):
            raise BadMirror("the mirror's URL must have no spaces or brackets")
        lines = [_line(mirror, s, "") for s in (suite, f"{suite}-updates")]
        return Repositories(tuple(lines), options, tuple(_secrets([mirror], options)))
    main: dict[str, str] = {}
    security: dict[str, str] = {}
    for uri, release, signed_by in _targets():
        base, _, rest = release.replace("/updates", "-security").partition("-")
        if base not in CODENAMES:
            continue
        if rest == "security":
            security.setdefault(uri, signed_by)
        elif rest in ("", "updates"):
            main.setdefault(uri, signed_by)
    lines = []
    for uri, signed_by in main.items():
        lines += [_line(uri, s, signed_by) for s in (suite, f"{suite}-updates")]
    if main:
        lines += [_line(uri, f"{suite}-security", by) for uri, by in security.items()]
    return Repositories(tuple(lines), options, tuple(_secrets([*main, *security], options)))


def _line(uri: str, release: str, signed_by: str) -> str:
    keyrings = [name for name in signed_by.split(",") if name.startswith("/")]
    if KEYRING.is_file() and str(KEYRING) not in keyrings:
        keyrings.insert(0, str(KEYRING))
    how = f"[signed-by={','.join(keyrings)}] " if keyrings else ""
    return f"deb {how}{uri} {release} main"


def _targets() -> Iterator[tuple[str, str, str]]:
    """What the host's apt fetches: URL, release, keyrings."""
    fields = "$(REPO_URI)\t$(RELEASE)\t$(COMPONENT)\t$(SIGNED_BY)"
    for line in _apt("apt-get", "indextargets", "--format", fields, "Created-By: Packages"):
        uri, release, component, signed_by = line.split("\t")
        if component == "main":
            yield uri, release, "" if signed_by.startswith("$") else signed_by


def _options() -> Iterator[str]:
    for line in _apt("apt-config", "dump", "--no-empty", "--format", '%F "%v";%n', "Acquire"):
        if FETCHING.match(line) and line.isprintable():
            yield line


def _apt(*command: str) -> list[str]:
    done = subprocess.run(
        command,
        env={"PATH": PATH, "LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    return done.stdout.splitlines() if done.returncode == 0 else []


def _secrets(uris: list[str], options: tuple[str, ...]) -> Iterator[str]:
    for uri in uris:
        parts = urlsplit(uri)
        if parts.password:
            yield f"{parts.username}:{parts.password}"
            yield parts.password
    for option in options:
        name, _, value = option.rstrip(";").partition(" ")
        if "proxy" in name.lower() and "://" in value:
            yield urlsplit(value.strip('"')).netloc
    for name, value in os.environ.items():
        if name.lower() in ("http_proxy", "https_proxy", "ftp_proxy") and "://" in value:
            yield urlsplit(value).netloc


def environment(epoch: int) -> dict[str, str]:
    """What mmdebstrap gets: how to reach a mirror, and nothing of who we are."""
    kept = {"PATH": PATH, "LC_ALL": "C.UTF-8", "SOURCE_DATE_EPOCH": str(epoch)}
    for name, value in os.environ.items():
        if name.lower() in ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy"):
            kept[name] = value
    return kept
