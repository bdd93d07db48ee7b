"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from support.machines import Machines

# No example has a time: hosts are busy.
settings.register_profile("agent-box", deadline=None)
settings.load_profile("agent-box")


def pytest_configure(config: pytest.Config) -> None:
    if os.geteuid() == 0:
        pytest.exit("nothing of agent-box serves as root: run deploy/test", returncode=2)
    # Whoever runs the tests in the background, or under nohup, lets them ignore these, and so
    # would every program that a test starts and signals.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Soaks, long fuzzing and full kill counts have an hour each where they name no time."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(autouse=True)
def private_umask() -> Iterator[None]:
    """What the product runs under; a test that changes it changes it for itself."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture
def house() -> Iterator[object]:
    """A `support.house.House`."""
    from support.house import House

    made = House()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def machines() -> Iterator[object]:
    """A `support.machines.Machines` that is up."""
    from support.machines import Machines

    with closing(Machines()) as made:
        made.up()
        yield made


@pytest.fixture(scope="module")
def port(machines: Machines) -> str:
    return machines.port()
