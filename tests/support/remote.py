"""A caller of attach and exec that keeps to the contract, as the command line does: it
acknowledges, resends what was not taken, and comes back after a loss."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from agent_box.bus.client import Client, ClientStream
from agent_box.bus.errors import Code, Refusal
from agent_box.channel.contract import (
    CHUNK_MAX,
    INPUT_MAX,
    Attach,
    Ended,
    Exec,
    ExecInput,
    Shown,
    Size,
    Typed,
    Variable,
)

LONG_S = 60.0  # a bound on a hang


class Command:
    """One command, from its start to its end, over as many streams as it takes."""

    def __init__(self, client: Client, instance: str, *argv: str | bytes, **more: Any) -> None:
        self.client = client
        self.input = more.pop("input", b"")
        self.ends_input = more.pop("ends_input", True)
        self.fields: dict[str, Any] = {
            "instance": instance,
            "command": secrets.token_hex(16),
            "argv": [word.encode() if isinstance(word, str) else word for word in argv],
            "user": "agent",
            "directory": None,
            "environment": [],
            "timeout_ms": None,
        } | more
        self.out = {"stdout": bytearray(), "stderr": bytearray()}
        self.taken = 0
        self.began = False
        self.opened = 0
        self.signal: int | None = None
        self.stream: ClientStream | None = None

    def run(self, *, during: Callable[[Command], None] | None = None) -> Ended:
        until = time.monotonic() + LONG_S * 4
        while True:
            try:
                return self._once(during, until)
            except Refusal as refusal:
                if refusal.code not in (Code.UNAVAILABLE, Code.UNKNOWN_OUTCOME):
                    raise
                assert time.monotonic() < until, refusal
                time.sleep(0.1)  # the service starts again, and nothing tells when it has

    def once(self) -> Ended:
        """Without coming back. Raises Refusal."""
        return self._once(None, time.monotonic() + LONG_S)

    def _once(self, during: Callable[[Command], None] | None, until: float) -> Ended:
        request = Exec(
            new=not self.began,
            stdout=len(self.out["stdout"]),
            stderr=len(self.out["stderr"]),
            **self.fields,
        )
        with self.client.stream("exec", request) as stream:
            self.stream = stream
            self.opened += 1
            sent = acked = 0
            ended = first = False
            while (item := self._next(stream, until)) is not None:
                source = self.out[item.source]
                assert item.offset == len(source), (item.offset, len(source))
                source += item.data
                self.taken = item.taken
                if not first:
                    self.began = first = True
                    sent = item.taken
                while sent < len(self.input) and sent - self.taken <= INPUT_MAX - CHUNK_MAX:
                    piece = self.input[sent : sent + CHUNK_MAX]
                    _send(stream, self._item(sent, piece))
                    sent += len(piece)
                if sent == len(self.input) and not ended and self.ends_input:
                    _send(stream, self._item(sent, b"", end=True))
                    ended = True
                total = sum(map(len, self.out.values()))
                if total - acked >= 1 << 16 or self.signal is not None:
                    _send(stream, self._item(sent, b""))
                    acked = total
                if during is not None:
                    during(self)
            reply = stream.finish()
            assert isinstance(reply, Ended)
            return reply

    def _item(self, offset: int, data: bytes, *, end: bool = False) -> ExecInput:
        number, self.signal = self.signal, None
        return ExecInput(
            offset=offset,
            data=data,
            end=end,
            signal=number,
            stdout=len(self.out["stdout"]),
            stderr=len(self.out["stderr"]),
        )

    @staticmethod
    def _next(stream: ClientStream, until: float) -> Any:
        return stream.recv(max(0.1, until - time.monotonic()))


def _send(stream: ClientStream, item: ExecInput | Typed) -> None:
    """Sends it, unless all has ended well meanwhile: then nobody is there for it."""
    try:
        stream.send(item)
    except Refusal:
        if stream.reply is None:
            raise


class Screen:
    """One attachment of a terminal."""

    def __init__(self, stream: ClientStream, id: str, offset: int) -> None:
        self.stream = stream
        self.id = id
        self.out = bytearray()
        self.start = offset
        self.typed = 0
        first = self.stream.recv(LONG_S)
        assert isinstance(first, Shown) and first.terminal == id
        self.start, self.typed, self.taken = first.offset, first.taken, first.taken
        self.out += first.data

    @property
    def end(self) -> int:
        return self.start + len(self.out)

    def type(self, data: bytes, size: Size | None = None) -> None:
        _send(self.stream, Typed(offset=self.typed, data=data, seen=self.end, size=size))
        self.typed += len(data)

    def until(self, wanted: bytes) -> bytes:
        """All that was shown, once `wanted` was."""
        stop = time.monotonic() + LONG_S
        while wanted not in self.out:
            assert time.monotonic() < stop, bytes(self.out[-500:])
            assert self.read(), bytes(self.out[-500:])
        return bytes(self.out)

    def read(self) -> bool:
        item = self.stream.recv(LONG_S)
        if item is None:
            return False
        assert isinstance(item, Shown) and item.offset == self.end
        self.out += item.data
        self.taken = item.taken
        if item.data:
            self.type(b"")
        return True

    def ended(self) -> Ended:
        while self.read():
            pass
        reply = self.stream.finish()
        assert isinstance(reply, Ended)
        return reply


@contextlib.contextmanager
def attached(
    client: Client, instance: str, *argv: str, id: str = "", offset: int = 0, **more: Any
) -> Iterator[Screen]:
    """A new terminal, or with an id one that is there."""
    terminal = id or secrets.token_hex(4)
    fields: dict[str, Any] = {
        "shell": True,
        "argv": [word.encode() for word in argv],
        "user": "agent",
        "directory": None,
        "environment": [Variable(name="PS1", value="$ ")],
        "timeout_ms": None,
        "term": "xterm-256color",
        "size": Size(rows=24, columns=80),
        "new": not id,
    } | more
    request = Attach(instance=instance, terminal=terminal, offset=offset, **fields)
    with client.stream("attach", request) as stream:
        yield Screen(stream, terminal, offset)
