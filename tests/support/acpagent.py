"""Scripted agents that speak ACP on standard input and output: one that is good, and liars.

`python -I -S acpagent.py SCRIPT [ARGUMENT]`, or `@FILE` that has these words. Standard library
only, so that one starts at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

SESSION: Final = "session-1"


def say(message: dict[str, Any]) -> None:
    raw(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")


def raw(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def hear() -> dict[str, Any]:
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit(0)
    message: dict[str, Any] = json.loads(line)
    return message


def answer(request: dict[str, Any], result: Any) -> None:
    say({"id": request["id"], "result": result})


def update(what: str, **fields: Any) -> None:
    params = {"sessionId": SESSION, "update": {"sessionUpdate": what, **fields}}
    say({"method": "session/update", "params": params})


def text(words: str) -> None:
    update("agent_message_chunk", content={"type": "text", "text": words})


def leave_is_asked(id: Any = 7, session: str = SESSION, **call: Any) -> None:
    options = [
        {"optionId": "always", "name": "Always", "kind": "allow_always"},
        {"optionId": "once-1", "name": "Once", "kind": "allow_once"},
        {"optionId": "no", "name": "No", "kind": "reject_once"},
    ]
    fields = {"toolCallId": "t1", "title": "write a file", **call}
    params = {"sessionId": session, "toolCall": fields, "options": options}
    say({"id": id, "method": "session/request_permission", "params": params})


def opened() -> dict[str, Any]:
    """Goes through to the prompt; returns its request."""
    while True:
        request = hear()
        method = request.get("method")
        if method == "initialize":
            answer(request, {"protocolVersion": 1, "agentCapabilities": {"loadSession": True}})
        elif method == "session/new":
            answer(request, {"sessionId": SESSION})
        elif method == "session/load":
            text("what was said before")
            answer(request, None)
        elif method == "session/prompt":
            return request
        else:
            answer(request, {})


def good(_: str) -> None:
    prompt = opened()
    said = prompt["params"]["prompt"][0]["text"]
    text("I will ")
    update("tool_call", toolCallId="t1", title="write a file", kind="edit", status="pending")
    leave_is_asked()
    outcome = hear()["result"]["outcome"]
    status = "completed" if outcome == {"outcome": "selected", "optionId": "once-1"} else "failed"
    update("tool_call_update", toolCallId="t1", status=status)
    text(f"do: {said}")
    answer(prompt, {"stopReason": "end_turn"})
    opened()


def slow(path: str) -> None:
    """Tells that it waits, and goes on when the file is there."""
    prompt = opened()
    for number in range(1, 4):
        text(f"{number} ")
    while not os.path.exists(path):
        time.sleep(0.02)  # a file is looked for; nothing tells this process of it
    leave_is_asked()
    hear()
    text("done")
    answer(prompt, {"stopReason": "end_turn"})
    opened()


def works(repository: str) -> None:
    """Clones, commits a file of the prompt's name and pushes it to the branch of that name;
    says `pushed COMMIT` when the forge took it, else `failed`, at which step, and git's words."""
    import glob
    import shutil
    import subprocess

    for earlier in glob.glob("/home/agent/[0-9]*"):
        shutil.rmtree(earlier)  # a clone has all branches: many would fill the disk
    prompt = opened()
    branch = prompt["params"]["prompt"][0]["text"]
    place = f"/home/agent/{os.getpid()}"
    who = ["-c", "user.name=agent", "-c", "user.email=agent@example.com"]
    name = branch.rpartition("/")[2]

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", place, *who, *words], stdin=subprocess.DEVNULL, capture_output=True
        )
        why = " / ".join(done.stderr.decode(errors="replace").split("\n"))
        return f"failed {words[0]}: {why}" if done.returncode else done.stdout.decode().strip()

    def steps() -> Iterator[str]:
        yield git("clone", "-q", repository, ".")
        with open(f"{place}/{name}", "wb") as file:
            file.write(os.urandom(1 << 20))
        yield git("add", ".")
        yield git("commit", "-qm", name)
        leave_is_asked()
        hear()
        yield git("push", "-q", "origin", f"HEAD:refs/heads/{branch}")

    os.mkdir(place)
    said = ""
    for step in steps():
        text("step ")
        said = said or (step if step.startswith("failed") else "")
    text(said or f"pushed {git('rev-parse', 'HEAD')}")
    answer(prompt, {"stopReason": "end_turn"})
    opened()


def stops(reason: str) -> None:
    prompt = opened()
    answer(prompt, {"stopReason": reason})
    opened()


def cancelled(_: str) -> None:
    prompt = opened()
    text("working")
    while hear().get("method") != "session/cancel":
        pass
    answer(prompt, {"stopReason": "cancelled"})
    opened()


def deaf(_: str) -> None:
    """Ends at nothing that it is asked."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    opened()
    text("working")
    while True:
        time.sleep(60)  # until it is killed


def dies(status: str) -> None:
    opened()
    sys.stderr.write("some line\nno space in my head\x1b[31m\n")
    sys.exit(int(status))


def bad_json(_: str) -> None:
    opened()
    raw(b'{"jsonrpc": "2.0", "id": \n')
    hear()


def long_line(size: str) -> None:
    opened()
    raw(b'{"jsonrpc": "2.0", "method": "x", "params": {"a": "')
    for _ in range(int(size) >> 16):
        raw(b"a" * 65536)
    hear()


def flood(_: str) -> None:
    opened()
    while True:
        text("x" * 60000)


def many(_: str) -> None:
    opened()
    while True:
        raw(
            b'{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"session-1",'
            b'"update":{"sessionUpdate":"plan"}}}\n' * 500
        )


def forged_permission(what: str) -> None:
    opened()
    if what == "session":
        leave_is_asked(session="another")
    elif what == "id":
        leave_is_asked(id={"a": 1})
    else:
        say({"id": 99, "result": {"outcome": {"outcome": "selected", "optionId": "once-1"}}})
    hear()
    hear()


def early(_: str) -> None:
    """Asks for leave before there is a prompt."""
    request = hear()
    leave_is_asked()
    answer(request, {"protocolVersion": 1})
    opened()


def refuses(_: str) -> None:
    request = hear()
    say({"id": request["id"], "error": {"code": -32000, "message": "Authentication\nrequired"}})
    hear()


def old(_: str) -> None:
    answer(hear(), {"protocolVersion": 0})
    hear()


def forgets(_: str) -> None:
    answer(hear(), {"protocolVersion": 1, "agentCapabilities": {}})
    opened()


def forks(where: str) -> None:
    """A fork bomb; `away`, each part of it in a session of its own."""
    opened()
    text("working")
    while True:
        try:
            if os.fork() == 0 and where == "away":
                os.setsid()
        except OSError:
            time.sleep(0.05)  # an emulated CPU has nothing else to do otherwise


def fills(path: str) -> None:
    """Fills the disk, and says how that ended."""
    prompt = opened()
    try:
        with open(path, "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
    except OSError as error:
        text(str(error.strerror))
    answer(prompt, {"stopReason": "end_turn"})
    opened()


def asks_for_files(_: str) -> None:
    prompt = opened()
    say({"id": "f1", "method": "fs/write_text_file", "params": {"path": "/x", "content": ""}})
    code = hear()["error"]["code"]
    text(str(code))
    answer(prompt, {"stopReason": "end_turn"})
    opened()


def environment(_: str) -> None:
    prompt = opened()
    text(json.dumps({"env": dict(os.environ), "cwd": os.getcwd(), "uid": os.getuid()}))
    answer(prompt, {"stopReason": "end_turn"})
    opened()


SCRIPTS: Final[dict[str, Callable[[str], None]]] = {
    name: script
    for name, script in list(globals().items())
    if callable(script) and name not in ("Callable", "Any", "say", "raw", "hear", "answer")
}


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[0].startswith("@"):
        with open(words[0][1:]) as file:
            words = file.read().split()
    SCRIPTS[words[0]](words[1] if len(words) > 1 else "")
