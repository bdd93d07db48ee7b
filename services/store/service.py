"""The store on the bus: which handler answers which method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from agent_box.bus.outcomes import Outcomes, SqliteOutcomes
from agent_box.bus.schema import Empty, Wire
from agent_box.store import handing
from agent_box.store.adapter import Store
from agent_box.store.contract import (
    Credentials,
    Name,
    Protect,
    Put,
    Reveal,
    Revealed,
    SealKey,
    Stored,
    Unlock,
)

if TYPE_CHECKING:
    from agent_box.bus.server import Call, Handler
    from agent_box.process.skeleton import Context


class StoreService:
    """See `process.skeleton.Service`. It is as ready as it will ever be when it is built:
    what stops it is not mended by waiting, and `hello` tells it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = Store(
            data=context.data,
            keys=context.paths.keys(context.contract.service),
            handed=handing.take,
            log=context.log,
            outcomes=SqliteOutcomes,
        )
        self._tell()
        self.outcomes: Outcomes | None = self._store
        self.handlers: Mapping[str, Handler] = {
            "seal_key": self._seal_key,
            "put": self._put,
            "list": self._list,
            "remove": self._remove,
            "reveal": self._reveal,
            "unlock": self._unlock,
            "protect": self._protect,
        }

    async def start(self) -> None:
        """Everything is open already, or is not to be opened."""

    async def stop(self) -> None:
        self._store.close()

    def _seal_key(self, request: Empty, call: Call) -> SealKey:
        return self._store.seal_key()

    def _put(self, request: Put, call: Call) -> Stored:
        return self._store.put(request)

    def _list(self, request: Empty, call: Call) -> Credentials:
        return self._store.list()

    def _remove(self, request: Name, call: Call) -> Wire:
        return self._store.remove(request, call.commit)

    def _reveal(self, request: Reveal, call: Call) -> Revealed:
        return self._store.reveal(request)

    async def _unlock(self, request: Unlock, call: Call) -> Empty:
        try:
            return await self._store.unlock(request)
        finally:
            self._tell()

    async def _protect(self, request: Protect, call: Call) -> Empty:
        try:
            return await self._store.protect(request)
        finally:
            self._tell()

    def _tell(self) -> None:
        self._context.problem = self._store.problem


def build(context: Context) -> StoreService:
    """What `process.skeleton.run` calls."""
    return StoreService(context)
