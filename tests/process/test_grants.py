"""From inside its wall, with its own key, a service may call what the policy grants it."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.house import House, contract, python
from support.samples import sample

from agent_box.bus import base, policy
from agent_box.bus.errors import Reason
from agent_box.bus.schema import Method, Stream
from agent_box.process.paths import SERVICES

CALL = """
import base64, json, sys
from importlib import import_module
from pathlib import Path
import msgspec
from agent_box.bus import base, keys
from agent_box.bus.client import Client
from agent_box.bus.errors import Refusal
from agent_box.process import confine, inside
from agent_box.process.paths import Paths
facts = json.loads(sys.argv[1])
service, paths = facts["service"], Paths(Path(facts["runtime"]), Path(facts["state"]))
def contract(name): return import_module(f"agent_box.{name}.contract").CONTRACT
inside.enter(confine.profile(contract(service), paths, Path(facts["config"])), confine.INNER_FD)
secret = keys.load_secret(paths.keys(service))
answers = []
for callee, name, body in facts["calls"]:
    found = contract(callee)
    method = {m.name: m for m in (*found.methods, *base.METHODS)}[name]
    request = msgspec.msgpack.decode(base64.b64decode(body), type=method.request)
    client = Client(service, callee, sock=paths.sock(callee), secret=secret,
                    server_key=keys.load_public(paths.public_keys, callee), contract=found)
    try:
        if hasattr(method, "window"):
            client.stream(name, request, deadline_s=10).__enter__()
        else:
            client.call(name, request, deadline_s=min(10, method.deadline_s))
        answers.append("done")
    except Refusal as refusal:
        answers.append(refusal.reason)
    client.close()
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    made = House()
    for service in SERVICES:
        made.start(service)
    yield made
    made.close()


def _methods(callee: str) -> list[Method | Stream]:
    # drain would end the callee for the tests after this one; it is granted like the others
    return [*contract(callee).methods, *(m for m in base.METHODS if m.name != "drain")]


@pytest.mark.parametrize("service", SERVICES)
def test_every_method_is_answered_by_the_policy(house: House, service: str) -> None:
    grants = policy.load(None, [contract(s) for s in SERVICES])
    methods = [(c, m) for c in contract(service).wall.calls for m in _methods(c)]
    calls: list[tuple[str, str, str]] = [
        (c, m.name, base64.b64encode(msgspec.msgpack.encode(sample(m.request))).decode())
        for c, m in methods
    ]
    facts: dict[str, Any] = {
        "service": service,
        "runtime": str(house.paths.runtime),
        "state": str(house.paths.state),
        "config": str(house.config),
        "calls": calls,
    }
    command = house.command(service, python("-c", CALL, json.dumps(facts)))
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    denied = {
        (callee, name)
        for (callee, name, _), answer in zip(calls, json.loads(ran.stdout), strict=True)
        if answer == Reason.DENIED
    }
    assert denied == {(c, m.name) for c, m in methods if not grants.allows(service, c, m.name)}
    assert {Reason.UNAVAILABLE.value} != set(json.loads(ran.stdout))


def test_the_test_sees_both(house: House) -> None:
    """There is something to deny and something to grant among those calls."""
    grants = policy.load(None, [contract(s) for s in SERVICES])
    found = {
        grants.allows(service, callee, method.name)
        for service in SERVICES
        for callee in contract(service).wall.calls
        for method in _methods(callee)
    }
    assert found == {True, False}
    assert not grants.allows("broker", "store", "put")
    assert grants.allows("broker", "store", "reveal")
