"""Small servers on this host's loopback, for guests to talk to."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable


class Server:
    """Serves each connection by a function, in threads."""

    def __init__(
        self,
        serve: Callable[[socket.socket], None],
        host: str = "127.0.0.1",
        backlog: int = 512,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.sock = socket.create_server((host, 0), family=family, backlog=backlog)
        self.port: int = self.sock.getsockname()[1]
        self._serve = serve
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        if self.sock.fileno() >= 0:
            self.sock.shutdown(socket.SHUT_RDWR)
            self.sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.sock.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(sock,), daemon=True).start()

    def _one(self, sock: socket.socket) -> None:
        with sock:
            sock.settimeout(60)
            try:
                self._serve(sock)
            except OSError:
                pass  # the other side went, which is its right


def echo(sock: socket.socket) -> None:
    while data := sock.recv(1 << 16):
        sock.sendall(data)
