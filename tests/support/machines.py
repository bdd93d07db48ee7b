"""Real machines: a helper, an engine and a channel behind their walls, without a registry.

The image is that of `support.vm`, with the drive `guest` made from the code as it is now.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from support import guestport, procs, vm
from support.house import House, contract, inner_pid
from support.notes import Notes
from support.until import until

from agent_box.bus.client import Client
from agent_box.bus.schema import Empty
from agent_box.channel import contract as channel
from agent_box.engine import contract as engine
from agent_box.engine.image import boxguest, build, manifest
from agent_box.process import confine

PARTS = ("kernel", "initramfs", "variant", "guest")
DISK = 256 << 20
# The channel as it is, but for the host's wall clock: a file says how far that is off.
CHANNEL = """
import sys, time
from pathlib import Path
from agent_box.channel import adapter, keeper
from agent_box.channel.contract import CONTRACT
from agent_box.process import skeleton
file = Path(sys.argv.pop(1))
adapter.Clocks = lambda: keeper.Clocks(wall=lambda: time.time_ns() + int(file.read_text()))
skeleton.run(CONTRACT, adapter.build)
"""


class Machines(House):
    """A house whose engine starts machines under TCG. `close` ends and removes all of them.

    Args:
        accel: in the config; None: not there.
        instances_bytes: of a file system on which the instances lie. The helper that
            `start_helper` starts and its children see it, and it is gone with that helper.
    """

    def __init__(self, *, accel: str | None = "tcg", instances_bytes: int | None = None) -> None:
        super().__init__()
        self.config.write_text(
            "version = 1\n" if accel is None else f'version = 1\n[engine]\naccel = "{accel}"\n'
        )
        before = os.umask(0o077)
        self.paths.helper_sock.parent.mkdir()
        self.paths.helper_key.write_text(secrets.token_hex(32) + "\n")
        os.umask(before)
        shutil.copytree(vm.images(), self.paths.images, symlinks=True, copy_function=_link)
        self.image = manifest.find(self.paths, "base")
        if self.image.source.guest != boxguest.digest(boxguest.sources()):
            self.image = build.refresh(self.paths, "base", tell=lambda _: None).manifest
        parts = {part: getattr(self.image, part).sha256 for part in PARTS}
        self.images = engine.Images(harness=None, **parts)
        self.helper: subprocess.Popen[str] | None = None
        self._instances_bytes = instances_bytes
        self.services: dict[str, subprocess.Popen[str]] = {}
        self.notes = Notes(self.paths)
        self.made: list[str] = []
        self._clients: dict[str, Client] = {}

    def add(self, path: Path) -> str:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        try:
            os.link(path, self.paths.blob(digest))
        except OSError:
            shutil.copyfile(path, self.paths.blob(digest))
        return digest

    def part(self, name: str) -> Path:
        """The file of a part of the image, e.g. ``guest``."""
        return self.paths.blob(getattr(self.images, name))

    # ------------------------------------------------------------------ processes

    def up(self, *services: str) -> None:
        self.start_helper()
        for service in services or ("engine", "channel"):
            self.restart(service)

    def start_helper(self) -> None:
        words = ["--runtime", str(self.paths.runtime), "--state", str(self.paths.state)]
        within = []
        if self._instances_bytes is not None:
            within = ["/usr/bin/bwrap", "--die-with-parent", "--dev-bind", "/", "/"]
            within += ["--perms", "0700", "--size", str(self._instances_bytes)]
            within += ["--tmpfs", str(self.paths.state / "instances"), "--"]
        self.helper = self.run(
            [
                *(*within, sys.executable, "-I", "-B", "-m", "agent_box.helper"),
                *("--mode", "user", *words),
            ],
            self.root / "helper.log",
        )

    def kill_helper(self) -> None:
        assert self.helper is not None
        self.helper.kill()
        self.helper.wait()

    def start_channel(self, off_ns: int) -> None:
        """A channel that sees the host's clock so far off; `move_clock` moves it again."""
        self.kill("channel")
        self.move_clock(off_ns)
        words = list(confine.arguments(contract("channel"), self.paths, self.config))
        at = words.index("-m")
        words[at : at + 2] = ["-c", CHANNEL, str(self._clock)]
        self.services["channel"] = self.start("channel", words)

    def move_clock(self, off_ns: int) -> None:
        new = self._clock.with_suffix(".new")
        new.write_text(str(off_ns))
        new.replace(self._clock)

    @property
    def _clock(self) -> Path:
        return self.paths.data("channel") / "clock"

    def instances(self) -> Path:
        """The directory of instances, as the helper sees it."""
        if self._instances_bytes is None:
            return self.paths.state / "instances"
        assert self.helper is not None
        (inner,) = procs.descendants(self.helper.pid)[:1]
        return Path(f"/proc/{inner}/root{self.paths.state / 'instances'}")

    def restart(self, service: str) -> None:
        """Starts it, after a kill -9 when it runs."""
        self.kill(service)
        self.services[service] = self.start(service)

    def kill(self, service: str) -> None:
        running = self.services.pop(service, None)
        if running is not None:
            inner = inner_pid(running)
            if inner is not None:
                os.kill(inner, signal.SIGKILL)
            running.wait()

    def pid(self, service: str) -> int:
        found = inner_pid(self.services[service])
        assert found is not None
        return found

    # ------------------------------------------------------------------ calls

    def call(self, service: str, method: str, request: Any, *, seconds: float = 60) -> Any:
        if service not in self._clients:
            self._clients[service] = self.client(service, "registry")
        return self._clients[service].call(method, request, deadline_s=seconds)

    def engine(self, method: str, request: Any = None, *, seconds: float | None = None) -> Any:
        bound = {"list": 10.0, "query": 10.0}.get(method, 30.0)
        asked = Empty() if request is None else request
        return self.call("engine", method, asked, seconds=seconds or bound)

    def create(self, disk: int = DISK) -> str:
        instance = secrets.token_hex(16)
        self.engine("create", engine.Create(instance=instance, disk_bytes=disk))
        self.made.append(instance)
        return instance

    def boot(self, instance: str, boot: int = 1, *, memory: int = 256, **images: str) -> Any:
        request = engine.Boot(
            instance=instance, boot=boot, cpus=1, memory_bytes=memory << 20,
            images=msgspec.structs.replace(self.images, **images),
        )  # fmt: skip
        return self.engine("boot", request)

    def provision(self, instance: str, boot: int = 1, *, seconds: float = 90, **more: Any) -> Any:
        fields = {
            "hostname": "work", "environment": [], "bindings": [], "harness": None, "hook": None,
            "sudo": False, "timer": "any", **more,
        }  # fmt: skip
        request = channel.Provision(instance=instance, boot=boot, **fields)
        return self.call("channel", "provision", request, seconds=seconds)

    def machine(self, **more: Any) -> str:
        """One that is provisioned."""
        instance = self.create()
        self.boot(instance)
        self.provision(instance, **more)
        return instance

    def port(self) -> str:
        """The digest of a drive `guest` in which `ask` can run code."""
        drive = self.root / "guest.erofs"
        guestport.drive(self.part("guest"), drive)
        return self.add(drive)

    def ask(self, instance: str, code: str, *, boot: int = 1) -> str:
        """What Python code prints, in a guest that was booted with `port`."""
        runtime = self.paths.runtime
        return guestport.run(runtime, instance, code, boot=boot, seconds=60).strip()

    def set_time(self, instance: str, boot: int = 1) -> Any:
        return self.call(
            "channel", "set_time", channel.Guest(instance=instance, boot=boot), seconds=10
        )

    def poweroff(self, instance: str, boot: int = 1) -> None:
        guest = channel.Guest(instance=instance, boot=boot)
        self.call("channel", "poweroff", guest, seconds=30)

    def vmm(self, instance: str, boot: int = 1) -> engine.Vmm:
        return engine.Vmm(instance=instance, boot=boot)

    def query(self, instance: str) -> engine.Observed:
        found: engine.Observed = self.engine("query", engine.Instance(instance=instance))
        return found

    def until_state(self, instance: str, state: str, *, seconds: float = 30) -> engine.Observed:
        def look() -> engine.Observed | None:
            found = self.query(instance)
            return found if found.state == state else None

        found = until(f"{instance} is {state}", look, seconds=seconds)
        assert found is not None
        return found

    def vmm_pid(self, instance: str) -> int:
        """As the host numbers it: from the helper's record."""
        path = self.instances() / instance / "state.json"
        pid = json.loads(path.read_text())["procs"]["vmm"]["pid"]
        assert isinstance(pid, int)
        return pid

    def console(self, instance: str) -> str:
        directory = self.instances() / instance
        names = sorted(directory.glob("console*"))
        return "".join(name.read_text(errors="replace") for name in names)

    def close(self) -> None:
        if self.helper is not None and self.made:
            if self.helper.poll() is not None:
                self.start_helper()
            if "engine" not in self.services:
                self.restart("engine")
            for state in self.engine("list").instances:
                if state.state != "stopped" and state.boot is not None:
                    pid = self.vmm_pid(state.instance)
                    os.kill(pid, signal.SIGCONT)
                    self.engine("kill", engine.Vmm(instance=state.instance, boot=state.boot))
                self.engine("delete", engine.Instance(instance=state.instance))
        for client in self._clients.values():
            client.close()
        self.notes.close()
        super().close()


def _link(source: str, target: str) -> None:
    """Blobs never change, so that they need not be copied."""
    if "/blobs/" not in source:
        shutil.copy2(source, target)
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
