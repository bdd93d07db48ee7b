"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if os.geteuid() == 0:
        pytest.exit("nothing of agent-box serves as root: run deploy/test", returncode=2)


@pytest.fixture
def house() -> Iterator[object]:
    """A `support.house.House`."""
    from support.house import House

    made = House()
    try:
        yield made
    finally:
        made.close()
