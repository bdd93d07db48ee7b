"""The initramfs: busybox, the modules that a machine needs, and `init.sh`. Made in memory.

Modules are loaded here and nowhere else: the variants have none, so that a kernel can be
replaced without them.
"""

from __future__ import annotations

import lzma
from collections.abc import Mapping
from importlib import resources
from typing import Final

from agent_box.engine.image.archive import ArchiveError

MODULES: Final = (
    *("virtio_mmio", "virtio_blk", "virtio_balloon", "virtio_rng"),
    *("erofs", "overlay", "crc32c", "ext4", "tun", "vsock", "vmw_vsock_virtio_transport"),
)
ALIASES: Final = {"crc32c": ("crc32c", "crc32c_generic")}  # built in on some kernels
DIRECTORIES: Final = ("bin", "dev", "modules", "new", "proc", "sys")


def make(busybox: bytes, modules: Mapping[str, bytes], builtin: str) -> bytes:
    """A newc archive.

    Args:
        busybox: the static program.
        modules: of the kernel, by file name, e.g. ``virtio-rng.ko.xz``.
        builtin: the text of its modules.builtin.

    Raises:
        ArchiveError: a module that is needed is neither there nor built in.
    """
    ordered = order(modules, builtin)
    archive = _Newc()
    for directory in DIRECTORIES:
        archive.add(directory, 0o40755)
    archive.add("dev/console", 0o20600, device=(5, 1))
    archive.add("bin/busybox", 0o100755, busybox)
    script = resources.files("agent_box.engine.image").joinpath("init.sh").read_bytes()
    archive.add("init", 0o100755, script)
    archive.add("modules/list", 0o100644, "".join(f"{name}\n" for name in ordered).encode())
    for name, content in ordered.items():
        archive.add(f"modules/{name}.ko", 0o100644, content)
    return archive.close()


def order(modules: Mapping[str, bytes], builtin: str) -> dict[str, bytes]:
    """The modules to load, uncompressed, each after those that it needs.

    Raises:
        ArchiveError: one is neither there nor built in, or cannot be unpacked.
    """
    files = {plain(name): content for name, content in modules.items()}
    inside = {plain(line.rpartition("/")[2]) for line in builtin.splitlines()}
    ordered: dict[str, bytes] = {}

    def need(name: str, by: str) -> None:
        names = ALIASES.get(name, (name,))
        if any(each in ordered or each in inside for each in names):
            return
        found = next((each for each in names if each in files), None)
        if found is None:
            raise ArchiveError(f"the kernel has no module {name}, which {by} needs")
        content = files[found]
        if content.startswith(b"\xfd7zXZ\x00"):
            content = lzma.decompress(content)
        for each in _depends(content):
            need(each, found)
        ordered[found] = content

    for name in MODULES:
        need(name, "a machine")
    return ordered


def plain(file: str) -> str:
    """The name of a module from that of its file, as the kernel says it."""
    return file.partition(".ko")[0].replace("-", "_")


def _depends(module: bytes) -> list[str]:
    """What the section .modinfo says: ``depends=a,b``."""
    at = module.find(b"\0depends=")
    if at < 0:
        return []
    at += len(b"\0depends=")
    text = module[at : module.index(b"\0", at)].decode("ascii")
    return [name.replace("-", "_") for name in text.split(",") if name]


class _Newc:
    """Writes an archive as Documentation/driver-api/early-userspace/buffer-format.rst says."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._inode = 0

    def add(
        self, name: str, mode: int, content: bytes = b"", device: tuple[int, int] = (0, 0)
    ) -> None:
        self._inode += 1
        path = name.encode() + b"\0"
        fields = (
            *(self._inode, mode, 0, 0, 1, 0, len(content)),  # uid, gid, links, time
            *(0, 0, *device, len(path), 0),
        )
        header = b"070701" + b"".join(b"%08X" % field for field in fields) + path
        self._pieces += [header, bytes(-len(header) % 4), content, bytes(-len(content) % 4)]

    def close(self) -> bytes:
        self.add("TRAILER!!!", 0)
        return b"".join(self._pieces)
