"""Messages of the helper's socket: strict JSON, checked against the contract. Sans-I/O."""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple, NoReturn

from agent_box.helper import contract
from agent_box.helper.contract import (
    Bool,
    Hex,
    Int,
    Many,
    Maybe,
    Op,
    Struct,
    Text,
    Type,
    Word,
)

MAX_DEPTH: Final = 6
OPS: Final = {op.name: op for op in contract.OPS}
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')
_BRACKET: Final = re.compile(rb"[\[\]{}]")
_VERSION: Final = Int(contract.PROTOCOL, contract.PROTOCOL)
_REQ: Final = Int(0, (1 << 53) - 1)


class WireError(ValueError):
    """Not a message as declared. One line."""


class Refused(Exception):
    """An operation was refused.

    Attributes:
        code: a key of `contract.ERRORS`.
        detail: one line for a person, or the digest that is meant.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class Request(NamedTuple):
    req: int
    op: Op
    args: dict[str, Any]


class Answer(NamedTuple):
    """`untrusted_reply` is checked against the operation by whoever knows which it was."""

    req: int
    untrusted_reply: object
    refused: Refused | None


def decode(data: bytes) -> object:
    """Strict JSON: no duplicate keys, no NaN, no fractions, no depth beyond the contract's.

    Raises:
        WireError: it is not that.
    """
    if len(data) > contract.MESSAGE_BYTES:
        raise WireError("too long")
    depth = 0
    for bracket in _BRACKET.findall(_STRING.sub(b"", data)):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise WireError("nested too deeply")
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_refuse_number,
            parse_float=_refuse_number,
            parse_int=_integer,
        )
    except WireError:
        raise
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {type(error).__name__}") from None


def encode(message: object) -> bytes:
    """One message.

    Raises:
        WireError: it is too long.
    """
    data = json.dumps(message, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
    if len(data) > contract.MESSAGE_BYTES:
        raise WireError(f"a message of {len(data)} bytes is too long")
    return data


def check(kind: Type, untrusted: object, where: str = "") -> Any:
    """The value, if it is of this type; nothing is converted.

    Raises:
        WireError: it is not; the line names the field.
    """
    ok = False
    match kind:
        case Hex(digits):
            ok = isinstance(untrusted, str) and len(untrusted) == digits
            ok = ok and re.fullmatch(r"[0-9a-f]*", str(untrusted), re.ASCII) is not None
        case Int(low, high):
            ok = type(untrusted) is int and low <= untrusted <= high
        case Bool():
            ok = isinstance(untrusted, bool)
        case Text(most):
            ok = isinstance(untrusted, str) and len(untrusted) <= most
        case Word(words):
            ok = isinstance(untrusted, str) and untrusted in words
        case Maybe(of):
            return None if untrusted is None else check(of, untrusted, where)
        case Many(of, most):
            if isinstance(untrusted, list) and len(untrusted) <= most:
                return [check(of, each, f"{where}[]") for each in untrusted]
        case Struct(fields):
            if not isinstance(untrusted, dict):
                raise WireError(f"{where or 'the message'} is not an object")
            known = dict(fields)
            for name in untrusted:
                if name not in known:
                    raise WireError(f"{where or 'the message'} has an unknown field")
            for name in known:
                if name not in untrusted:
                    raise WireError(f"{_join(where, name)} is missing")
            return {n: check(t, untrusted[n], _join(where, n)) for n, t in fields}
    if not ok:
        raise WireError(f"{where or 'the message'} is not as declared")
    return untrusted


def request(req: int, op: Op, args: dict[str, object]) -> bytes:
    """Raises:
    WireError: the arguments are not as declared.
    """
    check(op.request, args)
    return encode({"v": contract.PROTOCOL, "req": req, "op": op.name, "args": args})


def read_request(data: bytes) -> tuple[int, Request | WireError]:
    """A request, or, when only its operation or arguments are wrong, why.

    Raises:
        WireError: it is no request at all, so there is no number to answer to.
    """
    untrusted = decode(data)
    if not isinstance(untrusted, dict) or set(untrusted) != {"v", "req", "op", "args"}:
        raise WireError("not a request")
    check(_VERSION, untrusted["v"], "v")
    req: int = check(_REQ, untrusted["req"], "req")
    name = check(Text(20), untrusted["op"], "op")
    op = OPS.get(name)
    if op is None:
        return req, WireError("op is not an operation")
    try:
        return req, Request(req, op, check(op.request, untrusted["args"], "args"))
    except WireError as error:
        return req, error


def reply(req: int, op: Op, fields: dict[str, object]) -> bytes:
    """Raises:
    WireError: the reply is not as declared.
    """
    check(op.reply, fields)
    return encode({"v": contract.PROTOCOL, "req": req, "reply": fields})


def refusal(req: int, code: str, detail: str) -> bytes:
    """Raises:
    KeyError: there is no such code.
    """
    contract.ERRORS[code]
    error = {"code": code, "detail": line(detail)}
    return encode({"v": contract.PROTOCOL, "req": req, "error": error})


def read_answer(data: bytes) -> Answer:
    """Raises:
    WireError: it is no answer.
    """
    untrusted = decode(data)
    if not isinstance(untrusted, dict):
        raise WireError("not an answer")
    if set(untrusted) not in ({"v", "req", "reply"}, {"v", "req", "error"}):
        raise WireError("not an answer")
    check(_VERSION, untrusted["v"], "v")
    req: int = check(_REQ, untrusted["req"], "req")
    if "reply" in untrusted:
        return Answer(req, untrusted["reply"], None)
    fields = Struct((("code", Word(tuple(contract.ERRORS))), ("detail", Text(1000))))
    error = check(fields, untrusted["error"], "error")
    return Answer(req, None, Refused(error["code"], error["detail"]))


def line(text: str, most: int = 1000) -> str:
    """One printable line out of whatever a program or a file name said."""
    clean = "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)
    return " ".join(clean.split())[:most]


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise WireError("a key twice in one object")
    return found


def _refuse_number(_text: str) -> NoReturn:
    raise WireError("a number that is not an integer")


def _integer(text: str) -> int:
    if len(text) > 20:
        raise WireError("a number that is too long")
    return int(text)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
