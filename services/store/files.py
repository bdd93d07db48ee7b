"""The store's key directory on the disk: the custody file and, for `key-file`, the key.

Every file here is a private one: a regular file of ours with mode 0600 in a directory of
ours with mode 0700. Anything else is refused and never repaired, since whoever could change
it could have read or replaced it. Every change is a new file, synced, and a rename, synced.

Standard library only: `keysource` reads with it before every start of the store.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from agent_box.store import custody as kept
from agent_box.store.custody import Custody

KEY_BYTES: Final = 32
_NEW: Final = ".new"


class FileRefused(Exception):
    """A file that is not as it must be. The message names it and says what to do."""


def check_directory(path: Path) -> None:
    """Raises FileRefused unless `path` is a directory of ours that nobody else may enter."""
    try:
        facts = os.lstat(path)
    except OSError as error:
        raise FileRefused(f"{path}: {error.strerror}") from None
    if not stat.S_ISDIR(facts.st_mode):
        raise FileRefused(f"{path} is not a directory")
    _check_owner(path, facts)
    if facts.st_mode & 0o077:
        raise FileRefused(_mode(path, facts, 0o700))


def read_private(path: Path, limit: int) -> bytes:
    """The whole of a private file of at most `limit` bytes.

    Raises:
        FileNotFoundError: there is none.
        FileRefused: it is not private, not a regular file, too large, or cannot be read.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FileRefused(f"{path}: {error.strerror}") from None
    try:
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode):
            raise FileRefused(f"{path} is not a regular file")
        _check_owner(path, facts)
        if facts.st_mode & 0o077:
            raise FileRefused(_mode(path, facts, 0o600))
        content = b""
        while len(content) <= limit:
            piece = os.read(file, limit + 1 - len(content))
            if not piece:
                return content
            content += piece
        raise FileRefused(f"{path} is larger than {limit} bytes")
    except OSError as error:
        raise FileRefused(f"{path}: {error.strerror}") from None
    finally:
        os.close(file)


def write_private(path: Path, content: bytes) -> None:
    """Makes or replaces a private file: after a crash it is the old one or the new one.

    Raises:
        OSError: nothing has changed, but for a leftover named ``*.new``.
    """
    new = path.with_name(path.name + _NEW)
    write_new(new, content)
    os.rename(new, path)
    sync_directory(path.parent)


def write_new(path: Path, content: bytes) -> None:
    """Makes a private file and syncs it. A leftover of that name is taken away first."""
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
    finally:
        os.close(file)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class KeyDirectory:
    """``keys/store/``: ``custody.json``, and ``master-<name>.key`` for `key-file`.

    The way to a new key file is: the key as ``*.key.new``, the custody file that names it,
    the rename of the key. Whatever names a key that lies there only as ``.new`` was cut off
    before the third step, and `key` finishes it.
    """

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        self.custody_path: Final = path / kept.FILE

    def key_path(self, name: str) -> Path:
        return self.path / f"master-{name}.key"

    def custody(self) -> Custody | None:
        """None when there is no custody file. Raises FileRefused."""
        check_directory(self.path)
        try:
            untrusted = read_private(self.custody_path, kept.SIZE_MAX)
        except FileNotFoundError:
            return None
        try:
            return Custody.decode(untrusted)
        except ValueError as error:
            raise FileRefused(f"{self.custody_path} is damaged: {error}") from None

    def has_keys(self) -> bool:
        """Whether a key lies here that a custody file once named."""
        return any(not path.name.endswith(_NEW) for path in self._keys())

    def begin_key(self, name: str, key: bytes) -> None:
        """First step: the key is on the disk, and nothing names it. Raises OSError."""
        write_new(self._new_key_path(name), key)
        sync_directory(self.path)

    def replace(self, custody: Custody) -> None:
        """Second step: from here on, this is how the key is kept. Raises OSError."""
        write_private(self.custody_path, custody.encode())

    def finish_key(self, name: str) -> None:
        """Third step. Raises OSError; then `key` does it at the next start."""
        os.rename(self._new_key_path(name), self.key_path(name))
        sync_directory(self.path)

    def key(self, name: str) -> bytes:
        """The key of 32 bytes that a custody file of `key-file` names.

        Raises:
            FileRefused: it is missing, not private or not a key.
            OSError: a change that a crash cut off could not be finished.
        """
        path = self.key_path(name)
        try:
            key = read_private(path, KEY_BYTES)
        except FileNotFoundError:
            try:
                key = read_private(self._new_key_path(name), KEY_BYTES)
            except FileNotFoundError:
                raise FileRefused(f"the key file {path} is missing") from None
            self.finish_key(name)
        if len(key) != KEY_BYTES:
            raise FileRefused(f"the key file {path} is damaged: it has {len(key)} bytes")
        return key

    def tidy(self, custody: Custody) -> None:
        """Removes every key file but the one that `custody` names. Raises OSError."""
        wanted = self.key_path(custody.key) if custody.protection == "key-file" else None
        stale = [path for path in self._keys() if path != wanted]
        for path in stale:
            path.unlink(missing_ok=True)
        if stale:
            sync_directory(self.path)

    def _new_key_path(self, name: str) -> Path:
        path = self.key_path(name)
        return path.with_name(path.name + _NEW)

    def _keys(self) -> list[Path]:
        return [*self.path.glob("master-*.key"), *self.path.glob("master-*.key.new")]


def _check_owner(path: Path, facts: os.stat_result) -> None:
    if facts.st_uid != os.geteuid():
        raise FileRefused(
            f"{path} belongs to uid {facts.st_uid}, not to uid {os.geteuid()} that runs this"
        )


def _mode(path: Path, facts: os.stat_result, wanted: int) -> str:
    return (
        f"{path} has mode {stat.S_IMODE(facts.st_mode):04o}, so others may read or replace it; "
        f"if nobody did, `chmod {wanted:o}` it"
    )
