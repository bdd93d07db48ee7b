"""The verbs that change whether an instance runs. Plans, as in `core`.

A verb is accepted or refused at once: its intent and the reply are written in one
transaction. What is left to do stands in the record (`doing`), and `drive` does it:

    start:   Commit(starting, boot n) -> | EngineBoot -> NetUp -> Provision -> Commit(running)
      any failure:                       | Commit(stopping, failed) -> kill -> Commit(stopped)
    stop:    Commit(stopping)         -> | PowerOff -> AwaitEnd -> [kill] -> Commit(stopped)
    pause:   Commit(doing)            -> | EngineChange -> Release -> Commit(paused)
    resume:  Commit(doing)            -> | EngineChange -> SetTime -> Commit(running)
    delete:  Commit(deleting)         -> | EngineDelete -> EngineList (absent?) -> Commit(removed)

`drive` begins with what the record says, wherever an earlier one was cut off: each of its
steps may be done twice. So a registry that was killed goes on with the next one, and the verb's
caller, who asks `follow`, learns the truth from either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from agent_box.broker import contract as broker
from agent_box.bus.errors import Code, Reason, Refusal
from agent_box.channel import contract as channel
from agent_box.config.model import Config
from agent_box.engine import contract as engine
from agent_box.registry import contract as api
from agent_box.registry import record as kept
from agent_box.registry.commands import (
    AwaitEnd,
    BrokerUp,
    Clock,
    Commit,
    Down,
    EngineBoot,
    EngineChange,
    EngineQuery,
    NetUp,
    Overtaken,
    Plan,
    PowerOff,
    Provision,
    ReadConfig,
    Release,
    SetTime,
    Tell,
    Wake,
)
from agent_box.registry.core import Core, ending, event
from agent_box.registry.journal import Fact
from agent_box.registry.record import Record
from agent_box.registry.states import Answer, Cause, State, Verb, ask, move, needs

HOOK_S: Final = 320.0  # more for one that waits for its project hook; the guest ends it after 300
HOOK: Final = "~/work/.agent-box/hook.sh"  # of a profile that names none
BOOT_S: Final = 120.0  # from a running VMM to a provisioned guest; emulated on a busy host
FRESH_MS: Final = 120_000  # an intent to start that is older is not taken up by a new registry
POWEROFF_S: Final = 30.0  # in which the guest takes the request
BOOTS: Final = 6  # at most for one start; more than one when the kernel misjudged its timer
GRACE_MS: Final = 30_000  # when the config cannot be read
GRACE_MAX_MS: Final = 3_600_000

_UNANSWERED: Final = (Code.UNAVAILABLE, Code.DEADLINE, Code.UNKNOWN_OUTCOME)
_MOVING: Final[dict[str, str]] = {
    "start": "being started",
    "stop": "being stopped",
    "pause": "being paused",
    "resume": "being resumed",
    "delete": "being deleted",
}


class Life:
    """The lifecycle of what is in `core`.

    Attributes:
        phases: by id, what is being waited for.
        stuck: by id, why the last try of `drive` came to nothing; it is tried again.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.phases: dict[str, str] = {}
        self.stuck: dict[str, api.Failed] = {}
        self._boots: dict[str, int] = {}  # by id, those of the start under way

    # -------------------------------------------------------------------------- verbs

    def start(
        self, untrusted_name: str, *, now_ms: int, no_hook: bool = False
    ) -> Plan[api.Progress]:
        record = yield from self._looked_at(untrusted_name)
        if record.doing == "start" and record.state == State.STARTING:
            return self.progress(record)
        if not self._may(Verb.START, record):
            return self._already(record)
        config = yield ReadConfig()
        assert isinstance(config, Config)
        record = self._core.again(record)
        if not self._may(Verb.START, record):
            return self._already(record)
        record = _configured(record, config)
        seen = self._core.seen.get(record.id)
        boots = max(record.boots, 0 if seen is None else seen.boot or 0) + 1
        record = msgspec.structs.replace(record, boots=boots, no_hook=no_hook)
        facts: dict[str, Fact] = {"boot": boots}
        if no_hook:
            facts["hook"] = "skipped"
        return (
            yield from self._accept(
                record, "start", self._after(record, Cause.START), now_ms, facts
            )
        )

    def stop(self, request: api.Stop, *, now_ms: int) -> Plan[api.Progress]:
        if request.grace_ms is not None and not 0 <= request.grace_ms <= GRACE_MAX_MS:
            raise Refusal(Reason.BAD_REQUEST, "the grace is from 0 to 3600 seconds")
        record = yield from self._looked_at(request.name)
        grace_ms = request.grace_ms
        if grace_ms is None:
            grace_ms = yield from self._usual_grace()
            record = self._core.again(record)
        if record.state == State.STOPPING and record.doing in ("start", "stop"):
            if record.doing == "stop" and grace_ms >= record.grace_ms:
                return self.progress(record)
            # It waits for the guest as long as was said first; now that shall be shorter.
            grace_ms = min(grace_ms, record.grace_ms)
            return (yield from self._accept(record, "stop", State.STOPPING, now_ms, {}, grace_ms))
        if not self._may(Verb.STOP, record):
            return self._already(record)
        state = self._core.state(record)
        if state not in (State.RUNNING, State.PAUSED):
            grace_ms = 0  # nobody is there yet, or nobody could be asked
        facts: dict[str, Fact] = {"before": state.value, "grace_ms": grace_ms}
        after = self._after(record, Cause.STOP)
        return (yield from self._accept(record, "stop", after, now_ms, facts, grace_ms))

    def pause(self, untrusted_name: str, *, now_ms: int) -> Plan[api.Progress]:
        return (yield from self._freeze_or_thaw("pause", Verb.PAUSE, untrusted_name, now_ms))

    def resume(self, untrusted_name: str, *, now_ms: int) -> Plan[api.Progress]:
        return (yield from self._freeze_or_thaw("resume", Verb.RESUME, untrusted_name, now_ms))

    def delete(self, request: api.Delete, *, now_ms: int) -> Plan[api.Progress]:
        record = yield from self._looked_at(request.name)
        if record.doing == "delete":
            return self.progress(record)
        verb = Verb.DELETE_FORCE if request.force else Verb.DELETE
        self._may(verb, record)
        state = self._core.state(record)
        cause = Cause.DELETE if state is State.STOPPED else Cause.STOP
        facts: dict[str, Fact] = {"before": state.value, "force": request.force}
        return (
            yield from self._accept(record, "delete", self._after(record, cause), now_ms, facts)
        )

    def _freeze_or_thaw(
        self, doing: Literal["pause", "resume"], verb: Verb, untrusted_name: str, now_ms: int
    ) -> Plan[api.Progress]:
        record = yield from self._looked_at(untrusted_name)
        if record.doing == doing:
            return self.progress(record)
        if not self._may(verb, record):
            return self._already(record)
        facts: dict[str, Fact] = {"boot": record.boots}
        return (yield from self._accept(record, doing, State(record.state), now_ms, facts))

    # ---------------------------------------------------------------------- accepting

    def _looked_at(self, untrusted_name: str) -> Plan[Record]:
        """The record, after the engine was asked what is there. An engine that is silent is
        not the end: the state is unknown then, and a verb may be allowed in that."""
        record = self._core.named(untrusted_name)
        if record.doing is not None:
            return record
        try:
            yield from self._core.look(record.id)
        except Refusal as refusal:
            if refusal.code is Code.INTERNAL:
                raise
            self.stuck[record.id] = _failed("start", refusal, 0)
        else:
            self.stuck.pop(record.id, None)
        return self._core.again(record)

    def _may(self, verb: Verb, record: Record) -> bool:
        """Whether there is something to do.

        Raises:
            Refusal: the state, or another verb at work, does not allow it.
        """
        name, state = record.name, self._core.state(record)
        overrides = verb in (Verb.STOP, Verb.DELETE_FORCE) and record.doing != "delete"
        if record.doing is not None and not overrides:
            raise Refusal(
                Reason.WRONG_STATE,
                f"{name} is {_MOVING[record.doing]}; {verb} needs {needs(verb)}",
                facts={"state": state.value},
            )
        answer = ask(verb, state)
        if answer is Answer.REFUSED:
            facts = {"state": state.value}
            if state is not State.UNKNOWN:
                why = f"{name} is {state}; {verb} needs {needs(verb)}"
                raise Refusal(Reason.WRONG_STATE, why, facts=facts)
            raise self._unknown(verb, record, facts)
        return answer is Answer.GO

    def _unknown(self, verb: Verb, record: Record, facts: dict[str, str]) -> Refusal:
        """The most specific of the reasons for which a state is not known."""
        name, silent = record.name, self.stuck.get(record.id)
        reason = Reason.STATE_UNKNOWN
        if record.id in self._core.absent:
            why = f"the host holds nothing of it; `agent-box delete --force {name}` removes it"
        elif record.id in self._core.seen:
            why = f"its machine does not answer; `agent-box stop {name}` kills it"
        else:
            why = "the engine cannot say what is there"
            if silent is not None:
                why = silent.message
                if silent.reason == Reason.HELPER_UNAVAILABLE:
                    reason = Reason.HELPER_UNAVAILABLE
                elif verb is Verb.START and silent.reason != Reason.STATE_UNKNOWN:
                    reason = Reason.ENGINE_UNAVAILABLE
        return Refusal(reason, f"the state of {name} is unknown: {why}", facts=facts)

    def _after(self, record: Record, cause: Cause) -> State:
        after = move(self._core.state(record), cause)
        assert after is not None
        return after

    def _already(self, record: Record) -> api.Progress:
        return msgspec.structs.replace(self.progress(record), doing=None, phase="", failed=None)

    def _accept(
        self,
        record: Record,
        doing: api.Doing,
        state: State,
        now_ms: int,
        facts: Mapping[str, Fact],
        grace_ms: int = 0,
    ) -> Plan[api.Progress]:
        record = msgspec.structs.replace(
            record,
            state=state.value,
            intent=record.intent + 1,
            doing=doing,
            grace_ms=grace_ms,
            failed=None,
            changed_ms=now_ms,
        )
        self.stuck.pop(record.id, None)
        reply = self.progress(record, state)
        told = {**facts, "state": state.value}
        yield from self._core.write(record, f"{doing}-begun", told, reply=reply)
        yield Wake(record.id)
        return reply

    def _usual_grace(self) -> Plan[int]:
        """A stop does not fail because of the config."""
        try:
            config = yield ReadConfig()
        except Refusal as refusal:
            if refusal.reason is not Reason.CONFIG_INVALID:
                raise
            return GRACE_MS
        assert isinstance(config, Config)
        return config.daemon.stop_grace_seconds * 1000

    # ---------------------------------------------------------------------- following

    def progress(self, record: Record, state: State | None = None) -> api.Progress:
        row = self._core.row(record)
        if state is not None:
            row = msgspec.structs.replace(row, state=state.value)
        failed = record.failed
        if record.doing is not None:
            failed = self.stuck.get(record.id, failed)
        return api.Progress(
            id=record.id,
            name=record.name,
            intent=record.intent,
            row=row,
            doing=record.doing,
            phase="" if record.doing is None else self.phases.get(record.id, ""),
            failed=failed,
        )

    def follow(self, request: api.Follow) -> api.Progress:
        record = self._core.by_id(request.id)
        if record is not None:
            return self.progress(record)
        return api.Progress(
            id=request.id,
            name=request.name,
            intent=request.intent,
            row=None,
            doing=None,
            phase="",
            failed=None,
        )

    def intent(self, id: str) -> int | None:
        """The number of the last verb that was accepted; None when the instance is gone."""
        record = self._core.by_id(id)
        return None if record is None else record.intent

    def has_work(self, id: str) -> bool:
        record = self._core.by_id(id)
        return record is not None and record.doing is not None

    def tell(self, id: str, phase: str) -> None:
        self.phases[id] = phase

    # ------------------------------------------------------------------------ driving

    def drive(self, id: str) -> Plan[None]:
        """Does what is left to do of an instance's verb, and of one that comes meanwhile.

        Raises:
            Refusal: it cannot go on now; run it again later.
        """
        core = self._core
        if id in core.busy:
            return
        core.busy.add(id)
        try:
            while (record := core.by_id(id)) is not None and record.doing is not None:
                try:
                    yield from self._step(record)
                except Refusal as refusal:
                    at_ms = yield Clock()
                    assert isinstance(at_ms, int)
                    self.stuck[id] = _failed(record.doing, refusal, at_ms)
                    raise
                self.stuck.pop(id, None)
        finally:
            core.busy.discard(id)
            self.phases.pop(id, None)
            self._boots.pop(id, None)

    def _step(self, record: Record) -> Plan[None]:
        state = State(record.state)
        if state is State.STARTING:
            yield from self._boot(record)
        elif state is State.STOPPING:
            yield from self._end(record)
        elif state is State.DELETING:
            yield Tell(record.id, "removing it")
            yield from self._core.finish_removal(record)
        elif record.doing == "pause" and state is State.RUNNING:
            yield from self._freeze(record)
        elif record.doing == "resume" and state is State.PAUSED:
            yield from self._thaw(record)
        else:
            refusal = Refusal(Reason.WRONG_STATE, f"{record.name} is {state} meanwhile")
            yield from self._give_up(record, refusal)

    def _is_current(self, record: Record) -> bool:
        """Whether no other verb was accepted since the record was read."""
        now = self._core.by_id(record.id)
        return now is not None and now.intent == record.intent

    def _now(self, record: Record) -> Record:
        """The same verb's record with what changed meanwhile, such as its policy."""
        now = self._core.by_id(record.id)
        assert now is not None and now.intent == record.intent
        return now

    # -------------------------------------------------------------------------- start

    def _boot(self, record: Record) -> Plan[None]:
        id = record.id
        last = self._boots.get(id, 1) >= BOOTS
        yield Tell(id, "starting the machine")
        now_ms = yield Clock()
        assert isinstance(now_ms, int)
        if not 0 <= now_ms - record.changed_ms <= FRESH_MS:
            there = yield from self._query(record)
            if there is None or there.boot != record.boots:
                why = "the start was interrupted before a machine ran"
                yield from self._fail(record, Refusal(Reason.BOOT_FAILED, why))
                return
        try:
            yield from self._surroundings(record)
            if not self._is_current(record):
                return
            record = self._now(record)
            images = engine.Images(**msgspec.structs.asdict(record.images))
            observed = yield EngineBoot(
                engine.Boot(
                    instance=id,
                    boot=record.boots,
                    cpus=record.cpus,
                    memory_bytes=record.memory,
                    images=images,
                )
            )
            assert isinstance(observed, engine.Observed)
            if not self._is_current(record):
                return
            self._core.seen[id] = observed
            if observed.state == "stopped":
                raise Refusal(Reason.BOOT_FAILED, f"the machine ended at once{_how(observed)}")
            yield Tell(id, "connecting the network")
            yield NetUp(kept.network_up(record))
            if not self._is_current(record):
                return
            yield Tell(id, "waiting for the guest")
            wanted = _provisioning(record, "any" if last else "right")
            seconds = BOOT_S
            if wanted.hook is not None and wanted.hook.required:
                seconds += HOOK_S
            ready = yield Provision(wanted, record.intent, seconds)
        except Refusal as refusal:
            if self._is_current(record):
                if "timer" in refusal.facts and not last:
                    yield from self._once_more(record, refusal)
                else:
                    yield from self._fail(record, _boot_told(refusal))
            return
        if isinstance(ready, Overtaken) or not self._is_current(record):
            return
        if isinstance(ready, engine.Observed):
            why = f"the machine ended before its guest answered{_how(ready)}"
            yield from self._fail(record, Refusal(Reason.BOOT_FAILED, why))
            return
        assert isinstance(ready, channel.Provisioned)
        yield from self._done(
            self._now(record),
            "start-done",
            move(State.STARTING, Cause.PROVISIONED),
            {"boot": record.boots, "guest": ready.version, "skew_ms": ready.skew_ms},
        )
        self._core.seen[id] = msgspec.structs.replace(observed, state="running")

    def _surroundings(self, record: Record) -> Plan[None]:
        """The broker's endpoints of an instance, before its machine runs. One that has no
        binding runs without a broker; one that has bindings is for nothing without.

        Raises:
            Refusal: its bindings cannot be served.
        """
        up = broker.InstanceUp(
            instance=record.id, name=record.name, boot=record.boots, bindings=record.bindings
        )
        try:
            yield BrokerUp(up)
        except Refusal as refusal:
            if refusal.code not in _UNANSWERED or not self._is_current(record):
                raise
            if record.bindings:
                bindings = ", ".join(record.bindings)
                raise Refusal(
                    refusal.reason,
                    f"{record.name} has the bindings {bindings}, and nothing can serve them: "
                    f"{refusal.message}",
                    facts=refusal.facts,
                ) from None

    def _once_more(self, record: Record, refusal: Refusal) -> Plan[None]:
        """The same start with another boot: its kernel misjudged the timer (guest/timer.py), and
        measures it anew. What serves the boot before gives way to the next."""
        id = record.id
        self._boots[id] = self._boots.get(id, 1) + 1
        yield Tell(id, "starting the machine once more: its kernel misjudged its timer")
        yield EngineChange("kill", engine.Vmm(instance=id, boot=record.boots))
        at_ms = yield Clock()
        assert isinstance(at_ms, int)
        if not self._is_current(record):
            return
        boots = record.boots + 1
        again = msgspec.structs.replace(self._now(record), boots=boots, changed_ms=at_ms)
        facts: dict[str, Fact] = {"boot": boots, "message": refusal.message}
        yield from self._core.write(again, "start-again", facts)

    def _fail(self, record: Record, refusal: Refusal) -> Plan[None]:
        """What runs of a start that failed is ended next."""
        at_ms = yield Clock()
        assert isinstance(at_ms, int)
        if not self._is_current(record):
            return
        after = move(State.STARTING, Cause.BOOT_FAILED)
        assert after is not None
        record = msgspec.structs.replace(
            self._now(record),
            state=after.value,
            grace_ms=0,
            failed=_failed("start", refusal, at_ms),
            changed_ms=at_ms,
        )
        facts: dict[str, Fact] = {
            "boot": record.boots,
            "state": after.value,
            "reason": refusal.reason.value,
            "message": refusal.message,
        }
        yield from self._core.write(record, "start-failed", facts)

    # --------------------------------------------------------------------------- stop

    def _end(self, record: Record) -> Plan[None]:
        id = record.id
        yield Tell(id, "asking what runs")
        there = yield from self._query(record)
        if not self._is_current(record):
            return
        by: str = "itself"
        if there is not None and there.state != "stopped":
            ended: object = None
            if record.grace_ms > 0 and there.state in ("running", "paused"):
                by = "guest"
                ended = yield from self._power_off(record, there)
                if isinstance(ended, Overtaken) or not self._is_current(record):
                    return
            if ended is None:
                by = "kill"
                yield Tell(id, "killing the machine")
                assert there.boot is not None
                vmm = engine.Vmm(instance=id, boot=there.boot)
                ended = yield EngineChange("kill", vmm)
            assert isinstance(ended, engine.Observed)
            if ended.state != "stopped":
                raise Refusal(Reason.STATE_UNKNOWN, f"the machine of {record.name} does not end")
            there = ended
        if not self._is_current(record):
            return
        record = self._now(record)
        facts: dict[str, Fact] = {"by": by}
        if there is not None:
            facts |= ending(there)
        if record.boots:
            try:
                yield Down(id, record.intent)
            except Refusal as refusal:
                facts["network"] = refusal.message
                self._core.ended.add(id)  # they are told when they are there again
            if not self._is_current(record):
                return
        after = move(State.STOPPING, Cause.OFF)
        if record.doing == "delete":
            after = move(State.STOPPED, Cause.DELETE)
            assert after is not None
            record = msgspec.structs.replace(record, state=after.value)
            yield from self._core.write(record, "stop-done", {**facts, "state": record.state})
        else:
            yield from self._done(record, "stop-done", after, facts)
        if there is not None:
            self._core.seen[id] = there

    def _power_off(self, record: Record, there: engine.Observed) -> Plan[object]:
        """Returns `Observed` of the end, None when it has to be killed, or `Overtaken`."""
        assert there.boot is not None
        id, seconds = record.id, record.grace_ms / 1000
        vmm = engine.Vmm(instance=id, boot=there.boot)
        guest = channel.Guest(instance=id, boot=there.boot)
        try:
            if there.state == "paused":
                yield Tell(id, "resuming the guest, so that it can power off")
                yield EngineChange("resume", vmm)
            yield Tell(id, "waiting for the guest to power off")
            asked = yield PowerOff(guest, record.intent, min(POWEROFF_S, seconds))
        except Refusal as refusal:
            if self._is_current(record):
                facts = {"verb": "stop", "reason": refusal.reason.value, "message": refusal.message}
                yield Commit(events=(event(record, "verb-failed", facts),))
            return None
        if isinstance(asked, Overtaken):
            return asked
        return (yield AwaitEnd(vmm, record.intent, seconds))

    # ------------------------------------------------------------------ pause, resume

    def _freeze(self, record: Record) -> Plan[None]:
        yield Tell(record.id, "freezing the vCPUs")
        there = yield from self._change(record, "pause", "paused")
        if there is not None:
            facts: dict[str, Fact] = {"boot": record.boots}
            try:
                yield Release(channel.Guest(instance=record.id, boot=record.boots))
            except Refusal as refusal:
                facts["terminals"] = refusal.message  # they wait until the guest runs again
            if not self._is_current(record):
                return
            after = move(State.RUNNING, Cause.PAUSE)
            yield from self._done(self._now(record), "pause-done", after, facts)
            self._core.seen[record.id] = there

    def _thaw(self, record: Record) -> Plan[None]:
        yield Tell(record.id, "unfreezing the vCPUs")
        there = yield from self._change(record, "resume", "running")
        if there is None:
            return
        assert there.boot is not None
        yield Tell(record.id, "setting the guest's clock")
        facts: dict[str, Fact] = {"boot": there.boot}
        try:
            ready = yield SetTime(channel.Guest(instance=record.id, boot=there.boot))
            assert isinstance(ready, channel.Provisioned)
            facts["skew_ms"] = ready.skew_ms
        except Refusal as refusal:
            facts["clock"] = refusal.message  # the channel sets it again within a minute
        if self._is_current(record):
            after = move(State.PAUSED, Cause.RESUME)
            yield from self._done(self._now(record), "resume-done", after, facts)
            self._core.seen[record.id] = there

    def _change(
        self, record: Record, change: Literal["pause", "resume"], wanted: str
    ) -> Plan[engine.Observed | None]:
        """Returns what the engine sees when it is as wanted. Otherwise the verb has failed, or
        another came, and None is returned."""
        there = self._core.seen.get(record.id)
        boot = record.boots if there is None or there.boot is None else there.boot
        failure: Refusal | None = None
        answer: object = None
        try:
            answer = yield EngineChange(change, engine.Vmm(instance=record.id, boot=boot))
        except Refusal as refusal:
            failure = refusal
            try:
                answer = yield from self._query(record)
            except Refusal:
                answer = None
        if not self._is_current(record):
            return None
        if isinstance(answer, engine.Observed):
            if answer.state == wanted:
                return answer
            if answer.state == "stopped":
                failure = Refusal(
                    Reason.WRONG_STATE,
                    f"the machine of {record.name} has ended{_how(answer)}",
                    facts={"state": State.STOPPED.value},
                )
                yield from self._give_up(record, failure, gone=answer)
                return None
        if failure is None or failure.code in _UNANSWERED:
            why = "its machine does not answer" if failure is None else failure.message
            reason = Reason.STATE_UNKNOWN
            if failure is not None and failure.reason is Reason.HELPER_UNAVAILABLE:
                reason = failure.reason
            failure = Refusal(reason, f"{record.name}: {why}", facts={"state": "unknown"})
        yield from self._give_up(record, failure)
        if isinstance(answer, engine.Observed):
            self._core.seen[record.id] = answer
        else:
            self._core.seen.pop(record.id, None)
        return None

    def _give_up(
        self, record: Record, refusal: Refusal, gone: engine.Observed | None = None
    ) -> Plan[None]:
        """The verb has failed; with `gone`, because nothing runs any more."""
        at_ms = yield Clock()
        assert isinstance(at_ms, int)
        if not self._is_current(record):
            return
        record = self._now(record)
        assert record.doing is not None
        facts: dict[str, Fact] = {
            "verb": record.doing,
            "reason": refusal.reason.value,
            "message": refusal.message,
        }
        failed = _failed(record.doing, refusal, at_ms)
        record = msgspec.structs.replace(record, doing=None, failed=failed)
        if gone is not None:
            after = move(State(record.state), Cause.GONE)
            assert after is not None
            record = msgspec.structs.replace(record, state=after.value)
            facts |= {"state": after.value, **ending(gone)}
        yield from self._core.write(record, "verb-failed", facts)
        if gone is not None:
            self._core.seen[record.id] = gone
            self._core.ended.add(record.id)

    # -------------------------------------------------------------------------- below

    def _query(self, record: Record) -> Plan[engine.Observed | None]:
        """What the engine sees; None when it holds nothing of that id."""
        try:
            answer = yield EngineQuery(record.id)
        except Refusal as refusal:
            if refusal.code is not Code.NOT_FOUND:
                raise
            self._core.absent.add(record.id)
            self._core.seen.pop(record.id, None)
            return None
        assert isinstance(answer, engine.Observed)
        return answer

    def _done(
        self, record: Record, kind: str, after: State | None, facts: Mapping[str, Fact]
    ) -> Plan[None]:
        assert after is not None
        at_ms = yield Clock()
        assert isinstance(at_ms, int)
        if not self._is_current(record):
            return
        record = msgspec.structs.replace(
            self._now(record),
            state=after.value,
            doing=None,
            grace_ms=0,
            changed_ms=at_ms,
        )
        yield from self._core.write(record, kind, {**facts, "state": after.value})


def _configured(record: Record, config: Config) -> Record:
    """With the policy and the bindings that the config has now.

    Raises:
        Refusal: NOT_FOUND, the policy that it follows is there no longer.
    """
    unchanged = api.PolicySet(
        name=record.name,
        policy=None,
        reset=False,
        table=None,
        mode=None,
        remove=[],
        allow=[],
        allow_open=False,
        allow_reserved=False,
    )
    try:
        policy = kept.changed(record.policy, unchanged, config)
    except LookupError as error:
        raise Refusal(Reason.NOT_FOUND, str(error.args[0])) from None
    except ValueError as error:
        raise Refusal(Reason.CONFIG_INVALID, str(error)) from None
    profile = config.profiles.get(record.profile)
    bindings = record.bindings if profile is None else sorted(profile.bindings)
    return msgspec.structs.replace(record, policy=policy, bindings=bindings)


def _provisioning(record: Record, timer: Literal["right", "any"]) -> channel.Provision:
    return channel.Provision(
        instance=record.id,
        boot=record.boots,
        hostname=record.name,
        environment=[],
        bindings=record.bindings,
        harness=record.harness if isinstance(record.harness, str) else None,
        hook=_hook(record),
        sudo=record.sudo,
        timer=timer,
    )


def _hook(record: Record) -> channel.Hook | None:
    if record.no_hook:
        return None
    return channel.Hook(
        path=record.hook or HOOK,
        expected=record.hook is not None or record.hook_required,
        required=record.hook_required,
    )


def _failed(doing: api.Doing, refusal: Refusal, at_ms: int) -> api.Failed:
    return api.Failed(
        doing=doing,
        reason=refusal.reason.value,
        message=refusal.message,
        facts=refusal.facts,
        at_ms=at_ms,
    )


def _boot_told(refusal: Refusal) -> Refusal:
    """What the caller of `start` is told."""
    if refusal.reason is Reason.DEADLINE:
        why = f"the guest did not answer within {BOOT_S:.0f} s"
        return Refusal(Reason.BOOT_TIMEOUT, why, facts=refusal.facts)
    if refusal.reason in (Reason.UNAVAILABLE, Reason.CONNECTION_LOST, Reason.UNKNOWN_OUTCOME):
        return Refusal(Reason.ENGINE_UNAVAILABLE, refusal.message, facts=refusal.facts)
    if refusal.code is Code.DENIED or (
        refusal.code in (Code.NOT_FOUND, Code.CONFLICT) and not refusal.facts
    ):
        # The engine's no such and another boot are not about the caller's name.
        return Refusal(Reason.BOOT_FAILED, refusal.message)
    return refusal


def _how(there: engine.Observed) -> str:
    if there.exit_signal is not None:
        return f", by signal {there.exit_signal}"
    return "" if there.exit_status is None else f", with status {there.exit_status}"
