"""A service's life from its first moment to its exit code, behind its real wall."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.house import House, contract, python
from support.until import until

from agent_box.bus import base
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.schema import Empty
from agent_box.process import confine, skeleton
from agent_box.process.paths import SERVICES, Paths
from agent_box.process.skeleton import CannotServe, Context, parse
from agent_box.store.contract import SealKey

# What the services of these tests have in common: every method is refused, none was begun.
REFUSES = """
from agent_box.bus.errors import Reason, Refusal

class Refuses:
    def __init__(self, contract):
        self.handlers = {method.name: self.refuse for method in contract.methods}
        self.outcomes = self

    def refuse(self, *request):
        raise Refusal(Reason.UNAVAILABLE, "of no interest")

    def lookup(self, caller, request_id):
        return None

    async def start(self):
        pass

    async def stop(self):
        pass
"""

# A service of the test in the store's place: behind its wall, with its contract and key.
PROGRAM = (
    REFUSES
    + """
import asyncio, os, sys, threading
from pathlib import Path
from agent_box.process import skeleton
from agent_box.store.contract import CONTRACT, SealKey

class Service(Refuses):
    def __init__(self, context):
        super().__init__(CONTRACT)
        self.context = context
        self.handlers = {**self.handlers, "seal_key": self.seal_key}

    async def seal_key(self, request, call):
        self.mark("called")
        await self.wait_for("answer")
        return SealKey(key=bytes(32), locked=False)

    def mark(self, name):
        (self.context.data / name).touch()

    async def wait_for(self, name):
        while not (self.context.data / name).exists():
            await asyncio.sleep(0.01)

    async def start(self):
        START

    async def stop(self):
        STOP

def build(context):
    BUILD
    return Service(context)

skeleton.run(CONTRACT, build)
"""
)


class Life:
    """The test's service, with what it does in each step of its life."""

    def __init__(self, house: House, **steps: str) -> None:
        self.house = house
        code = PROGRAM
        for step in ("start", "stop", "build"):
            code = code.replace(step.upper(), steps.get(step, "pass"))
        words = confine.arguments(contract("store"), house.paths, house.config)
        at = words.index("-m")
        words[at : at + 2] = ["-c", code]
        self.process = house.start("store", words)

    @property
    def data(self) -> Path:
        return self.house.paths.data("store")

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.house.log("store").splitlines()]

    def events(self) -> list[str]:
        return [line["event"] for line in self.lines()]

    def wait_for(self, event: str) -> dict[str, Any]:
        until(event, lambda: event in self.events())
        return next(line for line in self.lines() if line["event"] == event)

    def terminate(self) -> None:
        """As supervisord does with stopasgroup: to everyone in the group, bubblewrap too."""
        os.killpg(self.process.pid, signal.SIGTERM)

    def ends_with(self, code: int) -> None:
        assert self.process.wait(30) == code, self.house.log("store")

    def hello(self) -> base.Hello:
        with self.house.client("store") as client:
            hello = client.call("hello", Empty(), deadline_s=10)
            assert isinstance(hello, base.Hello)
            return hello


def test_running_is_not_ready(house: House) -> None:
    life = Life(house, start="await self.wait_for('go')")
    life.wait_for("started")
    assert life.hello().ready is False
    (life.data / "go").touch()
    until("it is ready", lambda: life.hello().ready)
    assert life.events() == ["started", "ready"]


def test_each_start_has_its_epoch(house: House) -> None:
    first = Life(house)
    epoch = first.hello().epoch
    assert first.wait_for("started")["epoch"] == epoch.hex()
    first.terminate()
    first.ends_with(0)
    assert Life(house).hello().epoch != epoch


def test_a_problem_is_told_by_hello(house: House) -> None:
    life = Life(house, build="context.problem = 'half of it is missing'")
    assert life.hello().problem == "half of it is missing"
    life.terminate()
    life.ends_with(0)
    life = Life(house, start="self.context.problem = 'known later'; await self.wait_for('no')")
    until("it is told", lambda: life.hello().problem == "known later")


class Calling:
    """A call of `seal_key` that is under way in a thread."""

    def __init__(self, life: Life) -> None:
        self.result: object = None
        self._house = life.house
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        until("the call is under way", (life.data / "called").exists)

    def _run(self) -> None:
        with self._house.client("store") as client:
            try:
                self.result = client.call("seal_key", Empty(), deadline_s=10)
            except Refusal as refusal:
                self.result = refusal

    def end(self) -> object:
        self._thread.join(30)
        return self.result


@pytest.fixture
def life(house: House) -> Iterator[Life]:
    made = Life(house, stop="self.mark('stopped')")
    made.wait_for("ready")
    yield made


def test_sigterm_lets_what_has_begun_end(life: Life) -> None:
    calling = Calling(life)
    life.terminate()
    with life.house.client("store") as client, pytest.raises(Refusal) as refused:
        client.call("put", _put(), deadline_s=1)
    assert refused.value.reason is Reason.UNAVAILABLE
    assert life.process.poll() is None
    (life.data / "answer").touch()
    assert calling.end() == SealKey(key=bytes(32), locked=False)
    life.ends_with(0)
    assert (life.data / "stopped").exists()
    assert life.events()[-1] == "ended"


def _put() -> Any:
    from support.samples import sample

    from agent_box.store.contract import Put

    return sample(Put)


def test_drain_does_the_same(life: Life) -> None:
    calling = Calling(life)
    with life.house.client("store") as client:
        assert client.call("drain", Empty(), deadline_s=10) == Empty()
    (life.data / "answer").touch()
    assert calling.end() == SealKey(key=bytes(32), locked=False)
    life.ends_with(0)


def test_what_does_not_end_is_ended(life: Life) -> None:
    calling = Calling(life)
    life.terminate()
    life.terminate()  # impatience changes nothing
    life.ends_with(0)
    assert isinstance(calling.end(), Refusal)
    assert (life.data / "stopped").exists()
    assert "what was under way did not end in time" in life.events()


def test_a_stop_that_hangs_does_not_hold_the_process(house: House) -> None:
    life = Life(house, stop="await asyncio.sleep(600)")
    life.wait_for("ready")
    life.terminate()
    life.ends_with(0)
    assert "the service did not stop in time" in life.events()


def test_sigterm_before_it_is_ready_ends_it(house: House) -> None:
    life = Life(house, start="await asyncio.sleep(600)", stop="self.mark('stopped')")
    life.wait_for("started")
    life.terminate()
    life.ends_with(0)
    assert (life.data / "stopped").exists()
    assert "ready" not in life.events()


def test_sigterm_in_the_first_moment_ends_it(house: House) -> None:
    """It is ignored until Python runs; from the first line of ours on it is noticed."""
    life = Life(house, build="os.kill(os.getpid(), 15); context.log.info('built')")
    life.ends_with(0)
    assert "built" in life.events()


@pytest.mark.parametrize(
    ("start", "event"),
    [
        ("raise ValueError('start is broken')", "task failed"),
        (
            "async def work(): raise ValueError('later')\n"
            "        self.context.tasks.spawn(work(), name='worker')",
            "task failed",
        ),
        (
            "def callback(): raise ValueError('in the loop')\n"
            "        asyncio.get_running_loop().call_soon(callback)",
            "uncaught exception in the loop",
        ),
    ],
)
def test_a_defect_ends_it_with_an_id_and_1(house: House, start: str, event: str) -> None:
    life = Life(house, start=start, stop="self.mark('stopped')")
    life.ends_with(1)
    line = life.wait_for(event)
    assert line["error"]["type"] == "builtins.ValueError"
    assert line["id"]
    assert (life.data / "stopped").exists()
    assert "Traceback" not in house.log("store")


def test_a_broken_connection_ends_nothing_else(house: House) -> None:
    start = (
        "loop = asyncio.get_running_loop()\n"
        "        loop.call_exception_handler({'message': 'Fatal error', 'transport': None,"
        " 'exception': ValueError('bad bytes')})"
    )
    life = Life(house, start=start)
    assert life.hello().ready
    assert life.wait_for("a connection failed")["error"]["message"] == "bad bytes"


def test_a_build_that_fails_ends_it_with_1(house: House) -> None:
    life = Life(house, build="raise RuntimeError('cannot build')")
    life.ends_with(1)
    assert life.wait_for("uncaught exception")["error"]["message"] == "cannot build"


def test_what_no_start_can_mend_ends_it_with_71_and_one_line(house: House) -> None:
    life = Life(house, build="raise skeleton.CannotServe('the disk was made by a newer version')")
    life.ends_with(71)
    (line,) = life.lines()
    assert line["why"] == "the disk was made by a newer version"


def test_a_handler_that_is_missing_is_no_service(house: House) -> None:
    life = Life(
        house, start="pass", build="Service.handlers = property(lambda s: {}, lambda s, v: 0)"
    )
    life.ends_with(71)
    assert "no handler for" in life.lines()[-1]["why"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p: (p.keys("store") / "curve.secret").unlink(), "curve.secret"),
        (lambda p: (p.keys("store") / "curve.secret").write_bytes(b"x"), "not a CURVE key"),
        (lambda p: (p.public_keys / "broker").unlink(), "broker"),
    ],
)
def test_without_keys_it_does_not_serve(house: House, spoil: Any, words: str) -> None:
    spoil(house.paths)
    life = Life(house)
    life.ends_with(71)
    (line,) = life.lines()
    assert words in line["why"]


def test_it_may_die_at_any_moment(house: House) -> None:
    """kill -9 leaves nothing that stops the next start."""
    life = Life(house)
    life.wait_for("ready")
    os.killpg(life.process.pid, signal.SIGKILL)
    life.process.wait()
    assert Life(house).hello().ready


def test_root_is_refused_with_one_line(house: House) -> None:
    ran = subprocess.run(
        ["unshare", "--user", "--map-root-user", *python("-m", "agent_box.store")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 71
    assert json.loads(ran.stderr)["why"].startswith("nothing that serves runs as root")


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_is_such_a_service(house: House, service: str) -> None:
    process = house.start(service)
    until("an end or a start", lambda: process.poll() or '"started"' in house.log(service))
    assert process.poll() is None, house.log(service)
    with house.client(service) as client:
        hello = client.call("hello", Empty(), deadline_s=10)
        assert isinstance(hello, base.Hello)
        assert hello.service == service
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) == 0
    events = [json.loads(line)["event"] for line in house.log(service).splitlines()]
    assert (events[-1], "uncaught exception" in events) == ("ended", False)


# ---------------------------------------------------------------- the command line


def test_the_command_line_is_what_confine_writes(house: House) -> None:
    words = confine.arguments(contract("registry"), house.paths, house.config, {"x-y": "1"})
    read = parse(words[words.index("-m") + 2 :])
    assert (read.paths, read.config) == (house.paths, house.config)
    assert (read.inner_filter, read.options) == (confine.INNER_FD, {"x-y": "1"})


GOOD = {"--runtime": "/r", "--state": "/s", "--inner-filter": "4"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--runtime": None}, "--runtime is missing"),
        ({"--state": None}, "--state is missing"),
        ({"--inner-filter": None}, "--inner-filter is missing"),
        ({"--inner-filter": "x"}, "invalid literal"),
        ({"--runtime": "r"}, "not an absolute path"),
        ({"--": "x"}, "not made of --name value"),
        ({"-x": "x"}, "not made of --name value"),
    ],
)
def test_a_wrong_command_line_is_refused(change: dict[str, str | None], words: str) -> None:
    pairs = {**GOOD, **change}
    flat = [word for name, value in pairs.items() if value for word in (name, value)]
    with pytest.raises(CannotServe, match=words):
        parse(flat)


def test_a_torn_or_doubled_pair_is_refused() -> None:
    flat = [word for pair in GOOD.items() for word in pair]
    for wrong in ([*flat, "--x"], [*flat, "--runtime", "/other"]):
        with pytest.raises(CannotServe, match="made of pairs, each once"):
            parse(wrong)


# ---------------------------------------------------------------- what a service is given


def context(service: str) -> Context:
    unused: Any = None
    paths = Paths(Path("/r"), Path("/s"))
    return Context(contract(service), paths, None, {}, unused, unused, unused, {})


def test_a_client_is_for_those_that_the_wall_names() -> None:
    with pytest.raises(ValueError, match="the wall of store shows no broker"):
        context("store").client("broker")


def test_there_is_no_server_while_it_is_built() -> None:
    given = context("broker")
    assert given.data == Path("/s/services/broker")
    with pytest.raises(RuntimeError, match="from start"):
        _ = given.server
    with pytest.raises(RuntimeError, match="from start"):
        given.client("store")


CALLS = (
    REFUSES
    + """
import asyncio
from agent_box.bus.errors import Refusal
from agent_box.process import skeleton
from agent_box.broker.contract import CONTRACT
from agent_box.store.contract import Reveal

class Service(Refuses):
    async def start(self):
        client = self.context.client("store")
        assert self.context.client("store") is client
        try:
            await client.call("reveal", Reveal(name="absent", to=bytes(32)), deadline_s=10)
        except Refusal as refusal:
            self.context.log.info("called", answer=refusal.reason)

def build(context):
    service = Service(CONTRACT)
    service.context = context
    return service

skeleton.run(CONTRACT, build)
"""
)


def test_a_service_calls_another_from_wall_to_wall(house: House) -> None:
    words = confine.arguments(contract("broker"), house.paths, house.config)
    at = words.index("-m")
    words[at : at + 2] = ["-c", CALLS]
    process = house.start("broker", words)
    until("it waits", lambda: '"started"' in house.log("broker"))
    house.start("store")  # only now: start order is free
    until("the answer", lambda: '"answer": "not-found"' in house.log("broker"))
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) == 0


def test_the_drain_ends_before_the_supervisor_kills() -> None:
    from agent_box.process.supervision import EXIT_FATAL, STOP_SECONDS

    assert skeleton.DRAIN_SECONDS + skeleton.CLOSE_SECONDS < STOP_SECONDS
    assert skeleton.EXIT_FATAL == EXIT_FATAL
