"""The engine's end of the helper's socket: one connection, many requests under way at once.

Everything the helper can do is a method of `Helper`. Each raises `HelperRefused` with one of
the contract's codes, or `HelperLost` when there is no answer; a request that was sent before
the connection was lost may have been done, and every one may be asked again.

Descriptors in an answer belong to the caller. One that comes after its caller gave up is
closed here.
"""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from agent_box.helper import link, proof, wire
from agent_box.helper.contract import OPS, Op

_OPS = {op.name: op for op in OPS}
_PROOF_S = 5.0
_KEY_BYTES = 200  # what is read of the file at most


class HelperLost(Exception):
    """There is no answer. One line for a person.

    Attributes:
        sent: whether the request was; then it may have been done.
    """

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.sent = sent


class HelperRefused(Exception):
    """The helper answered that it does not.

    Attributes:
        code: a key of `agent_box.helper.contract.ERRORS`.
        detail: one line, or the digest that is meant.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class Proc(NamedTuple):
    pid: int
    start: int  # clock ticks since the host was started


class Exit(NamedTuple):
    code: int | None
    signal: int | None
    by: str  # guest, kill, device-died, vmm, host
    at_ms: int  # 0: nobody saw when


class State(NamedTuple):
    """Of one instance; as `STATE` of the contract."""

    id: str
    state: str  # partial, allocated, starting, running, exited, failed
    launch_id: str | None
    disk_bytes: int | None
    vmm: Proc | None
    shim: bool
    device: bool
    worker: bool
    restarts: int
    exit: Exit | None
    error: str | None


class Gap(NamedTuple):
    name: str
    text: str


class Probed(NamedTuple):
    """As `PROBED` of the contract."""

    protocol: int
    mode: str
    uid: int
    qemu: str | None
    bwrap: str | None
    mkfs: str | None
    kvm: bool
    tsc_khz: int | None
    jail: bool
    gaps: tuple[Gap, ...]


class Console(NamedTuple):
    launch_id: str | None
    offset: int  # of the first byte of data
    end: int  # of all there is
    data: bytes


class Profile(NamedTuple):
    """What a launch is made of; the last five are sha256 in lowercase hexadecimal digits."""

    engine: str
    accel: str
    cpus: int
    memory_mib: int
    kernel: str
    initramfs: str
    variant: str
    guest: str
    harness: str | None


class Helper:
    """Args:
    sock: where it listens.
    key_file: `state/keys/engine/helper.key`.
    on_lost: called in the loop each time a connection that stood is lost.
    on_back: called each time one stands, the first time too.
    """

    def __init__(
        self,
        sock: Path,
        key_file: Path,
        *,
        on_lost: Callable[[], None] = lambda: None,
        on_back: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = sock
        self._key_file = key_file
        self._on_lost = on_lost
        self._on_back = on_back
        self._sock: socket.socket | None = None
        self._connecting = asyncio.Lock()
        self._next = 0
        self._waiting: dict[int, tuple[Op, asyncio.Future[tuple[Any, list[int]]]]] = {}

    @property
    def connected(self) -> bool:
        return self._sock is not None

    def close(self) -> None:
        """Ends the connection; those who wait get `HelperLost`."""
        self._lose("closed")

    # ------------------------------------------------------------------ operations

    async def probe(self) -> Probed:
        reply = await self._ask("probe")
        gaps = tuple(Gap(**gap) for gap in reply.pop("gaps"))
        return Probed(gaps=gaps, **reply)

    async def allocate(self, instance: str, disk_bytes: int) -> State:
        return _state(await self._ask("allocate", id=instance, disk_bytes=disk_bytes))

    async def launch(self, instance: str, launch_id: str, profile: Profile) -> State:
        """Answered when the machine runs; the same launch_id again is the same launch."""
        fields = profile._asdict()
        return _state(await self._ask("launch", id=instance, launch_id=launch_id, profile=fields))

    async def dial(self, instance: str, launch_id: str) -> int:
        """A connected stream of the hybrid vsock: say CONNECT, nothing was said."""
        return (await self._ask_fd("dial", instance, launch_id))[1]

    async def monitor(self, instance: str, launch_id: str) -> int:
        """A connected stream of QMP, which serves one client at a time."""
        return (await self._ask_fd("monitor", instance, launch_id))[1]

    async def watch(self, instance: str, launch_id: str) -> tuple[State, int]:
        """The state, and a pipe with a byte for each later change; at its end the shim is gone:
        ask `list`."""
        reply, fd = await self._ask_fd("watch", instance, launch_id)
        return _state(reply), fd

    async def console(self, instance: str, offset: int) -> Console:
        reply = await self._ask("console", id=instance, offset=offset)
        reply["data"] = base64.b64decode(reply["data"], validate=True)
        return Console(**reply)

    async def kill(self, instance: str, launch_id: str) -> State:
        return _state(await self._ask("kill", id=instance, launch_id=launch_id))

    async def instances(self) -> list[State]:
        """Every instance of which anything is left, by id."""
        found: list[State] = []
        while True:
            reply = await self._ask("list", after=found[-1].id if found else None)
            found += map(_state, reply["instances"])
            if not (reply["more"] and reply["instances"]):
                return found

    async def release(self, instance: str) -> None:
        await self._ask("release", id=instance)

    # ------------------------------------------------------------------ the connection

    async def _ask(self, name: str, **args: object) -> dict[str, Any]:
        reply, _ = await self._call(_OPS[name], args)
        return reply

    async def _ask_fd(self, name: str, instance: str, launch_id: str) -> tuple[dict[str, Any], int]:
        reply, fds = await self._call(_OPS[name], {"id": instance, "launch_id": launch_id})
        return reply, fds[0]

    async def _call(self, op: Op, args: dict[str, object]) -> tuple[dict[str, Any], list[int]]:
        async with self._connecting:
            if self._sock is None:
                await self._connect()
        assert self._sock is not None
        self._next += 1
        number = self._next
        try:
            data = wire.request(number, op, args)
        except wire.WireError as error:  # a size, a count or a digest that no helper would take
            raise HelperRefused("bad_request", str(error)) from None
        future: asyncio.Future[tuple[Any, list[int]]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (op, future)
        taken = False
        try:
            try:
                link.send(self._sock, data)
            except OSError as error:
                del self._waiting[number]
                self._lose(f"the helper cannot be written to: {error.strerror}")
                raise HelperLost(f"the helper is gone: {error.strerror}", sent=False) from error
            async with asyncio.timeout(op.deadline_s):
                answer = await future
            taken = True
            return answer
        except TimeoutError:
            raise HelperLost(f"no answer to {op.name} in {op.deadline_s} s", sent=True) from None
        finally:
            self._waiting.pop(number, None)
            if not taken:
                _discard(future)

    async def _connect(self) -> None:
        """Raises:
        HelperLost: nobody is there who holds the key.
        """
        key = _read_key(self._key_file)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            async with asyncio.timeout(_PROOF_S):
                sock.connect(os.fspath(self._path))
                side = proof.EngineSide(key, secrets.token_bytes(proof.CHALLENGE_BYTES))
                link.send(sock, side.proof(await _receive(sock)))
                side.accept(await _receive(sock))
        except TimeoutError:
            sock.close()
            raise HelperLost("the helper does not answer", sent=False) from None
        except (OSError, wire.WireError) as error:
            sock.close()
            raise HelperLost(f"the helper is not there: {error}", sent=False) from error
        except BaseException:
            sock.close()
            raise
        self._sock = sock
        asyncio.get_running_loop().add_reader(sock.fileno(), self._readable, sock)
        self._on_back()

    def _readable(self, sock: socket.socket) -> None:
        fds: list[int] = []
        try:
            data, fds = link.receive(sock, 1)
            if not data:
                self._lose("the helper went away")
                return
            answer = wire.read_answer(data)
            op, future = self._waiting.get(answer.req, (None, None))
            if op is None or future is None or future.done():
                return  # whoever asked has given up
            if answer.refused is not None:
                refused = answer.refused
                future.set_exception(HelperRefused(refused.code, refused.detail))
                return
            if len(fds) != op.descriptors:
                raise wire.WireError(f"{op.name} came with {len(fds)} descriptors")
            future.set_result((wire.check(op.reply, answer.untrusted_reply), fds))
            fds = []
        except BlockingIOError:
            return
        except (OSError, wire.WireError) as error:
            self._lose(f"the helper broke the protocol: {error}")
        finally:
            link.close(fds)

    def _lose(self, why: str) -> None:
        if self._sock is None:
            return
        asyncio.get_running_loop().remove_reader(self._sock.fileno())
        self._sock.close()
        self._sock = None
        waiting, self._waiting = self._waiting, {}
        for _, future in waiting.values():
            if not future.done():
                future.set_exception(HelperLost(why, sent=True))
        self._on_lost()


def _read_key(file: Path) -> bytes:
    try:
        with file.open(encoding="ascii") as opened:
            return bytes.fromhex(opened.read(_KEY_BYTES).strip())
    except (OSError, ValueError) as error:
        raise HelperLost(f"the helper's key cannot be read: {error}", sent=False) from error


async def _receive(sock: socket.socket) -> bytes:
    """One datagram without descriptors, empty at the end."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock.fileno(), readable)
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())
    return link.receive(sock)[0]


def _discard(future: asyncio.Future[tuple[Any, list[int]]]) -> None:
    """Closes what came for somebody who did not wait for it any longer."""
    if not future.done():
        future.cancel()
    elif not future.cancelled() and future.exception() is None:
        link.close(future.result()[1])


def _state(reply: dict[str, Any]) -> State:
    ended, vmm = reply.pop("exit"), reply.pop("vmm")
    return State(
        exit=None if ended is None else Exit(**ended),
        vmm=None if vmm is None else Proc(**vmm),
        **reply,
    )
