"""One prompt to an agent over the Agent Client Protocol, version 1, without I/O.

The agent's output goes in as bytes; what is to be sent to it, and what came of it, comes out
as effects. The same bytes in the same order always give the same effects, so a run that was
interrupted is brought back by feeding it again what was kept of it. Everything that the agent
says is hostile: lines are capped, JSON is checked, an answer to nothing ends the run.

Sources: the schema of the protocol, version 1 (agentclientprotocol.com); JSON-RPC 2.0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

VERSION: Final = 1  # of the protocol
LINE_MAX: Final = 4 << 20  # bytes of one message of the agent's
UPDATES_MAX: Final = 100_000  # of one run
TEXT_MAX: Final = 300  # characters of a text that is told in one line
ID_MAX: Final = 512  # characters of an id
KIND: Final = re.compile(r"[a-z][a-z_]{0,63}", re.ASCII)
# What we tell ourselves among the updates. An agent that uses these names is none.
SESSION: Final = "box_session"
PERMISSION: Final = "box_permission"
OWN: Final = frozenset((SESSION, PERMISSION))
METHOD_NOT_FOUND: Final = -32601

How = Literal["stopped", "timed-out", "cancelled", "left-running", "failed"]


class Code:
    """Why a run failed, for a program to read; docs/cli.md says them for people."""

    MISSING: Final = "harness-missing"
    EXITED: Final = "harness-exited"
    ERROR: Final = "harness-error"
    BAD_JSON: Final = "bad-json"
    LONG_LINE: Final = "line-too-long"
    FLOOD: Final = "too-much-output"
    PROTOCOL: Final = "protocol"
    NO_SESSIONS: Final = "no-sessions"


@dataclass(frozen=True)
class Wanted:
    """What the run is.

    Attributes:
        session: one to load; None begins one.
        directory: of the session, in the guest.
        mode: to set in the session, if any.
        authenticate: a method to choose first, if any.
        version: of this program.
    """

    prompt: str
    session: str | None
    directory: str
    mode: str | None
    authenticate: str | None
    version: str


@dataclass(frozen=True)
class Send:
    data: bytes  # whole lines


@dataclass(frozen=True)
class Update:
    kind: str
    body: str  # JSON


@dataclass(frozen=True)
class Allowed:
    """The agent asked for leave and was given it, this once; or had no such answer to offer,
    and `option` is None."""

    title: str
    option: str | None


@dataclass(frozen=True)
class End:
    """The last effect.

    Attributes:
        stop_reason: the agent's word, when it stopped.
        code: of `Code`, when it failed.
        text: why, in one line, for a person.
    """

    how: How
    stop_reason: str | None
    code: str | None
    text: str


Effect = Send | Update | Allowed | End


class Driver:
    """One prompt from its first message to its end.

    Attributes:
        session: its id, once the agent said it.
        end: how it ended; None while it goes on.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._line = bytearray()
        self._effects: list[Effect] = []
        self._next = 0
        self._due: tuple[int, Callable[[Any], None]] | None = None  # the request in flight
        self._prompted = False
        self._cancelled: How | None = None
        self._updates = 0
        self.session: str | None = None
        self.end: End | None = None

    def begin(self) -> list[Effect]:
        """The first message."""
        self._ask(
            "initialize",
            {
                "protocolVersion": VERSION,
                "clientCapabilities": {
                    "fs": {"readTextFile": False, "writeTextFile": False},
                    "terminal": False,
                },
                "clientInfo": {
                    "name": "agent-box",
                    "title": "agent-box",
                    "version": self._wanted.version,
                },
            },
            self._initialized,
        )
        return self._taken()

    def feed(self, untrusted: bytes) -> list[Effect]:
        """What the agent put out next."""
        start = 0
        while self.end is None and (at := untrusted.find(b"\n", start)) >= 0:
            self._line += untrusted[start:at]
            start = at + 1
            line, self._line = bytes(self._line), bytearray()
            if len(line) > LINE_MAX:
                self._fail(Code.LONG_LINE, f"the harness sent a message over {LINE_MAX} bytes")
            elif line.strip():
                self._message(line)
        if self.end is None:
            self._line += untrusted[start:]
            if len(self._line) > LINE_MAX:
                self._fail(Code.LONG_LINE, f"the harness sent a message over {LINE_MAX} bytes")
        return self._taken()

    def cancel(self, why: Literal["timed-out", "cancelled"]) -> list[Effect]:
        """Asks the agent to stop; its end comes when it answers. Before the prompt, at once."""
        if self.end is None and self._cancelled is None:
            self._cancelled = why
            if self._prompted:
                self._notify("session/cancel", {"sessionId": self.session})
            else:
                self._ended(why)
        return self._taken()

    def give_up(self) -> list[Effect]:
        """The agent was asked to stop and does not answer."""
        if self.end is None and self._cancelled is not None:
            self._ended(self._cancelled, text="the harness did not answer to the cancel")
        return self._taken()

    def left(self) -> list[Effect]:
        """The instance runs no more."""
        if self.end is None:
            self._ended("left-running", text="the instance left running")
        return self._taken()

    def flooded(self, limit: int) -> list[Effect]:
        """It put out more than is kept of a run."""
        if self.end is None:
            self._fail(Code.FLOOD, f"the harness put out more than {limit} bytes")
        return self._taken()

    def exited(self, status: int | None, signal: int | None, stderr: str) -> list[Effect]:
        """The agent's process ended."""
        if self.end is None:
            if self._cancelled is not None:
                self._ended(self._cancelled)
            else:
                how = f"signal {signal}" if signal is not None else f"status {status}"
                code = Code.MISSING if status in (126, 127) else Code.EXITED
                lines = [line.strip() for line in stderr.splitlines() if line.strip()]
                said = f": {lines[-1]}" if lines else ""
                self._fail(code, f"the harness ended with {how}{said}")
        return self._taken()

    def lost(self, why: str) -> list[Effect]:
        """The guest does not have the agent's process any more."""
        if self.end is None:
            self._fail(Code.EXITED, why)
        return self._taken()

    # ------------------------------------------------------------------ messages

    def _message(self, line: bytes) -> None:
        try:
            message = msgspec.json.decode(line)
        except (ValueError, RecursionError):
            self._fail(Code.BAD_JSON, "the harness sent a line that is not JSON")
            return
        if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
            self._fail(Code.PROTOCOL, "the harness sent what is no JSON-RPC message")
            return
        method = message.get("method")
        if method is None:
            self._answer(message)
        elif not isinstance(method, str):
            self._fail(Code.PROTOCOL, "the harness sent a method that is no text")
        elif "id" in message:
            self._request(method, message["id"], _object(message.get("params")))
        else:
            handler = _NOTIFICATIONS.get(method)
            if handler is not None:
                handler(self, _object(message.get("params")))

    def _answer(self, message: dict[str, Any]) -> None:
        due = self._due
        id = message.get("id")
        if due is None or type(id) is not int or id != due[0]:
            self._fail(Code.PROTOCOL, "the harness answered what was not asked")
            return
        self._due = None
        if "error" in message:
            error = _object(message["error"])
            text = _line(error.get("message"), "an error without a word")
            detail = error.get("data")
            if isinstance(detail, dict):
                detail = detail.get("details") or detail.get("message")
            if isinstance(detail, str) and detail:
                text = f"{text}: {_line(detail, '')}"
            if self._cancelled is not None:
                self._ended(self._cancelled)
            else:
                self._fail(Code.ERROR, f"the harness says: {text}")
        elif "result" in message:
            due[1](message["result"])
        else:
            self._fail(Code.PROTOCOL, "the harness sent an answer with nothing in it")

    def _request(self, method: str, id: Any, params: dict[str, Any]) -> None:
        if not (isinstance(id, str) and len(id) <= ID_MAX) and type(id) is not int:
            self._fail(Code.PROTOCOL, "the harness asked with an id that is none")
            return
        if method == "session/request_permission":
            self._permission(id, params)
        else:
            error = {"code": METHOD_NOT_FOUND, "message": "method not found"}
            self._send({"jsonrpc": "2.0", "id": id, "error": error})

    def _permission(self, id: Any, params: dict[str, Any]) -> None:
        options = params.get("options")
        if not self._ours(params) or not self._prompted or not isinstance(options, list):
            self._fail(Code.PROTOCOL, "the harness asked for leave where it cannot")
            return
        option = next(
            (
                o["optionId"]
                for o in options
                if isinstance(o, dict)
                and o.get("kind") == "allow_once"
                and isinstance(o.get("optionId"), str)
                and len(o["optionId"]) <= ID_MAX
            ),
            None,
        )
        if self._cancelled is not None:
            option = None
        title = _line(_object(params.get("toolCall")).get("title"), "something without a title")
        outcome: dict[str, Any] = {"outcome": "cancelled"}
        if option is not None:
            outcome = {"outcome": "selected", "optionId": option}
        self._send({"jsonrpc": "2.0", "id": id, "result": {"outcome": outcome}})
        self._effects.append(Allowed(title, option))
        self._tell(PERMISSION, {"title": title, "allowed": option is not None})

    def _update(self, params: dict[str, Any]) -> None:
        update = params.get("update")
        if not isinstance(update, dict) or not isinstance(update.get("sessionUpdate"), str):
            self._fail(Code.PROTOCOL, "the harness sent an update that is none")
            return
        if not self._prompted or not self._ours(params):
            return  # what a session that was loaded had before, or another session of its
        kind = update["sessionUpdate"]
        if not KIND.fullmatch(kind) or kind in OWN:
            self._fail(Code.PROTOCOL, "the harness sent an update of no kind")
            return
        self._tell(kind, update)

    def _tell(self, kind: str, body: dict[str, Any]) -> None:
        self._updates += 1
        if self._updates > UPDATES_MAX:
            self._fail(Code.FLOOD, f"the harness sent more than {UPDATES_MAX} updates")
            return
        self._effects.append(Update(kind, msgspec.json.encode(body).decode()))

    def _ours(self, params: dict[str, Any]) -> bool:
        return self.session is not None and params.get("sessionId") == self.session

    # ------------------------------------------------------------------ the steps

    def _initialized(self, result: Any) -> None:
        found = _object(result)
        if found.get("protocolVersion") != VERSION:
            self._fail(Code.PROTOCOL, f"the harness does not speak version {VERSION} of ACP")
            return
        loads = _object(found.get("agentCapabilities")).get("loadSession") is True
        if self._wanted.session is not None and not loads:
            self._fail(Code.NO_SESSIONS, "this harness cannot go on with a session")
            return
        if self._wanted.authenticate is not None:
            method = {"methodId": self._wanted.authenticate}
            self._ask("authenticate", method, lambda _: self._open())
        else:
            self._open()

    def _open(self) -> None:
        where = {"cwd": self._wanted.directory, "mcpServers": []}
        if self._wanted.session is not None:
            self.session = self._wanted.session
            self._ask("session/load", {"sessionId": self.session, **where}, self._opened)
        else:
            self._ask("session/new", where, self._new)

    def _new(self, result: Any) -> None:
        session = _object(result).get("sessionId")
        if not isinstance(session, str) or not 0 < len(session) <= ID_MAX:
            self._fail(Code.PROTOCOL, "the harness began a session without an id")
        elif not session.isprintable():
            self._fail(Code.PROTOCOL, "the harness began a session with an id that is no text")
        else:
            self.session = session
            self._opened(result)

    def _opened(self, _: Any) -> None:
        loaded = self._wanted.session is not None
        self._tell(SESSION, {"sessionId": self.session, "loaded": loaded})
        if self._wanted.mode is not None:
            fields = {"sessionId": self.session, "modeId": self._wanted.mode}
            self._ask("session/set_mode", fields, lambda _: self._prompt())
        else:
            self._prompt()

    def _prompt(self) -> None:
        self._prompted = True
        text = [{"type": "text", "text": self._wanted.prompt}]
        self._ask("session/prompt", {"sessionId": self.session, "prompt": text}, self._stopped)

    def _stopped(self, result: Any) -> None:
        reason = _object(result).get("stopReason")
        if not isinstance(reason, str) or not KIND.fullmatch(reason):
            self._fail(Code.PROTOCOL, "the harness stopped without a reason")
        elif self._cancelled is not None:
            self._ended(self._cancelled)
        else:
            self._ended("stopped", stop_reason=reason)

    # ------------------------------------------------------------------ below

    def _ask(self, method: str, params: Mapping[str, Any], then: Callable[[Any], None]) -> None:
        id, self._next = self._next, self._next + 1
        self._due = (id, then)
        self._send({"jsonrpc": "2.0", "id": id, "method": method, "params": params})

    def _notify(self, method: str, params: Mapping[str, Any]) -> None:
        self._send({"jsonrpc": "2.0", "method": method, "params": params})

    def _send(self, message: Mapping[str, Any]) -> None:
        self._effects.append(Send(msgspec.json.encode(message) + b"\n"))

    def _fail(self, code: str, text: str) -> None:
        self._ended("failed", code=code, text=text)

    def _ended(
        self, how: How, *, stop_reason: str | None = None, code: str | None = None, text: str = ""
    ) -> None:
        if self.end is None:
            self.end = End(how, stop_reason, code, _line(text, ""))
            self._effects.append(self.end)
            self._line.clear()

    def _taken(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects


# Dispatch is from this table alone; what stands not in it is told nobody.
_NOTIFICATIONS: Final[Mapping[str, Callable[[Driver, dict[str, Any]], None]]] = {
    "session/update": Driver._update,
}


def _object(untrusted: Any) -> dict[str, Any]:
    return untrusted if isinstance(untrusted, dict) else {}


def _line(untrusted: Any, otherwise: str) -> str:
    """A text in one line, without control characters, capped."""
    if not isinstance(untrusted, str) or not untrusted.strip():
        return otherwise
    text = "".join(c if c.isprintable() else " " for c in untrusted[: TEXT_MAX * 2])
    return " ".join(text.split())[:TEXT_MAX]
