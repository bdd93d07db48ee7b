"""What other services may have written into the journal, and how much of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agent_box.bus.errors import Reason, Refusal
from agent_box.registry import contract as api
from agent_box.registry import journal
from agent_box.registry.journal import New

# Who may speak for which source. An operator's claims are no events.
MAY_SAY: Final[dict[str, frozenset[str]]] = {
    "engine": frozenset({"host-observed"}),
    "netstack": frozenset({"host-observed"}),
    "broker": frozenset({"host-observed"}),
    "channel": frozenset({"host-observed", "guest-channel", "agent-reported"}),
    "supervisor": frozenset({"host-observed"}),
}
NOTES_BURST: Final = 1_000  # of one instance by one service
NOTES_PER_S: Final = 20


@dataclass
class _Quota:
    left: float
    at_ms: int
    dropped: int


class Notes:
    """Args:
    kinds: by role, the kinds of event that its contract declares.
    """

    def __init__(self, kinds: Mapping[str, frozenset[str]]) -> None:
        self._kinds = kinds
        self._quotas: dict[tuple[str, str], _Quota] = {}

    def allowed(self, caller: str, untrusted: api.Note) -> None:
        """Raises Refusal: it may not say that."""
        if untrusted.source not in MAY_SAY.get(caller, frozenset()):
            raise Refusal(Reason.DENIED, f"{caller} may not speak for {untrusted.source}")
        if untrusted.kind not in self._kinds.get(caller, frozenset()):
            raise Refusal(Reason.BAD_REQUEST, f"{caller} declares no event {untrusted.kind[:64]!r}")
        if len(untrusted.event_id) != 16:
            raise Refusal(Reason.BAD_REQUEST, "an event id has 16 bytes")

    def events(
        self, caller: str, untrusted: api.Note, name: str | None, *, now_ms: int
    ) -> tuple[New, ...]:
        """The event of another service as it is written down, and one that tells of those that
        were dropped before it.

        Args:
            name: of the instance that it is about.

        Raises:
            Refusal: it is no event, or there are too many.
        """
        new = New(
            kind=untrusted.kind,
            by=caller,
            source=untrusted.source,
            instance=untrusted.instance,
            name=name,
            facts=untrusted.facts,
        )
        try:
            journal.check(new)
        except journal.BadEvent as error:
            raise Refusal(Reason.BAD_REQUEST, f"the event is refused: {error}") from None
        dropped = self._take(caller, untrusted.instance or "", now_ms)
        if not dropped:
            return (new,)
        told = New(
            kind="notes-dropped",
            by=journal.REGISTRY,
            source="host-observed",
            instance=new.instance,
            name=new.name,
            facts={"caller": caller, "dropped": dropped},
        )
        return (told, new)

    def forget(self, instance: str) -> None:
        """Of an instance that is gone nobody is counted any more."""
        for key in [key for key in self._quotas if key[1] == instance]:
            del self._quotas[key]

    def _take(self, caller: str, instance: str, now_ms: int) -> int:
        """Takes one of what may be noted; returns how many were dropped since the last one.

        A guest can cause events as fast as it likes. Without a bound it would push the
        history of all others out of the journal.
        """
        quota = self._quotas.setdefault((caller, instance), _Quota(NOTES_BURST, now_ms, 0))
        gained = max(0, now_ms - quota.at_ms) * NOTES_PER_S / 1000
        quota.left, quota.at_ms = min(NOTES_BURST, quota.left + gained), now_ms
        if quota.left < 1:
            quota.dropped += 1
            raise Refusal(Reason.EXHAUSTED, f"{caller} notes too much of one instance")
        quota.left -= 1
        dropped, quota.dropped = quota.dropped, 0
        return dropped
