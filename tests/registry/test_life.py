"""Start, stop, pause, resume and delete: every order of steps, every failure and every end of
the process between two of them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.registries import CONFIG, Crash, World, create, made, refuse

from agent_box.bus.errors import Reason, Refusal
from agent_box.channel import contract as channel
from agent_box.registry import commands as deciding
from agent_box.registry import contract as api
from agent_box.registry import life, record
from agent_box.registry.core import Core
from agent_box.registry.life import Life

VERBS = ("start", "stop", "pause", "resume", "delete", "delete --force")


def plan(at: Life, verb: str, name: str = "web1", grace_ms: int | None = 5_000) -> object:
    match verb:
        case "stop":
            return at.stop(api.Stop(name=name, grace_ms=grace_ms), now_ms=1_000)
        case "delete" | "delete --force":
            return at.delete(api.Delete(name=name, force="--" in verb), now_ms=1_000)
    return getattr(at, verb)(name, now_ms=1_000)


def do(world: World, core: Core, verb: str, name: str = "web1", **given: int) -> api.Progress:
    """A verb to its end."""
    at = Life(core)
    accepted = world.play(plan(at, verb, name, **given))  # type: ignore[arg-type]
    assert isinstance(accepted, api.Progress)
    if accepted.doing is None:
        return accepted
    world.play(at.drive(accepted.id))
    return ended(at, accepted)


def ended(at: Life, accepted: api.Progress) -> api.Progress:
    follow = api.Follow(
        id=accepted.id,
        name=accepted.name,
        intent=accepted.intent,
        doing=accepted.doing,
        phase="",
        wait_ms=0,
    )
    return at.follow(follow)


def refused(world: World, core: Core, verb: str, **given: int) -> Refusal:
    with pytest.raises(Refusal) as error:
        world.play(plan(Life(core), verb, **given))  # type: ignore[arg-type]
    return error.value


def running(world: World, name: str = "web1") -> tuple[Core, str]:
    core, id = made(world, name)
    assert do(world, core, "start", name).failed is None
    world.events.clear(), world.done.clear(), world.replies.clear(), world.woken.clear()
    return core, id


def steps(world: World) -> list[str]:
    return [type(c).__name__ for c in world.done if not isinstance(c, deciding.Tell)]


def state(core: Core) -> str:
    (row,) = core.rows().instances
    return row.state


# -------------------------------------------------------------------------- start


def test_start() -> None:
    world = World()
    core, id = made(world)
    at = Life(core)
    accepted = world.play(at.start("web1", now_ms=1_000))
    assert (accepted.doing, accepted.intent, accepted.failed) == ("start", 1, None)
    assert accepted.row is not None and accepted.row.state == "starting"
    assert world.replies == [accepted] and world.woken == [id]
    assert world.holds[id] == "stopped"  # only the intent is on record
    world.play(at.drive(id))
    assert (world.holds[id], world.boots[id], state(core)) == ("running", 1, "running")
    assert world.kinds() == ["start-begun", "start-done"]
    assert world.events[-1].facts == {
        "boot": 1,
        "guest": "1",
        "skew_ms": 3,
        "state": "running",
        "record": world.events[-1].facts["record"],
    }
    (boot,) = [c.boot for c in world.done if isinstance(c, deciding.EngineBoot)]
    assert (boot.cpus, boot.memory_bytes, boot.images.kernel) == (2, 4 << 30, "1" * 64)
    (asked,) = [c.provision for c in world.done if isinstance(c, deciding.Provision)]
    assert (asked.hostname, asked.boot, asked.environment) == ("web1", 1, [])
    assert ended(at, accepted).doing is None
    assert world.phases == [
        "starting the machine", "connecting the network", "waiting for the guest",
    ]  # fmt: skip
    found = world.play(core.inspect("web1", now_ms=2))
    assert (found.boots, found.doing) == (1, None)


def test_start_of_what_runs_does_nothing_and_succeeds() -> None:
    world = World()
    core, _ = running(world)
    again = do(world, core, "start")
    assert (again.doing, again.failed) == (None, None)
    assert steps(world) == ["EngineQuery"]


def test_a_start_that_is_asked_for_twice_is_one() -> None:
    world = World()
    core, _ = made(world)
    at = Life(core)
    one = world.play(at.start("web1", now_ms=1_000))
    two = world.play(at.start("web1", now_ms=1_000))
    assert (one.intent, two.intent, two.doing) == (1, 1, "start")


def test_bindings_without_a_broker_refuse_the_start() -> None:
    world = World(config=CONFIG)
    core, id = made(world)
    failed = do(world, core, "start").failed
    assert failed is not None and failed.reason == "engine-unavailable"
    assert "has the bindings github, and nothing can serve them" in failed.message
    assert state(core) == "stopped" and world.holds[id] == "stopped"
    assert not [c for c in world.done if isinstance(c, deciding.EngineBoot)]


def test_a_hook_is_asked_for_and_left_out_once() -> None:
    from dataclasses import replace

    profiles = {n: replace(p, hook_required=True) for n, p in CONFIG.profiles.items()}
    world = World(config=replace(CONFIG, profiles=profiles), surrounded=True)
    core, _ = made(world)
    assert do(world, core, "start").failed is None
    do(world, core, "stop")
    at = Life(core)
    accepted = world.play(at.start("web1", now_ms=1, no_hook=True))
    assert isinstance(accepted, api.Progress)
    world.play(at.drive(accepted.id))
    asked = [c for c in world.done if isinstance(c, deciding.Provision)]
    hook = channel.Hook(path="~/work/.agent-box/hook.sh", expected=True, required=True)
    assert [c.provision.hook for c in asked] == [hook, None]
    assert asked[0].seconds > 300 > asked[1].seconds


def test_with_broker_and_netstack_there_is_a_network() -> None:
    world = World(config=CONFIG, surrounded=True)
    core, _ = made(world)
    assert do(world, core, "start").failed is None
    (up,) = [c.up for c in world.done if isinstance(c, deciding.BrokerUp)]
    assert (up.bindings, up.name, up.boot) == (["github"], "web1", 1)
    do(world, core, "stop")
    assert [c for c in world.done if isinstance(c, deciding.Down)]


def test_a_network_worker_that_does_not_come_up_fails_the_start() -> None:
    world = World(surrounded=True, offline=True)
    core, id = made(world)
    failed = do(world, core, "start").failed
    assert failed is not None and failed.reason == "engine-unavailable"
    assert failed.message == "the network worker does not answer"
    assert state(core) == "stopped" and world.holds[id] == "stopped"
    assert world.kinds() == ["start-begun", "start-failed", "stop-done"]


def test_netstack_is_told_again_what_it_could_not_be_told() -> None:
    world = World(surrounded=True)
    core, id = running(world)
    core.offline.add(id)
    world.offline = True
    with pytest.raises(Refusal):
        world.play(core.reconnect())
    assert core.offline == {id}
    world.offline = False
    world.done.clear()
    world.play(core.reconnect())
    assert core.offline == set()
    (told,) = [c.up for c in world.done if isinstance(c, deciding.NetUp)]
    assert (told.instance, told.name, told.boot) == (id, "web1", 1)
    do(world, core, "stop")
    core.offline.add(id)
    world.done.clear()
    world.play(core.reconnect())
    assert core.offline == set() and world.done == []


def test_that_a_machine_has_ended_by_itself_is_told_until_it_is_heard() -> None:
    world = World(surrounded=True)
    core, id = running(world)
    world.end(id, None, 9)
    world.play(core.look(id))
    assert state(core) == "stopped" and core.ended == {id}
    world.fail = lambda _, c: refuse() if isinstance(c, deciding.Down) else None
    with pytest.raises(Refusal):
        world.play(core.reconnect())
    assert core.ended == {id}
    assert world.core().ended == {id}, "the next registry cannot know whether it was heard"
    world.fail = lambda number, command: None
    world.done.clear()
    world.play(core.reconnect())
    record = core.by_id(id)
    assert record is not None
    assert world.done == [deciding.Down(id, record.intent)] and core.ended == set()


def test_a_stop_that_was_not_heard_is_told_again_and_a_start_takes_its_place() -> None:
    world = World(surrounded=True)
    core, id = running(world)
    world.fail = lambda _, c: refuse() if isinstance(c, deciding.Down) else None
    do(world, core, "stop")
    assert state(core) == "stopped" and core.ended == {id}
    assert "no" in world.events[-1].facts.values()
    assert do(world, core, "start").failed is None
    world.done.clear()
    world.play(core.reconnect())
    assert world.done == [] and core.ended == set()


def test_a_start_takes_policy_and_bindings_from_the_config_again() -> None:
    world = World(config=CONFIG, surrounded=True)
    core, _ = made(world)
    policies = dict(CONFIG.policies)
    policies["dev"] = CONFIG.policies["locked"]
    profiles = dict(CONFIG.profiles)
    profiles["rust"] = CONFIG.profiles["quiet"]
    from dataclasses import replace

    world.config = replace(CONFIG, policies=policies, profiles=profiles)
    do(world, core, "start")
    found = world.play(core.inspect("web1", now_ms=2))
    assert (found.policy_mode, found.policy_generation, found.bindings) == ("deny", 2, [])


@pytest.mark.parametrize(
    ("reason", "facts", "exit"),
    [
        (Reason.HELPER_UNAVAILABLE, {}, 11),
        (Reason.ENGINE_UNAVAILABLE, {}, 10),
        (Reason.UNAVAILABLE, {}, 10),
        (Reason.CONNECTION_LOST, {}, 10),
        (Reason.NOT_FOUND, {"image": "1" * 64}, 3),
        (Reason.NOT_FOUND, {}, 1),
        (Reason.CONFLICT, {}, 1),
        (Reason.DISK_FULL, {}, 1),
        (Reason.DENIED, {}, 1),
    ],
)
def test_a_boot_that_is_refused(reason: Reason, facts: dict[str, str], exit: int) -> None:
    world = World()
    core, id = made(world)
    world.fail = lambda n, c: (
        Refusal(reason, "why not", facts=facts) if isinstance(c, deciding.EngineBoot) else None
    )
    failed = do(world, core, "start").failed
    assert failed is not None and failed.message == "why not"
    assert Refusal(Reason(failed.reason), "").exit == exit
    assert state(core) == "stopped"
    assert world.kinds() == ["start-begun", "start-failed", "stop-done"]
    world.fail = lambda n, c: None
    assert do(world, core, "start").failed is None  # and the next one works
    assert world.boots[id] == 2


def test_a_guest_that_does_not_answer_is_a_boot_timeout_and_is_killed() -> None:
    world = World(guests=set())
    core, id = made(world)
    failed = do(world, core, "start").failed
    assert failed is not None and failed.reason == "boot-timeout"
    assert (world.holds[id], world.exits[id], state(core)) == ("stopped", (None, 9), "stopped")


def test_a_machine_that_ends_while_it_boots() -> None:
    world = World()
    core, id = made(world)
    world.overtake = lambda: world.end(id, 1, None)
    failed = do(world, core, "start").failed
    assert failed is not None and failed.reason == "boot-failed"
    assert "ended before its guest answered, with status 1" in failed.message
    assert state(core) == "stopped"


def mistimed(boots: int) -> Callable[[int, object], Refusal | None]:
    """Guests whose kernel misjudges its timer in that many boots."""

    def fail(_: int, command: object) -> Refusal | None:
        if not isinstance(command, deciding.Provision) or command.provision.timer == "any":
            return None
        off = Refusal(Reason.BOOT_FAILED, "misjudged", facts={"timer": "480"})
        return off if command.provision.boot <= boots else None

    return fail


def test_a_machine_whose_kernel_misjudged_its_timer_is_booted_once_more() -> None:
    world = World()
    core, id = made(world)
    world.fail = mistimed(2)
    assert do(world, core, "start").failed is None
    assert (world.holds[id], world.boots[id], state(core)) == ("running", 3, "running")
    assert world.kinds() == ["start-begun", "start-again", "start-again", "start-done"]
    assert [e.facts["boot"] for e in world.events] == [1, 2, 3, 3]
    killed = [c.vmm.boot for c in world.done if isinstance(c, deciding.EngineChange)]
    assert killed == [1, 2]
    assert [c.up.boot for c in world.done if isinstance(c, deciding.NetUp)] == [1, 2, 3]
    world.fail = mistimed(world.boots[id] + 1)  # and each start begins to count anew
    assert do(world, core, "stop").failed is None and do(world, core, "start").failed is None
    assert world.boots[id] == 5


def test_the_last_of_its_boots_takes_a_timer_as_it_is() -> None:
    world = World()
    core, id = made(world)
    world.fail = mistimed(1000)
    assert do(world, core, "start").failed is None
    assert (world.boots[id], state(core)) == (life.BOOTS, "running")
    world = World()
    core, id = made(world)
    world.fail = lambda n, c: (
        Refusal(Reason.BOOT_FAILED, "it has none", facts={"timer": "0"})
        if isinstance(c, deciding.Provision) else None
    )  # fmt: skip
    failed = do(world, core, "start").failed
    assert failed is not None and (failed.reason, failed.message) == ("boot-failed", "it has none")
    assert (world.boots[id], state(core)) == (life.BOOTS, "stopped")


def test_a_stop_between_two_boots_of_a_start_is_obeyed() -> None:
    world = World()
    core, id = made(world)
    world.fail = mistimed(1000)
    at = Life(core)
    world.play(at.start("web1", now_ms=1_000))
    told = world.events

    def fail(n: int, command: object) -> Refusal | None:
        if isinstance(command, deciding.EngineChange) and len(told) == 2:
            world.fail = mistimed(1000)
            world.play(plan(at, "stop"))  # type: ignore[arg-type]
        return mistimed(1000)(n, command)

    world.fail = fail
    world.play(at.drive(id))
    assert (world.holds[id], world.boots[id], state(core)) == ("stopped", 2, "stopped")
    assert world.kinds() == ["start-begun", "start-again", "stop-begun", "stop-done"]


def test_a_stop_cancels_a_boot() -> None:
    world = World()
    core, id = made(world)
    at = Life(core)
    accepted = world.play(at.start("web1", now_ms=1_000))
    stopped: list[api.Progress] = []

    def stop() -> None:
        stopped.append(world.play(plan(at, "stop")))  # type: ignore[arg-type]

    world.overtake = stop
    world.play(at.drive(id))
    assert stopped[0].intent == accepted.intent + 1
    assert (world.holds[id], state(core)) == ("stopped", "stopped")
    assert world.kinds()[-2:] == ["stop-begun", "stop-done"]
    assert not [c for c in world.done if isinstance(c, deciding.PowerOff)]  # nobody is there yet


# --------------------------------------------------------------------------- stop


def test_stop_lets_the_guest_power_off() -> None:
    world = World()
    core, id = running(world)
    done = do(world, core, "stop")
    assert (done.failed, done.doing, world.holds[id]) == (None, None, "stopped")
    assert steps(world) == [
        "EngineQuery", "Commit", "Wake", "EngineQuery", "PowerOff", "AwaitEnd", "Down", "Clock",
        "Commit",
    ]  # fmt: skip
    facts = world.events[-1].facts
    assert (facts["by"], facts["status"], facts["boot"]) == ("guest", 0, 1)


def test_stop_without_grace_is_a_kill() -> None:
    world = World()
    core, id = running(world)
    do(world, core, "stop", grace_ms=0)
    assert world.exits[id] == (None, 9)
    assert world.events[-1].facts["by"] == "kill"
    assert "PowerOff" not in steps(world)


def test_a_guest_that_does_not_power_off_is_killed() -> None:
    world = World()
    core, id = running(world)
    world.guests = set()
    assert do(world, core, "stop").failed is None
    assert world.exits[id] == (None, 9) and state(core) == "stopped"
    assert world.kinds() == ["stop-begun", "verb-failed", "stop-done"]


def test_a_guest_that_takes_the_request_and_goes_on_is_killed_after_the_grace() -> None:
    world = World()
    core, id = running(world)
    original = world._do

    def stubborn(command: deciding.Command) -> object:
        if isinstance(command, deciding.PowerOff):
            return None
        return original(command)

    world._do = stubborn  # type: ignore[method-assign]
    assert do(world, core, "stop").failed is None
    assert world.exits[id] == (None, 9)


def test_a_second_stop_shortens_the_grace() -> None:
    world = World()
    core, id = running(world)
    at = Life(core)
    one = world.play(plan(at, "stop"))  # type: ignore[arg-type]
    assert world.play(plan(at, "stop")).intent == one.intent  # type: ignore[arg-type]
    world.overtake = lambda: world.play(plan(at, "stop", grace_ms=0))  # type: ignore[arg-type,return-value]
    world.play(at.drive(id))
    assert world.exits[id] == (None, 9) and state(core) == "stopped"


def test_a_paused_guest_is_resumed_before_it_powers_off() -> None:
    world = World()
    core, id = running(world)
    do(world, core, "pause")
    do(world, core, "stop")
    assert world.exits[id] == (0, None)


def test_the_grace_of_the_config_and_without_one() -> None:
    world = World()
    core, _ = running(world)
    accepted = world.play(plan(Life(core), "stop", grace_ms=None))  # type: ignore[arg-type]
    assert record.unpack(world.records[accepted.id][1]).grace_ms == 30_000
    world = World()
    core, _ = running(world)
    world.fail = lambda n, c: (
        Refusal(Reason.CONFIG_INVALID, "bad") if isinstance(c, deciding.ReadConfig) else None
    )
    accepted = world.play(plan(Life(core), "stop", grace_ms=None))  # type: ignore[arg-type]
    assert accepted.doing == "stop"
    assert refused(world, core, "stop", grace_ms=-1).exit == 64
    assert refused(world, core, "stop", grace_ms=3_600_001).exit == 64


# ------------------------------------------------------------------ pause, resume


def test_pause_and_resume() -> None:
    world = World()
    core, id = running(world)
    assert do(world, core, "pause").failed is None
    assert (world.holds[id], state(core)) == ("paused", "paused")
    assert do(world, core, "pause").failed is None
    assert do(world, core, "resume").failed is None
    assert (world.holds[id], state(core)) == ("running", "running")
    assert do(world, core, "resume").failed is None
    assert world.kinds() == ["pause-begun", "pause-done", "resume-begun", "resume-done"]
    assert world.events[-1].facts["skew_ms"] == 3
    assert [type(c).__name__ for c in world.done if isinstance(c, deciding.SetTime)] == ["SetTime"]


def test_a_full_disk_of_the_host_pauses_and_a_resume_says_why() -> None:
    world = World()
    core, id = running(world)
    world.holds[id] = "paused"  # by its VMM
    world.play(core.survey())
    assert state(core) == "paused"
    assert world.events[-1].kind == "state-changed"
    world.fail = lambda n, c: (
        Refusal(Reason.DISK_FULL, "the host's disk is full")
        if isinstance(c, deciding.EngineChange)
        else None
    )
    failed = do(world, core, "resume").failed
    assert failed is not None
    assert (failed.reason, failed.message) == ("disk-full", "the host's disk is full")
    assert state(core) == "paused"
    world.fail = lambda n, c: None
    assert do(world, core, "resume").failed is None
    assert state(core) == "running"


def test_a_resume_whose_clock_cannot_be_set_has_resumed_and_says_so() -> None:
    world = World()
    core, _ = running(world)
    do(world, core, "pause")
    world.fail = lambda n, c: refuse() if isinstance(c, deciding.SetTime) else None
    assert do(world, core, "resume").failed is None
    assert world.events[-1].facts["clock"] == "no"


@pytest.mark.parametrize("answer", ["silent", "unreachable", "stopped"])
def test_a_pause_that_cannot_be(answer: str) -> None:
    world = World()
    core, id = running(world)
    at = Life(core)
    accepted = world.play(plan(at, "pause"))  # type: ignore[arg-type]
    if answer == "stopped":
        world.end(id, None, 11)
    else:
        world.fail = lambda n, c: (
            refuse(Reason.DEADLINE)
            if isinstance(c, deciding.EngineChange)
            or (answer == "silent" and isinstance(c, deciding.EngineQuery))
            else None
        )
        world.holds[id] = "unreachable"
    world.play(at.drive(id))
    failed = ended(at, accepted).failed
    assert failed is not None
    if answer == "stopped":
        assert (Refusal(Reason(failed.reason), "").exit, state(core)) == (4, "stopped")
        assert "by signal 11" in failed.message
    else:
        assert (Refusal(Reason(failed.reason), "").exit, state(core)) == (12, "unknown")


def test_a_lost_reply_of_a_pause_is_looked_up() -> None:
    world = World()
    core, _ = running(world)
    world.after = lambda n, c: (
        refuse(Reason.CONNECTION_LOST) if isinstance(c, deciding.EngineChange) else None
    )
    assert do(world, core, "pause").failed is None
    assert state(core) == "paused"


# ------------------------------------------------------------------------- delete


def test_delete() -> None:
    world = World()
    core, id = made(world)
    done = do(world, core, "delete")
    assert (done.row, done.doing, done.id) == (None, None, id)
    assert world.records == {} and world.holds == {}
    assert world.kinds() == ["delete-begun", "removed"]
    assert refused(world, core, "delete").exit == 3


@pytest.mark.parametrize("before", ["running", "paused", "unknown", "stopped"])
def test_delete_force(before: str) -> None:
    world = World()
    core, id = running(world)
    if before == "paused":
        do(world, core, "pause")
    if before == "stopped":
        do(world, core, "stop")
    if before == "unknown":
        world.holds[id] = "unreachable"
    else:
        assert (refused(world, core, "delete").exit if before != "stopped" else 4) == 4
    assert do(world, core, "delete --force").row is None
    assert world.records == {} and world.holds == {}


def test_delete_of_what_was_removed_by_hand() -> None:
    world = World()
    core, id = made(world)
    del world.holds[id]
    refusal = refused(world, core, "delete")
    assert refusal.exit == 12 and "delete --force web1" in refusal.message
    assert refused(world, core, "start").exit == 12
    assert do(world, core, "delete --force").row is None
    assert world.records == {}


def test_a_delete_that_cannot_go_on_is_tried_again_and_says_why() -> None:
    world = World()
    core, id = made(world)
    at = Life(core)
    accepted = world.play(plan(at, "delete"))  # type: ignore[arg-type]
    world.fail = lambda n, c: (
        refuse(Reason.HELPER_UNAVAILABLE) if isinstance(c, deciding.EngineDelete) else None
    )
    with pytest.raises(Refusal):
        world.play(at.drive(id))
    stuck = ended(at, accepted)
    assert stuck.doing == "delete" and stuck.failed is not None
    assert stuck.failed.reason == "helper-unavailable"
    world.fail = lambda n, c: None
    world.play(at.drive(id))
    assert world.records == {}


# ----------------------------------------------------------------- states and exits


@pytest.mark.parametrize(
    ("state", "verb", "exit"),
    [
        ("stopped", "pause", 4),
        ("stopped", "resume", 4),
        ("running", "resume", 0),
        ("running", "delete", 4),
        ("paused", "start", 4),
        ("paused", "delete", 4),
        ("unreachable", "start", 12),
        ("unreachable", "pause", 12),
        ("unreachable", "resume", 12),
        ("unreachable", "delete", 12),
        ("unreachable", "stop", 0),
    ],
)
def test_what_each_state_allows(state: str, verb: str, exit: int) -> None:
    world = World()
    core, id = running(world)
    if state == "stopped":
        do(world, core, "stop")
    else:
        world.holds[id] = state
    if exit == 0:
        assert do(world, core, verb).failed is None
        return
    refusal = refused(world, core, verb)
    shown = "unknown" if state == "unreachable" else state
    assert (refusal.exit, refusal.facts["state"]) == (exit, shown)
    assert "web1" in refusal.message


@pytest.mark.parametrize(
    ("reason", "verb", "exit"),
    [
        (Reason.HELPER_UNAVAILABLE, "start", 11),
        (Reason.HELPER_UNAVAILABLE, "pause", 11),
        (Reason.STATE_UNKNOWN, "start", 12),
        (Reason.UNAVAILABLE, "start", 10),
        (Reason.UNAVAILABLE, "resume", 12),
        (Reason.DEADLINE, "delete", 12),
    ],
)
def test_an_engine_that_is_silent(reason: Reason, verb: str, exit: int) -> None:
    world = World()
    core, _ = running(world)
    world.fail = lambda n, c: refuse(reason) if isinstance(c, deciding.EngineQuery) else None
    assert refused(world, core, verb).exit == exit


def test_a_stop_in_state_unknown_is_a_kill_when_the_engine_is_back() -> None:
    world = World()
    core, id = running(world)
    world.fail = lambda n, c: refuse() if isinstance(c, deciding.EngineQuery) else None
    at = Life(core)
    accepted = world.play(plan(at, "stop"))  # type: ignore[arg-type]
    with pytest.raises(Refusal):
        world.play(at.drive(id))
    assert ended(at, accepted).doing == "stop"
    world.fail = lambda n, c: None
    world.play(at.drive(id))
    assert world.exits[id] == (None, 9) and state(core) == "stopped"


def test_what_died_unseen_is_stopped_before_the_verb_is_judged() -> None:
    world = World()
    core, id = running(world)
    world.end(id, None, 9)
    assert refused(world, core, "pause").exit == 4
    assert world.kinds() == ["state-changed"]
    assert world.events[0].facts["signal"] == 9
    assert do(world, core, "start").failed is None and world.boots[id] == 2


def test_another_verb_at_work_is_named() -> None:
    world = World()
    core, _ = running(world)
    at = Life(core)
    world.play(plan(at, "pause"))  # type: ignore[arg-type]
    refusal = refused(world, core, "resume")
    assert refusal.exit == 4 and "web1 is being paused" in refusal.message
    assert do(world, core, "stop").failed is None


# ----------------------------------------------------------- ends of the process


def test_an_interrupted_start_is_finished_by_the_next_registry() -> None:
    world = World()
    core, id = made(world)
    world.play(Life(core).start("web1", now_ms=1_000))
    core = world.core()
    world.play(core.reconcile())
    assert world.woken[-1] == id
    world.play(Life(core).drive(id))
    assert (state(core), world.boots[id]) == ("running", 1)


@pytest.mark.parametrize("age", [-1, life.FRESH_MS + 1])
def test_an_old_intent_to_start_is_not_taken_up_after_a_reboot(age: int) -> None:
    world = World()
    core, id = made(world)
    world.play(Life(core).start("web1", now_ms=1_000))
    world.now_ms = 1_000 + age
    core = world.core()
    world.play(core.reconcile())
    at = Life(core)
    world.play(at.drive(id))
    assert (state(core), world.boots.get(id)) == ("stopped", None)
    failed = record.unpack(world.records[id][1]).failed
    assert failed is not None and "interrupted" in failed.message


def test_a_machine_of_an_old_start_that_runs_is_taken_over() -> None:
    world = World()
    core, id = made(world)
    at = Life(core)
    world.play(at.start("web1", now_ms=1_000))
    world.fail = lambda n, c: Crash() if isinstance(c, deciding.Provision) else None
    with pytest.raises(Crash):
        world.play(at.drive(id))
    world.fail = lambda n, c: None
    world.now_ms += life.FRESH_MS * 2
    core = world.core()
    world.play(core.reconcile())
    world.play(Life(core).drive(id))
    assert (state(core), world.boots[id]) == ("running", 1)


def peace(world: World) -> tuple[Core, Life]:
    """A last life in which nothing fails; everything is finished."""
    world.fail = world.after = lambda number, command: None
    world.overtake = None
    core = world.core()
    at = Life(core)
    world.play(core.interrupted())
    world.play(core.reconcile())
    for row_id in list(world.records):
        world.play(at.drive(row_id))
    world.play(core.reconcile())
    return core, at


def agree(world: World, core: Core) -> None:
    """Each record and each VMM say the same, and nothing else is there."""
    assert not core.unsettled()
    assert set(world.records) == set(world.holds)
    for name, packed, _ in world.records.values():
        kept = record.unpack(packed)
        assert (kept.name, kept.doing) == (name, None)
        assert kept.state == world.holds[kept.id]
        assert kept.boots >= world.boots.get(kept.id, 0)
    assert core.tampered() == []


PLACES = 12


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("place", range(PLACES))
@pytest.mark.parametrize("kind", ["refuse", "lost", "crash", "late crash"])
def test_each_verb_with_one_failure_at_each_step(verb: str, place: int, kind: str) -> None:
    world = World()
    core, id = made(world)
    if verb != "start":
        do(world, core, "start")
    if verb == "resume":
        do(world, core, "pause")
    if verb == "delete":
        do(world, core, "stop")
    begun = len(world.done)

    def fails(number: int, command: deciding.Command) -> Exception | None:
        if number - begun != place:
            return None
        return Crash() if kind == "crash" else refuse() if kind == "refuse" else None

    def loses(number: int, command: deciding.Command) -> Exception | None:
        if number - begun != place or isinstance(command, deciding.Clock | deciding.Tell):
            return None
        if kind == "late crash":
            return Crash()
        is_ours = isinstance(command, deciding.Commit | deciding.Wake | deciding.ReadConfig)
        return refuse(Reason.CONNECTION_LOST) if kind == "lost" and not is_ours else None

    world.fail, world.after = fails, loses
    accepted: api.Progress | None = None
    try:
        at = Life(core)
        accepted = world.play(plan(at, verb))  # type: ignore[arg-type]
        assert accepted is not None
        world.play(at.drive(accepted.id))
    except (Refusal, Crash):
        pass
    core, at = peace(world)
    agree(world, core)
    if accepted is None:
        return
    told = ended(at, accepted)
    assert told.doing is None
    goal = {"start": "running", "pause": "paused", "resume": "running", "stop": "stopped"}
    if verb.startswith("delete"):
        assert told.row is None and world.records == {}
    elif told.failed is None:
        assert told.row is not None and told.row.state == goal[verb]
    else:
        assert verb in ("start", "pause", "resume")
    del id


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_fails_records_and_machines_agree_in_the_end(data: st.DataObject) -> None:
    """Verbs, failures and ends of the process at random, over and over; then peace."""
    world = World(surrounded=data.draw(st.booleans()))
    fates = st.sampled_from(["ok"] * 12 + ["refuse", "lost", "crash", "late crash", "vmm dies"])
    core, _ = made(world, "web0")
    made_one = world.core()
    world.play(made_one.reconcile())
    for _life in range(data.draw(st.integers(1, 4))):
        draws = iter(data.draw(st.lists(fates, max_size=60)))
        fate = {"now": "ok"}

        def fail(number: int, command: deciding.Command) -> Exception | None:
            fate["now"] = next(draws, "ok")  # noqa: B023
            if fate["now"] == "vmm dies":  # noqa: B023
                for id, held in world.holds.items():
                    if held != "stopped":
                        world.end(id, None, 9)
            if isinstance(command, deciding.Clock | deciding.Tell | deciding.Wake):
                return None
            return {"refuse": refuse(), "crash": Crash()}.get(fate["now"])  # noqa: B023

        def after(number: int, command: deciding.Command) -> Exception | None:
            if fate["now"] == "late crash":  # noqa: B023
                return Crash()
            ours = deciding.Commit | deciding.Clock | deciding.Tell | deciding.Wake
            lost = fate["now"] == "lost" and not isinstance(command, ours)  # noqa: B023
            return refuse(Reason.CONNECTION_LOST) if lost else None

        world.fail, world.after = fail, after
        core = world.core()
        at = Life(core)
        try:
            for verb in data.draw(st.lists(st.sampled_from([*VERBS, "create"]), max_size=6)):
                try:
                    if verb == "create":
                        id = f"{len(world.done):032x}"
                        world.play(core.create(create("web0"), id=id, now_ms=1_000))
                    else:
                        one = plan(at, verb, "web0")
                        world.play(one)  # type: ignore[arg-type]
                except Refusal:
                    pass
                for id in list(world.records):
                    try:
                        world.play(at.drive(id))
                    except Refusal:
                        pass
                if data.draw(st.booleans()):
                    try:
                        world.play(core.reconcile())
                    except Refusal:
                        pass
        except Crash:
            continue
    core, _ = peace(world)
    agree(world, core)


# ------------------------------------------------------------------------- strays


def test_a_stray_that_was_ours_and_deleted_is_removed() -> None:
    world = World()
    core, id = made(world)
    made(world, "other")
    core = world.core()
    world.play(core.reconcile())
    do(world, core, "delete")
    world.holds[id], world.boots[id] = "running", 3  # an answer that came late
    world.play(core.reconcile())
    assert id not in world.holds and core.rows().strays == []
    assert world.kinds()[-1] == "stray-removed"


@pytest.mark.parametrize("others", [0, 1])
def test_what_a_dead_engine_still_had_allocated_for_a_create_is_removed(others: int) -> None:
    """The engine is killed in the middle of a create, while the helper has its request. The
    create is undone: nothing is there to be deleted, and the list says so. Then the helper
    does what it was asked for."""
    world = World()
    for number in range(others):
        made(world, f"other{number}")
    core = world.core()
    world.play(core.reconcile())
    id = "c" * 32
    world.fail = lambda n, c: (
        Refusal(Reason.CONNECTION_LOST, "lost") if isinstance(c, deciding.EngineCreate) else None
    )
    with pytest.raises(Refusal) as told:
        world.play(core.create(create("late"), id=id, now_ms=5))
    assert told.value.exit == 10 and id not in world.records and id not in world.holds
    world.holds[id] = "stopped"
    world.play(core.reconcile())
    assert id not in world.holds and core.rows().strays == []
    assert world.kinds()[-1] == "stray-removed"


def test_a_stray_that_nobody_knows_is_told_of_once_and_left_alone() -> None:
    world = World()
    core, _ = made(world)
    world.holds["f" * 32] = "running"
    for _ in range(3):
        world.play(core.reconcile())
    assert world.kinds() == ["stray-found"]
    assert core.rows().strays == ["f" * 32]
    assert world.holds["f" * 32] == "running"


def test_what_the_engine_said_before_a_verb_does_not_count_after_it() -> None:
    """A list that was asked for before a start and answered after it."""
    world = World()
    core, id = made(world)
    survey = core.survey()
    next(survey)
    old = world._do(deciding.EngineList())
    do(world, core, "start")
    with pytest.raises(StopIteration):
        survey.send(old)
    assert state(core) == "running"
    assert world.kinds()[-1] == "start-done"
    assert msgspec.structs.asdict(core.seen[id])["state"] == "running"
