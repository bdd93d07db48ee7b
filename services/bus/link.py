"""The socket of a caller: a DEALER and its monitor, and how both feed a `Peer`.

Shared by the synchronous and the asynchronous client; imports neither asyncio nor anything
else that a quick command would have to wait for.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import zmq

from agent_box.bus import base, wire
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.keys import KeyPair
from agent_box.bus.peer import Peer
from agent_box.bus.schema import Contract, Kind, Method, Stream, Wire
from agent_box.bus.sockets import readable, receive, send, writable

RECONNECT_MS: Final = 10
RECONNECT_MAX_MS: Final = 250
HWM: Final = 1_024
SOON_MS: Final = 5
_EVENT: Final = struct.Struct("=hi")
_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
)


class Link:
    """A connection to one service, made and made again by ZeroMQ.

    Args:
        context: of whoever owns the link.
        sock: the service's socket.
        secret: of the calling role.
        server_key: the service's public key, Z85.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        peer: Peer,
        sock: Path,
        secret: KeyPair,
        server_key: bytes,
    ) -> None:
        self.peer = peer
        self.garbage = 0  # messages of the service that were none
        self.socket = dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.setsockopt(zmq.IMMEDIATE, 1)  # else what is sent now is delivered after a restart
        dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        dealer.setsockopt(zmq.MAXMSGSIZE, wire.FRAME_MAX)
        dealer.setsockopt(zmq.RCVTIMEO, SOON_MS)
        dealer.setsockopt(zmq.SNDHWM, HWM)
        dealer.setsockopt(zmq.RCVHWM, HWM)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, server_key)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, secret.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, secret.reveal())
        self.monitor = dealer.get_monitor_socket(_EVENTS)
        self.monitor.linger = 0
        dealer.connect(f"ipc://{sock}")

    def read(self) -> bool:
        """Feeds the peer with all that has arrived. Whether that was anything.

        Messages before the news that the line broke: what was answered was answered.
        """
        came = self.messages()
        while readable(self.monitor):
            came = True
            event, _value = _EVENT.unpack(receive(self.monitor)[0])
            if event == zmq.EVENT_DISCONNECTED:
                self.messages()
                self.peer.disconnected()
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.peer.connected()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.peer.denied()
        return came

    def write(self) -> bool:
        """Sends what the peer has to say.

        Returns:
            Whether there is something to do at once: to read, or to send what found no room a
            moment ago. A send, like any look at the socket, may have taken the descriptor's
            signal with it, so nobody else will tell.
        """
        self.peer.pump(self._send)
        return readable(self.socket) or (self.peer.blocked and writable(self.socket))

    def close(self) -> None:
        """Closes both sockets. What is pending stays pending: its owner ends it."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)

    def soon(self) -> None:
        """Sends, then waits `SOON_MS` for one message and feeds the peer with it.

        The quick way for the usual case, in which the answer comes at once: half of the system
        calls. What happens to the line meanwhile is heard of right after.
        """
        self.peer.pump(self._send)
        try:
            untrusted = receive(self.socket, 0)
        except zmq.Again:
            return
        self._feed(untrusted)

    def messages(self) -> bool:
        """Feeds the peer with the messages that have arrived. Whether there was one."""
        came = False
        while readable(self.socket):
            came = True
            self._feed(receive(self.socket))
        return came

    def _feed(self, untrusted: list[bytes]) -> None:
        try:
            self.peer.received(untrusted)
        except wire.WireError:
            self.garbage += 1

    def _send(self, frames: list[bytes]) -> bool:
        try:
            send(self.socket, *frames)
        except zmq.Again:
            return False
        return True


def table(contract: Contract) -> Mapping[str, Method | Stream]:
    """All that can be called at a service: what it declares and what every service answers."""
    return MappingProxyType({m.name: m for m in (*contract.methods, *base.METHODS)})


def prepare(
    methods: Mapping[str, Method | Stream],
    service: str,
    name: str,
    request: Wire,
    deadline_s: float | None,
    request_id: bytes | None,
) -> tuple[Method, bytes, int, bytes | None]:
    """Method, packed request, absolute deadline and request id of a call.

    Raises:
        ValueError: a method that is not declared, or a deadline or request id that it cannot
            have: a mistake in our own program.
        TypeError: a request of another type.
        Refusal: BAD_REQUEST, the request is too large.
    """
    method = methods.get(name)
    if not isinstance(method, Method):
        raise ValueError(f"{service} has no method {name!r}")
    if type(request) is not method.request:
        raise TypeError(f"{service}.{name} takes {method.request.__name__}")
    span = method.deadline_s if deadline_s is None else deadline_s
    if not 0 < span <= method.deadline_s:
        raise ValueError(f"{service}.{name}: a deadline of {span} s is not within its limit")
    if method.kind is Kind.ONCE:
        request_id = os.urandom(wire.REQUEST_ID_BYTES) if request_id is None else request_id
        if len(request_id) != wire.REQUEST_ID_BYTES:
            raise ValueError(f"a request id has {wire.REQUEST_ID_BYTES} bytes")
    elif request_id is not None:
        raise ValueError(f"{service}.{name} takes no request id")
    return method, pack(request, service, name), wire.now_ns() + int(span * wire.NS), request_id


def pack(value: Wire, service: str, name: str) -> bytes:
    """A packed body. Raises Refusal BAD_REQUEST when it is too large or cannot be packed."""
    try:
        return wire.encode_body(value)
    except wire.WireError as error:
        raise Refusal(Reason.BAD_REQUEST, f"{service}.{name}: {error}") from None
