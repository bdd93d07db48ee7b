"""A helper that runs, and a connection to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.helperhouse import Client, HelperHouse


@pytest.fixture
def place() -> Iterator[HelperHouse]:
    made = HelperHouse()
    made.start()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def client(place: HelperHouse) -> Iterator[Client]:
    with place.client() as connected:
        yield connected
