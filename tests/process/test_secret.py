"""However a secret usually gets into a log, it does not."""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle
import pprint
import sys
import traceback

import msgpack
import msgspec
import pytest
import rich.console
import rich.pretty
import rich.traceback
import structlog

from agent_box.process.log import Log
from agent_box.process.secret import MASK, Secret

CANARY = b"canary-7f3a9"


def shows(text: str | bytes) -> bool:
    raw = text.encode() if isinstance(text, str) else text
    forms = (CANARY, CANARY.hex().encode(), b"Y2FuYXJ5", str(list(CANARY)).encode())
    return any(form in raw for form in forms)


@pytest.fixture
def secret() -> Secret:
    return Secret(CANARY)


def test_the_test_can_tell() -> None:
    assert shows(repr(CANARY))
    assert shows(repr({"a": [bytearray(CANARY)]}))
    assert shows(CANARY.hex())


def test_reveal_is_the_way_out(secret: Secret) -> None:
    assert secret.reveal() == CANARY
    assert Secret(bytearray(CANARY)).reveal() == CANARY
    assert Secret(memoryview(CANARY)).reveal() == CANARY


@pytest.mark.parametrize(
    "show",
    [
        repr,
        str,
        ascii,
        format,
        lambda s: f"{s}",
        lambda s: f"{s!r:>40}",
        lambda s: f"{s:x}",
        lambda s: f"{s:>100}",
        "%s".__mod__,
        "%r".__mod__,
        lambda s: f"{s}",
        lambda s: f"{s!s:.3}",
        lambda s: repr([s, {"a": s}, (s,)]),
        pprint.pformat,
        lambda s: repr(vars(type("Holder", (), {"s": s}))),
        lambda s: json.dumps({"s": s}, default=str),
        lambda s: json.dumps({"s": s}, default=repr),
        rich.pretty.pretty_repr,
        lambda s: str(dir(s)),
        lambda s: str(ValueError("it was", s)),
        lambda s: repr(KeyError(s)),
    ],
)  # fmt: skip
def test_it_masks_itself(secret: Secret, show: object) -> None:
    assert callable(show)
    text = show(secret)
    assert not shows(text)


@pytest.mark.parametrize("spec", ["", "s", ">3", "^80", ".1", "x", "!r"])
def test_the_mask_is_the_same_whatever_the_format(secret: Secret, spec: str) -> None:
    assert format(secret, spec) == MASK


@pytest.mark.parametrize(
    "write",
    [
        pickle.dumps,
        copy.copy,
        copy.deepcopy,
        json.dumps,
        msgpack.packb,
        msgspec.msgpack.encode,
        msgspec.json.encode,
        bytes,
        bytearray,
        memoryview,
        list,
        hash,
        len,
        lambda s: b"%b" % s,
        lambda s: b"" + s,
        lambda s: b"".join([s]),
        lambda s: vars(s),
        lambda s: s.__getstate__(),
        lambda s: msgpack.packb({"a": [s]}),
        lambda s: {s: 1},
        lambda s: iter(s),
        lambda s: s[0],
    ],
)  # fmt: skip
def test_it_is_not_serialised(secret: Secret, write: object) -> None:
    assert callable(write)
    with pytest.raises(TypeError) as raised:
        write(secret)
    assert not shows(str(raised.value))


def failing(secret: Secret) -> None:
    local = secret
    raise RuntimeError(f"cannot use {local}", local)


def test_exceptions_and_tracebacks_mask_it(secret: Secret) -> None:
    try:
        failing(secret)
    except RuntimeError as error:
        plain = "".join(traceback.format_exception(error))
        found = traceback.TracebackException.from_exception(error, capture_locals=True)
        with_locals = "".join(found.format())
        console = rich.console.Console(file=io.StringIO(), width=200)
        console.print(rich.traceback.Traceback.from_exception(
            type(error), error, error.__traceback__, show_locals=True
        ))  # fmt: skip
        in_rich = console.file.getvalue()  # type: ignore[attr-defined]
    for text in (plain, with_locals, in_rich):
        assert "cannot use" in text
        assert not shows(text)
    assert MASK in with_locals  # so the locals were shown
    assert MASK in in_rich


def test_logging_masks_it(secret: Secret) -> None:
    stream = io.StringIO()
    logger = logging.Logger("test")
    logger.addHandler(logging.StreamHandler(stream))
    logger.error("key %s and %r in %s", secret, secret, {"k": [secret]})
    try:
        failing(secret)
    except RuntimeError:
        logger.exception("failed")
    assert MASK in stream.getvalue()
    assert not shows(stream.getvalue())


def test_our_log_masks_it(secret: Secret) -> None:
    lines: list[bytes] = []
    log = Log(lines.append, bound=secret)
    try:
        failing(secret)
    except RuntimeError as error:
        log.error("failed", error=error, key=secret, nested={"a": [secret], secret_key(): 1})
    assert MASK.encode() in b"".join(lines)
    assert not shows(b"".join(lines))


def secret_key() -> str:
    return "a plain key"


def test_structlog_masks_it(secret: Secret) -> None:
    for renderer in (structlog.processors.JSONRenderer(), structlog.dev.ConsoleRenderer()):
        line = renderer(None, "info", {"event": "e", "key": secret, "deep": [{"k": secret}]})
        assert MASK in str(line)
        assert not shows(str(line))


def test_pytest_masks_it(secret: Secret) -> None:
    from _pytest._io.saferepr import saferepr

    assert not shows(saferepr(secret))
    assert not shows(saferepr({"a": secret}))


def test_equal_is_by_content_and_with_secrets_only(secret: Secret) -> None:
    assert secret == Secret(CANARY)
    assert secret != Secret(CANARY + b"x")
    assert secret != CANARY
    assert (secret == CANARY) is False


def test_comparing_takes_the_way_that_tells_no_time(
    secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hmac

    asked = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: asked.append((a, b)) or True)
    assert secret == Secret(b"other")
    assert asked == [(CANARY, b"other")]


def test_wiping_overwrites_and_ends_it() -> None:
    secret = Secret(CANARY)
    inside: bytearray = secret._Secret__value  # type: ignore[attr-defined]
    secret.wipe()
    assert inside == bytes(len(CANARY))
    secret.wipe()
    with pytest.raises(ValueError, match="wiped"):
        secret.reveal()


def test_the_last_reference_wipes() -> None:
    secret = Secret(CANARY)
    inside: bytearray = secret._Secret__value  # type: ignore[attr-defined]
    del secret
    assert inside == bytes(len(CANARY))


@pytest.mark.parametrize("value", ["text", None, 3, [1]])
def test_it_is_made_from_bytes_only(value: object) -> None:
    with pytest.raises(TypeError) as raised:
        Secret(value)  # type: ignore[arg-type]
    assert "text" not in str(raised.value)
    assert sys.exc_info()[0] is None
