"""A guest of the kernel's own TCP, and planes that serve it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.guestnet import Net
from support.tunguest import TunGuest


@pytest.fixture(scope="module")
def guest() -> Iterator[TunGuest]:
    made = TunGuest()
    yield made
    made.close()


@pytest.fixture
def net(guest: TunGuest, tmp_path: Path) -> Iterator[Callable[..., Net]]:
    """Makes a plane for the guest. Its name app.test is this host."""
    made: list[Net] = []

    def make(*rules: object, **more: object) -> Net:
        more.setdefault("hosts", {"app.test": "127.0.0.1"})
        made.append(Net(guest, tmp_path, *rules, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()
