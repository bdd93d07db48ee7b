"""Every verb, by the real program: with `--json` exactly the documented shape, else no JSON.

What a verb *means* is tested beside it. Here each is run once for each way in which it can
answer, and whatever it prints is held to the schema files. A verb that is added to the table
and not to this list fails the build.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from support import registries
from support.cli import SCHEMAS, Ran
from support.live import Live
from support.until import until

from agent_box.cli import verbs
from agent_box.cli.demo import EXAMPLE

# Of each built verb: the command lines, what is piped in, and the exit code. In this order,
# on one agent-box with the instance web1, which no engine answers for.
LINES: list[tuple[str, str, int]] = [
    ("list", "", 0),
    ("inspect web1", "", 0),
    ("inspect gone", "", 3),
    ("create web1", "", 5),
    ("create new", "", 3),
    ("create new --memory 1024G", "", 64),
    ("create new --profile gone", "", 3),
    ("start web1", "", 12),
    ("start gone", "", 3),
    ("stop gone --grace 1", "", 3),
    ("pause web1", "", 12),
    ("resume web1", "", 12),
    ("delete web1", "", 12),
    ("logs", "", 0),
    ("logs web1 --tail 1", "", 0),
    ("logs gone", "", 3),
    ("logs --verify", "", 0),
    ("logs --head", "", 0),
    ("policy show web1", "", 0),
    ("policy show gone", "", 3),
    ("policy set web1 --allow *.example.com:443,8000-8001", "", 0),
    ("policy set web1 --mode open", "", 64),
    ("policy set web1 --file /nonexistent", "", 64),
    ("policy check web1 a.example.com", "", 0),
    ("policy check web1 example.net:22", "", 1),
    ("policy check gone example.net", "", 3),
    ("forward web1 --list", "", 12),
    ("forward web1 0:80", "", 12),
    ("forward gone --list", "", 3),
    ("capture web1 --count 1", "", 12),
    ("capture web1 --filter ether", "", 64),
    ("secret set k", "value", 0),
    ("secret set k", "", 64),
    ("secret list", "", 0),
    ("secret unlock", "", 0),
    ("secret protect key-file", "", 0),
    ("secret rm k", "", 0),
    ("secret rm k", "", 3),
    ("image list", "", 0),
    ("image verify", "", 0),
    ("image verify gone", "", 3),
    ("image build gone", "", 3),
    ("image build --harness gone", "", 3),
    ("image pull", "", 3),
    ("image gc", "", 0),
    ("service list", "", 0),
    ("service inspect store", "", 0),
    ("service logs store", "", 0),
    ("service restart broker", "", 0),
    ("setup --system", "", 70),
    ("setup --no-pull", "", 0),
    ("uninstall", "", 4),
    ("uninstall --system", "", 70),
    ("doctor", "", 0),
    ("doctor --strict", "", 1),
    ("usage", "", 0),
    ("usage web1 --since 2d", "", 0),
    ("usage gone", "", 3),
    ("demo config", "", 0),
    ("completion fish", "", 0),
    ("attach web1 --list", "", 12),
    ("attach web1", "", 64),
    ("attach web1 --shell", "", 64),
    ("exec web1 true", "", 12),
    ("exec gone true", "", 3),
    ("run gone --prompt x", "", 3),
    ("run web1 --prompt x", "", 12),
    ("run web1 --follow", "", 12),
    ("run web1 --list", "", 0),
    ("run web1 --prompt -", "", 64),
    ("daemon", "", 2),
    ("daemon --stop", "", 0),
]


STREAMS = {verb.name for verb in verbs.VERBS if verb.body and verb.streams == "always"}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    made = Live()
    config = made.home / "config/agent-box/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(EXAMPLE)
    try:
        registries.seed(made.paths.data("registry") / "registry.db", "web1")
        made.up()
        yield made
    finally:
        made.close()


def verb_of(line: str) -> verbs.Verb:
    one, two = (*line.split(), "")[:2]
    return verbs.BY_NAME.get(one) or verbs.BY_NAME[f"{one} {two}"]


def test_every_built_verb_is_here_and_has_its_schema() -> None:
    built = {verb.name for verb in verbs.VERBS if verb.body}
    assert {verb_of(line).name for line, _, _ in LINES} == built
    files = {path.stem.replace("-", " ") for path in (SCHEMAS / "results").iterdir()}
    assert files == built - STREAMS
    files = {path.stem.replace("-", " ") for path in (SCHEMAS / "lines").iterdir()}
    assert files == {verb.name for verb in verbs.VERBS if verb.body and verb.streams}


@pytest.mark.parametrize("number", range(len(LINES)), ids=[f"{x[0]}: {x[2]}" for x in LINES])
def test_the_object(live: Live, number: int) -> None:
    """`object` checks shape, agreement with the exit code, and the verb's own result."""
    line, piped, code = LINES[number]
    ran = live.run(*line.split(), "--json", stdin=piped)
    assert ran.exit == code
    if verb_of(line).name in STREAMS:
        end = ran.lines[-1]
        assert code == 0 or f"agent-box: {end['error']['message']}\n" in ran.err
        return
    assert ran.object["verb"] == verb_of(line).name
    assert ran.object["ok"] == (code == 0)
    if code:
        assert f"agent-box: {ran.error['message']}\n" in ran.err


@pytest.mark.parametrize(
    "line",
    [
        line
        for line in LINES  # the log of a service is JSON itself
        if not line[0].startswith(("daemon", "service restart", "service logs", "secret"))
    ],
    ids=lambda x: f"{x[0]}: {x[2]}",
)
def test_the_text(live: Live, line: tuple[str, str, int]) -> None:
    words, piped, code = line
    ran = live.run(*words.split(), stdin=piped)
    assert ran.exit == code
    for text in (*ran.out.splitlines(), *ran.err.splitlines()):
        with pytest.raises(ValueError, match=r"Expecting|Extra data"):
            assert isinstance(json.loads(text), dict)
            pytest.fail(f"JSON where a person reads: {text}")
    if code == 0:
        assert ran.out
        assert "agent-box: " not in ran.err.replace("agent-box: warning: ", "")


def test_live_names_are_completed(live: Live) -> None:
    """A shell waits half a second and no more, so a busy machine may need another try."""
    live.up()
    assert live.run("secret", "set", "key-1", stdin="value").exit == 0
    for words, line in (
        (["inspect", "w"], "web1\tunknown, rust\n"),
        (["secret", "rm", "k"], "key-1\n"),
    ):
        until(line, lambda: live.run("--complete", *words).out == line)  # noqa: B023


@pytest.mark.parametrize("line", ["logs --follow", "service logs registry --follow"])
def test_a_stream(live: Live, line: str) -> None:
    """One object for each line as it comes; after Ctrl-C the end line, with the code."""
    live.up()
    process = live.popen(*line.split(), "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    ran = Ran(tuple(line.split()), process.returncode, first + rest, err)
    assert ran.exit == 130
    end: dict[str, Any] = ran.lines[-1]
    assert end == {
        "type": "end",
        "ok": False,
        "exit": 130,
        "error": {"exit": 130, "kind": "interrupted", "message": "interrupted"},
    }
    assert err.endswith("agent-box: interrupted\n")
