"""A real machine that stands still in the middle of its flows: for four seconds of everybody's
time, and for four hours by the clock of its network. What could go on goes on and is whole; what
ended meanwhile ends as TCP says.

The plane is the test's own, on the machine's stream, since a worker's clock cannot be set.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import guestport, planes
from support.machines import Machines
from support.planes import Running
from support.servers import Server
from support.until import until

pytestmark = [pytest.mark.timeout(600)]

WAIT_S = 60.0  # a bound on a hang
MUCH = 2 << 20  # bytes, by which a flow is under way
HARD = struct.pack("ii", 1, 0)  # SO_LINGER: close resets
KINDS = ("download", "upload", "idle", "finishes", "resets", "half")
# What the guest does, all at once; prints how each ended.
GUEST = """
import errno, json, os, select, socket, struct, threading, zlib
import encodings.idna
os.chroot("/run/box/root")
os.chdir("/")
address = socket.gethostbyname("app.test")
ends = {}

def download(sock):
    seen = total = 0
    while data := sock.recv(1 << 16):
        seen, total = zlib.crc32(data, seen), total + len(data)
    return [seen, total]

def upload(sock):
    block, seen, total = os.urandom(1 << 16), 0, 0
    while not select.select([sock], [], [], 0)[0]:
        sock.sendall(block)
        seen, total = zlib.crc32(block, seen), total + len(block)
    sock.shutdown(socket.SHUT_WR)
    while sock.recv(100):
        pass
    return [seen, total]

def idle(sock):
    asked = sock.recv(100)
    sock.sendall(asked[::-1])
    return asked.decode()

def hears(sock):
    return sock.recv(100).decode()

def half(sock):
    sock.shutdown(socket.SHUT_WR)
    return sock.recv(100).decode()

def one(kind, work):
    try:
        with socket.create_connection((address, PORT)) as sock:
            sock.sendall(kind.encode().ljust(10))
            ends[kind] = work(sock)
    except OSError as error:
        ends[kind] = errno.errorcode[error.errno]

work = {"download": download, "upload": upload, "idle": idle, "finishes": hears, "resets": hears,
        "half": half}
threads = [threading.Thread(target=one, args=pair) for pair in work.items()]
for each in threads: each.start()
for each in threads: each.join()
print(json.dumps(ends))
"""


class Upstream(Server):
    """The other end of the guest's flows, by their kinds."""

    def __init__(self) -> None:
        self.begun: set[str] = set()
        self.moved = {"download": 0, "upload": 0}
        self.sums = {"download": 0, "upload": 0}
        self.paused, self.over = threading.Event(), threading.Event()
        self.ended: dict[str, object] = {}
        super().__init__(self._by_kind)

    def _by_kind(self, sock: socket.socket) -> None:
        kind = sock.recv(10, socket.MSG_WAITALL).decode().strip()
        self.begun.add(kind)
        getattr(self, f"_{kind}")(sock)

    def _count(self, kind: str, data: bytes) -> None:
        self.sums[kind] = zlib.crc32(data, self.sums[kind])
        self.moved[kind] += len(data)

    def _download(self, sock: socket.socket) -> None:
        data = os.urandom(1 << 16)
        while not self.over.is_set():
            sock.sendall(data)
            self._count("download", data)

    def _upload(self, sock: socket.socket) -> None:
        told = False
        while data := sock.recv(1 << 16):
            self._count("upload", data)
            if self.over.is_set() and not told:
                told = True
                sock.sendall(b"enough")

    def _idle(self, sock: socket.socket) -> None:
        self.over.wait(4 * WAIT_S)
        sock.sendall(b"there")
        self.ended["idle"] = sock.recv(100)

    def _finishes(self, sock: socket.socket) -> None:
        self.paused.wait(4 * WAIT_S)
        sock.sendall(b"goodbye")

    def _resets(self, sock: socket.socket) -> None:
        self.paused.wait(4 * WAIT_S)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, HARD)

    def _half(self, sock: socket.socket) -> None:
        assert sock.recv(1) == b""
        self.over.wait(4 * WAIT_S)
        sock.sendall(b"late")


@pytest.fixture(scope="module")
def machine() -> Iterator[tuple[Machines, str]]:
    machines = Machines()
    try:
        machines.up()
        drive = machines.root / "guest.erofs"
        guestport.drive(machines.part("guest"), drive)
        instance = machines.create()
        machines.boot(instance, guest=machines.add(drive))
        machines.provision(instance)
        yield machines, instance
    finally:
        machines.close()


@pytest.mark.parametrize("seconds", [4, 4 * 3600])
def test_flows_of_a_paused_machine(
    machine: tuple[Machines, str], tmp_path: Path, seconds: int
) -> None:
    machines, instance = machine
    runtime = machines.paths.runtime
    upstream = Upstream()
    etc = planes.etc(tmp_path / "etc", {"app.test": "127.0.0.1"})
    rules = planes.policy(planes.here(f"app.test:{upstream.port}"))
    plane = Running(policy=rules, broker=None, etc=etc)
    with ThreadPoolExecutor(1) as pool:
        try:
            stream = guestport.network(runtime, instance)
            plane.do(lambda p: p.link(stream))
            code = f"PORT = {upstream.port}\n{GUEST}"
            inside = pool.submit(guestport.run, runtime, instance, code, seconds=4 * WAIT_S)

            def goes_on() -> None:
                before = dict(upstream.moved)
                for kind in before:
                    until(
                        f"the {kind} goes on",
                        lambda kind=kind: upstream.moved[kind] > before[kind] + MUCH,
                        seconds=WAIT_S,
                    )

            until("all have begun", lambda: upstream.begun == {*KINDS}, seconds=WAIT_S)
            goes_on()
            machines.engine("pause", machines.vmm(instance))
            upstream.paused.set()
            if seconds < 60:
                time.sleep(seconds)  # the pause itself
            else:
                plane.go_by(seconds)
            machines.engine("resume", machines.vmm(instance))
            goes_on()
        finally:
            upstream.paused.set()
            upstream.over.set()
        found = json.loads(inside.result(4 * WAIT_S))
        until("no flow is left", lambda: plane.do(lambda p: p.counters()).flows == 0)
        for kind in ("download", "upload"):
            assert found.pop(kind) == [upstream.sums[kind], upstream.moved[kind]], kind
        # One that is half closed and on which nothing moves is cut after ten minutes.
        assert found == {
            "idle": "there", "finishes": "goodbye", "resets": "ECONNRESET",
            "half": "late" if seconds < 60 else "ECONNRESET",
        }  # fmt: skip
        assert upstream.ended == {"idle": b"ereht"}
        assert plane.reports == []
    plane.close()
    upstream.close()
