"""The verbs of credentials, as an operator and a script use them, with a daemon of their own."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from support import cli, procs
from support.creds import stand_in
from support.live import Live
from support.stores import custody
from support.tty import Terminal
from support.until import until

from agent_box.bus.client import Client
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.schema import Empty, Wire
from agent_box.cli import secrets as verbs_of_secrets
from agent_box.cli.render import Failure, Render
from agent_box.process.secret import Secret
from agent_box.store import keepers, rules, seal
from agent_box.store.contract import Protect, Put, Sealed, SealKey, Stored

CONFIG = """
version = 1
[bindings.anthropic]
upstream = "https://api.anthropic.com"
kind = "anthropic"
credential = "anthropic-api-key"
routes = [{ path = "/v1/messages", match = "exact", methods = ["POST"] }]
[bindings.second]
upstream = "https://api.anthropic.com"
kind = "anthropic"
credential = "anthropic-api-key"
routes = [{ path = "/v1/messages", match = "exact", methods = ["POST"] }]
"""


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """One daemon for all, so each test leaves the store open and by a key file."""
    live = Live()
    config = live.home / "config" / "agent-box"
    config.mkdir(parents=True, mode=0o700)
    (config / "config.toml").write_text(CONFIG)
    yield live
    live.close()


def names(live: Live) -> list[str]:
    return [c["name"] for c in live.run("secret", "list", "--json").result["credentials"]]


# ----------------------------------------------------------------------------------- set


def test_a_value_is_stored_and_counted(live: Live) -> None:
    first = live.run("secret", "set", "counted", stdin="one\n")
    assert (first.exit, first.out) == (0, "counted stored (version 1)\n")
    again = live.run("secret", "set", "counted", "--json", stdin="one\n")
    assert again.result == {"name": "counted", "version": 2}
    (row,) = (
        r
        for r in live.run("secret", "list", "--json").result["credentials"]
        if r["name"] == "counted"
    )
    assert (row["version"], row["bindings"], row["problem"]) == (2, [], None)
    assert "one" not in first.out + first.err + again.out + again.err


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"", "bad: the value is empty"),
        (b"\n", "bad: the value is empty"),
        (b"\n\n", "bad: the value contains a line feed, which no header can carry"),
        (b"a\nb\n", "bad: the value contains a line feed"),
        (b"a\r\n", "bad: the value contains a carriage return"),
        (b"a\0b", "bad: the value contains NUL"),
        (b"\x1b[31m", "bad: the value contains the control character 0x1b"),
        (b"x" * (rules.VALUE_MAX + 1), "bad: the value is longer than 65536 bytes"),
        (b"x" * (1 << 20), "bad: the value is longer than 65536 bytes"),
        ("x\n".encode("utf-16"), "bad: the value contains NUL"),
    ],
    ids=range(10),
)
def test_a_value_that_cannot_be_used_is_refused_in_one_line(
    live: Live, value: bytes, why: str
) -> None:
    ran = cli.run("secret", "set", "bad", "--json", env=live.env, stdin=value)
    assert (ran.error["exit"], ran.error["kind"]) == (64, "usage")
    assert ran.error["message"].startswith(why)
    assert "bad" not in names(live)


@pytest.mark.parametrize(
    "value", [b"x", b"x" * rules.VALUE_MAX, b" spaced ", b"tab\there", bytes(range(0x80, 0x100))]
)
def test_a_value_that_a_header_can_carry_is_stored(live: Live, value: bytes) -> None:
    for end in (b"", b"\n"):  # exactly one line feed is stripped
        ran = cli.run("secret", "set", "good", env=live.env, stdin=value + end)
        assert ran.exit == 0, ran
    assert live.run("secret", "rm", "good").exit == 0


@pytest.mark.parametrize("name", ["", "A", "x" * 65, "-x", "a/b", "a\nb", "ä"])
def test_a_bad_name_is_refused_before_anything_is_read(live: Live, name: str) -> None:
    for verb in ("set", "rm"):
        ran = live.run("secret", verb, "--json", "--", name)
        assert ran.error["exit"] == 64
        assert "1 to 64 lowercase letters" in ran.error["message"]


def test_a_closed_stdin_is_said(live: Live) -> None:
    command = 'exec "$0" secret set bad --json <&-'
    done = subprocess.run(
        ["sh", "-c", command, cli.BINARY], env=live.env, capture_output=True, check=False
    )
    assert done.returncode == 64
    assert json.loads(done.stdout)["error"]["message"] == (
        "stdin is closed: the value is read from it"
    )


def test_a_stdin_that_cannot_be_read_is_said(live: Live) -> None:
    write_only = os.open("/dev/null", os.O_WRONLY)
    done = subprocess.run(
        [cli.BINARY, "secret", "set", "bad"],
        env=live.env,
        stdin=write_only,
        capture_output=True,
        check=False,
    )
    os.close(write_only)
    assert (done.returncode, done.stderr) == (
        64,
        b"agent-box: stdin cannot be read: Bad file descriptor\n",
    )


def test_a_stdin_without_end_is_not_read_to_it(live: Live) -> None:
    with open("/dev/zero", "rb") as zeros:
        done = subprocess.run(
            [cli.BINARY, "secret", "set", "bad"],
            env=live.env,
            stdin=zeros,
            capture_output=True,
            check=False,
            timeout=30,
        )
    assert done.returncode == 64
    assert b"longer than" in done.stderr


def test_a_value_on_the_command_line_is_refused(live: Live) -> None:
    assert live.run("secret", "set", "bad", "canary").exit == 64
    assert live.run("secret", "set", "bad=canary").exit == 64
    assert live.run("secret", "set").exit == 64


# ----------------------------------------------------------------------------- a terminal


@pytest.fixture
def terminal(live: Live) -> Iterator[Terminal]:
    with Terminal([cli.BINARY, "secret", "set", "typed"], live.env) as terminal:
        terminal.until(b"value of typed: ")
        yield terminal


def hidden(terminal: Terminal) -> None:
    until("echo is off", lambda: not terminal.echoes)


def restored(terminal: Terminal) -> None:
    assert termios.tcgetattr(terminal.master)[:6] == terminal.before[:6]


def test_typed_with_enter_it_is_not_shown(terminal: Terminal) -> None:
    hidden(terminal)
    terminal.type(b"canary\n")
    code, out, seen = terminal.end()
    assert (code, out) == (0, out)
    assert out.startswith(b"typed stored")
    assert b"canary" not in seen + out
    assert seen == b"\r\n"  # asked once
    restored(terminal)


@pytest.mark.parametrize("typed", [b"canary\x04\x04", b"canary\n\x04", b"can\x04ary\n"])
def test_typed_with_an_end_of_file(terminal: Terminal, typed: bytes) -> None:
    hidden(terminal)
    terminal.type(typed)
    code, out, seen = terminal.end()
    assert code == 0, seen
    assert b"canary" not in seen + out
    restored(terminal)


def test_nothing_typed_is_empty(terminal: Terminal) -> None:
    hidden(terminal)
    terminal.type(b"\x04")
    code, _, seen = terminal.end()
    assert code == 64
    assert b"typed: the value is empty" in seen
    restored(terminal)


def test_of_lines_that_were_pasted_none_is_left_for_the_shell(terminal: Terminal) -> None:
    hidden(terminal)
    terminal.type(b"-----BEGIN KEY-----\nrm -rf canary\n-----END KEY-----\n")
    code, _, seen = terminal.end()
    assert code == 64
    assert b"contains a line feed" in seen
    assert b"canary" not in seen
    assert terminal.unread() == b""
    restored(terminal)


def test_a_line_that_the_terminal_cuts_off_is_refused(terminal: Terminal) -> None:
    hidden(terminal)
    terminal.type(b"x" * 5000 + b"\n")
    code, _, seen = terminal.end()
    assert code == 64
    assert b"pipe the value in" in seen
    restored(terminal)


def test_interrupted_it_shows_again_what_is_typed(terminal: Terminal) -> None:
    hidden(terminal)
    terminal.type(b"canar\x03")
    code, _, seen = terminal.end()
    assert code == 130
    assert b"canar" not in seen
    restored(terminal)
    assert terminal.unread() == b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_ended_by_a_signal_it_shows_again_what_is_typed(
    terminal: Terminal, number: signal.Signals
) -> None:
    hidden(terminal)
    os.kill(terminal.pid, number)
    code, _, _ = terminal.end()
    assert code == 128 + number
    restored(terminal)


def test_when_the_terminal_hangs_up_it_ends(live: Live) -> None:
    command = [cli.BINARY, "secret", "set", "typed", "--json"]
    with Terminal(command, live.env) as terminal:
        terminal.until(b"value of typed: ")
        hidden(terminal)
        pid = terminal.pid
        terminal.hang_up()
        until("it has ended", lambda: procs.state(pid) in "XZ")
        assert terminal.process.stdout is not None
        said = terminal.process.stdout.read()
        # The signal ends it, unless it has seen the end of its input before that.
        assert said == b"" or "is empty" in json.loads(said)["error"]["message"]


def test_suspended_it_shows_and_hides_again_when_it_goes_on(terminal: Terminal) -> None:
    hidden(terminal)
    terminal.type(b"first \x1a")
    until("it is stopped", lambda: procs.state(terminal.pid) == "T")
    restored(terminal)
    os.kill(terminal.pid, signal.SIGCONT)
    terminal.until(b"value of typed: ")
    hidden(terminal)
    terminal.type(b"canary\n")
    code, out, seen = terminal.end()
    assert code == 0, seen
    assert b"canary" not in seen + out
    restored(terminal)


# ---------------------------------------------------------------------------------- list


def test_the_list_names_the_bindings_and_lines_up(live: Live) -> None:
    for name in ("anthropic-api-key", "z"):
        assert live.run("secret", "set", name, stdin="v").exit == 0
    rows = {r["name"]: r for r in live.run("secret", "list", "--json").result["credentials"]}
    assert rows["anthropic-api-key"]["bindings"] == ["anthropic", "second"]
    assert rows["z"]["bindings"] == []
    assert list(rows) == sorted(rows)
    lines = live.run("secret", "list").out.splitlines()
    assert lines[0].split() == ["NAME", "VERSION", "UPDATED", "BINDINGS"]
    column = lines[0].index("BINDINGS")
    (line,) = (each for each in lines if each.startswith("anthropic-api-key "))
    assert line[column:] == "anthropic, second"
    assert {line[column - 2 : column] for line in lines} == {"  "}


def test_what_the_list_imports_is_little(live: Live) -> None:
    """No crypto library and nothing else that is slow to load."""
    script = (
        "import sys; sys.argv = ['agent-box', 'secret', 'list', '--json']\n"
        "from agent_box.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted(m.partition('.')[0] for m in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-c", script],
        env=live.env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["ok"]
    loaded = set(eval(done.stderr.splitlines()[-1]))  # noqa: S307 - a list that we printed
    assert "zmq" in loaded
    slow = {"nacl", "cffi", "asyncio", "keyring", "rich"}
    assert sorted(loaded & slow) == []


# ------------------------------------------------------------------------------------ rm


def test_what_is_removed_is_gone_and_who_will_miss_it_is_told(live: Live) -> None:
    live.run("secret", "set", "anthropic-api-key", stdin="v")
    ran = live.run("secret", "rm", "anthropic-api-key", "--json")
    assert ran.result == {"name": "anthropic-api-key", "bindings": ["anthropic", "second"]}
    assert ran.err == (
        "agent-box: warning: anthropic-api-key is used by anthropic, second, whose requests "
        "will be refused now\n"
    )
    again = live.run("secret", "rm", "anthropic-api-key", "--json")
    assert (again.error["exit"], again.error["kind"]) == (3, "not-found")
    assert "anthropic-api-key" in again.error["message"]
    assert again.err.count("\n") == 1


# -------------------------------------------------------------------- unlock and protect


def test_a_passphrase_locks_the_store_at_each_start(live: Live) -> None:
    live.run("secret", "set", "kept", stdin="v")
    ran = live.run("secret", "protect", "passphrase", "--json", stdin="word\n")
    assert ran.result == {"protection": "passphrase", "before": "key-file"}
    live.run("service", "restart", "store")
    listed = live.run("secret", "list", "--json")
    assert listed.result["locked"]
    assert listed.result["problem"] is None
    assert "kept" in {c["name"] for c in listed.result["credentials"]}
    assert listed.err == (
        "agent-box: warning: the store is locked; `agent-box secret unlock` opens it\n"
    )
    for verb in (("set", "kept"), ("rm", "kept"), ("protect", "key-file")):
        error = live.run("secret", *verb, "--json", stdin="v").error
        assert (error["exit"], error["kind"]) == (4, "store-locked"), error
        assert "secret unlock" in error["message"]
    for wrong, code in (("wrong", 1), ("", 64), ("a\nb\n", 64)):
        assert live.run("secret", "unlock", "--json", stdin=wrong).error["exit"] == code
    ran = live.run("secret", "unlock", "--json", stdin="word\n")
    assert ran.result == {"protection": "passphrase", "locked": False}
    assert live.run("secret", "unlock").out == "the store was open already\n"
    assert live.run("secret", "set", "kept", stdin="w").exit == 0
    assert live.run("secret", "protect", "key-file").exit == 0
    live.run("service", "restart", "store")
    assert not live.run("secret", "list", "--json").result["locked"]


def test_a_new_passphrase_is_typed_twice(live: Live) -> None:
    with Terminal([cli.BINARY, "secret", "protect", "passphrase"], live.env) as terminal:
        for word, prompt in ((b"canary\n", b"new passphrase"), (b"other\n", b"once more: ")):
            terminal.until(prompt)
            hidden(terminal)
            terminal.type(word)
        code, _, seen = terminal.end()
    assert code == 64
    assert b"the two passphrases differ; nothing is changed" in seen
    assert b"canary" not in seen
    assert live.run("secret", "list", "--json").result["protection"] == "key-file"


def test_a_terminal_is_told_that_the_store_is_locked_before_it_is_asked(live: Live) -> None:
    live.run("secret", "protect", "passphrase", stdin="word")
    live.run("service", "restart", "store")
    with Terminal([cli.BINARY, "secret", "set", "typed"], live.env) as terminal:
        code, _, seen = terminal.end()
    assert code == 4
    assert b"value of" not in seen
    with Terminal([cli.BINARY, "secret", "unlock"], live.env) as terminal:
        terminal.until(b"passphrase of the store: ")
        hidden(terminal)
        terminal.type(b"word\n")
        code, out, _ = terminal.end()
    assert (code, out) == (0, b"the store is open\n")
    live.run("secret", "protect", "key-file")


def test_systemd_creds_that_is_too_old_is_named_and_changes_nothing(
    live: Live, tmp_path: Path
) -> None:
    stand_in(tmp_path, version="systemd 252 (252.38-1~deb12u1)")
    path = f"{tmp_path}:{live.env['PATH']}"
    ran = live.run("secret", "protect", "systemd-creds", "--json", PATH=path)
    assert (ran.error["exit"], ran.error["kind"]) == (1, "protection-unavailable")
    assert "of systemd 252 here" in ran.error["message"]
    assert "256" in ran.error["message"]
    assert live.run("secret", "list", "--json").result["protection"] == "key-file"


def test_systemd_creds_opens_the_store_by_unlock_where_the_daemon_has_none(
    live: Live, tmp_path: Path
) -> None:
    """The daemon's own PATH has the system's program; the stand-in is the operator's alone."""
    stand_in(tmp_path)
    path = f"{tmp_path}:{live.env['PATH']}"
    live.run("secret", "set", "kept", stdin="v")
    ran = live.run("secret", "protect", "systemd-creds", "--json", PATH=path)
    assert ran.result["protection"] == "systemd-creds"
    live.run("service", "restart", "store")
    listed = live.run("secret", "list", "--json")
    assert listed.result["locked"]
    assert "systemd-creds" in str(listed.result["problem"])
    assert listed.err.count("warning") == 2
    assert live.run("secret", "unlock", "--json", PATH=path).result["locked"] is False
    assert live.run("secret", "set", "kept", stdin="w").exit == 0
    assert live.run("secret", "protect", "key-file").exit == 0


# ---------------------------------------------------------------- the OS keyring, for real

_SESSION = """
printf 'login\\n' | gnome-keyring-daemon --unlock --components=secrets > /dev/null
exec "$@"
"""


def _in_a_session(live: Live, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a shell script on a session bus with an unlocked gnome-keyring, as a desktop has."""
    env = live.env | {"XDG_DATA_HOME": str(live.home / "data")}
    env = {k: v for k, v in env.items() if k != "DBUS_SESSION_BUS_ADDRESS"}
    return subprocess.run(
        ["dbus-run-session", "--", "sh", "-c", _SESSION, "sh", *command],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.skipif(
    not all(map(shutil.which, ("dbus-run-session", "gnome-keyring-daemon"))),
    reason="needs Debian's gnome-keyring and dbus-daemon",
)
def test_the_keyring_of_a_desktop_keeps_the_key() -> None:
    pytest.importorskip("keyring")
    live = Live()
    script = """
set -eu
box="$1"
printf v | "$box" secret set kept
printf v | "$box" secret protect keyring
ls "$XDG_STATE_HOME/agent-box/keys/store"
"$box" service restart store
"$box" secret list --json
printf w | "$box" secret set kept
"$box" secret protect keyring > /dev/null
"$box" service restart store > /dev/null
"$box" secret list --json
"$box" secret protect key-file
"$box" service restart store > /dev/null
"$box" secret list --json
"$box" secret protect keyring > /dev/null
"$box" daemon --stop > /dev/null
"""
    try:
        done = _in_a_session(live, "sh", "-c", script, "sh", str(cli.BINARY))
        assert done.returncode == 0, done
        assert "master-" not in done.stdout
        listed = [json.loads(line)["result"] for line in done.stdout.splitlines() if "{" in line]
        assert [r["protection"] for r in listed] == ["keyring", "keyring", "key-file"]
        assert not any(r["locked"] or r["problem"] for r in listed), listed
        # outside of the session nobody has the key: locked, and it says why
        ran = live.run("secret", "list", "--json")
        assert ran.result["locked"]
        assert "keyring" in ran.result["problem"]
        assert live.run("secret", "set", "kept", stdin="x").exit == 4
        assert live.run("secret", "unlock").exit == 4
        # and back in a session, the operator's own keyring opens the running store
        done = _in_a_session(live, str(cli.BINARY), "secret", "unlock")
        assert done.stdout == "the store is open\n", done
        assert live.run("secret", "set", "kept", stdin="x").exit == 0
    finally:
        live.close()


# ----------------------------------------------- what happens between two calls to a store


class Store:
    """In the place of a client: a store that is started again before a call arrives."""

    def __init__(self, restarts: int) -> None:
        self.restarts = restarts
        self.inbox = seal.Inbox()
        self.calls: list[str] = []
        self.taken: list[bytes] = []
        self.fail: Refusal | None = None

    def call(self, method: str, request: Wire) -> Wire:
        self.calls.append(method)
        if method == "seal_key":
            return SealKey(key=self.inbox.public, locked=False)
        if self.restarts:
            self.restarts -= 1
            self.inbox = seal.Inbox()
        sealed = request.value if isinstance(request, Put) else getattr(request, "secret", None)
        assert isinstance(sealed, Sealed)
        if sealed.to != self.inbox.public:
            raise Refusal(Reason.CONFLICT, "an earlier start", facts={"seal": "stale"})
        if self.fail is not None:
            raise self.fail
        self.taken.append(self.inbox.open(sealed.box).reveal())
        return Stored(version=1)


def _put(store: Store) -> Wire:
    key = SealKey(key=store.inbox.public, locked=False)
    reply: Wire = verbs_of_secrets._sealed(
        cast(Client, store),
        key,
        Secret(b"value"),
        lambda sealed: ("put", Put(name="a", value=sealed)),
    )
    return reply


def test_a_value_is_sealed_anew_for_each_start_of_the_store_in_between() -> None:
    store = Store(restarts=3)
    assert _put(store) == Stored(version=1)
    assert store.taken == [b"value"]
    assert store.calls == ["put", "seal_key"] * 3 + ["put"]


def test_a_store_that_is_never_the_same_is_given_up() -> None:
    store = Store(restarts=1000)
    with pytest.raises(Refusal, match="an earlier start"):
        _put(store)
    assert len(store.calls) < 20


def test_a_refusal_for_another_reason_is_not_tried_again() -> None:
    store = Store(restarts=0)
    store.fail = Refusal(Reason.CONFLICT, "another conflict")
    with pytest.raises(Refusal, match="another conflict"):
        _put(store)
    assert store.calls == ["put"]


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("reply", ["lost", "told"])
def test_of_two_keys_in_the_keyring_the_one_that_counts_stays(
    monkeypatch: pytest.MonkeyPatch, done: bool, reply: str
) -> None:
    """Whether the store changed its protection is for its own file to say, not for the reply."""
    store, ring, now = Store(restarts=0), {"00" * 16: b"old"}, "00" * 16

    def call(method: str, request: Wire) -> Wire:
        nonlocal now
        if method == "seal_key":
            return SealKey(key=store.inbox.public, locked=False)
        assert isinstance(request, Protect)
        if done:
            now = request.key
        if reply == "lost" or not done:
            raise Refusal(Reason.CONNECTION_LOST, "the store went away")
        return Empty()

    monkeypatch.setattr(store, "call", call)
    monkeypatch.setattr(keepers, "keyring_put", lambda n, k: ring.update({n: k.reveal()}))
    monkeypatch.setattr(keepers, "keyring_get", lambda n: Secret(ring[n]))
    monkeypatch.setattr(keepers, "keyring_forget", ring.pop)
    monkeypatch.setattr(verbs_of_secrets, "_custody", lambda: replace(custody("keyring"), key=now))
    out = Render("secret protect", json=False, stdout=io.StringIO(), stderr=io.StringIO())
    if reply == "told" and done:
        verbs_of_secrets._protect_by_keeper(out, cast(Client, store), "keyring")
    else:
        with pytest.raises(Refusal, match="went away"):
            verbs_of_secrets._protect_by_keeper(out, cast(Client, store), "keyring")
    assert list(ring) == [now]
    assert (now == "00" * 16) == (not done)


def test_a_keyring_that_gives_back_another_key_is_not_relied_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store(restarts=0)
    monkeypatch.setattr(keepers, "keyring_put", lambda n, k: None)
    monkeypatch.setattr(keepers, "keyring_get", lambda n: Secret(b"x" * 32))
    monkeypatch.setattr(verbs_of_secrets, "_custody", lambda: custody("keyring"))
    out = Render("secret protect", json=False, stdout=io.StringIO(), stderr=io.StringIO())
    with pytest.raises(Failure, match="gave back another key"):
        verbs_of_secrets._protect_by_keeper(out, cast(Client, store), "keyring")
    assert store.calls == []


# ------------------------------------------------------------------------- what goes wrong


def test_a_store_that_is_damaged_is_named_by_every_verb() -> None:
    live = Live()
    try:
        live.run("secret", "set", "kept", stdin="v")
        live.run("daemon", "--stop")
        database = live.paths.data("store") / "credentials.db"
        os.truncate(database, 3000)
        for verb in (("list",), ("set", "kept"), ("rm", "kept"), ("protect", "key-file")):
            error = live.run("secret", *verb, "--json", stdin="v").error
            assert (error["exit"], error["kind"]) == (1, "tampered")
            assert str(database) in error["message"]
    finally:
        live.close()


def test_values_are_stored_while_the_store_is_killed_again_and_again(live: Live) -> None:
    """Whatever is acknowledged is there; and nothing that a kill can do makes `set` lie."""
    version = live.run("secret", "set", "hammered", "--json", stdin="0").result["version"]
    for number in range(3):  # more, and the supervisor would leave it down
        for pid in live.inner("store"):
            os.kill(pid, signal.SIGKILL)
        ran = live.run("secret", "set", "hammered", "--json", stdin=f"{number}")
        assert ran.result["version"] > version, ran
        version = ran.result["version"]
    until("the store has its rest", lambda: live.service("store")["ready"])
