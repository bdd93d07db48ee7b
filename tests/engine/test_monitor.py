"""A monitor that is silent, floods or lies costs a bounded time and nothing else."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from agent_box.bus.errors import Reason, Refusal
from agent_box.engine import monitor

GREETING = b'{"QMP": {"version": {}, "capabilities": ["oob"]}}\r\n'
EVENT = b'{"event":"STOP","data":{},"timestamp":{"seconds":1,"microseconds":2}}\n'
Vmm = Callable[[socket.socket], Awaitable[None]]


def qmp(answer: bytes, *, again: bool = False) -> Vmm:
    """A VMM that greets, agrees, and answers the first command with `answer`, in which ID
    stands for its id."""

    async def serve(sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, GREETING)
        await loop.sock_recv(sock, 4096)
        await loop.sock_sendall(sock, b'{"return": {}}\n')
        asked = json.loads(await loop.sock_recv(sock, 4096))
        said = answer.replace(b"ID", json.dumps(asked["id"]).encode())
        await loop.sock_sendall(sock, said)
        while again:
            await loop.sock_sendall(sock, said)
        await asyncio.Event().wait()

    return serve


def says(data: bytes, *, end: bool = False) -> Vmm:
    async def serve(sock: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, data)
        if not end:
            await asyncio.Event().wait()

    return serve


HOSTILE: dict[str, Vmm] = {
    "silent": says(b""),
    "gone": says(b"", end=True),
    "garbage": says(os.urandom(300) + b"\n"),
    "no line at all": says(b"x" * 1_000_000),
    "greets only": says(GREETING),
    "deep": says(b"[" * 15_000 + b"\n"),
    "no object": says(b"[]\n"),
    "silent later": qmp(b""),
    "deep later": qmp(b'{"return":' + b"[" * 10_000 + b"\n"),
    "a long line later": qmp(b'{"return":"' + b"x" * 100_000 + b'"}\n'),
    "no UTF-8": qmp(b'{"\xff\n'),
    "a long number": qmp(b'{"return":' + b"9" * 6000 + b"}\n"),
    "an id that is none": qmp(b'{"return":{},"id":[1]}\n'),
    "another's id": qmp(b'{"return":{"status":"running"},"id":"x"}\n'),
    "an error": qmp(b'{"error":{"class":"GenericError","desc":"no"},"id":ID}\n'),
    "an error that is none": qmp(b'{"error":7,"id":ID}\n'),
    "an answer that is none": qmp(b'{"return":7,"id":ID}\n'),
    "a state that is none": qmp(b'{"return":{"status":["running"]},"id":ID}\n'),
    "a state nobody knows": qmp(b'{"return":{"status":"guest-panicked"},"id":ID}\n'),
    "a flood": qmp(EVENT * 1000, again=True),
}


def played(vmm: Vmm, ask: Callable[[socket.socket], Awaitable[object]]) -> object:
    """Asks, and sees that nothing is left: no descriptor, no task, no complaint."""

    async def main() -> object:
        complaints: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, what: complaints.append(what))
        before = set(os.listdir("/proc/self/fd"))
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        serving = loop.create_task(vmm(theirs))
        try:
            return await ask(ours)
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            if not serving.cancelled():
                serving.exception()
            theirs.close()
            await asyncio.sleep(0)
            assert ours.fileno() == -1
            assert set(os.listdir("/proc/self/fd")) == before
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert complaints == []

    return asyncio.run(main())


async def stop(sock: socket.socket) -> None:
    await monitor.change(sock, "stop")


@pytest.mark.parametrize("status", ["running", "paused", "prelaunch", "io-error"])
def test_a_good_one_is_believed(status: str) -> None:
    answer = json.dumps({"return": {"status": status}}).encode()[:-1] + b',"id":ID}\n'
    expected = {"running": "running", "io-error": "stalled"}.get(status, "paused")
    assert played(qmp(EVENT * 5 + answer), monitor.state) == expected


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_one_is_unreachable_in_time(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    before = time.monotonic()
    assert played(HOSTILE[name], monitor.state) == "unreachable"
    assert time.monotonic() - before < 3  # 0.5 s on an idle host
    assert [r for r in caplog.records if r.name.startswith("qemu")] == []


UNDONE = sorted(
    set(HOSTILE)
    - {"silent", "silent later", "greets only", "another's id"}  # these take all the time
    - {"an answer that is none", "a state that is none", "a state nobody knows"}  # not looked at
)


@pytest.mark.parametrize("name", UNDONE)
def test_a_change_that_was_not_done_is_refused(name: str) -> None:
    with pytest.raises(Refusal) as refused:
        played(HOSTILE[name], stop)
    assert refused.value.reason is Reason.STATE_UNKNOWN


def test_a_silent_one_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "CHANGE_S", 0.1)

    for name in ("silent", "greets only", "silent later", "another's id"):
        with pytest.raises(Refusal):
            played(HOSTILE[name], stop)


def test_ten_silent_ones_are_asked_at_once() -> None:
    async def main() -> None:
        pairs = [socket.socketpair() for _ in range(10)]
        before = time.monotonic()
        states = await asyncio.gather(*(monitor.state(ours) for ours, _ in pairs))
        assert time.monotonic() - before < 1.0
        assert states == ["unreachable"] * 10
        for _, theirs in pairs:
            theirs.close()

    asyncio.run(main())


@pytest.mark.parametrize("steps", range(1, 30, 3))
def test_a_cancelled_question_leaves_nothing(steps: int) -> None:
    async def ask(sock: socket.socket) -> None:
        asking = asyncio.get_running_loop().create_task(monitor.state(sock))
        for _ in range(steps):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        await asyncio.sleep(0.01)

    played(qmp(b'{"return":{"status":"running"},"id":ID}\n'), ask)
