"""What waits to be sent is sent in order, again after a loss, and given up when refused."""

from __future__ import annotations

import asyncio

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.outbox import Outbox
from agent_box.process.log import Log
from agent_box.process.tasks import TaskSet


class Receiver:
    """Answers as scripted, then takes everything."""

    def __init__(self, *refusals: Reason) -> None:
        self.refusals = list(refusals)
        self.taken: list[int] = []
        self.lost: list[tuple[int, str]] = []
        self.away = asyncio.Event()

    async def send(self, item: int) -> None:
        if self.refusals:
            raise Refusal(self.refusals.pop(0), "no")
        self.taken.append(item)

    def note_lost(self, item: int, why: str) -> None:
        self.lost.append((item, why))


async def played(receiver: Receiver, items: range, *, capacity: int = 100) -> None:
    tasks = TaskSet(Log(service="test"))
    outbox = Outbox(receiver.send, receiver.note_lost, capacity=capacity, waits=(0.0, 0.001))
    for item in items:
        outbox.put(item)
    tasks.spawn(outbox.run(), name="outbox")
    assert await outbox.flush(5)
    assert len(outbox) == 0
    await tasks.cancel()


def test_all_arrive_in_order_though_the_receiver_is_away_at_first() -> None:
    receiver = Receiver(*[Reason.UNAVAILABLE] * 5, Reason.UNKNOWN_OUTCOME, Reason.DEADLINE)
    asyncio.run(played(receiver, range(10)))
    assert receiver.taken == list(range(10))
    assert receiver.lost == []


def test_what_is_refused_for_good_is_given_up() -> None:
    receiver = Receiver(Reason.NOT_FOUND)
    asyncio.run(played(receiver, range(3)))
    assert receiver.taken == [1, 2]
    assert receiver.lost == [(0, "no")]


def test_of_too_many_the_oldest_are_given_up() -> None:
    receiver = Receiver()
    asyncio.run(played(receiver, range(5), capacity=3))
    assert receiver.taken == [2, 3, 4]
    assert [item for item, _ in receiver.lost] == [0, 1]


def test_flush_does_not_wait_for_ever() -> None:
    async def main() -> None:
        receiver = Receiver()
        outbox = Outbox(receiver.send, receiver.note_lost)
        assert await outbox.flush(0.01)
        outbox.put(1)
        assert not await outbox.flush(0.01)

    asyncio.run(main())
