"""A run of codex beside the same prompt put to codex directly in the same machine, how soon
after a start the model's first word is there, and what the services take meanwhile. Prints JSON.

    python tests/bench/bench_run.py [ROUNDS]

The machine is emulated, the model the scripted one, which answers at once, behind the broker for
both. Directly means: a client of the protocol in the guest, on codex's own standard input and
output, timed by the guest's clock. The two take turns, so that what else the host does meets
both. Seconds, medians; processor time beside, which a busy host does not lengthen. PSS is from
/proc/PID/smaps_rollup, the most of what was seen of each process while the model's words came.
Each turn is told on stderr. A quiet host needs two minutes for five rounds.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_services import pss_kib
from support import built, cli, procs
from support.source import ROOT
from support.upstreams import Authority
from support.vm import Machines

from agent_box.config import presets
from agent_box.process.paths import PROGRAMS

NAME = "work"
PROMPT = "Say something."
DRIPS = "SLOW"  # a word each half second
LOOKS, LOOK_S = 8, 0.5
STARTS = 3
BOUND_S = 300.0
CONFIG = """\
version = 1
[engine]
accel = "tcg"
[profiles.default]
cpus = 1
memory = "1G"
disk = "1G"
harness = "codex"
bindings = ["model"]
[bindings.model]
upstream = "https://127.0.0.1:{port}"
kind = "openai"
credential = "model"
ca_file = "ca.pem"
allow_reserved = true
routes = [{{ path = "/v1/", match = "prefix", methods = ["GET", "POST"] }}]
"""
# The client in the guest: what `run` says to a harness, and seconds since codex was started.
DIRECT = """
import json, subprocess, sys, time
began = time.monotonic()
agent = subprocess.Popen([sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
found = {}
def since(name):
    found.setdefault(name, time.monotonic() - began)
def say(message):
    agent.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\\n")
    agent.stdin.flush()
def ask(id, method, **params):
    say({"id": id, "method": method, "params": params})
    for line in agent.stdout:
        message = json.loads(line)
        if message.get("params", {}).get("update", {}).get("sessionUpdate") == (
            "agent_message_chunk"
        ):
            since("first_word")
        if message.get("id") == id:
            since(method)
            return message["result"]
    sys.exit("codex ended")
ask(0, "initialize", protocolVersion=1, clientCapabilities={})
session = ask(1, "session/new", cwd="/home/agent/work", mcpServers=[])["sessionId"]
words = [{"type": "text", "text": sys.argv[2]}]
ask(2, "session/prompt", sessionId=session, prompt=words)
agent.kill()
agent.wait()
since("ended")
print(json.dumps(found))
"""


class Scene:
    """A machine with codex that runs, and the model."""

    def __init__(self) -> None:
        self.machines = Machines(config="version = 1\n")
        try:
            self.env = self.machines.env
            self._model()
            built.install_layer(self.machines.paths)
            self.run("create", NAME)
        except BaseException:
            self.machines.close()
            raise

    def _model(self) -> None:
        outside = self.machines.home / "outside"
        outside.mkdir()
        key = outside / "key"
        key.write_text(secrets.token_hex(24))
        authority = Authority()
        tls = map(str, authority.files(outside))
        self.model = subprocess.Popen(
            [
                *(sys.executable, str(ROOT / "deploy/scripted_model.py")),
                *("--key-file", str(key), "--tls", *tls),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.model.stdout is not None
        port = int(self.model.stdout.readline())
        config = self.machines.home / "config/agent-box"
        (config / "ca.pem").write_bytes(authority.pem)
        (config / "config.toml").write_text(CONFIG.format(port=port))
        self.run("secret", "set", "model", stdin=key.read_text())

    def run(self, *words: str, stdin: str = "") -> str:
        ran = self.machines.run(*words, stdin=stdin, timeout=BOUND_S)
        if ran.exit:
            raise RuntimeError(f"{words[0]} exited {ran.exit}: {ran.err}")
        return ran.out

    def direct(self) -> dict[str, float]:
        """Codex, driven by a client in the guest."""
        (program,) = presets.load("codex").command
        said = self.run("exec", NAME, "--", "python3", "-I", "-c", DIRECT, program, PROMPT)
        found: dict[str, float] = json.loads(said)
        return found

    def through(self) -> dict[str, float]:
        """`agent-box run`, from its start to its end."""
        begun = time.monotonic()
        process = subprocess.Popen(
            [str(cli.BINARY), "run", NAME, "--prompt", PROMPT, "--json"],
            env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        found: dict[str, float] = {}
        for line in process.stdout:
            item = json.loads(line)
            kind = item.get("kind", item["type"])
            if kind in ("run", "session", "agent_message_chunk"):
                found.setdefault(kind, time.monotonic() - begun)
        process.stdout.close()
        if process.wait():
            raise RuntimeError(f"run exited {process.returncode}")
        return {
            "begun": found["run"],
            "session": found["session"],
            "first_word": found["agent_message_chunk"],
            "ended": time.monotonic() - begun,
        }

    def started(self) -> dict[str, float]:
        """A start of the stopped machine and a run at once."""
        self.run("stop", NAME)
        begun = time.monotonic()
        self.run("start", NAME)
        there = time.monotonic() - begun
        ran = self.through()
        return {"start": there, "first_word": there + ran["first_word"]}

    def processes(self) -> dict[str, list[int]]:
        """Those of the services, of their supervisor, and of the machine, by name."""
        live = self.machines
        found = {"supervisord": [live.daemon_pid()]}
        found |= {name: live.pids(name) for name in PROGRAMS}
        id = json.loads(self.run("inspect", NAME, "--json").splitlines()[-1])["result"]["id"]
        record = json.loads((live.paths.state / "instances" / id / "state.json").read_text())
        for name, proc in record["procs"].items():
            if proc is not None:
                found.setdefault(name.removesuffix("_jail"), []).append(proc["pid"])
        return found

    def memory(self) -> dict[str, float]:
        """MiB of PSS."""
        return {
            name: round(sum(map(pss_kib, pids)) / 1024, 1)
            for name, pids in self.processes().items()
        }

    def memory_during(self) -> dict[str, float]:
        process = subprocess.Popen(
            [str(cli.BINARY), "run", NAME, "--prompt", DRIPS],
            env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        most: dict[str, float] = {}
        try:
            os.read(process.stdout.fileno(), 1)  # words come
            for _ in range(LOOKS):
                for name, mib in {
                    **self.memory(), "command line": round(pss_kib(process.pid) / 1024, 1)
                }.items():  # fmt: skip
                    most[name] = max(mib, most.get(name, 0))
                time.sleep(LOOK_S)  # while more words come; what it uses is seen by looking only
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate()
        return most

    def close(self) -> None:
        self.model.terminate()
        self.model.wait()
        self.machines.close()


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in rows), 2) for name in rows[0]}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    scene = Scene()
    rows: dict[str, list[dict[str, float]]] = {"direct": [], "run": [], "from_start": []}
    try:
        scene.machines.start(NAME)
        idle = scene.memory()
        turns: dict[str, Callable[[], dict[str, float]]]
        turns = {"direct": scene.direct, "run": scene.through}
        told("what is read once", scene.through())
        during = told("memory", scene.memory_during())
        for _ in range(rounds):
            for name, turn in turns.items():
                used = _processor(scene)
                row = turn()
                row |= {f"{key}_processor": s - used[key] for key, s in _processor(scene).items()}
                rows[name].append(told(name, row))
        for _ in range(STARTS):
            rows["from_start"].append(told("from_start", scene.started()))
    finally:
        scene.close()
    more = [r["ended"] - d["ended"] for r, d in zip(rows["run"], rows["direct"], strict=True)]
    result: dict[str, Any] = {name: medians(found) for name, found in rows.items()}
    result |= {
        "run_beyond_direct": round(statistics.median(more), 2),
        "each": [round(value, 2) for value in more],
        "pss_mib_idle": idle,
        "pss_mib_during_a_run": during,
        "load": [round(value, 1) for value in os.getloadavg()],
    }
    print(json.dumps(result, indent=2))


def told(name: str, row: dict[str, float]) -> dict[str, float]:
    print(name, {key: round(value, 2) for key, value in row.items()}, file=sys.stderr, flush=True)
    return row


def _processor(scene: Scene) -> dict[str, float]:
    """Seconds that the machine and our own services have used."""
    found = scene.processes()
    vmm = found.pop("vmm")
    ticks = os.sysconf("SC_CLK_TCK")
    ours = {pid for pids in found.values() for pid in pids}
    return {
        "machine": sum(map(procs.cpu_ticks, vmm)) / ticks,
        "services": sum(map(procs.cpu_ticks, ours)) / ticks,
    }


if __name__ == "__main__":
    main()
