"""Runs: prompts to the harnesses of guests, kept over a restart of this service.

Below the service's data directory, `runs/<instance>/<run>.live` is the spool of a run that
goes on, and `.ended` that of one that came to its end; both 0600. At the start the live ones
are brought back and gone on with. They are deleted with the instance.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from agent_box import __version__
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.handover import HandoverClient
from agent_box.bus.schema import Empty
from agent_box.bus.server import Call, Handler
from agent_box.channel import contract
from agent_box.channel.running import Kept, Running
from agent_box.channel.spool import Spool, SpoolError
from agent_box.config import presets
from agent_box.engine.contract import Dial
from agent_box.guest import streams
from agent_box.process.log import Log
from agent_box.process.tasks import TaskSet

LIVE_MAX: Final = 8  # runs of one instance at once
KEPT_MAX: Final = 50  # ended ones of an instance; the oldest go
OPEN_MAX: Final = 16  # ended ones that are held open for reading
PROMPT_MAX: Final = 1 << 20  # bytes
LIMIT_MAX: Final = 1000  # updates in one answer
MARGIN_S: Final = 1.0  # of a call's deadline, for the answer
SWEEP_S: Final = 30.0
WORK: Final = "/home/agent/work"
_ID: Final = re.compile(r"[0-9a-f]{32}")

# instance, event id, kind, facts
Tell = Callable[[str, bytes, str, dict[str, Any]], None]


class Harnesses:
    """All runs.

    Args:
        boot_of: which boot of an instance runs and is not paused.
        tell: puts a note into the journal.
    """

    def __init__(
        self,
        data: Path,
        dials: HandoverClient,
        boot_of: Callable[[str], int | None],
        tasks: TaskSet,
        tell: Tell,
        log: Log,
    ) -> None:
        self._root = data / "runs"
        self._dials = dials
        self._boot_of = boot_of
        self._spawn = tasks.spawn
        self._hold = tasks.hold
        self._tell = tell
        self._log = log
        self._live: dict[str, Running] = {}
        self._ended: dict[str, Running] = {}  # held open, the one read last at the end
        self.handlers: Mapping[str, Handler] = {
            "run": self.run,
            "runs": self.runs,
            "run_read": self.run_read,
            "run_cancel": self.run_cancel,
        }

    def start(self) -> None:
        """Brings back what went on when this service ended."""
        for file in sorted(self._root.glob("*/*.live")):
            try:
                run = self._load(file)
            except (OSError, SpoolError, ValueError) as error:
                self._log.warning("a run cannot be brought back", run=file.stem, why=str(error))
                file.rename(file.with_suffix(".ended"))
                continue
            self._begin(run)
        self._spawn(self._sweep(), name="runs")

    async def _sweep(self) -> None:
        """Deletes what was kept of instances that are deleted: nobody tells us of one, but the
        engine knows none of that name."""
        while True:
            for directory in sorted(self._root.glob("*/")):
                if _ID.fullmatch(directory.name) and self._boot_of(directory.name) is None:
                    await self._forget_if_gone(directory.name)
            await asyncio.sleep(SWEEP_S)

    async def _forget_if_gone(self, instance: str) -> None:
        request = Dial(instance=instance, boot=1, port=streams.HARNESS_PORT, deadline_ms=1000)
        try:
            os.close(await self._dials.ask(request, deadline_s=SWEEP_S))
        except Refusal as refusal:
            if refusal.reason is Reason.NOT_FOUND:
                self.forget(instance)

    def stop(self) -> None:
        """What goes on in guests goes on without us."""
        for run in (*self._live.values(), *self._ended.values()):
            run.close()

    def left(self, instance: str) -> None:
        """The instance runs no more, or is paused: its runs end."""
        for run in list(self._live.values()):
            if run.kept.instance == instance:
                run.left()

    def forget(self, instance: str) -> None:
        """The instance is deleted, and so is all that was kept of it.

        Raises:
            OSError: a file cannot be removed.
        """
        self.left(instance)
        for id, run in list(self._live.items()):
            if run.kept.instance == instance:
                del self._live[id]  # its task ends by itself, and closes it
        for id, run in list(self._ended.items()):
            if run.kept.instance == instance:
                del self._ended[id]
                run.close()
        directory = self._root / instance
        if directory.is_dir():
            for file in directory.iterdir():
                file.unlink()
            directory.rmdir()

    # ------------------------------------------------------------------ what is asked

    async def run(self, request: contract.Run, call: Call) -> contract.RunId:
        """Begins one, unless it has begun already."""
        if not _ID.fullmatch(request.run) or not _ID.fullmatch(request.instance):
            raise Refusal(Reason.BAD_REQUEST, "a run and its instance have 32 hex digits each")
        if self._file(request.run) is not None:
            return contract.RunId(run=request.run)
        boot = self._boot_of(request.instance)
        if boot is None:
            raise Refusal(Reason.WRONG_STATE, "the instance does not run")
        self._refuse_another(request)
        kept = _kept(request, boot)
        directory = self._root / request.instance
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = directory / f"{request.run}.live"
        try:
            spool = Spool.create(file, msgspec.json.encode(kept), kept.begun_ms)
            self._begin(self._made(file, kept, spool))
        except OSError as error:
            raise _disk(error) from None
        self._tidy(directory)
        return contract.RunId(run=request.run)

    def runs(self, request: contract.Instance, call: Call) -> contract.RunRows:
        if not _ID.fullmatch(request.instance):
            raise Refusal(Reason.BAD_REQUEST, "an instance has 32 hex digits")
        rows = []
        for file in (self._root / request.instance).glob("*.*"):
            if file.suffix in (".live", ".ended"):
                row = self._row(file)
                if row is not None:
                    rows.append(row)
        rows.sort(key=lambda row: (row.begun_ms, row.run), reverse=True)
        return contract.RunRows(runs=rows)

    async def run_read(self, request: contract.RunRead, call: Call) -> contract.Updates:
        if request.cursor < 0 or not 0 < request.limit <= LIMIT_MAX or request.wait_ms < 0:
            raise Refusal(Reason.BAD_REQUEST, "a cursor, limit or time that cannot be")
        run = self._find(request.run)
        seconds = min(request.wait_ms / 1000, max(0.0, call.remaining_s() - MARGIN_S))
        try:
            return await run.read(request.cursor, request.limit, seconds)
        except OSError as error:
            raise _disk(error) from None

    def run_cancel(self, request: contract.RunId, call: Call) -> Empty:
        self._find(request.run).cancel("cancelled")
        return Empty()

    # ------------------------------------------------------------------ below

    def _refuse_another(self, request: contract.Run) -> None:
        here = [r for r in self._live.values() if r.kept.instance == request.instance]
        here = [r for r in here if r.end is None]
        if request.session is not None and any(r.session == request.session for r in here):
            raise Refusal(
                Reason.RUN_BUSY,
                "a prompt runs in that session; `agent-box run NAME --follow` shows it",
            )
        if len(here) >= LIVE_MAX:
            raise Refusal(Reason.RUN_BUSY, f"{LIVE_MAX} prompts run in this instance already")

    def _made(self, file: Path, kept: Kept, spool: Spool) -> Running:
        def noted(id: bytes, kind: str, facts: dict[str, Any]) -> None:
            if file.suffix == ".live":
                self._tell(kept.instance, id, kind, facts)

        try:
            return Running(kept, spool, file.with_suffix(".updates"), noted)
        except BaseException:
            spool.close()
            raise

    def _load(self, file: Path) -> Running:
        """Raises OSError, SpoolError, ValueError: it cannot be read."""
        spool, records = Spool.open(file)
        try:
            kept = msgspec.json.decode(records[0].data, type=Kept)
        except ValueError:
            spool.close()
            raise
        run = self._made(file, kept, spool)
        run.replay(records[1:])
        return run

    def _begin(self, run: Running) -> None:
        self._live[run.kept.run] = run
        self._spawn(self._go(run), name="run")

    async def _go(self, run: Running) -> None:
        try:
            await run.go(self._dials, self._hold)
        except OSError as error:
            self._log.warning("a run cannot be kept", why=error.strerror)
        id = run.kept.run
        self._live.pop(id, None)
        file = self._root / run.kept.instance / f"{id}.live"
        if file.exists():
            file.rename(file.with_suffix(".ended"))
            self._hold_open(run)
        else:
            run.close()

    def _hold_open(self, run: Running) -> None:
        self._ended[run.kept.run] = run
        while len(self._ended) > OPEN_MAX:
            oldest = next(iter(self._ended))
            self._ended.pop(oldest).close()

    def _find(self, id: str) -> Running:
        """Raises Refusal: there is no such run, or it cannot be read."""
        run = self._live.get(id) or self._ended.get(id)
        if run is not None:
            return run
        file = self._file(id) if _ID.fullmatch(id) else None
        if file is None:
            raise Refusal(Reason.NOT_FOUND, f"there is no run {id[:40]}")
        try:
            run = self._load(file)
        except OSError as error:
            raise _disk(error) from None
        except (SpoolError, ValueError):
            raise Refusal(Reason.NOT_FOUND, f"what was kept of the run {id} is damaged") from None
        self._hold_open(run)
        return run

    def _file(self, id: str) -> Path | None:
        return next(
            (f for f in self._root.glob(f"*/{id}.*") if f.suffix in (".live", ".ended")), None
        )

    def _row(self, file: Path) -> contract.RunRow | None:
        try:
            run = self._live.get(file.stem) or self._find(file.stem)
        except Refusal:
            return None
        return contract.RunRow(
            run=file.stem,
            session=run.session,
            begun_ms=run.kept.begun_ms,
            live=run.end is None,
        )

    def _tidy(self, directory: Path) -> None:
        """The oldest ended ones go, by when they last changed."""
        files = sorted(directory.glob("*.ended"), key=lambda f: f.stat().st_mtime_ns)
        for file in files[: max(0, len(files) - KEPT_MAX)]:
            held = self._ended.pop(file.stem, None)
            if held is not None:
                held.close()
            file.unlink(missing_ok=True)


def _kept(request: contract.Run, boot: int) -> Kept:
    """Raises Refusal: the harness, the prompt or the directory cannot be."""
    prompt = request.prompt.encode()
    if not prompt.strip() or len(prompt) > PROMPT_MAX:
        raise Refusal(Reason.BAD_REQUEST, f"a prompt has 1 to {PROMPT_MAX} bytes")
    directory = request.directory or WORK
    if not directory.startswith("/") or "\0" in directory:
        raise Refusal(Reason.BAD_REQUEST, "the directory must be an absolute path")
    mode = authenticate = None
    if isinstance(request.harness, str):
        try:
            preset = presets.load(request.harness)
        except LookupError as error:
            raise Refusal(Reason.NOT_FOUND, str(error.args[0])) from None
        command = list(preset.command)
        mode, authenticate = preset.mode, preset.authenticate
    else:
        command = request.harness
    if not command or any("\0" in word for word in command):
        raise Refusal(Reason.BAD_REQUEST, "the command of the harness is none")
    if request.timeout_ms is not None and request.timeout_ms <= 0:
        raise Refusal(Reason.BAD_REQUEST, "a time that cannot be")
    return Kept(
        run=request.run,
        instance=request.instance,
        boot=boot,
        command=command,
        prompt=request.prompt,
        session=request.session,
        directory=directory,
        mode=mode,
        authenticate=authenticate,
        timeout_ms=request.timeout_ms,
        begun_ms=time.time_ns() // 1_000_000,
        version=__version__,
    )


def _disk(error: OSError) -> Refusal:
    why = os.strerror(error.errno).lower() if error.errno else "failed"
    return Refusal(Reason.DISK_FULL, f"runs cannot be kept: {why}")
