"""The instance's data disk, and the root that agent processes see.

The data disk (drive `data`) is checked, grown to the size of its device and mounted. The
agent's root is an overlay: below it the harness layer and the variant, both read-only; above
it the data disk, so that what an agent installs stays. PID 1 and box-guest never run from
that overlay.
"""

from __future__ import annotations

import os
import struct

from agent_box.guest import system

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from typing import Final, Literal

DATA: Final = "/run/box/data"
HARNESS: Final = "/run/box/harness"
ROOT: Final = "/run/box/root"
HOME: Final = "/home/agent"
WORK: Final = "/home/agent/work"
AGENT_UID: Final = 1000
CHECK_S: Final = 240  # for e2fsck and resize2fs; the host waits for a start a while longer
_TOOLS: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


class Disk:
    """What became of the data disk. `text` is one line for the operator."""

    __slots__ = ("bytes", "state", "text")

    def __init__(self, state: Literal["ok", "absent", "damaged"], bytes: int, text: str) -> None:
        self.state = state
        self.bytes = bytes
        self.text = text


def prepare() -> Disk:
    """Checks, mounts and grows the data disk and builds the agent's root on it.

    Doing it again, as a second agent process does, finds it done. A disk that cannot be
    mounted is left as it is: nothing is ever formatted here.
    """
    device = system.drive("data")
    if device is None:
        return Disk("absent", 0, "the machine has no data disk")
    size = system.device_bytes(device)
    text = ""
    try:
        if not os.path.ismount(DATA):
            _mount(device, size)
            text = _grow(device, size)
        _overlay()
    except OSError as error:
        return Disk("damaged", size, f"data disk: {error.strerror or error}")
    return Disk("ok", size, text)


def _run(*command: str, accept: tuple[int, ...] = (0,)) -> None:
    import subprocess  # seldom needed, and slow to import

    name = os.path.basename(command[0])
    try:
        ended = subprocess.run(
            command,
            env=_TOOLS,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CHECK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"{name} did not end in {CHECK_S} s") from None
    if ended.returncode not in accept:
        said = (ended.stderr or ended.stdout).decode(errors="replace").strip()
        last = said.splitlines()[-1] if said else f"exit status {ended.returncode}"
        raise OSError(f"{name}: {last}")


def _mount(device: str, size: int) -> None:
    superblock = _superblock(device)
    if (held := _held(superblock)) > size:
        raise OSError(f"its file system has {held} bytes, and the disk only {size}: it was cut off")
    if not _clean(superblock):
        # -p repairs only what is safe; 1 means repaired (e2fsck(8))
        _run("/sbin/e2fsck", "-p", device, accept=(0, 1))
    flags = system.MS_NOSUID | system.MS_NODEV | system.MS_NOATIME
    system.mount(device, DATA, "ext4", flags, "discard")


def _superblock(device: str) -> bytes:
    """Raises:
    OSError: there is none of ext4.
    """
    with open(device, "rb", buffering=0) as file:
        found = os.pread(file.fileno(), 1024, 1024)
    if len(found) < 1024 or found[0x38:0x3A] != b"\x53\xef":  # s_magic
        raise OSError("it holds no ext4 file system")
    return found


def _held(superblock: bytes) -> int:
    """The bytes that the file system says it has (ext4 disk layout: s_blocks_count_lo at 0x4,
    s_log_block_size at 0x18, s_feature_incompat at 0x60, s_blocks_count_hi at 0x150)."""
    low, log, features, high = (
        struct.unpack_from("<I", superblock, at)[0] for at in (0x4, 0x18, 0x60, 0x150)
    )
    wide = high if features & 0x80 else 0  # INCOMPAT_64BIT
    return int(((wide << 32) + low) << (10 + min(log, 6)))


def _clean(superblock: bytes) -> bool:
    """Whether it was unmounted without errors (s_state at 0x3a)."""
    (state,) = struct.unpack_from("<H", superblock, 0x3A)
    return bool(state & 1 and not state & 2)


def _grow(device: str, size: int) -> str:
    """Returns why it could not: the disk is good, but smaller than it was made."""
    stat = os.statvfs(DATA)
    # the file system's own tables take up to a few per cent; less than that is no growth
    if stat.f_blocks * stat.f_frsize < size * 9 // 10:
        try:
            _run("/sbin/resize2fs", device)
        except OSError as error:
            return f"data disk: it cannot be grown to {size} bytes: {error}"
    return ""


def _overlay() -> None:
    """Each mount that is not there yet: an agent process that died half-way left some."""
    if not os.path.ismount(ROOT):
        for path, mode in ((f"{DATA}/upper", 0o755), (f"{DATA}/work", 0o700)):
            os.makedirs(path, mode=mode, exist_ok=True)
        lower = f"{HARNESS}:/" if _harness() else "/"
        options = f"lowerdir={lower},upperdir={DATA}/upper,workdir={DATA}/work"
        system.mount("overlay", ROOT, "overlay", system.MS_NODEV, options)
    binds = system.MS_BIND | system.MS_REC
    strict = system.MS_NOSUID | system.MS_NODEV
    for source, path, kind, flags, data in (
        ("/proc", "/proc", "", binds, ""),
        ("/sys", "/sys", "", binds, ""),
        ("/dev", "/dev", "", binds, ""),
        ("tmpfs", "/run", "tmpfs", strict, "mode=0755"),
        ("tmpfs", "/tmp", "tmpfs", strict, "mode=1777"),
    ):
        if os.path.islink(ROOT + path):  # a root of the agent's made it, and it leads out
            os.unlink(ROOT + path)
        if not os.path.ismount(ROOT + path):
            system.mount(source, ROOT + path, kind, flags, data)
    # What the agent put in the place of these is the agent's affair, but no link is followed.
    for path in (HOME, WORK):
        if not os.path.lexists(ROOT + path) and os.path.isdir(os.path.dirname(ROOT + path)):
            os.mkdir(ROOT + path, mode=0o755)
            os.chown(ROOT + path, AGENT_UID, AGENT_UID, follow_symlinks=False)


def _harness() -> bool:
    device = system.drive("harness")
    if device is None:
        return False
    if not os.path.ismount(HARNESS):
        system.mount(device, HARNESS, "erofs", system.MS_RDONLY | system.MS_NODEV)
    return True


def release() -> None:
    """Unmounts for power-off, or at least makes the disk read-only.

    Raises:
        OSError: neither could be done; what was written is still synced.
    """
    os.sync()
    if not os.path.ismount(DATA):
        return
    system.mount("", DATA, "", system.MS_REMOUNT | system.MS_RDONLY)
