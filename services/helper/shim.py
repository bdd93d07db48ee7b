"""`python -I -m agent_box.helper.shim`: one per running machine, which outlives the helper.

It is given on standard input one JSON object (`Order`), and descriptors that the object names.
It makes the machine's sockets, starts the vsock device, the network worker and then QEMU, each
in its jail, writes down each process before it lets it go on, and says once on the note pipe
how that went. Then it copies the console into a log of limited size, ends the machine when its
device ends, starts another worker when that ends, records how the machine ended, and ends
itself when all is gone. It holds the lock of the instance's
directory as long as it lives.

On `ctl` in the machine's room, a directory that only the helper reaches, it takes two words:
`kill`, and `watch`, which comes with the writing end of a pipe.

Signals that would end it are ignored. When it is killed nevertheless, the machine runs on, and
the helper starts another one that adopts it, for which only the console and the exit code are
lost.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from agent_box.helper import (
    bpf,
    capped,
    contract,
    jail,
    link,
    machine,
    places,
    procs,
    record,
    wire,
)
from agent_box.helper.jail import Jail
from agent_box.helper.procs import Proc
from agent_box.helper.record import Record

DEVICE_MODULE: Final = "agent_box.engine.vsock.__main__"
WORKER_MODULE: Final = "agent_box.netstack.worker"
WORKER_CTL: Final = "ctl"  # in the worker's room
WORKER_AGAIN_S: Final = (0.0, 0.2, 1.0, 5.0)  # the wait before the next one, longer each time
WORKER_STEADY_S: Final = 30.0  # one that lived this long is started again at once
DEVICE_BROKEN: Final = 65  # its exit code when the machine broke their protocol, or off
VSOCK: Final = "vsock"
QMP: Final = "qmp"
CTL: Final = "ctl"
VSOCK_BACKLOG: Final = 4096  # the kernel takes less, if somaxconn says so
READY_S: Final = 25.0  # for each process, from its start until it says that it serves
LAST_S: Final = 3.0  # for what ends by itself after the machine
DEAD_S: Final = 10.0  # for what was killed
CHUNK: Final = 65536
_ORDER: Final = contract.Struct(
    (
        ("v", contract.Int(1, 1)),
        ("adopt", contract.Bool()),
        ("id", contract.ID),
        ("launch_id", contract.LAUNCH),
        ("profile", contract.Maybe(contract.PROFILE)),  # null with adopt
        ("images", contract.Many(contract.Struct(
            (("name", contract.Text(20)), ("path", contract.Text(4096)))), 5)),
        ("disk_bytes", contract.Int(0, contract.MAX_DISK)),
        ("tsc_khz", contract.Maybe(contract.Int(1, 1 << 40))),
        ("lock", contract.Int(3, 1 << 20)),
        ("note", contract.Int(3, 1 << 20)),
        ("instance", contract.Int(3, 1 << 20)),  # open directories
        ("room", contract.Int(3, 1 << 20)),
        ("worker_room", contract.Int(3, 1 << 20)),
        ("broker", contract.Text(4096)),  # directories that the worker sees
        ("host_files", contract.Text(4096)),
    )
)  # fmt: skip


class LaunchError(Exception):
    """A process of the machine did not come up. One line for a person.

    Args:
        code: of the contract.
    """

    def __init__(self, why: str, code: str = "launch_failed") -> None:
        super().__init__(why)
        self.code = code


class Started(NamedTuple):
    """A process in its jail, not yet let go.

    Attributes:
        outer: bubblewrap, our child, which tells how `inner` ended.
        inner: the program itself.
        status: what bubblewrap says of it, a pipe.
        gate: a line here lets it go on.
    """

    name: str
    outer: Proc
    inner: Proc
    status: int
    gate: int


class Shim:
    """One machine. Nothing here waits for a peer without a bound but the main loop."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._note: int | None = order["note"]
        self._directories = (order["instance"], order["room"])
        self._record = Record(order["launch_id"], "starting", procs.boot_id(), {})
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._started: dict[str, Started] = {}
        self._handles: dict[str, int] = {}
        self._gates: list[int] = []  # those that are still shut
        self._watchers: list[int] = []
        self._killed_by: str | None = None
        self._messages: capped.Writer | None = None
        self._console: capped.Writer | None = None
        self._ctl: socket.socket | None = None
        self._worker_ctl: socket.socket | None = None
        self._worker_due = 0.0  # when the next one is started, while there is none
        self._worker_since = 0.0
        self._worker_deaths = 0
        self._starting = not order["adopt"]

    # ------------------------------------------------------------------ starting

    def launch(self) -> None:
        """Starts everything.

        Raises:
            LaunchError: something did not start; all that did is dead.
        """
        order, profile = self._order, self._order["profile"]
        self._messages = capped.Writer(order["instance"], capped.MESSAGES)
        self._console = capped.Writer(order["instance"], capped.CONSOLE)
        self._set(procs={"shim": procs.find(os.getpid())})
        room = order["room"]
        vsock = link.listen(room, VSOCK, socket.SOCK_STREAM, VSOCK_BACKLOG)
        qmp = link.listen(room, QMP, socket.SOCK_STREAM, 1)
        self._listen()
        device_end, vmm_end = socket.socketpair()
        console, console_end = socket.socketpair()
        ready, ready_end = os.pipe()
        device = self._start(
            "device",
            jail.device(order["id"], profile["memory_mib"]),
            jail.python(
                DEVICE_MODULE,
                *("--vhost-fd", str(jail.FIRST_FD), "--listen-fd", str(jail.FIRST_FD + 1)),
                *("--ready-fd", str(jail.FIRST_FD + 2), "--cid", str(machine.CID)),
            ),
            (device_end.fileno(), vsock.fileno(), ready_end),
        )
        os.close(ready_end)
        device_end.close()
        vsock.close()
        self._go(device)
        self._until_said(ready, device)
        os.close(ready)
        worker_ready, worker = self._start_worker()

        flags = os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            data = os.open(places.DATA, os.O_RDWR | flags, dir_fd=order["instance"])
            data_read = os.open(places.DATA, os.O_RDONLY | flags, dir_fd=order["instance"])
        except OSError as error:
            why = f"its data disk cannot be opened: {error.strerror}"
            raise LaunchError(why, "launch_failed") from error
        qemu = machine.program()
        if qemu is None:
            raise LaunchError("qemu-system-x86_64 is missing: install qemu-system-x86")
        vmm = self._start(
            "vmm",
            jail.vmm(
                order["id"],
                [(image["name"], image["path"]) for image in order["images"]],
                kvm=profile["accel"] == "kvm",
                memory_mib=profile["memory_mib"],
                disk=order["disk_bytes"],
            ),
            machine.command(qemu, profile, order["tsc_khz"]),
            (vmm_end.fileno(), qmp.fileno(), console_end.fileno(), data, data_read),
        )
        os.close(data)
        os.close(data_read)
        for end in (vmm_end, qmp, console_end):
            end.close()
        self._listen_to(console.detach(), self._console)
        monitor = link.connect(room, QMP, socket.SOCK_STREAM)
        self._go(vmm)
        # It greets while it still makes the machine, but does what it is asked after that. What
        # it says is not looked at.
        self._until_said(monitor.fileno(), vmm)
        try:
            monitor.send(b'{"execute":"qmp_capabilities"}\n')
        except BrokenPipeError:
            pass  # it ended, and then says nothing either
        self._until_said(monitor.fileno(), vmm)
        monitor.close()
        self._until_said(worker_ready, worker)
        os.close(worker_ready)
        self._starting = False
        self._set(state="running")

    def adopt(self) -> None:
        """Takes over what another shim left.

        Raises:
            LaunchError: there is nothing to be taken over.
        """
        found = record.read(self._directories)
        if found is None or found.launch_id != self._order["launch_id"]:
            raise LaunchError("there is no such launch")
        if found.state not in ("starting", "running"):
            raise LaunchError(f"the launch is {found.state}")
        self._record = found
        if found.state == "starting" or not found.lives("vmm"):
            raise LaunchError("its machine does not run")
        self._messages = capped.Writer(self._order["instance"], capped.MESSAGES, anew=False)
        self._listen()
        self._set(procs={**found.procs, "shim": procs.find(os.getpid())})
        for name in ("device", "vmm", "worker"):
            proc = self._record.procs.get(name)
            fd = None if proc is None else procs.handle(proc)
            if fd is not None:
                self._handles[name] = fd

    def _start_worker(self) -> tuple[int, Started]:
        """Lets it go; from the pipe comes a line when it serves. Whoever connects meanwhile
        is served then.

        Raises:
            LaunchError: it cannot be started.
        """
        order = self._order
        if self._worker_ctl is None:
            listener = link.listen(order["worker_room"], WORKER_CTL, socket.SOCK_STREAM, 16)
            self._worker_ctl = listener
        try:
            wanted = jail.worker(order["id"], order["broker"], order["host_files"])
        except ImportError as error:
            raise LaunchError(str(error)) from error
        ready, ready_end = os.pipe()
        try:
            worker = self._start(
                "worker",
                wanted,
                jail.python(
                    WORKER_MODULE,
                    *("--ctl-fd", str(jail.FIRST_FD), "--ready-fd", str(jail.FIRST_FD + 1)),
                    *("--instance", order["id"], "--restarts", str(self._record.restarts)),
                ),
                (self._worker_ctl.fileno(), ready_end),
            )
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(ready_end)
        self._worker_since = time.monotonic()
        self._go(worker)
        return ready, worker

    def _worker_ended(self) -> None:
        """Its flows are gone. The machine runs on, and gets another one."""
        os.close(self._handles.pop("worker"))
        started = self._started.pop("worker", None)
        if started is not None:
            os.close(started.status)
        self._reap("worker_jail")
        steady = time.monotonic() - self._worker_since > WORKER_STEADY_S
        self._worker_deaths = 0 if steady else self._worker_deaths
        wait = WORKER_AGAIN_S[min(self._worker_deaths, len(WORKER_AGAIN_S) - 1)]
        self._worker_deaths += 1
        self._worker_due = time.monotonic() + wait

    def _restart_worker(self) -> None:
        self._set(restarts=min(self._record.restarts + 1, (1 << 31) - 1))
        try:
            ready, _ = self._start_worker()
        except (LaunchError, OSError) as error:
            self.note(f"shim: the worker does not start: {error}\n")
            if "worker" in self._handles:
                procs.send_signal(self._handles["worker"], signal.SIGKILL)
            else:
                self._worker_deaths += 1
                self._worker_due = time.monotonic() + WORKER_AGAIN_S[-1]
            return
        self._on(ready, lambda: self._off(ready))

    def _reap(self, name: str) -> None:
        """What kept a jail whose program is dead, if it is our child."""
        outer = self._record.procs.get(name)
        procs.end_jail(outer, patience=LAST_S, seconds=DEAD_S)
        try:
            if outer is not None:
                os.waitpid(outer.pid, os.WNOHANG)
        except ChildProcessError:
            pass  # the child of the shim before this one

    def _start(self, name: str, wanted: Jail, argv: Sequence[str], given: Sequence[int]) -> Started:
        """A process at its gate, written down, within its limits.

        Raises:
            LaunchError: its jail cannot be built.
        """
        try:
            program = wanted.filter()
        except bpf.FilterError as error:
            raise LaunchError(str(error)) from error
        filter_fd = os.memfd_create("filter", os.MFD_CLOEXEC)
        os.write(filter_fd, program)
        os.lseek(filter_fd, 0, os.SEEK_SET)
        status, status_end = jail.status_pipe()
        gate_end, gate = os.pipe()
        self._gates.append(gate)
        words, words_end = os.pipe()
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        try:
            pid = procs.spawn(
                jail.command(wanted, argv),
                (null, words_end, words_end, filter_fd, status_end, gate_end, *given),
            )
        finally:
            link.close((filter_fd, status_end, gate_end, words_end, null))
        outer = procs.find(pid)
        self._set(procs={**self._record.procs, f"{name}_jail": outer})
        assert self._messages is not None
        self._listen_to(words, self._messages)
        inner = self._inner(name, pid, status)
        if outer is None:
            raise LaunchError(f"the jail of the {name} ended at once{self._last_words()}")
        started = Started(name, outer, inner, status, gate)
        jail.limit(inner.pid, wanted)
        self._set(procs={**self._record.procs, name: inner})
        self._started[name] = started
        handle = procs.handle(inner)
        if handle is None:
            raise LaunchError(f"the {name} ended at its gate{self._last_words()}")
        self._handles[name] = handle
        return started

    def _inner(self, name: str, outer: int, status: int) -> Proc:
        """The process in the jail, as bubblewrap tells it on its status pipe."""
        said = b""
        deadline = time.monotonic() + READY_S
        while b"}" not in said:
            self._turn(deadline, status)
            more = os.read(status, CHUNK)
            if not more:
                raise LaunchError(f"the jail of the {name} cannot be built{self._last_words()}")
            said += more
            if time.monotonic() > deadline or len(said) > CHUNK:
                raise LaunchError(f"the jail of the {name} is not there in time")
        untrusted = json.loads(said.split(b"\n")[0])
        found = procs.find(int(untrusted["child-pid"]))
        if found is None:
            raise LaunchError(f"the {name} ended at its gate{self._last_words()}")
        return found

    def _go(self, started: Started) -> None:
        try:
            os.write(started.gate, jail.GO)
        except BrokenPipeError:
            pass  # whoever waits for its word will see that it ended
        self._gates.remove(started.gate)
        os.close(started.gate)

    def _until_said(self, fd: int, started: Started) -> None:
        """Until a line comes, meanwhile doing all else.

        Raises:
            LaunchError: the process ended, or says nothing.
        """
        deadline = time.monotonic() + READY_S
        said = b""
        while not said.endswith(b"\n") and len(said) < CHUNK:
            ready = self._turn(deadline, fd, self._handles[started.name])
            more = _read_some(fd) if fd in ready else b""
            said += more
            if ready and not more:
                self._drain()
                raise LaunchError(f"the {started.name} ended at once{self._last_words()}")
            if time.monotonic() > deadline:
                raise LaunchError(f"the {started.name} is not ready in {READY_S:.0f} s")

    def _last_words(self) -> str:
        self._drain()
        _, end, _ = capped.read(self._order["instance"], capped.MESSAGES, 0, 0)
        _, _, data = capped.read(self._order["instance"], capped.MESSAGES, max(0, end - 600), 600)
        said = wire.line(data.decode(errors="replace"), 600)
        return f": {said}" if said else ""

    # ------------------------------------------------------------------ living

    def live(self) -> None:
        """Until the machine is gone and recorded."""
        vmm, device = self._handles.get("vmm"), self._handles.get("device")
        if device is None:
            self._kill("device-died")
        while vmm is not None:
            worker = self._handles.get("worker")
            if worker is None and time.monotonic() >= self._worker_due:
                self._restart_worker()
                continue
            waited = tuple(fd for fd in (vmm, device, worker) if fd is not None)
            ready = self._turn(None if worker is not None else self._worker_due, *waited)
            if device in ready and self._device_failed():
                self._killed_by = self._killed_by or "device-died"
            if vmm in ready:
                break
            if worker in ready:
                self._worker_ended()
            if device in ready:
                device = None
                # When a machine ends, its device may be gone first, and is not to blame.
                if self._killed_by is not None or not self._pump((vmm,), LAST_S):
                    self._kill("device-died")
        self._finish()

    def _device_failed(self) -> bool:
        """Whether the device ended for another reason than that the machine did."""
        code, number = self._status("device")
        return number is not None or code not in (None, 0, DEVICE_BROKEN)

    def _kill(self, by: str) -> None:
        if self._killed_by is None:
            self._killed_by = by
        if "vmm" in self._handles:
            procs.send_signal(self._handles["vmm"], signal.SIGKILL)

    def _finish(self) -> None:
        """The machine is dead: everything else ends too, and it is written down."""
        if "worker" in self._handles:  # it waits for nothing but us
            procs.send_signal(self._handles["worker"], signal.SIGKILL)
        rest = [fd for name, fd in self._handles.items() if name != "vmm"]
        if not self._pump(rest, LAST_S):
            for fd in rest:
                procs.send_signal(fd, signal.SIGKILL)
            self._pump(rest, DEAD_S)
        code, number = self._status("vmm")
        if self._killed_by is not None:
            by = self._killed_by
        else:
            by = "guest" if code == 0 else "vmm"
        self._drain()
        record.end(self._record.procs, DEAD_S)
        at_ms = time.time_ns() // 1_000_000
        ended = {"code": code, "signal": number, "by": by, "at_ms": at_ms}
        self._set(state="exited", exit=ended)

    def _status(self, name: str) -> tuple[int | None, int | None]:
        """Exit code or signal of one that is dead; None twice when nobody saw."""
        started = self._started.get(name)
        if started is None:
            return None, None
        said = b""
        deadline = time.monotonic() + LAST_S
        while not re.search(rb'"exit-code": *\d+ *\}', said):
            if started.status not in self._turn(deadline, started.status):
                return self._adopted_status(name)  # bubblewrap was stopped
            more = os.read(started.status, CHUNK)
            if not more:
                return self._adopted_status(name)  # bubblewrap was killed
            said += more
        status = int(re.findall(rb'"exit-code": *(\d+)', said)[0])
        return (None, status - 128) if status > 128 else (status, None)

    def _adopted_status(self, name: str) -> tuple[int | None, int | None]:
        """Without bubblewrap between us, it is our own child to wait for."""
        try:
            found = os.waitid(os.P_PIDFD, self._handles[name], os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return None, None
        if found is None:
            return None, None
        if found.si_code == os.CLD_EXITED:
            return found.si_status, None
        return None, found.si_status

    def abandon(self, why: str, code: str) -> None:
        """The launch failed: all that was started is killed, and that is written down."""
        self._drain()
        for gate in self._gates:
            os.close(gate)
        self._gates.clear()
        record.end(self._record.procs, DEAD_S)
        self._set(state="failed", error=why)
        self._tell(code, why)

    # ------------------------------------------------------------------ the loop

    def _turn(self, deadline: float | None, *waited: int) -> set[int]:
        """Handles what comes, until a descriptor of `waited` can be read or the time is up."""
        for fd in waited:
            self._poll.register(fd, select.POLLIN)
        try:
            while True:
                left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
                events = self._poll.poll(left)
                found = {fd for fd, _ in events if fd in waited}
                for fd, _ in events:
                    if fd not in waited:
                        self._handle(fd)
                if self._starting and self._killed_by is not None:
                    raise LaunchError("it was killed while it started")
                if found or (deadline is not None and time.monotonic() >= deadline):
                    return found
        finally:
            for fd in waited:
                self._poll.unregister(fd)

    def _pump(self, handles: Sequence[int], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        left = set(handles)
        while left:
            left -= (ready := self._turn(deadline, *left))
            if not ready:
                return False
        return True

    def _drain(self) -> None:
        """What lies ready everywhere, without waiting for more."""
        for _ in range(64):
            events = self._poll.poll(0)
            known = [fd for fd, _ in events if fd in self._handlers]
            for fd in known:
                self._handle(fd)
            if not known:
                return

    def _handle(self, fd: int) -> None:
        handler = self._handlers.get(fd)
        if handler is None:
            return  # another one closed it
        try:
            handler()
        except OSError as error:  # of one peer; it must not end the machine's keeper
            self.note(f"shim: {error}\n")

    def _on(self, fd: int, handler: Callable[[], None]) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, select.POLLIN)

    def _off(self, fd: int) -> None:
        del self._handlers[fd]
        self._poll.unregister(fd)
        os.close(fd)

    def _listen_to(self, fd: int, log: capped.Writer) -> None:
        os.set_blocking(fd, False)

        def take() -> None:
            try:
                data = os.read(fd, CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                log.write(data)
            else:
                self._off(fd)

        self._on(fd, take)

    # ------------------------------------------------------------------ being asked

    def _listen(self) -> None:
        self._ctl = link.listen(self._order["room"], CTL, socket.SOCK_SEQPACKET, 16)
        self._ctl.setblocking(False)
        self._on(self._ctl.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._ctl is not None
        try:
            client, _ = self._ctl.accept()
        except OSError:
            return  # gone again
        if link.peer(client)[1] != os.geteuid():
            client.close()
            return
        client.setblocking(False)
        self._on(client.fileno(), lambda: self._asked(client))

    def _asked(self, client: socket.socket) -> None:
        try:
            word, fds = link.receive(client, 1)
        except BlockingIOError:
            return
        except (wire.WireError, OSError):
            word, fds = b"", []
        if word == b"kill" and not fds:
            self._kill("kill")
            return  # the end of the connection is the answer
        try:
            if word == b"watch" and len(fds) == 1:
                os.set_blocking(fds[0], False)
                link.send(client, b"ok")
                self._watchers.append(fds.pop())
        finally:
            link.close(fds)
            self._off(client.detach())

    # ------------------------------------------------------------------ being known

    def _set(self, **fields: Any) -> None:
        self._record = self._record.change(**fields)
        problems = record.write(self._directories, self._record)
        if problems and self._record.state == "starting":
            full = problems[0].errno in (errno.ENOSPC, errno.EDQUOT)
            why = f"the state cannot be written: {problems[0].strerror}"
            raise LaunchError(why, "exhausted" if full else "launch_failed")
        if self._record.state in ("running", "exited"):
            for fd in list(self._watchers):
                try:
                    os.write(fd, b".")
                except BlockingIOError:
                    continue  # what it has not read says the same
                except OSError:
                    self._watchers.remove(fd)
                    os.close(fd)

    def running(self) -> None:
        self._tell("", "")

    def leave(self, code: str, why: str) -> None:
        """There was nothing to adopt, and nothing is changed."""
        self._tell(code, why)

    def note(self, text: str) -> None:
        """Into the log of the machine's programs."""
        if self._messages is not None:
            self._messages.write(text.encode())

    def _tell(self, code: str, why: str) -> None:
        """Once: how it went; without a code well."""
        if self._note is None:
            return
        try:
            os.write(self._note, json.dumps({"code": code, "why": why}).encode() + b"\n")
        except BrokenPipeError:
            pass  # the helper is gone; the next one finds the record
        os.close(self._note)
        self._note = None


def _read_some(fd: int) -> bytes:
    """Empty at the end, however that came."""
    try:
        return os.read(fd, CHUNK)
    except (ConnectionResetError, BrokenPipeError):
        return b""


def read_order(data: bytes) -> dict[str, Any]:
    """Raises:
    wire.WireError: that is none.
    """
    order: dict[str, Any] = wire.check(_ORDER, wire.decode(data))
    if order["adopt"] != (order["profile"] is None):
        raise wire.WireError("a profile is for a launch")
    return order


def main() -> int:
    for number in procs.IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)
    os.chdir("/")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    order = read_order(sys.stdin.buffer.read())
    for name in ("lock", "note", "instance", "room", "worker_room"):
        os.set_inheritable(order[name], False)
    # So that a machine whose bubblewrap was killed is ours to wait for.
    procs.prctl(procs.PR_SET_CHILD_SUBREAPER, 1)
    shim = Shim(order)

    def live() -> None:
        shim.running()
        shim.live()

    return keep(shim, adopt=order["adopt"], until=live)


def keep(shim: Shim, *, adopt: bool, until: Callable[[], None]) -> int:
    """Starts or adopts a machine, and then does `until`.

    Returns:
        The exit status: 1 when nothing was started or adopted, and that was told.
    """
    try:
        if adopt:
            shim.adopt()
        else:
            shim.launch()
    except (LaunchError, OSError, ValueError) as error:
        code = error.code if isinstance(error, LaunchError) else "launch_failed"
        if adopt:
            shim.leave(code, wire.line(str(error)))
        else:
            shim.abandon(wire.line(str(error)), code)
        return 1
    except Exception:  # noqa: BLE001 - the border: a defect ends in the machine's messages
        import traceback

        shim.note(traceback.format_exc())
        if not adopt:
            shim.abandon("a defect; the machine's messages tell", "internal")
        return 1
    until()
    return 0


if __name__ == "__main__":
    sys.exit(main())
