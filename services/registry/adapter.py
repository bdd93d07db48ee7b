"""The registry as it runs: carries out what `core` decides, with the database, the config
file, the clock and the other services.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Protocol, TypeVar

from agent_box import __version__
from agent_box.broker.contract import CONTRACT as BROKER
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.schema import Contract, Empty, Wire
from agent_box.channel.contract import CONTRACT as CHANNEL
from agent_box.config.errors import ConfigError
from agent_box.config.load import load
from agent_box.engine import contract as engine
from agent_box.netstack import contract as net
from agent_box.registry import contract as api
from agent_box.registry import core as deciding
from agent_box.registry import journal
from agent_box.registry.core import Command, Core, Plan
from agent_box.registry.database import Database, Page, Query, iterate
from agent_box.registry.journal import BadEvent, Entry, New

R = TypeVar("R")
Ask = Callable[[str, str, Wire, float], Awaitable[Wire]]  # service, method, request, seconds

LIST_S: Final = 5.0
QUERY_S: Final = 3.0
CREATE_S: Final = 120.0
DELETE_S: Final = 120.0
APPLY_S: Final = 30.0
CHECK_S: Final = 5.0
WAIT_MAX_MS: Final = 30_000
RETRY_FIRST_S: Final = 0.5
RETRY_LAST_S: Final = 30.0
AGE_CHECK_MS: Final = 6 * 3600 * 1000
VERIFY_ROWS: Final = 200  # between two of which other calls get their turn

NOTERS: Final[tuple[Contract, ...]] = (engine.CONTRACT, net.CONTRACT, BROKER, CHANNEL)


class Log(Protocol):
    def info(self, event: str, **fields: object) -> None: ...
    def warning(self, event: str, **fields: object) -> None: ...


class Outcome(Protocol):
    """What a plan may put on record of its call; `bus.server.Call` is one."""

    def begin(self) -> None: ...
    def commit(self, reply: Wire) -> None: ...


def unix_ms() -> int:
    return time.time_ns() // 1_000_000


def kinds(contracts: tuple[Contract, ...]) -> dict[str, frozenset[str]]:
    """By role, the kinds of event that its contract declares."""
    return {c.service: frozenset(e.name for e in c.events) for c in contracts}


class Registry:
    """One registry.

    Args:
        database: open; closed by `close`.
        config: the config file, read again for each request that uses it.
        ask: calls another service and gives its reply, or raises its `Refusal`.
        epoch: of this start.
        on_append: is told the seq of the last event after each commit.
        now_ms: Unix time in milliseconds.
    """

    def __init__(
        self,
        *,
        database: Database,
        config: Path | None,
        ask: Ask,
        epoch: bytes,
        log: Log,
        on_append: Callable[[int], None],
        now_ms: Callable[[], int] = unix_ms,
    ) -> None:
        self._database = database
        self._config = config
        self._ask = ask
        self._epoch = epoch
        self._log = log
        self._on_append = on_append
        self._now_ms = now_ms
        self._aged_ms = 0
        self._settling = False
        self._closing = asyncio.Event()
        self._bell = asyncio.Event()  # replaced each time it rings
        self.core = Core(kinds(NOTERS))

    # --------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Takes the records in and undoes at once what was interrupted before it began.

        A full disk does not keep it from serving what can be read.
        """
        self.core.load(self._database.found())
        for problem in self.core.tampered():
            self._log.warning("a record is refused", name=problem.name, why=problem.problem)
        try:
            await self._run(self.core.interrupted())
            self._append(
                New(
                    kind="started",
                    by=journal.REGISTRY,
                    source="host-observed",
                    instance=None,
                    name=None,
                    facts={"version": __version__, "refused": len(self.core.tampered())},
                )
            )
        except Refusal as refusal:
            self._log.warning("the start is not on record", why=refusal.message)

    async def settle(self) -> None:
        """Brings the records and the engine together, however long the engine takes to answer.
        Run it in the background; it ends when nothing is left, or when the registry closes.
        Only one is at work at a time; another one ends at once."""
        if self._settling:
            return
        self._settling = True
        try:
            await self._settle()
        finally:
            self._settling = False

    async def _settle(self) -> None:
        delay, told = RETRY_FIRST_S, ""
        while self.core.unsettled() and not self._closing.is_set():
            try:
                await self._run(self.core.reconcile())
            except Refusal as refusal:
                if refusal.message != told:
                    told = refusal.message
                    self._log.info("records are not settled yet", why=told)
            if not self.core.unsettled():
                return
            try:
                await asyncio.wait_for(self._closing.wait(), delay)
            except TimeoutError:
                delay = min(RETRY_LAST_S, delay * 2)

    def hush(self) -> None:
        """Answers everybody who waits for events: the process ends soon."""
        self._closing.set()
        self._ring()

    def close(self) -> None:
        self.hush()
        self._database.close()

    # ------------------------------------------------------------------------ records

    async def create(self, request: api.Create, call: Outcome) -> api.Row:
        id = os.urandom(16).hex()
        return await self._run(self.core.create(request, id=id, now_ms=self._now_ms()), call)

    def list(self) -> api.Rows:
        return self.core.rows()

    async def inspect(self, request: api.Name) -> api.Instance:
        return await self._run(self.core.inspect(request.name, now_ms=self._now_ms()))

    def policy_show(self, request: api.Name) -> api.PolicyView:
        return self.core.policy_show(request.name)

    async def policy_set(self, request: api.PolicySet, call: Outcome) -> api.PolicyView:
        return await self._run(self.core.policy_set(request, now_ms=self._now_ms()), call)

    async def policy_check(self, request: api.PolicyCheck) -> api.PolicyVerdict:
        return await self._run(self.core.policy_check(request))

    # ------------------------------------------------------------------------ journal

    def note(self, caller: str, request: api.Note) -> api.Noted:
        known = self._database.noted(caller, request.event_id)
        if known is not None:
            return api.Noted(seq=known)
        events = self.core.note(caller, request, now_ms=self._now_ms())
        try:
            entries = self._database.note(caller, request.event_id, events, time_ms=self._now_ms())
        except BadEvent as error:
            raise Refusal(Reason.BAD_REQUEST, f"the event is refused: {error}") from None
        self._appended()
        return api.Noted(seq=entries[-1].seq)

    def logs(self, request: api.Read) -> api.Entries | Awaitable[api.Entries]:
        """Events from a cursor on. Answers at once when there are some or nobody waits."""
        if request.after > self._database.head.seq:
            raise Refusal(
                Reason.BAD_REQUEST,
                f"the journal ends at {self._database.head.seq}; it has no event {request.after}",
            )
        for what, value in (
            ("after", request.after),
            ("tail", request.tail or 0),
            ("limit", request.limit - 1),
            ("wait_ms", request.wait_ms),
        ):
            if value < 0:
                raise Refusal(Reason.BAD_REQUEST, f"{what} is too small")
        if request.name is not None and not self._ever_was(request.name):
            raise Refusal(Reason.NOT_FOUND, f"there is no instance {request.name[:80]!r}")
        query = Query(
            after=request.after,
            since_ms=request.since_ms,
            source=request.source,
            name=request.name,
        )
        if request.tail is not None:
            query = _from(query, self._database.before_last(query, request.tail))
        found = self._page(query, request.limit)
        if found.events or request.wait_ms == 0:
            return found
        return self._later(_from(query, found.next), request)

    async def verify(self) -> api.Verified:
        """Checks everything, in pieces, while others are served."""
        verifier = journal.Verifier()
        for rows in iterate(self._database, size=VERIFY_ROWS):
            verifier.feed(rows)
            await asyncio.sleep(0)
        verifier.finish(self._database.head)
        problems = []
        for found in self._database.found():
            expected = verifier.records.pop(found.id, None)
            if journal.record_hash(found.packed) != expected:
                problem = "its record is not as the journal says"
                problems.append(api.Problem(name=found.name, problem=problem))
        problems += [
            api.Problem(name=id, problem="its record is missing") for id in sorted(verifier.records)
        ]
        return api.Verified(
            ok=verifier.bad_seq is None and not problems,
            first=verifier.first,
            last=self._database.head.seq,
            head=self._database.head.hash.hex(),
            bad_seq=verifier.bad_seq,
            problem=verifier.problem,
            records=problems,
        )

    def head(self) -> api.Head:
        head = self._database.head
        return api.Head(seq=head.seq, hash=head.hash.hex(), time_ms=self._database.head_ms)

    # -------------------------------------------------------------------------- below

    async def _run(self, plan: Plan[R], call: Outcome | None = None) -> R:
        """Carries out a plan. Raises the `Refusal` that it ends with."""
        result: object = None
        refusal: Refusal | None = None
        try:
            while True:
                command = plan.send(result) if refusal is None else plan.throw(refusal)
                result, refusal = None, None
                try:
                    result = await self._do(command, call)
                except Refusal as error:
                    refusal = error
        except StopIteration as stop:
            done: R = stop.value
            return done
        finally:
            plan.close()

    async def _do(self, command: Command, call: Outcome | None) -> object:
        match command:
            case deciding.Commit():
                self._commit(command, call)
                return None
            case deciding.ReadConfig():
                try:
                    return load(self._config)
                except ConfigError as error:
                    raise Refusal(Reason.CONFIG_INVALID, str(error)) from None
            case deciding.EngineList():
                return await self._ask("engine", "list", Empty(), LIST_S)
            case deciding.EngineQuery():
                asked = engine.Instance(instance=command.instance)
                return await self._ask("engine", "query", asked, QUERY_S)
            case deciding.EngineCreate():
                wanted = engine.Create(instance=command.instance, disk_bytes=command.disk)
                return await self._ask("engine", "create", wanted, CREATE_S)
            case deciding.EngineDelete():
                asked = engine.Instance(instance=command.instance)
                return await self._ask("engine", "delete", asked, DELETE_S)
            case deciding.ApplyPolicy():
                apply = net.Apply(instance=command.instance, policy=command.policy)
                return await self._ask("netstack", "apply", apply, APPLY_S)
            case deciding.CheckFlow():
                check = net.Check(policy=command.policy, flow=command.flow)
                return await self._ask("netstack", "check", check, CHECK_S)
            case deciding.ListForwards():
                whose = net.Instance(instance=command.instance)
                return await self._ask("netstack", "forwards", whose, QUERY_S)

    def _commit(self, command: deciding.Commit, call: Outcome | None) -> None:
        def outcome() -> None:
            if call is not None and command.begins:
                call.begin()
            if call is not None and command.reply is not None:
                call.commit(command.reply)

        self._database.commit(
            put=command.put,
            remove=command.remove,
            events=command.events,
            time_ms=self._now_ms(),
            within=outcome,
        )
        self._appended()

    def _append(self, *events: New) -> None:
        self._database.commit(events=events, time_ms=self._now_ms())
        self._appended()

    def _appended(self) -> None:
        """After each commit: cuts when it is time to, and wakes whoever waits."""
        now = self._now_ms()
        if self._database.too_large() or not 0 <= now - self._aged_ms < AGE_CHECK_MS:
            self._aged_ms = now
            try:
                self._database.cut(now_ms=now)
            except Refusal as refusal:
                # What has been committed stands; there is just more of it than there should be.
                self._log.warning("old events are not removed", why=refusal.message)
        self._ring()
        self._on_append(self._database.head.seq)

    def _ring(self) -> None:
        self._bell.set()
        self._bell = asyncio.Event()

    def _ever_was(self, name: str) -> bool:
        return self.core.knows(name) or self._database.mentions(name)

    def _page(self, query: Query, limit: int) -> api.Entries:
        return self._entries(self._database.page(query, limit=limit))

    def _entries(self, page: Page) -> api.Entries:
        return api.Entries(
            epoch=self._epoch,
            first=self._database.before.seq + 1,
            events=[_shown(entry) for entry in page.entries],
            next=page.next,
        )

    async def _later(self, query: Query, request: api.Read) -> api.Entries:
        loop = asyncio.get_running_loop()
        end = loop.time() + min(request.wait_ms, WAIT_MAX_MS) / 1000
        while not self._closing.is_set():
            bell = self._bell
            found = self._page(query, request.limit)
            left = end - loop.time()
            if found.events or left <= 0:
                return found
            query = _from(query, found.next)
            try:
                await asyncio.wait_for(bell.wait(), left)
            except TimeoutError:
                continue  # for one last look
        # The database may be closed by now; whoever asked comes again with the same cursor.
        return self._entries(Page([], query.after))


def _from(query: Query, after: int) -> Query:
    return Query(after=after, since_ms=query.since_ms, source=query.source, name=query.name)


def _shown(entry: Entry) -> api.Entry:
    return api.Entry(
        seq=entry.seq,
        time_ms=entry.time_ms,
        instance=entry.instance,
        name=entry.name,
        source=entry.source,
        kind=entry.kind,
        by=entry.by,
        facts=dict(entry.facts),
        prev=entry.prev.hex(),
        hash=entry.hash.hex(),
    )
