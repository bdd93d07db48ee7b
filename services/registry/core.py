"""What the registry decides. Events in, commands out; no socket, clock, file or randomness.

A verb is a *plan*: a generator that yields commands and is sent their results. Whoever runs
it (`adapter`) carries out each command and throws a `Refusal` into the plan where one failed.
The plan ends with the reply, or with the `Refusal` that the caller shall get. So every order
of steps and every failure between two of them can be played through in a test.

    create:   Commit(record, creating) -> EngineList -> Commit(allocated) -> EngineCreate
              -> Commit(stopped)                                    -> reply
      any failure before `allocated`:   Commit(record removed)      -> refusal
      any failure after it:  Commit(deleting) -> EngineDelete -> EngineList (absent?)
                             -> Commit(record removed)              -> refusal

The intent is on disk before anything is done, and the engine is asked to allocate only after
the record says so. Therefore, after a crash, a record that was never `allocated` can be
removed at once, and one that was is finished with the engine's help, whenever that answers.

What is in memory follows the disk: it changes when a commit has succeeded, and only then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from agent_box.bus.errors import MEANING, Code, Reason, Refusal
from agent_box.bus.schema import Wire
from agent_box.config import egress, values
from agent_box.config.model import Config, Profile
from agent_box.config.model import Policy as NamedPolicy
from agent_box.engine import contract as engine
from agent_box.netstack import contract as net
from agent_box.registry import contract as api
from agent_box.registry import journal
from agent_box.registry import record as kept
from agent_box.registry.commands import (
    ApplyPolicy,
    CheckFlow,
    Commit,
    Down,
    EngineChange,
    EngineCreate,
    EngineDelete,
    EngineList,
    EngineQuery,
    ListForwards,
    NetUp,
    Plan,
    ReadConfig,
    ReadCounters,
    Wake,
    WasRemoved,
)
from agent_box.registry.journal import Fact, New
from agent_box.registry.notes import Notes
from agent_box.registry.record import Record
from agent_box.registry.states import LIVE, OBSERVABLE, Answer, Cause, State, Verb, ask, move, needs


@dataclass(frozen=True)
class Found:
    """A row of the database at start. `expected` is the record's hash as the journal has it."""

    id: str
    name: str
    packed: bytes
    expected: str | None


class Core:
    """All records, and what may be done with them.

    Attributes:
        seen: what the engine said of each instance when it was asked last; by id.
        absent: ids of instances that it did not hold then.
        is_blind: it did not answer when it was asked for everything, or was not asked yet.
        strays: ids that it holds, and that no record knows.
        busy: ids of instances that a plan is working on.
    """

    def __init__(self, kinds: Mapping[str, frozenset[str]]) -> None:
        """Args: kinds: by role, the kinds of event that its contract declares."""
        self._records: dict[str, Record] = {}
        self._ids: dict[str, str] = {}  # by name
        self._problems: dict[str, str] = {}  # by name or id
        self._notes = Notes(kinds)
        self.seen: dict[str, engine.Observed] = {}
        self.absent: set[str] = set()
        # Those of which netstack may not know what is on record.
        self.offline: set[str] = set()
        # Those that run no more, while broker and netstack may not know it.
        self.ended: set[str] = set()
        self.is_blind = False
        self.strays: list[str] = []
        self._were_ours: dict[str, bool] = {}  # of strays
        self.busy: set[str] = set()

    # -------------------------------------------------------------------------- start

    def load(self, rows: Iterable[Found]) -> None:
        """Takes the records in. One that is not as the journal says is kept out, by name."""
        for row in rows:
            try:
                if journal.record_hash(row.packed) != row.expected:
                    raise ValueError("it is not as the journal says")
                record = kept.unpack(row.packed)
                if (record.id, record.name) != (row.id, row.name):
                    raise ValueError("it stands under another name")
            except ValueError as error:
                self._problems[row.name] = f"its record is damaged or was changed: {error}"
                continue
            self._records[record.id] = record
            self._ids[record.name] = record.id
            if record.state == State.STOPPED and record.boots:
                self.ended.add(record.id)  # whether they heard it is not on record
        self.is_blind = bool(self._records)

    def tampered(self) -> list[api.Problem]:
        return [api.Problem(name=n, problem=p) for n, p in sorted(self._problems.items())]

    def interrupted(self) -> Plan[None]:
        """Undoes creates that never reached the engine. Needs nobody; run it before serving.

        Raises:
            Refusal: the disk is full; `reconcile` tries again.
        """
        for record in self._idle():
            if record.state == State.CREATING and not record.allocated:
                yield from self._remove(record, "the registry ended before anything was allocated")

    def reconcile(self) -> Plan[None]:
        """Compares every record with what the engine sees; finishes or undoes what was begun,
        and says which verbs have something left to do.

        Raises:
            Refusal: the engine did not answer, or something could not be finished; run it
                again later.
        """
        yield from self.interrupted()
        there = yield from self.survey()
        failed: Refusal | None = None
        for id in [record.id for record in self._idle()]:
            record = self._records.get(id)  # as it is now: somebody was waited for
            if record is None or id in self.busy:
                continue
            if record.doing is not None:
                yield Wake(id)
            elif State(record.state) not in OBSERVABLE:
                try:
                    yield from self.finish_removal(record)
                except Refusal as refusal:
                    failed = refusal
        try:
            yield from self._strays(there)
        except Refusal as refusal:
            failed = refusal
        if failed is not None:
            raise failed

    def survey(self, *, seconds: float = 5.0) -> Plan[list[engine.Observed]]:
        """Takes in what the engine sees of everything.

        Returns:
            What it holds and no record knows.

        Raises:
            Refusal: it did not answer. Then nothing is known any more.
        """
        before = {record.id: _mark(record) for record in self._idle()}
        try:
            answer = yield EngineList(seconds)
        except Refusal:
            self.forget()
            raise
        assert isinstance(answer, engine.Observations)
        self.is_blind = False
        there = {each.instance: each for each in answer.instances}
        for id, mark in before.items():
            record = self._records.get(id)
            if record is None or id in self.busy or _mark(record) != mark:
                continue  # what the engine said is older than what was done meanwhile
            if State(record.state) in OBSERVABLE:
                yield from self._settle(record, there.get(id))
        return [there[id] for id in sorted(there) if id not in self._records]

    def look(self, id: str) -> Plan[None]:
        """The same for one instance.

        Raises:
            Refusal: as `survey`.
        """
        record = self._records.get(id)
        if record is None or id in self.busy or State(record.state) not in OBSERVABLE:
            return
        mark, there = _mark(record), None
        try:
            answer = yield EngineQuery(id)
            assert isinstance(answer, engine.Observed)
            there = answer
        except Refusal as refusal:
            if refusal.code is not Code.NOT_FOUND:
                self.seen.pop(id, None)
                raise
        record = self._records.get(id)
        if record is not None and id not in self.busy and _mark(record) == mark:
            yield from self._settle(record, there)

    def forget(self) -> None:
        """The engine did not answer: what it said before counts no longer."""
        self.seen.clear()
        self.absent.clear()
        self.is_blind = True

    def unsettled(self) -> bool:
        """Whether `reconcile` has something left to do."""
        return any(
            State(r.state) not in OBSERVABLE
            or r.doing is not None
            or (r.id not in self.seen and r.id not in self.absent)
            for r in self._idle()
        )

    def _strays(self, there: list[engine.Observed]) -> Plan[None]:
        """What the engine holds and no record knows is removed if it was ours and had been
        deleted, as when an answer of the engine came late. Otherwise it is told of, once."""
        known, self.strays = self.strays, []
        self._were_ours = {
            each.instance: self._were_ours[each.instance]
            for each in there
            if each.instance in self._were_ours
        }
        failed: Refusal | None = None
        for each in there:
            id = each.instance
            if id in self._records:
                continue
            if id not in self._were_ours:
                self._were_ours[id] = bool((yield WasRemoved(id)))
            if not self._were_ours[id]:
                self.strays.append(id)
                if id not in known:
                    yield Commit(events=(_stray("stray-found", each),))
                continue
            try:
                if each.state != "stopped" and each.boot is not None:
                    yield EngineChange("kill", engine.Vmm(instance=id, boot=each.boot))
                yield EngineDelete(id)
                yield Commit(events=(_stray("stray-removed", each),))
            except Refusal as refusal:
                self.strays.append(id)
                failed = refusal
        if failed is not None:
            raise failed

    # ------------------------------------------------------------------------ reading

    def state(self, record: Record) -> State:
        """The state that is shown and acted upon."""
        state = State(record.state)
        if state not in OBSERVABLE:
            return state
        seen = self.seen.get(record.id)
        if seen is None:
            return State.UNKNOWN
        at_work = state in (State.STARTING, State.STOPPING)  # then it is not its word that counts
        return State.UNKNOWN if seen.state == "unreachable" and not at_work else state

    def rows(self) -> api.Rows:
        return api.Rows(
            instances=[self.row(self._records[self._ids[name]]) for name in sorted(self._ids)],
            problems=self.tampered(),
            strays=self.strays,
        )

    def count(self) -> dict[str, int]:
        """How many instances are in each state."""
        found: dict[str, int] = {}
        for record in self._records.values():
            state = self.state(record).value
            found[state] = found.get(state, 0) + 1
        return found

    def knows(self, name: str) -> bool:
        return name in self._ids or name in self._problems

    def by_id(self, id: str) -> Record | None:
        return self._records.get(id)

    def inspect(
        self, untrusted_name: str, *, now_ms: int, phase: Callable[[str], str] = lambda id: ""
    ) -> Plan[api.Instance]:
        """The full record, with what engine and netstack say at this moment.

        Args:
            phase: by id, what a verb waits for.
        """
        record = self.named(untrusted_name)
        machine = None
        if State(record.state) in OBSERVABLE:
            try:
                answer = yield EngineQuery(record.id)
                assert isinstance(answer, engine.Observed)
                machine = api.Machine(
                    state=answer.state,
                    boot=answer.boot,
                    exit_status=answer.exit_status,
                    exit_signal=answer.exit_signal,
                    observed_ms=now_ms,
                )
            except Refusal as refusal:
                if refusal.code is Code.INTERNAL:
                    raise
        record = self.again(record)
        forwards: list[api.Forward] | None = []
        if State(record.state) in LIVE:
            try:
                told = yield ListForwards(record.id)
                assert isinstance(told, net.Forwards)
                forwards = [api.Forward(**msgspec.structs.asdict(f)) for f in told.forwards]
            except Refusal as refusal:
                if refusal.code is Code.INTERNAL:
                    raise
                forwards = None
        counters = None
        if forwards is not None and State(record.state) in LIVE:
            try:
                said = yield ReadCounters(record.id)
                assert isinstance(said, net.Counters)
                counters = api.Counters(**msgspec.structs.asdict(said))
            except Refusal as refusal:
                if refusal.code is Code.INTERNAL:
                    raise
        record = self.again(record)
        row = self.row(record)
        if State(record.state) in OBSERVABLE and (
            machine is None or (machine.state == "unreachable" and record.doing is None)
        ):
            row = msgspec.structs.replace(row, state=State.UNKNOWN.value)
        view = kept.view(record)
        return api.Instance(
            row=row,
            id=record.id,
            harness=record.harness,
            sudo=record.sudo,
            hook=record.hook,
            hook_required=record.hook_required,
            bindings=record.bindings,
            policy=view.policy,
            policy_mode=view.mode,
            policy_generation=view.generation,
            policy_changes=view.changes,
            created_ms=record.created_ms,
            changed_ms=record.changed_ms,
            boots=record.boots,
            images=record.images,
            doing=record.doing,
            phase=phase(record.id),
            failed=record.failed,
            machine=machine,
            forwards=forwards,
            counters=counters,
        )

    # ------------------------------------------------------------------------- create

    def create(self, untrusted: api.Create, *, id: str, now_ms: int) -> Plan[api.Row]:
        """Makes an instance. Args: id: 128 random bits as 32 lowercase hex digits."""
        name = _valid(untrusted)
        if self.knows(name):
            raise Refusal(Reason.EXISTS, f"{name} exists already", facts={"name": name})
        record = kept.draft(
            untrusted, *(yield from self._template(untrusted)), id=id, now_ms=now_ms
        )
        if self.knows(name):  # another create was faster while the config was read
            raise Refusal(Reason.EXISTS, f"{name} exists already", facts={"name": name})
        self.busy.add(id)
        try:
            return (yield from self._make(record))
        finally:
            self.busy.discard(id)

    def _template(self, untrusted: api.Create) -> Plan[tuple[Profile, NamedPolicy]]:
        config = yield ReadConfig()
        assert isinstance(config, Config)
        wanted = config.defaults.profile if untrusted.profile is None else untrusted.profile
        profile = config.profiles.get(wanted)
        if profile is None:
            raise Refusal(
                Reason.NOT_FOUND,
                f"there is no profile {wanted!r} in the config",
                facts={"profile": wanted},
            )
        if profile.image != untrusted.image:
            raise Refusal(
                Reason.CONFLICT,
                f"the profile {wanted} names the image {profile.image}, and {untrusted.image} "
                "was looked up: the config has changed meanwhile; try again",
            )
        return profile, config.policies[profile.policy]

    def _make(self, record: Record) -> Plan[api.Row]:
        yield from self.write(
            record,
            "create-begun",
            {
                "profile": record.profile,
                "image": record.image,
                "cpus": record.cpus,
                "memory": record.memory,
                "disk": record.disk,
                "policy": record.policy.name,
                "bindings": len(record.bindings),
            },
        )
        try:
            answer = yield EngineList()
            assert isinstance(answer, engine.Observations)
            record = msgspec.structs.replace(record, allocated=True)
            yield from self.write(record, "allocate-begun", {}, begins=True)
            yield EngineCreate(record.id, record.disk)
            record = self._moved(record, Cause.ALLOCATED)
            self.seen[record.id] = engine.Observed(
                instance=record.id, state="stopped", boot=None, exit_status=None, exit_signal=None
            )
            row = self.row(record)
            yield from self.write(record, "created", {"state": record.state}, reply=row)
            return row
        except Refusal as cause:
            self.seen.pop(record.id, None)
            told = _told(cause, record.name)
            failure = {"reason": told.reason.value, "message": cause.message}
            yield from self._undo(self._records[record.id], failure)
            raise told from cause

    def _undo(self, record: Record, failure: Mapping[str, Fact]) -> Plan[None]:
        """Removes what a failed create made. What cannot be removed now is left to `reconcile`,
        which finds the record as it stands."""
        try:
            if not record.allocated:
                yield from self._remove(record, "nothing was allocated", failure)
                return
            record = self._moved(record, Cause.FAILED)
            yield from self.write(record, "create-failed", {"state": record.state, **failure})
            yield from self.finish_removal(record)
        except Refusal as refusal:
            try:
                yield Commit(
                    events=(
                        event(
                            record,
                            "undo-pending",
                            {"reason": refusal.reason.value, "message": refusal.message},
                        ),
                    )
                )
            except Refusal:
                return  # a full disk; the record itself says what is left to do

    def finish_removal(self, record: Record) -> Plan[None]:
        """Creating and allocated, or deleting: the engine removes its part, the record goes
        last, after the engine has been asked once more what it holds."""
        try:
            yield EngineDelete(record.id)
        except Refusal as refusal:
            if refusal.code is not Code.NOT_FOUND:
                raise  # and if it knows no such instance, the list must say so too
        answer = yield EngineList()
        assert isinstance(answer, engine.Observations)
        if any(each.instance == record.id for each in answer.instances):
            raise Refusal(
                Reason.CONFLICT, f"the engine still holds {record.name} after it deleted it"
            )
        yield from self._remove(record, "nothing of it is left")

    def _remove(
        self, record: Record, why: str, failure: Mapping[str, Fact] | None = None
    ) -> Plan[None]:
        events = [event(record, "removed", {"why": why, journal.RECORD: ""})]
        if failure is not None:
            events.insert(0, event(record, "create-failed", failure))
        yield Commit(remove=record.id, events=tuple(events))
        self._records.pop(record.id, None)
        if self._ids.get(record.name) == record.id:
            del self._ids[record.name]
        self.seen.pop(record.id, None)
        self.absent.discard(record.id)
        self._notes.forget(record.id)

    def _settle(self, record: Record, there: engine.Observed | None) -> Plan[None]:
        """Takes in what the engine sees of one instance, and follows it where it differs. A
        verb that is at work does that itself."""
        if there is None:
            self.seen.pop(record.id, None)
            self.absent.add(record.id)
            return
        self.absent.discard(record.id)
        different = None
        if record.doing is None:
            different = _difference(State(record.state), there.state)
        if different is not None:
            after, cause = different
            facts: dict[str, Fact] = {
                "before": record.state,
                "state": after.value,
                "why": cause.value,
                **ending(there),
            }
            record = msgspec.structs.replace(
                record,
                state=after.value,
                boots=max(record.boots, there.boot or 0),
            )
            yield from self.write(record, "state-changed", facts)
            if after is State.STOPPED:
                self.ended.add(record.id)
        self.seen[record.id] = there

    # ------------------------------------------------------------------------- policy

    def policy_show(self, untrusted_name: str) -> api.PolicyView:
        record = self.named(untrusted_name)
        self._allowed(Verb.POLICY_SHOW, record)
        return kept.view(record)

    def policy_set(self, untrusted: api.PolicySet, *, now_ms: int) -> Plan[api.PolicyView]:
        self._allowed(Verb.POLICY_SET, self.named(untrusted.name))
        config = yield ReadConfig()
        assert isinstance(config, Config)
        record = self.named(untrusted.name)
        self._allowed(Verb.POLICY_SET, record)
        try:
            policy = kept.changed(record.policy, untrusted, config)
        except LookupError as error:
            raise Refusal(Reason.NOT_FOUND, str(error.args[0])) from None
        except ValueError as error:
            raise Refusal(Reason.BAD_REQUEST, str(error)) from None
        if policy != record.policy:
            record = msgspec.structs.replace(record, policy=policy, changed_ms=now_ms)
            view = kept.view(record)
            facts: dict[str, Fact] = {
                "policy": view.policy,
                "generation": view.generation,
                "mode": view.mode,
                "rules": len(view.rules),
                "changes": view.changes,
            }
            live = State(record.state) in LIVE
            yield from self.write(
                record, "policy-changed", facts, begins=live, reply=None if live else view
            )
        else:
            live = State(record.state) in LIVE
        if live:
            yield from self._apply(record)
        return kept.view(record)

    def _apply(self, record: Record) -> Plan[None]:
        try:
            yield ApplyPolicy(record.id, kept.for_netstack(record))
        except Refusal as refusal:
            self.offline.add(record.id)
            failure = {
                "generation": record.policy.generation,
                "reason": refusal.reason.value,
                "message": refusal.message,
            }
            yield Commit(events=(event(record, "policy-failed", failure),))
            raise Refusal(
                refusal.reason,
                f"generation {record.policy.generation} is recorded, but not in force yet: "
                f"{refusal.message}",
                facts=refusal.facts,
            ) from refusal

    def live(self) -> set[str]:
        """The ids of those whose machines have a network worker."""
        return {record.id for record in self._records.values() if State(record.state) in LIVE}

    def untold(self) -> bool:
        """Whether `reconnect` has something to tell now. Of an instance in `ended` with a verb at
        work, or in an unknown state, it has not: what comes of that says more."""
        return bool(self.offline) or any(self._is_over(id) is not None for id in self.ended)

    def _is_over(self, id: str) -> bool | None:
        """False when another boot has taken the place of that one; None when nobody knows yet."""
        record = self._records.get(id)
        if record is None or record.state == State.STOPPED:
            return True
        return False if State(record.state) in LIVE else None

    def reconnect(self) -> Plan[None]:
        """Tells netstack of each instance in `offline` what it should know of it, and broker and
        netstack of each in `ended` that it is over.

        Raises:
            Refusal: of the last that could not be told now; run it again later.
        """
        failed = None
        for id in sorted(self.ended):
            is_over = self._is_over(id)
            if is_over is False:
                self.ended.discard(id)
            if not is_over:
                continue
            record = self._records.get(id)
            try:
                yield Down(id, None if record is None else record.intent)
                if self._records.get(id) is record:
                    self.ended.discard(id)
            except Refusal as refusal:
                failed = refusal
        for id in sorted(self.offline):
            record = self._records.get(id)
            if record is None or id not in self.live() or record.state == State.STARTING:
                self.offline.discard(id)  # its start tells it
                continue
            try:
                yield NetUp(kept.network_up(record))
                if self._records.get(id) is record:
                    self.offline.discard(id)
            except Refusal as refusal:
                failed = refusal
        if failed is not None:
            raise failed

    def policy_check(self, untrusted: api.PolicyCheck) -> Plan[api.PolicyVerdict]:
        record = self.named(untrusted.name)
        self._allowed(Verb.POLICY_CHECK, record)
        try:
            target = egress.parse_target(untrusted.target, wildcard=False)
            (first, last), *more = target.ports
            if more or first != last:
                raise ValueError(f"{untrusted.target[:80]!r}: ask about one port")
            if target.network is not None and target.network.num_addresses != 1:
                raise ValueError(f"{untrusted.target[:80]!r}: ask about one address")
        except ValueError as error:
            raise Refusal(Reason.BAD_REQUEST, str(error)) from None
        address = None if target.network is None else str(target.network.network_address)
        flow = net.Flow(
            name=target.host,
            address=address,
            port=first,
            protocol=target.protocol.value,
            hello="unread",
            sni=None,
        )
        verdict = yield CheckFlow(kept.for_netstack(record), flow)
        assert isinstance(verdict, net.Verdict)
        return api.PolicyVerdict(
            verdict=verdict.verdict,
            rule=verdict.rule,
            why=verdict.why,
            generation=record.policy.generation,
        )

    def note(self, caller: str, untrusted: api.Note, *, now_ms: int) -> tuple[New, ...]:
        """The events that a note of another service comes to.

        Raises:
            Refusal: it may not say that, or it says too much.
        """
        self._notes.allowed(caller, untrusted)
        record = None
        if untrusted.instance is not None:
            record = self._records.get(untrusted.instance)
            if record is None:
                raise Refusal(Reason.NOT_FOUND, "there is no instance of that id")
        name = None if record is None else record.name
        return self._notes.events(caller, untrusted, name, now_ms=now_ms)

    # -------------------------------------------------------------------------- below

    def _idle(self) -> list[Record]:
        return [r for r in self._records.values() if r.id not in self.busy]

    def named(self, untrusted_name: str) -> Record:
        if untrusted_name in self._problems:
            raise Refusal(
                Reason.TAMPERED,
                f"{untrusted_name}: {self._problems[untrusted_name]}",
                facts={"name": untrusted_name},
            )
        id = self._ids.get(untrusted_name)
        if id is None:
            raise Refusal(Reason.NOT_FOUND, f"there is no instance {untrusted_name[:80]!r}")
        return self._records[id]

    def again(self, record: Record) -> Record:
        """The record as it is after somebody was waited for."""
        now = self._records.get(record.id)
        if now is None:
            raise Refusal(Reason.NOT_FOUND, f"there is no instance {record.name!r} any more")
        return now

    def _allowed(self, verb: Verb, record: Record) -> None:
        """Raises Refusal: the state does not allow the verb, which has no end state."""
        state = self.state(record)
        if ask(verb, state) is Answer.REFUSED:
            reason = Reason.STATE_UNKNOWN if state is State.UNKNOWN else Reason.WRONG_STATE
            raise Refusal(
                reason,
                f"{record.name} is {state}; {verb} needs {needs(verb)}",
                facts={"state": state.value},
            )

    def row(self, record: Record) -> api.Row:
        return api.Row(
            name=record.name,
            state=self.state(record).value,
            kind=record.kind,
            profile=record.profile,
            image=record.image,
            cpus=record.cpus,
            memory=record.memory,
            disk=record.disk,
            images=record.images,
        )

    def _moved(self, record: Record, cause: Cause) -> Record:
        after = move(State(record.state), cause)
        assert after is not None
        return msgspec.structs.replace(record, state=after.value)

    def write(
        self,
        record: Record,
        kind: str,
        facts: Mapping[str, Fact],
        *,
        begins: bool = False,
        reply: Wire | None = None,
    ) -> Plan[None]:
        """Writes the record and the event that carries its hash, then believes it."""
        hash = journal.record_hash(kept.pack(record))
        carries = event(record, kind, {**facts, journal.RECORD: hash})
        yield Commit(put=record, events=(carries,), begins=begins, reply=reply)
        self._records[record.id] = record
        self._ids[record.name] = record.id


def event(record: Record, kind: str, facts: Mapping[str, Fact]) -> New:
    return New(
        kind=kind,
        by=journal.REGISTRY,
        source="host-observed",
        instance=record.id,
        name=record.name,
        facts=facts,
    )


def _valid(untrusted: api.Create) -> str:
    """The name, when the whole request is one that can be. Raises Refusal."""
    checks: tuple[tuple[str, Callable[[Any], object], str | int | None], ...] = (
        ("name", values.name, untrusted.name),
        ("profile", values.name, untrusted.profile),
        ("cpus", values.cpus, untrusted.cpus),
        ("memory", values.memory_bytes, untrusted.memory),
        ("disk", values.disk_bytes, untrusted.disk),
        ("image", values.name, untrusted.image),
        ("kernel", _digest, untrusted.images.kernel),
        ("initramfs", _digest, untrusted.images.initramfs),
        ("variant", _digest, untrusted.images.variant),
        ("guest", _digest, untrusted.images.guest),
        ("harness", _digest, untrusted.images.harness),
    )
    for what, rule, value in checks:
        if value is None:
            continue
        try:
            rule(value)
        except ValueError as error:
            shown = value[:80] if isinstance(value, str) else value
            raise Refusal(
                Reason.BAD_REQUEST, f"{what} cannot be {shown!r}: expected {error}"
            ) from None
    return untrusted.name


def _digest(untrusted: str) -> None:
    if len(untrusted) != 64 or not set(untrusted) <= set("0123456789abcdef"):
        raise ValueError("a sha256 in 64 lowercase hex digits")


def _mark(record: Record) -> tuple[object, ...]:
    """What must be the same when the engine's answer comes as when it was asked."""
    return record.state, record.intent, record.doing


def _stray(kind: str, there: engine.Observed) -> New:
    return New(
        kind=kind,
        by=journal.REGISTRY,
        source="host-observed",
        instance=there.instance,
        name=None,
        facts={"state": there.state, **ending(there)},
    )


def ending(there: engine.Observed) -> dict[str, Fact]:
    """How a VMM ended, as far as that is known."""
    facts: dict[str, Fact] = {}
    if there.boot is not None:
        facts["boot"] = there.boot
    if there.exit_status is not None:
        facts["status"] = there.exit_status
    if there.exit_signal is not None:
        facts["signal"] = there.exit_signal
    return facts


def _told(cause: Refusal, name: str) -> Refusal:
    """What the caller of `create` is told. To it, an engine that cannot be reached and one
    that cannot work are the same, and both have been undone."""
    if cause.code in (Code.UNAVAILABLE, Code.DEADLINE, Code.UNKNOWN_OUTCOME):
        specific = (Reason.ENGINE_UNAVAILABLE, Reason.HELPER_UNAVAILABLE)
        reason = cause.reason if cause.reason in specific else Reason.ENGINE_UNAVAILABLE
        return Refusal(reason, f"{name} was not created: {cause.message}", facts=cause.facts)
    if cause.code is Code.DENIED or MEANING[cause.reason].exit in (3, 5):
        # The engine's no such and exists already are not about the caller's name.
        return Refusal(Reason.CONFLICT, f"{name} was not created: {cause.message}")
    return Refusal(
        cause.reason, f"{name} was not created: {cause.message}", facts=cause.facts, id=cause.id
    )


def _difference(state: State, seen: str) -> tuple[State, Cause] | None:
    """What the record becomes when the engine sees a VMM that is stopped, running or paused.

    A VMM that runs under a record that is starting or stopping is what the interrupted verb
    left; the verb's own steps finish it.
    """
    if seen == "unreachable":
        return None
    if seen == "stopped":
        if state is State.STOPPED:
            return None
        cause = Cause.OFF if state is State.STOPPING else Cause.GONE
        return State.STOPPED, cause
    if state in (State.STARTING, State.STOPPING) or state.value == seen:
        return None
    after = move(State.UNKNOWN, Cause.SEEN, State(seen))
    assert after is not None
    return after, Cause.SEEN
