"""QEMU's command line: the machine microvm with four drives, a vsock, a balloon and no NIC.

Everything is fixed here but the numbers and the accelerator, which is the configured one.
"""

from __future__ import annotations

import os
from typing import Any, Final

from agent_box.helper.jail import FIRST_FD, MACHINE_FILES

PROGRAMS: Final = ("/usr/bin/qemu-system-x86_64", "/usr/local/bin/qemu-system-x86_64")
VSOCK: Final = "vhost-user-vsock-device"
CID: Final = 3  # of every guest: only its own device ever sees it
IMAGES: Final = ("variant", "guest", "harness")  # read-only drives
# Descriptors that QEMU is given.
VHOST_FD, QMP_FD, CONSOLE_FD, DATA_FD, DATA_READ_FD = range(FIRST_FD, FIRST_FD + 5)
TRANSLATED_MIB: Final = 256  # cache of translated code
# Of the emulated APIC's timer, which counts nanoseconds, as Linux has it: it divides by 16 and
# holds ticks for each nanosecond in 32 binary places (calibrate_APIC_clock, lapic_clockevent).
TIMER_MULT: Final = (1 << 32) // 16
_KERNEL: Final = "console=ttyS0 quiet loglevel=1 reboot=t panic=-1 cryptomgr.notests"
_SANDBOX: Final = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


def program() -> str | None:
    return next((path for path in PROGRAMS if os.access(path, os.X_OK)), None)


def _cpus(profile: dict[str, Any]) -> str:
    """For one emulated vCPU, room for a second that never comes. Without it QEMU takes the guest
    for alone with its memory and translates its barriers and locked instructions to nothing
    that orders (`max_cpus > 1` sets CF_PARALLEL in accel/tcg; before 8.1 no barrier was kept at
    all). But a device in another process reads the same rings, and an interrupt that the guest
    has just asked for again may be lost."""
    cpus: int = profile["cpus"]
    return f"{cpus},maxcpus=2" if cpus == 1 and profile["accel"] == "tcg" else str(cpus)


def command(qemu: str, profile: dict[str, Any], tsc_khz: int | None) -> list[str]:
    """What runs inside the jail.

    Args:
        profile: as `contract.PROFILE`.
        tsc_khz: of the host; needed under tcg, where the guest sees the host's counter and
            hangs at random when it has to calibrate it.
    """
    memory = profile["memory_mib"]
    kernel_line = _KERNEL
    if profile["accel"] == "tcg":
        assert tsc_khz is not None
        kernel_line += f" tsc_early_khz={tsc_khz} tsc=reliable box.timer_mult={TIMER_MULT}"
        # TCG emulates `rep movsb` byte by byte; without these the guest's kernel avoids it.
        processor = ["-accel", f"tcg,tb-size={TRANSLATED_MIB}", "-cpu", "max,erms=off,fsrm=off"]
    else:
        processor = ["-accel", "kvm", "-cpu", "host"]
    words = [qemu, "-M", "microvm,memory-backend=mem", *processor]
    words += ["-object", f"memory-backend-memfd,id=mem,size={memory}M,share=on"]
    words += ["-smp", _cpus(profile), "-m", f"{memory}M"]
    words += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    words += ["-sandbox", _SANDBOX]
    words += ["-kernel", f"{MACHINE_FILES}/kernel", "-initrd", f"{MACHINE_FILES}/initramfs"]
    words += ["-append", kernel_line]
    # A writable drive is opened twice, for writing and for reading.
    words += ["-add-fd", f"fd={DATA_FD},set=1", "-add-fd", f"fd={DATA_READ_FD},set=1"]
    drives = [(name, f"{MACHINE_FILES}/{name}") for name in IMAGES if profile[name] is not None]
    drives.insert(1, ("data", "/dev/fdset/1"))
    for name, path in drives:
        # On a full disk of the host the machine is paused, and nothing in it gets an error.
        kind = "discard=unmap,werror=enospc" if name == "data" else "readonly=on"
        words += ["-drive", f"id={name},file={path},format=raw,if=none,{kind}"]
        words += ["-device", f"virtio-blk-device,drive={name},serial={name}"]
    words += ["-chardev", f"socket,id=vsock,fd={VHOST_FD}"]
    words += ["-device", f"{VSOCK},chardev=vsock"]
    words += ["-device", "virtio-balloon-device,id=balloon"]
    words += ["-chardev", f"socket,id=qmp,fd={QMP_FD},server=on,wait=off"]
    words += ["-mon", "chardev=qmp,mode=control"]
    words += ["-chardev", f"socket,id=console,fd={CONSOLE_FD}"]
    return [*words, "-serial", "chardev:console"]
