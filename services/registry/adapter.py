"""The registry as it runs: carries out what `core` decides, with the database, the config
file, the clock and the other services.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar
from weakref import WeakValueDictionary

from agent_box import __version__
from agent_box.broker import contract as broker
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.schema import Contract, Empty, Wire
from agent_box.channel.contract import CONTRACT as CHANNEL
from agent_box.config.errors import ConfigError
from agent_box.config.load import load
from agent_box.engine import contract as engine
from agent_box.netstack import contract as net
from agent_box.process.tasks import TaskSet
from agent_box.registry import commands as deciding
from agent_box.registry import contract as api
from agent_box.registry import journal
from agent_box.registry.commands import Command, Plan
from agent_box.registry.core import Core
from agent_box.registry.database import Database, Page, Query, iterate
from agent_box.registry.journal import BadEvent, Entry, New
from agent_box.registry.life import Life

R = TypeVar("R")
Ask = Callable[[str, str, Wire, float], Awaitable[Wire]]  # service, method, request, seconds

SHOW_S: Final = 0.6  # what `list` waits for the engine; then the states are unknown
QUERY_S: Final = 3.0
BOOT_S: Final = 60.0
CHANGE_S: Final = 30.0
TIME_S: Final = 10.0
UP_S: Final = 10.0
LOOK_S: Final = 2.0  # between two looks at a VMM that is waited for, if nothing is heard
END_S: Final = 0.5  # the same while its end is awaited
SWEEP_S: Final = 15.0  # between two looks at everything, if nothing is heard
CREATE_S: Final = 120.0
DELETE_S: Final = 120.0
APPLY_S: Final = 30.0
CHECK_S: Final = 5.0
WAIT_MAX_MS: Final = 30_000
RETRY_FIRST_S: Final = 0.5
RETRY_LAST_S: Final = 30.0
AGE_CHECK_MS: Final = 6 * 3600 * 1000
VERIFY_ROWS: Final = 200  # between two of which other calls get their turn

NOTERS: Final[tuple[Contract, ...]] = (engine.CONTRACT, net.CONTRACT, broker.CONTRACT, CHANNEL)


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


# By role. The supervisor has no contract of its own, since it serves nobody.
SAYS: Final = {**kinds(NOTERS), "supervisor": frozenset({api.SERVICE_FATAL})}


class Registry:
    """One registry.

    Args:
        database: open; closed by `close`.
        config: the config file, read again for each request that uses it.
        ask: calls another service and gives its reply, or raises its `Refusal`.
        epoch: of this start.
        tasks: keeps what goes on in the background.
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
        tasks: TaskSet,
        on_append: Callable[[int], None],
        now_ms: Callable[[], int] = unix_ms,
    ) -> None:
        self._database = database
        self._config = config
        self._ask = ask
        self._epoch = epoch
        self._log = log
        self._tasks = tasks
        self._on_append = on_append
        self._now_ms = now_ms
        self._aged_ms = 0
        self._settling = False
        self._reconnecting = False
        self._closing = asyncio.Event()
        self._bell = asyncio.Event()  # replaced each time it rings
        self._pokes: dict[str, asyncio.Event] = {}  # by instance: something may have changed
        self._drivers: set[str] = set()  # ids of instances that have one
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.core = Core(SAYS)
        self.life = Life(self.core)

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

    def settle(self) -> None:
        """Brings the records and the engine together, in the background and however long the
        engine takes to answer. Only one is at work at a time."""
        if not self._settling and self.core.unsettled() and not self._closing.is_set():
            self._settling = True
            self._tasks.spawn(self._settle(), name="settle")

    async def _settle(self) -> None:
        delay, told = RETRY_FIRST_S, ""
        try:
            while not self._closing.is_set():
                try:
                    await self._run(self.core.reconcile())
                except Refusal as refusal:
                    if refusal.message != told:
                        told = refusal.message
                        self._log.info("records are not settled yet", why=told)
                self.reconnect()
                if not self.core.unsettled():
                    return
                if await self._closes_within(delay):
                    return
                delay = min(RETRY_LAST_S, delay * 2)
        finally:
            self._settling = False

    def reconnect(self) -> None:
        """Tells broker and netstack in the background what they may not know, however long
        that takes."""
        if not self._reconnecting and self.core.untold() and not self._closing.is_set():
            self._reconnecting = True
            self._tasks.spawn(self._reconnect(), name="reconnect")

    async def _reconnect(self) -> None:
        delay, told = RETRY_FIRST_S, ""
        try:
            while self.core.untold() and not self._closing.is_set():
                try:
                    await self._run(self.core.reconnect())
                    if not self.core.untold():
                        return
                except Refusal as refusal:
                    if refusal.message != told:
                        told = refusal.message
                        self._log.info("broker or netstack is not told yet", why=told)
                if await self._closes_within(delay):
                    return
                delay = min(RETRY_LAST_S, delay * 2)
        finally:
            self._reconnecting = False

    async def sweep(self) -> None:
        """Looks at everything from time to time: what the engine noted may have been lost.
        Ends when the registry closes."""
        while not await self._closes_within(SWEEP_S):
            if self._settling:
                continue
            try:
                await self._run(self.core.reconcile())
            except Refusal as refusal:
                self._log.info("the engine was not seen", why=refusal.message)
                self.settle()
            self.reconnect()

    async def _closes_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._closing.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def wake(self, id: str) -> None:
        """Something is left to do for the instance, or something else is."""
        self._poke(id)
        if id not in self._drivers and self.life.has_work(id):
            self._drivers.add(id)
            self._tasks.spawn(self._drive(id), name="drive")

    async def _drive(self, id: str) -> None:
        delay, told = RETRY_FIRST_S, ""
        try:
            while self.life.has_work(id) and not self._closing.is_set():
                try:
                    await self._run(self.life.drive(id))
                    continue
                except Refusal as refusal:
                    if refusal.message != told:
                        told = refusal.message
                        self._log.info("a verb cannot go on yet", instance=id, why=told)
                self._ring()
                poke = self._poke_of(id)
                poke.clear()
                await self._first_of(delay, poke.wait(), self._closing.wait())
                delay = min(RETRY_LAST_S, delay * 2)
        finally:
            self._drivers.discard(id)
            self._ring()
        if not self._closing.is_set():
            self.settle()
            self.reconnect()

    async def _first_of(self, seconds: float, *works: Coroutine[Any, Any, object]) -> None:
        """Waits until one of them is done, at most so long. None of them fails."""
        tasks = [self._tasks.hold(work, name="wait") for work in works]
        try:
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def _poke_of(self, id: str) -> asyncio.Event:
        return self._pokes.setdefault(id, asyncio.Event())

    def _poke(self, id: str) -> None:
        if id in self._pokes:
            self._pokes[id].set()

    async def _look(self, id: str) -> None:
        try:
            await self._run(self.core.look(id))
        except Refusal as refusal:
            self._log.info("the engine was not seen", why=refusal.message)
            self.settle()
        self.reconnect()

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
        try:
            return await self._run(self.core.create(request, id=id, now_ms=self._now_ms()), call)
        except Refusal:
            self.settle()  # there may be something that could not be undone
            raise

    async def list(self) -> api.Rows:
        """With what the engine sees now, if it says so soon."""
        if self.core.count() and not self.core.is_blind:
            try:
                await self._run(self.core.survey(seconds=SHOW_S))
            except Refusal as refusal:
                self._log.info("the engine was not seen", why=refusal.message)
                self.settle()
        return self.core.rows()

    async def inspect(self, request: api.Name) -> api.Instance:
        plan = self.core.inspect(
            request.name,
            now_ms=self._now_ms(),
            phase=lambda id: self.life.phases.get(id, ""),
        )
        return await self._run(plan)

    async def start_instance(self, request: api.Start, call: Outcome) -> api.Progress:
        plan = self.life.start(request.name, now_ms=self._now_ms(), no_hook=request.no_hook)
        return await self._run(plan, call)

    async def stop_instance(self, request: api.Stop, call: Outcome) -> api.Progress:
        return await self._run(self.life.stop(request, now_ms=self._now_ms()), call)

    async def pause(self, request: api.Name, call: Outcome) -> api.Progress:
        return await self._run(self.life.pause(request.name, now_ms=self._now_ms()), call)

    async def resume(self, request: api.Name, call: Outcome) -> api.Progress:
        return await self._run(self.life.resume(request.name, now_ms=self._now_ms()), call)

    async def delete(self, request: api.Delete, call: Outcome) -> api.Progress:
        return await self._run(self.life.delete(request, now_ms=self._now_ms()), call)

    async def follow(self, request: api.Follow) -> api.Progress:
        """Answers at once when something is not as the caller knows it."""
        if request.wait_ms < 0:
            raise Refusal(Reason.BAD_REQUEST, "wait_ms is too small")
        loop = asyncio.get_running_loop()
        end = loop.time() + min(request.wait_ms, WAIT_MAX_MS) / 1000
        known = (request.intent, request.doing, request.phase)
        while True:
            bell, found = self._bell, self.life.follow(request)
            left = end - loop.time()
            same = (found.intent, found.doing, found.phase) == known
            if found.row is None or not same or left <= 0 or self._closing.is_set():
                return found
            try:
                await asyncio.wait_for(bell.wait(), left)
            except TimeoutError:
                continue

    def policy_show(self, request: api.Name) -> api.PolicyView:
        return self.core.policy_show(request.name)

    async def policy_set(self, request: api.PolicySet, call: Outcome) -> api.PolicyView:
        try:
            return await self._run(self.core.policy_set(request, now_ms=self._now_ms()), call)
        finally:
            self.reconnect()  # what is recorded and not in force is tried again

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
        if caller == engine.CONTRACT.service:
            self._heard(request)
        if caller == net.CONTRACT.service and request.kind == "netstack-started":
            self.core.offline |= self.core.live()
            self.reconnect()
        return api.Noted(seq=entries[-1].seq)

    def _heard(self, note: api.Note) -> None:
        """The engine saw something happen: what it is shall be seen at once."""
        if note.instance is None:
            self.settle()
            return
        self._poke(note.instance)
        if note.instance not in self._drivers and not self._closing.is_set():
            self._tasks.spawn(self._look(note.instance), name="look")

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
                return await self._ask("engine", "list", Empty(), command.seconds)
            case deciding.EngineQuery():
                asked = engine.Instance(instance=command.instance)
                return await self._ask("engine", "query", asked, QUERY_S)
            case deciding.EngineCreate():
                wanted = engine.Create(instance=command.instance, disk_bytes=command.disk)
                return await self._ask("engine", "create", wanted, CREATE_S)
            case deciding.EngineDelete():
                asked = engine.Instance(instance=command.instance)
                return await self._ask("engine", "delete", asked, DELETE_S)
            case (
                deciding.ApplyPolicy()
                | deciding.CheckFlow()
                | deciding.ListForwards()
                | deciding.ReadCounters()
            ):
                return await self._of_netstack(command)
            case deciding.WasRemoved():
                return self._database.was_removed(command.instance)
            case deciding.Clock():
                return self._now_ms()
            case deciding.Wake():
                self.wake(command.instance)
                return None
            case deciding.Tell():
                self.life.tell(command.instance, command.phase)
                self._ring()
                return None
            case _:
                return await self._of_life(command)

    async def _of_netstack(
        self,
        command: deciding.ApplyPolicy
        | deciding.CheckFlow
        | deciding.ListForwards
        | deciding.ReadCounters,
    ) -> object:
        match command:
            case deciding.ApplyPolicy():
                apply = net.Apply(instance=command.instance, policy=command.policy)
                return await self._ask("netstack", "apply", apply, APPLY_S)
            case deciding.CheckFlow():
                check = net.Check(policy=command.policy, flow=command.flow)
                return await self._ask("netstack", "check", check, CHECK_S)
            case deciding.ListForwards():
                whose = net.Instance(instance=command.instance)
                return await self._ask("netstack", "forwards", whose, QUERY_S)
            case deciding.ReadCounters():
                whose = net.Instance(instance=command.instance)
                return await self._ask("netstack", "counters", whose, QUERY_S)

    async def _of_life(self, command: Command) -> object:
        match command:
            case deciding.EngineBoot():
                return await self._ask("engine", "boot", command.boot, BOOT_S)
            case deciding.EngineChange():
                return await self._ask("engine", command.change, command.vmm, CHANGE_S)
            case deciding.SetTime():
                return await self._ask("channel", "set_time", command.guest, TIME_S)
            case deciding.Release():
                return await self._ask("channel", "release", command.guest, TIME_S)
            case deciding.BrokerUp():
                async with self._turn_of(command.up.instance):
                    return await self._ask("broker", "instance_up", command.up, UP_S)
            case deciding.NetUp():
                async with self._turn_of(command.up.instance):
                    return await self._ask("netstack", "instance_up", command.up, UP_S)
            case deciding.Down():
                return await self._down(command)
            case deciding.Provision():
                asked = command.provision
                vmm = engine.Vmm(instance=asked.instance, boot=asked.boot)
                work = self._ask("channel", "provision", asked, command.seconds)
                return await self._watched(work, vmm, command.intent, command.seconds, LOOK_S)
            case deciding.PowerOff():
                work = self._ask("channel", "poweroff", command.guest, command.seconds)
                vmm = engine.Vmm(instance=command.guest.instance, boot=command.guest.boot)
                done = await self._watched(work, vmm, command.intent, command.seconds, LOOK_S)
                return done if isinstance(done, deciding.Overtaken) else None
            case deciding.AwaitEnd():
                return await self._watched(
                    None, command.vmm, command.intent, command.seconds, END_S
                )
        raise TypeError(f"nobody carries out {type(command).__name__}")

    async def _down(self, command: deciding.Down) -> deciding.Overtaken | None:
        """The end of a boot never comes after the beginning of the next one: that one waits
        for its turn, and an end that comes later sees the verb that began it."""
        id = command.instance
        async with self._turn_of(id):
            if self.life.intent(id) != command.intent:
                return deciding.Overtaken()
            away, down = broker.Instance(instance=id), net.Instance(instance=id)
            try:  # either ends its own, whatever is wrong with the other
                await self._ask("broker", "instance_down", away, UP_S)
            finally:
                await self._ask("netstack", "instance_down", down, UP_S)
        return None

    def _turn_of(self, id: str) -> asyncio.Lock:
        """Who has it tells broker and netstack of the instance. It is kept while it is used."""
        return self._turns.setdefault(id, asyncio.Lock())

    async def _watched(
        self,
        work: Awaitable[Wire] | None,
        vmm: engine.Vmm,
        intent: int,
        seconds: float,
        every_s: float,
    ) -> object:
        """Waits for a guest, with an eye on its VMM and on what the operator wants meanwhile.

        Returns:
            The answer of `work`; `Observed` when the VMM has ended; `Overtaken` when another
            verb was accepted; None when the time is over and there was no `work`.

        Raises:
            Refusal: of `work`.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        poke = self._poke_of(vmm.instance)
        task = None if work is None else self._tasks.hold(_tried(work), name="guest")
        try:
            while True:
                poke.clear()
                if self.life.intent(vmm.instance) != intent:
                    return deciding.Overtaken()
                if task is not None and task.done():
                    answer = task.result()
                    if isinstance(answer, Refusal):
                        raise answer
                    return answer
                if (ended := await self._ended(vmm)) is not None:
                    return ended
                left = end - loop.time()
                if task is None and left <= 0:
                    return None
                waiting = self._tasks.hold(poke.wait(), name="wait")
                both = [waiting] if task is None else [waiting, task]
                pause = every_s if task is not None else min(every_s, left)
                try:
                    await asyncio.wait(both, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiting.cancel()
        finally:
            if task is not None:
                task.cancel()

    async def _ended(self, vmm: engine.Vmm) -> engine.Observed | None:
        """What the engine sees, when that VMM does not run any more."""
        try:
            asked = engine.Instance(instance=vmm.instance)
            there = await self._ask("engine", "query", asked, QUERY_S)
        except Refusal:
            return None  # it cannot be seen now; what is waited for may come all the same
        assert isinstance(there, engine.Observed)
        return there if there.state == "stopped" or there.boot != vmm.boot else None

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


async def _tried(work: Awaitable[Wire]) -> Wire | Refusal:
    try:
        return await work
    except Refusal as refusal:
        return refusal


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
