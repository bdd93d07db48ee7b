"""Packages and kernels are read, and what is none is refused in one line."""

from __future__ import annotations

import ctypes
import gzip
import io
import lzma
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.engine.image import archive
from agent_box.engine.image.archive import ArchiveError

KERNEL = b"\x7fELF" + bytes(range(256)) * 40


def zstd(data: bytes) -> bytes:
    library = ctypes.CDLL("libzstd.so.1")
    library.ZSTD_compress.restype = ctypes.c_size_t
    target = ctypes.create_string_buffer(len(data) + 1024)
    size = library.ZSTD_compress(
        target, ctypes.c_size_t(len(target)), data, ctypes.c_size_t(len(data)), 3
    )
    return target.raw[:size]


def bzimage(payload: bytes, size: int, setup: int = 3) -> bytes:
    """An image as the kernel's build makes it: setup code, then code with the payload in it."""
    payload += size.to_bytes(4, "little")
    head = bytearray((setup + 1) * 512)
    head[0x1F1] = setup
    head[0x202:0x206] = b"HdrS"
    head[0x248:0x24C] = (100).to_bytes(4, "little")
    head[0x24C:0x250] = len(payload).to_bytes(4, "little")
    return bytes(head) + bytes(100) + payload + bytes(50)


@pytest.mark.parametrize("pack", [zstd, lzma.compress, gzip.compress])
def test_the_kernel_in_a_bzimage(pack: object) -> None:
    assert callable(pack)
    assert archive.vmlinux(bzimage(pack(KERNEL), len(KERNEL))) == KERNEL


def test_what_is_no_kernel() -> None:
    good = bzimage(zstd(KERNEL), len(KERNEL))
    for data, said in (
        (b"", "is no bzImage"),
        (b"\0" * 2000, "is no bzImage"),
        (good[:2200], "cut off"),
        (bzimage(zstd(KERNEL), 0), "says that it has 0 bytes"),
        (bzimage(zstd(KERNEL), archive.VMLINUX_MAX + 1), "says that it has"),
        (bzimage(zstd(KERNEL), len(KERNEL) - 1), "zstd refuses it"),
        (bzimage(zstd(KERNEL), len(KERNEL) + 1), "zstd refuses it"),
        (bzimage(zstd(b"no ELF"), 6), "is no ELF file"),
        (bzimage(b"LZ4?" * 9, 100), "not known here"),
        (bzimage(lzma.compress(KERNEL)[:200], len(KERNEL)), "cannot be unpacked"),
    ):
        with pytest.raises(ArchiveError, match=said):
            archive.vmlinux(data)


@given(st.binary(max_size=400))
def test_any_payload_is_refused(data: bytes) -> None:
    with pytest.raises(ArchiveError):
        archive.vmlinux(bzimage(data, 1000))


def deb(path: Path, files: dict[str, bytes], *, pack: str = "xz") -> Path:
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode=f"w:{pack}") as made:
        for name, content in files.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("./link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        made.addfile(link)
    ending = f".{pack}" if pack else ""
    members = [
        ("debian-binary", b"2.0\n"),
        ("control.tar.xz", b"odd"),
        (f"data.tar{ending}", tar.getvalue()),
    ]
    body = b"!<arch>\n"
    for name, content in members:
        body += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        body += content + b"\n" * (len(content) % 2)
    path.write_bytes(body)
    return path


@pytest.mark.parametrize("pack", ["xz", "gz", ""])
def test_the_files_of_a_package(tmp_path: Path, pack: str) -> None:
    files = {"boot/vmlinuz-6": b"k" * 1001, "usr/bin/busybox": b"b"}
    assert dict(archive.deb_files(deb(tmp_path / "a.deb", files, pack=pack))) == files


def test_what_is_no_package(tmp_path: Path) -> None:
    bad = tmp_path / "bad.deb"
    whole = deb(tmp_path / "a.deb", {"a": b"b" * 5000}).read_bytes()
    for data in (b"", b"PK\3\4", b"!<arch>\n", b"!<arch>\n" + b"x" * 60, whole[:300]):
        bad.write_bytes(data)
        with pytest.raises(ArchiveError, match=r"bad\.deb"):
            list(archive.deb_files(bad))
    bad.write_bytes(whole.replace(b"data.tar.xz ", b"data.tar.zst"))
    with pytest.raises(ArchiveError, match=r"cannot read data\.tar\.zst"):
        list(archive.deb_files(bad))
