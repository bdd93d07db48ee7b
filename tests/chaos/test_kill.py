"""kill -9 of anything at any moment, while clients write: what was acknowledged is there.

By default each case kills a few times; with `-m slow` twenty times each. The kills of one
service lie far enough apart that it does not count as failing (five deaths in 30 s): that
rule has tests of its own.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from importlib import import_module

import pytest
from nacl.public import PublicKey, SealedBox
from support import procs
from support.live import Live
from support.until import until

from agent_box.bus import keys
from agent_box.bus.client import Client
from agent_box.bus.errors import Code, Refusal
from agent_box.bus.schema import Empty, Wire
from agent_box.process.confine import BWRAP
from agent_box.process.paths import PROGRAMS, SERVICES
from agent_box.process.sealedbox import Inbox
from agent_box.process.watch import DEATHS, WITHIN_S
from agent_box.registry import contract as registry
from agent_box.store import contract as store

FEW = 3
MANY = 20
READY_S = 30.0  # a bound on a hang; what it took is printed
LOST = (Code.UNAVAILABLE, Code.DEADLINE, Code.UNKNOWN_OUTCOME)  # nothing was acknowledged
KILLS_S = 4.0  # in which each service is killed once
# One kill of each within `KILLS_S` of the start of each round is never too many.
ROUND_S = (WITHIN_S + KILLS_S) / (DEATHS - 1)


class Writer:
    """A client in a loop, until it is stopped. It notes what was acknowledged."""

    role: str
    service: str
    pause_s = 0.01

    def __init__(self, live: Live) -> None:
        self.live = live
        self.refused: list[Refusal] = []
        self.count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__)
        self._broken: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    def connect(self, role: str | None = None) -> Client:
        role = role or self.role
        return Client(
            role,
            self.service,
            sock=self.live.paths.sock(self.service),
            secret=keys.load_secret(self.live.paths.keys(role)),
            server_key=keys.load_public(self.live.paths.public_keys, self.service),
            contract=import_module(f"agent_box.{self.service}.contract").CONTRACT,
        )

    def _run(self) -> None:
        try:
            with self.connect() as client:
                while not self._stop.wait(self.pause_s):
                    try:
                        self.write(client)
                        self.count += 1
                    except Refusal as refusal:
                        is_stale = refusal.facts.get("seal") == "stale"  # a new start came
                        if refusal.code not in LOST and not is_stale:
                            raise
                        self.refused.append(refusal)
        except BaseException as error:  # noqa: BLE001 - told by `stop`, in the test's thread
            self._broken = error

    def write(self, client: Client) -> None:
        raise AssertionError

    def check(self) -> None:
        """Everything that was acknowledged is there."""
        raise AssertionError


class Secrets(Writer):
    role, service = "operator", "store"

    def __init__(self, live: Live) -> None:
        super().__init__(live)
        self.acknowledged: dict[str, tuple[int, bytes]] = {}  # name: version, value
        self.tried: dict[str, list[bytes]] = {}

    def write(self, client: Client) -> None:
        name = f"key-{random.randrange(12)}"
        value = uuid.uuid4().hex.encode()
        self.tried.setdefault(name, []).append(value)
        seal_key = client.call("seal_key", Empty(), deadline_s=2)
        assert isinstance(seal_key, store.SealKey)
        box = SealedBox(PublicKey(seal_key.key)).encrypt(value)
        sealed = store.Sealed(to=seal_key.key, box=box)
        stored = client.call("put", store.Put(name=name, value=sealed), deadline_s=2)
        assert isinstance(stored, store.Stored)
        assert stored.version > self.acknowledged.get(name, (0, b""))[0]
        self.acknowledged[name] = (stored.version, value)
        self.tried[name] = [value]

    def check(self) -> None:
        with self.connect() as client:
            listed = client.call("list", Empty())
            assert isinstance(listed, store.Credentials)
        found = {each.name: each for each in listed.credentials}
        inbox = Inbox()
        with self.connect("broker") as broker:
            for name, (version, value) in self.acknowledged.items():
                assert found[name].problem is None
                assert found[name].version >= version
                revealed = broker.call("reveal", store.Reveal(name=name, to=inbox.public))
                assert isinstance(revealed, store.Revealed)
                opened = inbox.open(revealed.box).reveal()
                if revealed.version == version:
                    assert opened == value
                else:  # a later one arrived, and its reply was lost
                    assert opened in self.tried[name]


class Notes(Writer):
    role, service = "broker", "registry"
    pause_s = 0.1  # a service may note twenty events a second of one instance

    def __init__(self, live: Live) -> None:
        super().__init__(live)
        self.kind = import_module("agent_box.broker.contract").CONTRACT.events[0].name
        self.acknowledged: dict[int, int] = {}  # seq: number
        self.number = 0

    def write(self, client: Client) -> None:
        self.number += 1
        note = registry.Note(
            event_id=os.urandom(16),
            instance=None,
            source="host-observed",
            kind=self.kind,
            facts={"number": self.number},
        )
        noted = client.call("note", note, deadline_s=2)
        assert isinstance(noted, registry.Noted)
        self.acknowledged[noted.seq] = self.number

    def check(self) -> None:
        found: dict[int, object] = {}
        with self.connect("operator") as client:
            after = 0
            while True:
                read = registry.Read(after=after, tail=None, since_ms=None, source=None,
                                     name=None, limit=200, wait_ms=0)  # fmt: skip
                entries = client.call("logs", read)
                assert isinstance(entries, registry.Entries)
                if not entries.events:
                    break
                found |= {e.seq: e.facts.get("number") for e in entries.events}
                after = entries.next
            verified = client.call("verify", Empty())
            assert isinstance(verified, registry.Verified)
            assert verified.ok, verified
        for seq, number in self.acknowledged.items():
            assert found[seq] == number
        numbers = [n for n in found.values() if n is not None]
        assert len(numbers) == len(set(numbers))  # a call that was sent again was one event


class Instances(Writer):
    """Makes instances, and removes every third."""

    role, service = "operator", "registry"
    pause_s = 0.1
    images = registry.Images(
        kernel="0" * 64, initramfs="1" * 64, variant="2" * 64, guest="3" * 64, harness=None
    )

    def __init__(self, live: Live) -> None:
        super().__init__(live)
        self.made: set[str] = set()  # acknowledged
        self.gone: set[str] = set()  # acknowledged: refused or removed
        self.uncertain: set[str] = set()  # the answer was lost

    def write(self, client: Client) -> None:
        name = f"box-{uuid.uuid4().hex[:12]}"
        request = registry.Create(
            name=name,
            profile=None,
            cpus=None,
            memory=None,
            disk=64 << 20,
            image="base",
            images=self.images,
        )
        self.uncertain.add(name)
        if not self.answer(client, "create", request):
            self.gone.add(name)
            self.uncertain.remove(name)
            return
        if len(self.made) % 3:
            self.made.add(name)
            self.uncertain.remove(name)
            return
        self.made.add(name)
        if self.answer(client, "delete", registry.Delete(name=name, force=False)):
            self.made.remove(name)
            self.gone.add(name)
            self.uncertain.remove(name)

    def answer(self, client: Client, method: str, request: Wire) -> bool:
        """Whether it was done. False: it was refused, because something it needs is away."""
        try:
            client.call(method, request, deadline_s=10)
        except Refusal as refusal:
            if refusal.exit not in (10, 11, 12):
                raise
            return False
        return True

    def check(self) -> None:
        def states() -> dict[str, str]:
            with self.connect() as client:
                listed = client.call("list", Empty())
                assert isinstance(listed, registry.Rows)
                assert not listed.problems
                return {row.name: row.state for row in listed.instances}

        until(
            "what was begun is finished or undone",
            lambda: set(states().values()) <= {"stopped"},
            seconds=READY_S,
        )
        there = set(states())
        assert self.made - self.uncertain <= there
        assert not self.gone & there
        assert there <= self.made | self.uncertain


@pytest.fixture
def live() -> Iterator[Live]:
    made = Live()
    try:
        made.up()
        yield made
    finally:
        made.close()


@pytest.fixture
def writers(live: Live) -> Iterator[list[Writer]]:
    """At work throughout the test; afterwards they look whether all is there."""
    team: list[Writer] = [Secrets(live), Notes(live), Instances(live)]
    for writer in team:
        writer.start()
    try:
        yield team
    finally:
        for writer in team:
            writer.stop()
        for writer in team:
            writer.raise_if_broken()


def settled(live: Live, writers: list[Writer]) -> float:
    """Waits until all is well again, and says how long that took, in seconds."""
    begun = time.monotonic()
    try:
        until("every service is ready", live.ready, seconds=READY_S)
    except AssertionError:
        print(live.run("service", "list").out)
        print(live.paths.log("daemon").read_text()[-8000:])
        for service in SERVICES:
            print(service, live.paths.log(service).read_text()[-2000:])
        raise
    took = time.monotonic() - begun
    before = [writer.count for writer in writers]

    def all_go_on() -> bool:
        for writer in writers:
            writer.raise_if_broken()
        return all(w.count > b for w, b in zip(writers, before, strict=True))

    until("the clients go on", all_go_on, seconds=READY_S)
    for program in PROGRAMS:
        assert len(live.inner(program)) == 1, f"{program} runs {live.inner(program)}"
    return took


def finish(live: Live, writers: list[Writer], took: list[float]) -> None:
    settled(live, writers)
    for writer in writers:
        writer.stop()
    for writer in writers:
        writer.check()
    counts = ", ".join(f"{type(w).__name__} {w.count} (lost {len(w.refused)})" for w in writers)
    print(f"\nready again after at most {max(took):.1f} s; acknowledged: {counts}")


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def times(few: int, many: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return pytest.mark.parametrize(
        "count",
        [
            pytest.param(few, id=f"{few}-times"),
            pytest.param(
                many, id=f"{many}-times", marks=(pytest.mark.slow, pytest.mark.timeout(1800))
            ),
        ],
    )


@times(1, MANY)
def test_each_service(live: Live, writers: list[Writer], count: int) -> None:
    """The service itself, or what wraps it: each dies with the other."""
    dice = random.Random(count)
    took = []
    for _ in range(count):
        begun = time.monotonic()
        for service in dice.sample(PROGRAMS, len(PROGRAMS)):
            time.sleep(
                dice.uniform(0, KILLS_S / len(PROGRAMS))
            )  # not a wait for anything: the moment is the test
            pids = live.pids(service)
            if pids:
                kill(dice.choice(pids))
        took.append(settled(live, writers))
        left = ROUND_S - (time.monotonic() - begun)
        time.sleep(max(0.0, left if count > DEATHS - 2 else 0.0))
    finish(live, writers, took)


@times(FEW, MANY)
def test_supervisord(live: Live, writers: list[Writer], count: int) -> None:
    """Ready again by the next verb, whatever state the last start was in."""
    dice = random.Random(count)
    took = []
    for n in range(count):
        time.sleep(dice.uniform(0, 0.5))
        if n % 2:
            starter = live.popen("service", "list", stdout=-3, stderr=-3)
            time.sleep(dice.uniform(0, 1.0))
            kill(live.daemon_pid() or 0) if live.daemon_pid() else None
            starter.wait(60)
        kill(live.daemon_pid()) if live.daemon_pid() else None
        took.append(settled(live, writers))
    finish(live, writers, took)


@times(FEW, MANY)
def test_all_at_once(live: Live, writers: list[Writer], count: int) -> None:
    dice = random.Random(count)
    took = []
    for _ in range(count):
        time.sleep(dice.uniform(0, 0.5))
        everything = live.pids()
        dice.shuffle(everything)
        for pid in everything:
            kill(pid)
        took.append(settled(live, writers))
    finish(live, writers, took)


def test_all_services_but_not_supervisord(live: Live, writers: list[Writer]) -> None:
    daemon = live.daemon_pid()
    took = []
    for _ in range(FEW):
        for program in PROGRAMS:
            for pid in live.inner(program):
                kill(pid)
        took.append(settled(live, writers))
    assert live.daemon_pid() == daemon
    finish(live, writers, took)


def test_the_wall_outside_dies_and_the_service_with_it(live: Live) -> None:
    """Not even for a moment are there two; and none is left whose wall has gone."""
    for service in SERVICES:
        (inner,) = live.inner(service)
        kill(procs.parent(inner))
        until("the old one is gone", lambda inner=inner: procs.state(inner) in "XZ")
        until("there is one again", lambda service=service: len(live.inner(service)) == 1)
    until("every service is ready", live.ready, seconds=READY_S)


def test_what_a_crash_leaves_behind_stops_no_start(live: Live) -> None:
    wall = [BWRAP, "-c", "import sys; sys.stdin.read()", "-m", "agent_box.registry"]
    left = subprocess.Popen(
        [*wall, "--runtime", str(live.paths.runtime)],
        executable=sys.executable,
        stdin=subprocess.PIPE,
    )
    for pid in live.pids():
        if pid != left.pid:
            kill(pid)
    # A supervisor that is killed while it puts up a wall may leave half of one.
    until("all is dead", lambda: all(procs.cmdline(p)[:1] == [BWRAP] for p in live.pids()))
    walls = set(live.pids())
    assert left.pid in walls
    for service in SERVICES:
        assert live.paths.sock(service).exists(), "a stale socket is what this is about"
    assert live.paths.lock.exists()
    # and worse than a crash would leave them
    live.paths.lock.write_text('{"pid": 1, "config": "/nowhere", "version": "0"}')
    (live.paths.supervisor / "sock").unlink(missing_ok=True)
    (live.paths.supervisor / "sock").write_text("not a socket")
    live.up()
    assert left.wait(60) == -signal.SIGKILL
    left.communicate()
    assert not walls & set(live.pids())
