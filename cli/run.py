"""The verb `run`: one prompt to the harness of an instance, and what comes of it as it comes.

The run itself lives in the channel service and in the guest. We only look at it: when either
of us is started again it goes on, and `run NAME --follow` shows it from its beginning.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from agent_box.cli import link
from agent_box.cli.render import Failure, Render, Usage, table, time_text

if TYPE_CHECKING:
    from agent_box.bus.client import Client
    from agent_box.channel.contract import RunEnd, Update, Updates
    from agent_box.cli.values import Place
    from agent_box.registry.contract import Instance

PROMPT_MAX: Final = 1 << 20  # bytes
START_S: Final = 300.0  # with --start
LIMIT: Final = 200  # updates in one answer
WAIT_MS: Final = 1000  # how long the channel may hold a question; an interrupt waits as long
MARGIN_S: Final = 5.0
AGAIN_S: Final = 0.1  # after a call that could not be sent, and so failed at once
LOST_S: Final = 30.0  # so long the channel may be away
LOOK_S: Final = 3.0  # between two questions whether the instance still runs
LEFT: Final = 23
FAILED: Final = 20
TIMED_OUT: Final = 21
INTERRUPTED: Final = 130


def run(
    out: Render,
    *,
    target: Place,
    prompt: str | None,
    timeout: int | None,
    session: str | None,
    start: bool,
    follow: bool,
    list: bool,
) -> None:
    """Begins a run, or finds the live one, and shows it to its end; or lists what is kept.

    Raises:
        Failure: exit 20 to 23 and 130 as docs/cli.md says them; 4, it does not run or has no
            harness; 3, it does not exist, or nothing is there to follow; 14, the channel
            service is gone.
    """
    words = None if prompt is None else _prompt(prompt)
    here = link.place()
    registry, _ = link.ready(here, "registry", out)
    try:
        if list:
            found = _inspect(registry, target.name)
        else:
            found = _running(out, registry, target.name, start=start)
        channel, _ = link.ready(here, "channel", out)
        try:
            if list:
                _list(out, channel, found)
                return
            with _interrupts() as interrupted:
                if follow:
                    id = _live(channel, found)
                else:
                    assert words is not None
                    id = _begin(channel, found, words, session, target.path, timeout)
                out.item("run", {"run": id, "instance": found.id, "name": found.row.name})
                _Show(out, registry, channel, found, id, interrupted).to_the_end()
        finally:
            channel.close()
    finally:
        registry.close()


def _prompt(prompt: str) -> str:
    """Raises Usage: it is empty, too long, or no text."""
    if prompt != "-":
        return prompt
    if sys.stdin is None:
        raise Usage("run: stdin is closed: the prompt is read from it")
    untrusted = b""
    while len(untrusted) <= PROMPT_MAX and (piece := os.read(0, 1 << 16)):
        untrusted += piece
    if len(untrusted) > PROMPT_MAX:
        raise Usage(f"run: a prompt has at most {PROMPT_MAX} bytes")
    try:
        words = untrusted.decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise Usage("run: the prompt must be UTF-8") from None
    if not words.strip():
        raise Usage("run: the prompt is empty")
    return words


def _running(out: Render, registry: Client, name: str, *, start: bool) -> Instance:
    """The instance, which runs and has a harness."""
    found = _inspect(registry, name)
    if found.harness is None:
        raise Failure(
            4, "no-harness", f"{name} has no harness: its profile had none when it was created"
        )
    if start and found.row.state == "stopped":
        from agent_box.cli import lifecycle

        lifecycle.bring_up(out, name, within_s=START_S)
        found = _inspect(registry, name)
    state = found.row.state
    if state == "unknown":
        why = f"the state of {name} cannot be observed"
        raise Failure(12, "state-unknown", why, state=state)
    if state != "running":
        hint = "; --start starts it first" if state == "stopped" else ""
        why = f"{name} is {state}; run needs running{hint}"
        raise Failure(4, "wrong-state", why, state=state)
    return found


def _inspect(registry: Client, name: str, seconds: float | None = None) -> Instance:
    from agent_box.registry.contract import Instance, Name

    found = registry.call("inspect", Name(name=name), deadline_s=seconds)
    assert isinstance(found, Instance)
    return found


def _list(out: Render, channel: Client, instance: Instance) -> None:
    """The runs that are kept, newest first; an instance that is stopped has them as well."""
    from agent_box.channel import contract

    found = channel.call("runs", contract.Instance(instance=instance.id))
    assert isinstance(found, contract.RunRows)
    lines = [(time_text(r.begun_ms), _state(r.live), r.session or "-") for r in found.runs]
    for row in found.runs:
        fields = {"run": row.run, "session": row.session, "live": row.live}
        out.item("kept", {"time": time_text(row.begun_ms), **fields})
    out.text((table(("BEGUN", "STATE", "SESSION"), lines) if lines else "no runs") + "\n")
    out.end()


def _state(live: bool) -> str:
    return "goes on" if live else "ended"


def _live(channel: Client, instance: Instance) -> str:
    """The newest run that goes on."""
    from agent_box.channel import contract

    rows = channel.call("runs", contract.Instance(instance=instance.id))
    assert isinstance(rows, contract.RunRows)
    for row in rows.runs:
        if row.live:
            return row.run
    raise Failure(3, "not-found", f"no run goes on in {instance.row.name}")


def _begin(
    channel: Client,
    instance: Instance,
    prompt: str,
    session: str | None,
    directory: str | None,
    timeout: int | None,
) -> str:
    from agent_box.channel.contract import Run

    assert instance.harness is not None
    request = Run(
        run=os.urandom(16).hex(),
        instance=instance.id,
        harness=instance.harness,
        prompt=prompt,
        session=session,
        directory=directory,
        timeout_ms=None if timeout is None else timeout * 1000,
    )
    channel.call("run", request)
    return request.run


class _Interrupts:
    """Counts SIGINT; the second ends us at once."""

    count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt


@contextmanager
def _interrupts() -> Iterator[_Interrupts]:
    interrupted = _Interrupts()
    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


class _Show:
    """A run as it goes on."""

    def __init__(
        self,
        out: Render,
        registry: Client,
        channel: Client,
        instance: Instance,
        id: str,
        interrupted: _Interrupts,
    ) -> None:
        self._out = out
        self._registry = registry
        self._channel = channel
        self._instance = instance
        self._id = id
        self._interrupted = interrupted
        self._cancelled = False
        self._session: str | None = None
        self._titles: dict[str, str] = {}
        self._open_line = False  # the reply so far does not end with a line feed
        self._looked = time.monotonic()
        self._heard = time.monotonic()

    def to_the_end(self) -> None:
        cursor = 0
        while True:
            if self._interrupted.count and not self._cancelled:
                self._cancel()
            page = self._read(cursor)
            if page is None:
                continue
            cursor = page.cursor
            for update in page.updates:
                self._update(update)
            if page.end is not None:
                self._ended(page.end)
                return
            if not page.updates:
                self._look()

    def _cancel(self) -> None:
        from agent_box.bus.errors import Refusal
        from agent_box.channel.contract import RunId

        try:
            self._channel.call("run_cancel", RunId(run=self._id), deadline_s=MARGIN_S)
            self._cancelled = True
            self._close_line()
            self._out.progress("cancelling; once more to leave it running")
        except Refusal as refusal:
            if not _passes(refusal):
                raise
            self._lost(refusal)

    def _read(self, cursor: int) -> Updates | None:
        from agent_box.bus.errors import Refusal
        from agent_box.channel.contract import RunRead, Updates

        request = RunRead(run=self._id, cursor=cursor, limit=LIMIT, wait_ms=WAIT_MS)
        try:
            page = self._channel.call("run_read", request, deadline_s=WAIT_MS / 1000 + MARGIN_S)
        except Refusal as refusal:
            if not _passes(refusal):
                raise
            self._lost(refusal)
            return None
        assert isinstance(page, Updates)
        self._heard = time.monotonic()
        return page

    def _lost(self, refusal: Exception) -> None:
        """The channel service starts again, as a rule."""
        if time.monotonic() - self._heard > LOST_S:
            self._close_line()
            raise Failure(
                14,
                "connection-lost",
                f"the channel service is gone: {refusal}; the run goes on, and "
                f"`agent-box run {self._instance.row.name} --follow` shows it",
                run=self._id,
            )
        self._look()
        select.select([], [], [], AGAIN_S)

    def _look(self) -> None:
        """Whether the instance still runs: nothing comes of one that is paused."""
        from agent_box.bus.errors import Reason, Refusal

        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        name = self._instance.row.name
        try:
            found = _inspect(self._registry, name, 1.0)
        except Refusal as refusal:
            if refusal.reason is Reason.NOT_FOUND:
                self._close_line()
                raise self._failure(LEFT, "left-running", f"{name} was deleted") from None
            return  # the registry is away as well
        state = found.row.state
        if state not in ("running", "unknown"):
            self._close_line()
            more = "; resume it, then `run --follow`" if state == "paused" else ""
            raise self._failure(LEFT, "left-running", f"{name} is {state}{more}", state=state)

    # ------------------------------------------------------------------ what is shown

    def _update(self, update: Update) -> None:
        untrusted: dict[str, Any] = json.loads(update.body)
        when = time_text(update.at_ms)
        if update.kind == "box_session":
            self._session = untrusted["sessionId"]
            fields = {"session": self._session, "loaded": untrusted["loaded"]}
            self._out.item("session", {"time": when, **fields})
        elif update.kind == "box_permission":
            title, allowed = untrusted["title"], untrusted["allowed"]
            self._out.item("permission", {"time": when, "title": title, "allowed": allowed})
            self._aside(f"{'allowed once' if allowed else 'not allowed'}: {title}")
        else:
            self._out.item("update", {"time": when, "kind": update.kind, "update": untrusted})
            self._for_people(update.kind, untrusted)

    def _for_people(self, kind: str, untrusted: dict[str, Any]) -> None:
        if self._out.json:
            return
        if kind == "agent_message_chunk":
            content = untrusted.get("content")
            text = content.get("text") if isinstance(content, dict) else None
            if isinstance(text, str) and text:
                self._out.text(text)
                self._open_line = not text.endswith("\n")
        elif kind in ("tool_call", "tool_call_update"):
            self._tool(untrusted)

    def _tool(self, untrusted: dict[str, Any]) -> None:
        id, title = untrusted.get("toolCallId"), untrusted.get("title")
        status = untrusted.get("status")
        if isinstance(id, str) and isinstance(title, str) and self._titles.get(id) != title:
            self._titles[id] = title
            self._aside(f"tool: {title}")
        if isinstance(id, str) and status == "failed":
            self._aside(f"tool failed: {self._titles.get(id, 'one without a title')}")

    def _aside(self, text: str) -> None:
        if not self._out.json:
            self._close_line()
            self._out.progress(text)

    def _close_line(self) -> None:
        if self._open_line:
            self._out.text("\n")
            self._open_line = False

    # ------------------------------------------------------------------ the end

    def _ended(self, end: RunEnd) -> None:
        self._close_line()
        if end.how == "stopped" and end.stop_reason == "end_turn":
            self._out.end(run=self._id, session=self._session, stop_reason=end.stop_reason)
        elif end.how == "stopped":
            why = f"the harness stopped: {end.stop_reason}"
            raise self._failure(FAILED, "run-failed", why, stop_reason=end.stop_reason)
        elif end.how == "failed":
            raise self._failure(FAILED, str(end.code), end.text)
        elif end.how == "timed-out":
            raise self._failure(TIMED_OUT, "run-timed-out", "the run took too long: cancelled")
        elif end.how == "left-running":
            why = f"{self._instance.row.name} left running"
            raise self._failure(LEFT, "left-running", why)
        elif self._interrupted.count:
            raise self._failure(INTERRUPTED, "interrupted", "interrupted: the run is cancelled")
        else:
            raise self._failure(FAILED, "run-cancelled", "the run was cancelled by somebody else")

    def _failure(self, exit: int, kind: str, message: str, **facts: Any) -> Failure:
        return Failure(exit, kind, message, run=self._id, session=self._session, **facts)


def _passes(refusal: Exception) -> bool:
    """Whether the next try may find the service there."""
    from agent_box.bus.errors import Code, Refusal

    return isinstance(refusal, Refusal) and refusal.code in (
        Code.UNAVAILABLE,
        Code.DEADLINE,
        Code.UNKNOWN_OUTCOME,
    )
