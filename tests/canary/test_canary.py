"""A secret that was stored is nowhere but in the store, sealed, whatever was done since.

Every verb and every way to fail is driven with a canary in the store, in a hand that types
the wrong thing, and in requests that are refused. Then every file of the account, every
output and every process is searched.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import cli, toml
from support.canary import Canary, Found
from support.creds import stand_in
from support.live import Live
from support.tty import Terminal
from support.until import until

from agent_box.bus import keys
from agent_box.bus.client import Client
from agent_box.bus.errors import Refusal
from agent_box.bus.schema import Empty, Wire
from agent_box.cli import verbs
from agent_box.process.secret import Secret
from agent_box.store import rules, seal
from agent_box.store.contract import (
    CONTRACT,
    Name,
    Protect,
    Put,
    Reveal,
    Revealed,
    Sealed,
    SealKey,
    Unlock,
)

pytestmark = [pytest.mark.timeout(900)]

EVERYWHERE = [Path("/tmp"), Path("/var/tmp"), Path("/dev/shm")]

# How each built verb is run. One that is not here and not unbuilt fails the test below.
RUNS: dict[str, list[list[str]]] = {
    "create": [["web1"], ["web2", "--profile", "default", "--cpus", "1", "--memory", "512M"]],
    "list": [[]],
    "inspect": [["web1"]],
    "logs": [["web1"], ["--verify"], ["--head"]],
    "start": [["web1"]],
    "stop": [["web1"], ["web1", "--grace", "1"]],
    "pause": [["web1"]],
    "resume": [["web1"]],
    "delete": [["web2"], ["web2", "--force"]],
    "image pull": [["127.0.0.1:1/nobody/listens@sha256:" + "0" * 64]],
    "image build": [["no-such-variant"]],
    "image list": [[]],
    "image verify": [[], ["no-such-variant"]],
    "image gc": [[]],
    "policy show": [["web1"]],
    "policy set": [["web1", "default"], ["web1", "--allow", "example.com"], ["web1", "--reset"]],
    "policy check": [["web1", "example.com"], ["web1", "example.com:80"]],
    "forward": [["web1", "--list"], ["web1", "0:80"], ["web1", "--remove", "80"]],
    "capture": [["web1", "--count", "1"], ["web1", "--filter", "nothing"]],
    "secret list": [[]],
    "secret rm": [["nothing-of-that-name"]],
    "secret set": [[]],  # below, in every way
    "secret unlock": [[]],
    "secret protect": [["key-file"], ["keyring"]],
    "doctor": [[], ["--strict"]],
    "service list": [[]],
    "service inspect": [["store"], ["broker"]],
    "service logs": [["store"], ["registry", "--tail", "5"], ["daemon"]],
    "service restart": [["broker"]],
    "setup": [["--system"]],  # for root alone: refused
    "uninstall": [["--system"]],
    "usage": [[], ["web1"]],
    "demo config": [[]],
    "completion": [["bash"]],
    "attach": [["web1", "--list"], ["web1"], ["web1", "--shell"]],
    "exec": [["web1", "true"]],
    "run": [["web1", "--prompt", "hello"], ["web1", "--follow"], ["web1", "--list"]],
    "daemon": [[]],  # one runs, so it says no; --stop comes last
}


class Scene:
    """A whole agent-box with a canary in its store, and all that was ever printed."""

    def __init__(self) -> None:
        self.live = Live()
        self.canary = Canary()
        self.phrase = Canary()
        self.both = self.canary.and_also(self.phrase)
        self.printed: list[tuple[str, bytes]] = []
        self.clients: list[Client] = []
        self.began_ns = time.time_ns() - 2_000_000_000  # clocks of file systems are coarse

        (self.live.home / "tmp").mkdir(mode=0o700)
        self.live.env["TMPDIR"] = str(self.live.home / "tmp")

    def found_in_files(self) -> list[Found]:
        """In what lies below our home, our directory for temporary files included, and at
        the top of the directories that are everybody's."""
        return [
            *self.both.in_files([self.live.home]),
            *self.both.in_files(EVERYWHERE, since_ns=self.began_ns, deep=False),
        ]

    def found_anywhere(self) -> list[Found]:
        """In whatever was written since the canaries exist, by any process of the account."""
        return self.both.in_files(EVERYWHERE, since_ns=self.began_ns)

    def verb(self, *args: str, stdin: bytes = b"", **env: str) -> cli.Ran:
        ran = cli.run(*args, env=self.live.env | env, stdin=stdin)
        self.printed.append((" ".join(args)[:60], (ran.out + ran.err).encode()))
        return ran

    def client(self, role: str) -> Client:
        paths = self.live.paths
        client = Client(
            role,
            "store",
            sock=paths.sock("store"),
            secret=keys.load_secret(paths.keys(role)),
            server_key=keys.load_public(paths.public_keys, "store"),
            contract=CONTRACT,
        )
        self.clients.append(client)
        return client

    def refused(self, client: Client, method: str, request: Wire) -> None:
        try:
            client.call(method, request)
        except Refusal as refusal:
            said = repr(refusal) + refusal.message + str(refusal.facts)
            self.printed.append((f"{method} refused", said.encode()))
        else:
            raise AssertionError(f"{method} was not refused")

    def check(self) -> None:
        """Nowhere."""
        for what, text in self.printed:
            assert self.both.within(text) == [], f"printed by {what}"
        assert self.both.in_processes() == []
        assert self.found_in_files() == []
        assert len(list(self.live.paths.state.rglob("*"))) > 20, "the search looked at nothing"


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    scene = Scene()
    scene.live.up()
    assert scene.verb("secret", "set", "canary", stdin=scene.canary.value).exit == 0
    yield scene
    for client in scene.clients:
        client.close()
    scene.live.close()


def test_the_canary_is_in_the_store_and_comes_out_for_the_broker(scene: Scene) -> None:
    inbox = seal.Inbox()
    revealed = scene.client("broker").call("reveal", Reveal(name="canary", to=inbox.public))
    assert isinstance(revealed, Revealed)
    assert inbox.open(revealed.box).reveal() == scene.canary.value
    assert scene.canary.within(revealed.box) == []
    scene.check()


def test_each_verb_is_run_here(scene: Scene) -> None:
    built = {verb.name for verb in verbs.VERBS if verb.body}
    assert built - set(RUNS) == set(), "say in RUNS how the canary suite runs these"


def _words(verb: verbs.Verb) -> list[str]:
    """Arguments with which an unbuilt verb gets as far as saying so."""
    samples = {"NAME": "web1", "NAME[:/path]": "web1", "CMD": "true", "TOOL": "gh"}
    return [samples.get(arg.metavar, "1") for arg in verb.args if arg.required and not arg.flag]


def test_no_verb_shows_it_or_leaves_it_anywhere(scene: Scene) -> None:
    for verb in verbs.VERBS:
        for words in RUNS.get(verb.name, [_words(verb)]):
            for flags in ([], ["--json"]):
                separator = ["--"] if verb.name == "exec" else []
                scene.verb(*verb.name.split(), *flags, *separator, *words)
    scene.check()


def test_no_mistake_in_storing_it_shows_it_or_leaves_it_anywhere(scene: Scene) -> None:
    value = scene.canary.value
    for bad in (value + b"\nmore", value + b"\0", b"\x1b" + value, value * 2000, value + b"\r\n"):
        for flags in ([], ["--json"]):
            assert scene.verb("secret", "set", *flags, "bad", stdin=bad).exit == 64
    for name in ("Bad", "-", "a/b", "x" * 65):
        assert scene.verb("secret", "set", "--", name, stdin=value).exit == 64
    # in the wrong place on the command line
    text = value.decode()
    for args in (["bad", text], [text], ["--value", text], [f"--value={text}", "bad"]):
        assert scene.verb("secret", "set", *args).exit == 64
    assert scene.verb("secret", "rm", text).exit == 64
    scene.check()


@pytest.mark.parametrize(
    "how",
    [
        ">&-",
        "2>&-",
        ">/dev/full",
        "2>/dev/full",
        "| :",
        "& kill $!; wait",
        "& kill -INT $!; wait",
        "& kill -9 $!; wait",
    ],
)
def test_no_broken_output_and_no_signal_shows_it(scene: Scene, how: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" secret set canary --json {how}', str(cli.BINARY)],
        env=scene.live.env | {"AGENT_BOX_TRACEBACK": "1"},
        input=scene.canary.value,
        capture_output=True,
        check=False,
        cwd=tmp_path,
    )
    scene.printed.append((how, done.stdout + done.stderr))
    scene.check()


def test_a_hand_that_types_it_does_not_show_it(scene: Scene) -> None:
    endings: list[Callable[[Terminal], None]] = [
        lambda t: t.type(b"\n"),
        lambda t: t.type(b"\x03"),
        lambda t: t.type(b"\nmore\n"),
        lambda t: os.kill(t.pid, signal.SIGTERM),
        lambda t: t.type(b"\x1c"),
    ]
    for end in endings:
        with Terminal([cli.BINARY, "secret", "set", "canary"], scene.live.env) as terminal:
            terminal.until(b"value of canary: ")
            until("echo is off", lambda t=terminal: not t.echoes)
            terminal.type(scene.canary.value)
            end(terminal)
            _, out, seen = terminal.end()
            scene.printed.append(("a terminal", out + seen))
    scene.check()


def test_no_refusal_of_a_config_that_it_was_pasted_into_shows_it(scene: Scene) -> None:
    value = scene.canary.value.decode()
    assert scene.verb("daemon", "--stop").exit == 0
    config = scene.live.home / "pasted.toml"
    for pasted in (
        {"kind": "header", "header": f"Authorization: Bearer {value}"},
        {"kind": "basic", "basic_user": f"user:{value}"},
        {"kind": "anthropic", "upstream": f"https://a.example/?key={value}"},
        {"kind": value},
    ):
        binding = {"upstream": "https://a.example", "credential": "a"} | pasted
        binding["routes"] = [{"path": "/", "match": "exact", "methods": ["GET"]}]  # type: ignore[assignment]
        config.write_text(toml.dumps({"version": 1, "bindings": {"a": binding}}))
        for verb in (["list"], ["doctor", "--json"]):
            ran = scene.verb(*verb, AGENT_BOX_CONFIG=str(config))
            assert "in [bindings.a]" in ran.out + ran.err
    config.unlink()
    scene.check()
    scene.live.up()


def test_no_refusal_of_the_store_shows_it(scene: Scene) -> None:
    operator, broker = scene.client("operator"), scene.client("broker")
    key = operator.call("seal_key", Empty())
    assert isinstance(key, SealKey)

    def sealed(value: bytes, to: bytes = key.key) -> Sealed:
        return Sealed(to=to, box=seal.box(Secret(value), to))

    value = scene.canary.value
    good = sealed(value)
    for name, asked in (
        ("bad", Sealed(to=good.to, box=good.box[:-1])),
        ("bad", Sealed(to=good.to, box=value)),
        ("bad", Sealed(to=value[:32], box=good.box)),
        ("bad", sealed(value, seal.Inbox().public)),
        ("bad", sealed(value + b"\n")),
        ("bad", sealed(value * (rules.VALUE_MAX // len(value) + 1))),
        (value.decode(), good),
        ("x" * 65, good),
    ):
        scene.refused(operator, "put", Put(name=name, value=asked))
    inbox = seal.Inbox()
    scene.refused(operator, "reveal", Reveal(name="canary", to=inbox.public))
    scene.refused(broker, "reveal", Reveal(name="canary", to=bytes(32)))
    scene.refused(broker, "reveal", Reveal(name="canary", to=value[:31]))
    scene.refused(broker, "reveal", Reveal(name=value.decode(), to=inbox.public))
    scene.refused(broker, "put", Put(name="canary", value=good))
    scene.refused(operator, "remove", Name(name=value.decode()))
    scene.refused(operator, "protect", Protect(protection="keyring", key="", secret=good, blob=b""))
    scene.refused(
        operator,
        "protect",
        Protect(protection="passphrase", key="", secret=sealed(value + b"\n"), blob=b""),
    )
    scene.refused(
        operator,
        "protect",
        Protect(protection="systemd-creds", key=value.decode(), secret=good, blob=value),
    )
    scene.check()


def test_no_protection_and_no_failure_of_one_shows_it(scene: Scene, tmp_path: Path) -> None:
    phrase = scene.phrase.value
    with Terminal([cli.BINARY, "secret", "protect", "passphrase"], scene.live.env) as terminal:
        terminal.until(b"new passphrase")
        until("echo is off", lambda: not terminal.echoes)
        terminal.type(phrase + b"\n")
        terminal.until(b"once more")
        until("echo is off", lambda: not terminal.echoes)
        terminal.type(phrase + b"x\n")
        _, out, seen = terminal.end()
        scene.printed.append(("protect at a terminal", out + seen))
    assert scene.verb("secret", "protect", "passphrase", stdin=phrase + b"\nx").exit == 64
    assert scene.verb("secret", "protect", "passphrase", stdin=phrase * 100).exit == 64
    assert scene.verb("secret", "protect", "passphrase", "--json", stdin=phrase).exit == 0
    scene.check()
    scene.verb("service", "restart", "store")
    for verb in (["secret", "list"], ["secret", "rm", "canary"], ["doctor"], ["service", "list"]):
        scene.verb(*verb)
        scene.verb(*verb, "--json")
    assert scene.verb("secret", "set", "canary", stdin=scene.canary.value).exit == 4
    assert scene.verb("secret", "unlock", stdin=scene.canary.value).exit == 1
    operator = scene.client("operator")
    key = operator.call("seal_key", Empty())
    assert isinstance(key, SealKey)
    guess = Sealed(to=key.key, box=seal.box(Secret(phrase + b"\n"), key.key))
    scene.refused(operator, "unlock", Unlock(secret=guess))
    assert scene.verb("secret", "unlock", stdin=phrase).exit == 0
    path = f"{tmp_path}:{scene.live.env['PATH']}"
    stand_in(tmp_path, body="exit 1")
    assert scene.verb("secret", "protect", "systemd-creds", PATH=path).exit == 1
    stand_in(tmp_path)
    assert scene.verb("secret", "protect", "systemd-creds", PATH=path).exit == 0
    scene.check()
    assert scene.verb("secret", "protect", "key-file").exit == 0
    scene.check()


_DEFECT = """
import sys
from agent_box.store import seal
def defect(secret, to):
    value = secret.reveal()
    kept_in_a_local_variable = [value, value.decode()]
    raise {error}
seal.box = defect
from agent_box.cli.main import main
sys.argv = ["agent-box", "secret", "set", "canary", *sys.argv[1:]]
sys.exit(main())
"""


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError(f'it was {value!r}')",
        "ValueError(value)",
        "UnicodeDecodeError('utf-8', value, 0, 1, 'reason')",
        "KeyboardInterrupt(value)",
        "MemoryError(value)",
    ],
)
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_defect_of_the_command_line_shows_its_place_and_not_its_values(
    scene: Scene, error: str, flags: list[str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-c", _DEFECT.replace("{error}", error), *flags],
        env=scene.live.env | {"AGENT_BOX_TRACEBACK": "1"},
        input=scene.canary.value,
        capture_output=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert done.stderr
    scene.printed.append((error, done.stdout + done.stderr))
    scene.check()


def test_no_kill_of_any_process_leaves_it_anywhere(scene: Scene) -> None:
    """While values are being stored: the store, then the whole daemon."""
    for victim in ("store", "broker", "registry"):
        writer = subprocess.Popen(
            [cli.BINARY, "secret", "set", "canary"],
            env=scene.live.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write(scene.canary.value)
        writer.stdin.close()
        for pid in scene.live.inner(victim):
            os.kill(pid, signal.SIGKILL)
        scene.printed.append((f"set while {victim} was killed", writer.stdout.read()))
        writer.stdout.close()
        writer.wait(60)
    os.kill(scene.live.daemon_pid(), signal.SIGKILL)
    until("everything has died with it", lambda: not scene.live.pids())
    scene.check()
    assert scene.verb("secret", "set", "canary", stdin=scene.canary.value).exit == 0
    scene.live.up()
    scene.check()


def test_no_damage_to_the_store_shows_it(scene: Scene) -> None:
    """Last, because it does not mend what it breaks."""
    database = scene.live.paths.data("store") / "credentials.db"
    key = next(scene.live.paths.keys("store").glob("master-*.key"))
    whole, right = database.stat().st_size, key.read_bytes()

    def wrong_key() -> None:
        key.write_bytes(bytes(32))

    def open_key() -> None:
        key.write_bytes(right)
        key.chmod(0o644)

    def torn() -> None:
        key.chmod(0o600)
        os.truncate(database, whole // 2)

    for harm in (wrong_key, open_key, torn):
        scene.verb("daemon", "--stop")
        harm()
        for verb in (["list"], ["set", "canary"], ["rm", "canary"], ["protect", "key-file"]):
            scene.verb("secret", *verb, "--json", stdin=scene.canary.value)
        broker = scene.client("broker")
        try:
            broker.call("reveal", Reveal(name="canary", to=seal.Inbox().public))
        except Refusal as refusal:
            scene.printed.append(("reveal", refusal.message.encode()))
        scene.check()
    assert scene.verb("daemon", "--stop").exit == 0
    scene.check()


def test_in_the_end_it_is_nowhere_and_the_search_would_have_found_it(scene: Scene) -> None:
    assert scene.found_anywhere() == []
    planted = scene.live.paths.log("store")
    with planted.open("ab") as log:
        log.write(b"%d {value: %s}\n" % (time.time_ns(), scene.canary.value))
    assert {f.where for f in scene.found_in_files()} == {str(planted)}
