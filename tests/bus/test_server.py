"""The server on real sockets, in the loop of the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgpack
import pytest
import zmq
from support.place import Place
from support.toy import CONTRACT, MemoryLog, Number, Rich, Text, Toy, make_server

from agent_box.bus import keys, wire
from agent_box.bus import server as server_module
from agent_box.bus.aclient import AsyncClient
from agent_box.bus.errors import MEANING, Reason, Refusal
from agent_box.bus.schema import Empty
from agent_box.bus.server import Server


class House:
    """A server and its parts."""

    def __init__(self, place: Place, **options: Any) -> None:
        self.place = place
        self.log = MemoryLog()
        self.toy = Toy(place.database)
        self.server = make_server(self.toy, place.sock, place.keys, self.log, **options)
        self.closing: list[Callable[[], Any]] = []

    def client(self, role: str = "operator") -> AsyncClient:
        made = AsyncClient(role, "engine", **self.place.options(role))
        self.closing.append(made.close)
        return made

    def raw(self, role: str = "operator") -> Raw:
        made = Raw(self.place, role)
        self.closing.append(made.close)
        return made


class Raw:
    """A DEALER with the right key that sends what it likes."""

    def __init__(self, place: Place, role: str = "operator") -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        secret = keys.load_secret(place.keys / role)
        self.socket.curve_serverkey = place.server_key
        self.socket.curve_publickey = secret.public
        self.socket.curve_secretkey = secret.reveal()
        self.socket.connect(f"ipc://{place.sock}")

    def close(self) -> None:
        self.context.destroy(linger=0)

    async def recv(self, seconds: float = 20.0) -> tuple[Any, bytes]:
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(zmq.Again):
                    return wire.decode_from_callee(self.socket.recv_multipart(zmq.NOBLOCK))
                await asyncio.sleep(0.005)

    async def epoch(self) -> bytes:
        self.socket.send_multipart(
            [wire.MAGIC, wire.encode_header(wire.Greet(version=1, id=1)), b""]
        )
        welcome, _ = await self.recv()
        return bytes(welcome.epoch)

    def send(self, header: wire.Header | dict[str, Any], body: bytes = b"\x80") -> None:
        packed = msgpack.packb(header) if isinstance(header, dict) else wire.encode_header(header)
        self.socket.send_multipart([wire.MAGIC, packed, body])

    async def call(self, epoch: bytes, method: str, body: bytes = b"\x80", **change: Any) -> Any:
        """The reply's header, and the refusal if it is one."""
        header = {
            "op": "call",
            "version": 1,
            "id": 2,
            "epoch": epoch,
            "method": method,
            "deadline": wire.now_ns() + 10 * wire.NS,
            "request_id": None,
        }
        self.send(header | change, body)
        answer, untrusted = await self.recv()
        if isinstance(answer, wire.Failure):
            return wire.to_refusal(untrusted)
        return answer


@contextlib.asynccontextmanager
async def serving(place: Place, *, ready: bool = True, **options: Any) -> AsyncIterator[House]:
    house = House(place, **options)
    await house.server.start()
    if ready:
        house.server.set_ready()
    try:
        yield house
    finally:
        for close in house.closing:
            close()
        await house.server.close()


def run(coroutine: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(100):
            await coroutine

    asyncio.run(bounded())


async def until(true: Callable[[], bool]) -> None:
    """Waits for what tells nobody that it happened; `run` bounds it."""
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def refused(call: Awaitable[Any]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        await call
    return caught.value


def test_calls_are_answered(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            client = house.client()
            rich = Rich(
                name="n",
                data=b"\x00\xff",
                ratio=0.25,
                flag=True,
                maybe=None,
                names=["a"],
                counts={"b": 1},
                inner=[Number(n=1)],
            )
            assert await client.call("rich", rich) == rich
            assert await client.call("later", Number(n=1)) == Number(n=1)
            assert await client.call("ping", Empty()) == Empty()
            hello: Any = await client.call("hello", Empty())
            assert (hello.service, hello.epoch, hello.ready, hello.pid, hello.problem) == (
                "engine",
                house.server.epoch,
                True,
                os.getpid(),
                None,
            )
            assert abs(hello.started_ms / 1000 - time.time()) < 100

    run(main())


def test_every_reason_arrives_with_its_facts(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            client = house.client()
            for reason in Reason:

                def refuse(call: Any, reason: Reason = reason) -> None:
                    raise Refusal(reason, f"because {reason}", facts={"state": reason})

                house.toy.on_call = refuse
                error = await refused(client.call("refuse", Text(text="x")))
                assert (error.reason, error.message) == (reason, f"because {reason}")
                assert error.facts == {"state": reason}
                assert error.code is MEANING[reason].code

    run(main())


def test_a_defect_is_logged_here_and_told_by_its_id_only(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            client, raw = house.client(), house.raw()
            error = await refused(client.call("crash", Text(text="canary-1234")))
            assert error.reason is Reason.INTERNAL
            (line,) = [x for x in house.log.lines if x["event"] == "a call failed"]
            assert error.id == line["id"] and isinstance(line["error"], RuntimeError)
            assert line["method"] == "crash" and line["caller"] == "operator"
            epoch = await raw.epoch()
            raw.send(
                wire.Call(
                    version=1,
                    id=2,
                    epoch=epoch,
                    method="crash",
                    deadline=wire.now_ns() + wire.NS * 10,
                    request_id=None,
                ),
                wire.encode_body(Text(text="canary-1234")),
            )
            _, untrusted = await raw.recv()
            for word in (b"canary", b"Traceback", b"RuntimeError", b".py", b"defect"):
                assert word not in untrusted

    run(main())


def test_a_handler_that_answers_with_another_type_is_a_defect(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            client = house.client()
            entries = house.server._entries

            async def wrong(request: Any, call: Any) -> Any:
                return Empty()

            for broken in (lambda r, c: Empty(), lambda r, c: None, lambda r, c: 5, wrong):
                entries["echo"].handler = broken
                error = await refused(client.call("echo", Text(text="x")))
                assert error.reason is Reason.INTERNAL and error.id
            assert len(house.log.lines) == 4

    run(main())


def test_handlers_and_contract_must_match(place: Place) -> None:
    toy = Toy(place.database)
    good = toy.handlers()
    for handlers, what in (
        ({k: v for k, v in good.items() if k != "echo"}, "no handler for echo"),
        ({**good, "extra": toy.echo}, "not in the contract: extra"),
        ({**good, "__init__": toy.echo}, "not in the contract: __init__"),
    ):
        toy.handlers = lambda handlers=handlers: handlers  # type: ignore[method-assign,misc]
        with pytest.raises(ValueError, match=what):
            make_server(toy, place.sock, place.keys)
    toy.handlers = lambda: good  # type: ignore[method-assign]
    toy.outcomes = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match="nothing records it"):
        make_server(toy, place.sock, place.keys)


def test_what_is_not_granted_is_denied_and_logged(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            client, registry = house.client(), house.client("registry")
            assert (await refused(client.call("secret", Empty()))).reason is Reason.DENIED
            assert await registry.call("secret", Empty()) == Empty()
            assert (await refused(registry.call("put", Text(text="")))).reason is Reason.DENIED
            assert (await refused(registry.call("drain", Empty()))).reason is Reason.DENIED
            broker = house.client("broker")
            assert (await refused(broker.call("ping", Empty()))).reason is Reason.DENIED
            error = await refused(broker.stream("count", Number(n=1)))
            assert error.reason is Reason.DENIED
            denied = [x for x in house.log.lines if x["event"] == "denied"]
            assert [(x["caller"], x["method"]) for x in denied] == [
                ("operator", "secret"),
                ("registry", "put"),
                ("registry", "drain"),
                ("broker", "ping"),
                ("broker", "count"),
            ]

    run(main())


def test_bad_calls_are_refused_for_what_they_are(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            raw = house.raw()
            epoch = await raw.epoch()
            text = wire.encode_body(Text(text="x"))
            far = wire.now_ns() + 3600 * wire.NS
            for want, method, body, change in (
                (Reason.BAD_REQUEST, "no_such", text, {}),
                (Reason.BAD_REQUEST, "__init__", text, {}),
                (Reason.BAD_REQUEST, "echo", b"\x80", {}),
                (Reason.BAD_REQUEST, "echo", text + b"\x00", {}),
                (Reason.BAD_REQUEST, "echo", b"\x82" + text[1:] + text[1:], {}),
                (Reason.BAD_REQUEST, "echo", text, {"deadline": far}),
                (Reason.BAD_REQUEST, "echo", text, {"request_id": b"r" * 16}),
                (Reason.BAD_REQUEST, "add", wire.encode_body(Number(n=1)), {}),
                (Reason.DEADLINE, "echo", text, {"deadline": wire.now_ns() - 1}),
                (Reason.DEADLINE, "echo", text, {"deadline": 0}),
                (Reason.BAD_REQUEST, "count", wire.encode_body(Number(n=1)), {}),
            ):
                error = await raw.call(epoch, method, body, **change)
                assert isinstance(error, Refusal), (method, change)
                assert error.reason is want, (method, change, error)
            assert isinstance(await raw.call(epoch, "echo", text), wire.Reply)
            assert not [x for x in house.log.lines if x["level"] == "error"]

    run(main())


def test_a_call_for_an_earlier_process_is_not_begun(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            raw = house.raw()
            epoch = await raw.epoch()
            called: list[str] = []
            house.server._entries["echo"].handler = lambda r, c: called.append("echo")
            answer = await raw.call(b"x" * 16, "echo", wire.encode_body(Text(text="x")))
            assert isinstance(answer, wire.Stale) and answer.epoch == epoch and not called

    run(main())


def test_a_read_is_cancelled_at_its_deadline_and_gives_its_place_back(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            client = house.client()
            await client.call("ping", Empty())  # connected, which is no part of the call below
            error = await refused(client.call("never", Empty(), deadline_s=1))
            assert error.reason is Reason.DEADLINE
            await house.server.drained()
            assert house.toy.ended == ["never"]
            assert house.server._count["operator"] == 0

    run(main())


def test_what_changes_something_is_finished_after_its_deadline(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            client = house.client()
            await client.call("ping", Empty())  # connected, which is no part of the call below
            error = await refused(client.call("add_later", Number(n=1500), deadline_s=1))
            assert error.reason is Reason.DEADLINE
            await house.server.drained()
            assert place.added() == 1

    run(main())


def test_a_caller_that_goes_away_gives_its_places_back(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            raw = house.raw()
            epoch = await raw.epoch()
            for id in range(10, 20):
                raw.send(
                    wire.Call(
                        version=1,
                        id=id,
                        epoch=epoch,
                        method="never",
                        deadline=wire.now_ns() + 50 * wire.NS,
                        request_id=None,
                    )
                )
            await until(lambda: len(house.server._works) >= 10)
            raw.close()
            await house.server.drained()
            assert house.toy.ended == ["never"] * 10

    run(main())


def test_a_caller_that_cancels_ends_a_read(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            client = house.client()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.call("never", Empty())
            await house.server.drained()
            assert house.toy.ended == ["never"]
            assert await client.call("echo", Text(text="still")) == Text(text="still")

    run(main())


def test_one_caller_cannot_starve_another(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            raw, other = house.raw(), house.client("registry")
            epoch = await raw.epoch()
            limit = server_module.PENDING_PER_CALLER
            for id in range(10, 10 + limit + 5):
                raw.send(
                    wire.Call(
                        version=1,
                        id=id,
                        epoch=epoch,
                        method="never",
                        deadline=wire.now_ns() + 50 * wire.NS,
                        request_id=None,
                    )
                )
            for _ in range(5):
                answer, untrusted = await raw.recv()
                assert isinstance(answer, wire.Failure)
                assert wire.to_refusal(untrusted).reason is Reason.EXHAUSTED
            assert house.server._count["operator"] == limit
            # What is answered at once is still answered, to that caller too.
            assert isinstance(
                await raw.call(epoch, "echo", wire.encode_body(Text(text="x"))), wire.Reply
            )
            assert await other.call("later", Number(n=1)) == Number(n=1)

    run(main())


def test_all_callers_together_are_limited(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PENDING_MAX", 4)

    async def main() -> None:
        async with serving(place) as house, asyncio.TaskGroup() as group:
            one, two = house.client(), house.client("registry")
            waiting = [
                group.create_task(refused(c.call("never", Empty(), deadline_s=2)))
                for c in (one, two, one, two)
            ]
            await until(lambda: len(house.server._works) >= 4)
            for client in (one, two):
                error = await refused(client.call("later", Number(n=1)))
                assert error.reason is Reason.EXHAUSTED
            for task in waiting:
                assert (await task).reason is Reason.DEADLINE

    run(main())


def test_the_flood_of_one_connection_does_not_stop_the_loop(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            raw = house.raw()
            raw.socket.sndhwm = 0
            epoch = await raw.epoch()
            header = wire.encode_header(
                wire.Call(
                    version=1,
                    id=1,
                    epoch=epoch,
                    method="echo",
                    deadline=wire.now_ns() + 50 * wire.NS,
                    request_id=None,
                )
            )
            body = wire.encode_body(Text(text="x" * 100))
            for _ in range(5000):
                raw.socket.send_multipart([wire.MAGIC, header, body])
            turns = 0
            before = house.server._works
            other = house.client("registry")
            call = asyncio.ensure_future(other.call("later", Number(n=1)))  # noqa: TID251
            while not call.done():
                turns += 1
                await asyncio.sleep(0)
            assert await call == Number(n=1) and turns > 1 and before == {}

    run(main())


def test_calls_wait_until_the_service_is_ready(place: Place) -> None:
    async def main() -> None:
        async with serving(place, ready=False) as house, asyncio.TaskGroup() as group:
            client = house.client()
            hello: Any = await client.call("hello", Empty())
            assert not hello.ready
            calls = [
                group.create_task(client.call("echo", Text(text="a"))),
                group.create_task(client.call("later", Number(n=1))),
                group.create_task(client.call("add", Number(n=1))),
            ]
            stream = group.create_task(client.stream("count", Number(n=3)))
            await until(lambda: len(house.server._held) >= 4)
            assert place.added() == 0
            house.server.set_ready()
            assert [await c for c in calls] == [Text(text="a"), Number(n=1), Number(n=1)]
            assert await (await stream).finish() == Number(n=3)
            assert house.server._count["operator"] == 0 or house.server._works

    run(main())


def test_draining_finishes_what_is_begun_and_takes_nothing_new(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house, asyncio.TaskGroup() as group:
            client, registry = house.client(), house.client("registry")
            begun = group.create_task(registry.call("later", Number(n=300)))
            await until(lambda: bool(house.server._works))
            assert await client.call("drain", Empty()) == Empty()
            assert house.server.drain_asked.is_set()
            late = await refused(client.call("echo", Text(text="x"), deadline_s=0.1))
            assert late.reason is Reason.UNAVAILABLE
            hello: Any = await client.call("hello", Empty())
            assert hello.service == "engine"
            assert await begun == Number(n=300)
            await house.server.drained()

    run(main())


def test_the_last_reply_leaves_before_the_process_does(place: Place) -> None:
    process = place.spawn()
    client = place.client()
    assert client.call("drain", Empty()) == Empty()
    assert process.wait(20) == 0
    client.close()


def test_the_confinement_is_what_the_process_says(place: Place) -> None:
    from agent_box.bus.base import Confinement

    facts = Confinement(
        uid=1,
        gid=1,
        no_new_privs=True,
        seccomp_mode=2,
        seccomp_filters=1,
        capabilities_effective="0",
        dumpable=False,
        landlock_abi=0,
        landlock_enforced=False,
        limits={"RLIMIT_CORE": 0},
        mounts=["/usr ro"],
        interfaces=[],
        namespaces={"net": "net:[1]"},
    )

    async def main() -> None:
        async with serving(place, confinement=lambda: facts) as house:
            assert await house.client().call("confinement", Empty()) == facts

    run(main())


def test_once_is_answered_again_and_not_done_again(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house, asyncio.TaskGroup() as group:
            client = house.client()
            id = os.urandom(16)
            first = await client.call("add", Number(n=1), request_id=id)
            assert await client.call("add", Number(n=1), request_id=id) == first
            assert place.added() == 1
            # Under way: whoever sends it again waits for the same result.
            id = os.urandom(16)
            both = [
                group.create_task(client.call("add_later", Number(n=200), request_id=id)),
                group.create_task(client.call("add_later", Number(n=200), request_id=id)),
            ]
            assert [await task for task in both] == [Number(n=2)] * 2
            assert place.added() == 2
            error = await refused(client.call("add", Number(n=1), request_id=id))
            assert error.reason is Reason.BAD_REQUEST
            # Another caller's ids are its own.
            outcome: Any = await client.call("outcome", house_ask(os.urandom(16)))
            assert outcome.state == "absent"

    run(main())


def house_ask(id: bytes) -> Any:
    from agent_box.bus.base import Ask

    return Ask(request_id=id)


def test_outcomes_are_told(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house, asyncio.TaskGroup() as group:
            client = house.client()
            done, refusal, outside, running = (os.urandom(16) for _ in range(4))
            await client.call("add", Number(n=1), request_id=done)
            await refused(client.call("refuse", Text(text="no"), request_id=refusal))
            house.toy.outcomes.record("operator", outside, "add_outside", "begun", b"")
            states = [
                (await client.call("outcome", house_ask(id))).state  # type: ignore[attr-defined]
                for id in (done, refusal, outside)
            ]
            assert states == ["done", "refused", "unknown"]
            error = await refused(client.call("add_outside", Number(n=0), request_id=outside))
            assert error.reason is Reason.UNKNOWN_OUTCOME
            call = group.create_task(client.call("add_later", Number(n=300), request_id=running))
            await until(lambda: bool(house.server._works))
            told: Any = await client.call("outcome", house_ask(running))  # waits for it
            assert told.state == "done" and wire.decode_body(told.reply, Number) == await call
            slow = os.urandom(16)
            call = group.create_task(client.call("add_later", Number(n=600), request_id=slow))
            await until(lambda: bool(house.server._works))
            error = await refused(client.call("outcome", house_ask(slow), deadline_s=0.2))
            assert error.reason is Reason.DEADLINE
            await call

    run(main())


def test_a_passing_want_is_not_an_outcome(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            client, id = house.client(), os.urandom(16)

            def refuse(call: Any) -> None:
                raise Refusal(Reason.ENGINE_UNAVAILABLE, "later")

            house.toy.on_call = refuse
            await refused(client.call("refuse", Text(text="no"), request_id=id))
            told: Any = await client.call("outcome", house_ask(id))
            assert told.state == "absent"

    run(main())


def test_streams_carry_items_both_ways_and_end_with_a_reply(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            client = house.client()
            async with await client.stream("count", Number(n=5000)) as stream:
                seen = []
                while (item := await stream.recv()) is not None:
                    seen.append(item.n)  # type: ignore[attr-defined]
                    if len(seen) % 500 == 0:
                        await asyncio.sleep(0.02)  # a slow reader
                assert seen == list(range(5000))
                assert await stream.finish() == Number(n=5000)
            async with await client.stream("sum", Empty()) as stream:
                for n in range(1000):
                    await stream.send(Number(n=n))
                assert await stream.finish() == Number(n=499_500)
            assert not house.server._works

    run(main())


def test_a_stream_ends_when_its_caller_goes_away(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            for method, request in (("hang", Empty()), ("count", Number(n=10_000))):
                client = house.client()
                await client.stream(method, request)
                assert len(house.server._works) == 1
                client.close()
                await house.server.drained()
            assert house.toy.ended == ["hang cancelled", "count cancelled"]

    run(main())


def test_a_stream_ends_when_its_caller_closes_it(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            client = house.client()
            async with await client.stream("hang", Empty()):
                assert len(house.server._works) == 1
            await house.server.drained()
            assert house.toy.ended == ["hang cancelled"]
            assert await client.call("echo", Text(text="x")) == Text(text="x")

    run(main())


def test_streams_of_one_connection_stay_below_the_high_water_mark(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            client = house.client()
            limit = server_module.WINDOWS_PER_PEER // 16
            streams = [await client.stream("hang", Empty()) for _ in range(limit)]
            error = await refused(client.stream("hang", Empty()))
            assert error.reason is Reason.EXHAUSTED
            raw = house.raw()
            epoch = await raw.epoch()
            opened = wire.Open(
                version=1,
                id=9,
                epoch=epoch,
                method="hang",
                deadline=wire.now_ns() + 9 * wire.NS,
                credit=16,
            )
            answers = []
            for id in range(limit + 1):
                raw.send(wire.Open(**{**as_dict(opened), "id": id}))
                answers.append(await raw.recv())
            assert [type(h) for h, _ in answers] == [wire.Credit] * limit + [wire.Failure]
            assert wire.to_refusal(answers[-1][1]).reason is Reason.EXHAUSTED
            for stream in streams:
                stream.close()

    run(main())


def as_dict(header: wire.Open) -> dict[str, Any]:
    return {f: getattr(header, f) for f in header.__struct_fields__}


@pytest.mark.parametrize("what", ["too many", "after the end", "malformed"])
def test_a_caller_that_breaks_the_rules_of_a_stream_loses_it(place: Place, what: str) -> None:
    async def main() -> None:
        async with serving(place) as house:
            raw = house.raw()
            epoch = await raw.epoch()
            raw.send(
                wire.Open(
                    version=1,
                    id=5,
                    epoch=epoch,
                    method="hang",
                    deadline=wire.now_ns() + 9 * wire.NS,
                    credit=1,
                )
            )
            granted, _ = await raw.recv()
            assert isinstance(granted, wire.Credit) and granted.n == 16
            if what == "too many":
                for _ in range(17):
                    raw.send(wire.Item(version=1, id=5))
            elif what == "after the end":
                raw.send(wire.End(version=1, id=5))
                raw.send(wire.Item(version=1, id=5))
            else:
                raw.send(wire.Item(version=1, id=5), b"\xc1")
            failure, untrusted = await raw.recv()
            assert isinstance(failure, wire.Failure)
            assert wire.to_refusal(untrusted).reason is Reason.BAD_REQUEST
            await house.server.drained()
            assert house.toy.ended == ["hang cancelled"]

    run(main())


def test_a_peer_that_never_reads_loses_only_its_own(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            raw, client = house.raw(), house.client()
            epoch = await raw.epoch()
            raw.socket.sndhwm = 0
            header = wire.encode_header(
                wire.Call(
                    version=1,
                    id=1,
                    epoch=epoch,
                    method="blob",
                    deadline=wire.now_ns() + 50 * wire.NS,
                    request_id=None,
                )
            )
            body = msgpack.packb({"data": bytes(100_000)})
            for _ in range(300):
                raw.socket.send_multipart([wire.MAGIC, header, body])
            for n in range(50):
                assert await client.call("later", Number(n=0)) == Number(n=0), n

    run(main())


def test_garbage_is_dropped_counted_and_logged_without_its_content(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            raw = house.raw()
            epoch = await raw.epoch()
            for frames in (
                [b"canary"],
                [b"AB1", b"canary", b"canary"],
                [b"AB1"] * 50,
                [b"", b"", b""],
                [b"AB1", msgpack.packb({"op": "canary"}), b""],
            ):
                raw.socket.send_multipart(frames)
            raw.send({"op": "item", "version": 1, "id": 77})  # of no stream: not an error
            assert isinstance(
                await raw.call(epoch, "echo", wire.encode_body(Text(text="x"))), wire.Reply
            )
            assert house.server.dropped == 5
            (line,) = house.log.lines
            assert line["level"] == "warning" and "canary" not in str(line)

    run(main())


def test_what_is_too_large_loses_the_connection_and_no_more(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            raw, client = house.raw(), house.client()
            await raw.epoch()
            raw.socket.send_multipart([b"AB1", b"", bytes(wire.FRAME_MAX + 1)])
            with pytest.raises(TimeoutError):
                await raw.recv(0.3)
            assert await client.call("echo", Text(text="x")) == Text(text="x")
            assert isinstance(await raw.epoch(), bytes)  # it connected again
            error = await refused(client.call("blob", blob(wire.BODY_MAX)))
            assert error.reason is Reason.BAD_REQUEST and "larger" in error.message

    run(main())


def blob(size: int) -> Any:
    from support.toy import Blob

    return Blob(data=bytes(size))


def test_a_reply_that_is_too_large_is_a_defect(place: Place) -> None:
    async def main() -> None:
        async with serving(place) as house:
            client = house.client()
            house.server._entries["echo"].handler = lambda r, c: Text(text="x" * wire.BODY_MAX)
            error = await refused(client.call("echo", Text(text="x")))
            assert error.reason is Reason.INTERNAL and error.id == house.log.lines[0]["id"]

    run(main())


def test_the_contract_of_the_toy_is_what_the_server_declares(place: Place) -> None:
    toy = Toy(place.database)
    server: Server = make_server(toy, place.sock, place.keys)
    try:
        names = set(server._entries) | set(server._streams)
        assert names == {m.name for m in CONTRACT.methods} | {
            "hello",
            "ping",
            "drain",
            "outcome",
            "confinement",
        }
    finally:
        asyncio.run(server.close())
