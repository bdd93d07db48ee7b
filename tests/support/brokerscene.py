"""A broker in this process, between a raw client and real upstreams, with a store of a dict."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h11
from support.stores import Lines
from support.upstreams import HOST, Authority

from agent_box.broker import key as keys
from agent_box.broker.adapter import DATABASE, Broker
from agent_box.broker.contract import Instance, InstanceUp, NoncesOf, UsageOf
from agent_box.broker.ledger import Ledger
from agent_box.broker.limits import LIMITS, Limits
from agent_box.broker.upstream import resolve
from agent_box.bus.errors import Reason, Refusal
from agent_box.process.paths import Paths
from agent_box.process.sealedbox import box
from agent_box.process.secret import Secret
from agent_box.process.tasks import TaskSet
from agent_box.registry.contract import Note
from agent_box.store.contract import Reveal, Revealed

ID = "0123456789abcdef0123456789abcdef"
OTHER = "f" * 32
REAL = b"sk-real-credential-0123456789"


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    informational: list[int]
    trailers: dict[str, str]
    complete: bool  # its end was seen as its framing says

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The reason of a refusal."""
        return str(self.json()["error"]["code"])


class Store:
    """What the broker asks; `down` is what it says when it does not answer."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.down: Refusal | None = None
        self.asked = 0
        self.wait: asyncio.Event | None = None
        self.was_asked = asyncio.Event()

    async def call(self, name: str, request: Reveal, *, deadline_s: float) -> Revealed:
        assert name == "reveal"
        self.asked += 1
        self.was_asked.set()
        if self.wait is not None:
            await self.wait.wait()
        if self.down is not None:
            raise self.down
        if request.name not in self.values:
            raise Refusal(Reason.NOT_FOUND, f"no credential {request.name}")
        return Revealed(version=1, box=box(Secret(self.values[request.name]), request.to))


class Registry:
    def __init__(self) -> None:
        self.notes: list[Note] = []

    async def call(self, name: str, request: Note, *, deadline_s: float) -> None:
        assert name == "note"
        self.notes.append(request)


class Scene:
    """`async with Scene() as scene`: bindings are added, then `up`, then requests."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ab."))
        self.paths = Paths(self.root / "run", self.root / "state")
        self.paths.make()
        for part in ("vm", "vm/broker"):
            (self.paths.runtime / part).mkdir(mode=0o700)
        self.config = self.root / "config" / "config.toml"
        self.config.parent.mkdir(mode=0o700)
        self.store, self.registry = Store(), Registry()
        self.authority = Authority()
        (self.config.parent / "ca.pem").write_bytes(self.authority.pem)
        self.log = Lines()
        self.failed: list[BaseException] = []
        self.resolve: Callable[[str, int], Awaitable[list[str]]] = resolve
        self._limits = limits
        self._tables: dict[str, str] = {}
        self._ends: list[Callable[[], Awaitable[None]]] = []
        self.boot = 0

    async def __aenter__(self) -> Scene:
        await self.begin()
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        await self.end()
        for end in self._ends:
            await end()
        shutil.rmtree(self.root)
        if kind is None:
            assert self.failed == []

    async def begin(self) -> None:
        """Starts the broker, also after `end`."""
        self.tasks = TaskSet(self.log, lambda name, error: self.failed.append(error))
        context: Any = SimpleNamespace(
            paths=self.paths,
            config=self.config,
            data=self.paths.data("broker"),
            log=self.log,
            tasks=self.tasks,
            problem=None,
            client=lambda name: {"store": self.store, "registry": self.registry}[name],
        )
        data = self.paths.data("broker")
        self.broker = Broker(
            context,
            keys.load(data),
            Ledger(data / DATABASE),
            self._limits,
            lambda host, port: self.resolve(host, port),
        )
        await self.broker.start()

    async def end(self) -> None:
        await self.broker.stop()
        await self.tasks.cancel()

    def closing(self, end: Callable[[], Awaitable[None]]) -> None:
        self._ends.append(end)

    def bind(
        self,
        name: str,
        port: int,
        kind: str = "anthropic",
        *,
        more: str = "",
        routes: Sequence[tuple[str, str, Sequence[str]]] | None = (
            ("/v1/", "prefix", ("GET", "POST", "PUT", "HEAD", "DELETE")),
        ),
        upstream: str | None = None,
        ca: bool = True,
        secret: bytes | None = REAL,
    ) -> None:
        """Adds a binding to the config and its credential to the store."""
        lines = [
            f"[bindings.{name}]",
            f'upstream = "{upstream or f"https://{HOST}:{port}"}"',
            f'kind = "{kind}"',
            f'credential = "{name}-key"',
            "allow_reserved = true" if "allow_reserved" not in more else "",
            'ca_file = "ca.pem"' if ca else "",
            more,
        ]
        for path, match, methods in routes or ():
            lines += [f"[[bindings.{name}.routes]]", f'path = "{path}"', f'match = "{match}"']
            lines += [f"methods = {list(methods)}"]
        self._tables[name] = "\n".join(lines)
        text = "\n\n".join(["version = 1", *self._tables.values()]) + "\n"
        self.config.write_text(text)
        if secret is not None:
            self.store.values[f"{name}-key"] = secret

    async def up(self, *bindings: str, instance: str = ID, name: str = "work") -> None:
        self.boot += 1
        request = InstanceUp(
            instance=instance,
            name=name,
            boot=self.boot,
            bindings=list(bindings or self._tables),
        )
        await self.broker.instance_up(request, None)  # type: ignore[arg-type]

    async def down(self, instance: str = ID) -> None:
        await self.broker.instance_down(Instance(instance=instance), None)  # type: ignore[arg-type]

    def nonce(self, binding: str, instance: str = ID) -> str:
        running = self.broker._boots[instance].running
        reply = self.broker.nonces(
            NoncesOf(instance=instance, boot=running.boot),
            None,  # type: ignore[arg-type]
        )
        return next(each.nonce for each in reply.nonces if each.binding == binding)

    def used(self, instance: str | None = ID) -> dict[str, dict[str, int]]:
        """By binding, summed over days."""
        found: dict[str, dict[str, int]] = {}
        reply = self.broker.usage(UsageOf(instance=instance, since_day=0), None)  # type: ignore[arg-type]
        for each in reply.used:
            row = found.setdefault(each.binding, {})
            for name in each.__struct_fields__:
                value = getattr(each, name)
                if isinstance(value, int) and name != "day":
                    row[name] = row.get(name, 0) + value
        return found

    def sock(self, instance: str = ID) -> Path:
        return self.paths.runtime / "vm" / "broker" / instance / "sock"

    async def connect(
        self, instance: str = ID
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self.sock(instance))

    async def talk(
        self, data: bytes, *, instance: str = ID, seconds: float = 20, eof: bool = False
    ) -> bytes:
        """Sends bytes, and the end of them with `eof`, and reads to the connection's end."""
        reader, writer = await self.connect(instance)
        writer.write(data)
        if eof:
            writer.write_eof()
        found = bytearray()
        try:
            async with asyncio.timeout(seconds):
                while more := await reader.read(65536):
                    found += more
        except OSError:
            pass
        writer.transport.abort()
        return bytes(found)

    def headers(self, binding: str, *more: tuple[str, str]) -> list[tuple[str, str]]:
        return [
            ("Host", f"{binding}.broker.internal"),
            ("x-api-key", self.nonce(binding)),
            *more,
        ]

    async def ask(
        self,
        binding: str,
        target: str = "/v1/messages",
        *,
        method: str = "POST",
        headers: Sequence[tuple[str, str]] | None = None,
        more: Sequence[tuple[str, str]] = (),
        body: bytes | Sequence[bytes] = b"",
        instance: str = ID,
        seconds: float = 30,
    ) -> Reply:
        """One request by a plain client, on a connection of its own."""
        client = Client(*await self.connect(instance))
        try:
            async with asyncio.timeout(seconds):
                return await client.ask(
                    method, target, [*(headers or self.headers(binding)), *more], body
                )
        finally:
            client.close()

    def kinds(self) -> list[str]:
        return [note.kind for note in self.registry.notes]

    async def noted(self, kind: str) -> list[dict[str, Any]]:
        """The facts of events of that kind, when the last has been sent."""
        assert await self.broker._notes.flush(10)
        return [dict(note.facts) for note in self.registry.notes if note.kind == kind]


class Client:
    """An HTTP/1.1 client by h11 on one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._machine = h11.Connection(h11.CLIENT)
        self.parts: list[tuple[float, bytes]] = []  # of the last reply's body, and when

    async def send(
        self,
        method: str,
        target: str,
        headers: Sequence[tuple[str, str]],
        body: bytes | Sequence[bytes] = b"",
    ) -> None:
        """A body of bytes has a length; one of several parts is chunked."""
        framing: list[tuple[str, str]] = []
        names = {name.lower() for name, _ in headers}
        parts = [body] if isinstance(body, bytes) else list(body)
        if not names & {"content-length", "transfer-encoding"} and body:
            if isinstance(body, bytes):
                framing = [("Content-Length", str(len(body)))]
            else:
                framing = [("Transfer-Encoding", "chunked")]
        request = h11.Request(method=method, target=target, headers=[*headers, *framing])
        self._write(request)
        for part in parts:
            if part:
                self._write(h11.Data(data=part))
                await self._writer.drain()
        self._write(h11.EndOfMessage())
        await self._writer.drain()

    def _write(self, event: Any) -> None:
        data = self._machine.send(event)
        if data:
            self._writer.write(data)

    async def next(self) -> Any:
        while True:
            event = self._machine.next_event()
            if event is not h11.NEED_DATA:
                return event
            data = await self._reader.read(1 << 16)
            self._machine.receive_data(data)

    async def reply(self) -> Reply:
        found = Reply(0, {}, b"", [], {}, False)
        self.parts = []
        body = bytearray()
        try:
            while True:
                event = await self.next()
                if isinstance(event, h11.InformationalResponse):
                    found.informational.append(event.status_code)
                elif isinstance(event, h11.Response):
                    found.status = event.status_code
                    for name, value in event.headers:
                        found.headers[name.decode()] = value.decode("latin-1")
                elif isinstance(event, h11.Data):
                    body += event.data
                    self.parts.append((asyncio.get_running_loop().time(), bytes(event.data)))
                elif isinstance(event, h11.EndOfMessage):
                    found.complete = True
                    found.trailers = {n.decode(): v.decode() for n, v in event.headers}
                    break
                else:
                    break
        except (OSError, h11.RemoteProtocolError):
            pass  # it was cut: not complete
        found.body = bytes(body)
        return found

    async def ask(
        self,
        method: str,
        target: str,
        headers: Sequence[tuple[str, str]],
        body: bytes | Sequence[bytes] = b"",
    ) -> Reply:
        await self.send(method, target, headers, body)
        found = await self.reply()
        if (self._machine.our_state, self._machine.their_state) == (h11.DONE, h11.DONE):
            self._machine.start_next_cycle()
        return found

    def close(self) -> None:
        self._writer.transport.abort()


def run(
    play: Callable[[Scene], Awaitable[None]],
    limits: Limits = LIMITS,
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Plays a test in a scene of its own, on a loop of the usual kind or of another."""

    async def main() -> None:
        async with Scene(limits) as scene:
            await play(scene)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def secrets_in(*texts: bytes) -> list[bytes]:
    """Where the credential shows, in the clear or in a usual coding."""
    from base64 import b64encode
    from urllib.parse import quote

    forms = {
        REAL,
        b64encode(REAL),
        b64encode(b":" + REAL),
        quote(REAL).encode(),
        REAL.hex().encode(),
    }
    return [form for form in forms if any(form in text for text in texts)]


__all__ = ["ID", "OTHER", "REAL", "Client", "Reply", "Scene", "run", "secrets_in"]
