"""Who is on the other end: the ZAP handler, which gives each CURVE key its role.

Without a handler CURVE accepts any key. So the handler is bound before any server socket of
its context, every server socket has a domain and enforces it, and the answer's User-Id, which
ZeroMQ then attaches to each frame, is the only identity that a service believes.

The handler runs in the loop of the service, on the raw socket: nothing can cancel it half-way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import zmq
from zmq.utils import z85

from agent_box.bus.keys import KeyPair
from agent_box.bus.sockets import Context, descriptor

HANDSHAKE_MS: Final = 5_000  # a connection that has not said who it is by then is closed
BACKLOG: Final = 1_024
HWM: Final = 1_024  # messages queued for one peer, each direction
_ENDPOINT: Final = "inproc://zeromq.zap.01"


class Gate:
    """One ZeroMQ context, whose server sockets admit the holders of the given keys only.

    Args:
        public_keys: Z85 keys of 40 bytes by role.
        on_refused: is told of each handshake that is refused, and why.
    """

    def __init__(
        self,
        public_keys: Mapping[str, bytes],
        on_refused: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._roles = {z85.decode(key): role for role, key in public_keys.items()}
        if len(self._roles) != len(public_keys):
            raise ValueError("two roles have the same key")
        self._domains: dict[bytes, frozenset[str]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_refused = on_refused
        self.refused = 0  # handshakes
        self.context = Context()
        self._socket = self.context.socket(zmq.REP)
        self._socket.linger = 0
        try:
            self._socket.bind(_ENDPOINT)
        except zmq.ZMQError:
            self.close()
            raise

    def start(self) -> None:
        """Begins to answer in the running loop."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(descriptor(self._socket), self._ready)
            self._ready()

    def socket(
        self, kind: int, domain: str, secret: KeyPair, roles: frozenset[str]
    ) -> zmq.Socket[bytes]:
        """A CURVE server socket, not yet bound, for the holders of the keys of `roles`.

        Raises:
            ValueError: an empty or taken domain: with an empty one ZeroMQ asks nobody.
        """
        name = domain.encode()
        if not name or name in self._domains:
            raise ValueError(f"the domain {domain!r} is empty or taken")
        self._domains[name] = roles
        made = self.context.socket(kind)
        made.linger = 0
        made.setsockopt(zmq.CURVE_SERVER, 1)
        made.setsockopt(zmq.CURVE_SECRETKEY, secret.reveal())
        made.setsockopt(zmq.ZAP_DOMAIN, name)
        made.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        made.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        made.setsockopt(zmq.BACKLOG, BACKLOG)
        made.setsockopt(zmq.SNDHWM, HWM)
        made.setsockopt(zmq.RCVHWM, HWM)
        return made

    def close(self, flush_ms: int = 0) -> None:
        """Ends the handler and all sockets of the context.

        Args:
            flush_ms: how long what has been sent may take to leave, e.g. the last reply
                before a process exits.
        """
        if self._loop is not None:
            self._loop.remove_reader(descriptor(self._socket))
            self._loop = None
        self.context.destroy(linger=flush_ms)

    def _ready(self) -> None:
        while True:
            try:
                untrusted = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._socket.send_multipart(self._answer(untrusted))

    def _answer(self, untrusted: list[bytes]) -> list[bytes]:
        # version, request id, domain, address, routing id, mechanism, then CURVE's one: the key
        request_id = untrusted[1] if len(untrusted) > 1 else b""
        why = "not CURVE"
        if len(untrusted) == 7 and untrusted[0] == b"1.0" and untrusted[5] == b"CURVE":
            role = self._roles.get(untrusted[6])
            if role is not None and role in self._domains.get(untrusted[2], frozenset()):
                return [b"1.0", request_id, b"200", b"OK", role.encode(), b""]
            why = "an unknown key" if role is None else f"{role} is not admitted here"
        self.refused += 1
        self._on_refused(why)
        return [b"1.0", request_id, b"400", b"not admitted", b"", b""]
