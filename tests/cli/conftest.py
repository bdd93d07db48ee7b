"""An agent-box whose one guest is this host, for the verbs that reach into guests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.attached import Toys


@pytest.fixture(scope="module")
def shared_toys() -> Iterator[Toys]:
    made = Toys()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def toys(shared_toys: Toys) -> Iterator[Toys]:
    """With everything as it was at the beginning."""
    shared_toys.registry.state, shared_toys.registry.boots = "running", 1
    if shared_toys.channel.poll() is not None:
        shared_toys.start_channel()
    yield shared_toys
    if shared_toys.channel.poll() is not None:
        shared_toys.start_channel()
