"""A guest for the vsock device without a machine: VMM and virtio-vsock driver in one process.

`Vmm` speaks vhost-user as QEMU does, `Guest` is a driver with sockets as Linux has them, in a
thread of its own; `Backend` runs the real device as its own process. Hostile tests reach past
the sockets: `Guest.packet` sends any packet, `Ring` writes any descriptor.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

CID = 3
HEADER = struct.Struct("<QQIIIHHIII")
REQUEST, RESPONSE, RST, SHUTDOWN, RW, CREDIT_UPDATE, CREDIT_REQUEST = range(1, 8)
USER = 0x7F00_0000_0000  # where the VMM says it has the memory
GUEST = 0x10_0000  # where the guest has it
QUEUE = 128
RX_BYTES = 4096 + 44
TX_BYTES = 65536
F_ADD_SEALS, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 2, 4


class Ring:
    """The driver's side of a split virtqueue, at an offset of shared memory."""

    def __init__(self, memory: memoryview, at: int, size: int = QUEUE) -> None:
        self.memory = memory
        self.size = size
        self.desc = at
        self.avail = at + 16 * size
        self.used = (self.avail + 6 + 2 * size + 3) & ~3
        self.end = self.used + 6 + 8 * size
        self.avail16 = memory[self.avail : self.avail + 4 + 2 * size].cast("H")
        self.used16 = memory[self.used : self.used + 4].cast("H")
        self.index = 0
        self.seen = 0

    def describe(self, i: int, address: int, length: int, flags: int, follows: int = 0) -> None:
        struct.pack_into("<QIHH", self.memory, self.desc + 16 * i, address, length, flags, follows)

    def offer(self, head: int) -> None:
        self.avail16[2 + self.index % self.size] = head
        self.index = (self.index + 1) & 0xFFFF
        self.avail16[1] = self.index

    def returned(self) -> list[tuple[int, int]]:
        found = []
        while self.seen != self.used16[1]:
            at = self.used + 4 + 8 * (self.seen % self.size)
            found.append(struct.unpack_from("<II", self.memory, at))
            self.seen = (self.seen + 1) & 0xFFFF
        return found

    def addresses(self) -> tuple[int, int, int]:
        """desc, avail, used as the VMM sees them."""
        return USER + self.desc, USER + self.avail, USER + self.used


class Vmm:
    """The front end of vhost-user, and the memory of a guest."""

    def __init__(self, link: socket.socket, megabytes: int = 16) -> None:
        self.link = link
        link.settimeout(20)
        size = megabytes << 20
        self.fd = os.memfd_create("guest", os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
        import mmap

        self.memory = memoryview(mmap.mmap(self.fd, size))
        self.size = size
        self.kicks = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
        self.calls = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
        self.rings = [Ring(self.memory, 0x1000), Ring(self.memory, 0x8000)]
        self.bases = [0, 0]

    def close(self) -> None:
        self.link.close()
        for fd in (self.fd, *self.kicks, *self.calls):
            os.close(fd)

    def send(
        self, request: int, payload: bytes = b"", fds: tuple[int, ...] = (), flags: int = 1
    ) -> None:
        data = struct.pack("<III", request, flags, len(payload)) + payload
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.link.sendmsg([data], rights)

    def ask(self, request: int, payload: bytes = b"", fds: tuple[int, ...] = ()) -> bytes:
        self.send(request, payload, fds)
        return self.answer(request)

    def do(self, request: int, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """A request whose success is asked for."""
        self.send(request, payload, fds, 1 | 8)
        assert self.answer(request) == bytes(8)

    def answer(self, request: int) -> bytes:
        head = self.link.recv(12, socket.MSG_WAITALL)
        if len(head) < 12:
            raise EOFError("the device closed the link")
        got, flags, size = struct.unpack("<III", head)
        assert got == request and flags & 7 == 5, (got, flags)
        return self.link.recv(size, socket.MSG_WAITALL) if size else b""

    def introduce(self) -> None:
        """What QEMU says when the device is made."""
        features = struct.unpack("<Q", self.ask(1))[0]
        assert features & (1 << 32) and features & (1 << 30)
        protocol = struct.unpack("<Q", self.ask(15))[0]
        self.send(16, struct.pack("<Q", protocol))
        self.send(3)
        for i, call in enumerate(self.calls):
            self.do(13, struct.pack("<Q", i), (call,))
        config = self.ask(24, struct.pack("<III", 0, 8, 0) + bytes(8))
        assert struct.unpack_from("<Q", config, 12)[0] == CID

    def share(self, regions: list[tuple[int, int, int, int]] | None = None) -> None:
        table = regions or [(GUEST, self.size, USER, 0)]
        payload = struct.pack("<II", len(table), 0)
        payload += b"".join(struct.pack("<QQQQ", *region) for region in table)
        self.do(5, payload, (self.fd,) * len(table))

    def start(self) -> None:
        """What QEMU says when the driver is up, and after a pause."""
        self.send(2, struct.pack("<Q", 1 << 32 | 1 << 30))
        self.share()
        for i in range(2):
            self.start_queue(i)

    def start_queue(self, i: int) -> None:
        desc, avail, used = self.rings[i].addresses()
        self.do(8, struct.pack("<II", i, self.rings[i].size))
        self.do(10, struct.pack("<II", i, self.bases[i]))
        self.do(9, struct.pack("<IIQQQQ", i, 0, desc, used, avail, 0))
        self.do(12, struct.pack("<Q", i), (self.kicks[i],))
        self.do(13, struct.pack("<Q", i), (self.calls[i],))
        self.do(18, struct.pack("<II", i, 1))

    def stop(self) -> None:
        for i in range(2):
            self.do(18, struct.pack("<II", i, 0))
        for i in range(2):
            index, self.bases[i] = struct.unpack("<II", self.ask(11, struct.pack("<II", i, 0)))
            assert index == i

    def kick(self, i: int) -> None:
        os.eventfd_write(self.kicks[i], 1)


class GuestStream:
    """A connected socket in the guest."""

    def __init__(self, guest: Guest, port: int, host_port: int, alloc: int) -> None:
        self.guest = guest
        self.port = port
        self.host_port = host_port
        self.alloc = alloc
        self.data: deque[bytes] = deque()
        self.forwarded = self.told = self.received = 0
        self.sent = 0
        self.peer_alloc = self.peer_forwarded = 0
        self.peer_shut = 0
        self.shut = 0
        self.reset = False
        self.closed = False

    def _room(self) -> int:
        return self.peer_alloc - (self.sent - self.peer_forwarded)

    def recv(self, limit: int = 1 << 20, timeout: float = 30) -> bytes:
        """Some bytes; none at the end.

        Raises:
            ConnectionResetError: the other end is gone, and data with it.
        """
        with self.guest.changed:
            ready = self.guest.changed.wait_for(
                lambda: self.data or self.reset or self.peer_shut & 2, timeout
            )
            if not ready:
                raise TimeoutError("the guest waits for data")
            if self.reset:  # as Linux: what was not read is lost
                raise ConnectionResetError
            if not self.data:
                return b""
            first = self.data.popleft()
            if len(first) > limit:
                self.data.appendleft(first[limit:])
                first = first[:limit]
            self.forwarded += len(first)
            delta = self.forwarded - self.told
            if self.alloc - delta < 65536 or not self.data:
                self.packet(CREDIT_UPDATE)
            self._end_if_told()
            return first

    def recv_all(self, limit: int = 1 << 20, timeout: float = 30) -> bytes:
        data = bytearray()
        while piece := self.recv(limit, timeout):
            data += piece
        return bytes(data)

    def send(self, data: bytes | memoryview, timeout: float = 30) -> int:
        with self.guest.changed:
            ready = self.guest.changed.wait_for(
                lambda: self._room() > 0 or self.reset or self.peer_shut & 1, timeout
            )
            if not ready:
                raise TimeoutError("the guest waits for credit")
            if self.reset or self.peer_shut & 1:
                raise BrokenPipeError
            count = min(self._room(), len(data), TX_BYTES)
            self.sent += count
            self.packet(RW, data=bytes(data[:count]))
            return count

    def sendall(self, data: bytes, timeout: float = 30) -> None:
        view = memoryview(data)
        while view:
            view = view[self.send(view, timeout) :]

    def shutdown(self, flags: int) -> None:
        with self.guest.changed:
            self.shut |= flags
            self.packet(SHUTDOWN, flags=self.shut)

    def close(self) -> None:
        with self.guest.changed:
            if self.closed:
                return
            self.closed = True
            if self.reset:
                self.guest.forget(self)
            elif self.peer_shut == 3:
                self.packet(RST)
                self.guest.forget(self)
            else:
                self.packet(SHUTDOWN, flags=3)

    def _end_if_told(self) -> None:
        """Linux answers a full shutdown with RST once nothing is left to read."""
        if (
            self.peer_shut == 3
            and not self.data
            and self.guest.streams.get((self.port, self.host_port)) is self
        ):
            self.packet(RST)
            self.guest.forget(self)

    def packet(self, op: int, flags: int = 0, data: bytes = b"") -> None:
        self.told = self.forwarded
        self.guest.packet(
            CID, 2, self.port, self.host_port, len(data), 1, op, flags, self.alloc,
            self.forwarded & 0xFFFFFFFF, data=data,
        )  # fmt: skip


class Guest:
    """A virtio-vsock driver with a thread that answers interrupts."""

    def __init__(self, vmm: Vmm, *, alloc: int = 256 << 10, rx_bytes: int = RX_BYTES) -> None:
        self.vmm = vmm
        self.alloc = alloc
        self.rx_bytes = rx_bytes
        self.changed = threading.Condition(threading.RLock())
        self.streams: dict[tuple[int, int], GuestStream] = {}
        self.listening: dict[int, deque[GuestStream]] = {}
        self.resets = 0
        self.seen: deque[tuple[int, ...]] = deque(maxlen=2000)  # headers from the device
        self.rx, self.tx = vmm.rings
        self.paused = False  # takes no buffers back, hears nothing
        at = 0x10000
        for i in range(self.rx.size):
            self.rx.describe(i, GUEST + at, rx_bytes, 2)
            self.rx.offer(i)
            at += (rx_bytes + 63) & ~63
        self.rx_at = 0x10000
        self.slots = deque(range(self.tx.size // 2))
        self.tx_at = at
        assert at + len(self.slots) * (TX_BYTES + 64) <= vmm.size
        self._outbox: deque[tuple[bytes, bytes]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._over = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="guest")

    def up(self) -> None:
        self.vmm.introduce()
        self.vmm.start()
        self._thread.start()
        self.vmm.kick(0)

    def down(self) -> None:
        self._over = True
        os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join()
        os.close(self._wake)
        if self.error is not None:
            raise self.error

    def listen(self, port: int) -> None:
        self.listening[port] = deque()

    def accept(self, port: int, timeout: float = 30) -> GuestStream:
        with self.changed:
            if not self.changed.wait_for(lambda: self.listening[port], timeout):
                raise TimeoutError("nobody connects to the guest")
            return self.listening[port].popleft()

    def forget(self, stream: GuestStream) -> None:
        self.streams.pop((stream.port, stream.host_port), None)

    def packet(self, *fields: int, data: bytes = b"") -> None:
        with self.changed:
            self._outbox.append((HEADER.pack(*fields), data))
            self._flush()

    def wait(self, what: Any, timeout: float = 30) -> None:
        """Until something is so. Looked at after every interrupt."""
        with self.changed:
            assert self.changed.wait_for(what, timeout), "it never came"

    def _flush(self) -> None:
        sent = False
        while self._outbox and self.slots and not self.paused:
            packet, data = self._outbox.popleft()
            slot = self.slots.popleft()
            at = self.tx_at + slot * (TX_BYTES + 64)
            self.vmm.memory[at : at + 44] = packet
            self.vmm.memory[at + 44 : at + 44 + len(data)] = data
            if data and slot % 3:  # some in one buffer, most in two as Linux does
                self.tx.describe(2 * slot, GUEST + at, 44, 1, 2 * slot + 1)
                self.tx.describe(2 * slot + 1, GUEST + at + 44, len(data), 0)
            else:
                self.tx.describe(2 * slot, GUEST + at, 44 + len(data), 0)
            self.tx.offer(2 * slot)
            sent = True
        if sent:
            self.vmm.kick(1)

    def _run(self) -> None:
        poll = select.poll()
        for fd in (*self.vmm.calls, self._wake):
            poll.register(fd, select.POLLIN)
        try:
            while not self._over:
                for fd, _ in poll.poll():
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(fd)
                with self.changed:
                    if not self.paused:
                        self._interrupt()
                    self.changed.notify_all()
        except BaseException as error:  # told to whoever ends the guest
            self.error = error
            raise

    def _interrupt(self) -> None:
        for head, _ in self.tx.returned():
            self.slots.append(head // 2)
        for head, length in self.rx.returned():
            at = self.rx_at + head * ((self.rx_bytes + 63) & ~63)
            fields = HEADER.unpack_from(self.vmm.memory, at)
            assert length == 44 + fields[4], (length, fields)
            data = bytes(self.vmm.memory[at + 44 : at + length])
            self.rx.offer(head)
            self._received(fields, data)
        self.vmm.kick(0)
        self._flush()

    def _received(self, fields: tuple[int, ...], data: bytes) -> None:
        source, target, host_port, port, _, kind, op, flags, alloc, passed = fields
        assert (source, target) == (2, CID)
        self.seen.append(fields)
        stream = self.streams.get((port, host_port))
        if op == RST:
            self.resets += 1
            if stream is not None:
                stream.reset = not (stream.closed or stream.peer_shut == 3)
                self.forget(stream)
            return
        assert kind == 1
        if stream is None:
            queue = self.listening.get(port)
            if op != REQUEST or queue is None:
                self.packet(CID, 2, port, host_port, 0, 1, RST, 0, 0, 0)
                return
            stream = GuestStream(self, port, host_port, self.alloc)
            self.streams[port, host_port] = stream
            queue.append(stream)
            stream.peer_alloc, stream.peer_forwarded = alloc, passed
            stream.packet(RESPONSE)
            return
        assert op != REQUEST, "a second request"
        stream.peer_alloc = alloc
        behind = stream.peer_forwarded + ((passed - stream.peer_forwarded) & 0xFFFFFFFF)
        assert behind <= stream.sent, "credit for what was never sent"
        stream.peer_forwarded = behind
        if op == RW:
            assert not stream.peer_shut & 2, "data after the end"
            stream.received += len(data)
            assert stream.received - stream.told <= stream.alloc, "more than the window"
            if not stream.closed:
                stream.data.append(data)
            else:
                stream.forwarded += len(data)
        elif op == SHUTDOWN:
            stream.peer_shut |= flags
            stream._end_if_told()
        elif op == CREDIT_REQUEST:
            stream.packet(CREDIT_UPDATE)


class Backend:
    """The device as its own process, as a shim starts it."""

    def __init__(
        self,
        directory: Path,
        *,
        cid: int = CID,
        backlog: int = 1024,
        descriptors: int | None = None,
    ) -> None:
        self.path = directory / "v.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.fspath(self.path))
        listener.listen(backlog)
        self.vmm_end, device_end = socket.socketpair()
        ready, ready_end = os.pipe()
        fds = (device_end.fileno(), listener.fileno(), ready_end)
        self.log = directory / "device.log"
        limit = []
        if descriptors is not None:
            limit = ["/bin/sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh"]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*limit, *command(*fds, cid)], pass_fds=fds, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, cwd="/",
            )  # fmt: skip
        device_end.close()
        listener.close()  # so that a device that dies takes its backlog with it
        os.close(ready_end)
        with open(ready, "rb") as pipe:
            said = pipe.read()
        assert said == b"READY\n", self.log.read_text()

    def connect(self, port: int, timeout: float = 30) -> socket.socket:
        """Asks for a port, without waiting for the answer."""
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout)
        sock.connect(os.fspath(self.path))
        sock.sendall(b"CONNECT %d\n" % port)
        return sock

    def dial(self, port: int, timeout: float = 30) -> socket.socket:
        """A stream to the guest.

        Raises:
            ConnectionRefusedError: the guest or the device did not want it.
        """
        sock = self.connect(port, timeout)
        line = b""
        while not line.endswith(b"\n"):
            piece = sock.recv(1)
            if not piece:
                sock.close()
                raise ConnectionRefusedError(port)
            line += piece
        assert line.startswith(b"OK "), line
        return sock

    def statistics(self) -> dict[str, int]:
        """What the device says of itself, by its signal."""
        before = self.log.stat().st_size
        self.process.send_signal(signal.SIGUSR1)
        with open(self.log, "rb") as log:
            log.seek(before)
            line = b""
            while not line.endswith(b"\n"):
                line += log.readline()
                assert self.process.poll() is None, self.log.read_text()
        found: dict[str, int] = json.loads(line)
        return found

    def last_words(self, timeout: float = 20) -> tuple[int, dict[str, Any]]:
        """Exit status and the last line, after it ended by itself."""
        status = self.process.wait(timeout)
        text = self.log.read_text()
        assert "Traceback" not in text, text
        return status, json.loads(text.splitlines()[-1])

    def __enter__(self) -> Backend:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.vmm_end.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def command(vhost: int, listen: int, ready: int, cid: int) -> list[str]:
    """The device's command line."""
    return [
        sys.executable, "-I", "-B", "-m", "agent_box.engine.vsock", "--vhost-fd", str(vhost),
        "--listen-fd", str(listen), "--ready-fd", str(ready), "--cid", str(cid),
    ]  # fmt: skip
