"""The worker's side of forwards: what their listeners accept leads into the guest."""

from __future__ import annotations

import errno
import socket
from typing import Final

from agent_box.netstack.flow import Relay
from agent_box.netstack.opening import Opener
from agent_box.netstack.poller import Poller
from agent_box.netstack.reports import Reporter

_BATCH: Final = 64  # connections accepted before others have their turn
_PAUSE_S: Final = 0.1  # after there was no descriptor left


class ForwardListeners:
    """All listeners of an instance. They come bound and listening; we own them from then on."""

    def __init__(self, poller: Poller, relay: Relay, opener: Opener, reporter: Reporter) -> None:
        self.poller = poller
        self.opener = opener
        self.reporter = reporter
        self._relay = relay
        self._open: list[_Listener] = []

    def add(self, listener: socket.socket, guest_port: int) -> None:
        """Raises OSError."""
        listener.setblocking(False)
        self._open.append(_Listener(self, listener, guest_port))

    def remove(self, host_port: int) -> int:
        """Ends the listeners on a port of the host and their connections. How many of these."""
        for listener in [one for one in self._open if one.port == host_port]:
            self._open.remove(listener)
            listener.close()
        ended = [flow for flow in self._relay.flows.values() if flow.origin == host_port]
        for flow in ended:
            self._relay.cut(flow)
        return len(ended)

    def close(self) -> None:
        for listener in self._open:
            listener.close()
        self._open.clear()


class _Listener:
    def __init__(self, owner: ForwardListeners, sock: socket.socket, guest_port: int) -> None:
        self._owner = owner
        self._sock = sock
        self._guest_port = guest_port
        self.port: int = sock.getsockname()[1]
        owner.poller.watch(sock.fileno(), self)
        self._later()  # an edge before we watched is none

    def on_event(self, events: int) -> None:
        for _ in range(_BATCH):
            if self._sock.fileno() < 0:
                return
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._owner.reporter.limit("descriptors", self._owner.poller.now)
                    self._later(_PAUSE_S)
                    return
                continue  # that one connection failed already (accept(2))
            sock.setblocking(False)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                taken = self._owner.opener.forward(sock, self._guest_port, self.port)
            except OSError:
                taken = False
            if not taken:
                sock.close()
        self._later()

    def close(self) -> None:
        self._owner.poller.forget(self._sock.fileno())
        self._sock.close()

    def _later(self, seconds: float = 0.0) -> None:
        self._owner.poller.at(self._owner.poller.now + seconds, self._again)

    def _again(self) -> None:
        if self._sock.fileno() >= 0:
            self.on_event(0)
