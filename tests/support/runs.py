"""The channel's runs among guests made by a test: an engine's dial socket, and what listens."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from support import acpagent
from support.guests import call

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.handover import HandoverServer
from agent_box.channel import contract
from agent_box.channel.contract import Run, RunEnd, RunRead
from agent_box.channel.guests import dials
from agent_box.channel.harness import Harnesses
from agent_box.engine.contract import Dial
from agent_box.process.log import Log
from agent_box.process.tasks import TaskSet

ID = "a" * 32
RUN = "1" * 32
AGENT = acpagent.__file__


class Scene:
    """A channel's runs, an engine's dial socket, and a guest behind it."""

    def __init__(self, root: Path, path: Path, process: subprocess.Popen[bytes]) -> None:
        self.root = root
        self.path = path
        self.process = process
        self.notes: list[tuple[bytes, str, dict[str, Any]]] = []
        self.failed: list[str] = []
        self.command: list[str] = []
        self.gone: Refusal | None = None
        self.log = Log(service="test")
        self.tasks = TaskSet(self.log, lambda name, _: self.failed.append(name))
        (root / "dial" / "channel").mkdir(parents=True)
        (root / "data").mkdir()
        self.server = HandoverServer(
            root / "dial" / "channel" / "sock", Dial, self._dial, self.tasks.hold
        )
        self.server.start()
        self.boots = {ID: 1}
        self.begin()

    def begin(self) -> None:
        """A service that has just started."""
        self.own = TaskSet(self.log, lambda name, _: self.failed.append(name))
        self.dials = dials(self.root)
        self.harness = Harnesses(
            self.root / "data",
            self.dials,
            self.boots.get,
            self.own,
            lambda _, id, kind, facts: self.notes.append((id, kind, facts)),
            self.log,
        )
        self.harness.start()

    async def killed(self) -> None:
        """The service as it is after a kill: nothing of it is told to anybody."""
        await self.own.cancel()
        self.harness.stop()
        self.dials.close()

    async def end(self) -> None:
        await self.killed()
        await self.tasks.cancel()
        self.server.close()
        assert self.failed == []

    async def _dial(self, request: Dial) -> int:
        assert (request.boot, request.port) == (1, 5004)
        if request.instance != ID:
            raise Refusal(Reason.NOT_FOUND, "no such instance")
        if self.gone is not None:
            raise self.gone
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(str(self.path))
        except OSError:
            sock.close()
            raise Refusal(Reason.UNAVAILABLE, "nobody listens") from None
        return sock.detach()

    async def run(self, script: str, argument: str = "", **more: Any) -> None:
        """Begins a run of a scripted agent."""
        command = [sys.executable, "-I", "-S", AGENT, script, argument]
        fields = {"prompt": "say hello", "harness": command} | more
        await self.prompt(fields.pop("prompt"), **fields)

    async def prompt(self, prompt: str, **more: Any) -> None:
        """Begins a run of `command`."""
        fields: dict[str, Any] = {
            "run": RUN,
            "instance": ID,
            "harness": self.command,
            "prompt": prompt,
            "session": None,
            "directory": str(self.path.parent),
            "timeout_ms": None,
        }
        await self.harness.run(Run(**fields | more), call(10))

    async def rest(self, run: str = RUN) -> tuple[list[contract.Update], RunEnd]:
        """All updates of a run, when it has ended."""
        found: list[contract.Update] = []
        async with asyncio.timeout(60):
            while True:
                request = RunRead(run=run, cursor=len(found), limit=1000, wait_ms=5000)
                got = await self.harness.run_read(request, call(10))
                found += got.updates
                if got.end is not None:
                    return found, got.end

    async def until(self, what: str, run: str = RUN) -> None:
        """Until an update has that text in it."""
        cursor = 0
        async with asyncio.timeout(30):
            while True:
                request = RunRead(run=run, cursor=cursor, limit=1000, wait_ms=5000)
                got = await self.harness.run_read(request, call(10))
                cursor = got.cursor
                if any(what in update.body for update in got.updates):
                    return

    def noted(self, kind: str) -> list[dict[str, Any]]:
        return [facts for _, found, facts in self.notes if found == kind]


def said(updates: list[contract.Update]) -> str:
    bodies = [json.loads(u.body) for u in updates if u.kind == "agent_message_chunk"]
    return "".join(body["content"]["text"] for body in bodies)
