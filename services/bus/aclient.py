"""The asynchronous client: for services that call services.

The sockets are read by callbacks of the loop and never by a task, so there is no receive that
a cancellation could tear; a caller that is cancelled only stops being interested.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType

import zmq

from agent_box.bus import wire
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.keys import KeyPair
from agent_box.bus.link import Link, pack, prepare, table
from agent_box.bus.peer import Flow, Peer, Pending
from agent_box.bus.schema import Contract, Stream, Wire
from agent_box.bus.sockets import Context, descriptor


class AsyncClient:
    """A caller at one service. Made and used within one running loop.

    Args: as for `client.Client`. A service passes the context of its server
    (`server.gate.context`), which saves two threads, and closes its clients first.
    """

    def __init__(
        self,
        role: str,
        service: str,
        *,
        sock: Path,
        secret: KeyPair,
        server_key: bytes,
        contract: Contract,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        if contract.service != service:
            raise ValueError(f"this is the contract of {contract.service}, not of {service}")
        self.role = role
        self.service = service
        self._methods = table(contract)
        self._loop = asyncio.get_running_loop()
        self._context = Context() if context is None else context
        self._is_own = context is None
        self._peer = Peer(service)
        self._link = Link(self._context, self._peer, sock, secret, server_key)
        self._fds = (
            descriptor(self._link.socket),
            descriptor(self._link.monitor),
        )
        self._again: asyncio.Handle | None = None
        self._alarm: asyncio.TimerHandle | None = None  # not later than the first deadline
        self._closed = False
        self._loop.add_reader(self._fds[0], self._came)
        self._loop.add_reader(self._fds[1], self._turn)
        self._turn()

    async def call(
        self,
        name: str,
        request: Wire,
        *,
        deadline_s: float | None = None,
        request_id: bytes | None = None,
    ) -> Wire:
        """Calls a method and waits for its reply; see `client.Client.call`."""
        self._usable()
        method, body, deadline, request_id = prepare(
            self._methods, self.service, name, request, deadline_s, request_id
        )
        ended: asyncio.Future[None] = self._loop.create_future()

        def finish(_pending: Pending) -> None:
            if not ended.done():
                ended.set_result(None)

        pending = self._peer.submit(method, body, deadline, request_id, finish)
        self._watch(deadline)
        self._write()
        try:
            await ended
        finally:
            if not pending.done:
                self._peer.abandon(pending)
                self._write()
        if pending.error is not None:
            raise pending.error
        assert pending.result is not None
        return pending.result

    async def stream(
        self, name: str, request: Wire, *, deadline_s: float = wire.OPEN_S
    ) -> AsyncStream:
        """Opens a stream; see `client.Client.stream`. Use the result with `async with`."""
        self._usable()
        method = self._methods.get(name)
        if not isinstance(method, Stream):
            raise ValueError(f"{self.service} has no stream {name!r}")
        if type(request) is not method.request:
            raise TypeError(f"{self.service}.{name} takes {method.request.__name__}")
        if not 0 < deadline_s <= wire.OPEN_S:
            raise ValueError(f"a stream opens within {wire.OPEN_S} s")
        deadline = wire.now_ns() + int(deadline_s * wire.NS)
        changed = asyncio.Event()
        body = pack(request, self.service, name)
        flow = self._peer.open(method, body, deadline, changed.set)
        stream = AsyncStream(self, flow, changed)
        late = Refusal(Reason.UNAVAILABLE, f"{self.service} did not accept {name} in time")
        timer = self._loop.call_later(deadline_s, self._peer.close_flow, flow, late)
        self._write()
        try:
            while not (flow.accepted or flow.done):
                await stream._change()
            if flow.error is not None and not flow.inbox:
                raise flow.error
        except BaseException:
            stream.close()
            raise
        finally:
            timer.cancel()
        return stream

    def close(self) -> None:
        """Closes the connection; calls that wait end with UNAVAILABLE or UNKNOWN_OUTCOME."""
        if self._closed:
            return
        self._closed = True
        for fd in self._fds:
            self._loop.remove_reader(fd)
        if self._again is not None:
            self._again.cancel()
        if self._alarm is not None:
            self._alarm.cancel()
        self._peer.shut()
        self._link.close()
        if self._is_own:
            self._context.term()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _usable(self) -> None:
        if self._closed:
            raise Refusal(Reason.UNAVAILABLE, f"the client of {self.service} is closed")

    def _watch(self, deadline: int) -> None:
        """One alarm for all calls: it is left alone when it rings before this deadline, and set
        anew then. That costs less than a timer for each call, of which hardly one ever rings."""
        at = self._loop.time() + (deadline - wire.now_ns()) / wire.NS
        if self._alarm is not None:
            if self._alarm.when() <= at:
                return
            self._alarm.cancel()
        self._alarm = self._loop.call_at(at, self._rang)

    def _rang(self) -> None:
        self._alarm = None
        first = self._peer.expire_until(wire.now_ns())
        if first is not None:
            self._watch(first)

    def _came(self) -> None:
        """There are messages, or there is room. News of the line has a descriptor of its own."""
        self._link.messages()
        if self._peer.eager:
            self._write()

    def _turn(self) -> None:
        self._again = None
        self._link.read()
        self._write()

    def _write(self) -> None:
        if self._closed:
            return
        if self._link.write() and self._again is None:
            self._again = self._loop.call_soon(self._turn)


class AsyncStream:
    """An open stream. `recv` until None, then `finish` for the reply."""

    def __init__(self, client: AsyncClient, flow: Flow, changed: asyncio.Event) -> None:
        self._client = client
        self._flow = flow
        self._changed = changed

    async def send(self, item: Wire) -> None:
        """Sends one item; waits for credit. Raises as `client.ClientStream.send`."""
        flow, method = self._flow, self._flow.method
        if type(item) is not method.up:
            raise TypeError(f"{method.name} takes {method.up.__name__}")
        body = pack(item, self._client.service, method.name)
        while flow.credit <= 0 and not flow.done:
            await self._change()
        if flow.done:
            raise flow.error or Refusal(Reason.WRONG_STATE, f"{method.name} has ended")
        self._client._peer.send_item(flow, body)
        self._client._write()

    async def recv(self) -> Wire | None:
        """The next item; None after the last. Raises as `client.ClientStream.recv`."""
        flow = self._flow
        while not flow.inbox and not flow.done:
            await self._change()
        if flow.inbox:
            item = self._client._peer.take(flow)
            self._client._write()
            return item
        if flow.error is not None:
            raise flow.error
        return None

    def end(self) -> None:
        """No more items go up."""
        self._client._peer.finish(self._flow)
        self._client._write()

    async def finish(self) -> Wire:
        """Ends the upward direction, drops what still comes and returns the reply."""
        self.end()
        while await self.recv() is not None:
            pass
        assert self._flow.result is not None
        return self._flow.result

    def close(self) -> None:
        """Gives the stream up, if it has not ended."""
        self._client._peer.close_flow(self._flow)
        self._client._write()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
