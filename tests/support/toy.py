"""A toy service with every kind of method, for the tests of the bus.

As a program it serves until it is killed:
    python toy.py SOCK KEYS_DIR DATABASE
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_box.bus import keys, policy
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.outcomes import SqliteOutcomes
from agent_box.bus.schema import (
    Contract,
    Data,
    Empty,
    Kind,
    Method,
    Stream,
    Wall,
    Wire,
)
from agent_box.bus.server import Call, Server, StreamIO

ROLES = ("engine", "registry", "operator", "broker")


class Text(Wire, frozen=True):
    text: str


class Blob(Wire, frozen=True):
    data: bytes


class Number(Wire, frozen=True):
    n: int


class Rich(Wire, frozen=True):
    name: str
    data: bytes
    ratio: float
    flag: bool
    maybe: str | None
    names: list[str]
    counts: dict[str, int]
    inner: list[Number]


def _method(name: str, kind: Kind, request: type[Wire], reply: type[Wire]) -> Method:
    return Method(
        name=name,
        kind=kind,
        request=request,
        reply=reply,
        deadline_s=60,
        data=Data.STATUS,
        summary="For tests.",
    )


def _stream(name: str, request: type[Wire], up: type[Wire], down: type[Wire]) -> Stream:
    return Stream(
        name=name,
        request=request,
        up=up,
        down=down,
        reply=Number,
        window=16,
        data=Data.STATUS,
        summary="For tests.",
    )


CONTRACT = Contract(
    service="engine",
    trusts="Nobody.",
    methods=(
        _method("echo", Kind.READ, Text, Text),
        _method("blob", Kind.READ, Blob, Blob),
        _method("rich", Kind.READ, Rich, Rich),
        _method("later", Kind.READ, Number, Number),  # after n milliseconds
        _method("never", Kind.READ, Empty, Empty),
        _method("put", Kind.IDEMPOTENT, Text, Number),
        _method("add", Kind.ONCE, Number, Number),
        _method("add_later", Kind.ONCE, Number, Number),
        _method("add_outside", Kind.ONCE, Number, Number),
        _method("refuse", Kind.ONCE, Text, Empty),
        _method("crash", Kind.READ, Text, Empty),
        _method("secret", Kind.READ, Empty, Empty),  # granted to the registry only
        _stream("count", Number, Empty, Number),
        _stream("sum", Empty, Number, Text),
        _stream("mirror", Empty, Blob, Blob),
        _stream("hang", Empty, Empty, Empty),
    ),
    events=(),
    wall=Wall(why="A toy."),
)

METHODS = [m.name for m in CONTRACT.methods]

POLICY = f"""
version = 1
[[grant]]
caller = "operator"
callee = "engine"
methods = {[m for m in METHODS if m != "secret"]}
why = "Tests."
[[grant]]
caller = "operator"
callee = "engine"
methods = ["hello", "ping", "drain", "outcome", "confinement", "doorbell"]
why = "Tests."
[[grant]]
caller = "registry"
callee = "engine"
methods = ["secret", "never", "later", "echo", "hello"]
why = "Tests."
"""


class MemoryLog:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.lines: list[dict[str, object]] = []

    def warning(self, event: str, **fields: object) -> None:
        self.lines.append({"level": "warning", "event": event, **fields})

    def error(self, event: str, *, error: BaseException | None = None, **fields: object) -> str:
        id = f"id{len(self.lines)}"
        self.lines.append({"level": "error", "event": event, "error": error, "id": id, **fields})
        return id


class StderrLog(MemoryLog):
    """Tells defects to whoever reads stderr."""

    def error(self, event: str, *, error: BaseException | None = None, **fields: object) -> str:
        print(event, repr(error), fields, file=sys.stderr, flush=True)
        return os.urandom(4).hex()

    def warning(self, event: str, **fields: object) -> None:
        print(event, fields, file=sys.stderr, flush=True)


class Toy:
    """The handlers, over one database."""

    def __init__(self, database: Path) -> None:
        self.db = sqlite3.connect(database)
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("CREATE TABLE IF NOT EXISTS added (n INTEGER NOT NULL, id BLOB)")
        self.db.execute("CREATE TABLE IF NOT EXISTS put (text TEXT PRIMARY KEY)")
        self.db.commit()
        self.outcomes = SqliteOutcomes(self.db)
        self.ended: list[str] = []  # streams that have ended, and how
        self.on_call: Callable[[Call], None] = lambda call: None

    def handlers(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in METHODS}

    def echo(self, request: Text, call: Call) -> Text:
        return request

    def blob(self, request: Blob, call: Call) -> Blob:
        return request

    def rich(self, request: Rich, call: Call) -> Rich:
        return request

    async def later(self, request: Number, call: Call) -> Number:
        await asyncio.sleep(request.n / 1000)
        return request

    async def never(self, request: Empty, call: Call) -> Empty:
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.append("never")
        return Empty()

    def put(self, request: Text, call: Call) -> Number:
        with self.db:
            self.db.execute("INSERT OR IGNORE INTO put VALUES (?)", (request.text,))
        return Number(n=len(request.text))

    def _add(self, n: int, call: Call) -> Number:
        with self.db:
            self.db.execute("INSERT INTO added VALUES (?, ?)", (str(n), call.request_id))
            count = self.db.execute("SELECT count(*) FROM added").fetchone()[0]
            reply = Number(n=count)
            call.commit(reply)
        self.on_call(call)
        return reply

    def add(self, request: Number, call: Call) -> Number:
        return self._add(request.n, call)

    async def add_later(self, request: Number, call: Call) -> Number:
        await asyncio.sleep(request.n / 1000)
        return self._add(request.n, call)

    async def add_outside(self, request: Number, call: Call) -> Number:
        call.begin()
        await asyncio.sleep(request.n / 1000)
        return self._add(request.n, call)

    def refuse(self, request: Text, call: Call) -> Empty:
        self.on_call(call)
        raise Refusal(Reason.WRONG_STATE, request.text, facts={"state": "stopped"})

    def crash(self, request: Text, call: Call) -> Empty:
        raise RuntimeError(f"a defect with {request.text}")

    def secret(self, request: Empty, call: Call) -> Empty:
        return request

    async def count(self, request: Number, call: Call, io: StreamIO) -> Number:
        try:
            for n in range(request.n):
                await io.send(Number(n=n))
        except asyncio.CancelledError:
            self.ended.append("count cancelled")
            raise
        return Number(n=request.n)

    async def sum(self, request: Empty, call: Call, io: StreamIO) -> Number:
        total = 0
        while (item := await io.recv()) is not None:
            assert isinstance(item, Number)
            total += item.n
        return Number(n=total)

    async def mirror(self, request: Empty, call: Call, io: StreamIO) -> Number:
        count = 0
        while (item := await io.recv()) is not None:
            await io.send(item)
            count += 1
        return Number(n=count)

    async def hang(self, request: Empty, call: Call, io: StreamIO) -> Number:
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.append("hang cancelled")
        return Number(n=0)


def make_server(
    toy: Toy, sock: Path, keys_dir: Path, log: MemoryLog | None = None, **options: Any
) -> Server:
    policy_file = keys_dir / "policy.toml"
    policy_file.write_text(POLICY)
    return Server(
        CONTRACT,
        sock=sock,
        secret=keys.load_secret(keys_dir / "engine"),
        public_keys=keys.load_all_public(keys_dir / "public", ROLES),
        policy=policy.load(policy_file, [CONTRACT]),
        epoch=os.urandom(16),
        handlers=toy.handlers(),
        outcomes=toy.outcomes,
        log=log or MemoryLog(),
        **options,
    )


async def _main(sock: Path, keys_dir: Path, database: Path) -> None:
    toy = Toy(database)
    log = StderrLog()
    server = make_server(toy, sock, keys_dir, log)
    if "AB_TOY_DIE" in os.environ:
        # Dies in the middle of a call, once: after the commit and before the reply.
        flag = Path(os.environ["AB_TOY_DIE"])

        def die(call: Call) -> None:
            if flag.exists():
                flag.unlink()
                os.kill(os.getpid(), 9)

        toy.on_call = die
    await server.start()
    server.set_ready()
    print("ready", flush=True)
    await server.drain_asked.wait()
    await server.drained()
    await asyncio.sleep(0.15)  # as the skeleton does, and for its reason (LAST_WORDS_SECONDS)
    await server.close()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])))
