"""CURVE key pairs, one per role: an identity is the possession of a secret key.

Layout below one directory: `<role>/curve.secret` (seen by that role only) and
`public/<role>` (seen by all). Both are Z85 text of 40 characters, files 0600 and directories
0700.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import zmq

SECRET_FILE: Final = "curve.secret"
PUBLIC_DIR: Final = "public"
_Z85: Final = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z")


class KeysError(ValueError):
    """A key that cannot be used. Its text names the file and what is wrong, never the key."""


class KeyPair:
    """A CURVE key pair that does not show its secret half.

    Attributes:
        public: Z85, 40 bytes.
    """

    __slots__ = ("_secret", "public")

    def __init__(self, public: bytes, secret: bytes) -> None:
        self.public = public
        self._secret = secret

    def reveal(self) -> bytes:
        """The secret half, Z85, 40 bytes: for `socket.curve_secretkey` and nothing else."""
        return self._secret

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public.decode()}, secret=***)"

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a secret key is not pickled")


def fresh() -> KeyPair:
    """A new random key pair."""
    return KeyPair(*zmq.curve_keypair())


def make_keys(directory: Path, roles: Iterable[str]) -> None:
    """Makes what is missing and leaves what is there. Killed at any moment, it can run again.

    Args:
        directory: of all keys; made when missing.

    Raises:
        KeysError: a key is there and is not one, or does not belong together.
        OSError: the directory cannot be written.
    """
    _make_directory(directory)
    _make_directory(directory / PUBLIC_DIR)
    for role in roles:
        home = directory / role
        _make_directory(home)
        if not os.path.lexists(home / SECRET_FILE):
            _write(home / SECRET_FILE, fresh().reveal())
        pair = load_secret(home)
        shown = directory / PUBLIC_DIR / role
        if not os.path.lexists(shown):
            _write(shown, pair.public)
        if _read(shown) != pair.public:
            raise KeysError(f"{shown}: does not belong to {home / SECRET_FILE}")


def load_secret(directory: Path) -> KeyPair:
    """The key pair of one role from its own directory. Raises KeysError."""
    secret = _read(directory / SECRET_FILE)
    return KeyPair(zmq.curve_public(secret), secret)


def load_public(directory: Path, role: str) -> bytes:
    """The public key of `role` from the directory of public keys, Z85. Raises KeysError."""
    return _read(directory / role)


def load_all_public(directory: Path, roles: Iterable[str]) -> dict[str, bytes]:
    """The public keys of `roles`. Raises KeysError."""
    return {role: load_public(directory, role) for role in roles}


def _make_directory(path: Path) -> None:
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=False)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise KeysError(f"{path}: not a directory")
    if info.st_uid != os.geteuid():
        raise KeysError(f"{path}: belongs to another user")
    if info.st_mode & 0o077:
        raise KeysError(f"{path}: mode is {stat.S_IMODE(info.st_mode):04o}, must be 0700")


def _read(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise KeysError(f"{path}: {os.strerror(error.errno or 0)}") from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise KeysError(f"{path}: not a regular file")
        if info.st_uid != os.geteuid():
            raise KeysError(f"{path}: belongs to another user")
        if info.st_mode & 0o077:
            raise KeysError(f"{path}: mode is {stat.S_IMODE(info.st_mode):04o}, must be 0600")
        untrusted = os.read(fd, 64)
    finally:
        os.close(fd)
    text = untrusted.removesuffix(b"\n")
    if not _Z85.match(text):
        raise KeysError(f"{path}: not a CURVE key")
    return text


def _write(path: Path, text: bytes) -> None:
    """Appears complete or not at all, and never over another."""
    part = path.with_name(f".{path.name}.{os.urandom(8).hex()}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.write(fd, text + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)
        with suppress(FileExistsError):  # another start was faster: its key is the key
            os.link(part, path)
    finally:
        os.unlink(part)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
