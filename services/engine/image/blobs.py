"""Files by their sha256: what has its final name is whole, and nobody writes to it again.

A file is written below `work`, synced, made read-only and only then renamed. A run that is
killed leaves its directory in `work`, which the next run removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

import msgspec

from agent_box.process.paths import Paths, make_private

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_CHUNK: Final = 1 << 20


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: its sha256 in lowercase hex, and how many bytes it has."""

    sha256: str
    size: int


def digest(untrusted: str) -> str:
    """A sha256 in lowercase hex.

    Raises:
        ValueError: it is none.
    """
    if not _DIGEST.fullmatch(untrusted):
        raise ValueError("a sha256 in 64 lowercase hex digits")
    return untrusted


def make(paths: Paths) -> None:
    """Makes the directories of the image cache, each 0700.

    Raises:
        PathsError: one cannot be made, or is open to others.
    """
    make_private(paths.state)  # it may be the first thing that is ever made here
    for name in ("", "blobs", "blobs/sha256", "manifests", "layers", "work", "partial"):
        make_private(paths.images / name)
    for name in ("keys", "trusted"):
        make_private(paths.images / name)


def hash_file(path: Path) -> Part:
    """The digest and size of a file as it is now.

    Raises:
        OSError: it cannot be read, or is a link.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", 0) as file:
        return hash_open(file)


def hash_open(file: IO[bytes]) -> Part:
    """The same for the rest of an open file."""
    state, size = hashlib.sha256(), 0
    while piece := file.read(_CHUNK):
        state.update(piece)
        size += len(piece)
    return Part(state.hexdigest(), size)


def add(paths: Paths, file: Path) -> Part:
    """Moves a file of `work` among the blobs. One that is there already stays.

    Raises:
        OSError: the disk is full, or the like.
    """
    part = hash_file(file)
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())
        os.fchmod(handle.fileno(), 0o444)
    final = paths.blob(part.sha256)
    os.rename(file, final)
    sync_directory(final.parent)
    return part


def add_bytes(paths: Paths, work: Path, data: bytes) -> Part:
    """The same for bytes that are in memory.

    Raises:
        OSError: the disk is full, or the like.
    """
    descriptor, name = tempfile.mkstemp(dir=work)
    with open(descriptor, "wb") as file:
        file.write(data)
    return add(paths, Path(name))


def write_atomic(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replaces a small file; a reader sees the old one or the new one.

    Raises:
        OSError: the disk is full, or the like.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        os.rename(name, path)
    except BaseException:
        os.unlink(name)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def held(paths: Paths) -> Iterator[str]:
    """The digest of every blob."""
    try:
        names = sorted(os.listdir(paths.images / "blobs" / "sha256"))
    except FileNotFoundError:
        return
    yield from (name for name in names if _DIGEST.fullmatch(name))


@contextmanager
def locked(paths: Paths, *, shared: bool = False) -> Iterator[None]:
    """Nobody else publishes or removes images meanwhile. Waits for its turn.

    Args:
        shared: for who only relies on what is there, e.g. until a record names it; then
            others of that kind may go on beside.

    Raises:
        OSError: the lock cannot be made.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(paths.images / "lock", flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def workshop(above: Path, mode: int = 0o700) -> Iterator[Path]:
    """A directory of one run, gone afterwards; those of runs that were killed go now.

    Args:
        above: where it lies.
        mode: 0o711 where subordinate uids have to pass through.

    Raises:
        OSError: it cannot be made.
    """
    for left in above.glob("agent-box-work-*"):
        _sweep(left)
    made = Path(tempfile.mkdtemp(prefix="agent-box-work-", dir=above))
    descriptor = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.chmod(made, mode)
        yield made
    finally:
        remove_tree(made)
        os.close(descriptor)


def _sweep(left: Path) -> None:
    """Removes it unless its run still holds it, or another account made it."""
    try:
        descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # it went away, or is not ours to look into
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        remove_tree(left)
    finally:
        os.close(descriptor)


def remove_tree(directory: Path) -> None:
    """Removes a directory, also one with files of subordinate uids in it."""
    shutil.rmtree(directory, ignore_errors=True)
    if not directory.exists():
        return
    subprocess.run(
        [*OWN_NAMESPACE, "rm", "-rf", "--one-file-system", "--", str(directory)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )


# A user namespace in which we are root and own the files of our subordinate uids too.
OWN_NAMESPACE: Final = ("unshare", "--user", "--map-auto", "--map-root-user", "--")
