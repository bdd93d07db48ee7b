"""The agent process: it serves the host's control streams and does what they ask.

One thread and one selector. It may die at any time: PID 1 keeps the listeners and forks
another, which finds the mounts done and its provisioning in /run. Terminals, the network
pump and the harness are served by modules of their own beside this one; a port that nothing
serves yet accepts and closes, so that the host learns at once that nobody is there.
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
from typing import Any, Final

from agent_box.guest import disk, system
from agent_box.guest.control import Action, Session
from agent_box.guest.ports import Inherited
from agent_box.guest.wire import CONTROL_PORT, HOST_CID, FrameError

VERSION: Final = "0.1.0"
SESSIONS_MAX: Final = 16
UNSENT_MAX: Final = 4 << 20  # bytes of replies that a host may leave unread
KEPT: Final = "/run/box/provision.json"  # root's alone, in memory, for the next agent process
GRACE_S: Final = 3.0  # between SIGTERM and SIGKILL at power-off
SUDOERS: Final = disk.ROOT + "/etc/sudoers.d/agent-box"


def main(inherited: Inherited) -> None:
    """Serves until the machine powers off."""
    Agent(inherited).run()


class Agent:
    """The state of this guest as far as the host gave it."""

    def __init__(self, inherited: Inherited) -> None:
        self._selector = selectors.DefaultSelector()
        self._disk = disk.prepare()
        if self._disk.state != "ok":
            system.log(self._disk.text)
        self.provision: dict[str, Any] | None = _kept()
        self._sessions: set[_Stream] = set()
        self._off = False
        for port, listener in inherited.listeners.items():
            serve = self._control if port == CONTROL_PORT else _nobody
            self._selector.register(listener, selectors.EVENT_READ, _accepting(listener, serve))

    def run(self) -> None:
        system.log(f"agent {VERSION} serves; data disk {self._disk.state}")
        while not self._off:
            for key, events in self._selector.select():
                key.data(events)
        _power_off()

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
            "streams": [],
        }

    def _control(self, connection: socket.socket) -> None:
        if len(self._sessions) >= SESSIONS_MAX:
            connection.close()
            return
        self._sessions.add(_Stream(self, connection, self._selector))

    def ended(self, stream: _Stream) -> None:
        self._sessions.discard(stream)

    def perform(self, action: Action) -> dict[str, Any]:
        """Does one operation and returns the fields of its reply.

        Raises:
            OSError: it could not be done; the text goes to the host.
        """
        return _OPERATIONS[action.op](self, action.fields)

    def _provision(self, fields: dict[str, Any]) -> dict[str, Any]:
        off = system.set_clock(fields["time_ns"])
        socket.sethostname(fields["hostname"])
        if self._disk.state == "ok":
            _sudo(fields["sudo"])
            _as_agent(lambda: _write_files(fields["files"]))
        self.provision = {k: v for k, v in fields.items() if k != "time_ns"}
        _keep(self.provision)
        return {"off_ns": off, "now_ns": time.time_ns()}

    def _time(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"off_ns": system.set_clock(fields["time_ns"]), "now_ns": time.time_ns()}

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
_OPERATIONS: Final[dict[str, Callable[[Agent, dict[str, Any]], dict[str, Any]]]] = {
    "provision": Agent._provision,
    "time": Agent._time,
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
        self._flush()

    def _ready(self, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read()
            self._flush()
        except (OSError, FrameError) as error:
            system.log(f"control stream ended: {error}")
            self._close()

    def _read(self) -> None:
        try:
            untrusted = self._connection.recv(65536)
        except BlockingIOError:
            return
        if not untrusted:
            raise OSError("the host closed it")
        for action in self._session.feed(untrusted):
            try:
                self._session.reply(self._agent.perform(action))
            except (OSError, OverflowError, ValueError) as error:
                self._session.refuse(f"{action.op}: {error}")

    def _flush(self) -> None:
        self._unsent += self._session.outgoing()
        if len(self._unsent) > UNSENT_MAX:
            raise OSError("the host does not read")
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self._connection, events, self._ready)

    def _close(self) -> None:
        self._selector.unregister(self._connection)
        self._connection.close()
        self._agent.ended(self)


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
        serve(connection)

    return accept


def _nobody(connection: socket.socket) -> None:
    connection.close()


def _kept() -> dict[str, Any] | None:
    try:
        with open(KEPT) as file:
            kept: dict[str, Any] = json.load(file)
            return kept
    except FileNotFoundError:
        return None


def _keep(provision: dict[str, Any]) -> None:
    fd = os.open(KEPT + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "w") as file:
        json.dump(provision, file)
    os.replace(KEPT + ".new", KEPT)


def _sudo(allowed: bool) -> None:
    if not allowed:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SUDOERS)
        return
    os.makedirs(os.path.dirname(SUDOERS), mode=0o750, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(SUDOERS, flags, 0o440), "w") as file:
        file.write("agent ALL=(ALL:ALL) NOPASSWD: ALL\n")


def _write_files(files: list[dict[str, Any]]) -> None:
    """Runs as the agent in the agent's root, so that no link of the agent's leads us astray."""
    for item in files:
        path = os.path.normpath(item["path"])
        if not path.startswith(disk.HOME + "/"):
            raise OSError(f"{path} is not below {disk.HOME}")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            os.fchmod(fd, item["mode"] & 0o777)
            file.write(item["content"])
        os.replace(path + ".new", path)


def _as_agent(work: Callable[[], None]) -> None:
    """Does `work` in a child that has the agent's root and uid.

    Raises:
        OSError: what the child said.
    """
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            os.chroot(disk.ROOT)
            os.chdir("/")
            os.setgroups([])
            os.setresgid(*[disk.AGENT_UID] * 3)
            os.setresuid(*[disk.AGENT_UID] * 3)
            work()
        except Exception as error:  # noqa: BLE001 - told to the parent, which raises it
            os.write(theirs, str(error).encode()[:1000])
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as file:
        said = file.read()
    os.waitpid(pid, 0)
    if said:
        raise OSError(said.decode(errors="replace"))


def _power_off() -> None:
    system.log("powering off")
    for name, seconds in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, name)  # all but PID 1 and this process
        if _all_gone(seconds):
            break
    try:
        disk.release()
    except OSError as error:
        system.log(f"data disk: {error}")
    system.power_off()


def _all_gone(seconds: float) -> bool:
    """Waits for every other process of user space to end."""
    poll = select.poll()
    waiting = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (1, os.getpid()):
            with contextlib.suppress(OSError):  # it ended meanwhile, or
                os.readlink(f"/proc/{name}/exe")  # it is a kernel thread, which has none
                fd = os.pidfd_open(int(name))
                waiting[fd] = name
                poll.register(fd, select.POLLIN)
    until = time.monotonic() + seconds
    while waiting and (left := until - time.monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000):
            poll.unregister(fd)
            del waiting[fd]
            os.close(fd)
    return not waiting
