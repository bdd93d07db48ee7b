"""Waits for what happens in another process and tells nobody when it did."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(what: str, look: Callable[[], T], *, seconds: float = 20.0) -> T:
    """The first true value of `look`. The bound is generous: it only ends a test that hangs.

    Raises:
        AssertionError: it never came true; names `what`.
    """
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.01)
    return found
