"""Every command line of the specification parses as it is written, and no bad one does."""

from __future__ import annotations

import inspect
import io
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.cli import main, values, verbs
from agent_box.cli.render import Render, Usage
from agent_box.process.paths import SERVICES

BUILT = [verb for verb in verbs.VERBS if verb.body]
MISSING = [verb for verb in verbs.VERBS if not verb.body]


def parsed(line: str | list[str]) -> tuple[verbs.Verb, dict[str, Any]]:
    """What the body of the verb would get."""
    words = line.split() if isinstance(line, str) else line
    out = Render("", json=False, stdout=io.StringIO(), stderr=io.StringIO())
    verb, rest = main._find(words, out)
    assert verb is not None
    return verb, main._parse(verb, rest)


def refusal(line: str | list[str]) -> str:
    with pytest.raises(Usage) as caught:
        parsed(line)
    assert caught.value.exit == 64
    assert caught.value.kind == "usage"
    return caught.value.message


# ----------------------------------------------------------------------- the table

SPECIFIED = """
setup uninstall doctor image-pull image-list image-verify image-gc create list inspect start stop
pause resume delete attach run forward logs policy-show policy-set secret-set secret-list
secret-rm daemon hibernate
exec service-list service-restart service-logs service-inspect policy-check image-build capture
secret-import secret-unlock secret-protect usage demo-config completion
"""


def test_the_table_has_every_verb_once() -> None:
    names = [verb.name for verb in verbs.VERBS]
    assert len(names) == len(set(names))
    assert set(names) == {name.replace("-", " ", 1) for name in SPECIFIED.split()}


@pytest.mark.parametrize("verb", verbs.VERBS, ids=lambda v: v.name)
def test_a_verb_is_built_or_says_what_is_missing(verb: verbs.Verb) -> None:
    assert bool(verb.body) != bool(verb.entry)
    assert len(verb.summary) <= 60
    assert verb.streams in ("", "always", "follow")
    dests = [arg.dest for arg in verb.args]
    assert len(dests) == len(set(dests))
    assert "json" not in dests


@pytest.mark.parametrize("verb", BUILT, ids=lambda v: v.name)
def test_a_body_takes_what_the_table_promises(verb: verbs.Verb) -> None:
    module, _, function = verb.body.partition(":")
    body = getattr(import_module(f"agent_box.cli.{module}"), function)
    first, *rest = inspect.signature(body).parameters.values()
    assert first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert {p.name for p in rest} == {arg.dest for arg in verb.args}
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in rest)


def test_the_services_are_those_of_the_house() -> None:
    assert verbs.SERVICES == SERVICES


# ------------------------------------------------------------------ what is written

NONE: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("line", "given"),
    [
        # the table of verbs
        ("setup", {"system": False, "user": None, "no_pull": False, "no_unit": False}),
        ("setup --system --user joe", {"system": True, "user": "joe"}),
        ("setup --no-pull", {"no_pull": True}),
        ("setup --no-unit", {"no_unit": True}),
        ("uninstall", {"system": False, "purge": False, "delete_instances": False}),
        ("uninstall --purge --delete-instances", {"purge": True, "delete_instances": True}),
        ("uninstall --system", {"system": True}),
        ("doctor", {"strict": False}),
        ("doctor --strict --json", {"strict": True}),
        ("image pull", {"sources": []}),
        ("image pull base rust", {"sources": [("base", None), ("rust", None)]}),
        (
            f"image pull 127.0.0.1:5000/a/b@sha256:{'0' * 64}",
            {"sources": [(None, ("127.0.0.1", 5000, "a/b", "0" * 64))]},
        ),
        ("image list", NONE),
        ("image verify rust", {"variants": ["rust"]}),
        ("image gc", NONE),
        (
            "create work",
            {"name": "work", "profile": None, "cpus": None, "memory": None, "disk": None},
        ),
        (
            "create work --profile rust --cpus 4 --memory 8G --disk 30G",
            {"profile": "rust", "cpus": 4, "memory": 8 << 30, "disk": 30 << 30},
        ),
        ("create --memory=512M work", {"name": "work", "memory": 512 << 20}),
        ("list", NONE),
        ("list --json", NONE),
        ("inspect work --json", {"name": "work"}),
        ("start work", {"name": "work", "no_hook": False}),
        ("start work --no-hook", {"no_hook": True}),
        ("stop work", {"grace": None}),
        ("stop work --grace 0", {"grace": 0}),
        ("pause work", {"name": "work"}),
        ("resume work", {"name": "work"}),
        ("delete work", {"force": False}),
        ("delete work --force", {"force": True}),
        (
            "attach work",
            {
                "target": values.Place("work", None),
                "shell": False,
                "user": "agent",
                "detach_keys": (0x10, 0x11),
                "terminal": None,
                "list": False,
                "env": [],
            },
        ),
        ("attach work:/srv/x --shell", {"target": ("work", "/srv/x"), "shell": True}),
        ("attach work --shell --env A=1", {"env": [("A", "1")]}),
        ("attach work --shell --user root", {"user": "root"}),
        ("attach work --detach-keys ctrl-],q", {"detach_keys": (0x1D, ord("q"))}),
        ("attach work --terminal 3", {"terminal": "3"}),
        ("attach work --list", {"list": True}),
        (
            ["run", "work", "--prompt", "fix the failing test"],
            {
                "target": ("work", None),
                "prompt": "fix the failing test",
                "timeout": None,
                "session": None,
                "start": False,
                "follow": False,
            },
        ),
        ("run work:/srv --prompt - --timeout 60 --session s-1 --start", {"prompt": "-"}),
        (["run", "work", "--prompt", "/review"], {"prompt": "/review"}),
        (["run", "work", "--prompt", "- a\n- b"], {"prompt": "- a\n- b"}),
        ("run work --follow", {"follow": True, "prompt": None}),
        ("forward work 8080:3000", {"forward": ("127.0.0.1", 8080, 3000), "public": False}),
        ("forward work 0:3000", {"forward": ("127.0.0.1", 0, 3000)}),
        ("forward work 127.0.0.2:1:2", {"forward": ("127.0.0.2", 1, 2)}),
        ("forward work [::1]:1:2", {"forward": ("::1", 1, 2)}),
        ("forward work 0.0.0.0:80:80 --public", {"public": True}),
        ("forward work [::]:80:80 --public", {"forward": ("::", 80, 80)}),
        ("forward work --list", {"list": True, "forward": None, "remove": None}),
        ("forward work --remove 8080", {"remove": 8080}),
        (
            "logs work",
            {
                "name": "work",
                "follow": False,
                "since": None,
                "tail": None,
                "source": None,
                "verify": False,
                "head": False,
            },
        ),
        ("logs work --follow --tail 5 --source guest-channel", {"follow": True, "tail": 5}),
        ("logs work --since 1970-01-01T00:00:01Z", {"since": 1000}),
        ("logs work --since 1970-01-01T01:00:00.5+01:00", {"since": 500}),
        ("logs", {"name": None, "follow": False}),
        ("logs --verify", {"name": None, "verify": True}),
        ("logs work --verify", {"name": "work", "verify": True}),
        ("logs --head", {"head": True}),
        ("policy show work", {"name": "work"}),
        ("policy set work dev", {"policy": "dev", "mode": None, "allow": [], "reset": False}),
        ("policy set work --mode open --allow-open", {"mode": "open", "allow_open": True}),
        ("policy set work --file p.toml", {"file": "p.toml"}),
        ("policy set work --reset", {"reset": True}),
        ("secret set anthropic-api-key", {"name": "anthropic-api-key"}),
        ("secret list", NONE),
        ("secret rm github-token", {"name": "github-token"}),
        ("daemon", {"stop": False}),
        ("hibernate work", {"name": "work"}),
        # the later ones
        (
            "exec work -- sh -c exit",
            {
                "target": ("work", None),
                "command": [b"sh", b"-c", b"exit"],
                "user": "agent",
                "env": [],
                "timeout": None,
                "tty": False,
            },
        ),
        (
            ["exec", "work:/srv", "--user", "root", "--env", "A=1", "--env", "B=x=y\nz",
             "--timeout", "9", "--tty", "--", "cmd", "--json", "--", "", "-x"],
            {
                "command": [b"cmd", b"--json", b"--", b"", b"-x"],
                "env": [("A", "1"), ("B", "x=y\nz")],
                "tty": True,
            },
        ),
        ("exec work true", {"command": [b"true"]}),
        (["exec", "work", "\udcff"], {"command": [b"\xff"]}),
        ("service list", NONE),
        ("service restart store", {"name": "store"}),
        ("service restart all", {"name": "all"}),
        ("service logs netstack", {"name": "netstack", "follow": False, "tail": None}),
        ("service logs netstack --follow --tail 3", {"follow": True, "tail": 3}),
        ("service inspect broker --json", {"name": "broker"}),
        ("image build", {"variants": [], "harness": None, "mirror": None, "guest": False}),
        ("image build rust --harness codex", {"variants": ["rust"], "harness": "codex"}),
        ("image build base node --guest", {"variants": ["base", "node"], "guest": True}),
        ("capture work", {"write": None, "filter": None, "count": None}),
        (
            ["capture", "work", "-w", "x.pcap", "--filter", "tcp port 80", "--count", "5"],
            {"write": "x.pcap", "filter": "tcp port 80", "count": 5},
        ),
        ("secret import claude", {"tool": "claude"}),
        ("secret unlock", NONE),
        ("secret protect systemd-creds", {"protection": "systemd-creds"}),
        ("usage", {"name": None, "since": None}),
        ("usage work --since 2026-11-01T00:00:00Z", {"name": "work"}),
        ("demo config", NONE),
        ("completion zsh", {"shell": "zsh"}),
    ],
)  # fmt: skip
def test_what_is_written_is_understood(line: str | list[str], given: dict[str, Any]) -> None:
    verb, got = parsed(line)
    assert set(got) == {arg.dest for arg in verb.args}
    assert {key: got[key] for key in given} == given


def test_rules_are_read_as_the_policy_reads_them() -> None:
    _, got = parsed("policy set work --allow *.Example.com:443,8000-8001 --remove 192.0.2.0/24/udp")
    assert [str(t) for t in got["allow"]] == ["*.example.com:443,8000-8001/tcp"]
    assert got["remove"] == ["192.0.2.0/24/udp"]  # no port: whichever the rule has


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("example.com", "example.com:443/tcp"),
        ("Example.COM.:80", "example.com:80/tcp"),
        ("192.0.2.1", "192.0.2.1:443/tcp"),
        ("[2001:db8::1]:53/udp", "[2001:db8::1]:53/udp"),
    ],
)
def test_a_destination(word: str, text: str) -> None:
    _, got = parsed(["policy", "check", "work", word])
    assert str(got["destination"]) == text


def test_so_long_ago() -> None:
    import time

    before = time.time() * 1000
    for word, ms in (("90s", 90_000), ("15m", 900_000), ("2h", 7_200_000), ("7d", 604_800_000)):
        _, got = parsed(["logs", "work", "--since", word])
        assert before - ms - 1 <= got["since"] <= time.time() * 1000 - ms
    assert parsed("logs work --since 99999d")[1]["since"] == 0


# -------------------------------------------------------------------- what is refused

NAMES = [
    "",
    "-",
    "-a",
    "a-",
    "A",
    "a_b",
    "a.b",
    "a b",
    "../a",
    "a/b",
    "é",
    "a\n",
    "\udc80",
    "a" * 64,
]


@pytest.mark.parametrize("verb", ["create", "inspect", "start", "stop", "delete", "policy show"])
@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith("-")])
def test_a_bad_name(verb: str, name: str) -> None:
    said = refusal([*verb.split(), name])
    assert said.startswith(f"{verb}: NAME must be 1 to 63 lowercase letters, digits and hyphens")


@pytest.mark.parametrize(
    ("line", "start"),
    [
        ("", "which verb?"),
        ("crate work", "unknown verb 'crate'; did you mean 'create'?"),
        ("polisy", "unknown verb 'polisy'; did you mean 'policy'?"),
        ("--verbose", "unknown flag '--verbose'"),
        ("--json list", "--json goes after the verb"),
        ("policy", "policy: which of show, set, check?"),
        ("policy --json", "policy: which of show, set, check?"),
        ("policy chek", "unknown verb 'policy chek'; did you mean 'check'?"),
        ("policy list --help", "unknown verb 'policy list'"),
        ("list work", "list: it takes no arguments"),
        ("list --bogus", "list: No such option"),
        ("create", "create: NAME is missing"),
        ("create a b", "create: it takes NAME and no more"),
        ("create a --cpus", "create: Option '--cpus' requires an argument"),
        ("create a --force", "create: No such option"),
        ("create a --prof x", "create: No such option"),
        ("create a --json=1", "create: Option '--json' does not take a value"),
        ("create a --cpus 0", "create: --cpus must be an integer from 1 to 64, not '0'"),
        ("create a --cpus 1.5", "create: --cpus must be an integer from 1 to 64"),
        ("create a --cpus ١", "create: --cpus must be an integer from 1 to 64"),
        ("create a --cpus=-1", "create: --cpus must be an integer from 1 to 64, not '-1'"),
        ("create a --memory 10X", "create: --memory must be an integer and a unit, M or G"),
        ("create a --memory 0G", "create: --memory must be an integer and a unit"),
        ("create a --memory 1M", "create: --memory must be a size from 128M to 1024G, not '1M'"),
        ("create a --disk 1T", "create: --disk must be an integer and a unit"),
        ("create a --disk 8", "create: --disk must be an integer and a unit"),
        ("image pull base:latest", "image pull: IMAGE must be 1 to 63"),
        ("image pull h/r:latest", "image pull: IMAGE must be HOST[:PORT]/REPOSITORY@sha256:"),
        ("create a --profile A", "create: --profile must be 1 to 63"),
        ("stop a --grace -1", "stop: --grace must be an integer from 0 to 3600"),
        ("stop a --grace 1m", "stop: --grace must be an integer from 0 to 3600"),
        ("attach a:b", "attach: NAME[:/path] must be NAME or NAME:/path with an absolute path"),
        ("attach a:", "attach: NAME[:/path] must be NAME or NAME:/path"),
        ("attach A:/b", "attach: NAME[:/path] must be 1 to 63"),
        ("attach a --user joe", "attach: --user must be one of agent, root, not 'joe'"),
        ("attach a --user root", "attach: --user root needs --shell"),
        ("attach a --detach-keys ctrl-1", "attach: --detach-keys must be keys joined by commas"),
        ("attach a --detach-keys ,", "attach: --detach-keys must be keys joined by commas"),
        ("attach a --list --shell", "attach: --list stands alone"),
        ("attach a --env A=1", "attach: --env goes with --shell"),
        ("attach a --terminal x1", "attach: --terminal must be the id of a terminal"),
        ("attach a --shell --terminal 1", "attach: --shell opens a new terminal"),
        ("exec a", "exec: CMD is missing"),
        ("exec a --", "exec: CMD is missing"),
        ("exec a ls -l", "exec: No such option"),
        ("exec a --env 1=2 -- x", "exec: --env must be NAME=VALUE, not '1=2'"),
        ("exec a --timeout 0 -- x", "exec: --timeout must be an integer from 1"),
        ("run a", "run: give one of --prompt TEXT, --follow and --list"),
        (["run", "a", "--prompt", ""], "run: --prompt must be text that is not empty"),
        (["run", "a", "--prompt", "\udcff"], "run: --prompt must be UTF-8 text"),
        ("run a --prompt x --follow", "run: give one of --prompt TEXT, --follow and --list"),
        ("run a --follow --start", "run: --follow takes neither --start nor --session"),
        ("run a --list --session x", "run: --list stands alone"),
        ("run a --prompt x --timeout 0", "run: --timeout must be an integer from 1"),
        ("forward a", "forward: give one of [ADDR:]HOSTPORT:GUESTPORT, --list and --remove"),
        ("forward a 1:2 --list", "forward: give one of"),
        ("forward a --remove 0", "forward: --remove must be an integer from 1 to 65535"),
        ("forward a --list --public", "forward: --public goes with"),
        ("forward a 0.0.0.0:1:2", "forward: 0.0.0.0 is not a loopback address; it needs --public"),
        ("forward a [::]:1:2", "forward: :: is not a loopback address"),
        ("forward a ::1:1:2", "forward: [ADDR:]HOSTPORT:GUESTPORT must be"),
        ("forward a 1", "forward: [ADDR:]HOSTPORT:GUESTPORT must be"),
        ("forward a 65536:1", "forward: [ADDR:]HOSTPORT:GUESTPORT must be"),
        ("forward a 1:0", "forward: [ADDR:]HOSTPORT:GUESTPORT must be"),
        ("forward a 1.2.3:1:2", "forward: [ADDR:]HOSTPORT:GUESTPORT must be"),
        ("forward a 127.0.0.01:1:2", "forward: [ADDR:]HOSTPORT:GUESTPORT must be"),
        ("logs a --tail -1", "logs: --tail must be an integer from 0"),
        ("logs a --since yesterday", "logs: --since must be an RFC 3339 time such as"),
        ("logs a --since 2026-11-29", "logs: --since must be an RFC 3339 time such as"),
        ("logs a --since 2026-13-29T00:00:00Z", "logs: --since must be an RFC 3339 time"),
        ("logs a --since 2026-11-29T00:00:00", "logs: --since must be an RFC 3339 time"),
        ("logs a --source kage", "logs: --source must be one of host-observed"),
        ("logs --verify --head", "logs: give one of --verify and --head"),
        ("logs --verify --follow", "logs: --verify and --head look at the whole journal"),
        ("policy set a", "policy set: give one of POLICY, --file, --reset, or changes"),
        ("policy set a dev --reset", "policy set: give one of"),
        ("policy set a dev --mode deny", "policy set: give one of"),
        ("policy set a --mode closed", "policy set: --mode must be one of deny, allowlist, open"),
        ("policy set a --allow x..y", "policy set: --allow: 'x..y' has the invalid label ''"),
        ("policy set a --remove x..y", "policy set: --remove: 'x..y' has the invalid label ''"),
        ("policy set a --allow 127.1", "policy set: --allow: '127.1' is not an address"),
        ("policy check a *.x.com", "policy check: HOST[:PORT]: '*.x.com' has the invalid label"),
        ("policy check a x.com:0", "policy check: HOST[:PORT]: 'x.com:0': '0' is not a port"),
        ("policy check a x.com:1-2", "policy check: HOST[:PORT] must be one name or address"),
        ("policy check a 10.0.0.0/8", "policy check: HOST[:PORT] must be one name or address"),
        ("secret set", "secret set: NAME is missing"),
        ("secret set A", "secret set: NAME must be 1 to 64 lowercase"),
        ("secret set a sk-canary", "secret set: it takes NAME and no more"),
        ("secret import firefox", "secret import: TOOL must be one of claude, codex"),
        ("secret protect rot13", "secret protect: PROTECTION must be one of key-file"),
        ("service restart vmm", "service restart: NAME must be one of registry"),
        ("setup --user joe", "setup: --user goes with --system"),
        ("setup --system --no-pull", "setup: --no-pull is of the user part"),
        ("setup --system --no-unit", "setup: --no-unit is of the user part"),
        ("uninstall --system --purge", "uninstall: --purge and --delete-instances are of"),
        ("completion powershell", "completion: SHELL must be one of bash, zsh, fish"),
        ("capture a --count 0", "capture: --count must be an integer from 1"),
    ],
)
def test_what_is_wrong_is_refused_and_named(line: str | list[str], start: str) -> None:
    assert refusal(line).startswith(start)


def test_a_secret_on_the_command_line_is_not_repeated() -> None:
    """`secret set` never takes the value from argv; whoever tries gets no echo of it."""
    assert "canary" not in refusal("secret set a sk-canary")
    assert "canary" not in refusal("secret set SK-canary")
    assert "canary" not in refusal("secret rm SK-canary")


@given(st.lists(st.text(max_size=12), max_size=6))
def test_any_words_are_understood_or_refused(words: list[str]) -> None:
    out = Render("", json=False, stdout=io.StringIO(), stderr=io.StringIO())
    try:
        verb, rest = main._find(words, out)
        if verb is not None:
            main._parse(verb, rest)
    except Usage:
        pass


@given(st.sampled_from(verbs.VERBS), st.data())
def test_any_words_after_a_verb_are_understood_or_refused(
    verb: verbs.Verb, data: st.DataObject
) -> None:
    flags = [arg.flag for arg in verb.args if arg.flag]
    word = st.sampled_from([*flags, "--json", "--", "work", "work:/a", "1", "1:2"]) | st.text(
        max_size=8
    )
    words = data.draw(st.lists(word, max_size=6))
    try:
        main._parse(verb, words)
    except Usage as usage:
        assert usage.message.startswith(f"{verb.name}: ")
