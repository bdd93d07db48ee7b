"""The helper's socket: who may ask, and that asking wrongly or too much harms nobody else.

Each connection has a thread that reads; what takes long is done in a few others, so that a
slow operation delays no `list`. Replies go out as they are ready.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from agent_box.helper import contract, link, places, proof, wire
from agent_box.helper.ops import Done, Ops
from agent_box.helper.wire import Refused, Request, WireError

BACKLOG: Final = 64
CONNECTIONS: Final = 32
WORKERS: Final = 32
PROOF_S: Final = 5.0  # for a peer to prove itself
SEND_S: Final = 5.0  # for a peer to take an answer
DRAIN_S: Final = 8.0  # for what has begun, at the end
QUICK: Final = frozenset({"dial", "monitor", "list", "console"})  # done by the reading thread


class Server:
    """Args:
    key: that the engine proves itself with.
    peers: the uids that may connect.
    log: takes one line.
    """

    def __init__(
        self,
        directory: int,
        key: bytes,
        peers: frozenset[int],
        log: Callable[[str], object],
    ) -> None:
        self._key = key
        self._peers = peers
        self._log = log
        self._listener = link.listen(directory, places.SOCKET, socket.SOCK_SEQPACKET, BACKLOG)
        self._pool = ThreadPoolExecutor(WORKERS, "op")
        self._connections: set[_Connection] = set()
        self._lock = threading.Lock()
        self._ends: dict[int, Callable[[], None]] = {}
        self._wake_reader, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._ended = False

    def on_end(self, pidfd: int, do: Callable[[], None]) -> None:
        """Does something when a process is dead; closes the pidfd."""
        with self._lock:
            self._ends[pidfd] = do
        self._turn()

    def serve(self, ops: Ops, lifeline: int | None) -> None:
        """Until SIGTERM or the end of the lifeline; then what has begun is finished."""

        def stop(_number: int, _frame: object) -> None:
            self._ended = True
            self._turn()

        # Python runs a handler in this thread alone, and the kernel may give the signal to another
        # one: then nothing would end the poll.
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        while not self._ended:
            poll = select.poll()
            poll.register(self._listener, select.POLLIN)
            poll.register(self._wake_reader, select.POLLIN)
            if lifeline is not None:
                poll.register(lifeline, select.POLLHUP)
            with self._lock:
                for fd in self._ends:
                    poll.register(fd, select.POLLIN)
            for fd, events in poll.poll():
                if fd == self._listener.fileno():
                    self._accept(ops)
                elif fd == self._wake_reader:
                    os.read(fd, 4096)
                elif fd == lifeline:
                    self._ended = bool(events & (select.POLLHUP | select.POLLERR)) or self._ended
                else:
                    self._dead(fd)
        self._close()

    def _turn(self) -> None:
        try:
            os.write(self._wake, b".")
        except BlockingIOError:
            pass  # it is being woken already

    def _dead(self, fd: int) -> None:
        with self._lock:
            do = self._ends.pop(fd)
        os.close(fd)
        self.submit(do)

    def _accept(self, ops: Ops) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # gone again, or no descriptors: others are served
        pid, uid, _ = link.peer(sock)
        with self._lock:
            full = len(self._connections) >= CONNECTIONS
        if uid not in self._peers or full:
            why = "there are too many connections" if full else "another account"
            self._log(f"refused process {pid} of uid {uid}: {why}")
            sock.close()
            return
        connection = _Connection(self, sock, ops, pid)
        with self._lock:
            self._connections.add(connection)
        threading.Thread(target=connection.run, daemon=True, name=f"peer-{pid}").start()

    def _close(self) -> None:
        self._listener.close()
        deadline = time.monotonic() + DRAIN_S
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.drain(deadline)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ for connections

    def prove(self, sock: socket.socket) -> None:
        """Raises:
        WireError: the other is not the engine.
        OSError: it went away, or took too long.
        """
        side = proof.HelperSide(self._key, secrets.token_bytes(proof.CHALLENGE_BYTES))
        _timeouts(sock, PROOF_S, SEND_S)
        link.send(sock, side.hello())
        said, _ = link.receive(sock)
        if not said:
            raise ConnectionResetError("it went away")
        link.send(sock, side.welcome(said))
        _timeouts(sock, 0, SEND_S)

    def submit(self, work: Callable[[], None]) -> None:
        """Does it in another thread. What it raises is a defect, and goes to the log."""

        def do() -> None:
            try:
                work()
            except Exception:  # noqa: BLE001 - the border of this thread
                self._log(f"defect in a thread: {traceback.format_exc()}")

        self._pool.submit(do)

    def gone(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)

    def log(self, text: str) -> None:
        self._log(text)


class _Connection:
    def __init__(self, server: Server, sock: socket.socket, ops: Ops, pid: int) -> None:
        self._server = server
        self._sock = sock
        self._ops = ops
        self._pid = pid
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._busy = 0
        self._over = False

    def run(self) -> None:
        """The whole life of a connection."""
        try:
            self._server.prove(self._sock)
            while self._take():
                pass
        except WireError as error:
            self._server.log(f"process {self._pid}: {error}")
        except OSError:
            pass  # it went away
        finally:
            self._server.gone(self)
            with self._lock:
                self._over = True
                if not self._busy:
                    self._sock.close()

    def drain(self, deadline: float) -> None:
        """No request more is read, and what has begun is finished by `deadline`."""
        with self._idle:
            if not self._over:
                try:
                    self._sock.shutdown(socket.SHUT_RD)
                except OSError:
                    pass  # it went away
            while self._busy and (left := deadline - time.monotonic()) > 0:
                self._idle.wait(left)

    def _take(self) -> bool:
        data, _ = link.receive(self._sock)
        if not data:
            return False
        req, asked = wire.read_request(data)
        if isinstance(asked, WireError):
            self._send(wire.refusal(req, "bad_request", str(asked)), ())
            return True
        with self._lock:
            full = self._busy >= contract.IN_FLIGHT
            if not full:
                self._busy += 1
        if full:
            self._send(wire.refusal(req, "exhausted", "too many requests at once"), ())
        elif asked.op.name in QUICK:
            self._do(asked)
        else:
            self._server.submit(lambda: self._do(asked))
        return True

    def _do(self, asked: Request) -> None:
        fds: tuple[int, ...] = ()
        try:
            try:
                done: Done = self._ops.table[asked.op.name](asked.args)
                fds = done.fds
                answer = wire.reply(asked.req, asked.op, done.reply)
            except Refused as refused:
                answer = wire.refusal(asked.req, refused.code, refused.detail)
            except Exception as error:  # noqa: BLE001 - the border: the defect ends in the log
                defect = secrets.token_hex(4)
                self._server.log(f"defect {defect} in {asked.op.name}: {error!r}")
                self._server.log(traceback.format_exc())
                answer = wire.refusal(asked.req, "internal", f"defect {defect}")
                link.close(fds)
                fds = ()
            self._send(answer, fds)
        except OSError:
            pass  # the peer is gone, or does not read: its next message will not come
        finally:
            link.close(fds)
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()
                if self._over and not self._busy:
                    self._sock.close()

    def _send(self, answer: bytes, fds: tuple[int, ...]) -> None:
        try:
            link.send(self._sock, answer, fds)
        except OSError:
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it is gone already
            raise


def _timeouts(sock: socket.socket, receive_s: float, send_s: float) -> None:
    """Of the kernel's, one for each direction (socket(7)); 0 is none."""
    for option, seconds in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
        value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
        sock.setsockopt(socket.SOL_SOCKET, option, value)
