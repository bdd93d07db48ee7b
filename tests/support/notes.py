"""A registry that only takes notes, in a thread of the test: what engine and channel tell it."""

from __future__ import annotations

import asyncio
import os
import threading
from types import TracebackType
from typing import Any, NoReturn

from support.until import until

from agent_box.bus import keys, policy
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.schema import Kind, Method
from agent_box.bus.server import Call, Server
from agent_box.process.log import Log
from agent_box.process.paths import ROLES, Paths
from agent_box.registry.contract import CONTRACT, Note, Noted


class _NothingBegun:
    def lookup(self, caller: str, request_id: bytes) -> None:
        return None

    def record(self, *_: object) -> None:
        raise Refusal(Reason.UNAVAILABLE, "only notes are taken")


class Notes:
    """Every note once, by its id, in the order in which they came."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self.taken: dict[bytes, tuple[str, Note]] = {}  # caller and note
        self.came = 0  # with those that came twice
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    def kinds(self, instance: str | None = None) -> list[str]:
        found = list(self.taken.values())
        return [n.kind for _, n in found if instance is None or n.instance == instance]

    def of(self, kind: str) -> list[Note]:
        return [note for _, note in list(self.taken.values()) if note.kind == kind]

    def wait(self, kind: str, count: int = 1, *, seconds: float = 20) -> list[Note]:
        until(f"{count} of {kind}", lambda: len(self.of(kind)) >= count, seconds=seconds)
        return self.of(kind)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    def __enter__(self) -> Notes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _note(self, note: Note, call: Call) -> Noted:
        self.came += 1
        self.taken.setdefault(note.event_id, (call.caller, note))
        return Noted(seq=self.came)

    def _refuse(self, *_: Any) -> NoReturn:
        raise Refusal(Reason.UNAVAILABLE, "only notes are taken")

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        paths = self._paths
        server = Server(
            CONTRACT,
            sock=paths.sock("registry"),
            secret=keys.load_secret(paths.keys("registry")),
            public_keys=keys.load_all_public(paths.public_keys, ROLES),
            policy=policy.load(None, (CONTRACT,)),
            epoch=os.urandom(16),
            handlers={m.name: self._refuse for m in CONTRACT.methods} | {"note": self._note},
            outcomes=_NothingBegun(),
            log=Log(service="registry"),
        )
        assert any(isinstance(m, Method) and m.kind is Kind.ONCE for m in CONTRACT.methods)
        await server.start()
        server.set_ready()
        self._ready.set()
        await self._stop.wait()
        await server.close()
