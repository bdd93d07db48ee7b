"""The agent process: it serves the host's control streams and does what they ask.

One thread and one selector. It may die at any time: PID 1 keeps the listeners and forks
another, which finds the mounts done and its provisioning in /run/box. What could block it,
because it touches files that the agent's uid owns, is done in a child with a deadline.
Terminals, the network pump and the harness are served by modules of their own beside this
one; a port that nothing serves yet accepts and closes, so that the host learns at once that
nobody is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable

from agent_box.guest import claims, disk, environment, files, processes, streams, system, timer
from agent_box.guest.control import Action, Session
from agent_box.guest.events import Events, Watch
from agent_box.guest.harness import Harnesses
from agent_box.guest.hook import Hook
from agent_box.guest.loop import Loop
from agent_box.guest.ports import Inherited
from agent_box.guest.streams import Refused
from agent_box.guest.terminal import Terminals
from agent_box.guest.warnings import Warnings
from agent_box.guest.wire import CONTROL_PORT, HOST_CID, FrameError

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from typing import Any, Final

VERSION: Final = "0.1.0"
SESSIONS_MAX: Final = 16
UNSENT_MAX: Final = 4 << 20  # bytes of replies that a host may leave unread
KEPT: Final = "/run/box/provision.json"  # root's alone, in memory, for the next agent process
CHILD_S: Final = 20.0  # for what is done as the agent
GRACE_S: Final = 3.0  # between SIGTERM and SIGKILL at power-off
SUDOERS: Final = "/etc/sudoers.d/agent-box"  # in the agent's root


def main(inherited: Inherited) -> None:
    """Serves until the machine powers off."""
    system.spare(-1000)
    processes.prepare()
    Agent(inherited).run()


class Agent:
    """The state of this guest as far as the host gave it."""

    def __init__(self, inherited: Inherited) -> None:
        self._loop = Loop()
        self._disk = disk.prepare()
        if self._disk.text:
            system.log(self._disk.text)
        self.provision = _kept()
        self._last_ns = 0  # of the host's boot clock: nothing older than this is obeyed
        self._streams: dict[_Stream, None] = {}  # oldest first
        self._off = False
        self._terminals = Terminals(self._loop, self._surroundings)
        self._harnesses = Harnesses(self._loop, self._surroundings)
        self._events = Events(self._loop)
        self._events.phase("serves")
        self._watch = Watch(self._loop, self._events, disk.DATA)
        self._warnings = Warnings(self._loop, self._events, disk.ROOT + "/run")
        self._hook: Hook | None = None  # of this provisioning, when this process began it
        self._hook_waits: list[_Stream] = []
        self._asking: _Stream | None = None  # whose operation is being done
        if self.provision is not None:
            self._begin_hook(self.provision)
        served = {
            CONTROL_PORT: self._control,
            streams.PORT: self._terminals.serve,
            streams.HARNESS_PORT: self._harnesses.serve,
            claims.EVENTS_PORT: self._events.serve,
        }
        for port, listener in inherited.listeners.items():
            accept = _accepting(listener, served.get(port, _nobody))
            self._loop.register(listener, selectors.EVENT_READ, accept)

    def run(self) -> None:
        system.log(f"agent {VERSION} serves; data disk {self._disk.state}")
        while not self._off:
            self._loop.turn()
        power_off()

    def greeting(self) -> dict[str, Any]:
        """The fields of our hello: what the host needs to know before it asks for anything."""
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot_id = file.read().strip()
        return {
            "guest": VERSION,
            "boot_id": boot_id,
            "boot": None if self.provision is None else self.provision["boot"],
            "disk": {
                "state": self._disk.state,
                "bytes": self._disk.bytes,
                "text": self._disk.text,
            },
            "timer": timer.rate(),
            "streams": [],
        }

    def _control(self, connection: socket.socket) -> None:
        """A new stream. When there are too many, the oldest was left behind by a host process
        that is gone: the newest is the one that somebody waits for."""
        while len(self._streams) >= SESSIONS_MAX:
            next(iter(self._streams)).end("too many streams")
        stream = _Stream(self, connection, self._loop)
        self._streams[stream] = None
        stream.begin()

    def ended(self, stream: _Stream) -> None:
        self._streams.pop(stream, None)

    def _surroundings(self) -> tuple[list[tuple[str, str]], dict[str, str]] | None:
        if self.provision is None or self._disk.state != "ok":
            raise Refused("wrong-state", "the guest is not provisioned")
        if self._hook is not None and self._hook.state == "running":
            return None
        return _variables(self.provision), self.provision.get("exported", {})

    def _begin_hook(self, provision: dict[str, Any]) -> None:
        """Once for each provisioning: an agent process after this one finds what it exported."""
        wanted = provision["hook"]
        if wanted is None or "exported" in provision or self._disk.state != "ok":
            return
        self._hook = Hook(self._loop, self._hook_settled)
        before = environment.build("agent", _variables(provision), {}, (), None)
        self._hook.begin(wanted["path"], before, expected=wanted["expected"])

    def _hook_settled(self) -> None:
        assert self.provision is not None and self._hook is not None
        self.provision["exported"] = self._hook.exported
        _keep(self.provision)
        waiting, self._hook_waits = self._hook_waits, []
        for stream in waiting:
            if stream in self._streams:
                stream.answer(self._hook_ended())
        self._terminals.settled()
        self._harnesses.settled()
        self._events.phase("hook")

    def _hook_ended(self) -> dict[str, Any]:
        if self._hook is None:
            return {"state": "none", "line": ""}
        return {"state": self._hook.state, "line": self._hook.text}

    def perform(self, action: Action, stream: _Stream) -> dict[str, Any] | None:
        """Does one operation and returns the fields of its reply; None: they come later.

        Raises:
            OSError: it could not be done; the text goes to the host.
        """
        self._asking = stream
        return _OPERATIONS[action.op](self, action.fields)

    def _provision(self, fields: dict[str, Any]) -> dict[str, Any]:
        off = self._set_clock(fields)
        socket.sethostname(fields["hostname"])
        if self._disk.state == "ok":
            wanted = fields["files"]
            in_root(lambda: _settle(fields["hostname"], sudo=fields["sudo"]), uid=0)
            if wanted:
                in_root(lambda: files.write(wanted), uid=disk.AGENT_UID)
        again = self.provision is not None and self.provision["boot"] == fields["boot"]
        exported = self.provision.get("exported") if again and self.provision else None
        self.provision = {k: v for k, v in fields.items() if k not in ("time_ns", "at_ns")}
        if exported is not None:
            self.provision["exported"] = exported
        _keep(self.provision)
        if not again:
            self._events.phase("provisioned")
        if not (again and self._hook is not None):
            self._begin_hook(self.provision)
        return {"off_ns": off, "now_ns": time.time_ns()}

    def _time(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"off_ns": self._set_clock(fields), "now_ns": time.time_ns()}

    def _set_clock(self, fields: dict[str, Any]) -> int:
        """A request that lay in a paused machine must not set the clock back after one that
        was sent when it ran again."""
        if fields["at_ns"] < self._last_ns:
            raise OSError("it is older than the last that was done")
        self._last_ns = fields["at_ns"]
        return system.set_clock(fields["time_ns"])

    def _await_hook(self, _: dict[str, Any]) -> dict[str, Any] | None:
        if self._hook is None or self._hook.state != "running":
            return self._hook_ended()
        assert self._asking is not None
        self._hook_waits.append(self._asking)
        return None

    def _trim(self, _: dict[str, Any]) -> dict[str, Any]:
        if self._disk.state != "ok":
            raise OSError(self._disk.text)
        return {"bytes": system.trim(disk.DATA)}

    def _poweroff(self, _: dict[str, Any]) -> dict[str, Any]:
        self._off = True
        return {}

    def _ping(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"now_ns": time.time_ns()}


# Dispatch is from this table alone; control.OPERATIONS says what the fields must be.
_OPERATIONS: Final[dict[str, Callable[[Agent, dict[str, Any]], dict[str, Any] | None]]] = {
    "provision": Agent._provision,
    "time": Agent._time,
    "hook": Agent._await_hook,
    "trim": Agent._trim,
    "poweroff": Agent._poweroff,
    "ping": Agent._ping,
}


class _Stream:
    """One control connection."""

    def __init__(
        self, agent: Agent, connection: socket.socket, selector: selectors.BaseSelector
    ) -> None:
        self._agent = agent
        self._connection = connection
        self._selector = selector
        self._session = Session(agent.greeting())
        self._unsent = bytearray()
        selector.register(connection, selectors.EVENT_READ, self._ready)

    def begin(self) -> None:
        """Sends what there is to be said first."""
        self._ready(0)

    def end(self, why: str) -> None:
        system.log(f"control stream ended: {why}")
        self._selector.unregister(self._connection)
        self._connection.close()
        self._agent.ended(self)

    def answer(self, fields: dict[str, Any]) -> None:
        """The reply that came later."""
        self._session.reply(fields)
        self._ready(0)

    def _ready(self, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read()
            self._flush()
        except (OSError, FrameError) as error:
            self.end(str(error))

    def _read(self) -> None:
        try:
            untrusted = self._connection.recv(65536)
        except BlockingIOError:
            return
        if not untrusted:
            raise OSError("the host closed it")
        for action in self._session.feed(untrusted):
            try:
                fields = self._agent.perform(action, self)
                if fields is not None:
                    self._session.reply(fields)
            except Exception as error:  # noqa: BLE001 - the host is told, and the others served
                why = str(error) or type(error).__name__
                self._session.refuse(f"{action.op}: {why}")

    def _flush(self) -> None:
        self._unsent += self._session.outgoing()
        if len(self._unsent) > UNSENT_MAX:
            raise OSError("the host does not read")
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self._connection, events, self._ready)


def _accepting(
    listener: socket.socket, serve: Callable[[socket.socket], None]
) -> Callable[[int], None]:
    def accept(_: int) -> None:
        try:
            connection, (cid, _port) = listener.accept()
        except OSError as error:
            system.log(f"accept: {error}")  # the dialler gave up, or we are out of descriptors
            return
        connection.setblocking(False)
        if cid != HOST_CID:
            connection.close()  # a process of the guest; only the host is ever heard
            return
        try:
            serve(connection)
        except OSError as error:
            system.log(f"a stream could not be served: {error}")
            connection.close()

    return accept


def _nobody(connection: socket.socket) -> None:
    connection.close()


def _variables(provision: dict[str, Any]) -> list[tuple[str, str]]:
    return [(v["name"], v["value"]) for v in provision["environment"]]


def _kept() -> dict[str, Any] | None:
    """What the agent process before this one was given; None when that cannot be told."""
    try:
        with open(KEPT) as file:
            kept = json.load(file)
        if type(kept["boot"]) is int:
            return dict(kept)
        raise ValueError("no boot")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        system.log(f"what was provisioned is lost: {type(error).__name__}")
        return None


def _keep(provision: dict[str, Any]) -> None:
    fd = os.open(KEPT + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "w") as file:
        json.dump(provision, file)
    os.replace(KEPT + ".new", KEPT)


def _settle(hostname: str, *, sudo: bool) -> None:
    """Runs as root in the agent's root: what of /etc depends on the provisioning."""
    hosts = f"127.0.0.1 localhost\n127.0.1.1 {hostname}\n::1 localhost ip6-localhost\n"
    files.replace("/etc/hostname", f"{hostname}\n", 0o644)
    files.replace("/etc/hosts", hosts, 0o644)
    if sudo:
        os.makedirs(os.path.dirname(SUDOERS), mode=0o750, exist_ok=True)
        files.replace(SUDOERS, "agent ALL=(ALL:ALL) NOPASSWD: ALL\n", 0o440)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SUDOERS)


def in_root(work: Callable[[], None], *, uid: int) -> None:
    """Does `work` in a child that has the agent's root, and that uid and gid.

    What the agent left there, a pipe or a file system of its own, may block the child: after
    `CHILD_S` it is killed.

    Raises:
        OSError: what the child said, or that it did not end.
    """
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            system.spare(0)
            os.chroot(disk.ROOT)
            os.chdir("/")
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            work()
            status = 0
        except BaseException as error:  # noqa: BLE001 - told to the parent, which raises it
            os.write(theirs, f"{error}".encode(errors="replace")[:1000])
        finally:
            os._exit(status)
    os.close(theirs)
    with open(ours, "rb", buffering=0) as file:
        ended, _, _ = select.select([file], [], [], CHILD_S)
        said = file.read(1000) if ended else b"it took too long"
    if not ended:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if status:
        raise OSError((said or b"it ended at once").decode(errors="replace"))


def power_off() -> None:
    """Ends every process, makes the data disk clean and powers off, in bounded time but for
    what the disk itself takes. Never returns."""
    system.log("powering off")
    try:
        for name, seconds in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, name)  # all but PID 1 and this process
            if _all_gone(seconds):
                break
        disk.release()
    except Exception as error:  # noqa: BLE001 - whatever it is, the machine goes off
        system.log(f"at the end: {type(error).__name__}: {error}")
    finally:
        system.power_off()


def _all_gone(seconds: float) -> bool:
    """Waits for every other process of user space to end."""
    poll = select.poll()
    waiting = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, os.getpid()):
            with contextlib.suppress(OSError):  # it ended meanwhile, or
                os.readlink(f"/proc/{name}/exe")  # it is a kernel thread, which has none
                fd = os.pidfd_open(int(name))
                waiting.add(fd)
                poll.register(fd, select.POLLIN)
    until = time.monotonic() + seconds
    while waiting and (left := until - time.monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000):
            poll.unregister(fd)
            waiting.discard(fd)
            os.close(fd)
    for fd in waiting:
        os.close(fd)
    return not waiting
