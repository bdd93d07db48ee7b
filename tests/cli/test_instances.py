"""create, list, inspect and logs, by the real binary on a whole agent-box."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from support import cli, registries
from support.live import Live
from support.spoil import spoil
from support.until import until

from agent_box.bus import keys
from agent_box.bus.client import Client
from agent_box.bus.doorbell import Subscriber
from agent_box.bus.errors import Reason, Refusal
from agent_box.registry.contract import CONTRACT, Note, Noted


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """With two stopped instances that no engine answers for."""
    made = Live()
    try:
        made.ids = registries.seed(  # type: ignore[attr-defined]
            made.paths.data("registry") / "registry.db", "web1", "web2"
        )
        made.up()
        yield made
    finally:
        made.close()


def speaker(live: Live, role: str) -> Client:
    """The registry as another service calls it."""
    return Client(
        role,
        "registry",
        sock=live.paths.sock("registry"),
        secret=keys.load_secret(live.paths.keys(role)),
        server_key=keys.load_public(live.paths.public_keys, "registry"),
        contract=CONTRACT,
    )


def note(live: Live, role: str, **fields: Any) -> Noted:
    given = {"instance": live.ids["web1"], "event_id": os.urandom(16)} | fields  # type: ignore[attr-defined]
    client = speaker(live, role)
    try:
        reply = client.call("note", Note(**given))
    finally:
        client.close()
    assert isinstance(reply, Noted)
    return reply


def events(live: Live, *args: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = live.run("logs", *args, "--json").result["events"]
    return found


def test_list(live: Live) -> None:
    result = live.run("list", "--json").result
    assert result["problems"] == []
    assert result["instances"][0] == {
        "name": "web1",
        "state": "unknown",  # the engine has not answered
        "kind": "persistent",
        "profile": "rust",
        "image": "base",
        "cpus": 4,
        "memory": 8 << 30,
        "disk": 30 << 30,
    }
    lines = live.run("list").out.splitlines()
    assert lines[0].split() == [
        "NAME", "STATE", "KIND", "PROFILE", "IMAGE", "CPUS", "MEMORY", "DISK",
    ]  # fmt: skip
    assert lines[1].split() == ["web1", "unknown", "persistent", "rust", "base", "4", "8G", "30G"]
    assert max(map(len, lines)) <= 80


def test_inspect(live: Live) -> None:
    result = live.run("inspect", "web1", "--json").result
    assert result["id"] == live.ids["web1"]  # type: ignore[attr-defined]
    assert (result["state"], result["engine"]) == ("unknown", None)
    assert result["digests"] == registries.DIGESTS
    assert (result["doing"], result["failed"]) == (None, None)
    assert result["created"] == "2023-11-14T22:13:20.000Z"
    assert result["harness"] == ["my-agent", "acp"]
    assert result["policy"] == {"name": "dev", "mode": "allowlist", "generation": 1, "changes": 0}
    text = live.run("inspect", "web1").out
    assert f"id: {result['id']}\n" in text
    assert "memory: 8G\n" in text
    assert "engine: has not answered\n" in text


def test_inspect_of_nothing(live: Live) -> None:
    error = live.run("inspect", "nosuch", "--json").error
    assert (error["exit"], error["kind"]) == (3, "not-found")


def test_create_without_an_image_changes_nothing_and_says_what_to_do(live: Live) -> None:
    ran = live.run("create", "work", "--cpus", "2", "--memory", "512M", "--json")
    assert (ran.error["exit"], ran.error["kind"]) == (3, "not-found")
    assert "agent-box image build base" in ran.error["message"]
    names = [row["name"] for row in live.run("list", "--json").result["instances"]]
    assert names == ["web1", "web2"]
    assert live.run("inspect", "work").exit == 3


def test_create_fails_cleanly_where_the_engine_cannot_make_it(live: Live) -> None:
    """Where the helper may make no directory: nothing of the instance stays. (A disk that is too
    large is none of it: a file system in memory, as /tmp is on Debian 13, holds any.)"""
    operator = speaker(live, "operator")
    instances = live.paths.state / "instances"
    instances.chmod(0o500)
    try:
        with pytest.raises(Refusal) as error:
            operator.call("create", registries.create("work"))
    finally:
        instances.chmod(0o700)
        operator.close()
    assert error.value.exit in (1, 10) and "work was not created" in error.value.message
    found = events(live, "work")
    kinds = [e["kind"] for e in found]
    assert (kinds[0], kinds[-1]) == ("create-begun", "removed")
    assert "create-failed" in kinds
    assert len({e["instance"] for e in found}) == 1
    assert {e["source"] for e in found} == {"host-observed"}
    assert live.run("inspect", "work").exit == 3


def test_create_of_a_name_that_exists(live: Live) -> None:
    error = live.run("create", "web1", "--json").error
    assert (error["exit"], error["kind"]) == (5, "exists")


@pytest.mark.parametrize(
    ("args", "exit"),
    [
        (("Web3",), 64),
        (("a" * 64,), 64),
        (("a_b",), 64),
        (("web3", "--memory", "1X"), 64),
        (("web3", "--memory", "1M"), 64),
        (("web3", "--disk", "0G"), 64),
        (("web3", "--cpus", "0"), 64),
        (("web3", "--profile", "nosuch"), 3),
    ],
)
def test_bad_input_to_create_changes_nothing(live: Live, args: tuple[str, ...], exit: int) -> None:
    before = live.run("logs", "--head", "--json").result
    assert live.run("create", *args, "--json").error["exit"] == exit
    assert live.run("logs", "--head", "--json").result == before


def test_a_refused_config_refuses_what_uses_it(live: Live) -> None:
    config = live.home / "config" / "agent-box" / "config.toml"
    started = live.run("service", "list", "--json").result["daemon"]["config"]
    assert started is None  # so the file would be another one: the daemon has to be told
    config.parent.mkdir(parents=True, mode=0o700)
    config.write_text("version = 1\n[profiles.x]\nimge = 'rust'\n")
    try:
        ran = live.run("create", "web3", "--json")
        assert ran.error["exit"] == 2
    finally:
        config.unlink()
    assert live.run("list").exit == 0


def test_the_config_is_read_again_for_each_create() -> None:
    made = Live()
    config = made.home / "config" / "agent-box" / "config.toml"
    config.parent.mkdir(parents=True, mode=0o700)
    config.write_text('version = 1\n[profiles.small]\nmemory = "256M"\n')
    try:
        made.up()
        assert "there is no image base" in made.run("create", "a", "--profile", "small").err
        config.write_text("version = 1\n[profiles.small]\ncpu = 1\n")
        ran = made.run("create", "b", "--profile", "small", "--json")
        assert (ran.error["exit"], ran.error["kind"]) == (2, "config-invalid")
        assert '"cpu"' in ran.error["message"] and "profiles.small" in ran.error["message"]
        assert made.run("list").exit == 0
        config.write_text('version = 1\n[profiles.other]\nmemory = "256M"\n')
        assert "no profile 'small'" in made.run("create", "c", "--profile", "small").err
        assert "there is no image base" in made.run("create", "d", "--profile", "other").err
    finally:
        made.close()


# --------------------------------------------------------------------------- logs


def test_logs_of_everything_and_of_one(live: Live) -> None:
    every = events(live)
    assert [e["seq"] for e in every] == list(range(1, len(every) + 1))
    assert "started" in [e["kind"] for e in every]
    of_one = events(live, "web2")
    assert {e["name"] for e in of_one} == {"web2"}
    assert [e["kind"] for e in of_one] == ["create-begun", "allocate-begun", "created"]
    assert all(a["hash"] == b["prev"] for a, b in zip(every, every[1:], strict=False))
    assert events(live, "web2", "--tail", "1") == of_one[-1:]
    assert events(live, "web2", "--tail", "0") == []
    assert events(live, "web2", "--since", "1h") == []
    assert events(live, "web2", "--since", "2023-11-14T22:13:20Z") == of_one
    assert events(live, "--source", "agent-reported") == []
    text = live.run("logs", "web2").out.splitlines()
    assert text[0].startswith("2023-11-14T22:13:20.000Z host-observed web2 create-begun ")


def test_logs_of_what_never_was(live: Live) -> None:
    assert live.run("logs", "nosuch", "--json").error["exit"] == 3


def test_what_a_guest_says_cannot_drive_the_terminal(live: Live) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\r\nfake line\u202e\x9b31m\u2028"
    note(
        live,
        "channel",
        source="agent-reported",
        kind="run-ended",
        facts={"said": evil, "n": -5, "ok": True},
    )
    ran = live.run("logs", "web1", "--source", "agent-reported")
    (line,) = ran.out.splitlines()
    assert line.isprintable()
    assert "agent-reported web1 run-ended n=-5 ok=true said=" in line
    shown = live.run("logs", "web1", "--source", "agent-reported", "--json")
    assert shown.out.isascii() and "\x1b" not in shown.out
    assert shown.result["events"][0]["facts"]["said"] == evil


@pytest.mark.parametrize(
    ("role", "fields", "reason"),
    [
        ("engine", {"source": "guest-channel", "kind": "vmm-ended"}, Reason.DENIED),
        ("engine", {"source": "host-observed", "kind": "run-ended"}, Reason.BAD_REQUEST),
        ("engine", {"source": "host-observed", "kind": "journal-cut"}, Reason.BAD_REQUEST),
        ("netstack", {"source": "agent-reported", "kind": "flow-denied"}, Reason.DENIED),
        ("store", {"source": "host-observed", "kind": "vmm-ended"}, Reason.DENIED),
        ("operator", {"source": "host-observed", "kind": "vmm-ended"}, Reason.DENIED),
    ],
)
def test_who_may_say_what(live: Live, role: str, fields: dict[str, Any], reason: Reason) -> None:
    with pytest.raises(Refusal) as error:
        note(live, role, facts={}, **fields)
    assert error.value.reason is reason


def test_a_note_that_comes_twice_is_one_event(live: Live) -> None:
    fields = {
        "event_id": os.urandom(16),
        "source": "host-observed",
        "kind": "vmm-ended",
        "facts": {},
    }
    one, two = note(live, "engine", **fields), note(live, "engine", **fields)
    assert one == two


def test_verify_and_head(live: Live) -> None:
    head = live.run("logs", "--head", "--json").result
    verified = live.run("logs", "--verify", "--json").result
    assert (verified["last"], verified["head"]) == (head["seq"], head["hash"])
    assert live.run("logs", "--head").out.split()[:2] == [str(head["seq"]), head["hash"]]
    assert "verified" in live.run("logs", "--verify").out


def test_follow_goes_on_over_a_kill_of_the_registry(live: Live) -> None:
    process = live.popen(
        "logs",
        "web2",
        "--follow",
        "--tail",
        "1",
        "--json",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        first = json.loads(process.stdout.readline())
        assert (first["type"], first["kind"]) == ("event", "created")
        told = {"source": "host-observed", "kind": "vmm-ended", "instance": live.ids["web2"]}  # type: ignore[attr-defined]
        note(live, "engine", facts={"n": 1}, **told)
        assert json.loads(process.stdout.readline())["facts"] == {"n": 1}
        epoch = live.service("registry")["epoch"]
        (pid,) = live.inner("registry")
        os.kill(pid, signal.SIGKILL)
        until(
            "the registry is back", lambda: live.service("registry")["epoch"] not in (epoch, None)
        )
        note(live, "engine", facts={"n": 2}, **told)
        assert json.loads(process.stdout.readline())["facts"] == {"n": 2}
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        lines = [first, *map(json.loads, out.splitlines())]
        cli.check_stream(lines, cli.Ran(("logs",), process.returncode, out, err))
        assert process.returncode == 130
    finally:
        process.kill()
        process.communicate()


def test_the_doorbell_rings_for_each_event(live: Live) -> None:
    bell = Subscriber(
        sock=live.paths.doorbell("registry"),
        secret=keys.load_secret(live.paths.keys("operator")),
        server_key=keys.load_public(live.paths.public_keys, "registry"),
    )
    try:
        assert bell.wait(20) is not None  # it is connected
        seq = note(live, "engine", source="host-observed", kind="vmm-ended", facts={}).seq
        ring = bell.wait(20)
        while ring is not None and ring.seq < seq:
            ring = bell.wait(20)
        assert ring is not None and ring.epoch is not None
        assert (ring.epoch.hex(), ring.seq) == (live.service("registry")["epoch"], seq)
    finally:
        bell.close()


def test_a_registry_that_ends_does_not_wait_for_followers(live: Live) -> None:
    process = live.popen("logs", "--follow", "--tail", "1", stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        note(live, "engine", source="host-observed", kind="vmm-ended", facts={"n": 3})
        assert "n=3" in process.stdout.readline()
        assert live.run("service", "restart", "registry", timeout=30).exit == 0
        log = live.run("service", "logs", "registry").out
        assert "did not end in time" not in log
    finally:
        process.kill()
        process.communicate()


# ------------------------------------------------------------------------- damage


def test_what_others_changed_is_named_and_the_rest_is_served() -> None:
    made = Live()
    path = made.paths.data("registry") / "registry.db"
    try:
        registries.seed(path, "one", "two")
        spoil(path, "UPDATE record SET packed = CAST(packed || x'00' AS BLOB) WHERE name = 'two'")
        made.up()
        ran = made.run("list", "--json")
        assert [row["name"] for row in ran.result["instances"]] == ["one"]
        assert [p["name"] for p in ran.result["problems"]] == ["two"]
        assert "two" in made.run("list").err
        error = made.run("inspect", "two", "--json").error
        assert (error["exit"], error["kind"]) == (1, "tampered")
        assert made.run("inspect", "one").exit == 0
        assert "two" in (made.service("registry")["problem"] or "")
        error = made.run("logs", "--verify", "--json").error
        assert (error["exit"], error["bad_seq"]) == (1, None)
        assert [r["name"] for r in error["records"]] == ["two"]
        made.run("daemon", "--stop")
        spoil(path, "UPDATE event SET time_ms = 5 WHERE seq = 2")
        error = made.run("logs", "--verify", "--json").error
        assert error["bad_seq"] == 2
        assert "event 2: its columns differ from its text" in error["message"]
    finally:
        made.close()


@pytest.mark.parametrize("content", [b"", b"no database"])
def test_a_registry_without_its_database_says_so(content: bytes) -> None:
    made = Live()
    path = made.paths.data("registry") / "registry.db"
    try:
        path.parent.mkdir(parents=True, mode=0o700)
        path.write_bytes(content)
        made.up()
        for args in (("list",), ("create", "a"), ("logs",), ("policy", "show", "a")):
            error = made.run(*args, "--json").error
            assert (error["exit"], error["kind"]) == (1, "tampered")
            assert "registry.db" in error["message"]
        assert made.run("secret", "list").exit == 0
        assert path.read_bytes() == content
    finally:
        made.close()
