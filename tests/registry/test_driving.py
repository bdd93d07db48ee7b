"""The registry at work on a machine: what it waits for, what wakes it, what it goes on with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from support.registries import create

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.schema import Empty, Wire
from agent_box.channel import contract as channel
from agent_box.engine import contract as engine
from agent_box.netstack import contract as net
from agent_box.process.tasks import TaskSet
from agent_box.registry import adapter
from agent_box.registry import contract as api
from agent_box.registry.adapter import Registry
from agent_box.registry.database import Database


class Log:
    def info(self, event: str, **fields: object) -> None: ...

    warning = info

    def error(self, event: str, *, error: BaseException | None = None, **fields: object) -> str:
        raise AssertionError(event) from error


class Call:
    def __init__(self) -> None:
        self.said: list[object] = []

    def begin(self) -> None:
        self.said.append("begin")

    def commit(self, reply: Wire) -> None:
        self.said.append(reply)


NETWORK: Final[dict[str, Wire]] = {
    "instance_up": net.Applied(generation=1, revoked=0),
    "instance_down": Empty(),
    "forwards": net.Forwards(forwards=[]),
}


class Host:
    """Engine, channel and the rest. A guest answers when `ready` is set."""

    def __init__(self) -> None:
        self.state, self.boot, self.exit = "absent", 0, 0
        self.id = ""
        self.ready = asyncio.Event()
        self.obeys = True
        self.silent = False
        self.broker, self.held = False, False
        self.gate: asyncio.Event | None = None  # before the broker hears of an end
        self.asked: list[str] = []

    async def __call__(self, service: str, method: str, request: Any, seconds: float) -> Wire:
        self.asked.append(f"{service}.{method}")
        if service == "broker":
            if method == "instance_down" and self.gate is not None and not self.gate.is_set():
                self.held = True
                await self.gate.wait()
            if self.broker:
                return Empty()
            raise Refusal(Reason.UNAVAILABLE, "not built")
        if service == "netstack":
            return NETWORK[method]
        if service == "channel":
            return await self._channel(method, request, seconds)
        if self.silent:
            raise Refusal(Reason.UNAVAILABLE, "the engine is silent")
        return self._engine(method, request)

    def seen(self) -> engine.Observed:
        ended = self.state == "stopped" and self.boot > 0
        return engine.Observed(
            instance=self.id,
            state=self.state,  # type: ignore[arg-type]
            boot=self.boot or None,
            exit_status=self.exit if ended else None,
            exit_signal=None,
        )

    def _engine(self, method: str, request: Any) -> Wire:
        if method == "list":
            return engine.Observations(instances=[] if self.state == "absent" else [self.seen()])
        if method == "create":
            self.id, self.state = request.instance, "stopped"
            return Empty()
        if method == "delete":
            self.state = "absent"
            return Empty()
        if self.state == "absent":
            raise Refusal(Reason.NOT_FOUND, "no such instance")
        if method == "boot":
            self.state, self.boot = "running", request.boot
        elif method == "kill":
            self.state, self.exit = "stopped", 137
        elif method in ("pause", "resume"):
            self.state = {"pause": "paused", "resume": "running"}[method]
        return self.seen()

    async def _channel(self, method: str, request: Any, seconds: float) -> Wire:
        try:
            await asyncio.wait_for(self.ready.wait(), min(seconds, 60))
        except TimeoutError:
            raise Refusal(Reason.DEADLINE, "the guest does not answer") from None
        if method == "poweroff":
            if self.obeys:
                self.state, self.exit = "stopped", 0
            return Empty()
        return channel.Provisioned(version="1", skew_ms=1)


@pytest.fixture
def within(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Runs `test(registry, host)` with one stopped instance, web1."""

    def run(test: Callable[[Registry, Host], Awaitable[None]]) -> None:
        async def main() -> None:
            tasks, host = TaskSet(Log()), Host()
            registry = made(tmp_path, tasks, host)
            await registry.start()
            await registry.create(create(), Call())
            try:
                await asyncio.wait_for(test(registry, host), 30)
            finally:
                registry.close()
                await tasks.cancel()

        asyncio.run(main())

    yield run


def made(path: Path, tasks: TaskSet, host: Host) -> Registry:
    return Registry(
        database=Database(path / "registry.db"),
        config=None,
        ask=host,
        epoch=b"e" * 16,
        log=Log(),
        tasks=tasks,
        on_append=lambda seq: None,
    )


async def followed(registry: Registry, now: api.Progress) -> api.Progress:
    """As the command line waits."""
    intent = now.intent
    while now.doing is not None and now.intent == intent:
        ask = api.Follow(
            id=now.id,
            name=now.name,
            intent=now.intent,
            doing=now.doing,
            phase=now.phase,
            wait_ms=20_000,
        )
        now = await registry.follow(ask)
    return now


def shown(registry: Registry) -> str:
    (row,) = registry.core.rows().instances
    return row.state


async def started(registry: Registry, host: Host) -> None:
    host.ready.set()
    ended = await followed(
        registry, await registry.start_instance(api.Start(name="web1", no_hook=False), Call())
    )
    assert ended.failed is None and shown(registry) == "running"


def note(host: Host, kind: str, number: int) -> api.Note:
    return api.Note(
        event_id=number.to_bytes(16, "big"),
        instance=host.id,
        source="host-observed",
        kind=kind,
        facts={},
    )


def test_start_answers_at_once_and_follow_when_it_is_done(within: Callable[..., None]) -> None:
    async def test(registry: Registry, host: Host) -> None:
        call = Call()
        accepted = await registry.start_instance(api.Start(name="web1", no_hook=False), call)
        assert call.said == [accepted]  # the outcome is on record with the intent
        assert accepted.doing == "start"
        following = TaskSet(Log()).hold(followed(registry, accepted), name="follow")
        while registry.life.phases.get(host.id) != "waiting for the guest":  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert shown(registry) == "starting" and not following.done()
        host.ready.set()
        ended = await following
        assert ended.failed is None and shown(registry) == "running"

    within(test)


def test_a_note_of_the_engine_ends_the_wait_for_a_guest(within: Callable[..., None]) -> None:
    async def test(registry: Registry, host: Host) -> None:
        accepted = await registry.start_instance(api.Start(name="web1", no_hook=False), Call())
        while "channel.provision" not in host.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        host.state, host.exit = "stopped", 3
        loop = asyncio.get_running_loop()
        begun = loop.time()
        registry.note("engine", note(host, "vmm-ended", 1))
        ended = await followed(registry, accepted)
        assert loop.time() - begun < adapter.LOOK_S / 2  # nobody waited for the next look
        assert ended.failed is not None and ended.failed.reason == "boot-failed"
        assert "with status 3" in ended.failed.message

    within(test)


def test_without_a_note_it_is_seen_at_the_next_look(
    within: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "LOOK_S", 0.05)

    async def test(registry: Registry, host: Host) -> None:
        accepted = await registry.start_instance(api.Start(name="web1", no_hook=False), Call())
        while "channel.provision" not in host.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        host.state = "stopped"
        ended = await followed(registry, accepted)
        assert ended.failed is not None and ended.failed.reason == "boot-failed"

    within(test)


def test_a_note_shows_that_a_machine_has_ended(within: Callable[..., None]) -> None:
    async def test(registry: Registry, host: Host) -> None:
        await started(registry, host)
        host.state = "stopped"
        registry.note("engine", note(host, "vmm-ended", 1))
        while shown(registry) != "stopped":  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    within(test)


def test_that_it_has_ended_is_told_to_broker_and_netstack_and_before_the_next_start(
    within: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "RETRY_FIRST_S", 0.01)

    async def test(registry: Registry, host: Host) -> None:
        await started(registry, host)
        host.state, host.exit = "stopped", 1
        registry.note("engine", note(host, "vmm-ended", 1))
        while host.asked.count("broker.instance_down") < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)  # it refuses, and is asked again
        assert "netstack.instance_down" in host.asked and shown(registry) == "stopped"
        host.gate = asyncio.Event()  # the answer of the next one is late
        while not host.held:  # noqa: ASYNC110
            await asyncio.sleep(0)  # until it is asked
        host.broker = True
        host.asked.clear()
        progress = await registry.start_instance(api.Start(name="web1", no_hook=False), Call())
        while "engine.query" not in host.asked:  # noqa: ASYNC110
            await asyncio.sleep(0)  # until the start is at work
        await asyncio.sleep(0.05)  # time in which it could go wrong
        assert "broker.instance_up" not in host.asked
        host.gate.set()
        assert (await followed(registry, progress)).failed is None
        told = [each for each in host.asked if each.startswith(("broker.", "netstack."))]
        assert told[:2] == ["netstack.instance_down", "broker.instance_up"]
        assert "broker.instance_down" not in told

    within(test)


def test_what_cannot_be_told_yet_keeps_nobody_waiting(within: Callable[..., None]) -> None:
    """While a stop is at work, it is the stop that tells."""

    async def test(registry: Registry, host: Host) -> None:
        await started(registry, host)
        host.obeys = False
        progress = await registry.stop_instance(api.Stop(name="web1", grace_ms=300), Call())
        while shown(registry) != "stopping":  # noqa: ASYNC110
            await asyncio.sleep(0)
        registry.core.ended.add(host.id)
        registry.reconnect()
        await asyncio.sleep(0)
        assert shown(registry) == "stopping" and registry.core.ended == {host.id}
        assert (await followed(registry, progress)).failed is None
        host.broker = True
        while registry.core.ended:  # noqa: ASYNC110
            await asyncio.sleep(0)  # until it is told, now that nothing is at work

    within(test)


def test_a_stop_ends_a_start_that_waits(within: Callable[..., None]) -> None:
    async def test(registry: Registry, host: Host) -> None:
        starting = await registry.start_instance(api.Start(name="web1", no_hook=False), Call())
        while "channel.provision" not in host.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        stop = await registry.stop_instance(api.Stop(name="web1", grace_ms=None), Call())
        ended = await followed(registry, stop)
        assert ended.failed is None and (host.state, host.exit) == ("stopped", 137)
        assert (await followed(registry, starting)).intent == stop.intent
        assert "channel.poweroff" not in host.asked

    within(test)


def test_a_guest_that_does_not_power_off_is_killed_when_the_grace_is_over(
    within: Callable[..., None],
) -> None:
    async def test(registry: Registry, host: Host) -> None:
        await started(registry, host)
        host.obeys = False
        loop = asyncio.get_running_loop()
        begun = loop.time()
        stop = await registry.stop_instance(api.Stop(name="web1", grace_ms=300), Call())
        assert (await followed(registry, stop)).failed is None
        assert 0.3 <= loop.time() - begun < 2
        assert (host.state, host.exit) == ("stopped", 137)

    within(test)


def test_a_second_stop_ends_the_grace(within: Callable[..., None]) -> None:
    async def test(registry: Registry, host: Host) -> None:
        await started(registry, host)
        host.obeys = False
        await registry.stop_instance(api.Stop(name="web1", grace_ms=60_000), Call())
        while "channel.poweroff" not in host.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        stop = await registry.stop_instance(api.Stop(name="web1", grace_ms=0), Call())
        assert (await followed(registry, stop)).failed is None
        assert host.exit == 137

    within(test)


def test_what_cannot_go_on_is_tried_again_and_says_why(
    within: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "RETRY_FIRST_S", 0.01)

    async def test(registry: Registry, host: Host) -> None:
        accepted = await registry.delete(api.Delete(name="web1", force=False), Call())
        host.silent = True
        while not registry.life.stuck:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        follow = api.Follow(
            id=accepted.id, name="web1", intent=1, doing="delete", phase="", wait_ms=0
        )
        stuck = await registry.follow(follow)
        assert stuck.failed is not None and "silent" in stuck.failed.message
        assert stuck.doing == "delete"
        host.silent = False
        assert (await followed(registry, accepted)).row is None
        assert host.state == "absent"

    within(test)


def test_the_next_registry_goes_on_with_a_start(tmp_path: Path) -> None:
    async def main() -> None:
        host = Host()
        for life in range(2):
            tasks = TaskSet(Log())
            registry = made(tmp_path, tasks, host)
            await registry.start()
            if life == 0:
                await registry.create(create(), Call())
                await registry.start_instance(api.Start(name="web1", no_hook=False), Call())
                while "channel.provision" not in host.asked:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            else:
                registry.settle()
                host.ready.set()
                while shown(registry) != "running":  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                assert host.boot == 1 and (await registry.verify()).ok
            registry.close()
            await tasks.cancel()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_list_does_not_wait_for_an_engine_that_is_slow(within: Callable[..., None]) -> None:
    async def test(registry: Registry, host: Host) -> None:
        await started(registry, host)
        seconds: list[float] = []
        ask = registry._ask

        async def slow(service: str, method: str, request: Wire, deadline_s: float) -> Wire:
            if method == "list":
                seconds.append(deadline_s)
                raise Refusal(Reason.DEADLINE, "no answer in time")
            return await ask(service, method, request, deadline_s)

        registry._ask = slow
        assert [row.state for row in (await registry.list()).instances] == ["unknown"]
        assert seconds[0] == adapter.SHOW_S < 1
        asked = len(seconds)  # it is asked in the background from now on, and `list` is quick
        assert [row.state for row in (await registry.list()).instances] == ["unknown"]
        assert len(seconds) == asked
        registry._ask = ask
        while shown(registry) != "running":  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    within(test)


def test_an_instance_that_was_removed_by_hand_keeps_nobody_busy(
    within: Callable[..., None],
) -> None:
    async def test(registry: Registry, host: Host) -> None:
        host.state = "absent"
        assert [row.state for row in (await registry.list()).instances] == ["unknown"]
        assert not registry.core.unsettled() and not registry._settling
        host.state = "stopped"
        assert [row.state for row in (await registry.list()).instances] == ["stopped"]

    within(test)


def test_the_journal_tells_whether_an_instance_was_removed(within: Callable[..., None]) -> None:
    async def test(registry: Registry, host: Host) -> None:
        id = host.id
        assert not registry._database.was_removed(id)
        deleted = await registry.delete(api.Delete(name="web1", force=False), Call())
        assert (await followed(registry, deleted)).row is None
        assert registry._database.was_removed(id)
        assert not registry._database.was_removed("f" * 32)

    within(test)
