"""An instance's data disk: a sparse file with an empty ext4 in it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from typing import Final

from agent_box.helper import wire
from agent_box.helper.places import DATA as FILE
from agent_box.helper.wire import Refused

NEW: Final = "data.img.new"
FREE: Final = 32 << 20  # what must be free on the host: the empty file system, and to live on
SECONDS: Final = 50
# Debian's e2fsprogs has it in /usr/sbin; its own search path is nobody's affair here.
PROGRAMS: Final = ("/usr/sbin/mkfs.ext4", "/usr/bin/mkfs.ext4", "/sbin/mkfs.ext4")
# Written out, so that no file of the host changes what a guest finds. Inode tables and journal
# are left as holes, which read as zeros; that is what the two lazy options rely on.
OPTIONS: Final = (
    "-q", "-F", "-b", "4096", "-I", "256", "-i", "16384", "-m", "0", "-J", "size=64",
    "-O", "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,"
    "sparse_super,large_file,huge_file,dir_nlink,extra_isize,metadata_csum",
    "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", "-L", "agent-box-data",
)  # fmt: skip
_SMALL: Final = 1 << 30  # below, a journal of 64 MiB would be out of proportion


def program() -> str | None:
    return next((path for path in PROGRAMS if os.access(path, os.X_OK)), None)


def size(directory: int) -> int | None:
    """Of the disk that is there; None when none is complete."""
    try:
        found = os.stat(FILE, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def make(directory: int, size_bytes: int) -> None:
    """Makes the disk; under its own name only when it is complete.

    Raises:
        Refused: exhausted when the host's disk is full or cannot hold such a file, host when
            mkfs.ext4 fails otherwise. Nothing is left.
    """
    try:
        free = os.fstatvfs(directory)
        if free.f_bavail * free.f_frsize < FREE:
            raise Refused("exhausted", "the host's disk is full")
        try:
            os.unlink(NEW, dir_fd=directory)  # a mkfs of a killed helper may still write to it
        except FileNotFoundError:
            pass
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(NEW, flags, 0o600, dir_fd=directory)
        try:
            os.ftruncate(fd, size_bytes)
            _format(fd, size_bytes)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(NEW, FILE, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException as error:
        try:
            os.unlink(NEW, dir_fd=directory)
        except FileNotFoundError:
            pass
        if isinstance(error, OSError):
            raise _explain(error, size_bytes) from error
        raise


def _format(fd: int, size_bytes: int) -> None:
    mkfs = program()
    if mkfs is None:
        raise Refused("host", "mkfs.ext4 is missing: install the package e2fsprogs")
    options = list(OPTIONS)
    if size_bytes < _SMALL:
        options[options.index("size=64")] = "size=4"
    try:
        done = subprocess.run(
            [mkfs, *options, f"/proc/self/fd/{fd}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[fd],
            env={"LC_ALL": "C", "MKE2FS_CONFIG": "/dev/null", "PATH": "/usr/sbin:/usr/bin"},
            cwd="/",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Refused("host", f"mkfs.ext4 did not end within {SECONDS} s") from None
    if done.returncode != 0:
        said = wire.line(done.stderr.decode(errors="replace"))
        if os.strerror(errno.ENOSPC) in said or shutil.disk_usage(fd).free < FREE:
            raise Refused("exhausted", "the host's disk is full")
        raise Refused("host", f"mkfs.ext4: {said or done.returncode}")


def _explain(error: OSError, size_bytes: int) -> Refused:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refused("exhausted", "the host's disk is full")
    if error.errno in (errno.EFBIG, errno.EINVAL):
        return Refused("exhausted", f"the host's file system holds no file of {size_bytes} bytes")
    return Refused("host", f"the data disk cannot be made: {error.strerror}")
