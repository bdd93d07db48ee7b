"""Images by digest, verified: each file's bytes are hashed once, and again when it changed.

The kernel changes a file's ctime at every write and lets nobody set it, so a file with the
same number, size and times as one that was hashed has the same bytes, unless the disk lies.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Final

from agent_box.helper import contract, wire
from agent_box.helper.places import Places
from agent_box.helper.wire import Refused

FILE: Final = "verified.json"
MOST: Final = 256  # that are remembered
_CHUNK: Final = 1 << 20
_SEEN: Final = contract.Many(
    contract.Struct((("digest", contract.DIGEST), ("mark", contract.Text(200)))), MOST
)


class Images:
    """Remembers what was verified, also after a restart."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._seen: dict[str, str] = _read(places.own)

    def path(self, digest: str) -> str:
        """Where a verified image lies.

        Raises:
            Refused: image_missing or image_corrupt, with the digest; host.
        """
        try:
            fd = self._places.blob(digest)
        except FileNotFoundError:
            raise Refused("image_missing", digest) from None
        except OSError as error:
            raise Refused("host", f"image {digest}: {error.strerror}") from error
        try:
            mark = _mark(fd)
            if self._seen.get(digest) != mark:
                if _hash(fd) != digest or _mark(fd) != mark:
                    raise Refused("image_corrupt", digest)
                self._remember(digest, mark)
        except OSError as error:
            raise Refused("host", f"image {digest}: {error.strerror}") from error
        finally:
            os.close(fd)
        return os.fspath(self._places.blob_path(digest))

    def _remember(self, digest: str, mark: str) -> None:
        self._seen.pop(digest, None)
        self._seen[digest] = mark
        while len(self._seen) > MOST:
            del self._seen[next(iter(self._seen))]
        rows = [{"digest": d, "mark": m} for d, m in self._seen.items()]
        try:
            replace_file(self._places.own, FILE, json.dumps(rows).encode())
        except OSError:
            pass  # it is hashed again after the next start


def _mark(fd: int) -> str:
    found = os.fstat(fd)
    parts = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return " ".join(map(str, parts))


def _hash(fd: int) -> str:
    digest = hashlib.sha256()
    with open(os.dup(fd), "rb", buffering=0) as file:
        file.seek(0)
        buffer = memoryview(bytearray(_CHUNK))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _read(directory: int) -> dict[str, str]:
    try:
        fd = os.open(FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        with open(fd, "rb") as file:
            rows = wire.check(_SEEN, wire.decode(file.read(contract.MESSAGE_BYTES)))
    except (OSError, wire.WireError):
        return {}  # then all is hashed anew
    return {row["digest"]: row["mark"] for row in rows}


def replace_file(directory: int, name: str, data: bytes) -> None:
    """Writes a small file in one step.

    Raises:
        OSError: as the kernel says; the old one is still there.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(f".{name}", flags, 0o600, dir_fd=directory), "wb") as file:
        file.write(data)
    os.rename(f".{name}", name, src_dir_fd=directory, dst_dir_fd=directory)
