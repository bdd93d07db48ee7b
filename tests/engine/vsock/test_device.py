"""The device as it runs: its own sealed process, a driver over shared memory, and clients."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.vsockguest import (
    CID,
    GUEST,
    REQUEST,
    RESPONSE,
    RST,
    RW,
    SHUTDOWN,
    USER,
    Backend,
    Guest,
    GuestStream,
    Ring,
    Vmm,
)

ECHO = 5000


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Backend]:
    with Backend(tmp_path) as started:
        yield started


@pytest.fixture
def guest(backend: Backend) -> Iterator[Guest]:
    vmm = Vmm(backend.vmm_end)
    made = Guest(vmm)
    made.listen(ECHO)
    made.up()
    yield made
    made.down()
    vmm.close()


def pair(backend: Backend, guest: Guest) -> tuple[socket.socket, GuestStream]:
    client = backend.dial(ECHO)
    return client, guest.accept(ECHO)


def until(backend: Backend, **wanted: int) -> None:
    """Until the device counts that; what it hears from two sides has no order."""
    for _ in range(2000):
        told = backend.statistics()
        if all(told[name] == count for name, count in wanted.items()):
            return
    raise AssertionError((told, wanted))


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def read_all(client: socket.socket) -> bytes:
    data = bytearray()
    while piece := client.recv(1 << 20):
        data += piece
    return bytes(data)


def pump(sock: socket.socket, data: bytes, chunk: int) -> threading.Thread:
    """Writes it in pieces, and then no more, from another thread."""

    def write() -> None:
        view = memoryview(data)
        for at in range(0, len(view), chunk):
            sock.sendall(view[at : at + chunk])
        sock.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def test_hello_both_ways(backend: Backend, guest: Guest) -> None:
    client, inside = pair(backend, guest)
    client.sendall(b"question")
    assert inside.recv() == b"question"
    inside.sendall(b"answer")
    assert client.recv(100) == b"answer"
    client.close()
    assert inside.recv() == b""


SIZES = [1, 2, 43, 44, 45, 4095, 4096, 4097, 32768, 65535, 65537, 262145, 1 << 20, 4 << 20]


@pytest.mark.parametrize("chunk", SIZES)
def test_every_size_of_write_to_the_guest(backend: Backend, guest: Guest, chunk: int) -> None:
    data = noise(chunk, min(4 << 20, max(chunk * 3, 2000)))
    client, inside = pair(backend, guest)
    writer = pump(client, data, chunk)
    assert inside.recv_all() == data
    writer.join()
    client.close()


@pytest.mark.parametrize("chunk", SIZES)
def test_every_size_of_write_from_the_guest(backend: Backend, guest: Guest, chunk: int) -> None:
    data = noise(chunk, min(4 << 20, max(chunk * 3, 2000)))
    client, inside = pair(backend, guest)

    def write() -> None:
        for at in range(0, len(data), chunk):
            inside.sendall(data[at : at + chunk])
        inside.close()

    writer = threading.Thread(target=write)
    writer.start()
    assert read_all(client) == data
    writer.join()
    client.close()


def test_data_that_follows_the_line_at_once_is_the_streams(backend: Backend, guest: Guest) -> None:
    client = backend.connect(ECHO)
    client.sendall(b"early")
    client.shutdown(socket.SHUT_WR)
    inside = guest.accept(ECHO)
    assert inside.recv_all() == b"early"
    inside.sendall(b"late")
    inside.close()
    said = read_all(client)
    assert said.startswith(b"OK ") and said.endswith(b"\nlate")


def test_a_line_in_pieces(backend: Backend, guest: Guest) -> None:
    client = socket.socket(socket.AF_UNIX)
    client.connect(os.fspath(backend.path))
    for letter in b"CONNECT 5000\n":
        client.sendall(bytes([letter]))
    inside = guest.accept(ECHO)
    inside.sendall(b"!")
    inside.close()
    assert read_all(client).endswith(b"\n!")


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"CONNECT\n",
        b"CONNECT \n",
        b"connect 5000\n",
        b"CONNECT -1\n",
        b"CONNECT 4294967295\n",
        b"CONNECT 99999999999\n",
        b"CONNECT 5000 \n",
        b"CONNECT 5000\r\n",
        "CONNECT ٥٠٠٠\n".encode(),
        b"x" * 32,
        b"x" * 5000,
    ],
)
def test_a_wrong_line_is_the_end(backend: Backend, guest: Guest, line: bytes) -> None:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(20)
    client.connect(os.fspath(backend.path))
    client.sendall(line)
    try:
        assert client.recv(10) == b""
    except ConnectionResetError:
        pass  # it closed without reading the rest
    assert backend.statistics()["misspoken"] == 1
    assert backend.statistics()["opened"] == 0


def test_a_port_that_nobody_listens_on_is_refused(backend: Backend, guest: Guest) -> None:
    with pytest.raises(ConnectionRefusedError):
        backend.dial(4999)


def test_the_guest_cannot_connect_out(backend: Backend, guest: Guest) -> None:
    for port in range(50):
        guest.packet(CID, 2, 10000 + port, 1234, 0, 1, REQUEST, 0, 65536, 0)
    guest.wait(lambda: guest.resets == 50)
    assert backend.statistics()["refused"] == 50
    until(backend, streams=0)


def test_clients_wait_for_the_driver(backend: Backend) -> None:
    early = [backend.connect(ECHO) for _ in range(5)]
    gone = backend.connect(ECHO)
    until(backend, waiting=6)
    gone.close()
    until(backend, waiting=5)
    vmm = Vmm(backend.vmm_end)
    guest = Guest(vmm)
    guest.listen(ECHO)
    guest.up()
    try:
        for _ in early:
            guest.accept(ECHO).sendall(b"?")
        for client in early:
            assert client.recv(3) == b"OK "
            client.close()
        until(backend, opened=5, waiting=0)
    finally:
        guest.down()
        vmm.close()


@pytest.mark.parametrize("driver", [False, True])
def test_a_client_that_goes_away_with_its_line_is_not_kept(backend: Backend, driver: bool) -> None:
    vmm = Vmm(backend.vmm_end)
    guest = Guest(vmm)
    if driver:
        guest.up()
    os.kill(backend.process.pid, signal.SIGSTOP)  # so that the line and the end are one event
    gone = backend.connect(ECHO)
    gone.close()
    os.kill(backend.process.pid, signal.SIGCONT)
    until(backend, clients=1, waiting=0, connected=0, streams=0)
    if driver:
        guest.down()
    vmm.close()


def test_half_close_from_the_host_then_the_answer(backend: Backend, guest: Guest) -> None:
    data = noise(1, 3 << 20)
    client, inside = pair(backend, guest)
    writer = pump(client, data, 100_000)
    assert hashlib.sha256(inside.recv_all()).digest() == hashlib.sha256(data).digest()
    answerer = threading.Thread(target=lambda: (inside.sendall(data), inside.close()))
    answerer.start()
    assert read_all(client) == data
    writer.join()
    answerer.join()


def test_half_close_from_the_guest_then_more_from_the_host(backend: Backend, guest: Guest) -> None:
    client, inside = pair(backend, guest)
    inside.sendall(b"that is all")
    inside.shutdown(2)
    assert read_all(client) == b"that is all"
    writer = pump(client, b"but I " * 100_000, 70_000)
    assert inside.recv_all() == b"but I " * 100_000
    inside.close()
    writer.join()
    client.close()
    guest.wait(lambda: not guest.streams)
    until(backend, streams=0)


def test_shutdown_flags_add_up(backend: Backend, guest: Guest) -> None:
    """Linux tells them one after the other; together they are a close."""
    client, inside = pair(backend, guest)
    inside.packet(SHUTDOWN, flags=1)
    inside.packet(SHUTDOWN, flags=2)
    assert read_all(client) == b""
    guest.wait(lambda: guest.resets == 1)
    until(backend, streams=0)


def test_a_guest_that_reads_no_more_stops_the_writer(backend: Backend, guest: Guest) -> None:
    client, inside = pair(backend, guest)
    inside.shutdown(1)
    with pytest.raises(BrokenPipeError):
        while True:
            client.sendall(bytes(65536))
    inside.sendall(b"still here")
    assert client.recv(100) == b"still here"


def test_a_reset_ends_the_stream_after_what_was_sent(backend: Backend, guest: Guest) -> None:
    client, inside = pair(backend, guest)
    inside.sendall(b"last words")
    inside.packet(RST)
    guest.forget(inside)
    assert read_all(client) == b"last words"
    until(backend, streams=0)


def test_a_slow_host_reader_stops_nobody_else(backend: Backend, guest: Guest) -> None:
    slow, inside = pair(backend, guest)
    data = noise(2, 2 << 20)
    writer = threading.Thread(target=inside.sendall, args=(data,))
    writer.start()
    guest.wait(lambda: inside._room() == 0)
    other, second = pair(backend, guest)
    for _ in range(50):
        other.sendall(b"x")
        assert second.recv() == b"x"
        second.sendall(b"y")
        assert other.recv(1) == b"y"
    assert backend.statistics()["kept"] <= 256 << 10
    got = bytearray()
    while len(got) < len(data):
        got += slow.recv(10_000)
    assert bytes(got) == data
    writer.join()


def test_a_slow_guest_reader_stops_nobody_else(backend: Backend, guest: Guest) -> None:
    client, inside = pair(backend, guest)
    data = noise(3, 2 << 20)
    writer = pump(client, data, 65536)
    guest.wait(lambda: inside.received == inside.alloc)  # it has all that it may have
    other, second = pair(backend, guest)
    for _ in range(50):
        other.sendall(b"x")
        assert second.recv() == b"x"
    assert inside.recv_all(limit=10_000) == data
    writer.join()


def test_what_a_dead_client_had_sent_still_arrives(backend: Backend, guest: Guest) -> None:
    """More than the guest's window is on the way when it dies."""
    client, inside = pair(backend, guest)
    client.setblocking(False)
    sent = 0
    data = noise(4, 1 << 20)
    try:
        while sent < len(data):
            sent += client.send(data[sent : sent + 8192])
    except BlockingIOError:
        pass
    client.close()
    assert inside.recv_all() == data[:sent]
    guest.wait(lambda: not guest.streams)


def test_a_writing_guest_learns_that_the_client_died(backend: Backend, guest: Guest) -> None:
    client, inside = pair(backend, guest)
    inside.sendall(bytes(200_000))
    client.close()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        inside.sendall(bytes(10 << 20))
    inside.close()
    guest.wait(lambda: not guest.streams)
    until(backend, streams=0)


def test_a_full_close_resets_no_guest_that_has_not_read(backend: Backend, guest: Guest) -> None:
    """It still writes while what it was sent waits for it; a reset would lose that."""
    client, inside = pair(backend, guest)
    client.sendall(b"keep this" * 1000)
    client.close()
    guest.wait(lambda: inside.peer_shut == 3)
    inside.packet(RW, data=b"to nobody")
    other, second = pair(backend, guest)
    other.sendall(b"x")
    assert second.recv() == b"x"
    assert inside.recv_all() == b"keep this" * 1000


def test_two_thousand_streams_one_after_the_other(backend: Backend, guest: Guest) -> None:
    before = backend.statistics()["connected"]
    for i in range(2000):
        client, inside = pair(backend, guest)
        client.sendall(b"%d" % i)
        assert inside.recv() == b"%d" % i
        if i % 2:
            client.close()
            assert inside.recv() == b""
            inside.close()
        else:
            inside.close()
            assert client.recv(1) == b""
            client.close()
    guest.wait(lambda: not guest.streams)
    until(backend, opened=2000, streams=0, connected=before)


def test_five_hundred_streams_at_once(backend: Backend, guest: Guest) -> None:
    pairs = [pair(backend, guest) for _ in range(500)]
    by_port = {inside.host_port: inside for _, inside in pairs}
    assert len(by_port) == 500
    for i, (client, _) in enumerate(pairs):
        client.sendall(noise(i, 5000))
    for i, (_, inside) in enumerate(pairs):
        got = b""
        while len(got) < 5000:
            got += inside.recv()
        assert got == noise(i, 5000)
        inside.sendall(got)
    for i, (client, inside) in enumerate(pairs):
        got = b""
        while len(got) < 5000:
            got += client.recv(5000)
        assert got == noise(i, 5000)
        client.close()
        assert inside.recv() == b""
    guest.wait(lambda: not guest.streams)
    until(backend, streams=0)


def test_a_pause_keeps_streams(backend: Backend, guest: Guest) -> None:
    client, inside = pair(backend, guest)
    up, down = noise(5, 1 << 20), noise(6, 1 << 20)
    writer = pump(client, down, 5000)
    sender = threading.Thread(target=inside.sendall, args=(up,))
    sender.start()
    got = bytearray()
    for _ in range(5):
        with guest.changed:
            guest.vmm.stop()
        waiting = backend.connect(ECHO)
        with guest.changed:
            guest.vmm.start()
        guest.vmm.kick(0)
        guest.vmm.kick(1)
        guest.accept(ECHO).close()
        assert waiting.recv(3) == b"OK "
        waiting.close()
        for _ in range(10):
            got += client.recv(10_000)
    while len(got) < len(up):
        got += client.recv(1 << 20)
    assert bytes(got) == up
    assert inside.recv_all() == down
    writer.join()
    sender.join()
    assert backend.statistics()["pauses"] == 5


def test_nothing_moves_in_a_pause(backend: Backend, guest: Guest) -> None:
    client, inside = pair(backend, guest)
    guest.vmm.stop()
    used = guest.rx.used16[1]
    client.sendall(b"wait")
    assert backend.statistics()["streams"] == 1
    backend.statistics()
    assert guest.rx.used16[1] == used
    guest.vmm.start()
    assert inside.recv() == b"wait"


def test_a_driver_that_begins_anew_ends_streams(backend: Backend) -> None:
    vmm = Vmm(backend.vmm_end)
    first = Guest(vmm)
    first.listen(ECHO)
    first.up()
    client, _ = pair(backend, first)
    vmm.stop()
    first.down()
    vmm.rings = [Ring(vmm.memory, 0x1000), Ring(vmm.memory, 0x8000)]
    for ring in vmm.rings:
        vmm.memory[ring.desc : ring.end] = bytes(ring.end - ring.desc)
    vmm.bases = [0, 0]
    second = Guest(vmm)
    second.listen(ECHO)
    second.up()
    try:
        assert client.recv(1) == b""
        client, inside = pair(backend, second)
        client.sendall(b"again")
        assert inside.recv() == b"again"
    finally:
        second.down()
        vmm.close()


def test_a_guest_that_gives_no_buffers_stalls_only_itself(backend: Backend, guest: Guest) -> None:
    client, inside = pair(backend, guest)
    with guest.changed:
        guest.paused = True
    data = noise(7, 2 << 20)
    writer = pump(client, data, 65536)
    for _ in range(300):  # resets that cannot be told
        with guest.changed:
            guest.vmm.kick(1)
    told = backend.statistics()
    before = Path(f"/proc/{backend.process.pid}/stat").read_text().split()[13]
    backend.statistics()
    after = Path(f"/proc/{backend.process.pid}/stat").read_text().split()[13]
    assert int(after) - int(before) < 20  # it does not spin
    assert told["connected"] == 1
    with guest.changed:
        guest.paused = False
    os.eventfd_write(guest._wake, 1)
    assert inside.recv_all() == data
    writer.join()


def test_silent_clients_are_sent_away_and_stop_nobody(backend: Backend, guest: Guest) -> None:
    silent = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    for sock in silent:
        sock.connect(os.fspath(backend.path))
        sock.settimeout(30)
        sock.sendall(b"CONN")
    client, inside = pair(backend, guest)
    for sock in silent:
        assert sock.recv(1) == b""
        sock.close()
    assert backend.statistics()["expired"] == 20
    client.sendall(b"x")
    assert inside.recv() == b"x"


def test_what_the_guest_said_last_arrives_after_the_vmm_is_gone(
    backend: Backend, guest: Guest
) -> None:
    client, inside = pair(backend, guest)
    data = noise(8, 400_000)
    inside.sendall(data)
    with guest.changed:
        guest.vmm.link.close()
    assert read_all(client) == data
    status, words = backend.last_words()
    assert status == 0 and words["to_host"] == len(data)


def test_a_vmm_that_is_gone_ends_the_device_even_if_clients_do_not_read(
    backend: Backend, guest: Guest
) -> None:
    client, inside = pair(backend, guest)
    guest.wait(lambda: inside._room() > 0)
    sender = threading.Thread(target=_until_broken, args=(inside,))
    sender.start()
    guest.wait(lambda: inside._room() == 0)
    guest.vmm.link.close()
    status, _ = backend.last_words()
    assert status == 0
    with guest.changed:
        inside.reset = True
        guest.changed.notify_all()
    sender.join()
    client.close()


def _until_broken(inside: GuestStream) -> None:
    with pytest.raises(BrokenPipeError):
        inside.sendall(bytes(8 << 20))


# ---- the hostile guest, through the real process


def broken(backend: Backend, guest: Guest, client: socket.socket) -> None:
    """Streams have ended, new clients are turned away, and the process is well."""
    assert client.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        backend.dial(ECHO)
    assert backend.statistics()["breaks"] == 1


@pytest.mark.parametrize("what", ["loop", "outside", "huge", "empty", "indirect", "writable"])
def test_a_hostile_descriptor_breaks_only_the_queues(
    backend: Backend, guest: Guest, what: str
) -> None:
    client, _ = pair(backend, guest)
    tx = guest.tx
    with guest.changed:
        slot = 2 * guest.slots.popleft()
        if what == "loop":
            tx.describe(slot, GUEST, 44, 1, slot)
        elif what == "outside":
            tx.describe(slot, 0, 44, 0)
        elif what == "huge":
            tx.describe(slot, GUEST, 0xFFFFFFFF, 0)
        elif what == "empty":
            tx.describe(slot, GUEST, 0, 0)
        elif what == "indirect":
            tx.describe(slot, GUEST, 64, 4)
        else:
            tx.describe(slot, GUEST, 44, 2)
        tx.offer(slot)
        guest.vmm.kick(1)
        broken(backend, guest, client)


def test_an_index_that_runs_ahead_breaks_only_the_queues(backend: Backend, guest: Guest) -> None:
    client, _ = pair(backend, guest)
    with guest.changed:
        guest.tx.avail16[1] = (guest.tx.index + 500) & 0xFFFF
        guest.vmm.kick(1)
        broken(backend, guest, client)


def test_a_broken_queue_is_mended_by_a_driver_that_begins_anew(backend: Backend) -> None:
    vmm = Vmm(backend.vmm_end)
    first = Guest(vmm)
    first.listen(ECHO)
    first.up()
    client, _ = pair(backend, first)
    with first.changed:
        first.tx.avail16[1] = 0x7777
        vmm.kick(1)
        broken(backend, first, client)
    first.down()
    vmm.stop()
    vmm.rings = [Ring(vmm.memory, 0x1000), Ring(vmm.memory, 0x8000)]
    for ring in vmm.rings:
        vmm.memory[ring.desc : ring.end] = bytes(ring.end - ring.desc)
    vmm.bases = [0, 0]
    second = Guest(vmm)
    second.listen(ECHO)
    second.up()
    try:
        client, inside = pair(backend, second)
        client.sendall(b"well again")
        assert inside.recv() == b"well again"
    finally:
        second.down()
        vmm.close()


@pytest.mark.parametrize("what", ["more than the window", "length", "operation", "twice", "early"])
def test_a_packet_against_the_rules_ends_that_stream_alone(
    backend: Backend, guest: Guest, what: str
) -> None:
    other, beside = pair(backend, guest)
    client, inside = pair(backend, guest)
    fields = [CID, 2, ECHO, inside.host_port, 0, 1, RW, 0, 65536, 0]
    if what == "more than the window":
        for _ in range(20):  # nobody reads the client
            inside.sent += 65536
            inside.packet(RW, data=bytes(65536))
    elif what == "length":
        fields[4] = 5000
        guest.packet(*fields, data=b"short")
    elif what == "operation":
        fields[6] = 99
        guest.packet(*fields)
    elif what == "twice":
        inside.packet(RESPONSE)
    else:
        waiting = backend.connect(4998)
        guest.wait(lambda: any(f[3] == 4998 for f in guest.seen))
        assert waiting.recv(1) == b""
        fields[6] = REQUEST
        guest.packet(*fields)
    read_all(client)
    guest.wait(lambda: inside.reset)
    assert backend.statistics()["violations"] == 1
    other.sendall(b"x")
    assert beside.recv() == b"x"


def test_strays_are_answered_or_dropped_and_counted(backend: Backend, guest: Guest) -> None:
    guest.packet(CID, 2, 1, 2, 0, 1, RW, 0, 0, 0)  # of no stream
    guest.packet(99, 2, 1, 2, 0, 1, RW, 0, 0, 0)  # from somebody else
    guest.packet(CID, 99, 1, 2, 0, 1, RW, 0, 0, 0)  # to somebody else
    guest.packet(CID, 2, 1, 2, 0, 2, REQUEST, 0, 0, 0)  # of a kind that was not offered
    guest.packet(CID, 2, 1, 2, 0, 1, RST, 0, 0, 0)
    guest.wait(lambda: guest.resets == 2)
    assert backend.statistics()["strays"] == 3
    assert backend.statistics()["refused"] == 1


# ---- the hostile VMM


@pytest.mark.parametrize(
    ("request_", "payload", "flags"),
    [
        (99, b"", 1),
        (1, b"", 2),
        (1, b"x", 1),
        (5, struct.pack("<II", 9, 0) + bytes(32 * 9), 1),
        (5, struct.pack("<II", 1, 0) + bytes(32), 1),
        (8, struct.pack("<II", 7, 128), 1),
        (12, struct.pack("<Q", 0), 1),
        (12, struct.pack("<Q", 256), 1),
        (24, struct.pack("<III", 250, 8, 0) + bytes(8), 1),
        (24, struct.pack("<III", 0, 0xFFFFFFFF, 0), 1),
        (2, struct.pack("<Q", 1 << 28), 1),
    ],
)
def test_a_wrong_message_ends_the_link(
    backend: Backend, request_: int, payload: bytes, flags: int
) -> None:
    vmm = Vmm(backend.vmm_end)
    waiting = backend.connect(ECHO)
    vmm.send(request_, payload, flags=flags)
    status, words = backend.last_words()
    assert status == 65 and "broke the protocol" in words["error"]
    with contextlib.suppress(ConnectionResetError):  # when it had not been accepted yet
        assert waiting.recv(1) == b""
    vmm.close()


def test_memory_that_could_shrink_is_refused(backend: Backend) -> None:
    vmm = Vmm(backend.vmm_end)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 1 << 20)
    vmm.send(5, struct.pack("<IIQQQQ", 1, 0, 0, 1 << 20, USER, 0), (loose,))
    status, words = backend.last_words()
    assert status == 65 and "taken away" in words["error"]
    os.close(loose)
    vmm.close()


def test_memory_beyond_the_end_of_its_file_is_refused(backend: Backend) -> None:
    vmm = Vmm(backend.vmm_end)
    vmm.send(5, struct.pack("<IIQQQQ", 1, 0, 0, vmm.size + 4096, USER, 0), (vmm.fd,))
    status, words = backend.last_words()
    assert status == 65 and "mapped" in words["error"]
    vmm.close()


def test_a_vmm_that_does_not_listen_ends_the_link(backend: Backend) -> None:
    vmm = Vmm(backend.vmm_end)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        while True:
            vmm.send(1)
    status, _ = backend.last_words()
    assert status == 65
    vmm.close()


# ---- rights


def test_what_the_process_may_do(backend: Backend) -> None:
    said = dict(
        row.split(":", 1)
        for row in Path(f"/proc/{backend.process.pid}/status").read_text().splitlines()
    )
    assert said["Seccomp"].strip() == "2" and said["NoNewPrivs"].strip() == "1"
    assert said["Threads"].strip() == "1"
    rows = Path(f"/proc/{backend.process.pid}/limits").read_text().splitlines()
    limits = {row[:26].strip(): row[26:].split()[:2] for row in rows}
    assert limits["Max core file size"] == limits["Max processes"] == ["0", "0"]
    assert limits["Max data size"] == ["536870912", "536870912"]
    assert int(limits["Max open files"][0]) <= 4096 + 64
    if os.getuid() != 0:
        with pytest.raises(PermissionError):  # not dumpable: nobody of its user looks into it
            os.listdir(f"/proc/{backend.process.pid}/fd")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--vhost-fd", "x", "--listen-fd", "4", "--ready-fd", "5", "--cid", "3"],
        ["--vhost-fd", "0", "--listen-fd", "1", "--ready-fd", "2", "--cid", "3"],
        ["--vhost-fd", "90", "--listen-fd", "91", "--ready-fd", "92", "--cid", "3"],
        ["--vhost-fd", "3", "--listen-fd", "4", "--ready-fd", "5", "--cid", "2"],
        ["--vhost-fd", "3", "--vhost-fd", "4", "--ready-fd", "5", "--cid", "3"],
    ],
)
def test_wrong_arguments_are_told(arguments: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-I", "-B", "-m", "agent_box.engine.vsock", *arguments],
        capture_output=True,
        timeout=30,
    )
    assert ran.returncode == 64
    assert json.loads(ran.stderr)["error"]


def test_a_device_that_is_killed_leaves_nobody_waiting(backend: Backend, guest: Guest) -> None:
    client, _ = pair(backend, guest)
    backend.process.send_signal(signal.SIGSTOP)
    waiting = backend.connect(ECHO)
    backend.process.kill()
    for sock in (client, waiting):
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        backend.connect(ECHO)


def test_more_clients_than_there_may_be_wait_their_turn(tmp_path: Path) -> None:
    """With few descriptors, so that the limit is near."""
    with Backend(tmp_path, descriptors=64 + 10) as backend:
        vmm = Vmm(backend.vmm_end)
        guest = Guest(vmm)
        guest.listen(ECHO)
        guest.up()
        try:
            first = [pair(backend, guest) for _ in range(10)]
            late = [backend.connect(ECHO) for _ in range(5)]
            assert backend.statistics()["connected"] == 10
            for client, inside in first[:5]:
                inside.sendall(b"full, and well")
                assert client.recv(20) == b"full, and well"
                client.close()
            for client in late:
                guest.accept(ECHO)
                assert client.recv(3) == b"OK "
        finally:
            guest.down()
            vmm.close()
