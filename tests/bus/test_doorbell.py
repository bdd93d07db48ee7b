from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
from support.place import Place

from agent_box.bus import keys
from agent_box.bus.doorbell import AsyncSubscriber, Publisher, Ring, Subscriber, replay
from agent_box.bus.zap import Gate

EPOCH = b"e" * 16
ROLES = ("operator", "broker")


@contextmanager
def bell(place: Place) -> Iterator[Publisher]:
    gate = Gate(keys.load_all_public(place.keys / "public", ROLES))
    gate.start()
    secret = keys.load_secret(place.keys / "engine")
    publisher = Publisher(
        gate, sock=place.bell, secret=secret, service="engine", roles=frozenset({"operator"})
    )
    try:
        yield publisher
    finally:
        publisher.close()
        gate.close()


def options(place: Place, role: str = "operator") -> dict[str, Any]:
    return {
        "sock": place.bell,
        "secret": keys.load_secret(place.keys / role),
        "server_key": place.server_key,
    }


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


async def heard(listener: AsyncSubscriber, publisher: Publisher, seq: int) -> Ring:
    """Rings until it is heard: a ring before the subscription has arrived is lost."""
    while True:
        publisher.ring(EPOCH, seq)
        ring = await listener.wait(0.05)
        if ring is not None and ring.epoch is not None:
            return ring


def test_a_ring_is_heard_and_says_epoch_and_number(place: Place) -> None:
    async def main() -> None:
        with bell(place) as publisher:
            listener = AsyncSubscriber(**options(place))
            assert await listener.wait(20) == Ring(None, 0)  # it is connected: look once
            assert await heard(listener, publisher, 7) == Ring(EPOCH, 7)
            publisher.ring(EPOCH, 8)
            assert await listener.wait(20) == Ring(EPOCH, 8)
            listener.close()

    run(main)


def test_silence_is_none_in_time(place: Place) -> None:
    async def main() -> None:
        listener = AsyncSubscriber(**options(place))
        before = time.monotonic()
        assert await listener.wait(0.1) is None
        assert time.monotonic() - before >= 0.09
        listener.close()

    run(main)


def test_many_rings_become_the_newest(place: Place) -> None:
    async def main() -> None:
        with bell(place) as publisher:
            listener = AsyncSubscriber(**options(place))
            await heard(listener, publisher, 1)
            for seq in range(2, 20_000):
                publisher.ring(EPOCH, seq)
            newest = 0
            while newest < 19_999:
                ring = await listener.wait(20)
                assert ring is not None and ring.seq > newest
                newest = ring.seq
            listener.close()

    run(main)


def test_a_restart_of_the_publisher_rings(place: Place) -> None:
    async def main() -> None:
        listener = AsyncSubscriber(**options(place))
        for _ in range(3):
            with bell(place):
                assert await listener.wait(20) == Ring(None, 0)
        listener.close()

    run(main)


@pytest.mark.parametrize("role", ["broker", "registry"])
def test_who_may_not_listen_hears_nothing(place: Place, role: str) -> None:
    async def main() -> None:
        with bell(place) as publisher:
            honest = AsyncSubscriber(**options(place))
            other = AsyncSubscriber(**options(place, role))
            await heard(honest, publisher, 1)
            publisher.ring(EPOCH, 2)
            assert await honest.wait(20) == Ring(EPOCH, 2)
            assert await other.wait(0.3) is None
            honest.close()
            other.close()

    run(main)


def test_listening_synchronously(place: Place) -> None:
    async def main() -> None:
        with bell(place) as publisher:
            listener = Subscriber(**options(place))
            assert await asyncio.to_thread(listener.wait, 20) == Ring(None, 0)
            assert listener.wait(0) is None
            for _ in range(400):
                publisher.ring(EPOCH, 5)
                if ring := await asyncio.to_thread(listener.wait, 0.05):
                    break
            assert ring == Ring(EPOCH, 5)
            listener.close()

    run(main)


def test_what_is_no_ring_is_ignored(place: Place) -> None:
    with zmq.Context() as context:
        publisher = context.socket(zmq.PUB)
        publisher.linger = 0
        publisher.curve_server = 1
        publisher.curve_secretkey = keys.load_secret(place.keys / "engine").reveal()
        publisher.bind(f"ipc://{place.bell}")
        listener = Subscriber(**options(place))
        assert listener.wait(20) == Ring(None, 0)
        for junk in (b"", b"AB1", b"AB2" + EPOCH + bytes(8), b"AB1" + EPOCH + b"\xff" * 8):
            publisher.send(junk)
            assert listener.wait(0.05) is None
        listener.close()
        publisher.close()


@pytest.mark.parametrize(("epoch", "seq"), [(EPOCH, -1), (EPOCH, 1 << 63), (b"short", 1)])
def test_what_is_no_ring_is_not_rung(place: Place, epoch: bytes, seq: int) -> None:
    async def main() -> None:
        with bell(place) as publisher, pytest.raises(ValueError, match="not a ring"):
            publisher.ring(epoch, seq)

    run(main)


def test_a_replay_misses_nothing_whatever_the_bell_does(place: Place) -> None:
    """The journal grows while the publisher comes and goes; every entry is seen once."""
    journal: list[int] = []

    async def read(cursor: int) -> tuple[list[int], int]:
        page = journal[cursor : cursor + 7]
        return page, cursor + len(page)

    async def main() -> None:
        listener = AsyncSubscriber(**options(place))
        seen: list[int] = []

        async def follow() -> None:
            async for entry in replay(listener, read, 0, 0.5):
                seen.append(entry)
                if len(seen) == 300:
                    return

        async with asyncio.TaskGroup() as group:
            group.create_task(follow())
            for _ in range(3):
                with bell(place) as publisher:
                    for _ in range(50):
                        journal.append(len(journal))
                        publisher.ring(EPOCH, len(journal))
                        await asyncio.sleep(0.001)
                for _ in range(50):  # nobody rings
                    journal.append(len(journal))
        assert seen == list(range(300))
        listener.close()

    run(main)
