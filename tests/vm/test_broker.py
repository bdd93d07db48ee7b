"""Bindings in a real machine: the guest calls its endpoint, and the upstream sees the real key."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support import memory, procs
from support.canary import Canary
from support.nginxgit import PRESENT, USER, GitServer
from support.upstreams import App, Asked, Authority
from support.vm import CONFIG, START_S, Machines

pytestmark = [pytest.mark.timeout(600)]  # emulated, and hosts are busy

REAL = "sk-real-credential-of-the-host"
MINE = "refs/heads/agent-box/work/topic"
PRICES = """\
version = 1
currency = "USD"
[[models]]
kind = "anthropic"
model = "m"
input = 100
output = 100
"""


async def _answer(request: web.Request, asked: Asked) -> web.StreamResponse:
    usage = {"input_tokens": 60, "output_tokens": 40}
    return web.json_response({"ok": True, "model": "m", "usage": usage})


OK = '{"ok": true, "model": "m", "usage": {"input_tokens": 60, "output_tokens": 40}}'


class Upstreams:
    """A provider and a forge, outside of agent-box."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.authority = Authority()
        self.app = App(answer=_answer)
        self._done(self.app.start(self.authority.server()))
        self._place = Path(tempfile.mkdtemp(prefix="ab."))
        self.forge = GitServer(self._place, self.authority, REAL) if PRESENT else None
        if self.forge is not None:
            self.forge.make("o/app")

    def _done(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def config(self) -> str:
        names = ["anthropic", "few", "tokens", "cost"] + (["code"] if self.forge else [])
        lines = [f"bindings = {names}"]
        for name, more in (
            ("anthropic", ""),
            ("few", "max_requests = 2"),
            ("tokens", "max_tokens = 150"),
            ("cost", "max_cost = 0.015"),
        ):
            lines += [
                f"[bindings.{name}]",
                f'upstream = "https://localhost:{self.app.port}"',
                'kind = "anthropic"\ncredential = "key"\nallow_reserved = true',
                f'ca_file = "ca.pem"\n{more}\n[[bindings.{name}.routes]]',
                'path = "/v1/messages"\nmethods = ["POST"]\nmatch = "exact"',
            ]
        if self.forge is not None:
            lines += [
                f'[bindings.code]\nupstream = "https://localhost:{self.forge.port}"',
                'kind = "git-basic"\ncredential = "key"\nallow_reserved = true',
                f'ca_file = "ca.pem"\nbasic_user = "{USER}"',
                'repos = [{ name = "o/app", push = true }]',
            ]
        return CONFIG + "\n".join(lines) + "\n"

    def close(self) -> None:
        if self.forge is not None:
            self.forge.close()
        shutil.rmtree(self._place)
        self._done(self.app.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def outside() -> Iterator[Upstreams]:
    made = Upstreams()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def upstream(outside: Upstreams) -> App:
    return outside.app


@pytest.fixture(scope="module")
def host(outside: Upstreams) -> Iterator[Machines]:
    made = Machines(config=outside.config())
    try:
        place = made.home / "config" / "agent-box"
        (place / "ca.pem").write_bytes(outside.authority.pem)
        (place / "prices.toml").write_text(PRICES)
        assert made.run("secret", "set", "key", stdin=REAL).exit == 0
        assert made.run("create", "work", "--json").exit == 0
        made.start("work")
        yield made
    finally:
        made.close()


def shell(host: Machines, script: str) -> str:
    ran = host.run("exec", "work", "--", "sh", "-lc", script, timeout=START_S)
    return ran.out


def test_the_upstream_sees_the_key_and_the_guest_never_has_it(
    host: Machines, upstream: App
) -> None:
    app = upstream
    call = 'curl -s -d "{}" -H "x-api-key: $ANTHROPIC_API_KEY"'
    assert shell(host, f"{call} $ANTHROPIC_BASE_URL/v1/messages") == OK
    assert [asked.get("x-api-key") for asked in app.asked] == [[REAL]]
    shown = shell(host, "env; cat ~/.config/agent-box/* 2>/dev/null; true")
    assert "sk-agentbox-" in shown and REAL not in shown
    for script in (
        f"{call} $ANTHROPIC_BASE_URL/v1/other",
        f'{call} -H "Host: other.broker.internal" $ANTHROPIC_BASE_URL/v1/messages',
        'curl -s -d "{}" -H "x-api-key: wrong" $ANTHROPIC_BASE_URL/v1/messages',
    ):
        assert "agent_box_refused" in shell(host, script)
    assert len(app.asked) == 1
    kinds = host.kinds("work")
    assert "request-refused" in kinds and "nonce-refused" in kinds
    (row,) = host.run("usage", "work", "--json").result["usage"]
    assert (row["requests"], row["refused"]) == (1, 2)
    assert (row["tokens_in"], row["tokens_out"]) == (60, 40)


def test_the_guest_goes_on_after_the_broker_was_killed(host: Machines) -> None:
    """The daemon starts it again, with the same nonces; the guest only tries again."""
    script = """for i in $(seq 25); do
      said=$(curl -s -d "{}" -H "x-api-key: $ANTHROPIC_API_KEY" $ANTHROPIC_BASE_URL/v1/messages)
      read up rest </proc/uptime
      case "$said" in *ok*) echo $up ok;; *) echo $up no; sleep 0.05;; esac
    done"""
    trying = host.popen("exec", "work", "--", "sh", "-lc", script, stdout=subprocess.PIPE)
    assert trying.stdout is not None
    lines = [trying.stdout.readline()]
    host.kill("broker")
    lines += trying.stdout.readlines()
    trying.stdout.close()
    assert trying.wait(START_S) == 0
    assert lines[0].endswith("ok\n") and lines[-1].endswith("ok\n"), lines
    times = [float(line.split()[0]) for line in lines if line.endswith("ok\n")]
    longest = max(later - earlier for earlier, later in itertools.pairwise(times))
    print(f"\nlongest time without an answer: {longest:.2f} s, {len(lines) - len(times)} failed")
    host.up()


def test_budgets_end_and_say_so(host: Machines, upstream: App) -> None:
    before = len(upstream.asked)
    call = """for i in 1 2 3; do
      curl -s -d "{}" -H "x-api-key: $(printenv AGENT_BOX_$1_KEY)" \\
        "$(printenv AGENT_BOX_$1_URL)/v1/messages"; echo
    done"""
    for name, key in (("FEW", "max_requests"), ("TOKENS", "max_tokens"), ("COST", "max_cost")):
        said = shell(host, f"set {name}\n{call}").splitlines()
        assert said[:2] == [OK, OK], said
        assert '"code": "budget"' in said[2] and key in said[2], said
    assert len(upstream.asked) == before + 6
    rows = {row["binding"]: row for row in host.run("usage", "work", "--json").result["usage"]}
    assert [rows[name]["requests"] for name in ("few", "tokens", "cost")] == [2, 2, 2]
    assert rows["cost"]["cost_millionths"] == 2 * 100 * 100  # tokens, and a hundred of each


@pytest.mark.skipif(not PRESENT, reason="needs nginx, fcgiwrap and git")
@pytest.mark.slow
def test_git_pushes_to_its_own_branches_and_nowhere_else(
    host: Machines, outside: Upstreams
) -> None:
    assert outside.forge is not None
    url = f"https://localhost:{outside.forge.port}/o/app.git"
    said = shell(
        host,
        f"""cd && rm -rf app && git clone -q {url} app && cd app && date >now && git add now &&
        git -c user.name=a -c user.email=a@example.com commit -qm mine &&
        git push -q origin HEAD:{MINE} && echo pushed; git push origin HEAD:main 2>&1
        git push origin HEAD:refs/heads/agent-box/other/x 2>&1; echo end""",
    )
    assert "pushed" in said and said.count("HTTP 403") == 2, said
    assert outside.forge.refs("o/app") == [MINE, "refs/heads/main"]
    assert host.last("work", "request-refused")["reason"] == "push-ref"


@pytest.mark.slow
def test_credential_and_nonces_are_nowhere_else(host: Machines) -> None:
    """The credential nowhere but in store and broker; nonces in the machine alone."""
    shown = shell(host, "printenv AGENT_BOX_FEW_KEY; printenv ANTHROPIC_API_KEY").split()
    assert len(shown) == 2 and all(nonce.startswith("sk-agentbox-") for nonce in shown)
    real, few, main = (Canary(text.encode()) for text in (REAL, *shown))
    printed = []
    for verb in (
        ("logs", "work", "--json"),
        ("usage", "work"),
        ("inspect", "work", "--json"),
        ("doctor", "--json"),
        ("exec", "work", "--user", "root", "--", "dmesg"),
    ):
        ran = host.run(*verb)
        printed += [ran.out, ran.err]
    said = "".join(printed).encode()
    assert real.within(said) == few.within(said) == main.within(said) == []
    both = _without_beginning(few).and_also(_without_beginning(main))
    everything = real.and_also(both)
    shell(host, "sync")
    disks = host.paths.state / "instances"
    found = everything.in_files([host.home], longest=1 << 30)
    assert [each for each in found if not each.where.startswith(str(disks))] == []
    assert real.in_files([disks], longest=1 << 30) == []
    assert everything.in_processes() == []
    vmm = host.vmm("work")
    mine = {*host.pids(), vmm}
    for pid in list(mine):
        mine.update(procs.descendants(pid))
    left = {pid for name in ("store", "broker") for pid in host.inner(name)}
    closed = set()
    for pid in sorted(mine - left):
        try:
            assert memory.search(real, pid) == [], procs.cmdline(pid)
        except PermissionError:
            closed.add(pid)
    assert vmm not in closed
    assert any("memory of" in each.where for each in memory.search(both, vmm))


def _without_beginning(nonce: Canary) -> Canary:
    """All nonces begin alike, as the code says how."""
    del nonce.forms["its beginning"]
    return nonce


def test_a_changed_credential_counts_at_once_and_a_removed_one_is_named(
    host: Machines, upstream: App
) -> None:
    call = 'curl -s -d "{}" -H "x-api-key: $ANTHROPIC_API_KEY" $ANTHROPIC_BASE_URL/v1/messages'
    assert host.run("secret", "set", "key", stdin="sk-another-value").exit == 0
    assert shell(host, call) == OK
    assert upstream.asked[-1].get("x-api-key") == ["sk-another-value"]
    before = len(upstream.asked)
    assert host.run("secret", "rm", "key").exit == 0
    assert '"code": "credential-missing"' in shell(host, call)
    assert len(upstream.asked) == before
    assert "credential-missing" in host.run("doctor", "--json").out
    assert host.run("secret", "set", "key", stdin=REAL).exit == 0
    assert shell(host, call) == OK
