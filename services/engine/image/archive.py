"""Debian packages and kernel images as files: what is in them, without installing them.

What is read here comes from packages whose signatures apt has checked.
"""

from __future__ import annotations

import ctypes
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

VMLINUX_MAX: Final = 256 << 20  # bytes; a cloud kernel has 60 MB
_AR_MAGIC: Final = b"!<arch>\n"


class ArchiveError(ValueError):
    """The file is not what it should be. One line."""


def deb_files(deb: Path) -> Iterator[tuple[str, bytes]]:
    """Path (without a leading ``./``) and content of each regular file of a package.

    Source: deb(5): an ar archive whose member data.tar holds the files.

    Raises:
        ArchiveError: it is no package, or packed in a way that Debian does not use.
        OSError: it cannot be read.
    """
    for name, data in _ar(deb.read_bytes()):
        if not name.startswith("data.tar"):
            continue
        if name not in ("data.tar", "data.tar.xz", "data.tar.gz"):
            raise ArchiveError(f"{deb.name}: cannot read {name}")
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:*") as tar:
                for member in tar:
                    if member.isreg() and (file := tar.extractfile(member)) is not None:
                        yield member.name.removeprefix("./"), file.read()
        except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError) as error:
            raise ArchiveError(f"{deb.name}: {error}") from None
        return
    raise ArchiveError(f"{deb.name} is no Debian package")


def _ar(data: bytes) -> Iterator[tuple[str, bytes]]:
    if not data.startswith(_AR_MAGIC):
        return
    at = len(_AR_MAGIC)
    while at + 60 <= len(data):
        header = data[at : at + 60]
        try:
            size = int(header[48:58])
        except ValueError:
            return
        yield header[:16].decode("ascii", "replace").strip().rstrip("/"), data[at + 60 :][:size]
        at += 60 + size + size % 2


def vmlinux(bzimage: bytes) -> bytes:
    """The uncompressed kernel in a bzImage, an ELF file.

    Source: Documentation/arch/x86/boot.rst of Linux: setup_sects at 0x1f1, the magic HdrS at
    0x202, payload_offset at 0x248 (from the end of the setup code), payload_length at 0x24c.
    The payload ends with its uncompressed length, four bytes.

    Raises:
        ArchiveError: it is no bzImage, or compressed in a way that we cannot undo.
    """
    if bzimage[0x202:0x206] != b"HdrS":
        raise ArchiveError("the kernel is no bzImage")
    setup = (bzimage[0x1F1] or 4) + 1
    offset = int.from_bytes(bzimage[0x248:0x24C], "little")
    length = int.from_bytes(bzimage[0x24C:0x250], "little")
    start = setup * 512 + offset
    payload = bzimage[start : start + length]
    if len(payload) != length or length < 8:
        raise ArchiveError("the kernel is cut off")
    size = int.from_bytes(payload[-4:], "little")
    if not 0 < size <= VMLINUX_MAX:
        raise ArchiveError(f"the kernel says that it has {size} bytes")
    try:
        kernel = _unpacked(payload, size)
    except (lzma.LZMAError, zlib.error, EOFError) as error:
        raise ArchiveError(f"the kernel cannot be unpacked: {error}") from None
    if not kernel.startswith(b"\x7fELF"):
        raise ArchiveError("the kernel is no ELF file")
    return kernel


def _unpacked(payload: bytes, size: int) -> bytes:
    if payload.startswith(b"\x28\xb5\x2f\xfd"):
        return _zstd(payload[:-4], size)
    if payload.startswith(b"\xfd7zXZ\x00"):
        return lzma.decompress(payload[:-4])
    if payload.startswith(b"\x1f\x8b"):
        return zlib.decompressobj(31).decompress(payload, size)  # gzip has the length inside
    raise ArchiveError("the kernel is compressed in a way that is not known here")


def _zstd(data: bytes, size: int) -> bytes:
    """One zstd frame. By libzstd, which dpkg itself needs, since Python 3.13 has none."""
    try:
        library = ctypes.CDLL("libzstd.so.1")
    except OSError:
        raise ArchiveError("libzstd.so.1 is missing: install the package libzstd1") from None
    library.ZSTD_decompress.restype = ctypes.c_size_t
    library.ZSTD_decompress.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t),
    ]
    target = ctypes.create_string_buffer(size)
    got = library.ZSTD_decompress(target, size, data, len(data))
    if got != size:  # an error is a huge number
        raise ArchiveError("the kernel cannot be unpacked: zstd refuses it")
    return target.raw
