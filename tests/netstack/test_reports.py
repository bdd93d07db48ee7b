"""What a plane tells is gathered, so that no guest floods the journal."""

from __future__ import annotations

from agent_box.netstack.contract import Flow, Verdict
from agent_box.netstack.reports import Denied, Limited, Report, Reporter, Revoked

NO = Verdict(verdict="deny", rule="mode:allowlist", why="no rule allows it")


def test_the_first_is_told_at_once_and_the_rest_is_counted() -> None:
    told: list[Report] = []
    reporter = Reporter(told.append)
    for _ in range(5):
        reporter.deny(NO, name="a.test", port=1, protocol="tcp", now=0.0)
    reporter.limit("flows", 1.0)
    assert told == [
        Denied("mode:allowlist", "no rule allows it", "a.test", None, 1, "tcp", 1),
        Limited("flows", 1),
    ]
    reporter.flush(9.0)
    assert len(told) == 2
    reporter.flush(10.0)
    assert told[2:] == [Denied("mode:allowlist", NO.why, "a.test", None, 1, "tcp", 4)]
    assert reporter.denied == 5


def test_many_kinds_are_told_by_their_rule() -> None:
    told: list[Report] = []
    reporter = Reporter(told.append)
    for number in range(100_000):
        reporter.deny(NO, name=f"{number}.test", protocol="dns", now=0.0)
    assert len(told) < 100
    reporter.flush(11.0)
    assert len(told) < 150
    assert sum(report.count for report in told if isinstance(report, Denied)) == 100_000


def test_revocations_are_gathered_too() -> None:
    told: list[Report] = []
    reporter = Reporter(told.append)
    for number in range(5000):
        name = f"{number}.test"
        flow = Flow(name=name, address=None, port=1, protocol="tcp", hello="unread", sni=None)
        reporter.revoke(NO, flow, 0.0)
    assert told[0] == Revoked("mode:allowlist", NO.why, "0.test", None, 1, "tcp", 1)
    assert len(told) < 100
    reporter.flush(11.0)
    assert sum(report.count for report in told) == 5000 == reporter.denied
