"""The policy in force, asked for each flow and look-up; answers are kept while they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from agent_box.config.addresses import Network
from agent_box.netstack.contract import Flow, Policy, Verdict
from agent_box.netstack.policy import Rules, load

_KEPT_MAX: Final = 4096
_OWN_S: Final = 1.0  # the host's own addresses are read again after that
_UNKNOWN: Final = Verdict(
    verdict="deny", rule="own:unknown", why="the host does not tell its own addresses"
)


class Judge:
    """Every decision of a plane is made here, by `policy.Rules` alone."""

    def __init__(self, policy: Policy, own: Callable[[], frozenset[Network]]) -> None:
        """Raises `PolicyInvalid`."""
        self.rules: Rules = load(policy)
        self._read_own = own
        self._own: frozenset[Network] | None = None
        self._own_until = float("-inf")
        self._flows: dict[Flow, Verdict] = {}
        self._names: dict[str, Verdict] = {}

    def apply(self, policy: Policy) -> None:
        """Puts a policy in force. Raises `PolicyInvalid`; then the old one stays."""
        self.rules = load(policy)
        self._flows.clear()
        self._names.clear()

    def flow(self, flow: Flow, now: float) -> Verdict:
        own = self._own_now(now)
        verdict = self._flows.get(flow)
        if verdict is None:
            verdict = _UNKNOWN if own is None else self.rules.decide(flow, own=own)
            if len(self._flows) >= _KEPT_MAX:
                self._flows.clear()
            self._flows[flow] = verdict
        return verdict

    def name(self, untrusted_name: str) -> Verdict:
        """Whether a look-up may leave the host."""
        verdict = self._names.get(untrusted_name)
        if verdict is None:
            verdict = self.rules.decide_name(untrusted_name)
            if len(self._names) >= _KEPT_MAX:
                self._names.clear()
            self._names[untrusted_name] = verdict
        return verdict

    def alias(self, flow: Flow, untrusted_alias: str, now: float) -> Verdict | None:
        """The deny rule against another name that the flow's name stands for, if there is one.

        An allow rule need not name it: what a name is an alias for is not the operator's
        choice, as its address is not. What a deny rule names stays shut by any way there.
        """
        other = Flow(
            name=untrusted_alias,
            address=flow.address,
            port=flow.port,
            protocol=flow.protocol,
            hello="unread",
            sni=None,
        )
        verdict = self.flow(other, now)
        return verdict if verdict.rule.startswith("deny:") else None

    def _own_now(self, now: float) -> frozenset[Network] | None:
        if now >= self._own_until:
            self._own_until = now + _OWN_S
            try:
                own: frozenset[Network] | None = self._read_own()
            except OSError:
                own = None  # then nothing may be judged to be not ours
            if own != self._own:
                self._own = own
                self._flows.clear()
        return self._own
