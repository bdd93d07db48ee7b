"""The initramfs: what is in it, in which order, the same bytes each time."""

from __future__ import annotations

import lzma
import subprocess
from pathlib import Path

import pytest

from agent_box.engine.image import initramfs
from agent_box.engine.image.archive import ArchiveError


def module(*needs: str) -> bytes:
    return b"\x7fELF\0license=GPL\0depends=" + ",".join(needs).encode() + b"\0name=x\0"


ALL = {
    "virtio_mmio.ko.xz": lzma.compress(module()),
    "virtio_blk.ko.xz": lzma.compress(module()),
    "virtio_balloon.ko": module(),
    "virtio-rng.ko.xz": lzma.compress(module("rng-core")),
    "rng-core.ko": module(),
    "erofs.ko": module("netfs", "xxhash"),
    "netfs.ko": module(),
    "xxhash.ko": module(),
    "overlay.ko": module(),
    "ext4.ko": module("mbcache", "jbd2"),
    "mbcache.ko": module(),
    "jbd2.ko": module(),
    "tun.ko": module(),
    "vsock.ko": module(),
    "vmw_vsock_virtio_transport.ko": module("vmw_vsock_virtio_transport_common"),
    "vmw_vsock_virtio_transport_common.ko": module("vsock"),
    "unrelated.ko": module(),
}
BUILTIN = "kernel/crypto/crc32c_generic.ko\nkernel/drivers/virtio/virtio.ko\n"


def test_each_module_comes_after_what_it_needs() -> None:
    ordered = list(initramfs.order(ALL, BUILTIN))
    for before, after in (
        ("rng_core", "virtio_rng"),
        ("xxhash", "erofs"),
        ("jbd2", "ext4"),
        ("vsock", "vmw_vsock_virtio_transport_common"),
        ("vmw_vsock_virtio_transport_common", "vmw_vsock_virtio_transport"),
    ):
        assert ordered.index(before) < ordered.index(after)
    assert len(set(ordered)) == len(ordered)
    assert "unrelated" not in ordered
    assert all(content.startswith(b"\x7fELF") for content in initramfs.order(ALL, BUILTIN).values())


def test_what_is_built_in_is_not_loaded() -> None:
    fewer = {name: content for name, content in ALL.items() if name != "ext4.ko"}
    ordered = initramfs.order(fewer, BUILTIN + "kernel/fs/ext4/ext4.ko\n")
    assert "ext4" not in ordered
    assert "jbd2" not in ordered


def test_a_module_that_is_missing_is_named() -> None:
    fewer = {name: content for name, content in ALL.items() if name != "netfs.ko"}
    with pytest.raises(ArchiveError, match="no module netfs, which erofs needs"):
        initramfs.order(fewer, BUILTIN)
    with pytest.raises(ArchiveError, match="no module crc32c, which a machine needs"):
        initramfs.order(ALL, "")


def test_the_same_bytes_each_time() -> None:
    backwards = dict(reversed(ALL.items()))
    assert initramfs.make(b"busybox", ALL, BUILTIN) == initramfs.make(
        b"busybox", backwards, BUILTIN
    )


def entries(data: bytes) -> dict[str, tuple[int, bytes, int, int]]:
    """Mode, content, and device numbers of each entry, read as the kernel does."""
    found = {}
    at = 0
    while True:
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + i * 8 : at + 14 + i * 8], 16) for i in range(13)]
        _, mode, uid, gid, _, mtime, size, _, _, major, minor, length, check = fields
        assert (uid, gid, mtime, check) == (0, 0, 0, 0)
        name = data[at + 110 : at + 110 + length - 1].decode()
        at += (110 + length + 3) // 4 * 4
        if name == "TRAILER!!!":
            assert at == len(data)
            return found
        found[name] = (mode, data[at : at + size], major, minor)
        at += (size + 3) // 4 * 4


def test_what_is_in_it() -> None:
    found = entries(initramfs.make(b"busybox", ALL, BUILTIN))
    assert found["bin/busybox"][:2] == (0o100755, b"busybox")
    assert found["dev/console"][0] == 0o20600
    assert found["dev/console"][2:] == (5, 1)
    assert found["init"][0] == 0o100755
    names = found["modules/list"][1].decode().split()
    assert names == list(initramfs.order(ALL, BUILTIN))
    assert all(found[f"modules/{name}.ko"][0] == 0o100644 for name in names)
    directories = {name for name, entry in found.items() if entry[0] == 0o40755}
    assert directories == set(initramfs.DIRECTORIES)


def test_the_script_is_one_that_a_shell_reads(tmp_path: Path) -> None:
    script = tmp_path / "init"
    script.write_bytes(entries(initramfs.make(b"", ALL, BUILTIN))["init"][1])
    assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
