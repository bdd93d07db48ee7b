"""The data plane beside slirp4netns and pasta:

    python tests/bench/bench_netstack.py [ROUNDS [KIND ...]]

Everything runs in a network namespace of this bench, with the same servers on its loopback, the
same clients, the same MTU (65,520), and by turns: in each round each candidate does each thing
once. Figures are medians. Needs /dev/net/tun for this account, and Debian's slirp4netns and
passt; a candidate that is not there is left out. What a candidate fails in is said and has no
figure in that round.

- up, down: MB/s of one connection, guest to host and host to guest, and CPU seconds per GB of
  the candidate itself (ours: the worker; the pump in the guest is box-guest's own).
  The receiver counts, from the first byte to the last; no direction waits for the other, as pasta
  of Debian 12 keeps repeating what comes back on a connection that its guest has half closed.
- connects: connections per second, 32 at a time, each with one byte there and back, and
  microseconds of the candidate's CPU for each. What the bench itself is busy with meanwhile is
  said when it leaves little: then the figure is the bench's own.
- latency: microseconds for a connect and an echo, one after the other.
- idle: KB of memory for each of 2,000 idle connections.
- forward: MB/s of one connection from the host into the guest through a forward.

KIND is one of these, to do only some.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import select
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

MTU = "65520"
SECONDS = 1.5
IDLE = 2000
TICKS = os.sysconf("SC_CLK_TCK")
SINK, SOURCE, ECHO, TOLD = 9001, 9002, 9003, 9004
WAIT_S = 30  # only ends what hangs
BUSY = 0.85  # of the time: whoever is has hardly more to give
KINDS = ("idle", "up", "down", "connects", "latency", "forward")
NSENTER = ["nsenter", "--preserve-credentials", "-U", "-n", "-t"]
BLOCK = bytes(1 << 20)


# -- servers, on the host's side


def serve() -> None:
    for port, what in ((SINK, _swallow), (SOURCE, _source), (TOLD, _tell)):
        threading.Thread(target=_accept, args=(port, what), daemon=True).start()
    _echo_all()


def _accept(port: int, what: Callable[[socket.socket], None]) -> None:
    listener = socket.create_server(("127.0.0.1", port))
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=what, args=(sock,), daemon=True).start()


_swallowed: queue.SimpleQueue[float] = queue.SimpleQueue()


def _sink(sock: socket.socket) -> float:
    """Swallows all that comes. Returns the bytes per second from the first to the last."""
    buffer = bytearray(1 << 20)
    total = 0
    began = last = 0.0
    try:
        while count := sock.recv_into(buffer):
            last = time.monotonic()
            if not total:
                began = last
            total += count
    except ConnectionResetError:
        pass  # what came, came
    sock.close()
    return total / (last - began) if last > began else 0.0


def _swallow(sock: socket.socket) -> None:
    _swallowed.put(_sink(sock))


def _tell(sock: socket.socket) -> None:
    """The rate of the last that was swallowed, to the bench itself."""
    try:
        sock.sendall(json.dumps(_swallowed.get(timeout=WAIT_S)).encode())
    except queue.Empty:
        pass
    sock.close()


def _source(sock: socket.socket) -> None:
    try:
        while True:
            sock.sendall(BLOCK)
    except OSError:
        sock.close()


def _echo_all() -> None:
    listener = socket.create_server(("127.0.0.1", ECHO), backlog=4096)
    listener.setblocking(False)
    poll = select.epoll()
    poll.register(listener, select.EPOLLIN)
    socks: dict[int, socket.socket] = {}
    while True:
        for fd, _ in poll.poll():
            if fd == listener.fileno():
                try:
                    while True:
                        sock, _ = listener.accept()
                        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        socks[sock.fileno()] = sock
                        poll.register(sock, select.EPOLLIN)
                except BlockingIOError:
                    continue
            sock = socks[fd]
            try:
                data = sock.recv(65536)
                if data:
                    sock.sendall(data)
                    continue
            except OSError:
                pass  # the client went: its right
            del socks[fd]
            sock.close()


# -- clients, in a guest


def client(kind: str, address: str, port: int) -> None:
    print(json.dumps({"up": _up, "down": _down, "connects": _connects, "latency": _latency,
                      "idle": _idle, "listen": _listen}[kind](address, port)))  # fmt: skip


def _up(address: str, port: int) -> float:
    with socket.create_connection((address, port)) as sock:
        began = time.monotonic()
        while time.monotonic() - began < SECONDS:
            sock.sendall(BLOCK)
    return 0.0  # the receiver knows


def _down(address: str, port: int) -> float:
    buffer = bytearray(1 << 20)
    with socket.create_connection((address, port)) as sock:
        began = time.monotonic()
        total = 0
        while time.monotonic() - began < SECONDS:
            total += sock.recv_into(buffer)
        return total / (time.monotonic() - began)


def _connects(address: str, port: int) -> float:
    poll = select.epoll()
    socks: dict[int, socket.socket] = {}

    def start() -> None:
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex((address, port))
        socks[sock.fileno()] = sock
        poll.register(sock, select.EPOLLOUT)

    done = failed = 0
    began, cpu = time.monotonic(), time.process_time()
    for _ in range(32):
        start()
    while time.monotonic() - began < SECONDS:
        for fd, event in poll.poll(1):
            sock = socks[fd]
            try:
                if event & select.EPOLLOUT:
                    sock.send(b"x")
                    poll.modify(fd, select.EPOLLIN)
                    continue
                sock.recv(1)
                done += 1
            except OSError:
                failed += 1
            poll.unregister(fd)
            del socks[fd]
            sock.close()
            start()
    if failed > done / 100:
        raise SystemExit(f"{failed} connections failed")
    seconds = time.monotonic() - began
    _own("client", (time.process_time() - cpu) / seconds)
    return done / seconds


def _own(what: str, share: float) -> None:
    if share > BUSY:
        print(f"the bench's own {what} was busy for {share:.0%}", file=sys.stderr, flush=True)


def ask(address: str, message: str) -> None:
    """One question to a resolver; message and answer in hex."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(WAIT_S)
        sock.sendto(bytes.fromhex(message), (address, 53))
        print(sock.recv(4096).hex())


def _latency(address: str, port: int) -> float:
    times = []
    for _ in range(300):
        began = time.monotonic()
        with socket.create_connection((address, port)) as sock:
            sock.send(b"x")
            sock.recv(1)
        times.append(time.monotonic() - began)
    return statistics.median(times) * 1e6


def _idle(address: str, port: int) -> float:
    socks = []
    for _ in range(IDLE):
        socks.append(socket.create_connection((address, port)))
        socks[-1].send(b"x")
        socks[-1].recv(1)
    print("ready", flush=True)
    sys.stdin.readline()
    return 0.0


def _listen(address: str, port: int) -> float:
    listener = socket.create_server(("0.0.0.0", port))  # noqa: S104
    print("ready", flush=True)
    sock, _ = listener.accept()
    return _sink(sock)


# -- candidates


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Candidate:
    def __init__(self, name: str, pid: int, enter: list[str], address: str) -> None:
        self.name = name
        self.pid = pid
        self.enter = enter
        self.address = address
        self.forward: tuple[str, int] | None = None

    def cpu(self) -> float:
        return _cpu(self.pid)

    def memory_kb(self) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1])
        raise ProcessLookupError(self.pid)

    def client(self, kind: str, port: int) -> subprocess.Popen[str]:
        command = [*self.enter, sys.executable, __file__, "client", kind, self.address, str(port)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self, kind: str, port: int) -> float:
        """Raises ValueError: the client failed, and said why on standard error."""
        process = self.client(kind, port)
        try:
            out, _ = process.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise ValueError("it hangs") from None
        return float(json.loads(out))


@contextmanager
def _process(*words: str, **more: object) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, **more)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def ours(directory: Path) -> Iterator[Candidate]:
    from scapy.layers.dns import DNS, DNSQR
    from support.tunguest import GATEWAY, TunGuest

    guest = TunGuest(own=False)
    link = guest.new_link()
    listener = socket.create_server(("127.0.0.1", 0))
    words = (sys.executable, __file__, "worker", str(link.fileno()), str(listener.fileno()),
             str(directory))  # fmt: skip
    with _process(*words, pass_fds=(link.fileno(), listener.fileno())) as worker:
        link.close()
        asked = bytes(DNS(rd=1, qd=DNSQR(qname="app.test")))
        words = (*guest.inside(), sys.executable, __file__, "ask", GATEWAY, asked.hex())
        answered = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        address = DNS(bytes.fromhex(answered)).an[0].rdata
        found = Candidate("agent-box", worker.pid, guest.inside(), str(address))
        found.forward = listener.getsockname()
        yield found
    guest.close()


@contextmanager
def _namespace() -> Iterator[int]:
    with _process("unshare", "-Urn", "sleep", "3600") as process:
        time.sleep(0.5)  # no event tells that unshare has done it
        yield process.pid


@contextmanager
def slirp(directory: Path) -> Iterator[Candidate]:
    with _namespace() as pid:
        words = ("slirp4netns", "--configure", f"--mtu={MTU}", f"--userns-path=/proc/{pid}/ns/user",
                 str(pid), "tap0")  # fmt: skip
        with (
            open(directory / "slirp.log", "w") as log,
            _process(*words, stdout=log, stderr=log) as process,
        ):
            time.sleep(1)  # it says so only on a descriptor
            yield Candidate("slirp4netns", process.pid, [*NSENTER, str(pid)], "10.0.2.2")


@contextmanager
def pasta(directory: Path) -> Iterator[Candidate]:
    with _namespace() as pid:
        words = ("pasta", "--config-net", "--mtu", MTU, "-f", "--userns", f"/proc/{pid}/ns/user",
                 "-t", "none", "-u", "none", "-T", "none", "-U", "none", str(pid))  # fmt: skip
        with (
            open(directory / "pasta.log", "w") as log,
            _process(*words, stdout=log, stderr=log) as process,
        ):
            time.sleep(1)  # it says nothing
            yield Candidate("pasta", process.pid, [*NSENTER, str(pid)], "192.0.2.1")


def worker(link_fd: int, listener_fd: int, directory: str) -> None:
    from support import planes

    from agent_box.netstack.plane import Plane

    plane = Plane(
        policy=planes.policy(planes.here("app.test:1-65535")),
        broker=None,
        report=print,
        etc=planes.etc(Path(directory) / "etc", {"app.test": "127.0.0.1"}),
    )
    plane.link(socket.socket(fileno=link_fd))
    plane.forward_add(socket.socket(fileno=listener_fd), SINK)
    poll = select.poll()
    poll.register(plane.fileno(), select.POLLIN)
    while True:
        wait = plane.run()
        poll.poll(None if wait is None else int(wait * 1000) + 1 if wait else 0)


# -- the bench


def bench(rounds: int, kinds: tuple[str, ...]) -> None:
    for words in ("link set lo up", "link add veth0 type veth peer name veth1",
                  "addr add 192.0.2.2/24 dev veth0", "link set veth0 up", "link set veth1 up",
                  "route add default via 192.0.2.1"):  # fmt: skip
        subprocess.run(["ip", *words.split()], check=True)
    makers = {"agent-box": ours, "slirp4netns": slirp, "pasta": pasta}
    results: dict[str, dict[str, list[float]]] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        _process(sys.executable, __file__, "serve") as servers,
    ):
        for number in range(rounds):
            for name, make in makers.items():
                if name != "agent-box" and shutil.which(name) is None:
                    continue
                with make(Path(directory)) as candidate:
                    found = _round(candidate, kinds, servers.pid)
                for key, value in found.items():
                    results.setdefault(name, {}).setdefault(key, []).append(value)
            print(f"after {number + 1} of {rounds} rounds, load {os.getloadavg()[0]:.1f}")
            _table(results)
            sys.stdout.flush()


def _table(results: dict[str, dict[str, list[float]]]) -> None:
    keys = ["up", "up cpu", "down", "down cpu", "connects", "conn cpu", "latency", "idle",
            "forward"]  # fmt: skip
    print(f"{'':12}" + "".join(f"{key:>10}" for key in keys))
    for name, values in results.items():
        cells = [f"{statistics.median(values[k]):10.4g}" if k in values else f"{'-':>10}"
                 for k in keys]  # fmt: skip
        print(f"{name:12}" + "".join(cells))


def _round(candidate: Candidate, kinds: tuple[str, ...], servers: int) -> dict[str, float]:
    found: dict[str, float] = {}
    candidate.measure("latency", ECHO)  # what is made once is made
    for kind in kinds:
        try:
            found |= _one(candidate, kind, servers)
        except (ValueError, OSError) as error:
            print(f"{candidate.name} failed in {kind}: {type(error).__name__} {error}", flush=True)
    return found


def _one(candidate: Candidate, kind: str, servers: int) -> dict[str, float]:
    """Raises ValueError or OSError: the candidate did not do it."""
    if kind == "idle":
        before_kb = candidate.memory_kb()
        idle = candidate.client("idle", ECHO)
        assert idle.stdout is not None
        ready = idle.stdout.readline()
        after_kb = candidate.memory_kb()
        idle.communicate("\n", timeout=WAIT_S)
        if ready != "ready\n":
            raise ValueError("not all connected")
        return {kind: (after_kb - before_kb) / IDLE}
    if kind in ("up", "down"):
        before = candidate.cpu()
        rate = candidate.measure(kind, SINK if kind == "up" else SOURCE)
        if kind == "up":
            with socket.create_connection(("127.0.0.1", TOLD)) as told:
                rate = float(json.loads(told.recv(100)))
        cpu = (candidate.cpu() - before) / (rate * SECONDS / 1e9)
        return {kind: rate / 1e6, f"{kind} cpu": cpu}
    if kind == "connects":
        before, server = candidate.cpu(), _cpu(servers)
        rate = candidate.measure(kind, ECHO)
        _own("server", (_cpu(servers) - server) / SECONDS)
        return {kind: rate, "conn cpu": (candidate.cpu() - before) / (rate * SECONDS) * 1e6}
    if kind == "forward":
        if candidate.forward is None:
            return {}
        inside = candidate.client("listen", SINK)
        assert inside.stdout is not None
        inside.stdout.readline()
        _up(*candidate.forward)
        out, _ = inside.communicate(timeout=WAIT_S)
        return {kind: float(json.loads(out)) / 1e6}
    return {kind: candidate.measure(kind, ECHO)}


def main() -> None:
    words = sys.argv[1:]
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if words[:1] == ["serve"]:
        serve()
    elif words[:1] == ["client"]:
        client(words[1], words[2], int(words[3]))
    elif words[:1] == ["ask"]:
        ask(words[1], words[2])
    elif words[:1] == ["worker"]:
        worker(int(words[1]), int(words[2]), words[3])
    elif words[:1] == ["inside"]:
        bench(int(words[1]), tuple(words[2:]) or KINDS)
    else:
        words = words or ["5"]
        os.execvp("unshare", ["unshare", "-n", f"--map-user={os.getuid()}",
                              f"--map-group={os.getgid()}", "--keep-caps", sys.executable,
                              __file__, "inside", *words])  # fmt: skip


if __name__ == "__main__":
    main()
