"""A call on the bus against a bare pyzmq CURVE echo, in the same run, interleaved.

    python tests/bench/bench_bus.py [ROUNDS]

The bare echo is the least that a program with the same sockets can do: a process with one
ROUTER, CURVE with a ZAP handler in a thread (pyzmq's own), blocking `recv_multipart` and
`send_multipart` of the same three frames, and a DEALER that blocks likewise. No parsing, no
deadline, no policy, no loss detection, no loop.

Each server is a process of its own and both clients are in this one. Each round times a block of
calls on one side and then on the other, so that whatever else the machine does hits both.
"best" is the fastest block, what the calls cost when nothing else runs; "usual" is the median.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import zmq
from support.place import Place
from support.toy import Blob, Number, Text

from agent_box.bus import keys
from agent_box.bus.aclient import AsyncClient

BLOCK = 100  # calls that are timed together


def bare_server(sock: str, keys_dir: Path) -> None:
    from zmq.auth.thread import ThreadAuthenticator

    context = zmq.Context()
    gate = ThreadAuthenticator(context)
    gate.start()
    gate.configure_curve(domain="*", location=zmq.auth.CURVE_ALLOW_ANY)
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.curve_server = 1
    router.curve_secretkey = keys.load_secret(keys_dir / "engine").reveal()
    router.zap_domain = b"bare"
    router.bind(f"ipc://{sock}")
    print("ready", flush=True)
    while True:
        router.send_multipart(router.recv_multipart())


def bare_client(sock: Path, keys_dir: Path) -> zmq.Socket:
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.linger = 0
    pair = keys.load_secret(keys_dir / "operator")
    dealer.curve_serverkey = keys.load_public(keys_dir / "public", "engine")
    dealer.curve_publickey = pair.public
    dealer.curve_secretkey = pair.reveal()
    dealer.connect(f"ipc://{sock}")
    return dealer


def timed(call: Callable[[], object]) -> float:
    """Microseconds a call, over a block."""
    begin = time.perf_counter()
    for _ in range(BLOCK):
        call()
    return (time.perf_counter() - begin) / BLOCK * 1e6


def row(name: str, bare: list[float], bus: list[float]) -> None:
    best, usual = (min(bare), min(bus)), (statistics.median(bare), statistics.median(bus))
    print(
        f"{name:<32}{best[0]:>7.0f}{best[1]:>7.0f}{best[1] / best[0]:>7.2f}"
        f"{usual[0]:>9.0f}{usual[1]:>7.0f}{usual[1] / usual[0]:>7.2f}"
    )


def main(rounds: int) -> None:
    place = Place()
    place.spawn()
    bare_sock = place.root / "bare"
    bare = subprocess.Popen(
        [sys.executable, __file__, "--bare", str(bare_sock), str(place.keys)],
        stdout=subprocess.PIPE,
    )
    try:
        assert bare.stdout is not None and bare.stdout.readline() == b"ready\n"
        dealer = bare_client(bare_sock, place.keys)
        client = place.client()
        print(f"{rounds} blocks of {BLOCK} calls, microseconds a call")
        print(f"{'':<32}{'best':>7}{'':>14}{'usual':>9}")
        print(f"{'':<32}{'bare':>7}{'bus':>7}{'ratio':>7}{'bare':>9}{'bus':>7}{'ratio':>7}")
        for name, method, request, size in (
            ("sync call, 5 bytes", "echo", Text(text="hello"), 5),
            ("sync call, 4 KiB", "blob", Blob(data=bytes(4096)), 4096),
            ("sync call, 64 KiB", "blob", Blob(data=bytes(65536)), 65536),
            ("sync call into a task", "later", Number(n=0), 5),
        ):
            frames = [b"AB1", bytes(90), bytes(size + 8)]

            def echo(frames: list[bytes] = frames) -> None:
                dealer.send_multipart(frames)
                dealer.recv_multipart()

            def call(method: str = method, request: object = request) -> None:
                client.call(method, request)  # type: ignore[arg-type]

            timed(echo), timed(call)
            pairs = [(timed(echo), timed(call)) for _ in range(rounds)]
            row(name, [p[0] for p in pairs], [p[1] for p in pairs])

        async def asynchronous() -> None:
            aclient = AsyncClient("operator", "engine", **place.options())
            text = Text(text="hello")

            async def block() -> float:
                begin = time.perf_counter()
                for _ in range(BLOCK):
                    await aclient.call("echo", text)
                return (time.perf_counter() - begin) / BLOCK * 1e6

            await block()
            pairs = [(timed(echo5), await block()) for _ in range(rounds)]
            row("async call, 5 bytes", [p[0] for p in pairs], [p[1] for p in pairs])

            async def together() -> float:
                begin = time.perf_counter()
                await asyncio.gather(*(aclient.call("echo", text) for _ in range(BLOCK)))
                return (time.perf_counter() - begin) / BLOCK * 1e6

            pairs = [(timed(echo5), await together()) for _ in range(rounds)]
            row("async calls, all at once", [p[0] for p in pairs], [p[1] for p in pairs])
            aclient.close()

        small = [b"AB1", bytes(90), bytes(13)]

        def echo5() -> None:
            dealer.send_multipart(small)
            dealer.recv_multipart()

        asyncio.run(asynchronous())
        begin = time.perf_counter()
        with client.stream("count", Number(n=20_000)) as stream:
            while stream.recv() is not None:
                pass
        print(f"{'stream item, callee to caller':<32}{'':>7}{rate(begin, 20_000):>7.0f}")
        begin = time.perf_counter()
        for _ in range(50):
            with place.client() as fresh:
                fresh.call("echo", Text(text="hello"))
        print(f"{'connect, handshake, one call':<32}{'':>7}{rate(begin, 50):>7.0f}")
        client.close()
    finally:
        bare.kill()
        bare.wait()
        place.close()


def rate(begin: float, count: int) -> float:
    return (time.perf_counter() - begin) / count * 1e6


if __name__ == "__main__":
    if sys.argv[1:2] == ["--bare"]:
        bare_server(sys.argv[2], Path(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
