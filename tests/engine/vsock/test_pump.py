"""Everything together in one process, with a guest, a VMM and clients that do anything.

The device's own loop is stepped, so nothing here waits and a seed always plays the same. It
must never raise anything but the end of the link, never keep more than the windows allow, and
never leave a client without an end when its stream has one.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import tempfile
from pathlib import Path

import pytest
from support.vsockguest import (
    CID,
    CREDIT_UPDATE,
    GUEST,
    HEADER,
    REQUEST,
    RESPONSE,
    RST,
    RW,
    SHUTDOWN,
    Ring,
    Vmm,
)

from agent_box.engine.vsock.device import Device
from agent_box.engine.vsock.streams import LARGE_STREAMS, LARGE_WINDOW, SMALL_WINDOW
from agent_box.engine.vsock.vhost import LinkError

CLIENTS = 12


class World:
    """A device, and a guest whose memory is written by the dice."""

    def __init__(self, rnd: random.Random, path: str) -> None:
        self.rnd = rnd
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(64)
        ours, self.theirs = socket.socketpair()
        self.vmm = Vmm(ours, 1)
        self.device = Device(self.theirs, self.listener, CID, max_clients=CLIENTS)
        self.clients: list[socket.socket] = []
        self.ports: dict[int, int] = {}  # host port: guest port, as the guest heard
        self.free: list[int] = []
        self.harmed = False

    def close(self) -> None:
        for sock in (*self.clients, self.listener, self.theirs):
            sock.close()
        for client in self.device._hosts.clients.values():
            client.sock.close()
        self.device._epoll.close()
        for fd in (*self.device._kicks, *(c for c in self.device._calls if c is not None)):
            os.close(fd)
        self.vmm.close()
        os.unlink(self.path)

    def step(self) -> None:
        """One turn of the device; what it finds to do at once is done at the next."""
        assert self.device._wait(True)
        self.device._turn()
        told = self.device.statistics()
        most = LARGE_STREAMS * LARGE_WINDOW + CLIENTS * SMALL_WINDOW
        assert told["kept"] <= most and told["connected"] <= CLIENTS
        for client in self.device._hosts.clients.values():
            assert client.stream is None or len(client.kept) <= client.stream.window

    def setup(self) -> None:
        """A driver that begins anew."""
        vmm = self.vmm
        vmm.rings = [Ring(vmm.memory, 0x1000), Ring(vmm.memory, 0x8000)]
        for ring in vmm.rings:
            vmm.memory[ring.desc : ring.end] = bytes(ring.end - ring.desc)
        rx, self.tx = vmm.rings
        for i in range(64):
            rx.describe(i, GUEST + 0x10000 + i * 4160, 4140, 2)
            rx.offer(i)
        self.free = list(range(0, self.tx.size, 2))
        vmm.send(5, struct.pack("<IIQQQQ", 1, 0, GUEST, vmm.size, 0x7F0000000000, 0), (vmm.fd,))
        for i, ring in enumerate(vmm.rings):
            vmm.send(8, struct.pack("<II", i, ring.size))
            vmm.send(10, struct.pack("<II", i, 0))
            desc, avail, used = ring.addresses()
            vmm.send(9, struct.pack("<IIQQQQ", i, 0, desc, used, avail, 0))
            vmm.send(12, struct.pack("<Q", i), (vmm.kicks[i],))
            vmm.send(13, struct.pack("<Q", i), (vmm.calls[i],))
        self.step()

    def stop(self) -> None:
        for i in range(2):
            self.vmm.send(11, struct.pack("<II", i, 0))
        self.step()
        self.vmm.link.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while self.vmm.link.recv(1000):
                pass
        self.ports.clear()

    def listen(self) -> None:
        """The guest takes what came, and answers as it likes."""
        rx = self.vmm.rings[0]
        for head, length in rx.returned():
            if head >= 64 or not 44 <= length <= 4140:
                assert self.harmed  # the bytes that were overwritten
                continue
            fields = HEADER.unpack_from(self.vmm.memory, 0x10000 + head * 4160)
            if fields[6] == REQUEST:
                self.ports[fields[2]] = fields[3]
                if self.rnd.random() < 0.9:
                    self.packet(fields[2], self.rnd.choice((RESPONSE, RESPONSE, RST)), 0)
            elif fields[6] == RST:
                self.ports.pop(fields[2], None)
            if self.rnd.random() < 0.95:
                rx.offer(head)
        for head, _ in self.tx.returned():
            if head < self.tx.size - 1:
                self.free.append(head)
        self.vmm.kick(0)

    def packet(self, host_port: int, op: int, size: int, *, honest: bool = True) -> None:
        if not self.free:
            return
        rnd = self.rnd
        head = self.free.pop(0)
        at = 0x60000 + (head // 2 % 16) * 0x8000
        fields = [
            CID, 2, self.ports.get(host_port, 1), host_port, size, 1, op, rnd.randrange(4),
            65536, rnd.choice((0, 0, 4096)),
        ]  # fmt: skip
        if not honest:
            place = rnd.randrange(10)
            fields[place] = rnd.getrandbits((64, 64, 32, 32, 32, 16, 16, 32, 32, 32)[place])
        HEADER.pack_into(self.vmm.memory, at, *fields)
        cut = rnd.choice((44, 44, 20, 44 + size))
        if cut in (44, 20) and 44 + size > cut:
            self.tx.describe(head, GUEST + at, cut, 1, head + 1)
            self.tx.describe(head + 1, GUEST + at + cut, 44 + size - cut, 0)
        else:
            self.tx.describe(head, GUEST + at, 44 + size, 0)
        self.tx.offer(head)
        self.vmm.kick(1)

    def client(self) -> None:
        """A client does something."""
        rnd = self.rnd
        if len(self.clients) < 2 * CLIENTS and rnd.random() < 0.3:
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            sock.connect(self.path)
            sock.send(rnd.choice((b"CONNECT 5000\n", b"CONNECT 5000\nmore", b"CONN", b"what\n")))
            self.clients.append(sock)
        elif self.clients:
            sock = rnd.choice(self.clients)
            what = rnd.random()
            with contextlib.suppress(BlockingIOError, ConnectionError):
                if what < 0.4:
                    sock.send(rnd.randbytes(rnd.choice((1, 100, 5000, 70000))))
                elif what < 0.7:
                    sock.recv(rnd.choice((1, 1000, 100_000)))
                elif what < 0.8:
                    sock.shutdown(rnd.choice((socket.SHUT_RD, socket.SHUT_WR)))
                else:
                    sock.close()
                    self.clients.remove(sock)

    def harm(self) -> None:
        """Bytes of a ring are overwritten."""
        self.harmed = True
        ring = self.rnd.choice(self.vmm.rings)
        for _ in range(self.rnd.randint(1, 8)):
            self.vmm.memory[self.rnd.randrange(ring.desc, ring.end)] = self.rnd.getrandbits(8)
        self.vmm.kick(self.rnd.randrange(2))


def play(seed: int, steps: int, directory: str) -> dict[str, int]:
    """One world. What its device counted."""
    rnd = random.Random(seed)
    world = World(rnd, os.path.join(directory, "s"))
    harmful = rnd.random() < 0.5
    try:
        if rnd.random() < 0.8:
            world.setup()
        up = bool(world.free)
        for _ in range(steps):
            what = rnd.random()
            if not up:
                if what < 0.1:
                    world.setup()
                    up = True
                else:
                    world.client()
            elif what < 0.45:
                world.client()
            elif what < 0.75 and world.ports:
                port = rnd.choice(list(world.ports))
                op = rnd.choice((RW,) * 10 + (CREDIT_UPDATE, SHUTDOWN, RST))
                size = rnd.choice((1, 100, 5000, 30000)) if op == RW else 0
                world.packet(port, op, size, honest=rnd.random() < 0.95)
            elif what < 0.95:
                world.listen()
            elif what < 0.955:
                world.stop()
                up = False
            elif harmful and what < 0.97:
                world.harm()
            if rnd.random() < 0.7:
                world.step()
        told = world.device.statistics()
        # in the end the VMM goes away, and every client reads to an end
        if rnd.random() < 0.5:
            world.vmm.send(rnd.getrandbits(8) | 128)
            with pytest.raises(LinkError):
                world.device.run()
        else:
            world.vmm.link.close()
            for sock in world.clients:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    while sock.recv(1 << 20):
                        pass
            for client in list(world.device._hosts.clients.values()):
                if client.kept:  # nobody will read it: do not wait for that
                    world.device._hosts.close(client)
            world.device.run()
            assert len(world.device._table) == 0
        return told
    finally:
        world.close()


@pytest.mark.parametrize("seed", range(40))
def test_a_world_that_does_anything(seed: int, tmp_path: Path) -> None:
    play(seed, 400, str(tmp_path))


def test_the_worlds_reach_what_they_should(tmp_path: Path) -> None:
    totals: dict[str, int] = {}
    for seed in range(100, 130):
        for name, count in play(seed, 400, str(tmp_path)).items():
            totals[name] = totals.get(name, 0) + count
    for name in ("opened", "to_guest", "to_host", "violations", "strays", "breaks", "misspoken",
                 "pauses", "turned_away", "kept"):  # fmt: skip
        assert totals[name], (name, totals)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_worlds_for_long() -> None:
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(1000, 6000):
            play(seed, 400, directory)
