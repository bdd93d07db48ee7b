"""The plane against the kernel's own TCP, and against servers on this host's loopback."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import select
import signal
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

import pytest
from scapy.layers.inet import IP, TCP
from support import servers, tunguest
from support.guestnet import Net, round_trip, take, take_all, until
from support.nameserver import NameServer
from support.planes import etc, here, policy, rule
from support.servers import Server
from support.tunguest import GATEWAY, TunGuest

from agent_box.netstack import plane as plane_module
from agent_box.netstack.opening import Limits
from agent_box.netstack.packet import ACK, FIN, GUEST, PSH, SYN, tcp_head
from agent_box.netstack.plane import Plane
from agent_box.netstack.reports import Denied, Limited, Revoked

WHY_NOT = tunguest.unavailable()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
HARD = struct.pack("ii", 1, 0)

Make = Callable[..., Net]


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def make(what: Callable[[socket.socket], None] = servers.echo, **more: object) -> Server:
        made.append(Server(what, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def echoing(serve: Callable[..., Server]) -> Server:
    return serve()


# -- TCP


def test_bytes_go_both_ways_whole(net: Make, echoing: Server) -> None:
    plane = net(here(f"app.test:{echoing.port}"))
    sent = os.urandom(16 << 20)
    with plane.connect("app.test", echoing.port) as sock:

        def send() -> None:
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        assert take_all(sock) == sent
        sender.join()
    counted = plane.do(lambda p: p.counters())
    assert counted.bytes_up == counted.bytes_down == len(sent)
    assert counted.denied == 0 and counted.dropped_frames == 0
    until(lambda: plane.do(lambda p: p.counters()).flows == 0)


def test_a_denied_port_is_unreachable_at_once_and_names_its_rule(
    net: Make, echoing: Server
) -> None:
    plane = net(here(f"app.test:{echoing.port}"))
    assert plane.errno("app.test", 9) == errno.EHOSTUNREACH
    (report,) = plane.reports
    assert report == Denied("mode:allowlist", "no rule allows it", "app.test", None, 9, "tcp", 1)


def test_a_refused_upstream_is_refused_in_the_guest(
    net: Make, serve: Callable[..., Server]
) -> None:
    server = serve()
    plane = net(here(f"app.test:{server.port}"))
    server.close()
    assert plane.errno("app.test", server.port) == errno.ECONNREFUSED
    assert plane.denials() == []


def test_an_upstream_that_does_not_answer_is_unreachable_in_time(net: Make) -> None:
    with full_listener() as port:
        plane = net(here(f"app.test:{port}"))
        address = plane.address("app.test")
        sock = plane.guest.socket()
        sock.setblocking(False)
        assert sock.connect_ex((address, port)) == errno.EINPROGRESS
        until(lambda: plane.do(lambda p: p.counters()).flows == 1)
        plane.late += 60
        until(lambda: sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.EHOSTUNREACH)
        sock.close()


class full_listener:
    """A port whose queue is full, so that connecting to it never ends."""

    def __enter__(self) -> int:
        self.sock = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.port: int = self.sock.getsockname()[1]
        self.fill = []
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", self.port))
            self.fill.append(one)
        return self.port

    def __exit__(self, *_: object) -> None:
        for one in (self.sock, *self.fill):
            one.close()


def test_ten_pending_connects_do_not_block_the_eleventh(net: Make, echoing: Server) -> None:
    with full_listener() as port:
        plane = net(here(f"app.test:{port}"), here(f"app.test:{echoing.port}"))
        address = plane.address("app.test")
        stuck = []
        for _ in range(20):
            sock = plane.guest.socket()
            sock.setblocking(False)
            sock.connect_ex((address, port))
            stuck.append(sock)
        with plane.connect(address, echoing.port) as sock:
            round_trip(sock)
        for one in stuck:
            one.close()


def test_pending_connects_have_a_limit(net: Make, echoing: Server) -> None:
    with full_listener() as port:
        plane = net(here(f"app.test:{port}"), limits=Limits(pending=5))
        address = plane.address("app.test")
        stuck = []
        for _ in range(20):
            sock = plane.guest.socket()
            sock.setblocking(False)
            sock.connect_ex((address, port))
            stuck.append(sock)
        until(lambda: Limited("pending", 1) in plane.reports)
        assert plane.do(lambda p: p.counters()).flows == 5
        for one in stuck:
            one.close()
        until(lambda: plane.do(lambda p: p.counters()).flows in (0, 5))


def test_flows_have_a_limit_and_old_ones_go_on(net: Make, echoing: Server) -> None:
    plane = net(here(f"app.test:{echoing.port}"), limits=Limits(flows=10))
    address = plane.address("app.test")
    kept = [plane.connect(address, echoing.port) for _ in range(10)]
    assert plane.errno(address, echoing.port) == errno.ECONNREFUSED
    assert Limited("flows", 1) in plane.reports
    for sock in kept:
        round_trip(sock)
        sock.close()
    until(lambda: plane.do(lambda p: p.counters()).flows == 0)
    plane.connect(address, echoing.port).close()


def test_no_descriptor_left_ends_nothing(net: Make, echoing: Server) -> None:
    plane = net(here(f"app.test:{echoing.port}"))
    address = plane.address("app.test")
    kept = plane.connect(address, echoing.port)
    round_trip(kept)
    late = [plane.guest.socket(), plane.guest.socket(), plane.guest.socket(socket.SOCK_DGRAM)]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = []
    top = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (top, before[1]))
    try:
        while True:
            try:
                spare.append(os.dup(0))
            except OSError:
                break
        with pytest.raises(ConnectionRefusedError):
            late[0].connect((address, echoing.port))
        round_trip(kept)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in spare:
            os.close(fd)
    assert Limited("descriptors", 1) in plane.reports
    late[1].connect((address, echoing.port))
    round_trip(late[1])
    for sock in (*late, kept):
        sock.close()


def test_half_closed_by_the_server_the_guest_goes_on(
    net: Make, serve: Callable[..., Server]
) -> None:
    got: list[bytes] = []

    def first_done(sock: socket.socket) -> None:
        sock.sendall(b"all I say")
        sock.shutdown(socket.SHUT_WR)
        got.append(take_all(sock))

    server = serve(first_done)
    plane = net(here(f"app.test:{server.port}"))
    with plane.connect("app.test", server.port) as sock:
        assert take_all(sock) == b"all I say"
        sent = os.urandom(3 << 20)
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        until(lambda: got != [])
        assert got == [sent]
    until(lambda: plane.do(lambda p: p.counters()).flows == 0)


def test_what_a_server_said_before_it_reset_arrives(
    net: Make, serve: Callable[..., Server]
) -> None:
    def answer_and_go(sock: socket.socket) -> None:
        sock.recv(1)
        sock.sendall(b"413 too large")
        # closing with unread data resets, as many servers do

    server = serve(answer_and_go)
    plane = net(here(f"app.test:{server.port}"))
    with plane.connect("app.test", server.port) as sock:
        sock.sendall(b"x" * 100_000)
        got = b""
        try:
            while data := sock.recv(100):
                got += data
        except ConnectionResetError:
            pass
        assert got == b"413 too large"


def test_resets_cross_both_ways(net: Make, serve: Callable[..., Server]) -> None:
    seen: list[object] = []

    def until_reset(sock: socket.socket) -> None:
        try:
            seen.append(sock.recv(100))
        except ConnectionResetError as error:
            seen.append(error.errno)

    def reset(sock: socket.socket) -> None:
        sock.recv(1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, HARD)

    listening, resetting = serve(until_reset), serve(reset)
    plane = net(here(f"app.test:{listening.port}"), here(f"app.test:{resetting.port}"))
    sock = plane.connect("app.test", listening.port)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, HARD)
    sock.close()
    until(lambda: seen != [])
    assert seen == [errno.ECONNRESET]
    with plane.connect("app.test", resetting.port) as sock:
        sock.sendall(b"x")
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    until(lambda: plane.do(lambda p: p.counters()).flows == 0)


def test_a_slow_reader_stalls_only_itself(net: Make, serve: Callable[..., Server]) -> None:
    def pour(sock: socket.socket) -> None:
        while True:
            sock.sendall(bytes(1 << 20))

    pouring, echoing = serve(pour), serve()
    plane = net(here(f"app.test:{pouring.port}"), here(f"app.test:{echoing.port}"))
    address = plane.address("app.test")
    slow = [plane.connect(address, pouring.port) for _ in range(4)]
    until(lambda: all(select.select([one], [], [], 0)[0] for one in slow))
    with plane.connect(address, echoing.port) as sock:
        for _ in range(20):
            round_trip(sock, os.urandom(50_000))
    for one in slow:
        assert len(take(one, 8 << 20)) == 8 << 20, "and it goes on when it is read"
        one.close()


def test_a_slow_server_stalls_only_its_flow_and_gets_everything(
    net: Make, serve: Callable[..., Server]
) -> None:
    go = threading.Event()
    got: list[str] = []

    def late(sock: socket.socket) -> None:
        go.wait(60)
        got.append(hashlib.sha256(take_all(sock)).hexdigest())

    slow, echoing = serve(late), serve()
    plane = net(here(f"app.test:{slow.port}"), here(f"app.test:{echoing.port}"))
    sent = os.urandom(20 << 20)
    with plane.connect("app.test", slow.port) as sock:

        def send() -> None:
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        with plane.connect("app.test", echoing.port) as other:
            for _ in range(20):
                round_trip(other, os.urandom(50_000))
        assert sender.is_alive(), "nothing bounds what is taken for a server that does not read"
        go.set()
        sender.join()
        until(lambda: got != [])
    assert got == [hashlib.sha256(sent).hexdigest()]


def test_idle_for_hours_and_still_there(net: Make, echoing: Server) -> None:
    plane = net(here(f"app.test:{echoing.port}"))
    with plane.connect("app.test", echoing.port) as sock:
        round_trip(sock)
        for _ in range(8):
            plane.late += 3600
            plane.do(lambda p: p.run())
            time.sleep(0.02)  # so that the guest answers a probe, which nothing shows
        round_trip(sock)
        assert plane.do(lambda p: p.counters()).flows == 1


def test_a_lone_acknowledgement_waits_for_the_answer_and_no_longer(tmp_path: Path) -> None:
    now = [1000.0]
    host = bytes((127, 0, 0, 1))
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        plane = Plane(
            policy=policy(here(f"127.0.0.1/32:{port}")), broker=None, report=print,
            etc=etc(tmp_path / "etc"), clock=lambda: now[0],
        )  # fmt: skip
        plane.link(theirs)
        answers: list[bytes] = []

        def guest(seq: int, ack: int, flags: int, data: bytes = b"") -> None:
            head = tcp_head(GUEST, host, (4000, port), seq, ack, flags, 1000, length=len(data))
            ours.sendall(head + data)
            plane.run()

        def heard() -> bool:
            plane.run()
            try:
                answers.append(ours.recv(4096)[14:])
            except BlockingIOError:
                return False
            return True

        guest(100, 0, SYN)
        until(heard)
        ack = IP(answers.pop())[TCP].seq + 1
        server, _ = listener.accept()
        with server:
            guest(101, ack, ACK)
            guest(101, ack, ACK | PSH, b"first")
            assert server.recv(10) == b"first" and not heard()
            server.sendall(b"answer")
            until(heard)
            answer = IP(answers.pop())[TCP]
            assert bytes(answer.payload) == b"answer" and answer.ack == 106
            guest(106, ack + 6, ACK | PSH, b"second")
            assert server.recv(10) == b"second" and not heard()
            now[0] += 0.002
            assert heard()
            answer = IP(answers.pop())[TCP]
            assert not answer.payload and answer.flags == "A" and answer.ack == 112
            assert not heard()
            guest(112, ack + 6, ACK | FIN)
            assert server.recv(10) == b""
            now[0] += 0.002
            assert not heard(), "who has finished waits for no acknowledgement"
            now[0] += 0.05
            assert heard()
            answer = IP(answers.pop())[TCP]
            assert not answer.payload and answer.flags == "A" and answer.ack == 113
        plane.close()


def test_a_guest_that_forgot_its_flow_is_noticed(net: Make, echoing: Server) -> None:
    plane = net(here(f"app.test:{echoing.port}"))
    sock = plane.connect("app.test", echoing.port)
    round_trip(sock)
    # What is unanswered would be sent again at once, and the guest be noticed by that.
    until(lambda: plane.do(lambda p: [flow.deadline for flow in p._flows.values()]) == [inf])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, HARD)
    plane.do(lambda p: p.link(None))
    sock.close()  # its RST goes nowhere
    time.sleep(0.05)  # until it has gone there
    plane.relink()
    assert plane.do(lambda p: p.counters()).flows == 1
    plane.late += 3 * 3600
    plane.do(lambda p: p.run())
    until(lambda: plane.do(lambda p: p.counters()).flows == 0)


def test_half_closed_and_forgotten_is_reaped(net: Make, serve: Callable[..., Server]) -> None:
    over = threading.Event()
    server = serve(lambda sock: over.wait(60) and None)
    plane = net(here(f"app.test:{server.port}"))
    with plane.connect("app.test", server.port) as sock:
        sock.shutdown(socket.SHUT_WR)
        plane.late += 300
        plane.do(lambda p: p.run())
        assert plane.do(lambda p: p.counters()).flows == 1
        plane.late += 700
        plane.do(lambda p: p.run())
        until(lambda: plane.do(lambda p: p.counters()).flows == 0)
    over.set()


def test_tun_down_for_a_while(net: Make, echoing: Server) -> None:
    plane = net(here(f"app.test:{echoing.port}"))
    _survives(plane, echoing, lambda: _tun_down(plane.guest))


def _tun_down(guest: TunGuest) -> None:
    guest.run("ip", "link", "set", "tun0", "down")
    time.sleep(1.5)  # the trap: as long as that
    guest.run("ip", "link", "set", "tun0", "up")
    guest.run("ip", "route", "replace", "default", "via", GATEWAY)


@pytest.mark.parametrize("later", [0, 4 * 3600])
def test_a_guest_that_stands_still(net: Make, echoing: Server, later: int) -> None:
    plane = net(here(f"app.test:{echoing.port}"))

    def stop() -> None:
        pid = plane.guest.pid()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1)  # it stands still for so long
        plane.late += later
        os.kill(pid, signal.SIGCONT)

    _survives(plane, echoing, stop)


def test_another_link_in_the_middle(net: Make, echoing: Server) -> None:
    plane = net(here(f"app.test:{echoing.port}"))
    _survives(plane, echoing, plane.relink)


def _survives(plane: Net, server: Server, trouble: Callable[[], None]) -> None:
    """Flows that are busy with large data go on after it, and lose nothing."""
    sent = os.urandom(24 << 20)
    with plane.connect("app.test", server.port) as sock:
        sock.settimeout(120)
        failed: list[BaseException] = []

        def send() -> None:
            try:
                sock.sendall(sent[: 12 << 20])
                halfway.wait(60)
                sock.sendall(sent[12 << 20 :])
                sock.shutdown(socket.SHUT_WR)
            except OSError as error:
                failed.append(error)

        halfway = threading.Event()
        sender = threading.Thread(target=send)
        sender.start()
        got = take(sock, 1 << 20)
        trouble()
        halfway.set()
        got += take_all(sock)
        sender.join()
        assert not failed and got == sent


def test_a_guest_without_offloads_at_mtu_1500_and_fifty_streams(
    tmp_path: Path, echoing: Server
) -> None:
    guest = TunGuest(mtu=1500, offload=False)
    plane = Net(guest, tmp_path, here(f"app.test:{echoing.port}"), hosts={"app.test": "127.0.0.1"})
    try:
        address = plane.address("app.test")
        sent = os.urandom(300_000)
        wrong: list[int] = []

        def one(number: int) -> None:
            with plane.connect(address, echoing.port) as sock:
                half = threading.Thread(target=lambda: (sock.sendall(sent), sock.shutdown(1)))
                half.start()
                if take_all(sock) != sent:
                    wrong.append(number)
                half.join()

        streams = [threading.Thread(target=one, args=(i,)) for i in range(50)]
        for stream in streams:
            stream.start()
        for stream in streams:
            stream.join()
        assert wrong == []
    finally:
        plane.close()
        guest.close()


def _many(net: Make, echoing: Server, count: int) -> None:
    plane = net(here(f"app.test:{echoing.port}"))
    address = plane.address("app.test")
    open_ones = [plane.connect(address, echoing.port) for _ in range(count)]
    for number, sock in enumerate(open_ones):
        sock.sendall(f"{number:8}".encode())
    for number, sock in enumerate(open_ones):
        assert take(sock, 8) == f"{number:8}".encode()
        sock.close()
    until(lambda: plane.do(lambda p: p.counters()).flows == 0)


def test_many_flows(net: Make, echoing: Server) -> None:
    _many(net, echoing, 200)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_thousand_flows(net: Make, echoing: Server) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 16_000:
        pytest.skip(f"this account may have {before[1]} descriptors, and the test needs 16,000")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        _many(net, echoing, 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_idle_flow_takes_little_memory(net: Make, echoing: Server) -> None:
    plane = net(here(f"app.test:{echoing.port}"))
    address = plane.address("app.test")
    plane.connect(address, echoing.port).close()
    tracemalloc.start()
    try:
        open_ones = [plane.connect(address, echoing.port) for _ in range(200)]
        for sock in open_ones:
            round_trip(sock)
        plane.late += 30  # timers that nobody needs any more
        plane.do(lambda p: p.run())
        ours = tracemalloc.Filter(True, str(Path(plane_module.__file__).parent / "*"))
        taken = tracemalloc.take_snapshot().filter_traces([ours])
    finally:
        tracemalloc.stop()
    assert sum(trace.size for trace in taken.traces) / len(open_ones) < 3072
    for sock in open_ones:
        sock.close()


# -- what the policy does to flows


def test_a_revoked_flow_is_reset_and_others_do_not_notice(
    net: Make, serve: Callable[..., Server]
) -> None:
    one, two = serve(), serve()
    plane = net(here(f"app.test:{one.port}"), here(f"app.test:{two.port}"))
    first, second = plane.connect("app.test", one.port), plane.connect("app.test", two.port)
    round_trip(first)
    round_trip(second)
    assert plane.apply(here(f"app.test:{two.port}")) == 1
    with pytest.raises(ConnectionResetError):
        first.recv(1)
    round_trip(second)
    assert [r.rule for r in plane.reports if isinstance(r, Revoked)] == ["mode:allowlist"]
    assert plane.errno("app.test", one.port) == errno.EHOSTUNREACH
    assert plane.do(lambda p: p.counters()).generation == 2
    first.close()
    second.close()


def test_a_policy_that_cannot_be_enforced_leaves_the_old_one(net: Make, echoing: Server) -> None:
    plane = net(here(f"app.test:{echoing.port}"))
    with plane.connect("app.test", echoing.port) as sock:
        with pytest.raises(ValueError):
            plane.apply(here("app.test:1"), here("app.test:1"))
        round_trip(sock)
    assert plane.do(lambda p: p.counters()).generation == 1


def test_the_same_denial_is_told_once_and_counted(net: Make) -> None:
    plane = net(here("app.test:1"))
    address = plane.address("app.test")
    for _ in range(30):
        plane.errno(address, 9)
    assert len(plane.denials()) == 1
    plane.late += 60
    plane.do(lambda p: p.run())
    until(lambda: len(plane.denials()) == 2)
    assert [r.count for r in plane.reports if isinstance(r, Denied)] == [1, 29]
    assert plane.do(lambda p: p.counters()).denied == 30


# -- UDP, ICMP, the gateway


@pytest.fixture
def udp_echo() -> Iterator[int]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)

        def run() -> None:
            while True:
                try:
                    data, sender = sock.recvfrom(65535)
                    sock.sendto(data, sender)
                except OSError:
                    return

        threading.Thread(target=run, daemon=True).start()
        yield sock.getsockname()[1]


def test_udp_by_rule(net: Make, udp_echo: int) -> None:
    plane = net(here(f"app.test:{udp_echo}/udp"))
    address = plane.address("app.test")
    with plane.guest.socket(socket.SOCK_DGRAM) as sock:
        sock.connect((address, udp_echo))
        for size in (0, 1, 1400, 9000, 65000):
            data = os.urandom(size)
            sock.send(data)
            assert sock.recv(65535) == data
    assert plane.do(lambda p: p.counters()).flows == 1
    plane.late += 400
    plane.do(lambda p: p.run())
    until(lambda: plane.do(lambda p: p.counters()).flows == 0)


def test_udp_without_a_rule_is_denied_and_refused_is_refused(net: Make, udp_echo: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        closed = free.getsockname()[1]
    plane = net(here(f"app.test:{closed}/udp"), here(f"app.test:{udp_echo}"))
    address = plane.address("app.test")
    for port, expected in ((udp_echo, errno.EHOSTUNREACH), (closed, errno.ECONNREFUSED)):
        with plane.guest.socket(socket.SOCK_DGRAM) as sock:
            sock.connect((address, port))
            sock.send(b"x")
            with pytest.raises(OSError) as failed:
                sock.recv(10)
            assert failed.value.errno == expected
    assert plane.denials() == ["mode:allowlist"]


def test_udp_flows_are_revoked_and_limited(net: Make, udp_echo: int) -> None:
    plane = net(here(f"app.test:{udp_echo}/udp"), limits=Limits(datagrams=3))
    address = plane.address("app.test")
    socks = [plane.guest.socket(socket.SOCK_DGRAM) for _ in range(8)]
    for sock in socks:
        sock.connect((address, udp_echo))
        sock.send(b"x")
        assert sock.recv(10) == b"x"
    assert plane.do(lambda p: p.counters()).flows == 3
    assert plane.apply(here("app.test:1")) == 3
    for sock in socks:
        sock.close()


def test_the_gateway_answers_pings_and_nobody_else_does(net: Make) -> None:
    plane = net()
    echo = struct.pack(">BBHHH", 8, 0, 0, 0, 1) + b"agent-box" * 100
    for target, expected in ((GATEWAY, echo[8:]), ("192.0.2.1", None)):
        with plane.guest.socket(socket.SOCK_DGRAM, socket.IPPROTO_ICMP) as sock:
            sock.connect((target, 0))
            sock.send(echo)
            if expected is None:
                with pytest.raises(OSError) as failed:
                    sock.recv(2000)
                assert failed.value.errno == errno.EHOSTUNREACH
            else:
                assert sock.recv(2000)[8:] == expected
    assert plane.denials() == ["icmp:gateway"]


def test_the_gateway_has_no_other_ports(net: Make, echoing: Server) -> None:
    plane = net(here("app.test:1"))
    for port in (22, 443, 80, echoing.port):
        assert plane.errno(GATEWAY, port) == errno.ECONNREFUSED
    with plane.guest.socket(socket.SOCK_DGRAM) as sock:
        sock.connect((GATEWAY, 123))
        sock.send(b"x")
        with pytest.raises(ConnectionRefusedError):
            sock.recv(10)


def test_port_80_of_the_gateway_is_the_broker(net: Make, tmp_path: Path) -> None:
    path = str(tmp_path / "b")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def run() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(take_all(sock)[::-1])

    threading.Thread(target=run, daemon=True).start()
    plane = net(broker=path, endpoints=("openai",))
    found = plane.look_up("openai.broker.internal")
    assert str(found.an[0].rdata) == GATEWAY
    with plane.connect(GATEWAY, 80) as sock:
        sock.sendall(b"GET / backwards")
        sock.shutdown(socket.SHUT_WR)
        assert take_all(sock) == b"sdrawkcab / TEG"
    listener.close()
    os.unlink(path)
    assert plane.errno(GATEWAY, 80) == errno.ECONNREFUSED


# -- DNS


def test_names_in_the_guest(net: Make) -> None:
    server = NameServer()
    server.records = {
        "app.test": [("A", "127.0.0.1", 300), ("AAAA", "::1", 300)],
        "six.test": [("AAAA", "::1", 300)],
        "none.test": [],
    }
    plane = net(
        *(here(f"{name}.test") for name in ("app", "six", "none", "gone")),
        hosts={}, nameserver="127.0.0.1", dns_port=server.port, endpoints=("openai",),
    )  # fmt: skip
    first = plane.address("app.test")
    assert first.startswith("198.18.1.") and plane.address("APP.test") == first
    assert plane.address("six.test") != first, "the guest needs no IPv6 for it"
    for kind in ("AAAA", "HTTPS", "SVCB", "TXT", "MX"):
        for name in ("app.test", "openai.broker.internal"):
            found = plane.look_up(name, kind)
            assert (found.rcode, found.ancount) == (0, 0), (name, kind)
    assert (plane.look_up("none.test").rcode, plane.look_up("none.test").ancount) == (0, 0)
    assert plane.look_up("gone.test").rcode == 3 and plane.look_up("gone.test", "AAAA").rcode == 3
    assert plane.look_up("evil.test").rcode == 3
    assert plane.look_up("data.of.mine.evil.test", "TXT").rcode == 3
    assert plane.look_up("x.broker.internal").rcode == 3
    left = {name for name in server.asked if not name.endswith("test") or "evil" in name}
    assert left == set(), "a denied name left the host"
    assert plane.denials() == ["mode:allowlist", "mode:allowlist", "broker:unknown"]
    server.close()


def test_dns_over_tcp(net: Make) -> None:
    plane = net(here("app.test"))
    assert plane.look_up("app.test", tcp=True).an[0].rdata == plane.address("app.test")
    assert plane.look_up("no.test", tcp=True).rcode == 3


def test_a_failing_name_server_is_servfail_and_the_next_one_is_asked(net: Make) -> None:
    bad = NameServer()
    bad.rcode = 2
    good = NameServer("127.0.0.2", bad.port)
    good.records = {"app.test": [("A", "127.0.0.1", 300)]}
    plane = net(
        here("app.test"), here("b.test"), hosts={}, nameserver="127.0.0.1\nnameserver 127.0.0.2",
        dns_port=bad.port,
    )  # fmt: skip
    assert plane.address("app.test").startswith("198.18.")
    good.rcode = 2
    assert plane.look_up("b.test").rcode == 2
    for server in (bad, good):
        server.close()


def test_the_hosts_resolver_changes_and_new_flows_follow(net: Make, echoing: Server) -> None:
    old = NameServer()
    old.silent = True
    new = NameServer("127.0.0.2", old.port)
    new.records = {"app.test": [("A", "127.0.0.1", 1)]}
    plane = net(
        here(f"app.test:{echoing.port}"), hosts={}, nameserver="127.0.0.1", dns_port=old.port
    )
    etc(plane.etc, {}, "127.0.0.2")
    with plane.connect("app.test", echoing.port) as sock:
        round_trip(sock)
    for server in (old, new):
        server.close()


def test_a_name_with_a_dead_address_first(net: Make, echoing: Server) -> None:
    server = NameServer()
    server.records = {
        "app.test": [("AAAA", "::1", 9), ("A", "127.0.0.9", 9), ("A", "127.0.0.1", 9)]
    }
    plane = net(
        here(f"app.test:{echoing.port}"), hosts={}, nameserver="127.0.0.1", dns_port=server.port
    )
    with plane.connect("app.test", echoing.port) as sock:
        round_trip(sock)
    server.close()


# -- forwards


def _forward(plane: Net, port: int, host: str = "127.0.0.1") -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=64)
    host_port: int = listener.getsockname()[1]
    plane.do(lambda p: p.forward_add(listener, port))
    return host_port


def _guest_listener(plane: Net) -> tuple[socket.socket, int]:
    listener = plane.guest.socket()
    listener.bind(("198.18.0.2", 0))
    listener.listen(64)
    return listener, listener.getsockname()[1]


def test_a_forward_leads_into_the_guest(net: Make) -> None:
    plane = net()
    listener, port = _guest_listener(plane)
    for host in ("127.0.0.1", "::1"):
        host_port = _forward(plane, port, host)
        sent = os.urandom(5 << 20)
        with socket.create_connection((host, host_port), timeout=60) as client:
            inside, peer = listener.accept()
            assert peer[0] == GATEWAY
            echo = threading.Thread(target=lambda sock=inside: (servers.echo(sock), sock.close()))
            echo.start()

            def send(sock: socket.socket = client, data: bytes = sent) -> None:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)

            sender = threading.Thread(target=send)
            sender.start()
            assert take_all(client) == sent
            sender.join()
            echo.join()
    listener.close()
    until(lambda: plane.do(lambda p: p.counters()).flows == 0)


def test_a_forward_to_a_closed_port_is_reset(net: Make) -> None:
    plane = net()
    host_port = _forward(plane, 1)
    with (
        pytest.raises(ConnectionResetError),  # which connect itself may be the first to see
        socket.create_connection(("127.0.0.1", host_port), timeout=60) as client,
    ):
        client.recv(1)


def test_removing_a_forward_ends_its_connections(net: Make) -> None:
    plane = net()
    listener, port = _guest_listener(plane)
    one, two = _forward(plane, port), _forward(plane, port)
    with (
        socket.create_connection(("127.0.0.1", one), timeout=60) as gone,
        socket.create_connection(("127.0.0.1", two), timeout=60) as stays,
    ):
        inside = [listener.accept()[0] for _ in range(2)]
        plane.do(lambda p: p.forward_remove(one))
        with pytest.raises(ConnectionResetError):
            gone.recv(1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", one), timeout=60)
        for sock in inside:
            try:
                sock.sendall(b"x")
            except OSError:
                pass  # the one that ended
        assert stays.recv(1) == b"x"
        for sock in inside:
            sock.close()
    listener.close()


# -- the link


def test_a_frame_of_no_possible_length_ends_the_link(net: Make) -> None:
    for length in (0, 9, 10, 65546, 0xFFFFFFFF):
        plane = net()
        ours, theirs = socket.socketpair()
        plane.do(lambda p, end=theirs: p.link(end))
        ours.sendall(length.to_bytes(4, "little") + bytes(64))
        until(lambda p=plane: p.do(lambda q: q.ended) is not None)
        assert str(length) in str(plane.do(lambda p: p.ended))
        assert not plane.do(lambda p: p.linked)
        ours.close()
        plane.relink()
        assert plane.do(lambda p: p.ended) is None


def test_capture_shows_packets_and_counts_what_it_could_not(net: Make, echoing: Server) -> None:
    plane = net(here(f"app.test:{echoing.port}"))
    seen: list[bytes] = []

    def sink(packet: bytes, _when: float) -> bool:
        if len(seen) >= 5:
            return False
        seen.append(packet)
        return True

    plane.do(lambda p: p.capture(sink, 40))
    with plane.connect("app.test", echoing.port) as sock:
        round_trip(sock, b"x" * 1000)
    assert len(seen) == 5 and all(20 <= len(packet) <= 40 and packet[0] == 0x45 for packet in seen)
    assert plane.do(lambda p: p.capture_dropped) > 0
    plane.do(lambda p: p.capture(None))


def test_open_mode_lets_through_what_no_rule_denies(net: Make, echoing: Server) -> None:
    plane = net(
        here(f"app.test:{echoing.port}"), rule("bad.test:1-65535", action="deny"), mode="open",
        hosts={"app.test": "127.0.0.1", "bad.test": "127.0.0.1", "other.test": "127.0.0.1"},
    )  # fmt: skip
    with plane.connect("app.test", echoing.port) as sock:
        round_trip(sock)
    assert plane.errno("bad.test", echoing.port) == errno.EHOSTUNREACH
    assert plane.errno("other.test", echoing.port) == errno.EHOSTUNREACH
    assert plane.denials() == ["deny:bad.test:1-65535/tcp", "reserved:own"]
