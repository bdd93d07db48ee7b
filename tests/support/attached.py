"""`agent-box attach` and `exec` against a toy guest: an agent-box without machines, and a
person at a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import msgspec
from support import cli, toyguest
from support.house import House

from agent_box import __version__
from agent_box.bus import keys, policy
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.server import Call, Server
from agent_box.process import lock
from agent_box.process.log import Log
from agent_box.process.paths import ROLES, RUNTIME_LOCK
from agent_box.registry.contract import CONTRACT, Instance, Name

LIMIT_S = 60.0  # only ends a test that hangs
# Puts its terminal in raw mode, says so, and shows each byte that comes as two hex digits.
HEX = """
import os, sys, termios, tty
tty.setraw(0)
os.write(1, b"ready\\r\\n")
while True:
    for byte in os.read(0, 65536):
        os.write(1, b"%02x " % byte)
"""
# The same, but shows the hash of so many bytes.
HASH = """
import hashlib, os, sys, tty
tty.setraw(0)
os.write(1, b"ready\\r\\n")
left, made = int(sys.argv[1]), hashlib.sha256()
while left:
    piece = os.read(0, min(left, 65536))
    made.update(piece)
    left -= len(piece)
os.write(1, made.hexdigest().encode() + b"\\r\\n")
"""


def filled(kind: Any, **given: Any) -> Any:
    """A value of a wire type: what is given, and for the rest something of its type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        return kind(**{n: given[n] if n in given else filled(t) for n, t in hints.items()})
    origin = get_origin(kind)
    if origin is Literal:
        return get_args(kind)[0]
    if origin in (Union, UnionType):
        return None if NoneType in get_args(kind) else filled(get_args(kind)[0])
    return (origin or kind)()


class Registry:
    """Answers `inspect` in a thread of the test.

    Attributes:
        state: of the one instance, web1; None: there is none.
        harness: its.
    """

    def __init__(self, house: House) -> None:
        self.state: str | None = "running"
        self.boots = 1
        self.harness: str | list[str] | None = None
        self._house = house
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    def _inspect(self, request: Name, call: Call) -> Instance:
        if request.name != "web1" or self.state is None:
            raise Refusal(Reason.NOT_FOUND, f"there is no instance {request.name}")
        row = filled(get_type_hints(Instance)["row"], name="web1", state=self.state)
        made: Instance = filled(
            Instance, row=row, id="0" * 32, boots=self.boots, harness=self.harness
        )
        return made

    def _refuse(self, *_: Any) -> NoReturn:
        raise Refusal(Reason.UNAVAILABLE, "a toy")

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        paths = self._house.paths
        server = Server(
            CONTRACT,
            sock=paths.sock("registry"),
            secret=keys.load_secret(paths.keys("registry")),
            public_keys=keys.load_all_public(paths.public_keys, ROLES),
            policy=policy.load(None, (CONTRACT,)),
            epoch=os.urandom(16),
            handlers={m.name: self._refuse for m in CONTRACT.methods} | {"inspect": self._inspect},
            outcomes=toyguest._Nothing(),  # type: ignore[arg-type]
            log=Log(service="registry"),
        )
        await server.start()
        server.set_ready()
        self._ready.set()
        await self._stop.wait()
        await server.close()


class Toys:
    """An agent-box with one instance, web1, whose guest is this host."""

    def __init__(self) -> None:
        self.house = House()
        paths = self.house.paths
        self._locks = [
            lock.acquire(path, config=None, version=__version__, state=paths.state)
            for path in (paths.runtime / RUNTIME_LOCK, paths.lock)
        ]
        self.registry = Registry(self.house)
        self._sock = str(self.house.root / "guest")
        self.env = cli.environment(self.house.root) | {"TERM": "xterm-256color"}
        self.env |= {"XDG_CONFIG_HOME": str(self.house.root / "none")}
        self.guest = self._spawn("guest", self._sock)
        self.channel = self._channel()

    def _channel(self) -> subprocess.Popen[bytes]:
        paths = self.house.paths
        return self._spawn("channel", str(paths.runtime), str(paths.state), self._sock)

    def _spawn(self, *words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-B", "-P", "-m", "support.toyguest", *words],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(Path(toyguest.__file__).parent.parent)},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    def kill_channel(self) -> None:
        self.channel.kill()
        self._wait(self.channel)

    def start_channel(self) -> None:
        self.channel = self._channel()

    def leave(self) -> None:
        """What the channel tells when the instance is stopped or paused."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(self._sock)
            data = toyguest.pickle.dumps(("leave",))
            sock.sendall(struct.pack("<I", len(data)) + data)
            sock.recv(1)

    def run(self, *args: str, stdin: Any = b"", **more: Any) -> subprocess.CompletedProcess[bytes]:
        if isinstance(stdin, bytes):
            more["input"] = stdin
        else:
            more["stdin"] = stdin
        return subprocess.run(
            [cli.BINARY, *args],
            env=self.env | more.pop("env", {}),
            capture_output="stdout" not in more,
            timeout=LIMIT_S,
            check=False,
            **more,
        )

    def popen(self, *args: str, **more: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([str(cli.BINARY), *args], env=self.env, **more)

    def close(self) -> None:
        for process in (self.channel, self.guest):
            process.kill()
            self._wait(process)
        self.registry.close()
        for each in self._locks:
            each.release()
        self.house.close()

    @staticmethod
    def _wait(process: subprocess.Popen[bytes]) -> None:
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


class Person:
    """`agent-box ARGS` at a terminal of its own; its stderr apart.

    Attributes:
        seen: what the terminal has shown, all of it.
    """

    def __init__(
        self,
        args: Sequence[str],
        env: dict[str, str],
        *,
        rows: int = 24,
        columns: int = 80,
    ) -> None:
        self.master, self._slave = pty.openpty()
        self.seen = b""
        self.resize(rows, columns)
        self.before = termios.tcgetattr(self.master)
        slave = self._slave
        self._err = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the terminal

        def own() -> None:
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [str(cli.BINARY), *args],
            stdin=slave,
            stdout=slave,
            stderr=self._err,
            env=env,
            start_new_session=True,
            preexec_fn=own,
        )

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, data: bytes) -> None:
        """Types, and looks at what is shown meanwhile."""
        os.set_blocking(self.master, False)
        try:
            while data:
                ready = select.select([self.master], [self.master], [], LIMIT_S)
                if self.master in ready[0]:
                    self._look()
                if self.master in ready[1]:
                    try:
                        data = data[os.write(self.master, data) :]
                    except BlockingIOError:
                        continue
        finally:
            os.set_blocking(self.master, True)

    def look(self, seconds: float) -> bool:
        """Takes in what is shown next. False: nothing in that time, or no more ever."""
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        return self._look()

    def _look(self) -> bool:
        try:
            piece = os.read(self.master, 65536)
        except OSError:
            return False
        self.seen += piece
        return bool(piece)

    def until(self, text: bytes, *, after: int = 0) -> int:
        """Waits until `text` is shown, from offset `after` on; gives the offset behind it."""
        deadline = time.monotonic() + LIMIT_S
        at = after
        while (found := self.seen.find(text, at)) < 0:
            at = max(after, len(self.seen) - len(text))
            left = deadline - time.monotonic()
            assert left > 0, (text, self.seen[-2000:])
            assert self.look(left) or self.process.poll() is None, (text, self.seen[-2000:])
        return found + len(text)

    @property
    def is_raw(self) -> bool:
        return not termios.tcgetattr(self.master)[3] & termios.ICANON

    @property
    def is_restored(self) -> bool:
        return termios.tcgetattr(self.master)[:6] == self.before[:6]

    def end(self) -> tuple[int, str]:
        """Its exit code and what it said on stderr."""
        deadline = time.monotonic() + LIMIT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.seen[-2000:]
            self.look(0.02)
        while self.look(0):
            pass
        self._err.seek(0)
        return self.process.returncode, self._err.read().decode()

    def __enter__(self) -> Person:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._err.close()
        os.close(self.master)
        os.close(self._slave)


def resting(pid: int) -> int:
    """Its memory, KiB, once it has used no time for a moment."""

    def used() -> list[str]:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]

    before = used()
    time.sleep(0.3)  # it does nothing only if it does nothing for a while
    if used() != before:
        return 0
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])
