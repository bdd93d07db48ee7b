"""`attach` by the real program: a person at a terminal, and a guest that is a local program on a
terminal, behind a channel that can be killed. And what `attach` and `exec` refuse."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import cli
from support.attached import HASH, HEX, Person, Toys, resting
from support.until import until

from agent_box.cli import terminal

# So many lines, numbered.
COUNT = """
import sys
for number in range(int(sys.argv[1])):
    sys.stdout.write(f"line {number} " + "x" * 60 + "\\n")
"""


def tty(toys: Toys, *argv: str, flags: tuple[str, ...] = (), rows: int = 24) -> Person:
    return Person(["exec", "web1", *flags, "--tty", "--", *argv], toys.env, rows=rows)


def python(code: str, *words: str) -> tuple[str, ...]:
    return ("python3", "-u", "-c", code, *words)


# -------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("exec gone -- true", 3, "there is no instance gone"),
        ("exec web1:/nowhere -- true", 3, "there is no directory /nowhere in the guest"),
        ("exec web1 -- refuse exhausted no-processes", 1, "no-processes"),
        ("exec web1 -- refuse disk-full no-room", 1, "no-room"),
        ("exec web1 -- refuse wrong-state it-stopped", 4, "it-stopped"),
        ("exec web1 --tty -- true", 64, "exec --tty: stdin is not a terminal"),
        ("exec web1 --tty --json -- true", 64, "exec: --tty has no --json"),
        ("exec web1 --user joe -- true", 64, "--user must be one of"),
        ("exec web1", 64, "CMD"),
        ("attach web1 --shell", 64, "attach: stdin is not a terminal"),
        ("attach web1 --shell --json", 64, "attach: --json goes with --list"),
        ("attach web1 --shell --detach-keys ctrl-1", 64, "'ctrl-1'"),
        ("attach web1", 64, "attach: stdin is not a terminal"),
        ("attach web1 --json", 64, "attach: --json goes with --list"),
        ("attach gone --list", 3, "there is no instance gone"),
    ],
)
def test_what_cannot_be_says_so_in_one_line(toys: Toys, words: str, code: int, said: str) -> None:
    ran = toys.run(*words.split())
    told = (ran.stdout if "--json" in words else b"") + ran.stderr
    assert ran.returncode == code, ran
    assert said in told.decode()
    assert ran.stderr.count(b"\n") == 1 and ran.stderr.startswith(b"agent-box: ")


@pytest.mark.parametrize(("state", "code"), [("stopped", 4), ("paused", 4), ("unknown", 12)])
def test_an_instance_that_does_not_run(toys: Toys, state: str, code: int) -> None:
    toys.registry.state = state
    ran = toys.run("exec", "web1", "--", "true")
    assert ran.returncode == code
    assert ran.stderr.count(b"\n") == 1 and b"web1" in ran.stderr


def test_stdout_that_is_no_terminal(toys: Toys) -> None:
    with Person(["exec", "web1", "--", "true"], toys.env) as person:
        person.end()
        ran = subprocess.run(
            [cli.BINARY, "attach", "web1", "--shell"],
            stdin=person._slave,
            capture_output=True,
            env=toys.env,
            timeout=60,
            check=False,
        )
    assert (ran.returncode, ran.stdout) == (64, b"")
    assert b"stdout is not a terminal" in ran.stderr


def test_a_terminal_that_is_not_there(toys: Toys) -> None:
    with Person(["attach", "web1", "--terminal", "abc"], toys.env) as person:
        code, said = person.end()
        assert (code, said) == (3, "agent-box: there is no such terminal\n")
        assert person.is_restored


# ----------------------------------------------------------------------------- attach


@pytest.mark.parametrize(
    ("harness", "said"),
    [
        (None, "web1 has no harness"),
        (["kage"], "a harness that is a command has no program of its own"),
        ("codex", "codex has no program of its own"),
    ],
)
def test_a_harness_without_a_program_for_terminals(
    toys: Toys, harness: str | list[str] | None, said: str
) -> None:
    toys.registry.harness = harness
    with Person(["attach", "web1"], toys.env) as person:
        code, told = person.end()
    assert code == 4 and said in told


def test_without_shell_it_is_the_program_of_the_harness() -> None:
    guest: Any = SimpleNamespace(name="web1", harness="opencode")
    (program,) = terminal._own_program(guest)
    assert program.startswith(b"/usr/lib/harness/") and program.endswith(b"/bin/opencode")


def test_the_size_is_right_from_the_first_command_on(toys: Toys) -> None:
    with tty(toys, "sh", "-c", "stty size; read x; stty size", rows=33) as person:
        person.until(b"33 80\r\n")
        person.resize(50, 132)
        toys_sees = "the guest's terminal has the new size"
        until(toys_sees, lambda: person.look(0.05) or True)
        person.type(b"\r")
        person.until(b"50 132\r\n")
        assert person.end() == (0, "")


def test_a_window_change_arrives_as_a_signal(toys: Toys) -> None:
    script = "trap 'stty size; exit 4' WINCH; echo ready; while :; do sleep 0.05; done"
    with tty(toys, "bash", "-c", script) as person:
        person.until(b"ready")
        person.resize(10, 20)
        person.until(b"10 20\r\n")
        assert person.end() == (4, "")


def test_a_terminal_without_a_size_has_the_usual_one(toys: Toys) -> None:
    with tty(toys, "stty", "size", rows=0) as person:
        assert person.end()[0] == 0
        assert person.seen == b"24 80\r\n"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"TERM": "tmux-256color"}, "tmux-256color/"),
        ({"TERM": "xterm-kitty", "COLORTERM": "truecolor"}, "xterm-256color/truecolor"),
        ({"TERM": "", "COLORTERM": "x\n"}, "dumb/"),
        ({"TERM": "\x1b[31m"}, "xterm-256color/"),
    ],
)
def test_the_kind_of_terminal(toys: Toys, ours: dict[str, str], theirs: str) -> None:
    argv = ["exec", "web1", "--tty", "--", "sh", "-c", 'echo "$TERM/$COLORTERM"']
    with Person(argv, toys.env | ours) as person:
        assert person.end()[0] == 0
        assert person.seen == theirs.encode() + b"\r\n"


def test_every_control_byte_arrives(toys: Toys) -> None:
    """0x10 too, with which the detach keys begin."""
    with tty(toys, *python(HEX)) as person:
        person.until(b"ready\r\n")
        at = len(person.seen)
        for byte in (0xFF, 0x7F, *range(0x1F, -1, -1)):  # downwards: ctrl-q before ctrl-p
            person.type(bytes((byte,)))
            at = person.until(b"%02x " % byte, after=at)
        person.process.send_signal(signal.SIGTERM)
        assert person.end()[0] == 128 + signal.SIGTERM
        assert person.is_restored


def test_characters_typed_and_shown_byte_by_byte_stay_whole(toys: Toys) -> None:
    text = "🧑‍💻漢字e\u0301🇩🇪\n"
    code = "import os, sys\nfor b in sys.argv[1].encode(): os.write(1, bytes((b,)))"
    with tty(toys, *python(code, text.strip())) as person:
        assert person.end()[0] == 0
        assert person.seen.decode() == text.strip()
    with tty(toys, "sh", "-c", "stty -echo; echo ready; head -n 1") as person:
        person.until(b"ready\r\n")
        for byte in text.encode():
            person.type(bytes((byte,)))
        person.until(text.strip().encode())
        assert person.end()[0] == 0


@pytest.mark.parametrize("bracketed", [True, False])
def test_a_paste_of_1_mib_loses_nothing(toys: Toys, bracketed: bool) -> None:
    data = os.urandom(1 << 20)
    if bracketed:
        data = b"\x1b[200~" + data.replace(b"\x1b", b"") + b"\x10\x11\x1b[201~"
    else:
        data = data.replace(b"\x10", b"").replace(b"\x1b", b"")
    with tty(toys, *python(HASH, str(len(data)))) as person:
        person.until(b"ready\r\n")
        person.type(data)
        person.until(hashlib.sha256(data).hexdigest().encode())
        assert person.end() == (0, "")


def test_output_is_whole_at_a_terminal_that_stalls(toys: Toys) -> None:
    count = 60_000
    with tty(toys, *python(COUNT, str(count))) as person:
        person.until(b"line 0 ")
        until("it waits for its reader", lambda: resting(person.process.pid), seconds=60)
        assert person.end()[0] == 0
    expected = b"".join(b"line %d " % n + b"x" * 60 + b"\r\n" for n in range(count))
    assert person.seen == expected


def test_the_exit_code_is_the_programs(toys: Toys) -> None:
    with tty(toys, "sh", "-c", "exit 41") as person:
        assert person.end() == (41, "")
        assert person.is_restored
    with tty(toys, "sh", "-c", "kill -9 $$") as person:
        assert person.end() == (137, "")


@pytest.mark.parametrize(
    "keys", [b"\x10\x11", b"\x1b[112;5u\x1b[113;5u", b"\x1b[112;133u\x1b[113;197u"]
)
@pytest.mark.parametrize("cut", [False, True])
def test_detached_it_goes_on_and_is_joined_again(toys: Toys, keys: bytes, cut: bool) -> None:
    with Person(["attach", "web1", "--shell"], toys.env) as person:
        at = person.until(b"$ ")
        person.type(b"echo begun; V=still; stty size\r")
        person.until(b"$ ", after=person.until(b"24 80\r\n", after=at))
        assert person.is_raw
        for piece in [keys[i : i + 1] for i in range(len(keys))] if cut else [keys]:
            person.type(piece)
        code, said = person.end()
        assert code == 0 and person.is_restored
    assert said.startswith("detached from web1; agent-box attach web1 --terminal ")
    id = said.split()[7]
    listed = json.loads(toys.run("attach", "web1", "--list", "--json").stdout)
    assert id in [t["terminal"] for t in listed["result"]["terminals"]]
    with Person(["attach", "web1", "--terminal", id], toys.env, rows=40) as person:
        person.until(b"24 80\r\n")  # what there was before
        at = len(person.seen)
        person.type(b"echo $V here; stty size; exit 3\r")
        person.until(b"still here\r\n40 80\r\n", after=at)
        assert person.end()[0] == 3


def test_a_question_that_was_answered_is_not_asked_again(toys: Toys) -> None:
    """Its second answer would be typed into whatever runs now."""
    with Person(["attach", "web1", "--shell"], toys.env) as person:
        person.until(b"$ ")
        person.type(b"printf '\\033[c''asked\\n'\r")
        person.until(b"\x1b[casked")
        person.type(b"\x10\x11")
        id = person.end()[1].split()[7]
    with Person(["attach", "web1", "--terminal", id], toys.env) as person:
        at = person.until(b"\rasked")
        assert b"\x1b[c" not in person.seen
        person.type(b"printf '\\033[c''again\\n'; exit\r")
        person.until(b"\x1b[cagain", after=at)
        assert person.end()[0] == 0


def test_a_second_person_takes_it_over(toys: Toys) -> None:
    with Person(["attach", "web1", "--shell"], toys.env) as one:
        one.until(b"$ ")
        one.type(b"echo $((1+1))two\r")
        one.until(b"2two")
        rows = json.loads(toys.run("attach", "web1", "--list", "--json").stdout)
        id = rows["result"]["terminals"][-1]["terminal"]
        with Person(["attach", "web1", "--terminal", id], toys.env) as two:
            two.until(b"2two")
            code, said = one.end()
            assert (code, said) == (1, "agent-box: another attach has taken this terminal over\n")
            assert one.is_restored
            two.type(b"exit\r")
            assert two.end()[0] == 0


@pytest.mark.parametrize("name", ["TERM", "HUP", "INT", "QUIT", "USR1", "ALRM", "PWR"])
def test_every_signal_gives_the_terminal_back(toys: Toys, name: str) -> None:
    script = r"printf '\033[?1049h\033[?1000;1006;2004h\033[?25lready'; sleep 600"
    with tty(toys, "sh", "-c", script) as person:
        person.until(b"ready")
        until("it is raw", lambda: person.is_raw)
        person.process.send_signal(getattr(signal, f"SIG{name}"))
        code, said = person.end()
        assert code == 128 + getattr(signal, f"SIG{name}")
        assert said.startswith(f"agent-box: ended by SIG{name}; agent-box attach web1 --terminal")
        assert person.is_restored
        last = person.seen.partition(b"ready")[2]
        for undone in (
            b"\x1b[?1000l",
            b"\x1b[?1006l",
            b"\x1b[?2004l",
            b"\x1b[?25h",
            b"\x1b[?1049l",
        ):
            assert undone in last


def test_the_answer_to_a_question_is_not_typed_into_the_shell(toys: Toys) -> None:
    """A guest asks and ends at once; the terminal answers a little later."""
    with tty(toys, "printf", r"\033[6n\033[c") as person:
        person.until(b"\x1b[c")
        person.until(b"\x1b[5n")  # ours, which a terminal answers last
        person.type(b"\x1b[1;1R\x1b[?62c\x1b[0n")
        assert person.end()[0] == 0
        assert person.is_restored
        person.type(b"\n")
        assert os.read(person._slave, 100) == b"\n"


def test_what_drives_a_terminal_is_dropped(toys: Toys) -> None:
    text = r"a\033]52;c;aGVsbG8=\007b\033[21tc\033]0;title\007d\033[31me"
    with tty(toys, "printf", text) as person:
        assert person.end()[0] == 0
        assert person.seen.startswith(b"abc\x1b]0;title\x07d\x1b[31me")


@pytest.mark.parametrize("times", [1, 3])
def test_a_killed_channel_is_not_noticed(toys: Toys, times: int) -> None:
    """During output; what was typed meanwhile arrives once, when the channel is back."""
    count = 40_000
    script = f"import sys\n{COUNT}\nprint('typed:', ascii(input()))"
    with tty(toys, *python(script, str(count))) as person:
        for number in range(1, times + 1):
            person.until(b"line %d " % (number * 3_000))
            toys.kill_channel()
            person.type(b"some %d " % number)
            toys.start_channel()
        person.until(b"line %d " % (count - 1))
        person.type(b"and more\r")
        said = b"".join(b"some %d " % n for n in range(1, times + 1)) + b"and more"
        person.until(b"typed: '" + said + b"'")
        assert person.end() == (0, "")
    shown = [line for line in person.seen.split(b"\r\n") if b"line " in line]
    numbers = [int(line.partition(b"line ")[2].split()[0]) for line in shown]
    assert numbers == list(range(count))


def test_the_instance_stops_under_it(toys: Toys) -> None:
    with tty(toys, "sh", "-c", "echo ready; sleep 600") as person:
        person.until(b"ready")
        toys.registry.state = "stopping"
        toys.leave()
        code, said = person.end()
        assert (code, said) == (23, "agent-box: web1 is stopping\n")
        assert person.is_restored


@pytest.mark.parametrize(
    ("state", "boots", "said"),
    [("paused", 1, "is paused"), ("running", 2, "was started anew"), (None, 1, "was deleted")],
)
def test_the_channel_is_gone_and_so_is_the_instance(
    toys: Toys, state: str | None, boots: int, said: str
) -> None:
    with tty(toys, "sh", "-c", "echo ready; sleep 600") as person:
        person.until(b"ready")
        toys.registry.state, toys.registry.boots = state, boots
        toys.kill_channel()
        code, told = person.end()
        assert (code, told.splitlines()[-1]) == (23, f"agent-box: web1 {said}")
        assert person.is_restored


def test_detaching_while_the_channel_is_gone(toys: Toys) -> None:
    with tty(toys, "sh", "-c", "echo ready; sleep 600") as person:
        person.until(b"ready")
        toys.kill_channel()
        person.type(b"\x10\x11")
        assert person.end()[0] == 0
        assert person.is_restored


@pytest.mark.slow
def test_a_channel_that_does_not_come_back_is_14(toys: Toys) -> None:
    with tty(toys, "sh", "-c", "echo ready; sleep 600") as person:
        person.until(b"ready")
        toys.kill_channel()
        code, said = person.end()
        assert code == 14 and said.startswith("agent-box: the connection to web1 is lost: ")
        assert person.is_restored


def test_what_was_typed_just_before_the_keys_arrives(toys: Toys, tmp_path: Path) -> None:
    """Also when the channel is away at that moment."""
    before = b"echo kept $((6*7)) > " + bytes(tmp_path / "kept") + b"\r"
    tmp_path.chmod(0o755)
    with Person(["attach", "web1", "--shell"], toys.env) as person:
        person.until(b"$ ")
        person.type(before + b"\x10\x11")
        assert person.end()[0] == 0
    until("it ran", lambda: (tmp_path / "kept").exists())
    with tty(
        toys,
        "sh",
        "-c",
        f"stty raw -echo; : >{tmp_path}/all; echo ready; head -c 9 >{tmp_path}/all",
    ) as person:
        person.until(b"ready")
        toys.kill_channel()
        person.type(b"unplugged\x10\x11")
        toys.start_channel()
        assert person.end()[0] == 0 and person.is_restored
    until("it is there", lambda: (tmp_path / "all").read_bytes() == b"unplugged")


def test_what_nobody_reads_holds_nobody(toys: Toys) -> None:
    with tty(toys, "sh", "-c", "stty raw -echo; echo ready; sleep 600") as person:
        person.until(b"ready")
        person.type(bytes(100_000) + b"\x10\x11")
        assert person.end()[0] == 0 and person.is_restored


def test_the_window_is_closed_while_it_is_stopped(toys: Toys) -> None:
    """The kernel sends SIGHUP and SIGCONT together; the latter is heard first."""
    person = tty(toys, "sh", "-c", "echo ready; sleep 600")
    person.until(b"ready")
    person.process.send_signal(signal.SIGSTOP)
    os.waitpid(person.process.pid, os.WUNTRACED)
    os.close(person._slave)
    os.close(person.master)
    assert person.process.wait(60) == 128 + signal.SIGHUP


def test_the_window_is_closed(toys: Toys) -> None:
    person = tty(toys, "sh", "-c", "echo ready; sleep 600")
    person.until(b"ready")
    os.close(person._slave)
    os.close(person.master)
    assert person.process.wait(60) == 128 + signal.SIGHUP


def test_stopped_and_continued_it_is_raw_again(toys: Toys) -> None:
    with tty(toys, "sh", "-c", "echo ready; read x; echo got $x") as person:
        person.until(b"ready")
        until("it is raw", lambda: person.is_raw)
        person.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, person.process.pid, os.WSTOPPED | os.WNOWAIT)
        termios.tcsetattr(person.master, termios.TCSANOW, person.before)
        person.process.send_signal(signal.SIGCONT)
        until("it is raw again", lambda: person.is_raw)
        person.type(b"it\r")
        person.until(b"got it")
        assert person.end()[0] == 0
        assert person.is_restored
