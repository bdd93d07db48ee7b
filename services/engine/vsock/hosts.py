"""The host's ends of the streams: sockets of clients, and what is kept for them.

Clients are watched edge-triggered, so what is known about them is kept here: whether there is
something to read, and whether they take more. One that can be read waits in `Hosts.ready`
until the guest has given buffers and credit. What a client does not take at once is kept, at
most a window full.
"""

from __future__ import annotations

import select
import socket
from collections import OrderedDict
from typing import Final

from agent_box.engine.vsock.hybrid import Line, accepted
from agent_box.engine.vsock.streams import DEAF, GONE, OPENED, Stream, Table

FIRST_BURST: Final = 2
WATCH: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET


class Client:
    """The host's end of a stream, or somebody who has not got one yet.

    Attributes:
        line: what it said so far; None after its first line.
        stream: the guest's end.
        kept: data of the guest's that it did not take yet.
        readable: a read may give something.
        ended: it will send nothing more, or nobody wants it.
        deaf: it will not take anything more.
        shut: our writing side is shut.
        watched_out: the loop is told when it takes data again.
        burst: how many buffers to offer it at the next read.
    """

    __slots__ = (
        "burst",
        "deaf",
        "ended",
        "fd",
        "kept",
        "line",
        "readable",
        "shut",
        "sock",
        "stream",
        "watched_out",
    )

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.line: Line | None = Line()
        self.stream: Stream | None = None
        self.kept = bytearray()
        self.readable = False
        self.ended = False
        self.deaf = False
        self.shut = False
        self.watched_out = False
        self.burst = FIRST_BURST


class Hosts:
    """All clients that are connected.

    Attributes:
        clients: by descriptor.
        ready: those that may have something to read, and whose streams have credit.
        to_host: bytes that clients have taken.
    """

    def __init__(self, table: Table, epoll: select.epoll) -> None:
        self.clients: dict[int, Client] = {}
        self.ready: OrderedDict[Client, None] = OrderedDict()
        self.to_host = 0
        self._table = table
        self._epoll = epoll
        self._scratch = bytearray(64 << 10)

    def add(self, sock: socket.socket) -> Client:
        """A new client, whose socket is not blocking."""
        client = Client(sock)
        self.clients[client.fd] = client
        self._epoll.register(client.fd, WATCH)
        return client

    def close(self, client: Client) -> None:
        """Closes the host's end, whatever is kept for it."""
        if self.clients.pop(client.fd, None) is None:
            return
        self.ready.pop(client, None)
        client.sock.close()  # and so is out of the epoll: nobody else holds it
        client.kept.clear()
        client.ended = client.deaf = True
        client.readable = False
        if client.stream is not None:
            self._table.host_closed(client.stream)

    def deafen(self, client: Client) -> None:
        """The client does not read any more: what is kept for it is for nobody."""
        assert client.stream is not None
        client.deaf = True
        self._table.forwarded(client.stream, len(client.kept))
        client.kept.clear()
        self._table.host_deaf(client.stream)

    def refuse_input(self, client: Client) -> None:
        """Nobody in the guest reads what the client sends, and it learns that.

        What lies in the socket is thrown away, because a client that waits for room would
        not be told of the end while there is none.
        """
        client.ended = True
        try:
            client.sock.shutdown(socket.SHUT_RD)
            while client.sock.recv_into(self._scratch):
                pass  # ends: nothing can be added after the shutdown
        except OSError:
            pass  # it is gone, and an event will say so or has said so

    def settle(self, client: Client) -> None:
        """Draws the conclusions after one way of a stream has ended."""
        stream = client.stream
        assert stream is not None
        if not client.kept:
            if stream.gone:
                self.close(client)
                return
            if stream.finished and not (client.shut or client.deaf):
                client.shut = True
                try:
                    client.sock.shutdown(socket.SHUT_WR)
                except OSError:  # it is gone, and an event will say so or has said so
                    client.deaf = True
        if client.ended and (client.deaf or client.shut):
            self._table.host_ended(stream)
            self._table.host_deaf(stream)
            self.close(client)

    def deliver(self, client: Client, pieces: list[memoryview], total: int) -> None:
        """Gives data of the guest's to a client, or keeps a copy of it."""
        stream = client.stream
        assert stream is not None
        if client.deaf:
            self._table.forwarded(stream, total)
            return
        done = 0
        if not client.kept:
            try:
                done = client.sock.sendmsg(pieces)
            except BlockingIOError:
                pass
            except OSError:
                self._table.forwarded(stream, total)
                self.deafen(client)
                self.settle(client)
                return
            self.to_host += done
            self._table.forwarded(stream, done)
            if done == total:
                return
        for piece in pieces:
            size = len(piece)
            if done >= size:
                done -= size
            else:
                client.kept += piece[done:] if done else piece
                done = 0
        if not client.watched_out:
            client.watched_out = True
            self._epoll.modify(client.fd, WATCH | select.EPOLLOUT)

    def write_kept(self, client: Client) -> None:
        stream = client.stream
        assert stream is not None
        while client.kept:
            try:
                done = client.sock.send(client.kept)
            except BlockingIOError:
                return
            except OSError:
                self.deafen(client)
                break
            del client.kept[:done]
            self.to_host += done
            self._table.forwarded(stream, done)
        if client.watched_out:
            client.watched_out = False
            self._epoll.modify(client.fd, WATCH)
        self.settle(client)

    def enqueue(self, client: Client) -> None:
        """It may have something to read: let it wait for its turn, if the guest has room."""
        if client.readable and not client.ended:
            stream = client.stream
            if stream is not None and stream.credit():
                self.ready[client] = None

    def effect(self, client: Client, stream: Stream, effect: int) -> None:
        if effect & OPENED:
            line = accepted(stream.host_port)
            try:
                done = client.sock.send(line)
            except OSError:
                done = 0
            if done < len(line):  # nothing was ever written to it, so it is gone
                self._table.abort(stream)
                self.close(client)
            return
        if effect & (DEAF | GONE) and not client.ended:
            self.refuse_input(client)
            self._table.host_ended(stream)
        self.settle(client)
