"""doctor's look-up of a name that is denied."""

from __future__ import annotations

import pytest

from agent_box.cli import egress
from agent_box.netstack import plane, policy
from agent_box.netstack.contract import Verdict


def test_it_is_refused() -> None:
    assert egress.problem() is None


def test_a_policy_that_is_not_enforced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = Verdict(verdict="allow", rule="x", why="x")
    monkeypatch.setattr(policy.Rules, "decide_name", lambda *_, **__: allowed)
    assert egress.problem() is not None


def test_a_plane_that_cannot_be_made_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(plane, "Plane", fail)
    assert egress.problem() == "no data plane can be made: Too many open files"
