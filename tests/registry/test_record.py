"""The policy in a record: the named one, the changes on top, and what is in force."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.registries import CONFIG, create, policy_set

from agent_box.config.egress import RULES_MAX, Action, parse_target
from agent_box.config.parse import parse
from agent_box.netstack.policy import load
from agent_box.registry import contract as api
from agent_box.registry import record
from agent_box.registry.record import Policy, Record

DEV = Policy(
    name="dev", named=record.table(CONFIG.policies["dev"]), changes=record.NO_CHANGES, generation=1
)


def after(before: Policy, /, **fields: object) -> Policy:
    return record.changed(before, policy_set(**fields), CONFIG)


def ids(policy: Policy) -> list[str]:
    return [r.id for r in record.in_force(policy).rules]


def allow(text: str, **leave: bool) -> api.PolicyRule:
    target = parse_target(text, wildcard=True)
    return record.rule(Action.ALLOW, target, sni=True, **{"allow_reserved": False, **leave})


def table(
    *rules: api.PolicyRule, mode: str = "allowlist", allow_open: bool = False
) -> api.PolicyTable:
    return api.PolicyTable(mode=mode, allow_open=allow_open, rules=list(rules))  # type: ignore[arg-type]


def a_record() -> Record:
    profile = CONFIG.profiles["rust"]
    return record.draft(create(), profile, CONFIG.policies[profile.policy], id="1" * 32, now_ms=1)


def test_the_named_policy_is_in_force_before_any_change() -> None:
    assert ids(DEV) == [
        "allow:index.crates.io:443/tcp",
        "allow:static.crates.io:80,443/tcp",
        "deny:*.evil.test:443/tcp",
    ]
    assert record.in_force(DEV) == DEV.named


def test_allow_and_remove() -> None:
    more = after(DEV, allow=["example.com", "*.example.org:80"])
    assert ids(more) == sorted(
        [*ids(DEV), "allow:example.com:443/tcp", "allow:*.example.org:80/tcp"]
    )
    assert more.generation == 2
    less = after(more, remove=["example.com"])
    assert "allow:example.com:443/tcp" not in ids(less)
    assert after(less, remove=["*.example.org:80/tcp"]).changes == record.NO_CHANGES


def test_remove_takes_rules_of_the_named_policy_too() -> None:
    less = after(DEV, remove=["static.crates.io"])
    assert ids(less) == ["allow:index.crates.io:443/tcp", "deny:*.evil.test:443/tcp"]
    assert record.count(less.changes) == 1
    back = after(less, allow=["static.crates.io:80,443"])
    assert ids(back) == ids(DEV)
    assert back.changes == record.NO_CHANGES
    assert back.generation == 3


def test_remove_by_id_takes_that_rule_and_a_deny_rule_only_so() -> None:
    with pytest.raises(ValueError, match=r"no rule allows '\*\.evil\.test'"):
        after(DEV, remove=["*.evil.test"])
    assert "deny:*.evil.test:443/tcp" not in ids(after(DEV, remove=["deny:*.evil.test:443/tcp"]))


def test_remove_with_a_port_means_exactly_that_rule() -> None:
    both = after(DEV, allow=["a.test", "a.test:80"])
    assert "allow:a.test:443/tcp" in ids(after(both, remove=["a.test:80"]))
    assert not [i for i in ids(after(both, remove=["a.test"])) if "a.test" in i]
    with pytest.raises(ValueError, match="no rule allows"):
        after(both, remove=["a.test:8080"])


def test_the_same_rule_with_other_leave_takes_its_place() -> None:
    plain = after(DEV, allow=["a.test"])
    wider = after(plain, allow=["a.test"], allow_reserved=True)
    assert "allow:a.test:443/tcp+reserved" in ids(wider)
    assert "allow:a.test:443/tcp" not in ids(wider)
    over = after(DEV, allow=["index.crates.io"], allow_reserved=True)
    assert "allow:index.crates.io:443/tcp" not in ids(over)
    assert ids(after(over, remove=["index.crates.io"])) == ids(DEV)[1:]


def test_the_mode() -> None:
    assert record.in_force(after(DEV, mode="deny")).mode == "deny"
    with pytest.raises(ValueError, match="--allow-open"):
        after(DEV, mode="open")
    opened = after(DEV, mode="open", allow_open=True)
    assert (record.in_force(opened).mode, record.in_force(opened).allow_open) == ("open", True)
    assert after(opened, mode="allowlist").changes == record.NO_CHANGES


def test_another_named_policy_drops_the_changes() -> None:
    """Else an earlier `--mode open` would stay in force under a policy that says deny."""
    opened = after(DEV, mode="open", allow_open=True, allow=["a.test"])
    locked = after(opened, policy="locked")
    assert record.in_force(locked) == record.table(CONFIG.policies["locked"])
    assert (locked.name, locked.generation) == ("locked", 3)
    with pytest.raises(LookupError, match="no policy 'gone'"):
        after(DEV, policy="gone")


def test_reset() -> None:
    changed = after(DEV, mode="deny", allow=["a.test"], remove=["index.crates.io"])
    assert changed.generation == 2
    reset = after(changed, reset=True)
    assert record.in_force(reset) == DEV.named
    assert reset.generation == 3
    assert after(DEV, reset=True) is DEV


def test_the_named_policy_is_read_again() -> None:
    changed = after(DEV, allow=["a.test"])
    config = parse(
        b'version = 1\n[policies.dev]\nmode = "allowlist"\nallow = [{ host = "new.test" }]',
        "config.toml",
    )
    again = record.changed(changed, policy_set(mode="allowlist"), config)
    assert ids(again) == ["allow:a.test:443/tcp", "allow:new.test:443/tcp"]
    assert again.generation == 3


def test_a_whole_policy_from_a_file() -> None:
    changed = after(DEV, allow=["a.test"])
    whole = table(allow("10.0.0.0/8", allow_reserved=True), allow("b.test"))
    replaced = after(changed, table=whole)
    assert record.in_force(replaced) == whole
    assert replaced.name == "dev"
    assert ids(after(replaced, allow=["c.test"], remove=["b.test"])) == [
        "allow:10.0.0.0/8:443/tcp+reserved", "allow:c.test:443/tcp",
    ]  # fmt: skip
    assert ids(after(replaced, reset=True)) == ids(DEV)


@pytest.mark.parametrize(
    ("whole", "words"),
    [
        (table(mode="open"), "--allow-open"),
        (table(allow("10.0.0.0/8")), "reserved range"),
        (table(allow("a.test"), allow("a.test")), "twice"),
        (table(msgspec.structs.replace(allow("a.test"), id="x")), "one form"),
        (table(msgspec.structs.replace(allow("a.test"), host="A.test")), "one form"),
        (table(msgspec.structs.replace(allow("a.test"), host=None)), "host or a network"),
        (table(msgspec.structs.replace(allow("a.test"), ports=[(5, 1)])), "port"),
        (table(msgspec.structs.replace(allow("a.test"), ports=[])), "port"),
        (table(allow("x.broker.internal")), "broker's"),
    ],
)
def test_a_whole_policy_that_cannot_be(whole: api.PolicyTable, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        after(DEV, table=whole)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("10.0.0.5", "private.*--allow-reserved"),
        ("[::1]:443", "loopback.*--allow-reserved"),
        ("[64:ff9b::7f00:1]:443", "loopback.*--allow-reserved"),
        ("[2002:7f00:1::/48]:443", "loopback.*--allow-reserved"),
        ("169.254.169.254:80", "link-local.*--allow-reserved"),
        ("x.broker.internal:80", "broker"),
        ("a b", "invalid label"),
        ("127.1", "not an address"),
        ("a.test:0", "port"),
        ("*", "invalid label"),
        ("", "1 to 253"),
    ],
)
def test_an_allow_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        after(DEV, allow=[text])


def test_reserved_with_leave() -> None:
    assert "allow:10.0.0.5:443/tcp+reserved" in ids(
        after(DEV, allow=["10.0.0.5"], allow_reserved=True)
    )
    assert "allow:8.0.0.0/6:443/tcp" in ids(after(DEV, allow=["8.0.0.0/6"]))


def test_there_may_be_only_so_many_rules() -> None:
    most = [f"h{n}.test" for n in range(RULES_MAX)]
    with pytest.raises(ValueError, match="at most"):
        after(DEV, allow=most)
    assert len(ids(after(DEV, allow=most[:-3]))) == RULES_MAX


TEXT = st.sampled_from(
    ["a.test", "a.test:80", "*.b.test", "index.crates.io", "static.crates.io:80,443", "8.8.8.8",
     "10.0.0.0/8", "a.test/udp"]
)  # fmt: skip
STEP = st.one_of(
    st.fixed_dictionaries({"allow": st.lists(TEXT, max_size=2), "allow_reserved": st.booleans()}),
    st.fixed_dictionaries({"remove": st.lists(TEXT, min_size=1, max_size=2)}),
    st.fixed_dictionaries({"mode": st.sampled_from(["deny", "allowlist", "open"]),
                           "allow_open": st.booleans()}),
    st.fixed_dictionaries({"policy": st.sampled_from(["dev", "locked", "wide"])}),
    st.just({"reset": True}),
)  # fmt: skip


@given(st.lists(STEP, max_size=10))
def test_whatever_is_done_the_policy_can_be_enforced(steps: list[dict[str, object]]) -> None:
    policy = DEV
    for step in steps:
        try:
            new = after(policy, **step)
        except ValueError:
            continue
        assert (new.generation == policy.generation) == (new == policy)
        assert new.generation in (policy.generation, policy.generation + 1)
        policy = new
        kept = msgspec.structs.replace(a_record(), policy=policy)
        assert load(record.for_netstack(kept)).generation == policy.generation
        assert record.unpack(record.pack(kept)) == kept
        assert after(policy, reset=True, policy="locked").changes == record.NO_CHANGES


def test_a_record_is_packed_the_same_way_every_time() -> None:
    one, two = a_record(), a_record()
    assert record.pack(one) == record.pack(two)
    assert record.unpack(record.pack(one)) == one


def test_a_record_of_the_version_before_is_read() -> None:
    before = {**msgspec.to_builtins(a_record()), "format": 2, "network": None}
    assert record.unpack(msgspec.msgpack.encode(before)) == a_record()
    for wrong in ({"network": "none"}, {"boots": "1"}, {"more": 1}):
        with pytest.raises(ValueError):
            record.unpack(msgspec.msgpack.encode({**before, **wrong}))


@pytest.mark.parametrize(
    "field, value",
    [
        ("format", 1),
        ("format", 2),
        ("format", 4),
        ("state", "unknown"),
        ("state", "made-up"),
        ("kind", "other"),
        ("cpus", "4"),
    ],
)
def test_a_packed_record_that_cannot_be_is_refused(field: str, value: object) -> None:
    built = msgspec.to_builtins(a_record())
    with pytest.raises(ValueError):
        record.unpack(msgspec.msgpack.encode({**built, field: value}))
    del built[field]
    with pytest.raises(ValueError):
        record.unpack(msgspec.msgpack.encode(built))
