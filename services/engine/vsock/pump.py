"""Moves packets between the queues and the host's ends: the part of a turn that is work.

Data goes straight from the guest's memory into a client's socket and back. The guest may
change it underneath: then it is its own data that changes. Headers are copied first.
"""

from __future__ import annotations

from typing import Final

from agent_box.engine.vsock.hosts import FIRST_BURST, Client, Hosts
from agent_box.engine.vsock.ring import MAX_SIZE, Queue, RingError
from agent_box.engine.vsock.streams import CREDIT, DATA, HEADER_BYTES, Table, header

BURST: Final = 64  # buffers of the guest that one client may fill in one turn
BATCH: Final = 64  # packets of the guest in one turn
PIECES: Final = MAX_SIZE  # of one sendmsg: IOV_MAX

_unpack = header.unpack_from


class Pump:
    """Between the two queues and the clients.

    Attributes:
        to_guest: bytes that were written into the guest's buffers.
    """

    def __init__(self, table: Table, hosts: Hosts) -> None:
        self.to_guest = 0
        self._table = table
        self._hosts = hosts

    def receive(self, tx: Queue) -> None:
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
                    self._hosts.deliver(last, pieces, total)
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
                        self._hosts.deliver(last, pieces, total)
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
                    self._hosts.effect(client, stream, effect)
                if effect & CREDIT and client not in self._hosts.ready:
                    self._hosts.enqueue(client)
        finally:
            if last is not None:
                self._hosts.deliver(last, pieces, total)
            for head in heads:
                tx.push(head, 0)

    def receive_all(self, tx: Queue) -> None:
        """Takes what lies in the queue, but not for ever."""
        for _ in range(MAX_SIZE // BATCH + 1):
            if self._table.congested or not tx.pending():
                return
            self.receive(tx)

    def tell(self, rx: Queue) -> None:
        table = self._table
        while table.has_control and rx.pending():
            head, buffers = rx.take()
            packet = table.control()
            if packet is None:
                rx.put_back(1)
                return
            _scatter(buffers, packet)
            rx.push(head, HEADER_BYTES)

    def fill(self, rx: Queue) -> None:
        """Reads clients into buffers of the guest's, each at most once."""
        ready = self._hosts.ready
        for _ in range(len(ready)):
            if not ready or not rx.pending():
                return
            client, _ = ready.popitem(last=False)
            if not client.ended:
                self._read(client, rx)
                self._hosts.enqueue(client)

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
            self._hosts.deafen(client)
        if not got:
            rx.put_back(len(taken))
            client.ended = True
            self._table.host_ended(stream)
            self._hosts.settle(client)
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
        self.to_guest += got


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
