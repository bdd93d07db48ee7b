"""The synchronous client against a process that is killed, stopped and started again."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.place import Place
from support.toy import Blob, Number, Text
from support.until import until

from agent_box.bus import keys
from agent_box.bus.base import Ask
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.schema import Empty


def refused(call: Callable[[], Any]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call()
    return caught.value


def after(seconds: float, *steps: Callable[[], Any]) -> threading.Thread:
    def run() -> None:
        time.sleep(seconds)
        for step in steps:
            step()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_nobody_there_is_unavailable(place: Place) -> None:
    with place.client() as client:
        for method, request in (("echo", Text(text="x")), ("add", Number(n=1))):
            error = refused(lambda m=method, r=request: client.call(m, r, deadline_s=0.2))
            assert error.reason is Reason.UNAVAILABLE and "engine" in error.message


def test_a_service_that_comes_late_is_waited_for(place: Place) -> None:
    with place.client() as client:
        thread = after(0.3, place.spawn)
        assert client.call("echo", Text(text="x")) == Text(text="x")
        thread.join()


@pytest.mark.parametrize(
    ("method", "request_"), [("later", Number(n=50_000)), ("never", Empty())], ids=str
)
def test_a_read_survives_the_death_of_the_service(
    toy_process: Place, method: str, request_: Any
) -> None:
    place = toy_process
    with place.client() as client:
        thread = after(0.3, place.kill, place.spawn)
        # Sent again to the next process, where it is under way again.
        assert refused(lambda: client.call(method, request_, deadline_s=4)).reason in (
            Reason.DEADLINE,
            Reason.UNAVAILABLE,
        )
        thread.join()
        assert client.call("echo", Text(text="x")) == Text(text="x")


def test_a_read_in_flight_is_answered_by_the_next_process(toy_process: Place) -> None:
    place = toy_process
    with place.client() as client:
        thread = after(0.2, place.kill, place.spawn)
        assert client.call("later", Number(n=900)) == Number(n=900)
        thread.join()


def test_an_idempotent_call_in_flight_is_sent_again(toy_process: Place) -> None:
    place = toy_process
    place.kill(signal.SIGSTOP)
    with place.client() as client:
        thread = after(0.3, place.kill, place.spawn)
        assert client.call("put", Text(text="abc")) == Number(n=3)
        thread.join()


def test_once_killed_before_its_effect_happens_once(toy_process: Place) -> None:
    place = toy_process
    with place.client() as client:
        thread = after(0.2, place.kill, place.spawn)
        assert client.call("add_later", Number(n=600)) == Number(n=1)
        thread.join()
    assert place.added() == 1


def test_once_killed_between_effect_and_reply_happens_once(toy_process: Place) -> None:
    place = toy_process
    assert place.process is not None
    with place.client() as client:
        assert client.call("add", Number(n=1)) == Number(n=1)
        place.die.touch()
        thread = threading.Thread(target=lambda: (place.process.wait(), place.spawn()))  # type: ignore[union-attr]
        thread.start()
        assert client.call("add", Number(n=1)) == Number(n=2)
        thread.join()
    assert place.added() == 2 and not place.die.exists()


def test_once_refused_and_killed_before_the_reply_is_refused(toy_process: Place) -> None:
    place = toy_process
    assert place.process is not None
    with place.client() as client:
        place.die.touch()
        thread = threading.Thread(target=lambda: (place.process.wait(), place.spawn()))  # type: ignore[union-attr]
        thread.start()
        error = refused(lambda: client.call("refuse", Text(text="no")))
        assert error.reason is Reason.WRONG_STATE and error.facts == {"state": "stopped"}
        thread.join()


def test_once_with_an_effect_outside_is_unknown_after_a_death(toy_process: Place) -> None:
    place = toy_process
    with place.client() as client:
        id = os.urandom(16)
        thread = after(0.3, place.kill, place.spawn)
        error = refused(lambda: client.call("add_outside", Number(n=30_000), request_id=id))
        assert error.reason is Reason.UNKNOWN_OUTCOME
        thread.join()
        told: Any = client.call("outcome", Ask(request_id=id))
        assert told.state == "unknown"
    assert place.added() == 0


@pytest.mark.parametrize(
    ("method", "request_", "reason"),
    [
        ("never", Empty(), Reason.UNAVAILABLE),  # it changes nothing, so nothing has happened
        ("put", Text(text="x"), Reason.CONNECTION_LOST),
        ("add_later", Number(n=5000), Reason.UNKNOWN_OUTCOME),
    ],
)
def test_a_service_that_dies_for_good(
    toy_process: Place, method: str, request_: Any, reason: Reason
) -> None:
    place = toy_process
    with place.client() as client:
        client.call("ping", Empty())
        if method == "put":
            place.kill(signal.SIGSTOP)  # sent, and certainly not answered
        thread = after(0.3, place.kill)
        error = refused(lambda: client.call(method, request_, deadline_s=1.5))
        assert error.reason is reason
        thread.join()


@pytest.mark.parametrize(
    ("method", "request_"),
    [("ping", Empty()), ("put", Text(text="x")), ("add", Number(n=1))],
)
def test_a_wedged_service_gives_deadline(toy_process: Place, method: str, request_: Any) -> None:
    place = toy_process
    with place.client() as client:
        client.call("ping", Empty())
        place.kill(signal.SIGSTOP)
        before = time.monotonic()
        error = refused(lambda: client.call(method, request_, deadline_s=0.5))
        assert error.reason is Reason.DEADLINE and time.monotonic() - before >= 0.5
        place.kill(signal.SIGCONT)
        # The late answer belongs to a call that is over.
        assert client.call("echo", Text(text="x")) == Text(text="x")


def test_a_wedged_service_that_was_never_met_is_unavailable(toy_process: Place) -> None:
    toy_process.kill(signal.SIGSTOP)
    with toy_process.client() as client:
        error = refused(lambda: client.call("ping", Empty(), deadline_s=0.5))
        assert error.reason is Reason.UNAVAILABLE


def test_a_restart_between_two_calls_is_not_noticed(toy_process: Place) -> None:
    place = toy_process
    with place.client() as client:
        for number in range(1, 4):
            assert client.call("add", Number(n=1)) == Number(n=number)
            place.kill()
            place.spawn()


def test_a_drained_service_is_waited_for_until_the_next_one_is_there(toy_process: Place) -> None:
    place = toy_process
    assert place.process is not None
    with place.client() as client, place.client() as admin:
        busy = after(0, lambda: place.client().call("later", Number(n=700)))
        client.call("ping", Empty())
        time.sleep(0.2)  # not a wait: the drain shall come while the other call is under way
        admin.call("drain", Empty())
        next_ = threading.Thread(target=lambda: (place.process.wait(), place.spawn()))  # type: ignore[union-attr]
        next_.start()
        assert client.call("add", Number(n=1)) == Number(n=1)
        next_.join()
        busy.join()
    assert place.added() == 1


def test_5000_items_through_a_slow_reader(toy_process: Place) -> None:
    with (
        toy_process.client() as client,
        client.stream("count", Number(n=5000)) as stream,
    ):
        seen = []
        while (item := stream.recv()) is not None:
            seen.append(item.n)  # type: ignore[attr-defined]
            if len(seen) % 50 == 0:
                time.sleep(0.005)
        assert seen == list(range(5000)) and stream.finish() == Number(n=5000)


def test_5000_items_into_a_slow_reader(toy_process: Place) -> None:
    place = toy_process
    threads: list[threading.Thread] = []
    with place.client() as client, client.stream("sum", Empty()) as stream:
        for n in range(5000):
            if n % 1000 == 500:  # it stops reading for a while
                place.kill(signal.SIGSTOP)
                threads.append(after(0.1, lambda: place.kill(signal.SIGCONT)))
            stream.send(Number(n=n))
        assert stream.finish() == Number(n=12_497_500)
    for thread in threads:
        thread.join()


def test_a_stream_does_not_survive_its_service(toy_process: Place) -> None:
    place = toy_process
    with place.client() as client, client.stream("mirror", Empty()) as stream:
        stream.send(Blob(data=b"1"))
        assert stream.recv() == Blob(data=b"1")
        place.kill()
        error = refused(stream.recv)
        assert error.reason is Reason.CONNECTION_LOST
        assert refused(lambda: stream.send(Blob(data=b"2"))).reason is Reason.CONNECTION_LOST
        place.spawn()
        with client.stream("mirror", Empty()) as again:
            again.send(Blob(data=b"3"))
            assert again.recv() == Blob(data=b"3")


def test_a_stream_read_in_time_or_not(toy_process: Place) -> None:
    with (
        toy_process.client() as client,
        client.stream("hang", Empty()) as stream,
        pytest.raises(TimeoutError),
    ):
        stream.recv(timeout_s=0.1)


def test_streams_to_nobody_are_unavailable(place: Place) -> None:
    with place.client() as client:
        error = refused(lambda: client.stream("hang", Empty(), deadline_s=0.2))
        assert error.reason is Reason.UNAVAILABLE


def test_mistakes_of_our_own_are_not_sent(place: Place) -> None:
    with place.client() as client:
        wrong: list[tuple[type[Exception], Callable[[], Any]]] = [
            (ValueError, lambda: client.call("nope", Empty())),
            (ValueError, lambda: client.call("count", Number(n=1))),
            (TypeError, lambda: client.call("echo", Empty())),
            (ValueError, lambda: client.call("echo", Text(text=""), deadline_s=0)),
            (ValueError, lambda: client.call("echo", Text(text=""), deadline_s=61)),
            (ValueError, lambda: client.call("echo", Text(text=""), request_id=bytes(16))),
            (ValueError, lambda: client.call("add", Number(n=1), request_id=b"short")),
            (ValueError, lambda: client.stream("echo", Text(text=""))),
            (TypeError, lambda: client.stream("count", Empty())),
            (ValueError, lambda: client.stream("hang", Empty(), deadline_s=31)),
        ]
        for kind, call in wrong:
            with pytest.raises(kind):
                call()
        error = refused(lambda: client.call("blob", Blob(data=bytes(1 << 20))))
        assert error.reason is Reason.BAD_REQUEST


def test_the_contract_must_be_the_services_own(place: Place) -> None:
    from agent_box.bus.client import Client

    with pytest.raises(ValueError, match="contract of engine"):
        Client("operator", "store", **place.options())


def test_the_synchronous_client_imports_no_asyncio() -> None:
    program = (
        "import sys; import agent_box.bus.client;"
        "bad = {'asyncio', 'logging', 'ssl', 'sqlite3', 'zmq.asyncio', 'tomllib', 'pydantic'};"
        "print(sorted(bad & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert out.stdout == b"[]\n"


def test_a_secret_is_in_no_message(place: Place) -> None:
    pair = keys.load_secret(place.keys / "operator")
    with place.client() as client:
        error = refused(lambda: client.call("ping", Empty(), deadline_s=0.05))
        assert pair.reveal().decode() not in f"{error!r} {vars(client)}"


# ------------------------------------------------------- a loop of the caller's own


def test_a_stream_in_a_loop_of_ones_own(toy_process: Place) -> None:
    """Waiting on the descriptors, with `attend` before each wait, nothing is missed."""
    with toy_process.client() as client:
        poll = select.poll()
        for number in client.descriptors:
            poll.register(number, select.POLLIN)
        with client.opening("mirror", Empty()) as stream:
            assert not stream.accepted and stream.credit == 0 and stream.waiting == 0
            sent, got, count = 0, [], 2_000
            while len(got) < count:
                while stream.credit and sent < count:
                    stream.send(Blob(data=b"%d" % sent))
                    sent += 1
                while stream.waiting:
                    item = stream.recv()
                    assert isinstance(item, Blob)
                    got.append(item.data)
                if not client.attend() and len(got) < count:
                    assert poll.poll(20_000), (sent, len(got), stream.credit)
            assert got == [b"%d" % n for n in range(count)]
            assert stream.finish() == Number(n=count)
            assert stream.done and stream.reply == Number(n=count) and stream.error is None


def test_a_stream_that_is_opening_while_nobody_serves(place: Place) -> None:
    with place.client() as client, client.opening("mirror", Empty(), deadline_s=5) as stream:
        assert not client.attend() and not stream.accepted and not stream.done
        assert stream.deadline_ns > time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        place.spawn()
        until("it is accepted", lambda: client.attend() and stream.accepted)
        place.kill()
        until("it is lost", lambda: client.attend() and stream.done)
        assert stream.error is not None and stream.error.reason is Reason.CONNECTION_LOST
        assert stream.credit == 0


def test_what_is_no_stream_is_not_opened(toy_process: Place) -> None:
    with toy_process.client() as client:
        with pytest.raises(ValueError, match="no stream"):
            client.opening("echo", Text(text="x"))
        with pytest.raises(TypeError):
            client.opening("mirror", Text(text="x"))
        with pytest.raises(ValueError, match="opens within"):
            client.opening("mirror", Empty(), deadline_s=31)
