"""The engine's end: many questions at once, and the truth about those that got no answer."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import select
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.helperhouse import HelperHouse, fresh

from agent_box.engine.helper import Helper, HelperLost, HelperRefused, Profile
from agent_box.helper import link, proof

T = TypeVar("T")
MIB = 1 << 20


@pytest.fixture(scope="module")
def place() -> Iterator[HelperHouse]:
    made = HelperHouse()
    made.start()
    try:
        yield made
    finally:
        made.close()


def during(place: HelperHouse, work: Callable[[Helper], Awaitable[T]], **more: Any) -> T:
    async def main() -> T:
        helper = Helper(place.sock, place.key_file, **more)
        try:
            return await work(helper)
        finally:
            helper.close()

    return asyncio.run(asyncio.wait_for(main(), 90))


def test_every_operation(place: HelperHouse) -> None:
    name, launch = fresh(), fresh()

    async def work(helper: Helper) -> None:
        probed = await helper.probe()
        assert (probed.protocol, probed.mode, probed.gaps) == (1, "user", ())
        made = await helper.allocate(name, 64 * MIB)
        assert (made.state, made.disk_bytes, made.vmm, made.exit) == (
            "allocated",
            64 * MIB,
            None,
            None,
        )
        profile = Profile(**place.profile())
        state = await helper.launch(name, launch, profile)
        assert state.state == "running"
        assert state.vmm is not None and state.vmm.pid > 1
        assert await helper.launch(name, launch, profile) == state
        assert await helper.instances() == [state]
        watched, pipe = await helper.watch(name, launch)
        assert watched == state
        for fd in (await helper.dial(name, launch), await helper.monitor(name, launch)):
            with socket.socket(fileno=fd) as stream:
                assert stream.type == socket.SOCK_STREAM
        async with asyncio.timeout(20):
            while (await helper.console(name, 0)).data != b"up\n":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        over = await helper.kill(name, launch)
        assert over.exit is not None and over.exit.by == "kill"
        assert select.select([pipe], [], [], 20)[0]
        os.close(pipe)
        await helper.release(name)
        assert await helper.instances() == []

    during(place, work)


def test_a_refusal_has_its_code(place: HelperHouse) -> None:
    async def work(helper: Helper) -> None:
        with pytest.raises(HelperRefused) as caught:
            await helper.dial(fresh(), fresh())
        assert caught.value.code == "not_found"
        with pytest.raises(HelperRefused) as caught:  # refused before it is sent
            await helper.allocate("../../etc", 64 * MIB)
        assert caught.value.code == "bad_request"

    during(place, work)


def test_many_at_once_are_told_apart(place: HelperHouse) -> None:
    names = [fresh() for _ in range(20)]

    async def work(helper: Helper) -> None:
        states = await asyncio.gather(*(helper.allocate(name, 64 * MIB) for name in names))
        assert [state.id for state in states] == names
        assert [state.id for state in await helper.instances()] == sorted(names)
        await asyncio.gather(*(helper.release(name) for name in names))

    during(place, work)


def test_one_that_is_not_there_is_told_as_not_sent(place: HelperHouse, tmp_path: Path) -> None:
    async def work(helper: Helper) -> None:
        with pytest.raises(HelperLost) as caught:
            await helper.instances()
        assert not caught.value.sent

    for sock, key in (
        (tmp_path / "none", place.key_file),
        (place.sock, tmp_path / "none"),
        (place.sock, Path("/dev/null")),
    ):
        other = Helper(sock, key)
        asyncio.run(work(other))
    (tmp_path / "key").write_text("00" * 32)
    asyncio.run(work(Helper(place.sock, tmp_path / "key")))


def test_after_a_loss_the_next_question_connects_again(place: HelperHouse) -> None:
    told: list[str] = []

    async def work(helper: Helper) -> None:
        await helper.instances()
        asking = [asyncio.create_task(helper.probe()) for _ in range(3)]  # noqa: TID251
        await asyncio.sleep(0.02)
        place.stop(signal.SIGKILL)
        for each in asking:
            with pytest.raises(HelperLost) as caught:
                await each
            assert caught.value.sent
        assert not helper.connected
        assert told == ["back", "lost"]
        place.start()  # in this thread: it dies with the thread that started it
        await helper.instances()
        assert told == ["back", "lost", "back"]

    during(
        place,
        work,
        on_lost=lambda: told.append("lost"),
        on_back=lambda: told.append("back"),
    )
    assert told == ["back", "lost", "back", "lost"]


def test_a_descriptor_that_nobody_waits_for_is_closed(place: HelperHouse) -> None:
    name, launch = fresh(), fresh()

    async def work(helper: Helper) -> None:
        await helper.allocate(name, 64 * MIB)
        await helper.launch(name, launch, Profile(**place.profile()))
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(30):
            asked = asyncio.ensure_future(helper.dial(name, launch))  # noqa: TID251
            await asyncio.sleep(0)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        await helper.instances()  # behind all those answers
        assert len(os.listdir("/proc/self/fd")) <= before + 1
        await helper.kill(name, launch)
        await helper.release(name)

    during(place, work)


# ------------------------------------------------------------------------ a helper that lies


class Liar:
    """Proves itself, and then answers the first question with what it is told."""

    def __init__(self, directory: Path) -> None:
        self.key = secrets.token_bytes(32)
        self.key_file = directory / "key"
        self.key_file.write_text(self.key.hex())
        self.sock = directory / "sock"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.sock))
        self._listener.listen(8)

    def say(self, answers: list[tuple[bytes, int]]) -> threading.Thread:
        def serve() -> None:
            sock, _ = self._listener.accept()
            with sock:
                side = proof.HelperSide(self.key, secrets.token_bytes(32))
                link.send(sock, side.hello())
                link.send(sock, side.welcome(sock.recv(65536)))
                sock.recv(65536)
                for data, fds in answers:
                    link.send(sock, data, (0,) * fds)
                sock.recv(65536)

        thread = threading.Thread(target=serve)
        thread.start()
        return thread

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def liar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Liar]:
    made = Liar(tmp_path_factory.mktemp("liar"))
    yield made
    made.close()


def lied(liar: Liar, answers: list[tuple[bytes, int]], name: str = "list") -> Exception | None:
    async def main() -> Exception | None:
        helper = Helper(liar.sock, liar.key_file)
        try:
            async with asyncio.timeout(30):
                if name == "dial":
                    os.close(await helper.dial(fresh(), fresh()))
                else:
                    await helper.instances()
        except (HelperLost, HelperRefused) as error:
            return error
        finally:
            helper.close()
        return None

    thread = liar.say(answers)
    found = asyncio.run(main())
    thread.join(30)
    return found


def reply(fields: dict[str, Any], number: int = 1) -> bytes:
    return json.dumps({"v": 1, "req": number, "reply": fields}).encode()


EMPTY = {"instances": [], "more": False}


def test_the_truth_is_taken(liar: Liar) -> None:
    assert lied(liar, [(reply(EMPTY), 0)]) is None
    assert lied(liar, [(reply(EMPTY, 7), 0), (reply(EMPTY), 0)]) is None  # another's is let go
    assert lied(liar, [(reply(EMPTY, 7), 1), (reply(EMPTY), 0)]) is None
    assert lied(liar, [(reply({}), 1)], "dial") is None


@pytest.mark.parametrize(
    ("answers", "name"),
    [
        ([(reply({**EMPTY, "more": 1}), 0)], "list"),
        ([(reply({"more": False}), 0)], "list"),
        ([(reply({**EMPTY, "extra": 1}), 0)], "list"),
        ([(reply(EMPTY), 1)], "list"),
        ([(reply({}), 0)], "dial"),
        ([(reply({}), 2)], "dial"),
        ([(b"x" * 66000, 0)], "list"),
        ([(b"{", 0)], "list"),
        ([(b'{"v":1,"req":1,"error":{"code":"new","detail":""}}', 0)], "list"),
    ],
)
def test_a_lie_is_a_loss(liar: Liar, answers: list[tuple[bytes, int]], name: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    found = lied(liar, answers, name)
    assert isinstance(found, HelperLost)
    assert found.sent
    assert len(os.listdir("/proc/self/fd")) <= before


@settings(deadline=None, max_examples=50)
@given(st.binary(min_size=1, max_size=500), st.integers(0, 3))
def test_noise_is_a_loss(liar: Liar, data: bytes, fds: int) -> None:
    assert isinstance(lied(liar, [(data, fds)]), HelperLost)
