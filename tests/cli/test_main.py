"""The frame of the command line, by the program that a user runs."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli import BINARY, Ran, environment, run
from support.until import until

from agent_box.bus.errors import MEANING, Reason, Refusal
from agent_box.cli import help as help_text
from agent_box.cli import main, verbs
from agent_box.cli.render import Failure, Render
from agent_box.config.errors import ConfigError
from agent_box.process.paths import PathsError

# ------------------------------------------------------------- help and version


def test_help_lists_every_verb_in_80_columns() -> None:
    ran = run("--help")
    assert ran.exit == 0
    assert ran.err == ""
    for verb in verbs.VERBS:
        line = re.search(rf"^  {verb.name} +{re.escape(verb.summary)}( \*)?$", ran.out, re.M)
        assert line, verb.name
        assert bool(line[1]) == (not verb.body)
    assert max(map(len, ran.out.splitlines())) <= 80


@pytest.mark.parametrize("verb", verbs.VERBS, ids=lambda v: v.name)
def test_a_verbs_help_tells_every_argument(verb: verbs.Verb) -> None:
    text = help_text.verb(verb)
    assert text.startswith(f"Usage: agent-box {verb.name} ")
    assert max(map(len, text.splitlines())) <= 80
    for arg in verb.args:
        shown = f"  {arg.flag or arg.metavar}"
        assert any(line.startswith(shown) for line in text.splitlines()), arg
    assert "--json" in text


@pytest.mark.parametrize("words", [["create"], ["policy", "set"], ["run"]])
@pytest.mark.parametrize("more", [["--help"], ["-h"], ["--json", "--help"], ["x", "--help"]])
def test_help_is_printed_and_nothing_runs(words: list[str], more: list[str]) -> None:
    ran = run(*words, *more)
    assert ran.exit == 0
    assert ran.out == help_text.verb(verbs.BY_NAME[" ".join(words)])


def test_help_of_a_group() -> None:
    ran = run("policy", "--help")
    assert ran.out.startswith("Usage: agent-box policy VERB")
    assert "policy check" in ran.out
    assert "secret" not in ran.out


@pytest.mark.parametrize("group", [None, *sorted(verbs.GROUPS)])
def test_the_star_is_explained_where_there_is_one(group: str | None) -> None:
    text = help_text.overview(group)
    starred = any(line.endswith(" *") for line in text.splitlines())
    assert ("* not built yet" in text) == starred


def test_version_tells_the_commit() -> None:
    ran = run("--version")
    assert re.fullmatch(r"agent-box \d+\.\d+\.\d+ \(([0-9a-f]{12}|unknown)\)\n", ran.out)
    assert ran.exit == 0


# --------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("words", "verb"),
    [
        (["crate", "work"], "crate"),
        (["crate", "--x"], "crate"),
        (["policy"], "policy"),
        (["policy", "shw", "work"], "policy shw"),
        (["create", "a", "--bogus"], "create"),
        (["create"], "create"),
        (["create", "A"], "create"),
        (["policy", "set", "a"], "policy set"),
        (["--bogus"], ""),
        ([], ""),
        (["\x1b[2J"], "\\x1b[2J"),
        (["x" * 500], "x" * 64),
    ],
)
def test_a_mistake_is_64_with_one_line(words: list[str], verb: str) -> None:
    plain = run(*words)
    assert (plain.exit, plain.out) == (64, "")
    assert plain.err.count("\n") == 1
    told = run(*words, "--json")
    assert told.exit == 64
    if words:  # `--json` alone is a mistake of its own
        assert told.object["verb"] == verb
        assert told.err.count("\n") == 1
        assert told.error["kind"] == "usage"
        assert told.err == f"agent-box: {told.error['message']}\n" or "\\x1b" in told.err


def test_json_after_the_dashes_is_the_guests() -> None:
    ran = run("exec", "Work", "--", "x", "--json")
    assert ran.out == ""
    assert ran.exit == 64


UNBUILT: dict[str, list[str]] = {
    "run": ["work", "--prompt", "x"],
    "forward": ["work", "--list"],
    "secret import": ["gh"],
    "image pull": [],
    "image build": [],
    "image list": [],
    "image verify": [],
    "image gc": [],
    "setup": [],
    "uninstall": [],
}


@pytest.mark.parametrize("verb", [v for v in verbs.VERBS if not v.body], ids=lambda v: v.name)
def test_what_is_not_built_says_what_is_missing(verb: verbs.Verb, tmp_path: Path) -> None:
    env = environment(tmp_path)
    words = [*verb.name.split(), *UNBUILT.get(verb.name, ["work"])]
    ran = run(*words, "--json", env=env)
    assert ran.exit == 70
    assert ran.error == {
        "exit": 70,
        "kind": "not-implemented",
        "message": f"{verb.name} is not implemented yet",
        "entry": verb.entry,
    }
    assert run(*words, env=env).err == f"agent-box: {verb.name} is not implemented yet\n"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["run"]  # and nothing was started


def test_the_example_of_the_specification() -> None:
    ran = run("hibernate", "web1", "--json")
    assert ran.out == (
        '{"schema": 1, "verb": "hibernate", "ok": false, "error": {"exit": 70, '
        '"kind": "not-implemented", "message": "hibernate is not implemented yet", '
        '"entry": "snapshot"}}\n'
    )


# --------------------------------------------------- what bodies raise, one by one


def answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], body: Any, *more: str
) -> tuple[int, str, str]:
    """`agent-box inspect work` with another body."""
    monkeypatch.setattr(main, "_body", lambda verb: body)
    monkeypatch.setattr(main, "plug_descriptors", lambda: None)
    code = main.main(["inspect", "work", *more])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("reason", Reason)
def test_a_refusal_has_its_code_and_kind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reason: Reason
) -> None:
    def body(out: Render, **_: Any) -> None:
        raise Refusal(reason, "web1: no", facts={"state": "stopped", "exit": "9"}, id="abc")

    code, out, err = answered(monkeypatch, capsys, body, "--json")
    assert code == MEANING[reason].exit
    assert json.loads(out)["error"] == {
        "exit": code,
        "kind": str(reason),
        "message": "web1: no",
        "state": "stopped",
        "id": "abc",
    }
    assert err == "agent-box: web1: no\n"


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (Failure(23, "left-running", "stopped"), 23, "left-running"),
        (ConfigError("c.toml", "unknown key"), 2, "config-invalid"),
        (PathsError("XDG_RUNTIME_DIR is not set"), 2, "runtime-dir-missing"),
        (PathsError("/x/state: not ours"), 2, "directory-unusable"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("sk-canary"), 1, "internal"),
        (ModuleNotFoundError("sk-canary"), 1, "internal"),
        (RecursionError("sk-canary"), 1, "internal"),
    ],
)
def test_what_is_raised_has_a_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    kind: str,
) -> None:
    def body(out: Render, **_: Any) -> None:
        raise error

    got, out, err = answered(monkeypatch, capsys, body, "--json")
    assert got == code
    assert json.loads(out)["error"]["kind"] == kind
    assert err.count("\n") == 1
    assert "canary" not in out + err


def test_a_defect_tells_its_place_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(out: Render, **_: Any) -> None:
        secret = "sk-canary"
        raise ValueError(secret)

    code, _, err = answered(monkeypatch, capsys, body)
    assert code == 1
    assert re.fullmatch(r"agent-box: internal error: ValueError at main.py:\d+\n", err)
    monkeypatch.setenv("AGENT_BOX_TRACEBACK", "1")
    _, _, err = answered(monkeypatch, capsys, body)
    assert "in body" in err
    assert "canary" not in err.replace('secret = "sk-canary"', "")


@pytest.mark.parametrize("prefix", ["/usr/lib/python3/site-packages", "/srv/dist-packages", "/x"])
def test_a_defect_tells_its_place_wherever_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prefix: str
) -> None:
    """The innermost frame of ours, though it called the library that raised."""
    source = "import json\n\ndef body(out, **_):\n    json.loads('sk-canary')\n"
    module: dict[str, Any] = {"__name__": "agent_box.cli.broken"}
    exec(compile(source, f"{prefix}/agent_box/cli/broken.py", "exec"), module)  # noqa: S102
    code, _, err = answered(monkeypatch, capsys, module["body"])
    assert code == 1
    assert err == "agent-box: internal error: JSONDecodeError at broken.py:4\n"


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_body_without_an_answer_is_a_defect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    code, _, err = answered(monkeypatch, capsys, lambda out, **_: None, *more)
    assert code == 1
    assert "internal error: RuntimeError" in err


def test_a_guests_exit_code_passes_through(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answered(monkeypatch, capsys, lambda out, **_: 7) == (7, "", "")


def test_an_answer_stands_when_something_fails_after_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(out: Render, **_: Any) -> None:
        out.result({"name": "work"})
        raise Failure(14, "connection-lost", "gone")

    code, out, err = answered(monkeypatch, capsys, body, "--json")
    assert code == 14
    assert out.count("\n") == 1
    assert err == "agent-box: gone\n"


# ------------------------------------------------------------- broken descriptors


def shell(script: str, **env: str) -> Ran:
    done = subprocess.run(
        ["bash", "-c", script],
        env=environment() | {"BOX": str(BINARY)} | env,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
        check=False,
    )
    return Ran((script,), done.returncode, done.stdout, done.stderr)


def test_closed_stdout_runs_nothing() -> None:
    ran = shell('"$BOX" demo config >&-')
    assert (ran.exit, ran.err) == (2, "agent-box: stdout is closed\n")
    assert shell('"$BOX" demo config >&- 2>&-').exit == 2


def test_a_full_disk_under_stdout() -> None:
    ran = shell('"$BOX" demo config >/dev/full')
    assert (ran.exit, ran.err) == (1, "agent-box: stdout: No space left on device\n")


def test_an_error_that_cannot_be_written_keeps_its_code() -> None:
    ran = shell('"$BOX" crate --json >/dev/full')
    assert ran.exit == 64
    assert ran.err.splitlines()[0].startswith("agent-box: unknown verb 'crate'")


def test_a_reader_that_left_is_not_complained_to() -> None:
    ran = shell('set -o pipefail; "$BOX" demo config | true; echo ${PIPESTATUS[0]}')
    assert (ran.out, ran.err) == ("0\n", "")
    ran = shell('"$BOX" crate --json | true; echo ${PIPESTATUS[0]}')
    assert ran.out == "64\n"


def test_closed_stderr_and_stdin_are_survived() -> None:
    ran = shell('"$BOX" demo config --json <&- 2>&-')
    assert ran.exit == 0
    assert json.loads(ran.out)["ok"]
    assert shell('"$BOX" crate 2>&-').exit == 64
    assert shell('"$BOX" crate 2>/dev/full').exit == 64


def test_no_file_of_ours_becomes_descriptor_2() -> None:
    """With stderr closed, the first file that is opened would get its number, and every
    warning would be written into it."""
    code = (
        "import os, sys; sys.argv=['agent-box', 'demo', 'config'];"
        "from agent_box.cli.main import main; main();"
        "print(os.readlink('/proc/self/fd/2'), file=sys.__stdout__)"
    )
    ran = shell(f'{sys.executable} -c "{code}" 2>&-')
    assert ran.out.splitlines()[-1] == "/dev/null"


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_terminal_without_utf_8(encoding: str) -> None:
    ran = shell('"$BOX" "crâte→"', PYTHONIOENCODING=encoding)
    assert ran.exit == 64
    assert "\\u2192" in ran.err


# ----------------------------------------------------------------------- signals


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A verb in the middle of its work."""
    code = (
        "import sys, select\n"
        "from agent_box.cli import main\n"
        "def body(out, **_):\n"
        "    out.progress('ready')\n"
        "    select.select([], [], [], 60)\n"
        "main._body = lambda verb: body\n"
        "sys.exit(main.main(['inspect', 'work', '--json']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def test_an_interrupt_is_130(sleeper: subprocess.Popen[str]) -> None:
    assert sleeper.stderr is not None
    assert sleeper.stderr.readline() == "ready\n"
    sleeper.send_signal(signal.SIGINT)
    out, err = sleeper.communicate(timeout=20)
    assert sleeper.returncode == 130
    assert json.loads(out)["error"] == {
        "exit": 130,
        "kind": "interrupted",
        "message": "interrupted",
    }
    assert err == "agent-box: interrupted\n"


# -------------------------------------------------------------------- completion


def complete(*words: str, env: dict[str, str] | None = None) -> list[str]:
    ran = run("--complete", *words, env=env)
    assert (ran.exit, ran.err) == (0, "")
    return ran.out.splitlines()


def names(lines: list[str]) -> list[str]:
    return [line.partition("\t")[0] for line in lines]


def test_verbs_are_completed() -> None:
    every = names(complete(""))
    assert {v.name.partition(" ")[0] for v in verbs.VERBS} <= set(every)
    assert names(complete("se")) == ["secret", "service", "setup"]
    assert names(complete("policy", "")) == ["show", "set", "check"]
    assert complete("policy", "sh") == ["show\tThe effective egress policy of an instance."]
    assert complete("nonsense", "") == []
    assert complete() == complete("")


def test_flags_and_their_values_are_completed() -> None:
    assert names(complete("create", "work", "--m")) == ["--memory"]
    assert names(complete("create", "work", "--cpus", "1", "--c")) == []
    assert "--json" in names(complete("list", "--"))
    assert complete("attach", "work", "--user", "") == ["agent", "root"]
    assert complete("completion", "f") == ["fish"]
    assert complete("service", "restart", "a") == ["all"]
    assert complete("policy", "set", "work", "--file", "p") == [":files"]
    assert complete("exec", "work", "--", "") == []


def test_names_of_the_config_are_completed(tmp_path: Path) -> None:
    env = environment(tmp_path)
    path = tmp_path / "config/agent-box/config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(run("demo", "config").out)
    assert complete("create", "work", "--profile", "", env=env) == ["default", "quiet", "rust"]
    assert complete("policy", "set", "work", "l", env=env) == ["locked"]
    path.write_text("version = 2")
    assert complete("policy", "set", "work", "l", env=env) == []


def test_without_a_daemon_no_name_is_completed_and_none_is_started(tmp_path: Path) -> None:
    assert complete("start", "", env=environment(tmp_path)) == []
    assert complete("secret", "rm", "", env=environment(tmp_path)) == []
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["run"]
    assert complete("start", "", env=environment()) == []  # no runtime directory either


def test_bash_completes(tmp_path: Path) -> None:
    script = """
        eval "$("$BOX" completion bash)"
        PATH="$(dirname "$BOX"):$PATH"
        try() {
          COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
          _agent_box agent-box "${!#}" "${@: -2:1}" 2>&1
          (IFS=,; echo "${COMPREPLY[*]}")
        }
        try agent-box poli
        try agent-box policy ""
        try agent-box attach work --user r
        try agent-box create work --profile ""
    """
    ran = shell(script, **environment(tmp_path))
    assert ran.out.splitlines() == ["policy", "show,set,check", "root", "default"], ran.err


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_fish_completes(tmp_path: Path) -> None:
    script = """
        set -x PATH (dirname $BOX) $PATH
        agent-box completion fish | source
        complete -C "agent-box poli"
        complete -C "agent-box policy s"
        complete -C "agent-box attach work --user r"
        complete -C "agent-box create work --profile "
    """
    done = subprocess.run(
        [program("fish"), "--no-config", "-c", script],
        env=environment(tmp_path, BOX=str(BINARY)),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert names(done.stdout.splitlines()) == ["policy", "set", "show", "root", "default"]


def test_zsh_completes(tmp_path: Path) -> None:
    """A tab in a terminal of its own."""
    shell = program("zsh")
    env = environment(tmp_path, TERM="dumb")
    env["PATH"] = f"{BINARY.parent}:{env['PATH']}"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(shell, [shell, "-f", "-i"], env)
    try:
        shown = ""

        def shows(text: str) -> bool:
            nonlocal shown
            if select.select([terminal], [], [], 0)[0]:
                shown += os.read(terminal, 65536).decode(errors="replace")
            return text in shown

        def types(text: str) -> None:
            nonlocal shown
            shown = ""
            os.write(terminal, text.encode())

        types("PROMPT=re''ady\\>\\ \n")
        until("the prompt", lambda: shows("ready> "))
        types('autoload -Uz compinit; compinit -D; eval "$(agent-box completion zsh)"\n')
        until("the completion is loaded", lambda: shows("ready> "))
        for begun, completed in (
            ("agent-box poli\t", "agent-box policy "),
            ("agent-box policy ch\t", "agent-box policy check "),
            ("agent-box attach work --user r\t", "agent-box attach work --user root "),
            ("agent-box create work --profile d\t", "agent-box create work --profile default "),
        ):
            types(begun)
            until(f"{completed!r} is shown", lambda text=completed: shows(text))  # type: ignore[misc]
            types("\x15\n")  # no signal: zsh may still be busy with the completion
            until("the prompt", lambda: shows("ready> "))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


@pytest.mark.parametrize("shell_name", ["bash", "zsh", "fish"])
def test_the_scripts_parse(shell_name: str, tmp_path: Path) -> None:
    ran = run("completion", shell_name)
    assert ran.out
    file = tmp_path / "script"
    file.write_text(ran.out)
    subprocess.run([program(shell_name), "-n", file], check=True, timeout=20)


# ------------------------------------------------------------------- what it costs

HEAVY = {
    "acp",
    "asyncio",
    "cryptography",
    "email",
    "http.client",
    "importlib.metadata",
    "jsonschema",
    "pydantic",
    "rich",
    "scapy",
    "structlog",
    "supervisor",
    "typer",
    "xmlrpc",
}


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["list", "--json"],
        ["inspect", "work"],
        ["secret", "list"],
        ["demo", "config"],
        ["start", "work"],
        ["--help"],
        ["--complete", ""],
        ["crate"],
    ],
    ids=" ".join,
)
def test_a_verb_imports_only_what_it_needs(words: list[str]) -> None:
    code = (
        "import sys, json; from agent_box.cli.main import main; "
        f"main({words!r}); print(json.dumps(sorted(sys.modules)), file=sys.__stderr__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    assert not loaded & HEAVY


def test_help_and_completion_do_without_typer() -> None:
    code = (
        "import sys; from agent_box.cli.main import main; main(['--complete', 'cr']); "
        "main(['create', '--help']); sys.exit('typer' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, timeout=20)


def test_the_module_runs_like_the_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agent_box.cli.main", "demo", "config", "--json"],
        env=environment(),
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout)["ok"]
