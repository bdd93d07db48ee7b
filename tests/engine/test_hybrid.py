"""CONNECT: what is a stream, what is a refusal, and that no byte of the guest is taken."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_box.bus.errors import Reason, Refusal
from agent_box.engine import hybrid


def played(said: bytes, *, end: bool = False, deadline_s: float = 5) -> tuple[bytes, bytes]:
    """What the device was told, and what is left to be read after the connection."""

    async def main() -> tuple[bytes, bytes]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.sendall(said)
            if end:
                theirs.shutdown(socket.SHUT_WR)
            await hybrid.connect(ours, 5000, deadline_s=deadline_s)
            theirs.shutdown(socket.SHUT_WR)
            left = b""
            while piece := await asyncio.get_running_loop().sock_recv(ours, 100):
                left += piece
            return theirs.recv(100), left

    return asyncio.run(main())


def test_a_stream_begins_after_the_line() -> None:
    assert played(b"OK 1073741824\nhello\n") == (b"CONNECT 5000\n", b"hello\n")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"OK",
        b"OK \n",
        b"NO 1\n",
        b"OK 1 2\n",
        b"OK -1\n",
        b"\n",
        b"x" * 40,
        b"OK " + b"1" * 40,
    ],
)
def test_anything_else_is_a_refusal(said: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        played(said, end=True)
    assert refused.value.reason is Reason.UNAVAILABLE
    assert refused.value.facts == {"dial": "refused"}


@pytest.mark.parametrize("said", [b"", b"OK 1"])
def test_silence_has_an_end(said: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        played(said, deadline_s=0.05)
    assert refused.value.reason is Reason.DEADLINE
    assert refused.value.facts == {"dial": "no-driver"}


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=64))
def test_no_bytes_do_more_than_be_refused(said: bytes) -> None:
    try:
        played(said, end=True)
    except Refusal:
        pass
    else:
        assert said.startswith(b"OK ")


def test_it_can_be_cancelled() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await hybrid.connect(ours, 1, deadline_s=60)

    asyncio.run(main())
