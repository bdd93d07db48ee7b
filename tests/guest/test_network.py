"""The pump, with a packet socket in the place of tun0 and a Unix socket in that of vsock."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_box.guest import network
from agent_box.guest.network import BUFFER, FRAME_MAX, HEAD, Pump, stray_ack

WAIT_S = 20.0  # a bound on a hang


class Trusting(Pump):
    def trusts(self, peer: object) -> bool:
        return True


class Place:
    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "s")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen(8)
        self.tun, self.kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.tun.setblocking(False)
        for end in (self.tun, self.kernel):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self.kernel.settimeout(WAIT_S)
        self.pump = Trusting(self.tun.fileno(), self.listener)

    def dial(self) -> socket.socket:
        host = socket.socket(socket.AF_UNIX)
        host.connect(self.path)
        host.settimeout(WAIT_S)
        self.pump.turn(WAIT_S)
        return host

    def close(self) -> None:
        for each in (self.listener, self.tun, self.kernel):
            each.close()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(network, "established", list)
    made = Place(tmp_path)
    yield made
    made.close()


def frame(packet: bytes) -> bytes:
    return struct.pack("<I", len(packet)) + packet


def exactly(host: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        more = host.recv(count - len(got))
        assert more
        got += more
    return got


def test_frames_go_both_ways_however_they_are_cut(place: Place) -> None:
    host = place.dial()
    packets = [os.urandom(HEAD + n) for n in (1, 40, 1500, 65520)]
    for packet in packets:
        place.kernel.send(packet)
    place.pump.turn(WAIT_S)
    assert exactly(host, sum(4 + len(p) for p in packets)) == b"".join(map(frame, packets))
    stream = b"".join(map(frame, packets[:3]))
    for cut in range(0, len(stream), 7):
        host.send(stream[cut : cut + 7])
        place.pump.turn(WAIT_S)
    assert [place.kernel.recv(1 << 17) for _ in packets[:3]] == packets[:3]


def test_a_buffer_of_frames_passes_whole(place: Place) -> None:
    host = place.dial()
    packet = os.urandom(HEAD + 30000)
    host.setblocking(False)
    stream, sent, seen = frame(packet) * 100, 0, 0
    assert len(stream) > 2 * BUFFER
    place.kernel.setblocking(False)
    while seen < 100:
        try:
            sent += host.send(stream[sent:])
        except BlockingIOError:
            pass  # the pump has to take some first
        place.pump.turn(0)
        try:
            while place.kernel.recv(1 << 17) == packet:
                seen += 1
        except BlockingIOError:
            continue
    assert sent == len(stream)


def test_a_host_that_does_not_read_stalls_tun0_and_loses_nothing_that_was_taken(
    place: Place,
) -> None:
    host = place.dial()
    packet = os.urandom(HEAD + 60000)
    count = 0
    place.kernel.setblocking(False)
    for _ in range(200):
        try:
            place.kernel.send(packet)
            count += 1
        except BlockingIOError:
            break
        place.pump.turn(0)
    assert count < 200
    for number in range(count):
        got = b""
        while len(got) < 4 + len(packet):
            place.pump.turn(0)
            got += host.recv(4 + len(packet) - len(got))
        assert got == frame(packet), number


@pytest.mark.parametrize("size", [0, HEAD, FRAME_MAX + 1, 0xFFFFFFFF])
def test_a_bad_length_ends_the_stream(place: Place, size: int) -> None:
    host = place.dial()
    host.send(struct.pack("<I", size) + b"x" * 20)
    place.pump.turn(WAIT_S)
    assert _ended(host)
    again = place.dial()
    again.send(frame(b"y" * 60))
    place.pump.turn(WAIT_S)
    assert place.kernel.recv(1000) == b"y" * 60


def _ended(host: socket.socket) -> bool:
    try:
        return host.recv(1) == b""
    except ConnectionResetError:
        return True


def test_the_newest_stream_wins_and_half_a_frame_of_the_old_is_forgotten(place: Place) -> None:
    old = place.dial()
    old.send(struct.pack("<I", 1000) + b"half")
    place.pump.turn(WAIT_S)
    new = place.dial()
    assert old.recv(1) == b""
    new.send(frame(b"z" * 50))
    place.pump.turn(WAIT_S)
    assert place.kernel.recv(1000) == b"z" * 50
    place.kernel.send(b"k" * 50)
    place.pump.turn(WAIT_S)
    assert exactly(new, 54) == frame(b"k" * 50)


def test_a_stream_that_ends_is_waited_for_anew(place: Place) -> None:
    place.dial().close()
    place.pump.turn(WAIT_S)
    place.kernel.send(b"q" * 30)
    host = place.dial()
    place.pump.turn(WAIT_S)
    assert exactly(host, 34) == frame(b"q" * 30)


def test_a_packet_that_comes_as_the_stream_ends_waits_for_the_next(place: Place) -> None:
    place.dial().close()
    place.kernel.send(b"q" * 30)
    place.pump.turn(WAIT_S)  # hears of both
    host = place.dial()
    place.pump.turn(WAIT_S)
    assert exactly(host, 34) == frame(b"q" * 30)


def test_only_the_host_is_heard(tmp_path: Path) -> None:
    made = Place(tmp_path)
    made.pump = Pump(made.tun.fileno(), made.listener)
    made.pump.trusts = lambda peer: Pump.trusts(made.pump, (3, 1))  # type: ignore[method-assign]
    assert made.dial().recv(1) == b""
    made.close()


def test_who_is_made_to_speak(tmp_path: Path) -> None:
    line = "  1: {} {} {} 00000000:00000000 00:00000000 00000000 0 0 1".format
    ours, theirs = "020012C6:D431", "050012C6:01BB"
    mapped = "0000000000000000FFFF0000"
    expected = (bytes([198, 18, 0, 2]), 0xD431, bytes([198, 18, 0, 5]), 443)
    assert network._flow(line(ours, theirs, "01")) == expected
    assert network._flow(line(mapped + ours, mapped + theirs, "08")) == expected
    for state in ("02", "03", "06", "07", "0A", "0B", "0C"):
        assert network._flow(line(ours, theirs, state)) is None
    v6 = "B80D0120000000000000000000000001"
    assert network._flow(line(f"{v6}:0050", f"{v6}:0051", "01")) is None


def test_the_stray_segment_as_scapy_reads_it() -> None:
    from scapy.layers.inet import IP, TCP

    packet = stray_ack(bytes([198, 18, 0, 2]), 40000, bytes([198, 18, 0, 5]), 443)
    read = IP(packet)
    assert (read.src, read.dst, read[TCP].sport, read[TCP].dport) == (
        "198.18.0.5",
        "198.18.0.2",
        443,
        40000,
    )
    assert read[TCP].flags == "A"
    for layer in (read, read[TCP]):
        del layer.chksum
    assert bytes(read) == packet  # scapy computes the same checksums


IN_NAMESPACE = """
import fcntl, os, socket, struct, sys
sys.path.insert(0, sys.argv[1])
from agent_box.guest import network, system
try:
    tun = system.open_tun()
except PermissionError:
    sys.exit(77)
# The length of the queue is for the first user namespace alone; here the MTU is set twice.
network._SIOCSIFTXQLEN, network.QUEUE = network._SIOCSIFMTU, network.MTU
network.configure(tun)
network.configure(tun)
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect(("203.0.113.9", 9))
assert s.getsockname()[0] == "198.18.0.2", s.getsockname()
mtu = struct.unpack_from("=i", fcntl.ioctl(s, 0x8921, struct.pack("16s24x", b"tun0")), 16)[0]
assert mtu == 65520, mtu
try:
    socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).connect(("2001:db8::1", 9))
except OSError:
    pass
else:
    sys.exit("there is a way out by IPv6")
print("fine")
"""


def test_tun0_in_a_network_namespace(tmp_path: Path) -> None:
    from agent_box import guest

    (tmp_path / "agent_box").mkdir()
    (tmp_path / "agent_box" / "__init__.py").touch()
    (tmp_path / "agent_box" / "guest").symlink_to(Path(guest.__path__[0]))
    command = ["unshare", "-rn", sys.executable, "-I", "-B", "-c", IN_NAMESPACE, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if ran.returncode == 77:
        pytest.skip("/dev/net/tun is not for this account")
    assert ran.stdout == "fine\n", ran.stderr
