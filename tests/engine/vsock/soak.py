"""Soaks the vsock device under real machines: minutes of mixed load, every byte compared.

    python tests/engine/vsock/soak.py --kernel vmlinux --initrd initrd --root root.erofs \\
        --tsc-khz 2400000 --machines 2 --minutes 60 --life 180

`--machines` run side by side, each for `--life` seconds, then a fresh one takes its place.
Each gets echoes of 1 B to 4 MiB, hashed uploads, compared downloads, slow readers at either
side, hundreds of short streams, refused ports, clients that die, and pauses. An operation that
takes longer than `--patience` seconds is a stall. The initramfs is described in
support/vsockvm.py. The last line is a JSON object; the exit status is 0 when nothing was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import soakpeer  # noqa: E402
from support.vsockvm import Machine  # noqa: E402

PATTERN = soakpeer.pattern(7)
NOISE = random.Random(3).randbytes(4 << 20)


class Load:
    """Operations on one machine. Each raises when a byte is lost or time runs out."""

    def __init__(self, machine: Machine, patience: float, seed: int) -> None:
        self.machine = machine
        self.patience = patience
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.bytes = 0

    def dial(self, port: int) -> socket.socket:
        return self.machine.backend.dial(port, self.patience)

    def size(self) -> int:
        """1 B to 4 MiB, each magnitude as likely as the others."""
        return min(4 << 20, int(2 ** self.random.uniform(0, 22.05)))

    def piece(self) -> memoryview:
        size = self.size()
        at = self.random.randrange(len(NOISE) - size + 1)
        return memoryview(NOISE)[at : at + size]

    def echo(self) -> None:
        with self.dial(6000) as sock:
            pieces = [self.piece() for _ in range(self.random.randint(1, 4))]
            failed: list[BaseException] = []

            def write() -> None:
                try:
                    for piece in pieces:
                        sock.sendall(piece)
                    sock.shutdown(socket.SHUT_WR)
                except OSError as error:
                    failed.append(error)

            writer = threading.Thread(target=write)
            writer.start()
            got = bytearray()
            try:
                while data := sock.recv(1 << 18):
                    got += data
            finally:
                writer.join(self.patience)
            assert not failed and bytes(got) == b"".join(pieces), (len(got), failed)
            self.bytes += 2 * len(got)

    def upload(self, port: int = 6001, hello: bytes = b"", most: int = 3) -> None:
        with self.dial(port) as sock:
            sock.sendall(hello)
            whole = hashlib.sha256()
            total = 0
            for _ in range(self.random.randint(1, most)):
                piece = self.piece()
                sock.sendall(piece)
                whole.update(piece)
                total += len(piece)
            sock.shutdown(socket.SHUT_WR)
            answer = b""
            while data := sock.recv(200):
                answer += data
            assert answer == b"%d %s\n" % (total, whole.hexdigest().encode()), answer
            self.bytes += total

    def slow_guest(self) -> None:
        self.upload(6004, b"0.02 65536\n", 1)

    def download(self, pause: float = 0, size: int | None = None) -> None:
        if size is None:
            size = 4 * self.size()
        chunk = self.size()
        if size // chunk > 3000:
            chunk = max(chunk, size // 3000)
        with self.dial(6003) as sock:
            sock.sendall(b"%d %d 0 7\n" % (size, chunk))
            at = 0
            buffer = bytearray(1 << 18)
            still = threading.Event()
            while count := sock.recv_into(buffer):
                start = at % len(PATTERN)
                want = PATTERN[start : start + count]
                while len(want) < count:
                    want += PATTERN[: count - len(want)]
                assert buffer[:count] == want, (at, count)
                at += count
                if pause:
                    still.wait(pause)
            assert at == size, (at, size)
            self.bytes += at

    def slow_host(self) -> None:
        self.download(0.02, self.random.randint(1, 8 << 20))

    def churn(self) -> None:
        for i in range(100):
            with self.dial(6000) as sock:
                if i % 3:
                    sock.sendall(b"x")
                    if i % 3 == 1:
                        assert sock.recv(1) == b"x"

    def refused(self) -> None:
        for _ in range(20):
            try:
                self.dial(4999).close()
            except ConnectionRefusedError:
                continue
            raise AssertionError("nobody listens there")

    def dying_host(self) -> None:
        for _ in range(5):
            with self.dial(6003) as sock:
                sock.sendall(b"%d 65536 0 7\n" % (64 << 20))
                sock.recv(1000)
            with self.dial(6000) as sock:
                sock.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    sock.send(NOISE)

    def dying_guest(self) -> None:
        for _ in range(20):
            with self.dial(6007) as sock, contextlib.suppress(ConnectionError):
                sock.sendall(NOISE[:1000])
                assert sock.recv(1) == b""

    def many(self) -> None:
        socks = [self.dial(6000) for _ in range(60)]
        for i, sock in enumerate(socks):
            sock.sendall(NOISE[i : i + 1000])
        for i, sock in enumerate(socks):
            got = b""
            while len(got) < 1000:
                got += (data := sock.recv(1000))
                assert data
            assert got == NOISE[i : i + 1000]
            sock.close()

    def outward(self) -> None:
        with self.dial(6005) as sock:
            assert sock.recv(100).startswith(b"refused"), "the guest got out"

    def pause(self) -> None:
        still = threading.Event()
        still.wait(self.random.uniform(1, 5))
        self.machine.qmp("stop")
        still.wait(self.random.uniform(0, 0.5))
        self.machine.qmp("cont")

    def ping(self) -> None:
        with self.dial(6000) as sock:
            for _ in range(50):
                sock.sendall(b"p")
                assert sock.recv(1) == b"p"

    def run(self, seconds: float) -> list[str]:
        """Everything at once for that long. What went wrong."""
        end = time.monotonic() + seconds
        wrong: list[str] = []

        def repeat(*choices: Callable[[], None]) -> None:
            rnd = random.Random(self.random.random())
            while time.monotonic() < end and not wrong:
                chosen = rnd.choice(choices)
                try:
                    chosen()
                except (OSError, AssertionError, EOFError, RuntimeError) as error:
                    wrong.append(f"{chosen.__name__}: {error!r}")
                self.done[chosen.__name__] += 1

        groups: list[tuple[Callable[[], None], ...]] = [
            (self.echo,),
            (self.echo, self.upload, self.download),
            (self.download, self.upload),
            (self.slow_guest, self.slow_host),
            (self.slow_host,),
            (self.churn, self.refused, self.many, self.outward),
            (self.dying_host, self.dying_guest, self.ping),
            (self.pause,),
        ]
        threads = [threading.Thread(target=repeat, args=group) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 2 * self.patience)
            if thread.is_alive():
                wrong.append("a thread does not end")
        return wrong


def one(options: argparse.Namespace) -> int:
    """The life of one machine."""
    with tempfile.TemporaryDirectory() as name:
        machine = boot(options, Path(name))
        try:
            load = Load(machine, options.patience, options.seed)
            wrong = load.run(options.life)
            told = machine.backend.statistics()
            left = 20
            while told["streams"] and left:  # streams end when the guest has closed them
                threading.Event().wait(0.5)
                told = machine.backend.statistics()
                left -= 1
            if told["violations"] or told["breaks"] or told["streams"] or told["kept"]:
                wrong.append(f"the device says {told}")
            rss = memory(machine.backend.process.pid)
            if wrong:  # what the guest said of it, which goes with the directory
                print(machine.console.read_text(errors="replace")[-4000:], file=sys.stderr)
        finally:
            machine.close()
        report = {"wrong": wrong, "done": load.done, "bytes": load.bytes, "device": told}
        print(json.dumps({**report, "rss_kib": rss}), flush=True)
        return 1 if wrong else 0


def boot(options: argparse.Namespace, directory: Path) -> Machine:
    """A machine that answers, and whose timer goes right."""
    while True:
        within = Path(tempfile.mkdtemp(dir=directory))
        machine = Machine(
            within, options.kernel, options.initrd, options.root, HERE / "soakpeer.py",
            tsc_khz=options.tsc_khz, accel=options.accel,
        )  # fmt: skip
        try:
            machine.wait(6000, 5 * options.patience).close()
        except BaseException:
            machine.close()
            raise
        if not machine.mistimed():
            return machine
        print("a machine misjudged its timer: another", file=sys.stderr)
        machine.close()


def memory(pid: int) -> int:
    """Private memory of a process in KiB; the guest's, which is shared, is not counted."""
    for row in Path(f"/proc/{pid}/status").read_text().splitlines():
        if row.startswith("RssAnon:"):
            return int(row.split()[1])
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("kernel", "initrd", "root"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--tsc-khz", type=int, required=True)
    parser.add_argument("--accel", choices=("tcg", "kvm"), default="tcg")
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--life", type=float, default=180)
    parser.add_argument("--patience", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="one machine, in this process")
    options = parser.parse_args()
    if options.seed is not None:
        return one(options)
    end = time.monotonic() + 60 * options.minutes
    totals: Counter[str] = Counter()
    wrong: list[str] = []

    def lane(number: int) -> None:
        seed = number
        while time.monotonic() < end:
            words = [sys.executable, *sys.argv, "--seed", str(seed)]
            ran = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
            print(f"machine {seed}: {ran.returncode} {ran.stdout.strip()}", flush=True)
            seed += options.machines
            totals["machines"] += 1
            if ran.returncode:
                wrong.append(f"machine {seed}")
            if ran.stdout:
                said = json.loads(ran.stdout.splitlines()[-1])
                totals["bytes"] += said["bytes"]
                totals["streams"] += said["device"]["opened"]
                totals["rss_kib"] = max(totals["rss_kib"], said["rss_kib"])
                for name, count in said["done"].items():
                    totals[name] += count

    lanes = [threading.Thread(target=lane, args=(i,)) for i in range(options.machines)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    print(json.dumps({"wrong": wrong, **totals}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
