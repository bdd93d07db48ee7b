"""The pump: network frames between tun0 and the host's stream on port 5003.

A process of its own, kept by PID 1, so that flows outlive the agent process. A frame is a
little-endian u32 that counts what follows, a virtio-net header of ten bytes and one IP packet
(virtio 1.2, 5.1.6; the kernel's own form for a tun with IFF_VNET_HDR). The newest stream of
the host wins. What comes before there is a stream, or faster than the host takes it, waits
in the kernel's queue of tun0 and is then lost, as on any network.

A host that dials anew may have lost every flow, and an idle end would wait for ever. So each
established connection is made to speak: a segment that fits nowhere is given to it, which it
answers (RFC 9293, 3.10.7.4), and a host that knows no such flow answers that with a reset.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct

from agent_box.guest import system
from agent_box.guest.ports import Inherited
from agent_box.guest.wire import HOST_CID, NETWORK_PORT

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from typing import Final

TUN: Final = "tun0"
ADDRESS: Final = "198.18.0.2"
MASK: Final = "255.254.0.0"
GATEWAY: Final = "198.18.0.1"
ANY: Final = "0.0.0.0"  # noqa: S104 - the destination of a route, nothing is bound to it
MTU: Final = 65520
QUEUE: Final = 5000  # packets
HEAD: Final = 10  # bytes of a virtio-net header
FRAME_MAX: Final = HEAD + 65535
BUFFER: Final = 1 << 20
BATCH: Final = 64  # packets of one turn
NOBODY: Final = 65534

_SIOCADDRT: Final = 0x890B
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_SIOCSIFADDR: Final = 0x8916
_SIOCSIFNETMASK: Final = 0x891C
_SIOCSIFMTU: Final = 0x8922
_SIOCSIFTXQLEN: Final = 0x8943
_TUNSETOFFLOAD: Final = 0x400454D0
_OFFLOADS: Final = 0x1 | 0x2 | 0x4  # checksums, TCP over IPv4 and over IPv6
_IFF_UP: Final = 0x1
_RTF_UP_GATEWAY: Final = 0x1 | 0x2
_SPEAKING: Final = frozenset((0x01, 0x04, 0x05, 0x08, 0x09))  # states of tcp(7) with a peer
_TCP: Final = 6
_ACK: Final = 0x10


def main(inherited: Inherited) -> None:
    """Pumps for as long as the machine runs."""
    assert inherited.tun is not None
    system.spare(-1000)
    configure(inherited.tun)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    system.log("the network pump runs")
    Pump(inherited.tun, inherited.listeners[NETWORK_PORT]).run()


def configure(tun: int) -> None:
    """Gives tun0 its addresses and the machine its one route. Twice is as once.

    Raises:
        OSError: as the kernel says.
    """
    fcntl.ioctl(tun, _TUNSETOFFLOAD, _OFFLOADS)
    try:
        with open(f"/proc/sys/net/ipv6/conf/{TUN}/disable_ipv6", "w") as file:
            file.write("1")  # there is no way out by IPv6, and nothing shall look for one
    except FileNotFoundError:
        pass  # this kernel has no IPv6
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:

        def set_(request: int, name: str, value: bytes) -> None:
            fcntl.ioctl(control, request, struct.pack("16s24s", name.encode(), value))

        set_(_SIOCSIFMTU, TUN, struct.pack("=i", MTU))
        set_(_SIOCSIFTXQLEN, TUN, struct.pack("=i", QUEUE))
        set_(_SIOCSIFADDR, TUN, _sockaddr(ADDRESS))
        set_(_SIOCSIFNETMASK, TUN, _sockaddr(MASK))
        for name in ("lo", TUN):
            asked = struct.pack("16s24x", name.encode())
            (flags,) = struct.unpack_from("=H", fcntl.ioctl(control, _SIOCGIFFLAGS, asked), 16)
            set_(_SIOCSIFFLAGS, name, struct.pack("=H", flags | _IFF_UP))
        route = struct.pack(
            "@L16s16s16sHhLPhPLLH6x",  # struct rtentry of linux/route.h
            0, _sockaddr(ANY), _sockaddr(GATEWAY), _sockaddr(ANY),
            _RTF_UP_GATEWAY, 0, 0, 0, 0, 0, 0, 0, 0,
        )  # fmt: skip
        try:
            fcntl.ioctl(control, _SIOCADDRT, route)
        except FileExistsError:
            pass


def _sockaddr(address: str) -> bytes:
    return struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


class Pump:
    """Moves frames.

    Args:
        tun: non-blocking, with virtio-net headers.
        listener: of the host's streams; whoever else connects is refused.
    """

    def __init__(self, tun: int, listener: socket.socket) -> None:
        self._tun = tun
        self._listener = listener
        self._stream: socket.socket | None = None
        self._poll = select.epoll()
        self._down = memoryview(bytearray(BUFFER))  # host to guest
        self._filled = 0
        self._up = memoryview(bytearray(BUFFER))  # guest to host, from _sent to _ready
        self._sent = self._ready = 0
        self._writing = False
        listener.setblocking(False)
        self._poll.register(listener.fileno(), select.EPOLLIN)

    def run(self) -> None:
        while True:
            self.turn(-1)

    def turn(self, seconds: float) -> None:
        """Handles what is ready; waits for it for so long, or without end."""
        for fd, events in self._poll.poll(seconds):
            if fd == self._listener.fileno():
                self._accept()
            elif self._stream is None:
                pass  # it ended in this very turn: what tun0 has waits for the next
            elif fd == self._tun:
                self._take()
            elif fd == self._stream.fileno():
                if events & ~select.EPOLLOUT:
                    self._give()
                if events & select.EPOLLOUT and self._stream is not None:
                    self._flush()

    def _accept(self) -> None:
        try:
            stream, peer = self._listener.accept()
        except OSError as error:
            system.log(f"network: accept: {error}")
            return
        if not self.trusts(peer):
            stream.close()
            return
        stream.setblocking(False)
        self._end()
        self._stream = stream
        self._poll.register(stream.fileno(), select.EPOLLIN)
        self._poll.register(self._tun, select.EPOLLIN)
        # also at the first: this process may not be the first
        self.wake(established())

    def trusts(self, peer: tuple[int, int]) -> bool:
        return peer[0] == HOST_CID

    def _end(self) -> None:
        if self._stream is None:
            return
        self._poll.unregister(self._stream.fileno())
        if not self._writing:
            self._poll.unregister(self._tun)
        self._stream.close()
        self._stream = None
        self._filled = self._sent = self._ready = 0
        self._writing = False

    def _give(self) -> None:
        """From the stream to tun0."""
        assert self._stream is not None
        try:
            count = self._stream.recv_into(self._down[self._filled :])
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._end()
            return
        view, at, end = self._down, 0, self._filled + count
        while end - at >= 4:
            size = int.from_bytes(view[at : at + 4], "little")
            if not HEAD < size <= FRAME_MAX:
                system.log(f"network: a frame of {size} bytes ends the stream")
                self._end()
                return
            if end - at < 4 + size:
                break
            self._write(view[at + 4 : at + 4 + size])
            at += 4 + size
        self._filled = end - at
        if at and self._filled:
            view[: self._filled] = view[at:end]

    def _write(self, frame: memoryview | bytes) -> None:
        try:
            os.write(self._tun, frame)
        except OSError:
            pass  # tun0 is down, its queue full or the packet none: lost, as on any network

    def _take(self) -> None:
        """From tun0 to the stream, as much as there is, at most a buffer."""
        view, at = self._up, 0
        for _ in range(BATCH):
            if BUFFER - at < 4 + FRAME_MAX:
                break
            try:
                size = os.readv(self._tun, [view[at + 4 : at + 4 + FRAME_MAX]])
            except BlockingIOError:
                break
            view[at : at + 4] = size.to_bytes(4, "little")
            at += 4 + size
        self._sent, self._ready = 0, at
        self._flush()

    def _flush(self) -> None:
        assert self._stream is not None
        try:
            while self._sent < self._ready:
                self._sent += self._stream.send(self._up[self._sent : self._ready])
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._poll.modify(self._stream.fileno(), select.EPOLLIN | select.EPOLLOUT)
                self._poll.unregister(self._tun)
            return
        except OSError:
            self._end()
            return
        if self._writing:
            self._writing = False
            self._poll.modify(self._stream.fileno(), select.EPOLLIN)
            self._poll.register(self._tun, select.EPOLLIN)

    def wake(self, flows: list[tuple[bytes, int, bytes, int]]) -> None:
        """Gives each flow a segment from its peer that it will answer."""
        for flow in flows:
            self._write(bytes(HEAD) + stray_ack(*flow))


def established() -> list[tuple[bytes, int, bytes, int]]:
    """The TCP flows that go out by tun0: our address and port, the peer's address and port."""
    found = []
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{name}") as file:
                lines = file.read().splitlines()[1:]
        except FileNotFoundError:
            continue  # this kernel has no IPv6
        found += [flow for line in lines if (flow := _flow(line)) is not None]
    ours = socket.inet_aton(ADDRESS)
    return [flow for flow in found if flow[0] == ours]


def _flow(line: str) -> tuple[bytes, int, bytes, int] | None:
    """One line of /proc/net/tcp or tcp6; None for what is not in such a state, or is IPv6."""
    _, local, remote, state = line.split()[:4]
    if int(state, 16) not in _SPEAKING:
        return None
    ends: list[tuple[bytes, int]] = []
    for text in (local, remote):
        address, _, port = text.partition(":")
        if len(address) == 32:
            if not address.startswith("0000000000000000FFFF0000"):
                return None
            address = address[24:]
        ends.append((int(address, 16).to_bytes(4, "little"), int(port, 16)))
    return (*ends[0], *ends[1])


def stray_ack(ours: bytes, our_port: int, theirs: bytes, their_port: int) -> bytes:
    """An IPv4 packet from the peer: an ACK whose numbers fit in no window but by chance."""
    segment = bytearray(struct.pack(">HHIIBBHHH", their_port, our_port, 0, 0, 0x50, _ACK, 0, 0, 0))
    pseudo = theirs + ours + struct.pack(">BBH", 0, _TCP, len(segment))
    segment[16:18] = _sum(pseudo + segment).to_bytes(2, "big")
    head = bytearray(
        struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(segment), 0, 0, 64, _TCP, 0) + theirs + ours
    )
    head[10:12] = _sum(bytes(head)).to_bytes(2, "big")
    return bytes(head + segment)


def _sum(data: bytes) -> int:
    """The Internet checksum (RFC 1071) of an even number of bytes."""
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
