"""What a plane tells of itself while it runs, gathered so that no guest can flood anybody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from agent_box.netstack.contract import Flow, Verdict

_EVERY_S: Final = 10.0
_KINDS_MAX: Final = 64  # different denials in that time told one by one


@dataclass(frozen=True)
class Denied:
    """Flows or look-ups were refused. Name and address are the guest's and untrusted."""

    rule: str
    why: str
    name: str | None
    address: str | None
    port: int | None  # None: of a look-up
    protocol: Literal["tcp", "udp", "icmp", "dns", "ip"]
    count: int


@dataclass(frozen=True)
class Revoked:
    """An open flow was cut because the policy changed, or what it leads to."""

    rule: str
    why: str
    name: str | None
    address: str | None
    port: int | None
    protocol: Literal["tcp", "udp"]
    count: int


@dataclass(frozen=True)
class Limited:
    """A limit of the instance held something back."""

    what: Literal["flows", "pending", "descriptors", "names", "lookups", "streams"]
    count: int


Report = Denied | Revoked | Limited


class Reporter:
    """Tells the first of a kind at once, and of more of it once in ten seconds how many."""

    def __init__(self, tell: Callable[[Report], None]) -> None:
        self.tell = tell
        self.denied = 0
        self._since: dict[Report, int] = {}
        self._began = 0.0

    def deny(
        self,
        verdict: Verdict,
        *,
        name: str | None = None,
        address: str | None = None,
        port: int | None = None,
        protocol: Literal["tcp", "udp", "icmp", "dns", "ip"],
        now: float,
    ) -> None:
        self.denied += 1
        self._note(Denied(verdict.rule, verdict.why, name, address, port, protocol, 1), now)

    def deny_flow(self, verdict: Verdict, flow: Flow, now: float) -> None:
        self.deny(
            verdict,
            name=flow.name,
            address=flow.address,
            port=flow.port,
            protocol=flow.protocol,
            now=now,
        )

    def revoke(self, verdict: Verdict, flow: Flow, now: float) -> None:
        self.denied += 1
        name, address, port = flow.name, flow.address, flow.port
        self._note(Revoked(verdict.rule, verdict.why, name, address, port, flow.protocol, 1), now)

    def limit(
        self,
        what: Literal["flows", "pending", "descriptors", "names", "lookups", "streams"],
        now: float,
    ) -> None:
        self._note(Limited(what, 1), now)

    def flush(self, now: float, *, all_of_it: bool = False) -> None:
        """Tells what gathered, when it is time."""
        if not self._since or (now - self._began < _EVERY_S and not all_of_it):
            return
        since, self._since = self._since, {}
        for report, count in since.items():
            if count:
                self.tell(replace(report, count=count))

    def _note(self, report: Report, now: float) -> None:
        self.flush(now)
        if not self._since:
            self._began = now
        known = self._since.get(report)
        if known is not None:
            self._since[report] = known + 1
        elif len(self._since) < _KINDS_MAX:
            self._since[report] = 0  # told already
            self.tell(report)
        elif not isinstance(report, Limited):
            # Too many kinds: the rule is what matters, and rules are few.
            bare: Report = replace(report, name=None, address=None, port=None)
            if bare in self._since or len(self._since) < _KINDS_MAX * 2:
                self._since[bare] = self._since.get(bare, 0) + 1
            else:
                rest = Denied("many", "too many kinds of denials at a time", None, None, None,
                              report.protocol, 1)  # fmt: skip
                self._since[rest] = self._since.get(rest, 0) + 1
        else:
            self._since[report] = 1
