"""Logs: one JSON object a line on stderr, which supervisord writes to the service's file.

Not by structlog: importing it cost 60-90 ms and 5-8 MB of private memory per process when we
measured, six times over. The calls have its shape (`log.info("event", key=value)`), and the
lines have its fields, so its tools read them.

What is written is flat and bounded. Bytes are never written, only their number; a `Secret`
masks itself; an exception gives its type, its message and where, and never a local variable.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import logging

TEXT_MAX: Final = 1024  # characters of one value
FRAMES_MAX: Final = 24  # innermost frames of one exception
_CAUSES_MAX: Final = 4
_ITEMS_MAX: Final = 64

Write = Callable[[bytes], object]


def to_stderr(line: bytes) -> None:
    """Writes a whole line, unbuffered, whatever a pipe takes at a time."""
    view = memoryview(line)
    while view:
        view = view[os.write(2, view) :]


class Log:
    """A log with fields that each of its lines carries.

    Args:
        write: takes one line, its line feed included.
        fields: on every line, e.g. ``service="store"``.
    """

    def __init__(self, write: Write = to_stderr, **fields: object) -> None:
        self._write = write
        self._fields = {name: _plain(value) for name, value in fields.items()}

    def bind(self, **fields: object) -> Log:
        """The same log with more fields."""
        return Log(self._write, **{**self._fields, **fields})

    def info(self, event: str, **fields: object) -> None:
        self._line("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._line("warning", event, fields)

    def error(self, event: str, *, error: BaseException | None = None, **fields: object) -> str:
        """Logs a defect.

        Returns:
            The id under which it stands in the log, which is all that a caller is told.
        """
        id = os.urandom(6).hex()
        detail: dict[str, object] = {} if error is None else {"error": _describe(error)}
        self._line("error", event, {"id": id, **fields}, detail)
        return id

    def _line(
        self,
        level: str,
        event: str,
        fields: dict[str, object],
        detail: dict[str, object] | None = None,
    ) -> None:
        now = time.time_ns() // 1_000_000
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 1000))
        line: dict[str, object] = {
            "timestamp": f"{stamp}.{now % 1000:03d}Z",
            "level": level,
            **self._fields,
            "event": _plain(event),
            **{name: _plain(value) for name, value in fields.items()},
            **(detail or {}),
        }
        self._write(json.dumps(line).encode("ascii") + b"\n")


def install(log: Log) -> None:
    """Sends to `log` what Python would print itself: uncaught exceptions of the main thread,
    of others and of destructors, and what libraries say through `logging`, from warnings up.
    """
    import logging
    import threading

    def uncaught(
        kind: type[BaseException], error: BaseException, _where: TracebackType | None
    ) -> None:
        if issubclass(kind, KeyboardInterrupt):
            log.warning("interrupted")
            return
        log.error("uncaught exception", error=error)

    def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread is not None else "?"
        log.error("uncaught exception", error=args.exc_value, thread=name)

    def unraisable(args: Any) -> None:  # sys.UnraisableHookArgs exists for type checkers only
        log.error("uncaught exception in a destructor", error=args.exc_value)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            _from_library(log, record)

    sys.excepthook = uncaught
    threading.excepthook = uncaught_in_thread
    sys.unraisablehook = unraisable
    root = logging.getLogger()
    root.handlers[:] = [Handler()]
    root.setLevel(logging.WARNING)
    logging.raiseExceptions = False


def _from_library(log: Log, record: logging.LogRecord) -> None:
    try:
        message = record.getMessage()
    except Exception as mistake:  # noqa: BLE001 - a library's bad format string; it is logged
        log.error("a log call that cannot be formatted", error=mistake, logger=record.name)
        return
    error = record.exc_info[1] if record.exc_info else None
    if record.levelno >= 40:
        log.error(message, error=error, logger=record.name)
    else:
        log.warning(message, logger=record.name)


def _plain(value: object, depth: int = 0) -> object:
    """A value as JSON may hold it: bounded, and without the content of bytes."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if depth < 3 and isinstance(value, dict):
        items = list(value.items())[:_ITEMS_MAX]
        return {str(_plain(k, 9)): _plain(v, depth + 1) for k, v in items}
    if depth < 3 and isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth + 1) for item in list(value)[:_ITEMS_MAX]]
    if isinstance(value, dict | list | tuple | set | frozenset):
        return f"<{len(value)} items>"  # its repr would show the bytes in it
    text = str(value)
    return text if len(text) <= TEXT_MAX else text[:TEXT_MAX] + "..."


def _describe(error: BaseException, causes: int = 0) -> dict[str, object]:
    frames: list[str] = []
    where = error.__traceback__
    while where is not None:
        code = where.tb_frame.f_code
        frames.append(f"{code.co_filename}:{where.tb_lineno} {code.co_name}")
        where = where.tb_next
    described: dict[str, object] = {
        "type": f"{type(error).__module__}.{type(error).__qualname__}",
        "message": _message(error),
        "at": frames[-FRAMES_MAX:],
    }
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and causes < _CAUSES_MAX:
        described["because"] = _describe(cause, causes + 1)
    if isinstance(error, BaseExceptionGroup) and causes < _CAUSES_MAX:
        described["parts"] = [_describe(part, _CAUSES_MAX) for part in error.exceptions[:8]]
    return described


def _message(error: BaseException) -> str:
    """Its arguments, of which bytes are not shown: UnicodeDecodeError carries its input."""
    if isinstance(error, UnicodeError):
        return str(error.args[-1]) if error.args else ""
    if any(isinstance(arg, bytes | bytearray | memoryview) for arg in error.args):
        return str(_plain(error.args))
    return str(_plain(str(error)))
