"""One guest, one plane and a policy, as tests of the whole plane use them."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scapy.layers.dns import DNS, DNSQR
from support import planes
from support import until as waiting
from support.planes import Running
from support.tunguest import GATEWAY, TunGuest

from agent_box.netstack.contract import Rule
from agent_box.netstack.reports import Denied


class Net(Running):
    """A running plane, linked to the guest."""

    def __init__(
        self,
        guest: TunGuest,
        directory: Path,
        *rules: Rule,
        hosts: dict[str, str] | None = None,
        nameserver: str = "",
        mode: str = "allowlist",
        endpoints: tuple[str, ...] = (),
        broker: str | None = None,
        **more: Any,
    ) -> None:
        self.guest = guest
        self.rules = rules
        self.etc = planes.etc(directory / "etc", hosts, nameserver)
        super().__init__(
            policy=planes.policy(*rules, mode=mode, endpoints=endpoints),
            broker=broker,
            etc=self.etc,
            **more,
        )
        self.relink()

    def relink(self) -> None:
        link = self.guest.new_link()
        self.do(lambda plane: plane.link(link))

    def apply(self, *rules: Rule, **more: Any) -> int:
        return self.do(lambda plane: plane.apply(planes.policy(*rules, generation=2, **more)))

    def look_up(self, name: str, kind: str = "A", *, tcp: bool = False) -> DNS:
        query = bytes(DNS(id=7, rd=1, qd=DNSQR(qname=name, qtype=kind)))
        if tcp:
            with self.guest.socket() as sock:
                sock.connect((GATEWAY, 53))
                sock.sendall(len(query).to_bytes(2, "big") + query)
                length = int.from_bytes(take(sock, 2), "big")
                return DNS(take(sock, length))
        with self.guest.socket(socket.SOCK_DGRAM) as sock:
            sock.sendto(query, (GATEWAY, 53))
            return DNS(sock.recv(4096))

    def address(self, name: str) -> str:
        """What the guest gets for a name."""
        found = self.look_up(name)
        assert found.rcode == 0 and found.ancount == 1, found.show(dump=True)
        return str(found.an[0].rdata)

    def connect(self, where: str, port: int) -> socket.socket:
        """From the guest, to a name or an address."""
        address = where if where.replace(".", "").isdigit() else self.address(where)
        sock = self.guest.socket()
        try:
            sock.connect((address, port))
            _is_connected(sock)
        except OSError:
            sock.close()
            raise
        return sock

    def errno(self, where: str, port: int) -> int:
        """Of a connect that must fail."""
        try:
            self.connect(where, port).close()
        except OSError as error:
            return error.errno or 0
        raise AssertionError(f"{where}:{port} let a connection through")

    def denials(self) -> list[str]:
        return [report.rule for report in self.reports if isinstance(report, Denied)]


def take(sock: socket.socket, count: int) -> bytes:
    """Exactly that many bytes."""
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        assert more, f"the end after {len(data)} of {count} bytes"
        data += more
    return data


def take_all(sock: socket.socket) -> bytes:
    parts = []
    while data := sock.recv(1 << 20):
        parts.append(data)
    return b"".join(parts)


def round_trip(sock: socket.socket, data: bytes = b"ping") -> None:
    """Of an echo."""
    sock.sendall(data)
    assert take(sock, len(data)) == data


def until(look: Callable[[], object]) -> None:
    """Waits for something to come true, for as long as a hang would be."""
    waiting.until("what the test waits for", look, seconds=60)


def _is_connected(sock: socket.socket) -> None:
    """Linux wakes who waits for a connect before it sets the error that an ICMP message brought,
    so one in some thousand finds none, and Python takes that for a connection. It is there soon."""
    try:
        sock.getpeername()
    except OSError:
        poll = select.poll()
        poll.register(sock, 0)  # its end is told unasked
        poll.poll(60_000)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        raise OSError(code, os.strerror(code)) from None
