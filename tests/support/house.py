"""A whole agent-box in a directory of its own: paths, keys, config, and services behind walls.

Services are started by the command line that the daemon would use, without the daemon.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from agent_box.bus import keys
from agent_box.bus.client import Client
from agent_box.bus.schema import Contract
from agent_box.process import confine
from agent_box.process.paths import ROLES, Paths


def contract(service: str) -> Contract:
    found: Contract = import_module(f"agent_box.{service}.contract").CONTRACT
    return found


class House:
    """Made short, because sockets lie in it, and removed by `close` with all that it runs."""

    def __init__(self) -> None:
        before = os.umask(0o077)
        self.root = Path(tempfile.mkdtemp(prefix="ab."))
        self.paths = Paths(self.root / "run" / "agent-box", self.root / "state" / "agent-box")
        (self.root / "run").mkdir(mode=0o700)
        self.paths.make()
        keys.make_keys(self.paths.public_keys.parent, ROLES)
        self.config = self.root / "config" / "config.toml"
        self.config.parent.mkdir(mode=0o700)
        self.config.touch()
        os.umask(before)
        self._running: list[subprocess.Popen[str]] = []

    def profile(self, service: str) -> confine.Profile:
        confine.prepare(contract(service), self.paths)
        return confine.profile(contract(service), self.paths, self.config)

    def command(self, service: str, argv: Sequence[str] | None = None) -> list[str]:
        """The command line of a service, or of `argv` behind that service's wall."""
        wanted = self.profile(service)
        filters = confine.write_filters(wanted, self.paths.supervisor)
        if argv is None:
            argv = confine.arguments(contract(service), self.paths, self.config)
        return confine.command(wanted, argv, filters)

    def start(self, service: str, argv: Sequence[str] | None = None) -> subprocess.Popen[str]:
        """Starts it as supervisord would: in a process group of its own, logging to a file."""
        return self.run(self.command(service, argv), self.paths.log(service))

    def run(self, command: Sequence[str], log: Path) -> subprocess.Popen[str]:
        with log.open("ab") as to:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=to,
                stderr=to,
                process_group=0,
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
                text=True,
            )
        self._running.append(process)
        return process

    def log(self, service: str) -> str:
        return self.paths.log(service).read_text(errors="replace")

    def client(self, service: str, role: str = "operator") -> Client:
        return Client(
            role,
            service,
            sock=self.paths.sock(service),
            secret=keys.load_secret(self.paths.keys(role)),
            server_key=keys.load_public(self.paths.public_keys, service),
            contract=contract(service),
        )

    def close(self) -> None:
        for process in self._running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.root)


def inner_pid(process: subprocess.Popen[str]) -> int | None:
    """The confined process, as the host numbers it; None while there is none."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0]) if children else None


def python(*words: str) -> list[str]:
    """Our interpreter as a service runs it."""
    return [sys.executable, "-I", "-B", *words]
