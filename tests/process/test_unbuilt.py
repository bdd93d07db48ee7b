"""The services that are not built yet are real: confined, on the bus, and plain about it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.house import House, contract
from support.samples import sample

from agent_box.bus import base, policy
from agent_box.bus.client import Client
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.schema import Empty, Method, Stream
from agent_box.process.skeleton import Unbuilt

UNBUILT = ("netstack",)  # in part


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    made = House()
    for service in UNBUILT:
        made.start(service)
    yield made
    made.close()


def call(client: Client, name: str) -> object:
    return client.call(name, Empty(), deadline_s=10)


@pytest.mark.parametrize("service", UNBUILT)
def test_it_says_hello_and_what_is_missing(house: House, service: str) -> None:
    with house.client(service) as client:
        hello = call(client, "hello")
        assert isinstance(hello, base.Hello)
        assert (hello.service, hello.ready, hello.pid) == (service, True, 1)
        assert hello.problem is not None and hello.problem.startswith("this version ")
        assert len(hello.epoch) == 16
        assert call(client, "ping") == Empty()
        assert isinstance(call(client, "confinement"), base.Confinement)


# What needs nothing that is missing.
BUILT = {
    ("netstack", "check"),
}


def _granted() -> list[tuple[str, str, Method | Stream]]:
    contracts = [contract(service) for service in UNBUILT]
    grants = policy.load(None, contracts)
    return [
        (found.service, caller, method)
        for found in contracts
        for method in found.methods
        if (found.service, method.name) not in BUILT
        for caller in sorted(grants.callers(found.service, method.name))
    ]


@pytest.mark.parametrize(
    ("service", "caller", "method"), _granted(), ids=lambda p: getattr(p, "name", p)
)
def test_each_method_is_refused_as_unavailable(
    house: House, service: str, caller: str, method: Method | Stream
) -> None:
    request = sample(method.request)
    with house.client(service, caller) as client, pytest.raises(Refusal) as refused:
        if isinstance(method, Stream):
            with client.stream(method.name, request, deadline_s=10) as stream:
                stream.finish()
        else:
            client.call(method.name, request, deadline_s=min(10, method.deadline_s))
    assert refused.value.reason is Reason.UNAVAILABLE
    assert "is not built" in refused.value.message or "are not built" in refused.value.message


def test_what_nothing_began_may_be_sent_again() -> None:
    assert Unbuilt(contract("engine"), "").outcomes.lookup("registry", bytes(16)) is None
