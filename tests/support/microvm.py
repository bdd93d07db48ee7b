"""A machine of a test's own: real kernel, initramfs and variant, and a program in the place of
box-guest. What it prints comes back."""

from __future__ import annotations

import subprocess
import zipfile
from functools import cache
from pathlib import Path

from agent_box.engine.image import build, debian
from agent_box.engine.image.manifest import Manifest
from agent_box.helper import tsc
from agent_box.process.paths import Paths

KERNEL_LINE = (
    "console=ttyS0 quiet loglevel=1 reboot=t panic=-1 cryptomgr.notests "
    "tsc_early_khz={} tsc=reliable"
)


@cache
def _khz() -> int:
    return tsc.measure()


def guest_drive(directory: Path, program: str) -> Path:
    """A drive whose box-guest.pyz is that program."""
    tree, drive = directory / "tree", directory / "guest.erofs"
    tree.mkdir(parents=True)
    with zipfile.ZipFile(tree / "box-guest.pyz", "w") as archive:
        archive.writestr("__main__.py", program)
    subprocess.run(
        ["mkfs.erofs", "-T0", "--all-root", "-U", build.GUEST_UUID, drive, tree],
        env={"PATH": debian.PATH},
        capture_output=True,
        check=True,
        timeout=60,
    )
    return drive


def boot(
    paths: Paths, image: Manifest, drives: dict[str, Path], *, seconds: float = 120
) -> tuple[int, str]:
    """Boots to the end of the machine: QEMU's exit status, and all that the console said.

    Args:
        drives: by serial; those of the image unless they are here.
    """
    files = {name: paths.blob(part.sha256) for name, part in image.parts.items()}
    command = [
        *("qemu-system-x86_64", "-M", "microvm,memory-backend=mem", "-accel", "tcg"),
        *("-object", "memory-backend-memfd,id=mem,size=512M,share=on", "-m", "512M"),
        *("-cpu", "max,erms=off,fsrm=off", "-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none", "-serial", "stdio", "-monitor", "none"),
        *("-kernel", str(files["kernel"]), "-initrd", str(files["initramfs"])),
        *("-append", KERNEL_LINE.format(_khz())),
    ]
    for number, (serial, file) in enumerate(drives.items()):
        command += ["-drive", f"id=d{number},file={file},format=raw,if=none,readonly=on"]
        command += ["-device", f"virtio-blk-device,drive=d{number},serial={serial}"]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=seconds,
    )
    return done.returncode, done.stdout.decode(errors="replace")
