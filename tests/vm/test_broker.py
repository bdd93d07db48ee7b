"""Bindings in a real machine: the guest calls its endpoint, and the upstream sees the real key."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.upstreams import App, Authority
from support.vm import CONFIG, START_S, Machines

pytestmark = [pytest.mark.serial, pytest.mark.timeout(600)]  # emulated, and hosts are busy

REAL = "sk-real-credential-of-the-host"


@pytest.fixture(scope="module")
def upstream() -> Iterator[tuple[App, Authority]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def done(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    authority = Authority()
    app = App()
    done(app.start(authority.server()))
    yield app, authority
    done(app.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def host(upstream: tuple[App, Authority]) -> Iterator[Machines]:
    app, authority = upstream
    config = CONFIG + (
        'bindings = ["anthropic"]\n'
        f'[bindings.anthropic]\nupstream = "https://localhost:{app.port}"\n'
        'kind = "anthropic"\ncredential = "key"\nallow_reserved = true\nca_file = "ca.pem"\n'
        '[[bindings.anthropic.routes]]\npath = "/v1/messages"\nmethods = ["POST"]\n'
        'match = "exact"\n'
    )
    made = Machines(config=config)
    try:
        (made.home / "config" / "agent-box" / "ca.pem").write_bytes(authority.pem)
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
    host: Machines, upstream: tuple[App, Authority]
) -> None:
    app, _ = upstream
    call = 'curl -s -d "{}" -H "x-api-key: $ANTHROPIC_API_KEY"'
    assert shell(host, f"{call} $ANTHROPIC_BASE_URL/v1/messages") == '{"ok": true}'
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


def test_the_guest_goes_on_after_the_broker_was_killed(
    host: Machines, upstream: tuple[App, Authority]
) -> None:
    app, _ = upstream
    before = len(app.asked)
    host.kill("broker")
    host.up()
    call = 'curl -s --retry 5 --retry-all-errors -d "{}" -H "x-api-key: $ANTHROPIC_API_KEY"'
    assert shell(host, f"{call} $ANTHROPIC_BASE_URL/v1/messages") == '{"ok": true}'
    assert len(app.asked) == before + 1
