"""``python -I -m agent_box.netstack.worker --ctl-fd N --ready-fd N --instance ID --restarts N``

One process for each machine that runs: it moves the packets of one instance, and outlives the
service that tells it what to allow. The machine's shim starts it in a jail of its own, with a
listening control socket and a pipe, on which ``READY\\n`` says that it serves.

It keeps what it was told last: while no service is there it goes on under that policy, and
keeps what it has to report until it is acknowledged. Before the first policy nothing passes.
The newest controller wins. Standard error is the machine's log.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Final, Protocol

from agent_box.netstack import control, rights, seal
from agent_box.netstack.contract import Applied, Counters, Forward, Policy
from agent_box.netstack.masking import masked
from agent_box.netstack.policy import PolicyInvalid

USAGE: Final = 64
UNSEALED: Final = 71
BROKER: Final = "/broker/sock"  # in the jail
UNSENT_MAX: Final = 8 << 20  # bytes that a controller may leave unread
RECORD: Final = struct.Struct("<QII")  # of a captured packet: ns since the epoch, length, lost
CAPTURE_BYTES: Final = 4 << 20
# What a plane reports, as events.
KINDS: Final = {"Denied": "flow-denied", "Revoked": "flow-revoked", "Limited": "flow-limited"}
_OPTIONS: Final = ("--ctl-fd", "--ready-fd", "--instance", "--restarts")


class Plane(Protocol):
    """All of one instance's network; `plane.Plane` is one."""

    @property
    def linked(self) -> bool: ...
    def fileno(self) -> int: ...
    def run(self) -> float | None: ...
    def link(self, sock: socket.socket | None) -> None: ...
    def apply(self, policy: Policy) -> int: ...
    def counters(self) -> Counters: ...
    def forward_add(self, listener: socket.socket, guest_port: int) -> None: ...
    def forward_remove(self, host_port: int) -> None: ...
    def capture(self, sink: Callable[[bytes, float], bool] | None, snap: int) -> None: ...
    def close(self) -> None: ...


Make = Callable[[Policy, Callable[[Any], None]], Plane]


class Worker:
    """Args:
    listener: of controllers.
    make: a plane under a policy, which reports to the function; raises `PolicyInvalid`.
    """

    def __init__(
        self, instance: str, listener: socket.socket, make: Make, *, restarts: int = 0
    ) -> None:
        self._instance = instance
        self._listener = listener
        self._make = make
        self._restarts = restarts
        self._epoch = os.urandom(16)
        self._plane: Plane | None = None
        self._boot: int | None = None
        self._name: str | None = None
        self._policy: Policy | None = None
        self._linked = False
        self._forwards: list[Forward] = []
        self._captures: list[_Capture] = []
        self._notices: deque[control.Notice] = deque()
        self._seq = 0
        self._lost = 0
        self._controller: _Controller | None = None
        self._poll = select.epoll()
        listener.setblocking(False)
        self._poll.register(listener.fileno(), select.EPOLLIN)

    def run(self) -> None:
        """For as long as the process lives."""
        wait: float | None = None
        while True:
            wait = self.turn(wait)

    def turn(self, wait: float | None) -> float | None:
        """Handles what is ready within `wait` seconds, and returns the next wait."""
        for fd, events in self._poll.poll(-1 if wait is None else wait):
            if fd == self._listener.fileno():
                self._accept()
            elif self._controller is not None and fd == self._controller.sock.fileno():
                self._serve(self._controller, events)
        if self._plane is None:
            return None
        again = self._plane.run()
        if self._linked and not self._plane.linked:
            self._linked = False
            self._tell(control.Unlinked())
        return again

    # ------------------------------------------------------------------ controllers

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it is gone again
        self._drop()
        sock.setblocking(False)
        self._controller = _Controller(sock)
        self._poll.register(sock.fileno(), select.EPOLLIN)
        self._tell(
            control.Hello(
                version=control.VERSION,
                instance=self._instance,
                epoch=self._epoch,
                restarts=self._restarts,
                boot=self._boot,
                name=self._name,
                policy=self._policy,
                linked=self._linked,
                forwards=list(self._forwards),
            )
        )
        for notice in self._notices:
            self._tell(notice)

    def _drop(self) -> None:
        if self._controller is not None:
            self._poll.unregister(self._controller.sock.fileno())
            self._controller.close()
            self._controller = None

    def _serve(self, controller: _Controller, events: int) -> None:
        try:
            if events & ~select.EPOLLOUT:
                for message in controller.read():
                    self._obey(controller, message)
            self._flush(controller)
        except (OSError, control.ControlError) as error:
            if str(error):
                say(f"the controller is gone: {error}")
            if controller is self._controller:
                self._drop()

    def _tell(self, message: control.FromWorker) -> None:
        controller = self._controller
        if controller is None:
            return
        controller.unsent += control.frame(message)
        try:
            self._flush(controller)
        except OSError:
            self._drop()

    def _flush(self, controller: _Controller) -> None:
        waits = controller.flush()
        mask = select.EPOLLIN | (select.EPOLLOUT if waits else 0)
        if mask != controller.mask:
            controller.mask = mask
            self._poll.modify(controller.sock.fileno(), mask)

    # ------------------------------------------------------------------ what is asked

    def _obey(self, controller: _Controller, message: Any) -> None:
        if isinstance(message, control.Ack):
            while self._notices and self._notices[0].seq <= message.seq:
                self._notices.popleft()
            return
        fd = controller.descriptor() if isinstance(message, control.BRINGS) else None
        try:
            self._tell(_TABLE[type(message)](self, message, fd))
        except (_No, PolicyInvalid, OSError) as error:
            self._tell(control.Refused(n=message.n, why=str(error)))

    def _up(self, message: control.Up, _fd: None) -> control.Done:
        if self._boot == message.boot and self._policy is not None:
            return self._put_in_force(message.n, message.policy)
        plane = self._make(message.policy, self._report)
        self._end()
        self._plane, self._policy = plane, message.policy
        self._boot, self._name = message.boot, message.name
        self._poll.register(plane.fileno(), select.EPOLLIN)
        return self._applied(message.n, 0)

    def _apply(self, message: control.Apply, _fd: None) -> control.Done:
        return self._put_in_force(message.n, message.policy)

    def _put_in_force(self, n: int, policy: Policy) -> control.Done:
        plane, before = self._there()
        if policy.generation < before.generation:
            raise _No(f"generation {before.generation} is in force, which is newer")
        if policy == before:
            return self._applied(n, 0)
        if policy.generation == before.generation and policy.rules != before.rules:
            raise _No(f"generation {before.generation} is in force with other rules")
        revoked = plane.apply(policy)
        self._policy = policy
        return self._applied(n, revoked)

    def _applied(self, n: int, revoked: int) -> control.Done:
        assert self._policy is not None
        applied = Applied(generation=self._policy.generation, revoked=revoked)
        return control.Done(n=n, applied=applied, counters=None)

    def _down(self, message: control.Down, _fd: None) -> control.Done:
        self._end()
        return control.Done(n=message.n, applied=None, counters=None)

    def _end(self) -> None:
        if self._plane is not None:
            self._poll.unregister(self._plane.fileno())
            self._plane.close()
        for capture in self._captures:
            capture.close()
        self._captures.clear()
        self._forwards.clear()
        self._plane = self._policy = self._boot = None
        self._linked = False

    def _link(self, message: control.Link, fd: int) -> control.Done:
        sock = socket.socket(fileno=fd)
        if self._plane is None:
            sock.close()
            raise _No("there is no policy yet")
        sock.setblocking(False)
        self._plane.link(sock)
        self._linked = True
        return control.Done(n=message.n, applied=None, counters=None)

    def _count(self, message: control.Count, _fd: None) -> control.Done:
        plane, _ = self._there()
        return control.Done(n=message.n, applied=None, counters=plane.counters())

    def _listen(self, message: control.Listen, fd: int) -> control.Done:
        listener = socket.socket(fileno=fd)
        if self._plane is None:
            listener.close()
            raise _No("there is no policy yet")
        listener.setblocking(False)
        self._plane.forward_add(listener, message.forward.guest_port)
        self._forwards.append(message.forward)
        return control.Done(n=message.n, applied=None, counters=None)

    def _unlisten(self, message: control.Unlisten, _fd: None) -> control.Done:
        plane, _ = self._there()
        port = message.host_port
        if any(each.host_port == port for each in self._forwards):
            plane.forward_remove(port)
            self._forwards = [each for each in self._forwards if each.host_port != port]
        return control.Done(n=message.n, applied=None, counters=None)

    def _there(self) -> tuple[Plane, Policy]:
        if self._plane is None or self._policy is None:
            raise _No("there is no policy yet")
        return self._plane, self._policy

    # ------------------------------------------------------------------ captures

    def _capture(self, message: control.Capture, fd: int) -> control.Done:
        sink = socket.socket(fileno=fd)
        if self._plane is None or len(self._captures) >= control.CAPTURES_MAX:
            sink.close()
            raise _No(
                "there is no policy yet"
                if self._plane is None
                else f"{control.CAPTURES_MAX} captures of the instance are under way"
            )
        sink.setblocking(False)
        sink.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CAPTURE_BYTES)
        self._captures.append(_Capture(sink, message.snap))
        self._show()
        return control.Done(n=message.n, applied=None, counters=None)

    def _show(self) -> None:
        """Tells the plane what is to be seen: all that the longest capture wants."""
        assert self._plane is not None
        snap = max((capture.snap for capture in self._captures), default=0)
        self._plane.capture(self._packet if snap else None, snap)

    def _packet(self, packet: bytes, at: float) -> bool:
        shown = masked(bytes(packet))
        taken = True
        for capture in list(self._captures):
            try:
                taken = capture.take(shown, len(packet), at) and taken
            except OSError:  # its reader is gone
                capture.close()
                self._captures.remove(capture)
                self._show()
        return taken

    # ------------------------------------------------------------------ reports

    def _report(self, report: Any) -> None:
        """Kept until it is acknowledged; the oldest of too many are counted and given up."""
        kind = KINDS.get(type(report).__name__)
        if kind is None or not is_dataclass(report):
            return
        facts: dict[str, control.Fact] = {}
        for field in fields(report):
            value = getattr(report, field.name)
            if isinstance(value, str | int | bool):
                facts[field.name] = value[:200] if isinstance(value, str) else value
        self.notice(kind, facts)

    def notice(self, kind: str, facts: dict[str, control.Fact]) -> None:
        if len(self._notices) >= control.NOTICES_MAX:
            self._notices.popleft()
            self._lost += 1
        if self._lost and len(self._notices) < control.NOTICES_MAX // 2:
            lost, self._lost = self._lost, 0
            self._keep("denials-dropped", {"count": lost})
        self._keep(kind, facts)

    def _keep(self, kind: str, facts: dict[str, control.Fact]) -> None:
        self._seq += 1
        notice = control.Notice(seq=self._seq, kind=kind, facts=facts)
        self._notices.append(notice)
        self._tell(notice)


_TABLE: Final[dict[type, Callable[[Worker, Any, Any], control.Done]]] = {
    control.Up: Worker._up,
    control.Down: Worker._down,
    control.Apply: Worker._apply,
    control.Link: Worker._link,
    control.Count: Worker._count,
    control.Listen: Worker._listen,
    control.Unlisten: Worker._unlisten,
    control.Capture: Worker._capture,
}


class _No(Exception):
    """What was asked cannot be done. One line, for the controller."""


class _Controller:
    """One connection of a service."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.mask = int(select.EPOLLIN)
        self.unsent = bytearray()
        self._reader = control.Reader(worker=True)
        self._fds: deque[int] = deque()

    def read(self) -> list[Any]:
        """Raises:
        OSError: the connection is over.
        ControlError: so it should be.
        """
        try:
            untrusted, fds = rights.receive(self.sock)
        except BlockingIOError:
            return []
        self._fds += fds
        if not untrusted:
            raise ConnectionError("")
        if len(self._fds) > control.FDS_MAX:
            raise control.ControlError("too many descriptors")
        return list(self._reader.feed(untrusted))

    def descriptor(self) -> int:
        """The next one. Raises ControlError."""
        if not self._fds:
            raise control.ControlError("a descriptor is missing")
        return self._fds.popleft()

    def flush(self) -> bool:
        """Whether something is left to be sent. Raises OSError."""
        if len(self.unsent) > UNSENT_MAX:
            raise ConnectionError("it does not read")
        try:
            while self.unsent:
                del self.unsent[: self.sock.send(self.unsent)]
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        rights.close(self._fds)
        self._fds.clear()
        self.sock.close()


class _Capture:
    def __init__(self, sink: socket.socket, snap: int) -> None:
        self.snap = snap
        self._sink = sink
        self._lost = 0

    def take(self, packet: bytes, length: int, at: float) -> bool:
        """Whether it was taken. Raises OSError: the reader is gone."""
        head = RECORD.pack(int(at * 1e9), length, self._lost)
        try:
            self._sink.send(head + packet[: self.snap], socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            self._lost = min(self._lost + 1, 0xFFFFFFFF)
            return False
        return True

    def close(self) -> None:
        self._sink.close()


def main(arguments: list[str]) -> int:
    """Runs a worker. `arguments` without the program's name."""
    try:
        values = _parse(arguments)
        listener = socket.socket(fileno=int(values["--ctl-fd"]))
        ready, restarts = int(values["--ready-fd"]), int(values["--restarts"])
        os.set_inheritable(listener.fileno(), False)
        os.set_inheritable(ready, False)
    except (OSError, ValueError) as error:
        say(str(error))
        return USAGE
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    worker = Worker(values["--instance"], listener, plane, restarts=restarts)
    try:
        _import()
        seal.seal()
    except seal.SealError as error:
        say(str(error))
        return UNSEALED
    gc.collect()
    gc.freeze()
    try:
        os.write(ready, b"READY\n")
    except BrokenPipeError:
        pass  # the shim is gone, and the machine's next one takes us over
    os.close(ready)
    worker.run()
    return 0


def plane(policy: Policy, report: Callable[[Any], None]) -> Plane:
    """The real one."""
    from agent_box.netstack.plane import Plane as Real

    made: Plane = Real(policy=policy, broker=BROKER, report=report)
    return made


def _import() -> None:
    """What would be imported later, when nothing can be mapped any more that can be executed."""
    for name in ("encodings.idna", "unicodedata", "agent_box.netstack.plane"):
        importlib.import_module(name)


def _parse(arguments: list[str]) -> dict[str, str]:
    values = dict(zip(arguments[::2], arguments[1::2], strict=False))
    if len(arguments) != 2 * len(_OPTIONS) or set(values) != set(_OPTIONS):
        raise ValueError(f"arguments are {' VALUE '.join(_OPTIONS)} VALUE")
    return values


def say(text: str) -> None:
    """One line for people, unless nobody reads: packets do not wait for a log."""
    try:
        os.write(2, f"worker: {text}\n".encode(errors="replace")[:500])
    except OSError:
        pass  # the log is full or gone


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
