"""What the store answers, for one request: a credential for its time, or why there is none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from agent_box.broker import gate
from agent_box.broker.refusal import Reason, Refuse
from agent_box.bus.errors import Code, Refusal
from agent_box.process.sealedbox import Inbox, Unsealable
from agent_box.store.contract import Reveal, Revealed

ASK_S: Final = 5.0
AWAY: Final = Refuse(Reason.STORE, 503, "the credential store does not answer")
_SILENT: Final = (Code.UNAVAILABLE, Code.DEADLINE, Code.UNKNOWN_OUTCOME)
CLOSED: Final = Refuse(Reason.STORE, 503, "the credential store is locked or damaged")


class Vault:
    """Args:
    ask: the store's `reveal`. It raises `Refusal`.
    """

    def __init__(self, ask: Callable[[Reveal], Awaitable[Revealed]]) -> None:
        self._ask: Final = ask
        self._inbox: Final = Inbox()  # as old as this process: an older box opens no more

    async def answer(self, serial: int, credential: str) -> gate.Answer | Refuse:
        """Asks the store now, whatever it said a moment ago.

        Args:
            serial: of the request that it is for.
        """
        try:
            revealed = await self._ask(Reveal(name=credential, to=self._inbox.public))
            return gate.Answer(serial, self._inbox.open(revealed.box))
        except Refusal as refusal:
            if refusal.code is Code.NOT_FOUND:
                return gate.Answer(serial, None)
            return AWAY if refusal.code in _SILENT else CLOSED
        except Unsealable:
            return CLOSED
