"""A helper in a directory of its own, and a client that is not the engine's but speaks as it.

Its machines boot a kernel of a few bytes; so they need no image, and are there at once.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support import procs, tinykernel
from support.until import until

from agent_box.helper import jail, link, proof, wire

_made: list[str] = []


class Client:
    """One connection; blocking, one request at a time."""

    def __init__(self, sock: Path, key: bytes, *, seconds: float = 60) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(seconds)
        self.sock.connect(str(sock))
        side = proof.EngineSide(key, secrets.token_bytes(32))
        link.send(self.sock, side.proof(self._some()))
        side.accept(self._some())
        self._next = 0

    def _some(self) -> bytes:
        data, _ = link.receive(self.sock)
        if not data:
            raise ConnectionResetError("the helper hung up")
        return data

    def ask(self, name: str, **args: Any) -> dict[str, Any]:
        """The reply; raises `wire.Refused`."""
        reply, fds = self.ask_fds(name, **args)
        assert not fds
        return reply

    def ask_fd(self, name: str, **args: Any) -> int:
        _, fds = self.ask_fds(name, **args)
        return fds[0]

    def ask_fds(self, name: str, **args: Any) -> tuple[dict[str, Any], list[int]]:
        self._next += 1
        op = wire.OPS[name]
        link.send(self.sock, wire.request(self._next, op, args))
        data, fds = link.receive(self.sock, 1)
        if not data:
            raise ConnectionResetError("the helper went away")
        answer = wire.read_answer(data)
        assert answer.req == self._next
        if answer.refused is not None:
            assert not fds
            raise answer.refused
        assert len(fds) == op.descriptors
        return wire.check(op.reply, answer.untrusted_reply), fds

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


class HelperHouse:
    """Directories, a key and images; `start` runs a helper there, `close` removes everything."""

    def __init__(self, *, instances_bytes: int | None = None) -> None:
        before = os.umask(0o077)
        self.root = Path(tempfile.mkdtemp(prefix="abhelp.", dir="/tmp"))
        self.runtime = self.root / "r"
        self.state = self.root / "s"
        self.runtime.mkdir()
        (self.state / "keys" / "engine").mkdir(parents=True)
        self.key = secrets.token_bytes(32)
        self.key_file = self.state / "keys" / "engine" / "helper.key"
        self.key_file.write_text(self.key.hex() + "\n")
        self.blobs = self.state / "images" / "blobs" / "sha256"
        self.blobs.mkdir(parents=True)
        self.log = self.root / "log"
        os.umask(before)
        self.process: subprocess.Popen[bytes] | None = None
        self._wrap: list[str] = []
        if instances_bytes is not None:
            # A file system of its own, which only the helper and its children see.
            directory = str(self.state / "instances")
            self._wrap = ["/usr/bin/bwrap", "--die-with-parent", "--dev-bind", "/", "/"]
            self._wrap += ["--perms", "0700", "--size", str(instances_bytes)]
            self._wrap += ["--tmpfs", directory, "--"]

    @property
    def sock(self) -> Path:
        return self.runtime / "helper" / "sock"

    def command(self, *more: str) -> list[str]:
        return [
            *(sys.executable, "-I", "-B", "-m", "agent_box.helper", "--mode", "user"),
            *("--runtime", str(self.runtime), "--state", str(self.state), *more),
        ]

    def start(self, *, lifeline: bool = True) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._wrap, *self.command()],
                stdin=subprocess.PIPE if lifeline else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until("the helper serves", self._serves)
        return self.process

    def _serves(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        try:
            self.client().__exit__()
        except OSError:
            return False
        return True

    def client(self) -> Client:
        return Client(self.sock, self.key)

    def stop(self, number: signal.Signals = signal.SIGKILL) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(20)
        if self.process.stdin is not None:
            self.process.stdin.close()
        return code

    def instances(self) -> Path:
        """The directory of instances, as the helper sees it."""
        if not self._wrap:
            return self.state / "instances"
        assert self.process is not None
        (inner,) = procs.descendants(self.process.pid)[:1]
        return Path(f"/proc/{inner}/root{self.state / 'instances'}")

    def add(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        if not (self.blobs / digest).exists():
            (self.blobs / digest).write_bytes(data)
        return digest

    def profile(self, does: bytes = tinykernel.IDLE, **more: Any) -> dict[str, Any]:
        """Of a machine with a tiny kernel."""
        return {
            "engine": "qemu", "accel": "tcg", "cpus": 1, "memory_mib": 64, "harness": None,
            "kernel": self.add(tinykernel.kernel(does)), "initramfs": self.add(b"initramfs"),
            "variant": self.add(b"variant" * 1024), "guest": self.add(b"guest" * 1024), **more,
        }  # fmt: skip

    def machine(self, client: Client, **more: Any) -> tuple[str, str]:
        """A machine that runs: its id and launch."""
        name, launch = fresh(), fresh()
        client.ask("allocate", id=name, disk_bytes=64 << 20)
        client.ask("launch", id=name, launch_id=launch, profile=self.profile(**more))
        return name, launch

    def look(self, client: Client, name: str) -> dict[str, Any]:
        found = client.ask("list", after=None)["instances"]
        return next(state for state in found if state["id"] == name)

    def leftovers(self) -> list[str]:
        """Living processes that name this place, the helper apart; and files of instances."""
        mine = self.process.pid if self.process is not None else 0
        found = [" ".join(procs.cmdline(pid)[:12]) for pid in self.processes() if pid != mine]
        for directory in (self.state / "instances", *(self.runtime / "vm").iterdir()):
            found += [str(path) for path in directory.rglob("*")]
        return found

    def processes(self) -> list[int]:
        """Every process that has a directory of ours open, or names one, but this one."""
        found = set(procs.with_word(str(self.root)))
        ids = [each[: jail.TOLD] for each in _made]
        for pid in procs.all_pids():
            words = " ".join(procs.cmdline(pid))
            if "--hostname" in words and any(f"-{each}" in words for each in ids):
                found.add(pid)
        for pid in procs.all_pids():
            if pid == os.getpid():
                continue
            try:
                names = [
                    os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")
                ]
            except OSError:
                continue
            if any(name.startswith(str(self.root)) for name in names):
                found.add(pid)
        return sorted(found)

    def close(self) -> None:
        if self.process is None or self.process.poll() is not None:
            self.start()
        with self.client() as client:
            while True:
                for state in (page := client.ask("list", after=None))["instances"]:
                    self._remove(client, state)
                if not page["more"]:
                    break
        code = self.stop(signal.SIGTERM)
        assert code == 0 or self._wrap, self.log.read_text()
        shutil.rmtree(self.root)

    @staticmethod
    def _remove(client: Client, state: dict[str, Any]) -> None:
        if state["launch_id"] is not None:
            client.ask("kill", id=state["id"], launch_id=state["launch_id"])
        client.ask("release", id=state["id"])


def fresh() -> str:
    """An id or a launch; its first digits are in the host name of each jail."""
    _made.append(secrets.token_hex(16))
    return _made[-1]
