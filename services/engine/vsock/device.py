"""The loop that moves the bytes: the only I/O of the device.

One thread, one epoll, no polling. Clients are watched edge-triggered, so what is known about
them is kept here: whether there is something to read, and whether room for it. A client that
can be read waits in `_ready` until the guest has given buffers and credit; what a client does
not take at once is kept, at most a window full.

A turn: look at events; take what the guest sent; tell it what there is to tell; read clients
into its buffers; show it the indices and interrupt it, once per queue.

Data goes straight from the guest's memory into the client's socket and back. The guest may
change it underneath: then it is its own data that changes. Headers are copied first.
"""

from __future__ import annotations

import array
import errno
import fcntl
import mmap
import os
import select
import socket
import time
from collections import deque
from typing import Final

from agent_box.engine.vsock import vhost
from agent_box.engine.vsock.hybrid import Line, LineError, Porch, accepted
from agent_box.engine.vsock.ring import (
    MAX_SIZE,
    READABLE,
    WRITABLE,
    Memory,
    Queue,
    Region,
    RingError,
)
from agent_box.engine.vsock.streams import (
    CREDIT,
    DATA,
    DEAF,
    FINISH,
    GONE,
    HEADER_BYTES,
    OPENED,
    Full,
    Stream,
    Table,
    header,
)

BURST: Final = 64  # buffers of the guest that one client may fill in one turn
FIRST_BURST: Final = 2
BATCH: Final = 64  # packets of the guest in one turn
PIECES: Final = MAX_SIZE  # of one sendmsg: IOV_MAX
MESSAGES: Final = 64  # of the VMM in one turn
ACCEPTS: Final = 64  # clients in one turn
FAREWELL_SECONDS: Final = 2.0
RETRY_SECONDS: Final = 1.0  # after the host had no descriptor to give

_IN: Final = select.EPOLLIN
_OUT: Final = select.EPOLLOUT
_ENDED: Final = select.EPOLLHUP | select.EPOLLERR
_WATCH: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
_F_GET_SEALS: Final = 1034
_F_SEAL_SHRINK: Final = 2
_ONE: Final = (1).to_bytes(8, "little")
_DRY: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
_unpack = header.unpack_from


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
        queued: it is in the device's `_ready`.
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
        "queued",
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
        self.queued = False
        self.watched_out = False
        self.burst = FIRST_BURST


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
        self._table = Table(guest_cid)
        self._porch: Porch[Client] = Porch()
        self._clients: dict[int, Client] = {}
        self._ready: deque[Client] = deque()
        self._memory = Memory(())
        self._queues: list[Queue | None] = [None] * vhost.QUEUES
        self._enabled = [True] * vhost.QUEUES  # a VMM may never say so: it means no harm
        self._kicks: dict[int, int] = {}  # descriptor: queue
        self._calls: list[int | None] = [None] * vhost.QUEUES
        self._broken = ""
        self._scratch = bytearray(64 << 10)
        self._listening = False
        self._listen_again: float | None = None
        self._epoll = select.epoll()
        self.counts = {
            "clients": 0,
            "to_guest": 0,
            "to_host": 0,
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
            "opened": self._table.opened,
            "refused": self._table.refused,
            "violations": self._table.violations,
            "strays": self._table.strays,
            "evicted": self._table.evicted,
            "expired": self._porch.expired,
            "connected": len(self._clients),
            "streams": len(self._table),
            "waiting": len(self._porch),
            "kept": sum(len(c.kept) for c in self._clients.values()),
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
        clients = self._clients
        for fd, event in self._epoll.poll(0 if busy else self._timeout(), 256):
            client = clients.get(fd)
            if client is not None:
                self._client_event(client, event)
            elif fd in self._kicks:
                _hear(fd)
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
            if len(self._clients) >= self._max_clients:
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
            client = Client(sock)
            self._clients[client.fd] = client
            self._epoll.register(client.fd, _WATCH)
            self._porch.came(client, time.monotonic())
            self.counts["clients"] += 1

    def _client_event(self, client: Client, event: int) -> None:
        stream = client.stream
        if client.line is not None:
            self._greet(client)
            return
        client.readable = True
        if stream is None or not (stream.open or stream.gone):
            if event & _ENDED:  # it does not wait for the guest any more
                if stream is not None:
                    self._table.abort(stream)
                self._close(client)
            return
        if event & _ENDED and not client.deaf:
            self._deafen(client)
            self._settle(client)
        elif event & _OUT:
            self._write_kept(client)
        self._enqueue(client)

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

    # ---- the host's end

    def _close(self, client: Client) -> None:
        """Closes the host's end, whatever is kept for it."""
        if self._clients.pop(client.fd, None) is None:
            return
        self._porch.left(client)
        client.sock.close()  # and so is out of the epoll: nobody else holds it
        client.kept.clear()
        client.ended = client.deaf = True
        client.readable = False
        if client.stream is not None:
            self._table.host_closed(client.stream)
        if not self._listening and self._listen_again is None:
            self._listen(True)

    def _deafen(self, client: Client) -> None:
        """The client does not read any more: what is kept for it is for nobody."""
        assert client.stream is not None
        client.deaf = True
        self._table.forwarded(client.stream, len(client.kept))
        client.kept.clear()
        self._table.host_deaf(client.stream)

    def _refuse_input(self, client: Client) -> None:
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

    def _settle(self, client: Client) -> None:
        """Draws the conclusions after one way of a stream has ended."""
        stream = client.stream
        assert stream is not None
        if not client.kept:
            if stream.gone:
                self._close(client)
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
            self._close(client)

    def _deliver(self, client: Client, pieces: list[memoryview], total: int) -> None:
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
                self._deafen(client)
                self._settle(client)
                return
            self.counts["to_host"] += done
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
            self._epoll.modify(client.fd, _WATCH | _OUT)

    def _write_kept(self, client: Client) -> None:
        stream = client.stream
        assert stream is not None
        while client.kept:
            try:
                done = client.sock.send(client.kept)
            except BlockingIOError:
                return
            except OSError:
                self._deafen(client)
                break
            del client.kept[:done]
            self.counts["to_host"] += done
            self._table.forwarded(stream, done)
        if client.watched_out:
            client.watched_out = False
            self._epoll.modify(client.fd, _WATCH)
        self._settle(client)

    def _enqueue(self, client: Client) -> None:
        if client.readable and not client.queued and not client.ended:
            stream = client.stream
            if stream is not None and stream.credit():
                client.queued = True
                self._ready.append(client)

    # ---- a turn

    def _turn(self) -> bool:
        """Moves what can be moved. True when there is more that can be moved at once."""
        rx = self._queues[vhost.RX] if self._enabled[vhost.RX] else None
        tx = self._queues[vhost.TX] if self._enabled[vhost.TX] else None
        try:
            if tx is not None:
                self._receive(tx)
            if rx is not None:
                self._tell(rx)
                self._fill(rx)
                self._tell(rx)  # of clients that ended
            self._show()
            return (tx is not None and not self._table.congested and tx.pending() > 0) or (
                rx is not None
                and (len(self._ready) > 0 or self._table.has_control)
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

    def _receive(self, tx: Queue) -> None:
        """Takes packets of the guest's. Successive data of one stream goes out in one call."""
        table = self._table
        heads: list[int] = []
        pieces: list[memoryview] = []
        total = 0
        last: Client | None = None
        try:
            while len(heads) < BATCH and not table.congested and tx.pending():
                head, buffers = tx.take()
                heads.append(head)
                first = buffers[0]
                if len(first) < HEADER_BYTES:
                    first, buffers = _gather(buffers)
                    if len(first) < HEADER_BYTES:
                        table.strays += 1
                        continue
                fields = _unpack(first)
                payload = len(first) - HEADER_BYTES
                for buffer in buffers[1:]:
                    payload += len(buffer)
                stream, effect = table.packet(fields, payload)
                if stream is None:
                    continue
                client: Client | None = stream.host
                if last is not None and (client is not last or effect & ~(DATA | CREDIT)):
                    self._deliver(last, pieces, total)
                    last, pieces, total = None, [], 0
                if client is None:
                    if effect & DATA:
                        table.forwarded(stream, fields[4])
                    continue
                if effect & DATA:
                    left = fields[4]
                    if len(first) > HEADER_BYTES:
                        buffers[0] = first[HEADER_BYTES:]
                        start = 0
                    else:
                        start = 1
                    if len(pieces) + len(buffers) > PIECES and last is not None:
                        self._deliver(last, pieces, total)
                        pieces, total = [], 0
                    total += left
                    for buffer in buffers[start:] if start else buffers:
                        size = len(buffer)
                        if size >= left:
                            if left:
                                pieces.append(buffer if size == left else buffer[:left])
                            break
                        pieces.append(buffer)
                        left -= size
                    last = client
                elif effect & ~CREDIT:
                    self._effect(client, stream, effect)
                if effect & CREDIT and not client.queued:
                    self._enqueue(client)
        finally:
            if last is not None:
                self._deliver(last, pieces, total)
            for head in heads:
                tx.push(head, 0)

    def _receive_all(self, tx: Queue) -> None:
        """Takes what lies in the queue, but not for ever."""
        for _ in range(MAX_SIZE // BATCH + 1):
            if self._table.congested or not tx.pending():
                return
            self._receive(tx)

    def _effect(self, client: Client, stream: Stream, effect: int) -> None:
        if effect & OPENED:
            line = accepted(stream.host_port)
            try:
                done = client.sock.send(line)
            except OSError:
                done = 0
            if done < len(line):  # nothing was ever written to it, so it is gone
                self._table.abort(stream)
                self._close(client)
            return
        if effect & (DEAF | GONE) and not client.ended:
            self._refuse_input(client)
            self._table.host_ended(stream)
        self._settle(client)

    def _tell(self, rx: Queue) -> None:
        table = self._table
        while table.has_control and rx.pending():
            head, buffers = rx.take()
            packet = table.control()
            if packet is None:
                rx.put_back(1)
                return
            _scatter(buffers, packet)
            rx.push(head, HEADER_BYTES)

    def _fill(self, rx: Queue) -> None:
        """Reads clients into buffers of the guest's, each at most once."""
        ready = self._ready
        for _ in range(len(ready)):
            if not rx.pending():
                return
            client = ready.popleft()
            client.queued = False
            if client.ended:
                continue
            self._read(client, rx)
            self._enqueue(client)

    def _read(self, client: Client, rx: Queue) -> None:
        stream = client.stream
        assert stream is not None
        credit = stream.credit()
        if not credit:
            return
        taken: list[tuple[int, list[memoryview], int]] = []
        pieces: list[memoryview] = []
        left = credit
        count = min(rx.pending(), client.burst)
        while count and left:
            count -= 1
            head, buffers = rx.take()
            room = 0
            skip = HEADER_BYTES
            for buffer in buffers:
                size = len(buffer)
                if skip:
                    if size <= skip:
                        skip -= size
                        continue
                    size -= skip
                    if size > left:
                        pieces.append(buffer[skip : skip + left])
                        size = left
                    else:
                        pieces.append(buffer[skip:])
                    skip = 0
                elif size > left:
                    size = left
                    if size:
                        pieces.append(buffer[:size])
                else:
                    pieces.append(buffer)
                room += size
                left -= size
            if skip or not room:
                raise RingError("a buffer without room for data")
            taken.append((head, buffers, room))
        try:
            got = client.sock.recvmsg_into(pieces[:PIECES])[0]
        except BlockingIOError:
            client.readable = False
            client.burst = FIRST_BURST
            rx.put_back(len(taken))
            return
        except OSError:  # reset: it closed without reading what we had written
            got = 0
            self._deafen(client)
        if not got:
            rx.put_back(len(taken))
            client.ended = True
            self._table.host_ended(stream)
            self._settle(client)
            return
        used = 0
        rest = got
        write_header = self._table.write_header
        for head, buffers, room in taken:
            if room > rest:
                room = rest
            rest -= room
            first = buffers[0]
            if len(first) >= HEADER_BYTES:
                write_header(first, stream, room)
            else:
                packet = bytearray(HEADER_BYTES)
                write_header(memoryview(packet), stream, room)
                _scatter(buffers, packet)
            rx.push(head, HEADER_BYTES + room)
            used += 1
            if not rest:
                break
        if used < len(taken):
            rx.put_back(len(taken) - used)
            client.burst = used + 1
        else:
            client.burst = min(BURST, 2 * used)
        self._table.sent(stream, got)
        self.counts["to_guest"] += got

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
            fds = _descriptors(ancillary)
            if not untrusted:
                _close_all(fds)
                return False
            if flags & socket.MSG_CTRUNC:
                _close_all(fds)
                raise vhost.LinkError("too many descriptors")
            try:
                message = self._parser.feed(untrusted, fds)
            except vhost.LinkError:
                _close_all(self._parser.take_fds())
                raise
            if message is not None:
                self._obey(message)
        return True

    def _obey(self, message: vhost.Message) -> None:
        try:
            actions, answer = self._link.message(message)
        except vhost.LinkError:
            _close_all(message.fds)
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
            self._memory = _map(action.regions)
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
                self._receive_all(queue)
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
                self._refuse_input(client)
                self._settle(client)

    def _farewell(self) -> None:
        """The VMM is gone. What its guest had said is still in the memory that we share."""
        tx = self._queues[vhost.TX]
        try:
            if tx is not None:
                self._receive_all(tx)
        except RingError as error:
            self._broken = str(error)
        self._epoll.unregister(self._link_socket)
        self._listen(False)
        self._listen_again = time.monotonic() + FAREWELL_SECONDS  # so that nothing listens again
        end = self._listen_again
        self._end_streams()
        for client in list(self._clients.values()):
            if not client.kept:
                self._close(client)
        while self._clients and (left := end - time.monotonic()) > 0:
            for fd, event in self._epoll.poll(left, 256):
                client = self._clients.get(fd)
                if client is None:
                    continue
                if event & _ENDED:
                    self._close(client)
                elif event & _OUT:
                    self._write_kept(client)


def _gather(buffers: list[memoryview]) -> tuple[memoryview, list[memoryview]]:
    """A packet whose header lies in several buffers: its header, and the rest behind it.

    The header comes back as a copy, in the first place of the list as well.
    """
    data = bytearray()
    rest: list[memoryview] = []
    for buffer in buffers:
        missing = HEADER_BYTES - len(data)
        if missing:
            data += buffer[:missing]
            buffer = buffer[missing:]
        if len(buffer):
            rest.append(buffer)
    first = memoryview(data)
    return first, [first, *rest]


def _scatter(buffers: list[memoryview], packet: bytes | bytearray) -> None:
    """Writes a header into the buffers of the guest's.

    Raises:
        RingError: there is no room.
    """
    at = 0
    for buffer in buffers:
        count = min(len(buffer), len(packet) - at)
        buffer[:count] = packet[at : at + count]
        at += count
        if at == len(packet):
            return
    raise RingError("a buffer without room for a header")


def _hear(fd: int) -> None:
    """Takes the ring of a bell.

    Raises:
        LinkError: it is no bell.
    """
    try:
        if not os.read(fd, 8):
            raise vhost.LinkError("a bell that has ended")
    except BlockingIOError:
        pass  # it was rung and heard before
    except OSError as error:
        raise vhost.LinkError(f"a bell that cannot be heard: {error.strerror}") from error


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _map(regions: tuple[vhost.Shared, ...]) -> Memory:
    """Maps the guest's memory.

    Only files that cannot shrink are taken: reading beyond the end of a file would kill us.

    Raises:
        LinkError: a file is not what it should be.
    """
    mapped = []
    try:
        for region in regions:
            skip = region.offset % mmap.ALLOCATIONGRANULARITY
            try:
                if not fcntl.fcntl(region.fd, _F_GET_SEALS) & _F_SEAL_SHRINK:
                    raise vhost.LinkError("memory that could be taken away")
                area = mmap.mmap(region.fd, region.size + skip, offset=region.offset - skip)
            except (OSError, ValueError, OverflowError) as error:
                raise vhost.LinkError(f"memory that cannot be mapped: {error}") from error
            view = memoryview(area)[skip:]
            mapped.append(Region(region.guest, region.user, view))
    finally:
        _close_all([region.fd for region in regions])
    return Memory(mapped)
