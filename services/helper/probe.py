"""Whether this host can run a machine: each part by really using it."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import threading
from typing import Any, Final

from agent_box.helper import bpf, contract, disk, jail, machine, procs, wire
from agent_box.helper.images import replace_file
from agent_box.helper.places import Places
from agent_box.helper.wire import Refused

SECONDS: Final = 20
TSC_FILE: Final = "tsc"
_KVM_GET_API_VERSION: Final = 0xAE00  # linux/kvm.h
_KVM_VERSION: Final = 12


class Probe:
    """Args:
    mode: ``user`` or ``system``, told on.
    """

    def __init__(self, mode: str, places: Places) -> None:
        self._mode = mode
        self._places = places
        self._lock = threading.Lock()

    def run(self) -> dict[str, Any]:
        """As `contract.PROBED`."""
        gaps: list[dict[str, str]] = []

        def gap(name: str, text: str) -> None:
            gaps.append({"name": name, "text": wire.line(text, 500)})

        bwrap = _version(jail.BWRAP)
        if bwrap is None:
            gap("bwrap-missing", f"{jail.BWRAP} is missing: install the package bubblewrap")
        works = bwrap is not None
        if works and (why := try_jail()) is not None:
            works = False
            gap("jail-unavailable", why)
        mkfs = None if (path := disk.program()) is None else _version(path, "-V")
        if mkfs is None:
            gap("mkfs-missing", "mkfs.ext4 is missing: install the package e2fsprogs")
        qemu = None if (path := machine.program()) is None else _version(path)
        if path is None or qemu is None:
            gap("engine-missing", "qemu-system-x86_64 is missing: install qemu-system-x86")
        elif not _has(path, machine.VSOCK):
            gap("engine-missing", f"{qemu} has no {machine.VSOCK}")
        tsc: int | None = None
        try:
            tsc = self.tsc_khz()
        except Refused as refused:
            gap("tsc-unknown", refused.detail)
        return {
            "protocol": contract.PROTOCOL,
            "mode": self._mode,
            "uid": os.geteuid(),
            "qemu": qemu,
            "bwrap": bwrap,
            "mkfs": mkfs,
            "kvm": kvm_answers(),
            "tsc_khz": tsc,
            "jail": works,
            "gaps": gaps,
        }

    def tsc_khz(self) -> int:
        """Of the host; measured once for each start of the host.

        Raises:
            Refused: it cannot be measured.
        """
        with self._lock:
            try:
                fd = os.open(TSC_FILE, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._places.own)
                with open(fd, encoding="ascii") as file:
                    boot, text = file.read(200).split()
                if boot == procs.boot_id():
                    return int(text)
            except (OSError, ValueError):
                pass  # not measured yet
            code, said = _run([sys.executable, "-I", "-B", "-m", "agent_box.helper.tsc"])
            if code != 0 or not said.strip().isdecimal():
                raise Refused("host", f"the time stamp counter cannot be measured: {said}")
            khz = int(said)
            line = f"{procs.boot_id()} {khz}\n".encode()
            try:
                replace_file(self._places.own, TSC_FILE, line)
            except OSError:
                pass  # it is measured again next time
            return khz


def try_jail() -> str | None:
    """Lets a program run in the jail of a machine; None when it did, else why not."""
    wanted = jail.vmm(
        "probe", (), kvm=False, memory_mib=contract.MIN_MEMORY, disk=contract.MIN_DISK
    )
    try:
        program = wanted.filter()
    except bpf.FilterError as error:
        return str(error)
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    filter_fd = os.memfd_create("filter", os.MFD_CLOEXEC)
    gate_end, gate = os.pipe()
    words, words_end = os.pipe()
    try:
        os.write(filter_fd, program)
        os.lseek(filter_fd, 0, os.SEEK_SET)
        os.write(gate, jail.GO)
        pid = procs.spawn(
            jail.command(wanted, ["/usr/bin/true"]),
            (null, words_end, words_end, filter_fd, null, gate_end),
        )
        found = os.pidfd_open(pid)
        ended = procs.wait([found], SECONDS)
        os.close(found)
        if not ended:
            procs.end_jail(procs.find(pid), patience=0, seconds=SECONDS)
        _, status = os.waitpid(pid, 0)
        os.set_blocking(words, False)
        said = os.read(words, 4096) if select.select([words], [], [], 0)[0] else b""
    finally:
        for fd in (null, filter_fd, gate_end, gate, words, words_end):
            os.close(fd)
    if status == 0:
        return None
    return wire.line(said.decode(errors="replace"), 400) or f"a jail ends with status {status}"


def kvm_answers() -> bool:
    try:
        fd = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return fcntl.ioctl(fd, _KVM_GET_API_VERSION) == _KVM_VERSION
    except OSError:
        return False
    finally:
        os.close(fd)


def _has(qemu: str, device: str) -> bool:
    """QEMU ends well also when it does not know the device; but then it lists no options."""
    code, said = _run([qemu, "-device", f"{device},help"])
    return code == 0 and f"{device} options:" in said


def _version(program: str, option: str = "--version") -> str | None:
    code, said = _run([program, option])
    return wire.line(said.partition("\n")[0], 100) if code == 0 else None


def _run(command: list[str]) -> tuple[int, str]:
    """Exit status and all that was said; -1 and why when it could not be run to its end."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
            cwd="/",
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, str(error)
    return done.returncode, done.stdout.decode(errors="replace")
