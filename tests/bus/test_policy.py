from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import toy

from agent_box.bus import policy
from agent_box.bus.schema import BASE_METHODS, Contract, Kind, Method
from agent_box.process import paths

REAL = [
    importlib.import_module(f"agent_box.{service}.contract").CONTRACT for service in policy.SERVICES
]
HEAD = "version = 1\n"
GRANT = '[[grant]]\ncaller = "operator"\ncallee = "engine"\nmethods = ["echo"]\nwhy = "Tests."\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "policy.toml"


def load(file: Path, text: str, *, complete: bool = False) -> policy.Policy:
    file.write_text(text)
    return policy.load(file, [toy.CONTRACT], complete=complete)


def test_what_is_not_granted_is_denied(file: Path) -> None:
    made = load(file, HEAD + GRANT)
    assert made.allows("operator", "engine", "echo")
    assert made.reason("operator", "engine", "echo") == "Tests."
    assert made.callers("engine", "echo") == {"operator"}
    for caller, callee, method in (
        ("registry", "engine", "echo"),
        ("operator", "store", "echo"),
        ("operator", "engine", "put"),
        ("operator", "engine", "hello"),
        ("operator", "engine", "outcome"),
        ("", "", ""),
    ):
        assert not made.allows(caller, callee, method)
    assert len(made.grants()) == 1


def test_all_services_are_meant_by_a_star_but_not_oneself(file: Path) -> None:
    text = HEAD + GRANT.replace('"engine"', '"*"').replace("echo", "ping").replace(
        "operator", "store"
    )
    made = load(file, text)
    assert {g.callee for g in made.grants()} == set(policy.SERVICES) - {"store"}


def test_who_may_call_once_may_ask_for_the_outcome(file: Path) -> None:
    made = load(file, HEAD + GRANT.replace("echo", "add"))
    assert made.allows("operator", "engine", "outcome")
    assert not made.allows("registry", "engine", "outcome")


BROKEN = {
    "no file content": "",
    "no grant": HEAD,
    "an empty grant list": HEAD + "grant = []\n",
    "no version": GRANT,
    "another version": "version = 2\n" + GRANT,
    "a version that is no number": "version = true\n" + GRANT,
    "not TOML": HEAD + "[[grant]\n",
    "an unknown key at the top": HEAD + "extra = 1\n" + GRANT,
    "an unknown key in a grant": HEAD + GRANT + "extra = 1\n",
    "an unknown caller": HEAD + GRANT.replace("operator", "guest"),
    "any caller": HEAD + GRANT.replace('"operator"', '"*"'),
    "an unknown callee": HEAD + GRANT.replace('"engine"', '"helper"'),
    "itself": HEAD + GRANT.replace('"operator"', '"engine"'),
    "an unknown method": HEAD + GRANT.replace("echo", "echos"),
    "any method": HEAD + GRANT.replace("echo", "*"),
    "a method of one service for all": HEAD + GRANT.replace('"engine"', '"*"'),
    "no methods": HEAD + GRANT.replace('["echo"]', "[]"),
    "methods that are no list": HEAD + GRANT.replace('["echo"]', '"echo"'),
    "methods that are no names": HEAD + GRANT.replace('["echo"]', "[1]"),
    "no reason": HEAD + GRANT.replace('why = "Tests."\n', ""),
    "an empty reason": HEAD + GRANT.replace("Tests.", ""),
    "a blank reason": HEAD + GRANT.replace("Tests.", "  "),
    "a reason that is no text": HEAD + GRANT.replace('"Tests."', "1"),
    "no caller": HEAD + GRANT.replace('caller = "operator"\n', ""),
    "a grant twice": HEAD + GRANT + GRANT,
    "a method twice": HEAD + GRANT.replace('["echo"]', '["echo", "echo"]'),
    "a grant that is no table": HEAD + "grant = [1]\n",
    "what is no name": HEAD + GRANT.replace('"engine"', '"store"').replace("echo", "a b"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_with_a_mistake_is_refused_and_named(file: Path, what: str) -> None:
    with pytest.raises(policy.PolicyError, match=str(file)):
        load(file, BROKEN[what])


def test_what_cannot_be_read_is_refused(file: Path) -> None:
    with pytest.raises(policy.PolicyError, match="No such file"):
        policy.load(file, [])
    file.write_bytes(HEAD.encode() + b"\xff")
    with pytest.raises(policy.PolicyError):
        policy.load(file, [])


def test_a_method_that_nobody_may_call_is_an_error_when_all_contracts_are_known(
    file: Path,
) -> None:
    with pytest.raises(policy.PolicyError, match=r"nobody may call engine\.blob"):
        load(file, HEAD + GRANT, complete=True)


def test_a_service_without_contract_is_an_error_when_all_are_known(file: Path) -> None:
    text = HEAD + GRANT + GRANT.replace('"engine"', '"store"').replace("echo", "put")
    with pytest.raises(policy.PolicyError, match="store has no contract"):
        load(file, text, complete=True)
    load(file, text)


@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda t: (HEAD + t).encode()))
def test_any_file_is_a_policy_or_a_policy_error(
    tmp_path_factory: pytest.TempPathFactory, untrusted: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(untrusted)
    with pytest.raises(policy.PolicyError):
        policy.load(path, [toy.CONTRACT])


# The policy that ships, over the contracts that ship.


def shipped() -> policy.Policy:
    return policy.load(None, REAL, complete=True)


def test_the_shipped_policy_fits_the_contracts_and_reaches_every_method() -> None:
    made = shipped()
    for contract in REAL:
        for method in contract.methods:
            assert made.callers(contract.service, method.name), f"{contract.service}.{method.name}"


def test_each_service_alone_understands_the_shipped_policy() -> None:
    whole = shipped()
    for contract in REAL:
        alone = policy.load(None, [contract])
        names = [m.name for m in contract.methods] + list(BASE_METHODS)
        for name in names:
            assert alone.callers(contract.service, name) == whole.callers(contract.service, name)


def test_every_grant_has_a_reason_that_is_a_sentence() -> None:
    for grant in shipped().grants():
        assert grant.why.endswith(".") and len(grant.why.split()) >= 4, grant


def declared(contract: Contract) -> set[str]:
    return {m.name for m in contract.methods} | set(BASE_METHODS) | {policy.DOORBELL}


@given(
    st.sampled_from((*policy.ROLES, "guest", "", "*")),
    st.sampled_from((*policy.SERVICES, "helper", "*")),
    st.sampled_from(sorted({n for c in REAL for n in declared(c)} | {"*", "", "__init__"})),
)
def test_nothing_undeclared_is_ever_allowed(caller: str, callee: str, method: str) -> None:
    if not shipped_once.allows(caller, callee, method):
        return
    assert caller in policy.ROLES and caller != callee
    contract = next(c for c in REAL if c.service == callee)
    assert method in declared(contract)
    assert shipped_once.reason(caller, callee, method)


shipped_once = shipped()


def test_only_the_broker_may_read_a_credential() -> None:
    assert shipped().callers("store", "reveal") == {"broker"}


def test_the_supervisor_may_note_and_nothing_else() -> None:
    granted = [g for g in shipped().grants() if g.caller == "supervisor"]
    assert [(g.callee, g.method) for g in granted] == [("registry", "note")]


def test_a_grant_needs_the_callee_within_the_callers_walls() -> None:
    walls = {c.service: c.wall.calls for c in REAL}
    for grant in shipped().grants():
        if grant.caller in walls:  # the others are no services
            assert grant.callee in walls[grant.caller], grant


def test_whoever_calls_once_may_ask_for_the_outcome() -> None:
    for contract in REAL:
        for method in contract.methods:
            if isinstance(method, Method) and method.kind is Kind.ONCE:
                callers = shipped().callers(contract.service, method.name)
                assert callers <= shipped().callers(contract.service, "outcome")


def test_roles_are_the_same_everywhere() -> None:
    assert tuple(paths.SERVICES) == policy.SERVICES
    assert tuple(paths.ROLES) == policy.ROLES
