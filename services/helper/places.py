"""The helper's directories. Everything below them is reached by descriptors of directories and
without following links, so that nothing that lies there can lead elsewhere.

    runtime/helper/sock            where the engine asks
    runtime/vm/shim/ID/            sockets of a machine: vsock, qmp, ctl; a copy of its state
    runtime/vm/worker/ID/          ctl, where its network worker listens for netstack
    runtime/vm/broker/ID/          where the broker listens for that worker
    runtime/host/                  the host's resolver files, for workers to read
    state/instances/ID/            lock, data.img, state.json, console.N, messages.N
    state/images/blobs/sha256/     images by digest
    state/helper/                  its own: lock, what it measured and verified
    state/keys/engine/helper.key   what the engine proves itself with

An instance's directory in state/instances is the first thing that is made of it and the last
that is removed; so what is left of one is always known.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROLES: Final = ("shim", "worker", "broker")
SOCKET: Final = "sock"
LOCK: Final = "lock"
DATA: Final = "data.img"
_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Places:
    """Opens the directories, makes those that are missing (0700), and keeps them open.

    Args:
        runtime, state: absolute; exist and are ours.

    Raises:
        OSError: one cannot be made or is not a directory of ours.
    """

    def __init__(self, runtime: Path, state: Path) -> None:
        self.runtime_path = runtime
        self.state_path = state
        self.runtime = _open(os.fspath(runtime), None)
        self.state = _open(os.fspath(state), None)
        self.socket = make(self.runtime, "helper")
        vm = make(self.runtime, "vm")
        self.roles = {role: make(vm, role) for role in ROLES}
        os.close(vm)
        self.instances = make(self.state, "instances")
        self.own = make(self.state, "helper")

    def key(self) -> bytes:
        """The key in hexadecimal digits, one line.

        Raises:
            OSError: it is missing, or not a file of ours that is closed to others.
            ValueError: it is not a key.
        """
        path = self.state_path / "keys" / "engine" / "helper.key"
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise OSError(errno.EACCES, "not ours, or open to others", str(path))
            text = file.read(200)
        key = bytes.fromhex(text.decode("ascii").strip())
        if len(key) != 32:
            raise ValueError(f"{path} holds no key")
        return key

    def ids(self) -> list[str]:
        """Every id of which anything is left, in order."""
        found = set(os.listdir(self.instances))
        for role in self.roles.values():
            found.update(os.listdir(role))
        return sorted(name for name in found if _ID.fullmatch(name))

    @contextmanager
    def instance(self, name: str) -> Iterator[int]:
        """Its directory in state/instances.

        Raises:
            FileNotFoundError: there is none.
        """
        fd = _open(name, self.instances)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def room(self, role: str, name: str) -> Iterator[int]:
        """Its directory of sockets.

        Raises:
            FileNotFoundError: there is none.
        """
        fd = _open(name, self.roles[role])
        try:
            yield fd
        finally:
            os.close(fd)

    def host_files(self) -> Path:
        """The directory with copies of the host's resolver files, made if it is missing.

        Raises:
            OSError: it cannot be made, or what lies there is not ours.
        """
        os.close(make(self.runtime, "host"))
        return self.runtime_path / "host"

    def blob_path(self, digest: str) -> Path:
        return self.state_path / "images" / "blobs" / "sha256" / digest

    def blob(self, digest: str) -> int:
        """An image's file, open for reading.

        Raises:
            FileNotFoundError: there is none.
            OSError: what lies there is not a plain file of ours.
        """
        step = os.dup(self.state)
        try:
            for part in ("images", "blobs", "sha256"):
                step, last = _open(part, step, private=False), step
                os.close(last)
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            fd = os.open(digest, flags, dir_fd=step)
        finally:
            os.close(step)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a plain file", digest)
        return fd


def make(parent: int, name: str) -> int:
    """A directory of ours below an open one, made if it is missing; its descriptor.

    Raises:
        OSError: it cannot be made, or what lies there is not such a directory.
    """
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        pass
    return _open(name, parent)


def _open(name: str, parent: int | None, *, private: bool = True) -> int:
    """Args:
    private: nobody else may even read it; otherwise nobody else may write.
    """
    fd = os.open(name, _DIRECTORY, dir_fd=parent)
    found = os.fstat(fd)
    forbidden = 0o077 if private else 0o022
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & forbidden:
        os.close(fd)
        raise OSError(errno.EACCES, "not ours, or open to others", name)
    return fd


def remove(parent: int, name: str, keep: frozenset[str] = frozenset()) -> bool:
    """Removes a directory and all in it, without following links or leaving its file system.

    Args:
        keep: names that lie directly in it and are to be removed last.

    Returns:
        Whether it is gone.
    """
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        os.unlink(name, dir_fd=parent)
        return absent(parent, name)
    try:
        _empty(fd, os.fstat(fd).st_dev, keep)
        for last in keep:
            try:
                os.unlink(last, dir_fd=fd)
            except FileNotFoundError:
                pass
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)
    return absent(parent, name)


def absent(parent: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return True
    return False


def _empty(directory: int, device: int, keep: frozenset[str]) -> None:
    if os.fstat(directory).st_dev != device:
        raise OSError(errno.EXDEV, "something is mounted there")
    for name in os.listdir(directory):
        if name in keep:
            continue
        if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            fd = os.open(name, _DIRECTORY, dir_fd=directory)
            try:
                _empty(fd, device, frozenset())
            finally:
                os.close(fd)
            os.rmdir(name, dir_fd=directory)
        else:
            os.unlink(name, dir_fd=directory)
