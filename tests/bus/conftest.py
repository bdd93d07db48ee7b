from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from support.place import Place

# The sources may be read-only, and two cores shared by many take their time.
settings.register_profile("bus", database=None, deadline=None)
settings.load_profile("bus")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--corpus-minutes",
        type=float,
        default=0.0,
        help="how long the corpus mode of the fuzzer runs",
    )


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def toy_process(place: Place) -> Place:
    """A place where the toy already serves, in a process of its own."""
    place.spawn()
    return place
