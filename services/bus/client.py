"""The synchronous client: for the command line, which waits anyway. Imports no asyncio.

One thread. While nothing is called nothing happens: the connection is looked after during
calls only.
"""

from __future__ import annotations

import select
from pathlib import Path
from types import TracebackType
from typing import Final

import zmq

from agent_box.bus import wire
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.keys import KeyPair
from agent_box.bus.link import SOON_MS, Link, pack, prepare, table
from agent_box.bus.peer import Flow, Line, Peer
from agent_box.bus.schema import Contract, Stream, Wire
from agent_box.bus.sockets import Context, descriptor


class Client:
    """A caller at one service.

    Args:
        role: of the caller, for messages; the key is what counts.
        service: to be called.
        sock: path of its socket.
        secret: key pair of `role`.
        server_key: public key of `service`, Z85.
        contract: of `service`.
        context: to share one among several clients; otherwise the client has its own.

    Attributes:
        descriptors: to wait on for reading; see `attend`.
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
        self._context = Context() if context is None else context
        self._is_own = context is None
        self._peer = Peer(service)
        self._link = Link(self._context, self._peer, sock, secret, server_key)
        self._monitor_fd = descriptor(self._link.monitor)
        self._poll = select.poll()
        self._poll.register(descriptor(self._link.socket), select.POLLIN)
        self._poll.register(self._monitor_fd, select.POLLIN)
        self.descriptors: Final = (descriptor(self._link.socket), self._monitor_fd)
        self._link.read()  # a pipe that was never read gives no signal

    def call(
        self,
        name: str,
        request: Wire,
        *,
        deadline_s: float | None = None,
        request_id: bytes | None = None,
    ) -> Wire:
        """Calls a method and waits for its reply.

        Args:
            name: of the method, declared in the contract or in `base`.
            request: of the declared type.
            deadline_s: seconds; not more than the method allows, which is also the default.
            request_id: 16 bytes, for a `Kind.ONCE` method that is asked again on purpose;
                made up when None.

        Returns:
            A value of the declared reply type.

        Raises:
            Refusal: what the service said; or UNAVAILABLE (nothing has happened), DEADLINE,
                CONNECTION_LOST or UNKNOWN_OUTCOME (it may have happened).
            ValueError, TypeError: not a call that this contract knows.
        """
        method, body, deadline, request_id = prepare(
            self._methods, self.service, name, request, deadline_s, request_id
        )
        pending = self._peer.submit(method, body, deadline, request_id)
        try:
            if self._peer.line is Line.UP and deadline - wire.now_ns() > 2 * SOON_MS * 1_000_000:
                self._link.soon()
            while not pending.done:
                if not self._turn(deadline):
                    self._peer.expire(pending)
        except BaseException:
            self._peer.abandon(pending)
            raise
        if pending.error is not None:
            raise pending.error
        assert pending.result is not None
        return pending.result

    def stream(self, name: str, request: Wire, *, deadline_s: float = wire.OPEN_S) -> ClientStream:
        """Opens a stream; use it as a context manager.

        Args:
            deadline_s: in which the service must have accepted it.

        Raises:
            Refusal: UNAVAILABLE, EXHAUSTED, or what the service said.
            ValueError, TypeError: not a stream that this contract knows.
        """
        stream = self.opening(name, request, deadline_s=deadline_s)
        try:
            while not (stream.accepted or stream.done):
                if not self._turn(stream.deadline_ns):
                    why = f"{self.service} did not accept {name} in time"
                    raise Refusal(Reason.UNAVAILABLE, why)
            if stream.error is not None and not stream.waiting:
                raise stream.error
        except BaseException:
            stream.close()
            raise
        return stream

    def opening(self, name: str, request: Wire, *, deadline_s: float = wire.OPEN_S) -> ClientStream:
        """As `stream`, but waits for nothing: whoever has a loop of its own looks at
        `ClientStream.accepted` and `done`, and closes it when its deadline passes.

        Raises:
            Refusal: EXHAUSTED, or BAD_REQUEST.
            ValueError, TypeError: not a stream that this contract knows.
        """
        method = self._methods.get(name)
        if not isinstance(method, Stream):
            raise ValueError(f"{self.service} has no stream {name!r}")
        if type(request) is not method.request:
            raise TypeError(f"{self.service}.{name} takes {method.request.__name__}")
        if not 0 < deadline_s <= wire.OPEN_S:
            raise ValueError(f"a stream opens within {wire.OPEN_S} s")
        deadline = wire.now_ns() + int(deadline_s * wire.NS)
        flow = self._peer.open(method, pack(request, self.service, name), deadline, _nothing)
        return ClientStream(self, flow)

    def attend(self) -> bool:
        """Sends and reads all that can be now, without waiting. Whether anything came.

        For a loop that waits on `descriptors` and on others. They tell of a change and not of a
        state, and whatever is sent may take the signal with it: so this is the last thing before
        each wait, and there is no waiting after it returned True.
        """
        link = self._link
        came = link.read()
        while link.write():
            came = link.messages() or came
        return came

    def close(self) -> None:
        """Closes the connection."""
        self._link.write()  # a last cancellation, if there is room for it
        self._link.close()
        if self._is_own:
            self._context.term()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _turn(self, deadline: int | None) -> bool:
        """Sends, waits for something to happen, reads. False: the deadline has passed."""
        link = self._link
        if link.write():
            link.messages()
            return True
        if deadline is None:
            wait_ms = None
        else:
            wait_ms = -(-(deadline - wire.now_ns()) // 1_000_000)
            if wait_ms <= 0:
                return False
        # The descriptors tell of anything that a socket has not been asked about since, room for
        # what could not be sent included.
        for fd, _events in self._poll.poll(wait_ms):
            if fd == self._monitor_fd:
                link.read()
                return True
        link.messages()
        return True


class ClientStream:
    """An open stream. `recv` until None, then `finish` for the reply."""

    def __init__(self, client: Client, flow: Flow) -> None:
        self._client = client
        self._flow = flow

    @property
    def accepted(self) -> bool:
        """Whether the service has taken it up."""
        return self._flow.accepted

    @property
    def done(self) -> bool:
        """Whether it is over; `waiting` items may still be there."""
        return self._flow.done

    @property
    def error(self) -> Refusal | None:
        """How it ended, when it did not end well."""
        return self._flow.error

    @property
    def reply(self) -> Wire | None:
        """With what it ended, when it ended well."""
        return self._flow.result

    @property
    def credit(self) -> int:
        """Items that `send` takes without waiting."""
        return 0 if self._flow.done else self._flow.credit

    @property
    def waiting(self) -> int:
        """Items that `recv` gives without waiting."""
        return len(self._flow.inbox)

    @property
    def deadline_ns(self) -> int:
        """CLOCK_BOOTTIME, until when the service must have accepted it."""
        return self._flow.deadline

    def send(self, item: Wire) -> None:
        """Sends one item; waits for credit.

        Raises:
            Refusal: the stream has ended.
            TypeError: an item of another type.
        """
        flow, method = self._flow, self._flow.method
        if type(item) is not method.up:
            raise TypeError(f"{method.name} takes {method.up.__name__}")
        body = pack(item, self._client.service, method.name)
        while flow.credit <= 0 and not flow.done:
            self._client._turn(None)
        if flow.done:
            raise flow.error or Refusal(Reason.WRONG_STATE, f"{method.name} has ended")
        self._client._peer.send_item(flow, body)
        self._client._link.write()

    def recv(self, timeout_s: float | None = None) -> Wire | None:
        """The next item; None after the last.

        Raises:
            Refusal: how the stream ended, when it did not end well.
            TimeoutError: nothing came within `timeout_s` seconds.
        """
        flow = self._flow
        until = None if timeout_s is None else wire.now_ns() + int(timeout_s * wire.NS)
        while not flow.inbox and not flow.done:
            if not self._client._turn(until):
                raise TimeoutError
        if flow.inbox:
            item = self._client._peer.take(flow)
            self._client._link.write()
            return item
        if flow.error is not None:
            raise flow.error
        return None

    def end(self) -> None:
        """No more items go up."""
        self._client._peer.finish(self._flow)
        self._client._link.write()

    def finish(self) -> Wire:
        """Ends the upward direction, drops what still comes and returns the reply.

        Raises:
            Refusal: how the stream ended, when it did not end well.
        """
        self.end()
        while self.recv() is not None:
            pass
        assert self._flow.result is not None
        return self._flow.result

    def close(self) -> None:
        """Gives the stream up, if it has not ended."""
        self._client._peer.close_flow(self._flow)
        self._client._link.write()

    def __enter__(self) -> ClientStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _nothing() -> None:
    pass
