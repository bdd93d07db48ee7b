"""The registry at work: waiting readers, notes that come twice, outcomes, and an engine that
answers late."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.registries import create, policy_set

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.schema import Empty, Wire
from agent_box.engine import contract as engine
from agent_box.netstack import contract as net
from agent_box.process.tasks import TaskSet
from agent_box.registry import adapter
from agent_box.registry import contract as api
from agent_box.registry.adapter import Registry
from agent_box.registry.database import Database

R = TypeVar("R")
EPOCH = b"e" * 16


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, event: str, **fields: object) -> None:
        self.lines.append(f"{event} {fields}")

    warning = info


class Call:
    """What the bus puts on record."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def begin(self) -> None:
        self.said.append("begin")

    def commit(self, reply: Wire) -> None:
        self.said.append(reply)


@dataclass
class Others:
    """The other services. `answer` is asked first and may raise or answer for them."""

    holds: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    answer: Callable[[str, str, Wire], Awaitable[Wire | None]] | None = None

    async def __call__(self, service: str, method: str, request: Wire, seconds: float) -> Wire:
        self.asked.append((service, method))
        if self.answer is not None:
            answered = await self.answer(service, method, request)
            if answered is not None:
                return answered
        if (service, method) == ("engine", "list"):
            return engine.Observations(instances=[self.seen(id) for id in self.holds])
        if (service, method) == ("engine", "create"):
            assert isinstance(request, engine.Create)
            self.holds[request.instance] = "stopped"
            return Empty()
        if (service, method) == ("engine", "delete"):
            assert isinstance(request, engine.Instance)
            self.holds.pop(request.instance, None)
            return Empty()
        if (service, method) == ("engine", "query"):
            assert isinstance(request, engine.Instance)
            return self.seen(request.instance)
        raise AssertionError((service, method))

    def seen(self, id: str) -> engine.Observed:
        return engine.Observed(
            instance=id, state=self.holds[id], boot=None, exit_status=None, exit_signal=None
        )


@dataclass
class Desk:
    registry: Registry
    database: Database
    others: Others
    log: Log
    rings: list[int]
    clock: list[int]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.db"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config" / "config.toml"
    file.parent.mkdir(mode=0o700)
    file.write_text("version = 1\n[profiles.small]\ncpus = 1\n")
    file.chmod(0o600)
    return file


def desk(path: Path, config: Path | None = None, others: Others | None = None) -> Desk:
    database, log, rings, clock = Database(path), Log(), [], [1_000_000]
    others = Others() if others is None else others
    registry = Registry(
        database=database,
        config=config,
        ask=others,
        epoch=EPOCH,
        log=log,
        tasks=TaskSet(Defects()),
        on_append=rings.append,
        now_ms=lambda: clock[0],
    )
    return Desk(registry, database, others, log, rings, clock)


@pytest.fixture
def run(path: Path) -> Iterator[Callable[..., Any]]:
    """Runs `test(desk)` in a loop with a registry that has started."""

    def within(test: Callable[[Desk], Awaitable[None]], **given: Any) -> None:
        async def main() -> None:
            at = desk(path, **given)
            await at.registry.start()
            try:
                await asyncio.wait_for(test(at), 20)
            finally:
                at.registry.close()

        asyncio.run(main())

    yield within


def read(after: int = 0, *, wait_ms: int = 0, **more: Any) -> api.Read:
    given = {"tail": None, "since_ms": None, "source": None, "name": None, "limit": 100} | more
    return api.Read(after=after, wait_ms=wait_ms, **given)


def note(number: int, **more: Any) -> api.Note:
    given: dict[str, Any] = {
        "event_id": number.to_bytes(16, "big"),
        "instance": None,
        "source": "host-observed",
        "kind": "vmm-ended",
        "facts": {"n": number},
    }
    return api.Note(**given | more)


def soon(work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
    return TaskSet(Defects()).hold(work, name="test")


class Defects:
    def error(self, event: str, *, error: BaseException | None = None, **fields: object) -> str:
        raise AssertionError(event) from error


async def settled(at: Desk) -> None:
    while at.registry._settling:  # noqa: ASYNC110 - nothing in it tells
        await asyncio.sleep(0.001)


async def now(found: api.Entries | Awaitable[api.Entries]) -> api.Entries:
    return found if isinstance(found, api.Entries) else await found


# ------------------------------------------------------------------------ waiting


def test_a_reader_that_waits_gets_the_next_event(run: Callable[..., Any]) -> None:
    async def test(at: Desk) -> None:
        first = await now(at.registry.logs(read()))
        assert [e.kind for e in first.events] == ["started"]
        assert first.epoch == EPOCH
        waiting = soon(now(at.registry.logs(read(first.next, wait_ms=60_000))))
        others = soon(
            now(at.registry.logs(read(first.next, wait_ms=60_000, source="agent-reported")))
        )
        await asyncio.sleep(0)
        assert not waiting.done()
        at.registry.note("engine", note(1))
        got = await waiting
        assert [e.facts["n"] for e in got.events] == [1]
        assert got.next == 2
        assert not others.done()
        at.registry.note("channel", note(2, source="agent-reported", kind="run-ended"))
        assert [e.seq for e in (await others).events] == [3]

    run(test)


def test_many_readers_are_all_woken_and_nothing_is_missed(run: Callable[..., Any]) -> None:
    async def follow(at: Desk, count: int) -> list[int]:
        seen: list[int] = []
        after = 1
        while len(seen) < count:
            page = await now(at.registry.logs(read(after, wait_ms=60_000, limit=3)))
            seen += [e.seq for e in page.events]
            after = page.next
        return seen

    async def test(at: Desk) -> None:
        followers = [soon(follow(at, 40)) for _ in range(5)]
        for number in range(40):
            at.registry.note("engine", note(number))
            if number % 3 == 0:
                await asyncio.sleep(0)
        for follower in followers:
            assert await follower == list(range(2, 42))

    run(test)


def test_a_wait_ends_by_itself_and_the_cursor_has_moved(run: Callable[..., Any]) -> None:
    async def test(at: Desk) -> None:
        page = await now(at.registry.logs(read(0, wait_ms=30, source="agent-reported")))
        assert (page.events, page.next) == ([], 1)

    run(test)


def test_whoever_waits_is_answered_when_the_registry_ends(run: Callable[..., Any]) -> None:
    async def test(at: Desk) -> None:
        waiting = soon(now(at.registry.logs(read(1, wait_ms=60_000))))
        await asyncio.sleep(0)
        at.registry.hush()
        assert (await waiting).events == []
        assert (await now(at.registry.logs(read(1, wait_ms=60_000)))).events == []

    run(test)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"after": 99}, Reason.BAD_REQUEST),
        ({"after": -1}, Reason.BAD_REQUEST),
        ({"tail": -1}, Reason.BAD_REQUEST),
        ({"limit": 0}, Reason.BAD_REQUEST),
        ({"wait_ms": -1}, Reason.BAD_REQUEST),
        ({"name": "nosuch"}, Reason.NOT_FOUND),
    ],
)
def test_a_read_that_cannot_be(
    run: Callable[..., Any], fields: dict[str, Any], reason: Reason
) -> None:
    async def test(at: Desk) -> None:
        with pytest.raises(Refusal) as error:
            at.registry.logs(read(**fields))
        assert error.value.reason is reason

    run(test)


def test_every_commit_rings(run: Callable[..., Any]) -> None:
    async def test(at: Desk) -> None:
        at.registry.note("engine", note(1))
        at.registry.note("engine", note(1))
        at.registry.note("engine", note(2))
        assert at.rings == [1, 2, 3]

    run(test)


# -------------------------------------------------------------------------- notes


def test_a_note_that_comes_twice_is_one_event(path: Path, run: Callable[..., Any]) -> None:
    async def once(at: Desk) -> None:
        assert at.registry.note("engine", note(7)) == api.Noted(seq=2)

    async def again(at: Desk) -> None:
        assert at.registry.note("engine", note(7)) == api.Noted(seq=2)
        assert at.registry.note("netstack", note(7, kind="flow-denied")) == api.Noted(seq=4)

    run(once)
    run(again)


def test_a_note_that_is_too_large_is_refused_and_not_a_defect(run: Callable[..., Any]) -> None:
    async def test(at: Desk) -> None:
        facts = {f"f{n}": "x" * 2000 for n in range(20)}
        with pytest.raises(Refusal) as error:
            at.registry.note("engine", note(1, facts=facts))
        assert error.value.reason is Reason.BAD_REQUEST
        assert at.registry.head().seq == 1

    run(test)


# ------------------------------------------------------------------------- create


def test_create_puts_its_outcome_on_record(run: Callable[..., Any], config: Path) -> None:
    async def test(at: Desk) -> None:
        call = Call()
        row = await at.registry.create(create(profile="small"), call)
        assert (row.state, row.cpus) == ("stopped", 1)
        # Before the engine is asked to do something it is on record that it was begun.
        assert call.said == ["begin", row]
        assert (await at.registry.list()).instances == [row]
        assert (await at.registry.verify()).ok

    run(test, config=config)


def test_a_create_that_reached_nobody_is_not_on_record(run: Callable[..., Any]) -> None:
    """So whoever lost the reply may send it again."""

    async def gone(service: str, method: str, request: Wire) -> Wire | None:
        raise Refusal(Reason.UNAVAILABLE, "no")

    async def test(at: Desk) -> None:
        call = Call()
        with pytest.raises(Refusal) as error:
            await at.registry.create(create(), call)
        assert error.value.reason is Reason.ENGINE_UNAVAILABLE
        assert call.said == []
        assert (await at.registry.list()).instances == []
        assert (await at.registry.verify()).ok

    run(test, others=Others(answer=gone))


def test_lists_are_served_while_a_create_waits_for_the_engine(run: Callable[..., Any]) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow(service: str, method: str, request: Wire) -> Wire | None:
        if method == "create":
            begun.set()
            await go.wait()
        return None

    async def test(at: Desk) -> None:
        making = soon(at.registry.create(create(), Call()))
        await begun.wait()
        assert [row.state for row in (await at.registry.list()).instances] == ["creating"]
        with pytest.raises(Refusal) as error:
            await at.registry.create(create(), Call())
        assert error.value.exit == 5
        with pytest.raises(Refusal) as error:
            await at.registry.policy_set(policy_set(mode="deny"), Call())
        assert error.value.exit == 4
        await at.registry._settle()  # keeps its hands off what another is working on
        go.set()
        assert (await making).state == "stopped"

    run(test, others=Others(answer=slow))


def test_a_config_that_is_refused(run: Callable[..., Any], config: Path) -> None:
    rewrite = config.write_text

    async def test(at: Desk) -> None:
        rewrite("version = 1\ncolour = 1\n")
        with pytest.raises(Refusal) as error:
            await at.registry.create(create(), Call())
        assert (error.value.reason, error.value.exit) == (Reason.CONFIG_INVALID, 2)
        assert "colour" in error.value.message and str(config) in error.value.message
        rewrite("version = 1\n")
        await at.registry.create(create(), Call())

    run(test, config=config)


# ------------------------------------------------------------------------- settle


def test_records_are_unknown_until_the_engine_answers(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "RETRY_FIRST_S", 0.001)
    others = Others()
    tries = 0

    async def later(service: str, method: str, request: Wire) -> Wire | None:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise Refusal(Reason.UNAVAILABLE, "not yet")
        return None

    async def make(at: Desk) -> None:
        await at.registry.create(create(), Call())

    async def test(at: Desk) -> None:
        at.registry.settle()
        assert [row.state for row in (await at.registry.list()).instances] == ["unknown"]
        await settled(at)
        assert [row.state for row in (await at.registry.list()).instances] == ["stopped"]
        assert tries == 5  # the last one is of the list
        assert len([line for line in at.log.lines if "not yet" in line]) == 1

    run(make, others=others)
    others.answer = later
    run(test, others=others)


def test_settling_ends_with_the_registry(run: Callable[..., Any]) -> None:
    others = Others()

    async def never(service: str, method: str, request: Wire) -> Wire | None:
        raise Refusal(Reason.UNAVAILABLE, "never")

    async def make(at: Desk) -> None:
        await at.registry.create(create(), Call())

    async def test(at: Desk) -> None:
        at.registry.settle()
        await asyncio.sleep(0)
        at.registry.settle()  # only one is at work
        assert at.registry._settling
        at.registry.hush()
        await settled(at)

    run(make, others=others)
    others.answer = never
    run(test, others=others)


def test_what_a_death_left_is_undone_at_the_next_start(run: Callable[..., Any]) -> None:
    others = Others()

    class Death(BaseException):
        pass

    async def dies(service: str, method: str, request: Wire) -> Wire | None:
        if method == dying:
            raise Death
        return None

    async def die(at: Desk) -> None:
        with pytest.raises(Death):
            await at.registry.create(create(f"at-{dying}"), Call())

    async def test(at: Desk) -> None:
        # What never reached the engine is gone before anybody is served.
        assert [row.name for row in (await at.registry.list()).instances] == ["at-create"]
        await at.registry._settle()
        assert (await at.registry.list()).instances == []
        assert others.holds == {}
        assert (await at.registry.verify()).ok

    for dying in ("list", "create"):  # noqa: B007 - `dies` and `die` look at it
        others.answer = dies
        run(die, others=others)
        others.answer = None
    run(test, others=others)


# ------------------------------------------------------------------- policy check


def test_check_asks_netstack_with_the_whole_policy(run: Callable[..., Any]) -> None:
    asked: list[net.Check] = []

    async def answer(service: str, method: str, request: Wire) -> Wire | None:
        if service == "netstack":
            assert isinstance(request, net.Check)
            asked.append(request)
            return net.Verdict(verdict="deny", rule="r", why="w")
        return None

    async def test(at: Desk) -> None:
        await at.registry.create(create(), Call())
        check = api.PolicyCheck(name="web1", target="example.com:22/udp")
        said = await at.registry.policy_check(check)
        assert said == api.PolicyVerdict(verdict="deny", rule="r", why="w", generation=1)
        flow = asked[0].flow
        assert (flow.name, flow.port, flow.protocol, flow.address) == (
            "example.com",
            22,
            "udp",
            None,
        )
        assert asked[0].policy.mode == "allowlist"

    run(test, others=Others(answer=answer))


def test_without_netstack_there_is_no_verdict(run: Callable[..., Any]) -> None:
    async def answer(service: str, method: str, request: Wire) -> Wire | None:
        if service == "netstack":
            raise Refusal(Reason.UNAVAILABLE, "netstack does not answer")
        return None

    async def test(at: Desk) -> None:
        await at.registry.create(create(), Call())
        with pytest.raises(Refusal) as error:
            await at.registry.policy_check(api.PolicyCheck(name="web1", target="a.test"))
        assert error.value.exit == 14

    run(test, others=Others(answer=answer))


# ------------------------------------------------------------------------ cutting


def test_old_events_go_and_followers_do_not_notice(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from agent_box.registry import database as stored

    monkeypatch.setattr(stored, "KEEP_EVENTS", 10)
    monkeypatch.setattr(stored, "KEEP_BYTES", 8_000)

    async def test(at: Desk) -> None:
        await at.registry.create(create(), Call())
        seen, after = [], 0
        for number in range(200):
            at.registry.note("engine", note(number))
            page = await now(at.registry.logs(read(after)))
            seen += [e.facts["n"] for e in page.events if e.kind == "vmm-ended"]
            after = page.next
        assert seen == list(range(200))
        first = await now(at.registry.logs(read()))
        assert first.first > 100
        assert at.database.bytes < 9_000
        verified = await at.registry.verify()
        assert verified.ok and verified.first == first.first
        kinds = [e.kind for e in first.events]
        assert "journal-cut" in kinds and "record-anchored" in kinds

    run(test)


def test_a_journal_that_cannot_be_cut_is_told_and_goes_on(run: Callable[..., Any]) -> None:
    async def test(at: Desk) -> None:
        def refuse(**given: Any) -> None:
            raise Refusal(Reason.DISK_FULL, "full")

        at.database.cut = refuse  # type: ignore[assignment,method-assign]
        at.clock[0] += 7 * 3600 * 1000
        assert at.registry.note("engine", note(1)).seq == 2
        assert any("full" in line for line in at.log.lines)

    run(test)


def test_a_cut_by_age_is_looked_for_now_and_then(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from agent_box.registry import database as stored

    monkeypatch.setattr(stored, "KEEP_EVENTS", 1)

    async def test(at: Desk) -> None:
        for number in range(5):
            at.registry.note("engine", note(number))
        at.clock[0] += stored.KEEP_MS + 1
        at.registry.note("engine", note(9))
        assert at.database.before.seq == 6
        assert (await at.registry.verify()).ok

    run(test)


def test_verify_names_what_is_wrong(path: Path, run: Callable[..., Any]) -> None:
    from support.spoil import spoil

    async def make(at: Desk) -> None:
        await at.registry.create(create("one"), Call())
        await at.registry.create(create("two"), Call())

    async def test(at: Desk) -> None:
        verified = await at.registry.verify()
        assert (verified.ok, verified.bad_seq) == (False, None)
        assert [p.name for p in verified.records][0] == "one"
        assert "missing" in verified.records[1].problem
        assert len(verified.records) == 2

    run(make)
    spoil(path, "UPDATE record SET packed = x'00' WHERE name = 'one'")
    spoil(path, "DELETE FROM record WHERE name = 'two'")
    run(test)
