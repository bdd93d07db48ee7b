"""Every order of steps, every failure between two of them, every end of the process."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.registries import CONFIG, IMAGES, Crash, World, create, made, policy_set, refuse

from agent_box.bus.errors import Reason, Refusal
from agent_box.registry import commands as deciding
from agent_box.registry import contract as api
from agent_box.registry import record

ID = "0123456789abcdef" * 2


def refused(world: World, plan: object) -> Refusal:
    with pytest.raises(Refusal) as error:
        world.play(plan)  # type: ignore[arg-type]
    return error.value


# ------------------------------------------------------------------------- create


def test_create() -> None:
    world = World(config=CONFIG)
    core = world.core()
    row = world.play(core.create(create(cpus=2), id=ID, now_ms=5))
    assert row == api.Row(
        name="web1",
        state="stopped",
        kind="persistent",
        profile="rust",
        image="base",
        cpus=2,
        memory=8 << 30,
        disk=30 << 30,
        images=IMAGES,
    )
    assert core.rows() == api.Rows(instances=[row], problems=[], strays=[])
    assert world.holds == {ID: "stopped"}
    assert world.kinds() == ["create-begun", "allocate-begun", "created"]
    assert [type(c).__name__ for c in world.done] == [
        "ReadConfig", "Commit", "EngineList", "Commit", "EngineCreate", "Commit",
    ]  # fmt: skip
    assert world.replies == [row]
    kept = record.unpack(world.records[ID][1])
    assert (kept.id, kept.bindings, kept.harness) == (ID, ["github"], ["my-agent", "acp"])
    assert world.core().state(kept) == "unknown"  # after a restart, until the engine answers


def test_the_builtin_profile_applies_without_a_config() -> None:
    world = World()
    row = world.play(world.core().create(create(), id=ID, now_ms=5))
    assert (row.profile, row.image, row.cpus) == ("default", "base", 2)
    assert (row.memory, row.disk) == (4 << 30, 30 << 30)


def test_an_engine_that_is_not_there() -> None:
    """What every create meets while no engine is built."""
    world = World(config=CONFIG)
    world.fail = lambda n, c: refuse() if isinstance(c, deciding.EngineList) else None
    core = world.core()
    refusal = refused(world, core.create(create(), id=ID, now_ms=5))
    assert (refusal.reason, refusal.exit) == (Reason.ENGINE_UNAVAILABLE, 10)
    assert "web1 was not created" in refusal.message
    assert world.records == {} and world.holds == {}
    assert core.rows().instances == []
    assert world.kinds() == ["create-begun", "create-failed", "removed"]
    assert world.events[1].facts["reason"] == "engine-unavailable"
    again = refused(world, core.create(create(), id=ID[::-1], now_ms=5))
    assert again.exit == 10  # the name is free again


def test_a_name_that_exists() -> None:
    world = World()
    core, _ = made(world)
    refusal = refused(world, core.create(create(), id=ID, now_ms=5))
    assert (refusal.reason, refusal.exit) == (Reason.EXISTS, 5)
    assert world.done == []


def test_two_creates_of_one_name_at_once() -> None:
    world = World()
    core = world.core()
    first, second = (
        core.create(create(), id=ID, now_ms=1),
        core.create(create(), id="f" * 32, now_ms=1),
    )
    next(first), next(second)
    first.send(world.config)  # its commit is what comes next
    first.send(None)
    with pytest.raises(Refusal, match="exists already"):
        second.send(world.config)


REASONS = [Reason.UNAVAILABLE, Reason.CONNECTION_LOST, Reason.DEADLINE, Reason.INTERNAL,
           Reason.DISK_FULL, Reason.HELPER_UNAVAILABLE, Reason.BAD_REQUEST, Reason.NOT_FOUND,
           Reason.DENIED]  # fmt: skip


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failure_anywhere_undoes_everything(place: int, when: str, reason: Reason) -> None:
    world = World(config=CONFIG)

    def fail(number: int, command: deciding.Command) -> Refusal | None:
        return refuse(reason) if number == place else None

    # A commit either happened or did not: only of the engine a reply can get lost.
    def lost(number: int, command: deciding.Command) -> Refusal | None:
        return None if isinstance(command, deciding.Commit) else fail(number, command)

    if when == "before":
        world.fail = fail
    else:
        world.after = lost
    core = world.core()
    try:
        world.play(core.create(create(), id=ID, now_ms=5))
    except Refusal as refusal:
        ours = isinstance(world.done[place], deciding.ReadConfig | deciding.Commit)
        assert ours or refusal.exit != 3  # the engine's "no such" is not about our name
        assert world.records == {} and world.holds == {}
        assert core.rows().instances == []
        assert not core.unsettled() and core.busy == set()
    else:
        assert world.holds == {ID: "stopped"} and list(world.records) == [ID]
        assert when == "after"


@settings(deadline=None)  # a busy host is no failure
@given(st.data())
def test_whatever_fails_it_is_there_wholly_or_not_at_all_in_the_end(data: st.DataObject) -> None:
    """Failures at random, then a process that ends at random, over and over; then peace."""
    world = World(config=CONFIG)
    acknowledged: set[str] = set()
    for life in range(data.draw(st.integers(1, 4))):
        plan_of_failure = data.draw(
            st.lists(
                st.sampled_from(["ok", "ok", "refuse", "lost", "crash", "late crash"]), max_size=12
            )
        )
        begun = len(world.done)

        def fate(number: int, begun: int = begun, fates: list[str] = plan_of_failure) -> str:
            return fates[number - begun] if number - begun < len(fates) else "ok"

        def fail(number: int, command: deciding.Command, fate: object = fate) -> Exception | None:
            what = fate(number)  # type: ignore[operator]
            return {"refuse": refuse(), "crash": Crash()}.get(what)

        def after(number: int, command: deciding.Command, fate: object = fate) -> Exception | None:
            what = fate(number)  # type: ignore[operator]
            if what == "late crash":
                return Crash()
            lost = what == "lost" and not isinstance(command, deciding.Commit)
            return refuse(Reason.CONNECTION_LOST) if lost else None

        world.fail, world.after = fail, after
        core = world.core()
        try:
            for step in (core.interrupted, core.reconcile):
                try:
                    world.play(step())
                except Refusal:
                    pass
            for number in range(2):
                id = f"{life:016x}{number:016x}"
                try:
                    world.play(core.create(create(f"web{number}"), id=id, now_ms=1))
                    acknowledged.add(id)
                except Refusal:
                    pass
                try:
                    world.play(core.reconcile())
                except Refusal:
                    pass
        except Crash:
            continue
    world.fail = world.after = lambda number, command: None
    core = world.core()
    world.play(core.interrupted())
    world.play(core.reconcile())
    assert not core.unsettled()
    assert set(world.records) == set(world.holds)
    assert acknowledged <= set(world.records)
    assert all(row.state == "stopped" for row in core.rows().instances)
    assert core.tampered() == []


def test_what_cannot_be_undone_now_is_finished_later() -> None:
    world = World(config=CONFIG)
    world.after = lambda n, c: refuse() if isinstance(c, deciding.EngineCreate) else None
    world.fail = lambda n, c: refuse() if isinstance(c, deciding.EngineDelete) else None
    core = world.core()
    refusal = refused(world, core.create(create(), id=ID, now_ms=5))
    assert refusal.exit == 10
    assert world.kinds()[-2:] == ["create-failed", "undo-pending"]
    assert [row.state for row in core.rows().instances] == ["deleting"]
    assert core.unsettled()
    assert refused(world, core.create(create(), id="f" * 32, now_ms=5)).exit == 5
    restarted = world.core()
    world.play(restarted.interrupted())
    assert [row.state for row in restarted.rows().instances] == ["deleting"]
    world.fail = lambda n, c: None
    world.play(restarted.reconcile())
    assert world.records == {} and world.holds == {} and not restarted.unsettled()
    assert world.kinds()[-1] == "removed"


def test_an_engine_that_says_deleted_and_still_holds_it_is_not_believed() -> None:
    world = World(config=CONFIG)
    world.fail = lambda n, c: refuse() if isinstance(c, deciding.EngineCreate) else None
    core = world.core()
    original = world._do

    def stubborn(command: deciding.Command) -> object:
        if isinstance(command, deciding.EngineDelete):
            world.holds[command.instance] = "stopped"
            return None
        return original(command)

    world._do = stubborn  # type: ignore[method-assign]
    refused(world, core.create(create(), id=ID, now_ms=5))
    assert list(world.records) == [ID]
    assert "still holds" in str(world.events[-1].facts["message"])


@pytest.mark.parametrize(
    ("fields", "exit", "words"),
    [
        ({"name": "Web1"}, 64, "name cannot be 'Web1'"),
        ({"name": ""}, 64, "name"),
        ({"name": "a" * 64}, 64, "name"),
        ({"name": "-a"}, 64, "name"),
        ({"name": "a\n"}, 64, "name"),
        ({"name": "ａ"}, 64, "name"),
        ({"profile": "no such"}, 64, "profile"),
        ({"profile": "missing"}, 3, "no profile 'missing'"),
        ({"cpus": 0}, 64, "cpus"),
        ({"cpus": 65}, 64, "cpus"),
        ({"memory": 1}, 64, "memory"),
        ({"memory": -1}, 64, "memory"),
        ({"disk": 1 << 60}, 64, "disk"),
    ],
)
def test_bad_requests_change_nothing(fields: dict[str, object], exit: int, words: str) -> None:
    world = World(config=CONFIG)
    name = fields.pop("name", "web1")
    refusal = refused(world, world.core().create(create(str(name), **fields), id=ID, now_ms=5))
    assert refusal.exit == exit
    assert words in refusal.message
    assert world.events == [] and world.records == {}


def test_a_config_that_is_refused_refuses_the_request_and_nothing_else() -> None:
    world = World()
    core, _ = made(world)
    world.fail = lambda n, c: (
        Refusal(Reason.CONFIG_INVALID, "config.toml: unknown key")
        if isinstance(c, deciding.ReadConfig)
        else None
    )
    assert refused(world, core.create(create("web2"), id=ID, now_ms=5)).exit == 2
    assert refused(world, core.policy_set(policy_set(allow=["a.test"]), now_ms=5)).exit == 2
    assert core.policy_show("web1").generation == 1
    assert [row.state for row in core.rows().instances] == ["stopped"]


# ---------------------------------------------------------------------- reconcile


@pytest.mark.parametrize(
    ("kept", "seen", "state"),
    [
        ("running", "stopped", "stopped"),
        ("paused", "stopped", "stopped"),
        ("running", "running", "running"),
        ("paused", "running", "running"),
        ("running", "paused", "paused"),
        ("stopped", "running", "running"),
        ("stopped", None, "unknown"),
    ],
)
def test_the_record_follows_what_the_engine_sees(kept: str, seen: str | None, state: str) -> None:
    world = World()
    _, id = made(world, state=kept)
    if seen is None:
        world.holds.clear()
    else:
        world.holds[id] = seen
    core = world.core()
    assert [row.state for row in core.rows().instances] == ["unknown"]
    world.play(core.reconcile())
    assert [row.state for row in core.rows().instances] == [state]
    changed = state not in (kept, "unknown")
    assert world.kinds() == (["state-changed"] if changed else [])
    if changed:
        assert world.events[0].facts["before"] == kept
        assert world.events[0].facts["state"] == state
        assert [row.state for row in world.core().rows().instances] == ["unknown"]


def test_without_an_answer_everything_stays_unknown() -> None:
    world = World()
    made(world)
    core = world.core()
    world.fail = lambda n, c: refuse()
    assert refused(world, core.reconcile()).reason is Reason.UNAVAILABLE
    assert core.unsettled()
    assert core.count() == {"unknown": 1}


def test_an_interrupted_create_is_undone_without_the_engine_and_later_when_the_disk_is_full() -> (
    None
):
    world = World(config=CONFIG)
    world.fail = lambda n, c: Crash() if isinstance(c, deciding.EngineList) else None
    with pytest.raises(Crash):
        world.play(world.core().create(create(), id=ID, now_ms=1))
    core = world.core()
    world.fail = lambda n, c: refuse(Reason.DISK_FULL) if isinstance(c, deciding.Commit) else None
    assert refused(world, core.interrupted()).reason is Reason.DISK_FULL
    assert core.unsettled()
    world.fail = lambda n, c: None
    world.done.clear()
    world.play(core.reconcile())
    assert [type(c) for c in world.done] == [deciding.Commit, deciding.EngineList]
    assert world.records == {} and not core.unsettled()


def test_what_changes_while_the_engine_is_asked_is_not_overwritten() -> None:
    """A removal waits for the engine; meanwhile another instance gets another policy."""
    world = World(config=CONFIG)
    world.fail = lambda n, c: refuse() if isinstance(c, deciding.EngineDelete) else None
    world.after = lambda n, c: refuse() if isinstance(c, deciding.EngineCreate) else None
    core = world.core()
    refused(world, core.create(create("first"), id="0" * 32, now_ms=1))
    world.fail = world.after = lambda n, c: None
    world.play(core.create(create("second"), id=ID, now_ms=1))
    world.holds[ID] = "running"
    plan = core.reconcile()
    assert isinstance(next(plan), deciding.EngineList)
    observed = world._do(deciding.EngineList())
    follows = plan.send(observed)
    assert isinstance(follows, deciding.Commit)
    world._do(follows)
    assert isinstance(plan.send(None), deciding.EngineDelete)
    world.play(core.policy_set(policy_set("second", allow=["a.test"]), now_ms=2))
    world.holds.pop("0" * 32)
    assert isinstance(plan.send(None), deciding.EngineList)
    step = plan.send(world._do(deciding.EngineList()))
    while True:
        assert isinstance(step, deciding.Commit)
        world._do(step)
        try:
            step = plan.send(None)
        except StopIteration:
            break
    assert [row.name for row in core.rows().instances] == ["second"]
    assert [row.state for row in core.rows().instances] == ["running"]
    assert core.policy_show("second").generation == 2
    assert world.core().policy_show("second").generation == 2


def test_an_engine_that_knows_no_such_instance_has_deleted_it() -> None:
    world = World(config=CONFIG)
    world.fail = lambda n, c: (
        refuse()
        if isinstance(c, deciding.EngineCreate)
        else refuse(Reason.NOT_FOUND)
        if isinstance(c, deciding.EngineDelete)
        else None
    )
    assert refused(world, world.core().create(create(), id=ID, now_ms=1)).exit == 10
    assert world.records == {}


def test_with_no_record_it_is_still_asked_what_the_engine_holds() -> None:
    """What a late answer left of the only instance is a stray that no other record brings up."""
    world = World()
    core = world.core()
    world.play(core.reconcile())
    assert [type(c).__name__ for c in world.done] == ["EngineList"]
    assert not core.unsettled() and not core.is_blind


def test_a_record_that_was_changed_is_kept_out_by_name() -> None:
    world = World()
    made(world, "one")
    _, id = made(world, "two")
    name, packed, hash = world.records[id]
    other = packed.replace(b"persistent", b"ephemeral!")
    for damage in (other, packed[:-1], b"", packed + b"\0", b"\xc1"):
        world.records[id] = (name, damage, hash)
        core = world.core()
        assert [row.name for row in core.rows().instances] == ["one"]
        assert [p.name for p in core.rows().problems] == ["two"]
        refusal = refused(world, core.inspect("two", now_ms=1))
        assert refusal.reason is Reason.TAMPERED and "two" in refusal.message
        assert refused(world, core.create(create("two"), id=ID, now_ms=1)).exit == 5
    world.records[id] = ("three", packed, hash)
    assert [p.name for p in world.core().tampered()] == ["three"]


# ------------------------------------------------------------------------ inspect


def test_inspect() -> None:
    world = World(config=CONFIG)
    core, id = made(world, state="running")
    found = world.play(core.inspect("web1", now_ms=77))
    assert (found.row.name, found.row.state, found.id) == ("web1", "running", id)
    assert found.machine is not None and found.machine.observed_ms == 77
    assert found.forwards is not None and found.forwards[0].host_port == 8080
    assert (found.policy, found.policy_mode, found.policy_generation) == ("dev", "allowlist", 1)
    assert (found.bindings, found.harness) == (["github"], ["my-agent", "acp"])


def test_inspect_without_engine_and_netstack_shows_the_record() -> None:
    world = World()
    core, _ = made(world, state="running")
    world.fail = lambda n, c: refuse()
    found = world.play(core.inspect("web1", now_ms=77))
    assert (found.row.state, found.machine, found.forwards) == ("unknown", None, None)


def test_inspect_of_nothing() -> None:
    assert refused(World(), World().core().inspect("web1", now_ms=1)).exit == 3


# ------------------------------------------------------------------------- policy


def test_policy_set_stamps_a_generation_and_is_live() -> None:
    world = World(config=CONFIG)
    core, id = made(world, state="running")
    view = world.play(core.policy_set(policy_set(allow=["example.com"]), now_ms=9))
    assert (view.generation, view.changes) == (2, 1)
    assert "allow:example.com:443/tcp" in [r.id for r in view.rules]
    assert [(i, p.generation) for i, p in world.applied] == [(id, 2)]
    assert world.kinds() == ["policy-changed"]
    assert world.core().policy_show("web1").generation == 2


def test_policy_set_to_what_is_already_so_changes_nothing() -> None:
    world = World(config=CONFIG)
    core, _ = made(world)
    one = world.play(core.policy_set(policy_set(allow=["example.com"]), now_ms=9))
    assert world.play(core.policy_set(policy_set(allow=["Example.com."]), now_ms=9)) == one
    assert world.kinds() == ["policy-changed"]


def test_a_policy_that_cannot_be_put_in_force_is_recorded_and_told() -> None:
    world = World(config=CONFIG)
    core, _ = made(world, state="running")
    world.fail = lambda n, c: refuse() if isinstance(c, deciding.ApplyPolicy) else None
    refusal = refused(world, core.policy_set(policy_set(mode="deny"), now_ms=9))
    assert "generation 2 is recorded, but not in force yet" in refusal.message
    assert world.kinds() == ["policy-changed", "policy-failed"]
    world.fail = lambda n, c: None
    assert world.play(core.policy_set(policy_set(mode="deny"), now_ms=9)).generation == 2
    assert [p.generation for _, p in world.applied] == [2]


@pytest.mark.parametrize("state", ["creating", "deleting"])
def test_policy_verbs_are_refused_in_some_states(state: str) -> None:
    world = World(config=CONFIG)
    failing = deciding.EngineList if state == "creating" else deciding.EngineDelete
    world.fail = lambda n, c: (
        Crash()
        if isinstance(c, failing)
        else (refuse() if isinstance(c, deciding.EngineCreate) else None)
    )
    core = world.core()
    with pytest.raises(Crash):
        world.play(core.create(create(), id=ID, now_ms=1))
    world.fail = lambda n, c: None
    for plan in (
        core.policy_set(policy_set(mode="deny"), now_ms=9),
        core.policy_check(api.PolicyCheck(name="web1", target="a.test")),
    ):
        refusal = refused(world, plan)
        assert refusal.exit == 4
        assert refusal.facts == {"state": state}
        assert refusal.message.startswith(f"web1 is {state}; policy ")


def test_policy_verbs_work_while_the_engine_has_not_answered() -> None:
    world = World(config=CONFIG)
    made(world)
    core = world.core()
    assert core.policy_show("web1").generation == 1
    assert world.play(core.policy_set(policy_set(mode="deny"), now_ms=9)).generation == 2


@pytest.mark.parametrize(
    ("target", "verdict", "rule"),
    [
        ("index.crates.io", "allow", "allow:index.crates.io:443/tcp"),
        ("INDEX.crates.io.:443/TCP", "allow", "allow:index.crates.io:443/tcp"),
        ("static.crates.io:80", "allow", "allow:static.crates.io:80,443/tcp"),
        ("index.crates.io:80", "deny", "mode:allowlist"),
        ("x.evil.test", "deny", "deny:*.evil.test:443/tcp"),
        ("10.0.0.1", "deny", "mode:allowlist"),
        ("[::1]:443", "deny", "mode:allowlist"),
        ("github.broker.internal:80", "allow", "broker:github"),
    ],
)
def test_policy_check(target: str, verdict: str, rule: str) -> None:
    world = World(config=CONFIG)
    core, _ = made(world)
    said = world.play(core.policy_check(api.PolicyCheck(name="web1", target=target)))
    assert (said.verdict, said.rule, said.generation) == (verdict, rule, 1)


@pytest.mark.parametrize(
    "target",
    ["", "a b", "127.1", "10.0.0.0/8", "a.test:1,2", "a.test:1-2", "*.a.test", "a.test/icmp"],
)
def test_policy_check_of_what_is_no_destination(target: str) -> None:
    world = World(config=CONFIG)
    core, _ = made(world)
    refusal = refused(world, core.policy_check(api.PolicyCheck(name="web1", target=target)))
    assert refusal.exit == 64
