"""A place with keys and a socket for one toy service, and the process that serves there."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support import toy

from agent_box.bus import keys
from agent_box.bus.client import Client


class Place:
    """Short paths: a socket's path has at most 107 bytes."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ab", dir="/tmp"))
        self.keys = self.root / "k"
        self.sock = self.root / "s"
        self.bell = self.root / "b"
        self.database = self.root / "db"
        self.die = self.root / "die"
        self.log = self.root / "log"
        keys.make_keys(self.keys, toy.ROLES)
        self.process: subprocess.Popen[bytes] | None = None

    def options(self, role: str = "operator") -> dict[str, Any]:
        """What a client of the toy needs."""
        return {
            "sock": self.sock,
            "secret": keys.load_secret(self.keys / role),
            "server_key": self.server_key,
            "contract": toy.CONTRACT,
        }

    @property
    def server_key(self) -> bytes:
        return keys.load_public(self.keys / "public", "engine")

    def client(self, role: str = "operator", **options: Any) -> Client:
        return Client(role, "engine", **{**self.options(role), **options})

    def spawn(self) -> subprocess.Popen[bytes]:
        """Starts the toy as a process and waits until it serves."""
        assert self.process is None or self.process.poll() is not None
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, toy.__file__, self.sock, self.keys, self.database],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "AB_TOY_DIE": str(self.die)},
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n", self.log.read_text()
        return self.process

    def kill(self, sig: signal.Signals = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(sig)
        if sig is signal.SIGKILL:
            self.process.wait()

    def added(self) -> int:
        """How often a `ONCE` call took effect."""
        db = sqlite3.connect(self.database)
        try:
            return int(db.execute("SELECT count(*) FROM added").fetchone()[0])
        finally:
            db.close()

    def close(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
        shutil.rmtree(self.root)
