"""The asynchronous client: many calls at once, cancellations, and a service that restarts."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
from collections.abc import Awaitable
from typing import Any

import pytest
from support.place import Place
from support.toy import Blob, Number, Text

from agent_box.bus import peer
from agent_box.bus.aclient import AsyncClient
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.schema import Empty


def run(coroutine: Awaitable[None], seconds: float = 150) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await coroutine

    asyncio.run(bounded())


def connect(place: Place, role: str = "operator") -> AsyncClient:
    return AsyncClient(role, "engine", **place.options(role))


async def refused(call: Awaitable[Any]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        await call
    return caught.value


def test_many_calls_at_once_each_get_their_own_answer(toy_process: Place) -> None:
    async def main() -> None:
        async with connect(toy_process) as client:
            texts = [Text(text=str(n)) for n in range(2000)]
            assert await asyncio.gather(*(client.call("echo", t) for t in texts)) == texts
            numbers = [Number(n=n % 20) for n in range(300)]
            assert await asyncio.gather(*(client.call("later", n) for n in numbers)) == numbers
            assert client._peer.idle()

    run(main())


def test_a_caller_that_is_cancelled_takes_nobody_with_it(toy_process: Place) -> None:
    async def main() -> None:
        async with connect(toy_process) as client:
            for round_ in range(30):
                calls = [
                    asyncio.get_running_loop().create_task(client.call("later", Number(n=n)))
                    for n in range(20)
                ]
                await asyncio.sleep(0.001 * (round_ % 10))
                for call in calls[::2]:
                    call.cancel()
                done = await asyncio.gather(*calls, return_exceptions=True)
                for n, result in enumerate(done):
                    if n % 2:
                        assert result == Number(n=n)
                    else:
                        assert isinstance(result, asyncio.CancelledError) or result == Number(n=n)
            assert client._peer.idle()

    run(main())


def test_what_does_not_fit_in_flight_waits(toy_process: Place) -> None:
    async def main() -> None:
        async with connect(toy_process) as client, asyncio.TaskGroup() as group:
            for _ in range(peer.IN_FLIGHT_MAX):
                group.create_task(refused(client.call("never", Empty(), deadline_s=1)))
            await asyncio.sleep(0.1)
            error = await refused(client.call("echo", Text(text="x"), deadline_s=0.2))
            assert error.reason is Reason.UNAVAILABLE  # it was not sent
            assert await client.call("echo", Text(text="x")) == Text(text="x")

    run(main())


def test_nothing_is_lost_or_doubled_while_the_service_is_killed_again_and_again(
    toy_process: Place,
) -> None:
    place = toy_process
    answered: asyncio.Queue[None] = asyncio.Queue()

    async def worker(client: AsyncClient, number: int, until: asyncio.Event) -> dict[bytes, Any]:
        told: dict[bytes, Any] = {}
        turn = 0
        while not until.is_set():
            turn += 1
            id = os.urandom(16)
            method = ("add", "add_later")[(number + turn) % 2]
            told[id] = await client.call(method, Number(n=1), request_id=id)
            answered.put_nowait(None)
            text = Text(text=f"{number} {turn}")
            assert await client.call("echo", text) == text
            assert await client.call("put", text) == Number(n=len(text.text))
        return told

    async def main() -> None:
        over = asyncio.Event()
        clients = [connect(place) for _ in range(3)]
        async with asyncio.TaskGroup() as group:
            workers = [
                group.create_task(worker(client, n, over))
                for n in range(12)
                for client in (clients[n % 3],)
            ]
            chance = random.Random(7)
            for _ in range(12):
                await asyncio.sleep(chance.random() * 0.4)
                await asyncio.to_thread(place.kill)
                while not answered.empty():
                    answered.get_nowait()
                await asyncio.to_thread(place.spawn)
                for _ in range(5):  # each service has done something, however busy the host is
                    await answered.get()
            over.set()
        told = {id: reply for w in workers for id, reply in w.result().items()}
        for client in clients:
            assert client._peer.idle()
            client.close()
        with sqlite3.connect(place.database) as db:
            rows = [bytes(row[0]) for row in db.execute("SELECT id FROM added")]
        assert len(told) > 50
        assert sorted(rows) == sorted(told)  # each acknowledged one once, and no other
        assert len({reply.n for reply in told.values()}) == len(told)

    run(main(), 170)


def test_streams_in_both_directions_at_once(toy_process: Place) -> None:
    async def main() -> None:
        async with (
            connect(toy_process) as client,
            await client.stream("mirror", Empty()) as stream,
            asyncio.TaskGroup() as group,
        ):

            async def up() -> None:
                for n in range(2000):
                    await stream.send(Blob(data=n.to_bytes(4, "big")))
                stream.end()

            group.create_task(up())
            for n in range(2000):
                assert await stream.recv() == Blob(data=n.to_bytes(4, "big"))
            assert await stream.recv() is None
            assert await stream.finish() == Number(n=2000)

    run(main())


def test_calls_go_on_beside_a_stream_that_nobody_reads(toy_process: Place) -> None:
    async def main() -> None:
        async with (
            connect(toy_process) as client,
            await client.stream("count", Number(n=5000)) as stream,
        ):
            for n in range(200):
                assert await client.call("later", Number(n=0)) == Number(n=0), n
            assert len(stream._flow.inbox) <= 16  # bounded by the window, whatever is sent
            count = 0
            while await stream.recv() is not None:
                count += 1
            assert count == 5000

    run(main())


def test_a_stream_does_not_survive_its_service(toy_process: Place) -> None:
    async def main() -> None:
        async with connect(toy_process) as client, await client.stream("hang", Empty()) as stream:
            await asyncio.to_thread(toy_process.kill)
            assert (await refused(stream.recv())).reason is Reason.CONNECTION_LOST

    run(main())


def test_a_stream_to_nobody_is_unavailable(place: Place) -> None:
    async def main() -> None:
        async with connect(place) as client:
            error = await refused(client.stream("hang", Empty(), deadline_s=0.2))
            assert error.reason is Reason.UNAVAILABLE
            assert client._peer.idle()

    run(main())


def test_closing_ends_what_waits(toy_process: Place) -> None:
    async def main() -> None:
        client = connect(toy_process)
        await client.call("ping", Empty())
        stream = await client.stream("hang", Empty())
        loop = asyncio.get_running_loop()
        calls = [
            loop.create_task(refused(client.call(method, request)))
            for method, request in (
                ("never", Empty()),
                ("add_later", Number(n=9000)),
            )
        ]
        await asyncio.sleep(0.1)
        client.close()
        client.close()
        assert [(await c).reason for c in calls] == [Reason.UNAVAILABLE, Reason.UNKNOWN_OUTCOME]
        assert (await refused(stream.recv())).reason is Reason.CONNECTION_LOST
        assert (await refused(client.call("ping", Empty()))).reason is Reason.UNAVAILABLE
        stream.close()

    run(main())


def test_a_wedged_service_gives_deadline_and_others_are_served(toy_process: Place) -> None:
    import signal

    async def main() -> None:
        async with connect(toy_process) as client:
            await client.call("ping", Empty())
            toy_process.kill(signal.SIGSTOP)
            error = await refused(client.call("echo", Text(text="x"), deadline_s=0.3))
            assert error.reason is Reason.DEADLINE
            toy_process.kill(signal.SIGCONT)
            assert await client.call("echo", Text(text="y")) == Text(text="y")

    run(main())
