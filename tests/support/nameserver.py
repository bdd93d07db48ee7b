"""A name server on this host's loopback, by UDP and TCP, for the stub resolver to ask.

It answers from `records`, which a test may change at any time, and keeps what it was asked.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from scapy.layers.dns import DNS, DNSRR

Record = tuple[str, str, int]  # type, value, ttl


def _both(host: str, port: int) -> tuple[socket.socket, socket.socket]:
    """Sockets at one port, for UDP and TCP."""
    for _ in range(50):
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind((host, port))
        try:
            return udp, socket.create_server((host, udp.getsockname()[1]))
        except OSError:
            udp.close()
    raise OSError("no port is free for both")


class NameServer:
    """`records` maps a name to its records; a name that is not there does not exist.

    Attributes:
        rcode: given instead of an answer, when not 0.
        silent: nothing is answered.
        cut: answers by UDP are marked as truncated and empty.
        asked: names, in order.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        socks: tuple[socket.socket, socket.socket] | None = None,
    ) -> None:
        """`socks` are for UDP and TCP, bound, in the place of host and port."""
        self._udp, self._tcp = _both(host, port) if socks is None else socks
        self.port: int = self._udp.getsockname()[1]
        self.records: dict[str, list[Record]] = {}
        self.asked: list[str] = []
        self.rcode = 0
        self.silent = False
        self.cut = False
        self.mangle: Callable[[bytes], bytes] | None = None
        for serve in (self._serve_udp, self._serve_tcp):
            threading.Thread(target=serve, daemon=True).start()

    def close(self) -> None:
        for sock in (self._udp, self._tcp):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # a UDP socket is not connected, and wakes all the same
            sock.close()

    def _serve_udp(self) -> None:
        while True:
            try:
                message, sender = self._udp.recvfrom(65535)
                if not message:
                    return
                answer = self._answer(message, cut=self.cut)
                if answer is not None:
                    self._udp.sendto(answer, sender)
            except OSError:
                return

    def _serve_tcp(self) -> None:
        while True:
            try:
                sock, _ = self._tcp.accept()
                with sock:
                    data = sock.recv(65535)
                    answer = self._answer(data[2:], cut=False)
                    if answer is not None:
                        sock.sendall(len(answer).to_bytes(2, "big") + answer)
            except OSError:
                return

    def _answer(self, message: bytes, *, cut: bool) -> bytes | None:
        query = DNS(message)
        name = query.qd[0].qname.decode().rstrip(".")
        kind = {1: "A", 28: "AAAA"}.get(query.qd[0].qtype, "?")
        self.asked.append(name)
        if self.silent:
            return None
        reply = DNS(id=query.id, qr=1, rd=1, ra=1, qd=query.qd)
        records = []
        if self.rcode:
            reply.rcode = self.rcode
        elif cut:
            reply.tc = 1
        elif name not in self.records:
            reply.rcode = 3
        else:
            here = name
            while True:
                aliases = [r for r in self.records.get(here, []) if r[0] == "CNAME"]
                if not aliases:
                    break
                _, other, ttl = aliases[0]
                records.append(DNSRR(rrname=here, type="CNAME", rdata=other, ttl=ttl))
                here = other
            for what, value, ttl in self.records.get(here, []):
                if what == kind:
                    records.append(DNSRR(rrname=here, type=what, rdata=value, ttl=ttl))
            reply.an = records
        data = bytes(reply)
        return data if self.mangle is None else self.mangle(data)
