"""What PID 1 and the agent ask of the guest's kernel: mounts, clock, trim, power.

Standard library only; what it lacks goes through libc by ctypes. Constants are those of the
Linux user API (include/uapi/linux), for x86_64 and aarch64 alike.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import time

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from typing import Final

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_REMOUNT: Final = 32
MS_NOATIME: Final = 1024
MS_BIND: Final = 4096
MS_REC: Final = 16384

FITRIM: Final = 0xC0185879  # _IOWR('X', 121, struct fstrim_range)
BLKGETSIZE64: Final = 0x80081272
TUNSETIFF: Final = 0x400454CA
IFF_TUN: Final = 0x0001
IFF_NO_PI: Final = 0x1000
IFF_VNET_HDR: Final = 0x4000
LOG_MAX: Final = 500  # bytes of a line
POWER_OFF: Final = 0x4321FEDC  # reboot(2), LINUX_REBOOT_CMD_POWER_OFF

_libc = ctypes.CDLL(None, use_errno=True)


def prepare_log() -> None:
    """Whoever reads the console may stop reading: nobody in the guest waits for it."""
    try:
        os.set_blocking(2, False)
    except OSError:
        return  # there is no console


def log(text: str) -> None:
    """One line on the console, which the host keeps, capped. Never anything of provisioning.
    A console that takes no more loses it; nothing is raised."""
    line = f"box-guest[{os.getpid()}] {time.clock_gettime(time.CLOCK_BOOTTIME):.3f}: {text}"
    try:
        os.write(2, line.encode(errors="replace").replace(b"\n", b" ")[:LOG_MAX] + b"\n")
    except OSError:
        pass  # nobody can be told


def spare(score: int) -> None:
    """Says how willingly the kernel ends this process when memory is short (proc(5),
    oom_score_adj): -1000 is never, 0 is usual."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(score))


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2); makes the target directory.

    Raises:
        OSError: as the system call says.
    """
    os.makedirs(target, exist_ok=True)
    encoded = (source.encode(), target.encode(), kind.encode())
    if _libc.mount(*encoded, ctypes.c_ulong(flags), data.encode()):
        code = ctypes.get_errno()
        raise OSError(code, f"mount {target}: {os.strerror(code)}")


def drive(serial: str) -> str | None:
    """The block device with that virtio serial: drives are known by name, never by order."""
    for name in sorted(os.listdir("/sys/block")):
        try:
            with open(f"/sys/block/{name}/serial") as file:
                if file.read().strip() == serial:
                    return f"/dev/{name}"
        except FileNotFoundError:
            continue  # not a virtio disk: it has no serial
    return None


def device_bytes(path: str) -> int:
    """The size of a block device in bytes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(struct.unpack("=Q", fcntl.ioctl(fd, BLKGETSIZE64, bytes(8)))[0])
    finally:
        os.close(fd)


def set_clock(time_ns: int) -> int:
    """Sets the wall clock; returns how far it was off, in ns (ours minus the host's).

    Raises:
        OSError: a time that the kernel refuses.
    """
    off = time.clock_gettime_ns(time.CLOCK_REALTIME) - time_ns
    time.clock_settime_ns(time.CLOCK_REALTIME, time_ns)
    return off


def trim(path: str) -> int:
    """Gives the free blocks of the file system at `path` back to the host; returns bytes.

    Raises:
        OSError: the device or the file system cannot.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        answer = fcntl.ioctl(fd, FITRIM, struct.pack("=QQQ", 0, (1 << 64) - 1, 0))
        return int(struct.unpack("=QQQ", answer)[1])
    finally:
        os.close(fd)


def open_tun() -> int:
    """Opens tun0 with virtio-net headers, down and without an address.

    Raises:
        OSError: the kernel has no tun.
    """
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        request = struct.pack("16sH22x", b"tun0", IFF_TUN | IFF_NO_PI | IFF_VNET_HDR)
        fcntl.ioctl(fd, TUNSETIFF, request)
    except OSError:
        os.close(fd)
        raise
    return fd


def power_off() -> None:
    """Never returns."""
    os.sync()
    _libc.reboot(POWER_OFF)
    raise OSError(ctypes.get_errno(), "the machine would not power off")
