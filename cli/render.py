"""What a verb says: results to stdout, everything else to stderr.

Without `--json`, stdout is text for people. With it, stdout holds exactly one JSON object,
or one object per line for a verb that streams, the last of which has ``"type": "end"``.
stderr is never JSON, and every exit code but 0 comes with one line on it that names the
cause. Sizes are integer bytes, times RFC 3339 in UTC, durations integer milliseconds.

Nearly everything that is shown was written by somebody else at some time: a guest, a config
file, a peer. So whatever goes to a terminal is masked here: no escape sequence, no
control character, no bidirectional override and no forged line gets through.

Only the standard library, and little of it: every verb imports this module.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TextIO

SCHEMA: Final = 1  # counts up with every change that breaks a shape


class Failure(Exception):
    """A verb that did not do what it says. `main` turns it into the line, the object, the code.

    Args:
        exit: one of the documented codes, never 0.
        kind: the reason for a machine, lower case with hyphens, e.g. ``wrong-state``.
        message: one line that names the thing.
        text: for stdout, without `--json` only; for a verb whose answer is worth
            reading although it failed.
        facts: more members of the JSON error, snake_case, e.g. ``state="stopped"``.
    """

    def __init__(self, exit: int, kind: str, message: str, *, text: str = "", **facts: Any) -> None:
        super().__init__(message)
        self.exit = exit
        self.kind = kind
        self.message = message
        self.text = text
        self.facts = facts


class Usage(Failure):
    """A mistake in the command line: exit 64, and nothing ran."""

    def __init__(self, message: str) -> None:
        super().__init__(64, "usage", message)


class ReaderGone(Exception):
    """Whoever read our stdout has closed it. Not an error: nobody is left to tell."""


def clean(untrusted: object) -> str:
    """One line of printable text. What is not printable is shown as its escape."""
    text = str(untrusted)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def clean_lines(untrusted: str) -> str:
    """Like `clean`, but line feeds and tabs stay: only for text that may have many lines."""
    return "\n".join("\t".join(map(clean, line.split("\t"))) for line in untrusted.split("\n"))


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as they need be, each cell masked. No rule, no colour, no wrapping."""
    cells = [list(header), *([clean(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def time_text(unix_ms: int) -> str:
    """Unix milliseconds as RFC 3339 in UTC, e.g. ``2026-11-29T21:04:05.123Z``."""
    seconds, ms = divmod(unix_ms, 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{ms:03d}Z"


def size_text(size: int) -> str:
    """Bytes for people, in the units that the verbs take: ``8G``, ``512M``, else ``123B``."""
    for unit, factor in (("G", 1 << 30), ("M", 1 << 20)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B"


class Render:
    """The voice of one run of one verb.

    A verb ends with exactly one of `result`, `end` (after stream lines) or a raised
    `Failure`. `exit` is what the process will exit with.
    """

    def __init__(self, verb: str, *, json: bool, stdout: TextIO, stderr: TextIO | None) -> None:
        self.verb = verb
        self.json = json
        self.exit = 0
        self.ended = False  # the one object, or the end line, is out
        self.streaming = False  # one object per line and an end line, instead of one object
        self._stdout = stdout
        self._stderr = stderr

    # ---------------------------------------------------------------- the answer

    def result(self, result: Mapping[str, Any], text: str = "") -> None:
        """The answer of a verb that does not stream.

        `text` is what a person reads; nothing is printed for an empty one.
        """
        self._end()
        if self.json:
            self._object({"schema": SCHEMA, "verb": self.verb, "ok": True, "result": result})
        elif text:
            self._out(clean_lines(text) + "\n")

    def item(self, type: str, fields: Mapping[str, Any], text: str | None = None) -> None:
        """One line of a stream, shown at once. `text` None prints nothing for people."""
        self.streaming = True
        if self.json:
            self._object({"type": type, **fields})
        elif text is not None:
            self._out(clean_lines(text) + "\n")

    def end(self, exit: int = 0, **facts: Any) -> None:
        """Ends a stream that went well. `main` does it for a body that did not."""
        if not self.streaming:
            raise RuntimeError(f"{self.verb} gave no answer")
        self._end()
        self.exit = exit
        if self.json:
            self._object({"type": "end", "ok": exit == 0, "exit": exit, **facts})

    def error(self, exit: int, kind: str, message: str, *, text: str = "", **facts: Any) -> None:
        """Says no: one line on stderr and, with `--json`, the object. Verbs raise `Failure`."""
        self._end()
        self.exit = exit
        self.complain(message)
        error = {"exit": exit, "kind": kind, "message": message, **facts}
        if not self.json:
            if text:
                self._out(clean_lines(text) + "\n")
        elif self.streaming:
            self._object({"type": "end", "ok": False, "exit": exit, "error": error})
        else:
            self._object({"schema": SCHEMA, "verb": self.verb, "ok": False, "error": error})

    # ------------------------------------------------------------ beside the answer

    def progress(self, text: str) -> None:
        """One line to stderr, at once: what takes longer than a second says so."""
        self._err(clean(text))

    def ask(self, text: str) -> None:
        """A prompt, without a line feed of ours."""
        self._err(clean_lines(text), end="")

    def complain(self, message: str) -> None:
        """The line on stderr that goes with an exit code that is not 0."""
        self._err(f"agent-box: {clean(message)}")

    def warning(self, text: str) -> None:
        self._err(f"agent-box: warning: {clean(text)}")

    def text(self, text: str) -> None:
        """Text for people in pieces, as it comes, without a line feed of ours."""
        if not self.json:
            self.plain(text)

    def plain(self, text: str) -> None:
        """Text that `--json` does not change: help, the version, completions."""
        self._out(clean_lines(text))

    # ------------------------------------------------------------------------ below

    def _end(self) -> None:
        if self.ended:
            raise RuntimeError(f"{self.verb} answered twice")
        self.ended = True

    def _object(self, value: Mapping[str, Any]) -> None:
        from json import dumps

        # ASCII only, and DEL too: JSON on a terminal must not be able to drive it.
        self._out(dumps(value, allow_nan=False).replace("\x7f", "\\u007f") + "\n")

    def _out(self, text: str) -> None:
        try:
            self._stdout.write(text)
            self._stdout.flush()
        except BrokenPipeError:
            _abandon(self._stdout)
            raise ReaderGone from None
        except OSError as error:
            _abandon(self._stdout)
            raise Failure(1, "output", f"stdout: {error.strerror}") from None

    def _err(self, line: str, end: str = "\n") -> None:
        if self._stderr is None:
            return
        try:
            self._stderr.write(line + end)
            self._stderr.flush()
        except OSError:
            # Nobody reads it; the exit code still tells. The stream must not speak again
            # when the interpreter ends, or that would change the code.
            _abandon(self._stderr)
            self._stderr = None


def _abandon(stream: TextIO) -> None:
    """Points a dead stream at /dev/null, so that the flush at exit cannot fail as well."""
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(null, stream.fileno())
    os.close(null)


def plug_descriptors() -> None:
    """Makes descriptors 0 to 2 exist, so that no socket of ours becomes somebody's stderr.

    Python has set `sys.stdin` and so on to None by then, which still tells that they were
    closed.
    """
    while True:
        null = os.open(os.devnull, os.O_RDWR)
        if null > 2:
            os.close(null)
            return
        os.set_inheritable(null, True)
