"""Who may call what. One file, default deny, each grant with a reason; the callee enforces it.

A file that cannot be understood completely is refused completely: half an authority graph is
worse than none, and a service does not start on it.

Not written in the file, because it follows from it:
- `outcome` is granted to whoever may call a `Kind.ONCE` method of that service: to ask what
  became of one's own calls adds nothing to being allowed to make them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent_box.bus.schema import BASE_METHODS, Contract, Kind, Method

SERVICES: Final = ("registry", "store", "broker", "netstack", "channel", "engine")
ROLES: Final = (*SERVICES, "supervisor", "operator")
DOORBELL: Final = "doorbell"  # not a method: the right to hear that there is something new
ALL: Final = "*"

_OF_EVERY_SERVICE: Final = frozenset({*BASE_METHODS, DOORBELL})
_FILE: Final = Path(__file__).with_name("policy.toml")
_OUTCOME_WHY: Final = "Who may make a call that must not be repeated may ask what became of it."


class PolicyError(ValueError):
    """The policy file is not one; nothing of it is used."""


@dataclass(frozen=True)
class Grant:
    caller: str
    callee: str
    method: str
    why: str


class Policy:
    """The grants, one per caller, callee and method."""

    def __init__(self, grants: Iterable[Grant]) -> None:
        self._grants = {(g.caller, g.callee, g.method): g for g in grants}

    def allows(self, caller: str, callee: str, method: str) -> bool:
        return (caller, callee, method) in self._grants

    def reason(self, caller: str, callee: str, method: str) -> str:
        """Why it is granted. Raises KeyError when it is not."""
        return self._grants[caller, callee, method].why

    def callers(self, callee: str, method: str) -> frozenset[str]:
        """The roles that may call `method` of `callee`."""
        return frozenset(
            caller for caller, to, what in self._grants if (to, what) == (callee, method)
        )

    def grants(self) -> tuple[Grant, ...]:
        """All grants in a fixed order, for the documents."""
        return tuple(self._grants[key] for key in sorted(self._grants))


def load(path: Path | None, contracts: Iterable[Contract], *, complete: bool = False) -> Policy:
    """Reads and checks the policy.

    Args:
        path: the file; None for the one that comes with the package.
        contracts: methods of these services are checked by name. A service knows its own
            contract only; the tests know all.
        complete: whether `contracts` are all there are; then also a service without contract
            and a method that nobody may call are errors.

    Raises:
        PolicyError: an unknown key, role or method, a wildcard where none may be, a missing
            reason, a grant that stands twice, an empty or unreadable file.
    """
    file = _FILE if path is None else path
    try:
        with open(file, "rb") as handle:
            untrusted = tomllib.load(handle)
    except OSError as error:
        raise PolicyError(f"{file}: {error.strerror}") from None
    except ValueError as error:  # TOML or its encoding
        raise PolicyError(f"{file}: {error}") from None
    try:
        return Policy(_grants(untrusted, {c.service: c for c in contracts}, complete))
    except PolicyError as error:
        raise PolicyError(f"{file}: {error}") from None


def _grants(untrusted: dict[str, Any], contracts: dict[str, Contract], all_: bool) -> list[Grant]:
    _keys(untrusted, {"version", "grant"}, "the file")
    if type(untrusted["version"]) is not int or untrusted["version"] != 1:
        raise PolicyError("version must be 1")
    tables = untrusted["grant"]
    if not isinstance(tables, list) or not tables:
        raise PolicyError("there is no grant")
    made: dict[tuple[str, str, str], Grant] = {}
    for number, table in enumerate(tables, 1):
        for grant in _table(table, f"grant {number}", contracts, all_):
            key = (grant.caller, grant.callee, grant.method)
            if key in made:
                raise PolicyError(
                    f"grant {number}: {grant.caller} to {grant.callee}.{grant.method} stands twice"
                )
            made[key] = grant
    for caller, callee, method in list(made):
        contract = contracts.get(callee)
        key = (caller, callee, "outcome")
        if contract and key not in made and _is_once(contract, method):
            made[key] = Grant(*key, _OUTCOME_WHY)
    if all_:
        _nothing_is_out_of_reach(made, contracts)
    return list(made.values())


def _table(table: Any, where: str, contracts: dict[str, Contract], all_: bool) -> list[Grant]:
    if not isinstance(table, dict):
        raise PolicyError(f"{where}: not a table")
    _keys(table, {"caller", "callee", "methods", "why"}, where)
    caller, callee = _text(table, "caller", where), _text(table, "callee", where)
    why, methods = _text(table, "why", where), table["methods"]
    if caller not in ROLES:
        raise PolicyError(f"{where}: unknown caller {caller!r}")
    if callee != ALL and callee not in SERVICES:
        raise PolicyError(f"{where}: unknown callee {callee!r}")
    if caller == callee:
        raise PolicyError(f"{where}: {caller} needs no grant to call itself")
    if not isinstance(methods, list) or not methods:
        raise PolicyError(f"{where}: methods is not a list of names")
    for method in methods:
        if not isinstance(method, str):
            raise PolicyError(f"{where}: methods is not a list of names")
        _known(method, callee, where, contracts, all_)
    callees = [s for s in SERVICES if s != caller] if callee == ALL else [callee]
    return [Grant(caller, to, method, why) for to in callees for method in methods]


def _known(
    method: str, callee: str, where: str, contracts: dict[str, Contract], all_: bool
) -> None:
    if method in _OF_EVERY_SERVICE:
        return
    if callee == ALL:
        raise PolicyError(f"{where}: {method!r} is not a method of every service")
    if callee in contracts:
        if all(m.name != method for m in contracts[callee].methods):
            raise PolicyError(f"{where}: {callee} has no method {method!r}")
    elif all_:
        raise PolicyError(f"{where}: {callee} has no contract")
    elif not method.isidentifier():
        raise PolicyError(f"{where}: {method!r} is not the name of a method")


def _nothing_is_out_of_reach(
    made: dict[tuple[str, str, str], Grant], contracts: dict[str, Contract]
) -> None:
    reached = {(callee, method) for _, callee, method in made}
    for contract in contracts.values():
        for method in contract.methods:
            if (contract.service, method.name) not in reached:
                raise PolicyError(f"nobody may call {contract.service}.{method.name}")


def _is_once(contract: Contract, name: str) -> bool:
    return any(
        isinstance(m, Method) and m.kind is Kind.ONCE and m.name == name for m in contract.methods
    )


def _keys(table: dict[str, Any], wanted: set[str], where: str) -> None:
    if unknown := sorted(set(table) - wanted):
        raise PolicyError(f"{where}: unknown key {unknown[0]!r}")
    if missing := sorted(wanted - set(table)):
        raise PolicyError(f"{where}: {missing[0]} is missing")


def _text(table: dict[str, Any], key: str, where: str) -> str:
    value = table[key]
    if not isinstance(value, str) or not value.strip():
        raise PolicyError(f"{where}: {key} is empty or not text")
    return value
