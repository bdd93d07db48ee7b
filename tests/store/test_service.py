"""The store as it runs: behind its wall, on the bus, killed and started again."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.creds import stand_in
from support.house import House, inner_pid
from support.until import until

from agent_box.bus.base import Hello
from agent_box.bus.client import Client
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.schema import Empty
from agent_box.process.secret import Secret
from agent_box.store import keepers, seal
from agent_box.store.contract import (
    Credentials,
    Name,
    Protect,
    Put,
    Reveal,
    Revealed,
    Sealed,
    SealKey,
    Stored,
    Unlock,
)


class Running:
    """A confined store and its two callers."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.operator = house.client("store")
        self.broker = house.client("store", "broker")
        self.command = house.command("store")
        self.start()

    def start(self) -> None:
        self.process = self.house.run(self.command, self.house.paths.log("store"))
        self.hello = self.ready(self.operator)

    def ready(self, client: Client) -> Hello:
        def ask() -> Hello | None:
            assert self.process.poll() is None, self.house.log("store")
            try:
                hello = client.call("hello", Empty(), deadline_s=1)
            except Refusal as refusal:
                assert refusal.reason is not Reason.DENIED
                return None
            assert isinstance(hello, Hello)
            return hello if hello.ready else None

        found = until("the store is ready", ask)
        assert found is not None
        return found

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    def sealed(self, value: bytes) -> Sealed:
        key = self.operator.call("seal_key", Empty())
        assert isinstance(key, SealKey)
        return Sealed(to=key.key, box=seal.box(Secret(value), key.key))

    def put(self, name: str, value: bytes) -> int:
        stored = self.operator.call("put", Put(name=name, value=self.sealed(value)))
        assert isinstance(stored, Stored)
        return stored.version

    def list(self) -> Credentials:
        listed = self.operator.call("list", Empty())
        assert isinstance(listed, Credentials)
        return listed

    def reveal(self, name: str) -> bytes:
        inbox = seal.Inbox()
        revealed = self.broker.call("reveal", Reveal(name=name, to=inbox.public))
        assert isinstance(revealed, Revealed)
        return inbox.open(revealed.box).reveal()


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.close()


@pytest.fixture
def running(house: House) -> Iterator[Running]:
    running = Running(house)
    yield running
    running.operator.close()
    running.broker.close()


def refusal(reason: Reason, match: str = "") -> pytest.RaisesExc[Refusal]:
    return pytest.raises(Refusal, match=match, check=lambda r: r.reason is reason)


def test_a_value_goes_in_by_the_operator_and_out_to_the_broker_alone(running: Running) -> None:
    assert running.hello.problem is None
    assert running.put("a", b"one") == 1
    assert running.reveal("a") == b"one"
    assert [c.name for c in running.list().credentials] == ["a"]
    request = Reveal(name="a", to=seal.Inbox().public)
    with refusal(Reason.DENIED, "operator may not call store.reveal"):
        running.operator.call("reveal", request)
    for role in ("registry", "netstack", "channel", "engine"):
        client = running.house.client("store", role)
        for method, asked in (("reveal", request), ("list", Empty()), ("remove", Name(name="a"))):
            with refusal(Reason.DENIED, f"{role} may not call store.{method}"):
                client.call(method, asked)
        client.close()
    for method, asked in (("list", Empty()), ("put", Put(name="a", value=running.sealed(b"x")))):
        with refusal(Reason.DENIED, f"broker may not call store.{method}"):
            running.broker.call(method, asked)


def test_what_was_acknowledged_is_there_after_a_kill(running: Running) -> None:
    for number in range(20):
        version = running.put("a", b"%d" % number)
        if number % 5 == 0:
            running.restart()
        assert running.reveal("a") == b"%d" % number
        assert running.list().credentials[0].version == version


def test_a_value_sealed_to_an_earlier_start_is_refused_and_can_be_sealed_anew(
    running: Running,
) -> None:
    stale = running.sealed(b"one")
    running.restart()
    with refusal(Reason.CONFLICT, "an earlier start") as refused:
        running.operator.call("put", Put(name="a", value=stale))
    assert refused.value.facts == {"seal": "stale"}
    assert running.put("a", b"one") == 1


def test_a_removal_asked_for_twice_with_one_id_is_done_once(running: Running) -> None:
    id = os.urandom(16)
    running.put("a", b"one")
    running.operator.call("remove", Name(name="a"), request_id=id)
    running.put("a", b"two")
    running.operator.call("remove", Name(name="a"), request_id=id)
    assert running.reveal("a") == b"two"
    running.restart()
    running.operator.call("remove", Name(name="a"), request_id=id)
    assert running.reveal("a") == b"two"
    with refusal(Reason.NOT_FOUND, "no credential is named b"):
        running.operator.call("remove", Name(name="b"))


def test_locked_by_a_passphrase_it_says_so_and_is_still_ready(running: Running) -> None:
    running.put("a", b"one")
    request = Protect(protection="passphrase", key="", secret=running.sealed(b"word"), blob=b"")
    running.operator.call("protect", request)
    running.restart()
    assert str(running.hello.problem).startswith("locked: ")
    assert (running.list().locked, running.list().problem) == (True, None)
    with refusal(Reason.STORE_LOCKED, "secret unlock"):
        running.reveal("a")
    with refusal(Reason.DENIED, "not the passphrase"):
        running.operator.call("unlock", Unlock(secret=running.sealed(b"guess")))
    running.operator.call("unlock", Unlock(secret=running.sealed(b"word")))
    assert running.ready(running.operator).problem is None
    assert running.reveal("a") == b"one"


def test_while_a_passphrase_is_tried_others_are_served(running: Running) -> None:
    from concurrent.futures import ThreadPoolExecutor

    running.put("a", b"one")
    request = Protect(protection="passphrase", key="", secret=running.sealed(b"word"), blob=b"")
    other = running.house.client("store")
    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(other.call, "protect", request)
        asked = 0
        while not changing.done():
            assert running.reveal("a") == b"one"
            asked += 1
        changing.result()
    other.close()
    assert asked > 3


def test_a_damaged_store_answers_with_the_reason(running: Running) -> None:
    running.put("a", b"one")
    running.kill()
    path = running.house.paths.data("store") / "credentials.db"
    os.truncate(path, 3000)
    running.start()
    assert f"the database {path} is damaged" in str(running.hello.problem)
    for method, asked in (("list", Empty()), ("remove", Name(name="a"))):
        with refusal(Reason.TAMPERED, "does not serve"):
            running.operator.call(method, asked)
    with refusal(Reason.TAMPERED, "does not serve"):
        running.reveal("a")


def test_a_key_that_systemd_creds_keeps_comes_through_the_wall(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way, by the launcher that the contract names, into the confined process."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    stand_in(tmp_path)
    running.put("a", b"one")
    key = seal.new_key()
    blob = keepers.creds_encrypt(key)
    secret = running.sealed(key.reveal())
    request = Protect(protection="systemd-creds", key="ab" * 16, secret=secret, blob=blob)
    running.operator.call("protect", request)
    keys = running.house.paths.keys("store")
    assert not list(keys.glob("master-*"))

    running.restart()  # without the launcher
    assert "without its launcher" in str(running.hello.problem)
    launcher = [
        *(sys.executable, "-I", "-B", "-m", "agent_box.store.keysource"),
        *("--keys", str(keys), "--"),
    ]
    running.command = [*launcher, *running.command]
    running.restart()
    assert running.hello.problem is None
    assert running.reveal("a") == b"one"
    inner = inner_pid(running.process)
    for pid in (running.process.pid, inner):
        for file in ("cmdline", "environ"):
            try:
                content = Path(f"/proc/{pid}/{file}").read_bytes()
            except PermissionError:
                continue  # not dumpable: nobody can read its environment at all
            assert key.reveal() not in content
            assert key.reveal().hex().encode() not in content
    assert key.reveal() not in b"".join(p.read_bytes() for p in keys.iterdir())


def test_its_log_names_credentials_and_holds_no_value(running: Running) -> None:
    running.put("named", b"canary-in-a-value")
    with refusal(Reason.BAD_REQUEST, "a line feed"):
        running.put("named", b"canary\nwith a line feed")
    running.operator.call("remove", Name(name="named"))
    log = running.house.log("store")
    assert "named" in log
    assert "canary" not in log
