"""A guest without a machine: local programs, on terminals and on pipes, that outlive whoever
looks at them. And a channel that does nothing but hand items on to it.

As programs, for a test that kills the channel and not the guest:
    python -P -m support.toyguest guest SOCKET
    python -P -m support.toyguest channel RUNTIME STATE SOCKET
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pickle
import pty
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

from agent_box.bus import keys, policy
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.server import Call, Server, StreamIO
from agent_box.channel import contract as api
from agent_box.process.log import Log
from agent_box.process.paths import ROLES, Paths

KEEP = 1 << 20  # bytes of output beyond what was acknowledged
PIECE = 1 << 15
_LENGTH = struct.Struct("<I")


async def _get(reader: asyncio.StreamReader) -> Any:
    (size,) = _LENGTH.unpack(await reader.readexactly(4))
    return pickle.loads(await reader.readexactly(size))  # noqa: S301 - from this very file


def _put(writer: asyncio.StreamWriter, value: object) -> None:
    data = pickle.dumps(value)
    writer.write(_LENGTH.pack(len(data)) + data)


# ----------------------------------------------------------------------------- guest


class Output:
    """What one source has put out: all of it that is not acknowledged, and some more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.base = 0
        self.data = bytearray()
        self.seen = 0
        self.open = True
        self.reading = False

    @property
    def end(self) -> int:
        return self.base + len(self.data)

    def trim(self) -> None:
        surplus = self.seen - KEEP - self.base
        if surplus > 0:
            del self.data[:surplus]
            self.base += surplus


class Program:
    """One program, with at most one that looks."""

    def __init__(self, request: api.Attach | api.Exec) -> None:
        self.is_terminal = isinstance(request, api.Attach)
        self.request = request
        self.taken = 0
        self.ended: api.Ended | None = None
        self.changed = asyncio.Condition()
        self.generation = 0
        self._input = bytearray()
        self._input_ends = False
        self._loop = asyncio.get_running_loop()
        env = {"PATH": os.environ["PATH"], "HOME": "/", "LANG": "C.UTF-8", "PS1": "$ "}
        env |= {v.name: v.value for v in request.environment}
        argv: list[bytes] = request.argv or [b"bash", b"--norc", b"--noprofile", b"-i"]
        if isinstance(request, api.Attach):
            env["TERM"] = request.term
            master, slave = pty.openpty()
            self.resize(request.size, master)

            def own() -> None:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)

            self.process = subprocess.Popen(
                argv,
                stdin=slave,
                stdout=slave,
                stderr=slave,
                env=env,
                cwd=request.directory,
                start_new_session=True,
                preexec_fn=own,
            )
            os.close(slave)
            self.stdin = master
            self.outputs = {"stdout": Output(master)}
        else:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                cwd=request.directory,
                start_new_session=True,
            )
            assert self.process.stdin and self.process.stdout and self.process.stderr
            self.stdin = os.dup(self.process.stdin.fileno())
            self.process.stdin.close()
            self.outputs = {
                "stdout": Output(self.process.stdout.fileno()),
                "stderr": Output(self.process.stderr.fileno()),
            }
        for descriptor in (self.stdin, *(o.descriptor for o in self.outputs.values())):
            os.set_blocking(descriptor, False)
        for output in self.outputs.values():
            self._watch(output)
        if request.timeout_ms is not None:
            self._loop.call_later(request.timeout_ms / 1000, self._late)
        self._pidfd = os.pidfd_open(self.process.pid)
        self._loop.add_reader(self._pidfd, self._dead)

    def resize(self, size: api.Size, descriptor: int | None = None) -> None:
        packed = struct.pack("HHHH", size.rows, size.columns, 0, 0)
        fcntl.ioctl(self.stdin if descriptor is None else descriptor, termios.TIOCSWINSZ, packed)

    def end(self, how: api.Ended) -> None:
        if self.ended is None:
            self.ended = how
            self.notify()

    def kill(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def write(self, data: bytes, ends: bool) -> None:
        self._input += data
        self._input_ends = self._input_ends or ends
        self._feed()

    def notify(self) -> None:
        async def tell() -> None:
            async with self.changed:
                self.changed.notify_all()

        self._task = asyncio.get_running_loop().create_task(tell())

    def pump(self) -> None:
        for output in self.outputs.values():
            output.trim()
            self._watch(output)

    def _watch(self, output: Output) -> None:
        wanted = output.open and output.end - output.seen < KEEP
        if wanted and not output.reading:
            self._loop.add_reader(output.descriptor, self._read, output)
        elif output.reading and not wanted:
            self._loop.remove_reader(output.descriptor)
        output.reading = wanted

    def _read(self, output: Output) -> None:
        try:
            data = os.read(output.descriptor, PIECE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        output.data += data
        output.open = bool(data)
        self._watch(output)
        self.notify()

    def _feed(self) -> None:
        if self.stdin < 0:
            self.taken += len(self._input)
            self._input.clear()
            return
        try:
            while self._input:
                done = os.write(self.stdin, self._input[:PIECE])
                del self._input[:done]
                self.taken += done
        except BlockingIOError:
            self._loop.add_writer(self.stdin, self._feed)
            self.notify()
            return
        except OSError:
            self.taken += len(self._input)
            self._input.clear()
        self._loop.remove_writer(self.stdin)
        if self._input_ends and not self.is_terminal:
            os.close(self.stdin)
            self.stdin = -1
        self.notify()

    def _late(self) -> None:
        self.end(api.Ended(how="timed-out", status=None, signal=None))
        self.kill(signal.SIGKILL)

    def _dead(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self.process.wait()
        self.end(
            api.Ended(
                how="exited" if code >= 0 else "signalled",
                status=code if code >= 0 else None,
                signal=-code if code < 0 else None,
            )
        )


class Guest:
    def __init__(self) -> None:
        self.programs: dict[str, Program] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await _get(reader)
            if request == "terminals":
                _put(writer, self._terminals())
            elif isinstance(request, tuple) and request[0] == "leave":
                for program in self.programs.values():
                    program.end(api.Ended(how="left-running", status=None, signal=None))
            else:
                await self._look(request, reader, writer)
            await writer.drain()
            writer.write_eof()
            while await reader.read(1 << 16):  # what is left unread would break the stream
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _terminals(self) -> api.Terminals:
        return api.Terminals(
            terminals=[
                api.Terminal(
                    terminal=id, user=p.request.user, attached=p.generation > 0, command="bash"
                )
                for id, p in self.programs.items()
                if p.is_terminal and p.ended is None
            ]
        )

    async def _look(
        self,
        request: api.Attach | api.Exec,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        id = request.terminal if isinstance(request, api.Attach) else request.command
        program = self.programs.get(id)
        if program is None:
            refusal = self._refused(request)
            if refusal is not None:
                _put(writer, refusal)
                return
            program = self.programs[id] = Program(request)
        elif isinstance(request, api.Attach):
            program.resize(request.size)
        program.generation += 1
        mine = program.generation
        program.notify()
        sent = self._begin(request, program)
        taking = asyncio.get_running_loop().create_task(self._take(program, mine, reader))
        try:
            await self._give(program, mine, sent, writer, taking)
        finally:
            taking.cancel()
            await asyncio.wait((taking,))

    @staticmethod
    def _refused(request: api.Attach | api.Exec) -> tuple[str, str] | None:
        if request.argv[:1] == [b"refuse"]:
            return request.argv[1].decode(), request.argv[2].decode()
        if not request.new:
            return "not-found", "there is no such terminal"
        if request.directory is not None and not Path(request.directory).is_dir():
            return "not-found", f"there is no directory {request.directory} in the guest"
        return None

    @staticmethod
    def _begin(request: api.Attach | api.Exec, program: Program) -> dict[str, int]:
        asked = (
            {"stdout": request.offset}
            if isinstance(request, api.Attach)
            else {
                "stdout": request.stdout,
                "stderr": request.stderr,
            }
        )
        return {s: max(asked[s], program.outputs[s].base) for s in program.outputs}

    async def _take(self, program: Program, mine: int, reader: asyncio.StreamReader) -> None:
        at = None
        while True:
            item = await _get(reader)
            if program.generation != mine:
                return
            at = program.taken + len(program._input) if at is None else at
            new = item.data[max(0, at - item.offset) :]
            assert item.offset <= at, "input was skipped"
            at += len(new)
            if isinstance(item, api.Typed):
                program.outputs["stdout"].seen = item.seen
                if item.size is not None:
                    program.resize(item.size)
                program.write(new, False)
            else:
                for source in program.outputs:
                    program.outputs[source].seen = getattr(item, source)
                program.write(new, item.end)
                if item.signal is not None:
                    program.kill(item.signal)
            program.pump()

    async def _give(
        self,
        program: Program,
        mine: int,
        sent: dict[str, int],
        writer: asyncio.StreamWriter,
        taking: asyncio.Task[None],
    ) -> None:
        told = -1
        while True:
            for source, output in program.outputs.items():
                data = bytes(output.data[sent[source] - output.base :][:PIECE])
                if data or program.taken != told:
                    told = program.taken
                    self._item(program, source, sent[source], data, writer)
                    sent[source] += len(data)
                    await writer.drain()
            if program.generation != mine:
                _put(writer, api.Ended(how="taken", status=None, signal=None))
                return
            if any(sent[s] < o.end for s, o in program.outputs.items()):
                continue
            if program.ended is not None and (
                program.ended.how in ("left-running", "timed-out")
                or not any(o.open for o in program.outputs.values())
            ):
                _put(writer, program.ended)
                return
            if taking.done():
                return
            async with program.changed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(program.changed.wait(), 0.05)

    @staticmethod
    def _item(
        program: Program, source: Any, at: int, data: bytes, writer: asyncio.StreamWriter
    ) -> None:
        if isinstance(program.request, api.Attach):
            id = program.request.terminal
            _put(writer, api.Shown(terminal=id, offset=at, data=data, taken=program.taken))
        else:
            _put(writer, api.ExecOutput(source=source, offset=at, data=data, taken=program.taken))


async def guest(sock: str) -> None:
    server = await asyncio.start_unix_server(Guest().serve, sock)
    print("ready", flush=True)
    await server.serve_forever()


# --------------------------------------------------------------------------- channel


class Channel:
    def __init__(self, sock: str) -> None:
        self._sock = sock

    def handlers(self) -> dict[str, Any]:
        handlers: dict[str, Any] = {m.name: self._refuse for m in api.CONTRACT.methods}
        return handlers | {
            "attach": self._stream,
            "exec": self._stream,
            "terminals": self._terminals,
        }

    def _refuse(self, *_: Any) -> Any:
        raise Refusal(Reason.UNAVAILABLE, "a toy")

    async def _terminals(self, request: api.Instance, call: Call) -> api.Terminals:
        reader, writer = await asyncio.open_unix_connection(self._sock)
        _put(writer, "terminals")
        found = await _get(reader)
        writer.close()
        assert isinstance(found, api.Terminals)
        return found

    async def _stream(self, request: Any, call: Call, io: StreamIO) -> api.Ended:
        reader, writer = await asyncio.open_unix_connection(self._sock, limit=1 << 24)
        _put(writer, request)
        up = asyncio.get_running_loop().create_task(self._up(io, writer))
        try:
            while True:
                item = await _get(reader)
                if isinstance(item, api.Ended):
                    return item
                if isinstance(item, tuple):
                    raise Refusal(Reason(item[0]), item[1])
                await io.send(item)
        except asyncio.IncompleteReadError:
            raise Refusal(Reason.CONNECTION_LOST, "the guest's stream ended") from None
        finally:
            up.cancel()
            writer.close()

    async def _up(self, io: StreamIO, writer: asyncio.StreamWriter) -> None:
        while (item := await io.recv()) is not None:
            _put(writer, item)
            await writer.drain()


async def channel(runtime: str, state: str, sock: str) -> None:
    paths = Paths(Path(runtime), Path(state))
    server = Server(
        api.CONTRACT,
        sock=paths.sock("channel"),
        secret=keys.load_secret(paths.keys("channel")),
        public_keys=keys.load_all_public(paths.public_keys, ROLES),
        policy=policy.load(None, (api.CONTRACT,)),
        epoch=os.urandom(16),
        handlers=Channel(sock).handlers(),
        outcomes=_Nothing(),  # type: ignore[arg-type]
        log=Log(service="channel"),
    )
    await server.start()
    server.set_ready()
    print("ready", flush=True)
    await asyncio.Event().wait()


class _Nothing:
    def lookup(self, *_: object) -> None:
        return None


if __name__ == "__main__":
    if sys.argv[1] == "guest":
        asyncio.run(guest(sys.argv[2]))
    else:
        asyncio.run(channel(*sys.argv[2:5]))
