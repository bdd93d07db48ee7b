"""The second wall by itself, outside of bubblewrap, on this kernel and as on older ones."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.house import python

from agent_box.process import landlock, linux

ABI = linux.landlock_abi()
needs_landlock = pytest.mark.skipif(ABI < 1, reason="this kernel has no Landlock")

TRY = """
import json, os, socket, sys
from pathlib import Path
from agent_box.process import landlock, linux
facts = json.loads(sys.argv[1])
if facts["abi"] is not None:
    linux.landlock_abi = lambda: facts["abi"]
open_before = open(facts["secret"])
before = landlock.enforced()
rules = [landlock.Rule(Path(p), w) for p, w in facts["rules"]]
abi = landlock.enforce(rules, network=facts["network"])
results = {"abi": abi, "enforced": landlock.enforced(), "before": before}

def attempt(name, work):
    try:
        work()
    except OSError as error:
        results[name] = error.errno
    else:
        results[name] = 0

def tcp():
    with socket.socket() as s: s.connect(("127.0.0.1", facts["tcp"]))
def bind():
    with socket.socket() as s: s.bind(("127.0.0.1", 0))
def abstract():
    with socket.socket(socket.AF_UNIX) as s: s.connect("\\0" + facts["abstract"])
def execute():
    pid = os.fork()
    if pid == 0:
        try: os.execv("/usr/bin/true", ["true"])
        except OSError as error: os._exit(error.errno)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code: raise OSError(code, "exec")

attempt("read", lambda: open(facts["readable"] + "/file").read())
attempt("list", lambda: os.listdir(facts["readable"]))
attempt("write", lambda: open(facts["readable"] + "/file", "a"))
attempt("make", lambda: open(facts["readable"] + "/new", "w"))
attempt("write own", lambda: open(facts["writable"] + "/file", "a"))
attempt("make own", lambda: open(facts["writable"] + "/new", "w"))
attempt("truncate own", lambda: os.truncate(facts["writable"] + "/file", 0))
attempt("directory own", lambda: os.mkdir(facts["writable"] + "/d"))
attempt("move own", lambda: os.rename(facts["writable"] + "/new", facts["writable"] + "/d/new"))
attempt("remove own", lambda: os.unlink(facts["writable"] + "/d/new"))
attempt("socket own", lambda: socket.socket(socket.AF_UNIX).bind(facts["writable"] + "/s"))
attempt("fifo own", lambda: os.mkfifo(facts["writable"] + "/fifo"))
attempt("secret", lambda: open(facts["secret"]))
attempt("one file", lambda: open(facts["one"]).read())
attempt("its sibling", lambda: open(facts["one"] + "2").read())
attempt("opened before", lambda: open_before.read())
attempt("tcp", tcp)
attempt("bind", bind)
attempt("abstract", abstract)
attempt("signal parent", lambda: os.kill(os.getppid(), 0))
attempt("execute", execute)
print(json.dumps(results))
"""


@pytest.fixture
def facts(tmp_path: Path) -> Iterator[dict[str, object]]:
    for name in ("readable", "writable", "hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    for name in ("one", "one2"):
        (tmp_path / name).write_text("x")
    abstract = f"agent-box-test-{os.getpid()}"
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen(8)
        unix.bind(f"\0{abstract}")
        unix.listen(8)
        yield {
            "abi": None,
            "network": False,
            "readable": str(tmp_path / "readable"),
            "writable": str(tmp_path / "writable"),
            "secret": str(tmp_path / "hidden" / "file"),
            "one": str(tmp_path / "one"),
            "tcp": tcp.getsockname()[1],
            "abstract": abstract,
            "rules": [
                (str(tmp_path / "readable"), False),
                (str(tmp_path / "writable"), True),
                (str(tmp_path / "one"), False),
                (str(tmp_path / "missing"), True),
            ],
        }


def attempt(facts: dict[str, object], **changes: object) -> dict[str, int]:
    ran = subprocess.run(
        python("-c", TRY, json.dumps({**facts, **changes})),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, int] = json.loads(ran.stdout)
    return found


EACCES, EPERM, EXDEV = 13, 1, 18
FILES = {
    "read": 0,
    "list": 0,
    "write": EACCES,
    "make": EACCES,
    "write own": 0,
    "make own": 0,
    "truncate own": 0,
    "directory own": 0,
    "move own": 0,
    "remove own": 0,
    "socket own": 0,
    "fifo own": EACCES,
    "secret": EACCES,
    "one file": 0,
    "its sibling": EACCES,
    "opened before": 0,
    "execute": EACCES,
}


@needs_landlock
def test_the_wall_of_this_kernel(facts: dict[str, object]) -> None:
    found = attempt(facts)
    assert (found["abi"], found["before"], found["enforced"]) == (ABI, False, True)
    if ABI >= 2:  # before, nothing could be moved between directories
        assert {name: found[name] for name in FILES} == FILES
    if ABI >= landlock.NETWORK_ABI:
        assert (found["tcp"], found["bind"]) == (EACCES, EACCES)
    if ABI >= landlock.SCOPE_ABI:
        assert (found["abstract"], found["signal parent"]) == (EPERM, EPERM)


@needs_landlock
@pytest.mark.parametrize("abi", range(1, ABI + 1))
def test_an_older_kernel_has_what_it_has(facts: dict[str, object], abi: int) -> None:
    """Only the rights of that version are asked for, else it would answer EINVAL."""
    found = attempt(facts, abi=abi)
    assert (found["abi"], found["enforced"]) == (abi, True)
    expected = dict(FILES)
    if abi < 2:
        expected |= {"move own": EXDEV, "remove own": 2}
    assert {name: found[name] for name in FILES} == expected
    tcp = EACCES if abi >= landlock.NETWORK_ABI else 0
    assert (found["tcp"], found["bind"]) == (tcp, tcp)
    scoped = EPERM if abi >= landlock.SCOPE_ABI else 0
    assert (found["abstract"], found["signal parent"]) == (scoped, scoped)


@needs_landlock
def test_with_a_network_tcp_stays_and_the_scopes_too(facts: dict[str, object]) -> None:
    found = attempt(facts, network=True)
    assert (found["tcp"], found["bind"]) == (0, 0)
    if ABI >= landlock.SCOPE_ABI:
        assert found["abstract"] == EPERM


def test_without_landlock_nothing_is_enforced_and_that_is_told(facts: dict[str, object]) -> None:
    found = attempt(facts, abi=0)
    assert (found["abi"], found["enforced"]) == (0, False)
    assert {found[name] for name in (*FILES, "tcp", "bind", "abstract")} == {0}


@needs_landlock
def test_a_wall_that_the_kernel_refuses_is_an_error(facts: dict[str, object]) -> None:
    ran = subprocess.run(
        python(
            "-c",
            "from agent_box.process import linux\nlinux.landlock_ruleset(1 << 60, 0, 0)",
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "landlock_create_ruleset: Invalid argument" in ran.stderr
