"""The registry on the bus: which handler answers which method."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NoReturn

from agent_box.bus import durable, policy
from agent_box.bus.doorbell import Publisher
from agent_box.bus.durable import Damaged, InUse
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.outcomes import Outcomes, Prior
from agent_box.bus.schema import Wire
from agent_box.process.skeleton import CannotServe
from agent_box.registry.adapter import Registry
from agent_box.registry.contract import CONTRACT
from agent_box.registry.database import Database

if TYPE_CHECKING:
    from agent_box.bus.server import Handler
    from agent_box.process.skeleton import Context, Service

DATABASE: Final = "registry.db"


class RegistryService:
    """See `process.skeleton.Service`."""

    def __init__(self, context: Context, database: Database) -> None:
        self._context = context
        self._bell: Publisher | None = None
        self._registry = registry = Registry(
            database=database,
            config=context.config,
            ask=self._ask,
            epoch=context.epoch,
            log=context.log,
            tasks=context.tasks,
            on_append=self._ring,
        )
        self.outcomes: Outcomes | None = database.outcomes
        self.handlers: Mapping[str, Handler] = {
            "create": registry.create,
            "start": registry.start_instance,
            "stop": registry.stop_instance,
            "pause": registry.pause,
            "resume": registry.resume,
            "delete": registry.delete,
            "follow": lambda request, call: registry.follow(request),
            "list": lambda request, call: registry.list(),
            "inspect": lambda request, call: registry.inspect(request),
            "logs": lambda request, call: registry.logs(request),
            "verify": lambda request, call: registry.verify(),
            "head": lambda request, call: registry.head(),
            "note": lambda request, call: registry.note(call.caller, request),
            "policy_show": lambda request, call: registry.policy_show(request),
            "policy_set": lambda request, call: registry.policy_set(request, call),
            "policy_check": lambda request, call: registry.policy_check(request),
        }

    async def start(self) -> None:
        """Ready when the records are read; the engine is asked in the background."""
        context = self._context
        grants = policy.load(None, (CONTRACT,))
        self._bell = Publisher(
            context.server.gate,
            sock=context.paths.doorbell(CONTRACT.service),
            secret=context.secret,
            service=CONTRACT.service,
            roles=grants.callers(CONTRACT.service, policy.DOORBELL),
        )
        await self._registry.start()
        if tampered := self._registry.core.tampered():
            context.problem = f"records are refused: {', '.join(p.name for p in tampered)}"
        context.tasks.spawn(self._hush_when_draining(), name="hush")
        context.tasks.spawn(self._registry.sweep(), name="sweep")
        self._registry.core.offline |= self._registry.core.live()
        self._registry.settle()
        self._registry.reconnect()

    async def stop(self) -> None:
        self._registry.close()
        if self._bell is not None:
            self._bell.close()

    async def _hush_when_draining(self) -> None:
        await self._context.server.drain_asked.wait()
        self._registry.hush()

    async def _ask(self, service: str, method: str, request: Wire, deadline_s: float) -> Wire:
        return await self._context.client(service).call(method, request, deadline_s=deadline_s)

    def _ring(self, seq: int) -> None:
        if self._bell is not None:
            self._bell.ring(self._context.epoch, seq)


class Closed:
    """A registry whose database cannot be opened: it says why to whoever asks.

    Nothing that is damaged is made anew: what it held would be lost without a word.
    """

    def __init__(self, refusal: Refusal) -> None:
        self._refusal = refusal
        self.handlers: Mapping[str, Handler] = {m.name: self._refuse for m in CONTRACT.methods}
        self.outcomes: Outcomes | None = self

    async def start(self) -> None:
        """There is nothing to start."""

    async def stop(self) -> None:
        """There is nothing to stop."""

    def lookup(self, caller: str, request_id: bytes) -> Prior | None:
        self._refuse()

    def record(self, caller: str, request_id: bytes, method: str, state: str, body: bytes) -> None:
        self._refuse()

    def _refuse(self, *_request: object) -> NoReturn:
        raise self._refusal


def build(context: Context) -> Service:
    """What `process.skeleton.run` calls.

    Raises:
        CannotServe: another process has the database.
    """
    path = context.data / DATABASE
    try:
        return RegistryService(context, Database(path))
    except InUse as error:
        raise CannotServe(str(error)) from None
    except Damaged as error:
        refusal = Refusal(Reason.TAMPERED, f"the registry stays closed: {error}")
    except (sqlite3.Error, OSError) as error:
        told = durable.refusal(path, error)
        refusal = Refusal(told.reason, f"the registry has no database: {told.message}")
    context.log.warning("no database", why=refusal.message)
    context.problem = refusal.message
    return Closed(refusal)
