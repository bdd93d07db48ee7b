"""The host's resolver, asked without ever waiting: a stub on the plane's own epoll.

It reads the host's resolv.conf and hosts whenever they changed, so a new network needs no
restart, and asks each name server in turn for A and AAAA at once. Search domains do not apply:
a guest's names are whole. Answers are kept for their time to live, within bounds.
"""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from agent_box.netstack import dnswire
from agent_box.netstack.dnswire import AAAA, NOERROR, NXDOMAIN, A, Malformed, Reply
from agent_box.netstack.names import Found
from agent_box.netstack.poller import OUT, Poller

_TRY_S: Final = 2.0
_ROUNDS: Final = 2  # each server is asked that often
_SERVERS_MAX: Final = 3  # as the C library has it
_ADDRESSES_MAX: Final = 16
_FILE_MAX: Final = 1 << 20
_KEPT_MAX: Final = 2048
_LOOK_S: Final = 0.5  # between looks at the host's files
_TTL_LEAST_S: Final = 1.0  # a look-up and the connect after it are one question
_TTL_MOST_S: Final = 60.0
_NEGATIVE_S: Final = 2.0
PENDING_MAX: Final = 256

_FAILED: Final = Found("failed")


class Resolver:
    """Looks names up for one instance.

    Args:
        etc: where resolv.conf and hosts are.
        port: of the name servers.
        full: called when too many look-ups are under way and one was refused.
    """

    def __init__(
        self,
        poller: Poller,
        etc: Path = Path("/etc"),
        port: int = 53,
        full: Callable[[], None] = lambda: None,
    ) -> None:
        self._poller = poller
        self._etc = etc
        self._port = port
        self._full = full
        self._stamps: tuple[object, ...] = ()
        self._looked = float("-inf")
        self._servers: list[str] = []
        self._hosts: dict[str, tuple[str, ...]] = {}
        self._kept: dict[str, tuple[float, Found]] = {}
        self._pending: dict[str, _Lookup] = {}

    def lookup(self, name: str, done: Callable[[Found], None]) -> None:
        """Finds the addresses of a name in its one form. Calls `done` once, now or later."""
        self._refresh()
        fixed = self._hosts.get(name)
        if fixed is not None:
            done(Found("found", fixed))
            return
        kept = self._kept.get(name)
        if kept is not None and kept[0] > self._poller.now:
            done(kept[1])
            return
        pending = self._pending.get(name)
        if pending is not None:
            pending.waiting.append(done)
            return
        if len(self._pending) >= PENDING_MAX:
            self._full()
            done(_FAILED)
            return
        lookup = _Lookup(self, name, list(self._servers), done)
        self._pending[name] = lookup
        lookup.next_try()

    def close(self) -> None:
        for lookup in list(self._pending.values()):
            lookup.close()
        self._pending.clear()

    def finished(self, lookup: _Lookup, found: Found) -> None:
        self._pending.pop(lookup.name, None)
        if found.status != "failed":
            if len(self._kept) >= _KEPT_MAX:
                del self._kept[next(iter(self._kept))]
            self._kept[lookup.name] = (self._poller.now + found.ttl, found)
        for done in lookup.waiting:
            done(found)

    @property
    def poller(self) -> Poller:
        return self._poller

    @property
    def port(self) -> int:
        return self._port

    def _refresh(self) -> None:
        now = self._poller.now
        if now < self._looked + _LOOK_S:
            return
        self._looked = now
        stamps = tuple(_stamp(self._etc / name) for name in ("resolv.conf", "hosts"))
        if stamps == self._stamps:
            return
        self._stamps = stamps
        self._kept.clear()
        self._servers = servers(_text(self._etc / "resolv.conf")) or ["127.0.0.1"]
        self._hosts = hosts(_text(self._etc / "hosts"))


def servers(untrusted_text: str) -> list[str]:
    """The name servers of a resolv.conf, at most three (resolv.conf(5))."""
    found = []
    for line in untrusted_text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            found.append(words[1])
    return found[:_SERVERS_MAX]


def hosts(untrusted_text: str) -> dict[str, tuple[str, ...]]:
    """Names and their addresses out of a hosts file (hosts(5))."""
    found: dict[str, tuple[str, ...]] = {}
    for line in untrusted_text.splitlines():
        words = line.partition("#")[0].split()
        for name in words[1:]:
            known = found.get(name.lower(), ())
            if words[0] not in known:
                found[name.lower()] = (*known, words[0])
    return found


class _Lookup:
    """One name, asked of one server after another."""

    def __init__(
        self, owner: Resolver, name: str, order: list[str], done: Callable[[Found], None]
    ) -> None:
        self.name = name
        self.waiting = [done]
        self._owner = owner
        self._left = order * _ROUNDS
        self._replies: dict[int, Reply] = {}
        self._asked: list[_Asked] = []
        self._try = 0
        self._over = False

    def next_try(self) -> None:
        """Asks the next server for what is still unknown, or ends."""
        self._drop()
        while self._left and not self._over:
            server = self._left.pop(0)
            self._try += 1
            if self._ask(server):
                poller = self._owner.poller
                poller.at(poller.now + _TRY_S, partial(self._timeout, self._try))
                return
        if not self._over:
            self._end()

    def close(self) -> None:
        self._over = True
        self._drop()

    def told(self, asked: _Asked, reply: Reply) -> None:
        if reply.truncated and not asked.stream:
            asked.close()
            if not self._ask_one(asked.where, asked.kind, stream=True):
                self.next_try()
            return
        if reply.rcode not in (NOERROR, NXDOMAIN):
            self.next_try()
            return
        self._replies[asked.kind] = reply
        asked.close()
        if len(self._replies) == 2 or reply.rcode == NXDOMAIN:
            self._end()

    def failed(self, asked: _Asked) -> None:
        """That server does not answer at all."""
        asked.close()
        self.next_try()

    def _ask(self, server: str) -> bool:
        try:
            where = socket.getaddrinfo(
                server, self._owner.port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
            )[0]
        except OSError:
            return False  # no address: the next one
        kinds = [kind for kind in (A, AAAA) if kind not in self._replies]
        return all(self._ask_one((where[0], where[4]), kind, stream=False) for kind in kinds)

    def _ask_one(
        self, where: tuple[socket.AddressFamily, object], kind: int, *, stream: bool
    ) -> bool:
        try:
            asked = _Asked(self, self._owner.poller, where, kind, stream)
        except (OSError, Malformed):
            return False
        self._asked.append(asked)
        return True

    def _timeout(self, number: int) -> None:
        if not self._over and number == self._try:
            if A in self._replies and self._replies[A].addresses:
                self._end()  # half an answer is better than none
            else:
                self.next_try()

    def _drop(self) -> None:
        for asked in self._asked:
            asked.close()
        self._asked.clear()

    def _end(self) -> None:
        self.close()
        replies = self._replies.values()
        if not replies:
            self._owner.finished(self, _FAILED)
            return
        addresses = [a for reply in replies for a in reply.addresses]
        aliases = dict.fromkeys(alias for reply in replies for alias in reply.aliases)
        if not addresses:
            gone = any(reply.rcode == NXDOMAIN for reply in replies)
            found = Found("no-such-name" if gone else "found", (), tuple(aliases), _NEGATIVE_S)
        else:
            shortest = min(reply.ttl for reply in replies if reply.addresses)
            ttl = min(max(float(shortest), _TTL_LEAST_S), _TTL_MOST_S)
            found = Found("found", tuple(addresses[:_ADDRESSES_MAX]), tuple(aliases), ttl)
        self._owner.finished(self, found)


class _Asked:
    """One question on a socket of its own: its port is one more thing a forger must guess."""

    def __init__(
        self,
        lookup: _Lookup,
        poller: Poller,
        where: tuple[socket.AddressFamily, object],
        kind: int,
        stream: bool,
    ) -> None:
        """Raises OSError, Malformed."""
        self._lookup = lookup
        self._poller = poller
        self.where = where
        self.kind = kind
        self.stream = stream
        self._number = secrets.randbelow(65536)
        self._in = bytearray()
        self._out = dnswire.ask(self._number, lookup.name, kind)
        if stream:
            self._out = len(self._out).to_bytes(2, "big") + self._out
        what = socket.SOCK_STREAM if stream else socket.SOCK_DGRAM
        self._sock = socket.socket(where[0], what | socket.SOCK_NONBLOCK)
        try:
            code = self._sock.connect_ex(where[1])  # type: ignore[arg-type]
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, "cannot reach the name server")
            if not stream:
                self._send()
            poller.watch(self._sock.fileno(), self)
        except OSError:
            self._sock.close()
            raise

    def on_event(self, events: int) -> None:
        try:
            if self._out:
                self._send()
            if events & ~OUT:
                self._read()
        except BlockingIOError:
            return
        except OSError:
            self._lookup.failed(self)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._poller.forget(self._sock.fileno())
            self._sock.close()

    def _send(self) -> None:
        try:
            self._out = self._out[self._sock.send(self._out) :]
        except BlockingIOError:
            return  # its edge tells

    def _read(self) -> None:
        while self._sock.fileno() >= 0:
            message = self._sock.recv(65535)
            if self.stream:
                if not message:
                    raise OSError("the name server hung up")
                self._in += message
                need = 2 + int.from_bytes(self._in[:2], "big")
                if len(self._in) < 2 or len(self._in) < need:
                    continue
                message = bytes(self._in[2:need])
            try:
                reply = dnswire.read_reply(message, self._number, self._lookup.name, self.kind)
            except Malformed:
                if self.stream:
                    raise OSError("the name server sent something else") from None
                continue  # not its answer, which may still come
            self._lookup.told(self, reply)
            return


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _text(path: Path) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(_FILE_MAX)
    except OSError:
        return ""  # as the C library: no file is an empty one
