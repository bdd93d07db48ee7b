"""The loop: events of clients, of the VMM and of the driver, and a turn of work after each.

One thread, one epoll, no polling. A turn: look at events; take what the guest sent; tell it
what there is to tell; read clients into its buffers; show it the indices and interrupt it,
once per queue. Nothing in a turn waits, and each part of it has a bound.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from typing import Final

from agent_box.engine.vsock import vhost
from agent_box.engine.vsock.hosts import Client, Hosts
from agent_box.engine.vsock.hybrid import LineError, Porch
from agent_box.engine.vsock.pump import Pump
from agent_box.engine.vsock.ring import READABLE, WRITABLE, Memory, Queue, RingError
from agent_box.engine.vsock.shared import close_all, descriptors, hear, map_memory
from agent_box.engine.vsock.streams import Full, Table

MESSAGES: Final = 64  # of the VMM in one turn
ACCEPTS: Final = 64  # clients in one turn
EVENTS: Final = 256  # in one turn
FAREWELL_SECONDS: Final = 2.0
RETRY_SECONDS: Final = 1.0  # after the host had no descriptor to give

_IN: Final = select.EPOLLIN
_OUT: Final = select.EPOLLOUT
_ENDED: Final = select.EPOLLHUP | select.EPOLLERR
_ONE: Final = (1).to_bytes(8, "little")
_DRY: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}


class Device:
    """A vhost-user-vsock device between one VMM and the clients of one Unix socket.

    Attributes:
        counts: what happened, by name, for people.
    """

    def __init__(
        self,
        link: socket.socket,
        listener: socket.socket,
        guest_cid: int,
        *,
        max_clients: int,
    ) -> None:
        """Args:
        link: connected to the VMM.
        listener: of the hybrid socket, listening.
        guest_cid: the address that the guest has.
        max_clients: how many may be connected; others wait in the backlog.
        """
        self._link_socket = link
        self._listener = listener
        self._max_clients = max_clients
        self._parser = vhost.Parser()
        self._link = vhost.Link(guest_cid)
        self._epoll = select.epoll()
        self._table = Table(guest_cid)
        self._hosts = Hosts(self._table, self._epoll)
        self._pump = Pump(self._table, self._hosts)
        self._porch: Porch[Client] = Porch()
        self._memory = Memory(())
        self._queues: list[Queue | None] = [None] * vhost.QUEUES
        self._enabled = [True] * vhost.QUEUES  # a VMM may never say so: it means no harm
        self._kicks: dict[int, int] = {}  # descriptor: queue
        self._calls: list[int | None] = [None] * vhost.QUEUES
        self._broken = ""
        self._listening = False
        self._listen_again: float | None = None
        self.counts = {
            "clients": 0,
            "pauses": 0,
            "breaks": 0,
            "misspoken": 0,
            "turned_away": 0,
            "interrupts": 0,
        }
        link.setblocking(False)
        listener.setblocking(False)
        self._epoll.register(link, _IN)
        self._listen(True)

    def statistics(self) -> dict[str, int]:
        """All counts, and how much there is of everything now."""
        return {
            **self.counts,
            "to_guest": self._pump.to_guest,
            "to_host": self._hosts.to_host,
            "opened": self._table.opened,
            "refused": self._table.refused,
            "violations": self._table.violations,
            "strays": self._table.strays,
            "evicted": self._table.evicted,
            "expired": self._porch.expired,
            "connected": len(self._hosts.clients),
            "streams": len(self._table),
            "waiting": len(self._porch),
            "kept": sum(len(c.kept) for c in self._hosts.clients.values()),
        }

    def run(self) -> None:
        """Serves until the VMM goes away, and then until the clients have read what is left.

        Raises:
            LinkError: the VMM broke the protocol.
        """
        busy = False
        try:
            while self._wait(busy):
                busy = self._turn()
        except vhost.LinkError:
            self._end_streams()
            raise
        self._farewell()

    # ---- events

    def _wait(self, busy: bool) -> bool:
        """Looks at what happened. False when the VMM is gone."""
        link = accept = False
        clients = self._hosts.clients
        if self._listen_again is None and len(clients) < self._max_clients:
            self._listen(True)
        for fd, event in self._epoll.poll(0 if busy else self._timeout(), EVENTS):
            client = clients.get(fd)
            if client is not None:
                self._client_event(client, event)
            elif fd in self._kicks:
                hear(fd)
            elif fd == self._link_socket.fileno():
                link = True
            elif fd == self._listener.fileno():
                accept = True
        # New descriptors only now: events of this turn may name old ones of the same number.
        if link and not self._messages():
            return False
        if accept:
            self._accept()
        if len(self._porch) or self._listen_again is not None:
            self._overdue()
        return True

    def _timeout(self) -> float | None:
        deadlines = [d for d in (self._porch.deadline(), self._listen_again) if d is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _overdue(self) -> None:
        now = time.monotonic()
        for client in self._porch.overdue(now):
            self._close(client)
        if self._listen_again is not None and self._listen_again <= now:
            self._listen_again = None
            self._listen(True)

    def _listen(self, on: bool) -> None:
        if on != self._listening:
            self._listening = on
            if on:
                self._epoll.register(self._listener, _IN)
            else:
                self._epoll.unregister(self._listener)

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            if len(self._hosts.clients) >= self._max_clients:
                self._listen(False)  # until one leaves
                return
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # gone before we came
            except OSError as error:
                if error.errno not in _DRY:
                    raise
                self._listen(False)
                self._listen_again = time.monotonic() + RETRY_SECONDS
                return
            sock.setblocking(False)
            client = self._hosts.add(sock)
            self._porch.came(client, time.monotonic())
            self.counts["clients"] += 1

    def _client_event(self, client: Client, event: int) -> None:
        greets = client.line is not None
        if greets:
            self._greet(client)
            if client.line is not None or client.fd not in self._hosts.clients:
                return
            # The end of one that went away after its line is in this event: no other will come.
        stream = client.stream
        client.readable = True
        if stream is None or not (stream.open or stream.gone):
            if event & _ENDED:  # it does not wait for the guest any more
                if stream is not None:
                    self._table.abort(stream)
                self._close(client)
            return
        if event & _ENDED and not client.deaf:
            self._hosts.deafen(client)
            self._hosts.settle(client)
        elif event & _OUT:
            self._hosts.write_kept(client)
        self._hosts.enqueue(client)

    def _greet(self, client: Client) -> None:
        """Reads the first line, and not a byte of what follows it."""
        line = client.line
        while line is not None:
            try:
                untrusted = client.sock.recv(line.wants(), socket.MSG_PEEK)
                if not untrusted:
                    self._close(client)
                    return
                count, port = line.feed(untrusted)
                client.sock.recv(count)
            except BlockingIOError:
                return
            except (OSError, LineError) as error:
                self.counts["misspoken"] += isinstance(error, LineError)
                self._close(client)
                return
            if port is not None:
                line = client.line = None
                client.readable = True  # there may be more already, and no edge will say so
                self._porch.left(client)
                if self._broken:
                    self.counts["turned_away"] += 1
                    self._close(client)
                elif self._up():
                    self._open(client, port)
                else:
                    self._porch.park(client, port)

    def _up(self) -> bool:
        return self._queues[vhost.RX] is not None and self._queues[vhost.TX] is not None

    def _open(self, client: Client, port: int) -> None:
        try:
            stream = self._table.open(port)
        except Full:
            self.counts["turned_away"] += 1
            self._close(client)
            return
        client.stream = stream
        stream.host = client

    def _close(self, client: Client) -> None:
        self._porch.left(client)
        self._hosts.close(client)

    # ---- a turn

    def _turn(self) -> bool:
        """Moves what can be moved. True when there is more that can be moved at once."""
        rx = self._queues[vhost.RX] if self._enabled[vhost.RX] else None
        tx = self._queues[vhost.TX] if self._enabled[vhost.TX] else None
        try:
            if tx is not None:
                self._pump.receive(tx)
            if rx is not None:
                self._pump.tell(rx)
                self._pump.fill(rx)
                self._pump.tell(rx)  # of clients that ended
            self._show()
            return (tx is not None and not self._table.congested and tx.pending() > 0) or (
                rx is not None
                and (len(self._hosts.ready) > 0 or self._table.has_control)
                and rx.pending() > 0
            )
        except RingError as error:
            self._break(str(error))
            return False

    def _show(self) -> None:
        for index, queue in enumerate(self._queues):
            if queue is not None and queue.publish():
                self._interrupt(index)

    def _interrupt(self, index: int) -> None:
        call = self._calls[index]
        if call is None:
            return
        self.counts["interrupts"] += 1
        try:
            os.write(call, _ONE)
        except BlockingIOError:
            pass  # the bell is ringing already
        except OSError as error:
            raise vhost.LinkError(f"a queue cannot be rung: {error.strerror}") from error

    # ---- the VMM

    def _messages(self) -> bool:
        """Hears what the VMM says. False when it is gone."""
        for _ in range(MESSAGES):
            try:
                untrusted, ancillary, flags, _ = self._link_socket.recvmsg(
                    self._parser.wants(),
                    socket.CMSG_SPACE(vhost.MAX_FDS * 4),
                    socket.MSG_CMSG_CLOEXEC,
                )
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            fds = descriptors(ancillary)
            if not untrusted:
                close_all(fds)
                return False
            if flags & socket.MSG_CTRUNC:
                close_all(fds)
                raise vhost.LinkError("too many descriptors")
            try:
                message = self._parser.feed(untrusted, fds)
            except vhost.LinkError:
                close_all(self._parser.take_fds())
                raise
            if message is not None:
                self._obey(message)
        return True

    def _obey(self, message: vhost.Message) -> None:
        try:
            actions, answer = self._link.message(message)
        except vhost.LinkError:
            close_all(message.fds)
            raise
        for action in actions:
            if isinstance(action, vhost.Stop):
                answer = self._stop(action.queue)
            else:
                self._act(action)
        if answer:
            try:
                sent = self._link_socket.send(answer)
            except ConnectionError:
                return  # it is gone: the next read says so
            except BlockingIOError:
                sent = 0
            if sent < len(answer):  # it asks and asks and does not listen
                raise vhost.LinkError("the VMM does not read its answers")

    def _act(self, action: vhost.Action) -> None:
        if isinstance(action, vhost.Map):
            self._memory = map_memory(action.regions)
        elif isinstance(action, vhost.Kick):
            self._forget_kick(action.queue)
            try:
                os.set_blocking(action.fd, False)
                self._epoll.register(action.fd, _IN)
            except OSError as error:
                os.close(action.fd)
                raise vhost.LinkError(f"not a bell: {error.strerror}") from error
            self._kicks[action.fd] = action.queue
        elif isinstance(action, vhost.Call):
            self._call(action.queue, action.fd)
        elif isinstance(action, vhost.Discard):
            os.close(action.fd)
        elif isinstance(action, vhost.Enable):
            self._enabled[action.queue] = action.on
        elif isinstance(action, vhost.Start):
            self._start(action)

    def _call(self, index: int, fd: int | None) -> None:
        old, self._calls[index] = self._calls[index], fd
        if old is not None:
            os.close(old)
        if fd is not None:
            os.set_blocking(fd, False)
            if self._queues[index] is not None:
                self._interrupt(index)  # in case the old bell was not heard any more

    def _start(self, start: vhost.Start) -> None:
        running = self._queues[start.queue]
        if start.fresh:
            if len(self._table):
                self._end_streams()
        elif self._broken:
            return  # only a driver that begins anew mends it
        try:
            self._queues[start.queue] = Queue(
                self._memory,
                WRITABLE if start.queue == vhost.RX else READABLE,
                size=start.size,
                desc=start.desc,
                avail=start.avail,
                used=start.used,
                base=start.base if running is None else running.base,
            )
        except RingError as error:
            self._break(str(error))
            return
        if self._up():
            self._broken = ""
            for client, port in self._porch.release():
                self._open(client, port)

    def _stop(self, index: int) -> bytes:
        """The machine is paused or its driver is gone. Streams are kept."""
        queue = self._queues[index]
        try:
            if queue is not None and index == vhost.TX:
                self._pump.receive_all(queue)
            self._show()
        except RingError as error:
            self._break(str(error))
            queue = None
        self._queues[index] = None
        self._forget_kick(index)
        self._enabled[index] = True
        self.counts["pauses"] += index == vhost.RX
        return self._link.stopped(index, None if queue is None else queue.base)

    def _forget_kick(self, index: int) -> None:
        for fd in [fd for fd, queue in self._kicks.items() if queue == index]:
            del self._kicks[fd]
            self._epoll.unregister(fd)
            os.close(fd)

    def _break(self, why: str) -> None:
        """The guest broke a queue. Its streams end; it may set the queues up again."""
        self._broken = why
        self.counts["breaks"] += 1
        self._queues = [None] * vhost.QUEUES
        self._end_streams()
        for client, _ in self._porch.release():
            self.counts["turned_away"] += 1
            self._close(client)

    def _end_streams(self) -> None:
        for stream in self._table.forget():
            client: Client | None = stream.host
            if client is not None:
                self._hosts.refuse_input(client)
                self._hosts.settle(client)

    def _farewell(self) -> None:
        """The VMM is gone. What its guest had said is still in the memory that we share."""
        tx = self._queues[vhost.TX]
        try:
            if tx is not None:
                self._pump.receive_all(tx)
        except RingError as error:
            self._broken = str(error)
        self._epoll.unregister(self._link_socket)
        self._listen(False)
        end = time.monotonic() + FAREWELL_SECONDS
        self._end_streams()
        for client in list(self._hosts.clients.values()):
            if not client.kept:
                self._close(client)
        while self._hosts.clients and (left := end - time.monotonic()) > 0:
            for fd, event in self._epoll.poll(left, EVENTS):
                reader = self._hosts.clients.get(fd)
                if reader is not None and event & _ENDED:
                    self._close(reader)
                elif reader is not None and event & _OUT:
                    self._hosts.write_kept(reader)
