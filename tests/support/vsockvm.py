"""A real machine for the vsock device: QEMU, a kernel, an initramfs, a read-only root.

Not for the quick suite: whoever uses it names the files. The files are those of an image: the
initramfs holds a busybox as /bin/busybox, and modules in the order of /modules/list; the root,
which is the drive `variant`, holds Python.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from support.vsockguest import Backend

from agent_box.guest.timer import believed
from agent_box.helper.machine import TIMER_MULT

INIT = b"""#!/bin/busybox sh
B=/bin/busybox
$B mount -t devtmpfs devtmpfs /dev; $B mount -t proc proc /proc
exec 0</dev/console 1>/dev/console 2>&1
while read m; do $B insmod /modules/$m.ko || echo insmod $m; done < /modules/list
while [ ! -b /dev/vda ]; do $B usleep 2000; done
$B mount -t erofs -o ro /dev/vda /new || echo erofs
$B mount -t tmpfs tmpfs /new/run; $B cp /peer.py /new/run/peer.py
$B cat /proc/timer_list
$B mount --move /dev /new/dev; $B umount /proc; $B mount -t proc proc /new/proc
exec $B switch_root /new /usr/bin/python3 -I -S -B /run/peer.py
"""


def archive(files: dict[str, tuple[int, bytes]]) -> bytes:
    """A newc archive, which the kernel unpacks over the one before it."""
    out = bytearray()
    for number, (name, (mode, body)) in enumerate({**files, "TRAILER!!!": (0, b"")}.items(), 1):
        path = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(body), 0, 0, 0, 0, len(path), 0)
        out += b"070701" + b"".join(b"%08X" % field for field in fields) + path
        out += bytes(-len(out) % 4) + body
        out += bytes(-len(out) % 4)
    return bytes(out)


class Machine:
    """One machine with its device. `directory` must be empty."""

    def __init__(
        self,
        directory: Path,
        kernel: Path,
        initrd: Path,
        root: Path,
        peer: Path,
        *,
        tsc_khz: int,
        memory_mib: int = 256,
        qemu: str = "qemu-system-x86_64",
        accel: str = "tcg",
    ) -> None:
        whole = directory / "initrd"
        shutil.copyfile(initrd, whole)
        with open(whole, "ab") as file:
            file.write(bytes(-file.tell() % 4))
            file.write(
                archive({"peer.py": (0o100644, peer.read_bytes()), "init": (0o100755, INIT)})
            )
        self.accel = accel
        self.backend = Backend(directory)
        self.console = directory / "console.log"
        link = self.backend.vmm_end.fileno()
        self._qmp, qmp_end = socket.socketpair()
        smp = "1,maxcpus=2" if accel == "tcg" else "1"
        cpu = ["-cpu", "max,erms=off,fsrm=off"] if accel == "tcg" else ["-cpu", "host"]
        with open(directory / "qemu.log", "wb") as log:
            self.process = subprocess.Popen(
                [
                    qemu, "-M", f"microvm,accel={accel},memory-backend=mem",
                    "-object", f"memory-backend-memfd,id=mem,size={memory_mib}M,share=on", *cpu,
                    "-smp", smp, "-m", str(memory_mib), "-nodefaults", "-no-user-config",
                    "-nographic", "-no-reboot", "-kernel", str(kernel), "-initrd", str(whole),
                    "-append",
                    "reboot=t panic=-1 console=ttyS0 quiet loglevel=1 cryptomgr.notests "
                    f"tsc_early_khz={tsc_khz} tsc=reliable",
                    "-drive", f"id=r,file={root},format=raw,if=none,readonly=on",
                    "-device", "virtio-blk-device,drive=r",
                    "-chardev", f"socket,id=c0,fd={link}",
                    "-device", "vhost-user-vsock-device,chardev=c0",
                    "-chardev", f"socket,id=qmp,fd={qmp_end.fileno()}",
                    "-mon", "chardev=qmp,mode=control",
                    "-serial", f"file:{self.console}",
                ],
                pass_fds=[link, qmp_end.fileno()], stdin=subprocess.DEVNULL, stdout=log,
                stderr=log,
            )  # fmt: skip
        qmp_end.close()
        self.backend.vmm_end.close()
        self._qmp.settimeout(30)
        self._lines = self._qmp.makefile("rb")
        self._lines.readline()
        self.qmp("qmp_capabilities")

    def qmp(self, verb: str) -> Any:
        """One command of QMP, and its return."""
        self._qmp.sendall(json.dumps({"execute": verb}).encode() + b"\n")
        while True:
            said = json.loads(self._lines.readline())
            if "return" in said:
                return said["return"]
            if "error" in said:
                raise RuntimeError(said)

    def mistimed(self) -> bool:
        """Whether it is no machine to test anything with: see guest/timer.py."""
        rate = believed(self.console.read_text(errors="replace")) * 1000 // TIMER_MULT
        return self.accel == "tcg" and not 700 <= rate <= 1150

    def wait(self, port: int, seconds: float = 60) -> socket.socket:
        """A stream to a port, as soon as somebody in the guest listens there."""
        end = time.monotonic() + seconds
        pause = threading.Event()  # nothing tells when a port is bound
        while True:
            try:
                return self.backend.dial(port, seconds)
            except ConnectionRefusedError:
                if time.monotonic() > end or self.process.poll() is not None:
                    raise
            pause.wait(0.05)

    def close(self) -> None:
        """Ends both. The device ends by itself after the VMM."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._qmp.close()
        self._lines.close()
        try:
            status, words = self.backend.last_words()
            assert status == 0, words
            self.words = words
        finally:
            self.backend.__exit__(None, None, None)
