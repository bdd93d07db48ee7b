"""The operations. Each is safe to be asked again, and to be cut off by a kill at any point:
what is then left is shown by `list`, and removed by `release`.

Calls for one instance wait for each other; for different ones they do not.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import functools
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from agent_box.helper import capped, contract, disk, link, places, procs, record, shim, wire
from agent_box.helper.images import Images
from agent_box.helper.places import Places
from agent_box.helper.probe import Probe
from agent_box.helper.record import Record
from agent_box.helper.wire import Refused

Args = dict[str, Any]
LAUNCH_S: Final = 55.0
KILL_S: Final = 8.0  # for the shim to do it; then we do
DEAD_S: Final = 10.0
SETTLE_S: Final = 5.0  # for a shim that is ending
PAGE: Final = 64
LIST_BYTES: Final = 48 << 10  # of states in one answer; a single one is always less
GONE: Final = "its directory or data disk is gone: put it back, or delete the instance"
START_FREE: Final = 4 << 20  # on the disk: what a start writes itself, and a guest at once


class Mode(NamedTuple):
    """What differs between the helper of an operator and that of a host.

    Attributes:
        name: ``user`` or ``system``.
        peers: the accounts that may connect.
    """

    name: str
    peers: frozenset[int]


def user_mode() -> Mode:
    return Mode("user", frozenset({os.geteuid()}))


class Done(NamedTuple):
    reply: dict[str, Any]
    fds: tuple[int, ...] = ()  # whoever sends them closes them


class _Turns:
    """Of those who want the same instance."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wanted = 0


class Ops:
    """Every operation of the contract, on open directories.

    Args:
        log: takes one line for people.
        on_end: takes a pidfd, which then is its own, and what to do when that process is dead.
    """

    def __init__(
        self,
        mode: Mode,
        found: Places,
        *,
        log: Callable[[str], object],
        on_end: Callable[[int, Callable[[], None]], object],
    ) -> None:
        self._mode = mode
        self._places = found
        self._images = Images(found)
        self._images_lock = threading.Lock()
        self._probe = Probe(mode.name, found)
        self._log = log
        self._on_end = on_end
        self._locks: dict[str, _Turns] = {}
        self._locks_lock = threading.Lock()
        self.table: dict[str, Callable[[Args], Done]] = {
            "probe": self.probe,
            "allocate": self.allocate,
            "launch": self.launch,
            "dial": self.dial,
            "monitor": self.monitor,
            "watch": self.watch,
            "console": self.console,
            "kill": self.kill,
            "list": self.list_,
            "release": self.release,
        }
        assert self.table.keys() == wire.OPS.keys()

    # ------------------------------------------------------------------ operations

    def probe(self, _args: Args) -> Done:
        return Done(self._probe.run())

    def allocate(self, args: Args) -> Done:
        name, size = args["id"], args["disk_bytes"]
        with self._alone(name):
            new = places.absent(self._places.instances, name)
            try:
                self._make_disk(name, size)
            except (OSError, Refused) as error:
                if new:
                    with contextlib.suppress(OSError):  # it is `partial` then, and told
                        places.remove(self._places.instances, name)
                if isinstance(error, OSError):
                    raise _host(error, "the instance's directory cannot be made") from error
                raise
            return Done(self._state(name))

    def _make_disk(self, name: str, size: int) -> None:
        os.close(places.make(self._places.instances, name))
        with self._places.instance(name) as directory:
            there = disk.size(directory)
            if there is None:
                disk.make(directory, size)
            elif there != size:
                raise Refused("conflict", f"its data disk has {there} bytes, not {size}")

    def launch(self, args: Args) -> Done:
        name, launch_id, profile = args["id"], args["launch_id"], args["profile"]
        with self._alone(name), self._directories(name) as (directory, room):
            before = self._settled(name, directory, room)
            if before is not None and before.launch_id == launch_id:
                if before.state == "failed":
                    raise Refused("launch_failed", before.error or "")
                return Done(self._state(name))
            if before is not None and before.state in ("starting", "running"):
                raise Refused("conflict", f"launch {before.launch_id} is {before.state}")
            size = disk.size(directory)
            if size is None:
                raise Refused("not_found", GONE)
            self._refuse_too_much(directory, profile)
            lock = self._lock(directory, SETTLE_S)
            if lock is None:
                raise Refused("unavailable", "its last shim has not ended yet")
            try:
                order = {
                    "profile": profile,
                    "images": self._image_paths(profile),
                    "disk_bytes": size,
                    "tsc_khz": self._probe.tsc_khz() if profile["accel"] == "tcg" else None,
                }
                self._start_shim(name, launch_id, lock, directory, room, order)
            finally:
                os.close(lock)
            return Done(self._state(name))

    def dial(self, args: Args) -> Done:
        return Done({}, (self._connect(args, shim.VSOCK).detach(),))

    def monitor(self, args: Args) -> Done:
        return Done({}, (self._connect(args, shim.QMP).detach(),))

    def watch(self, args: Args) -> Done:
        with self._connect(args, shim.CTL, kind=socket.SOCK_SEQPACKET) as ctl:
            reader, writer = os.pipe()
            try:
                ctl.settimeout(contract_deadline("watch") / 2)
                link.send(ctl, b"watch", (writer,))
                word, _ = link.receive(ctl)
                if word != b"ok":
                    raise Refused("unavailable", "its shim ends")
            except (OSError, wire.WireError) as error:
                os.close(reader)
                raise Refused("unavailable", "its shim does not answer") from error
            except Refused:
                os.close(reader)
                raise
            finally:
                os.close(writer)
        return Done(self._state(args["id"]), (reader,))

    def console(self, args: Args) -> Done:
        with self._directories(args["id"], rooms=False) as (directory, room):
            found = record.read(fd for fd in (directory, room) if fd >= 0)
            start, end, data = capped.read(
                directory, capped.CONSOLE, args["offset"], contract.CONSOLE_BYTES
            )
        return Done(
            {
                "launch_id": None if found is None else found.launch_id,
                "offset": start,
                "end": end,
                "data": base64.b64encode(data).decode(),
            }
        )

    def kill(self, args: Args) -> Done:
        name = args["id"]
        with (
            self._alone(name),
            self._directories(name, rooms=False, missing_ok=True) as (directory, room),
        ):
            if directory < 0 and room < 0:
                raise Refused("not_found", name)
            found = record.read(fd for fd in (directory, room) if fd >= 0)
            if found is None or found.launch_id != args["launch_id"]:
                raise Refused("conflict", _which(found))
            if found.state in ("starting", "running"):
                self._end_launch(found, directory, room)
            return Done(self._state(name))

    def list_(self, args: Args) -> Done:
        after = args["after"] or ""
        names = [name for name in self._places.ids() if name > after]
        states: list[dict[str, Any]] = []
        room = LIST_BYTES
        for name in names[:PAGE]:
            state = self._state(name)
            room -= len(json.dumps(state))
            if states and room < 0:
                break
            states.append(state)
        return Done({"instances": states, "more": len(names) > len(states)})

    def release(self, args: Args) -> Done:
        name = args["id"]
        with self._alone(name):
            with self._directories(name, rooms=False, missing_ok=True) as (directory, room):
                self._refuse_living(directory, room)
            try:
                gone = [places.remove(fd, name) for fd in self._places.roles.values()]
                gone.append(
                    places.remove(
                        self._places.instances, name, frozenset({places.LOCK, record.FILE})
                    )
                )
            except OSError as error:
                raise _host(error, f"{error.filename or name} cannot be removed") from error
            if not all(gone) or self._anything(name):
                raise Refused("host", "something was made anew while it was removed")
        return Done({})

    # ------------------------------------------------------------------ at the start

    def recover(self) -> None:
        """Finds again what runs, and gives a new shim to each machine that has none."""
        for name in self._places.ids():
            try:
                with self._alone(name), self._directories(name, missing_ok=True) as (d, room):
                    found = self._settled(name, d, room) if d >= 0 else None
                    shim_proc = None if found is None else found.procs.get("shim")
                    # One that we started just now is watched already.
                    if found is not None and found.state == "running" and shim_proc is not None:
                        handle = procs.handle(shim_proc)
                        if handle is not None:
                            self._on_end(handle, functools.partial(self._shim_ended, name))
            except Refused as refused:
                self._log(f"{name}: {refused}")

    # ------------------------------------------------------------------ parts

    def _refuse_too_much(self, directory: int, profile: dict[str, Any]) -> None:
        wanted = profile["memory_mib"] << 20
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if wanted > there:
            raise Refused("exhausted", f"the host has {there >> 20} MiB of memory")
        free = os.fstatvfs(directory)
        if free.f_bavail * free.f_frsize < START_FREE:
            raise Refused("exhausted", "the host's disk is full")

    def _refuse_living(self, directory: int, room: int) -> None:
        """A machine that runs is not released; what a crash left of one is ended first."""
        held = [fd for fd in (directory, room) if fd >= 0]
        found = record.read(held)
        if found is not None and found.state == "running" and found.lives("vmm"):
            raise Refused("precondition", "its machine is running")
        if directory < 0:
            if found is not None and not found.end(DEAD_S):
                raise Refused("unavailable", "a process of it does not end")
            return
        lock = self._lock(directory, SETTLE_S)
        if lock is None:
            raise Refused("unavailable", "its shim has not ended yet")
        try:
            found = record.read(held)
            if found is not None and not found.end(DEAD_S):
                raise Refused("unavailable", "a process of it does not end")
        finally:
            os.close(lock)

    def _settled(self, name: str, directory: int, room: int) -> Record | None:
        """What was written down, made true: a launch whose shim is gone is finished, or the
        machine gets a new shim. With a shim that lives nothing is done."""
        found = record.read((directory, room))
        if found is None or found.state not in ("starting", "running"):
            return found
        lock = self._lock(directory)
        if lock is None:
            return found
        try:
            found = record.read((directory, room))
            assert found is not None
            if found.state == "running" and found.lives("vmm"):
                self._log(f"{name}: its shim is gone, another takes over")
                order: Args = {"profile": None, "images": [], "disk_bytes": 0, "tsc_khz": None}
                try:
                    self._start_shim(name, found.launch_id, lock, directory, room, order)
                except Refused:
                    if found.lives("vmm"):
                        raise
                    self._conclude(found, (directory, room), None)
            elif found.state in ("starting", "running"):
                self._conclude(found, (directory, room), None)
        finally:
            os.close(lock)
        return record.read((directory, room))

    def _conclude(self, found: Record, directories: tuple[int, ...], by: str | None) -> Record:
        """Ends all that lives of a launch without a shim, and writes down that it is over.

        Raises:
            Refused: a process does not end.
        """
        same_host = found.boot_id == procs.boot_id()
        if not found.end(DEAD_S):
            raise Refused("unavailable", "a process of it does not end")
        if found.state == "starting":
            over = found.change(state="failed", error="it was interrupted while it started")
        else:
            exit_by = by or ("vmm" if same_host else "host")
            at_ms = time.time_ns() // 1_000_000
            ended = {"code": None, "signal": None, "by": exit_by, "at_ms": at_ms}
            over = found.change(state="exited", exit=ended)
        for problem in record.write((fd for fd in directories if fd >= 0), over):
            self._log(f"the end of {found.launch_id} cannot be written: {problem.strerror}")
        return over

    def _end_launch(self, found: Record, directory: int, room: int) -> None:
        """Ends a launch: by its shim, so that it is known why; else without.

        Raises:
            Refused: a process does not end.
        """
        if found.lives("shim"):
            asked = self._ask_to_kill(room)
            if asked is None:  # it cannot be reached, but it will see its machine end
                procs.end([found.procs.get("vmm")], DEAD_S)
            elif not asked:
                procs.end([found.procs.get("shim")], DEAD_S)
        held = tuple(fd for fd in (directory, room) if fd >= 0)
        if directory < 0:  # somebody removed it: then there is no lock, but a shim that knows
            if not found.end(DEAD_S):
                raise Refused("unavailable", "a process of it does not end")
            return
        lock = self._lock(directory, SETTLE_S)
        if lock is None:
            procs.end([found.procs.get("shim")], DEAD_S)
            lock = self._lock(directory, SETTLE_S)
        if lock is None:
            raise Refused("unavailable", "its directory is held by an unknown process")
        try:
            now = record.read(held) or found
            if now.state in ("starting", "running"):
                self._conclude(now, held, "kill")
            elif not now.end(DEAD_S):
                raise Refused("unavailable", "a process of it does not end")
            elif now.exit is not None and now.exit["by"] == "vmm":  # the shim could not know
                record.write(held, now.change(exit=now.exit | {"by": "kill"}))
        finally:
            os.close(lock)

    def _ask_to_kill(self, room: int) -> bool | None:
        """True when the shim did it, False when it is silent, None when it cannot be asked."""
        if room < 0:
            return None
        try:
            with link.connect(room, shim.CTL, socket.SOCK_SEQPACKET) as ctl:
                ctl.settimeout(KILL_S)
                link.send(ctl, b"kill")
                return ctl.recv(1) == b""  # its end is the answer
        except TimeoutError:
            return False
        except ConnectionResetError:
            return True
        except OSError:
            return None

    def _start_shim(
        self,
        name: str,
        launch_id: str,
        lock: int,
        directory: int,
        room: int,
        order: dict[str, Any],
    ) -> None:
        """Starts it and waits for its word.

        Raises:
            Refused: launch_failed, with why.
        """
        reader, writer = os.pipe()
        worker_room = places.make(self._places.roles["worker"], name)
        try:
            full = order | {
                "v": 1, "adopt": order["profile"] is None, "id": name, "launch_id": launch_id,
                "lock": lock, "note": writer, "instance": directory, "room": room,
                "worker_room": worker_room,
                "broker": str(self._places.runtime_path / "vm" / "broker" / name),
                "host_files": str(self._places.host_files()),
            }  # fmt: skip
            child = subprocess.Popen(
                [sys.executable, "-I", "-B", "-m", "agent_box.helper.shim"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # not our log, whose reader it outlives
                pass_fds=(lock, writer, directory, room, worker_room),
                env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(writer)
            os.close(worker_room)
        assert child.stdin is not None
        with open(reader, "rb", buffering=0) as note:
            try:
                with child.stdin as pipe:
                    pipe.write(json.dumps(full).encode())
            except BrokenPipeError:
                pass  # it is gone; it tells nothing
            said = _line(note, LAUNCH_S)
        if said == b"":
            child.kill()
            child.wait()
            found = record.read((directory, room))
            if order["profile"] is not None and found and found.launch_id == launch_id:
                self._conclude(found, (directory, room), None)
            raise Refused("launch_failed", "its shim ended before it could say why")
        told = json.loads(said)
        if told["code"]:
            child.wait()
            raise Refused(told["code"], told["why"])

        def ended() -> None:
            child.wait()
            self._shim_ended(name)

        self._on_end(os.pidfd_open(child.pid), ended)

    def _shim_ended(self, name: str) -> None:
        """Mostly it ended as it should; when not, another one takes over."""
        try:
            with self._alone(name), self._directories(name, missing_ok=True) as (d, room):
                if d >= 0:
                    self._settled(name, d, room)
        except Refused as refused:
            self._log(f"{name}: {refused}")

    def _image_paths(self, profile: dict[str, Any]) -> list[dict[str, str]]:
        found = []
        with self._images_lock:
            for part in ("kernel", "initramfs", "variant", "guest", "harness"):
                if profile[part] is not None:
                    found.append({"name": part, "path": self._images.path(profile[part])})
        return found

    def _connect(self, args: Args, name: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
        with self._directories(args["id"], rooms=False) as (directory, room):
            found = record.read(fd for fd in (directory, room) if fd >= 0)
            if found is None or found.launch_id != args["launch_id"]:
                raise Refused("conflict", _which(found))
            if found.state != "running":
                raise Refused("precondition", f"the launch is {found.state}")
            if room < 0:
                raise Refused("unavailable", "the machine has no such socket")
            try:
                return link.connect(room, name, kind)
            except OSError as error:
                why = "the machine has no such socket" if error.errno != errno.EAGAIN else "full"
                raise Refused("unavailable", why) from error

    def _state(self, name: str) -> dict[str, Any]:
        """As `contract.STATE`. Asks no process anything."""
        size, problem = None, None
        with contextlib.ExitStack() as stack:
            directories: list[int] = []
            try:
                directories.append(stack.enter_context(self._places.instance(name)))
                size = disk.size(directories[0])
            except FileNotFoundError:
                pass
            except OSError as error:
                problem = f"its directory is not usable: {error.strerror}"
            with contextlib.suppress(OSError):
                directories.append(stack.enter_context(self._places.room("shim", name)))
            found = record.read(directories)
        state: dict[str, Any] = {
            "id": name, "state": "allocated" if size is not None else "partial",
            "launch_id": None, "disk_bytes": size, "vmm": None, "shim": False, "device": False,
            "worker": False, "restarts": 0, "exit": None, "error": problem,
        }  # fmt: skip
        if found is None:
            return state
        state |= {
            "launch_id": found.launch_id, "state": found.state, "restarts": found.restarts,
            "exit": found.exit, "error": problem or found.error, "shim": found.lives("shim"),
            "device": found.lives("device"), "worker": found.lives("worker"),
        }  # fmt: skip
        vmm = found.procs.get("vmm")
        if found.lives("vmm") and vmm is not None:
            state["vmm"] = vmm._asdict()
        if found.state == "running" and state["vmm"] is None and not state["shim"]:
            by = "vmm" if found.boot_id == procs.boot_id() else "host"
            state["state"] = "exited"
            state["exit"] = {"code": None, "signal": None, "by": by, "at_ms": 0}
        if found.state == "starting" and not state["shim"]:
            state["state"] = "failed"
            state["error"] = "it was interrupted while it started"
        if size is None and state["vmm"] is None and not state["shim"]:
            state["state"] = "partial"
        return state

    def _anything(self, name: str) -> bool:
        """Whether anything of an instance is there."""
        directories = (*self._places.roles.values(), self._places.instances)
        return not all(places.absent(fd, name) for fd in directories)

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        with self._locks_lock:
            turns = self._locks.setdefault(name, _Turns())
            turns.wanted += 1
        try:
            with turns.lock:
                yield
        finally:
            with self._locks_lock:
                turns.wanted -= 1
                if not turns.wanted:
                    del self._locks[name]

    @contextlib.contextmanager
    def _directories(
        self, name: str, *, rooms: bool = True, missing_ok: bool = False
    ) -> Iterator[tuple[int, int]]:
        """The instance's directory, and the room of its sockets; -1 for one that is missing.

        Args:
            rooms: make the rooms that are missing, as after a restart of the host.
            missing_ok: the instance's directory may be missing.

        Raises:
            Refused: not_found.
        """
        directory = room = -1
        try:
            try:
                with self._places.instance(name) as fd:
                    directory = os.dup(fd)
            except FileNotFoundError:
                if not missing_ok:
                    raise Refused("not_found", GONE) from None
            except OSError as error:
                raise _host(error, "the instance's directory is not usable") from error
            try:
                if rooms and directory >= 0:
                    for role in self._places.roles.values():
                        os.close(places.make(role, name))
                with contextlib.suppress(FileNotFoundError), self._places.room("shim", name) as fd:
                    room = os.dup(fd)
            except OSError as error:
                raise _host(error, "the room of its sockets is not usable") from error
            yield directory, room
        finally:
            link.close(fd for fd in (directory, room) if fd >= 0)

    def _lock(self, directory: int, seconds: float = 0.0) -> int | None:
        """The lock of an instance, which a shim holds all its life; None while it does."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(places.LOCK, flags, 0o600, dir_fd=directory)
        except OSError as error:
            raise _host(error, "the instance's directory cannot be written") from error
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(fd)
                    return None
            select.select([], [], [], 0.005)


def contract_deadline(name: str) -> int:
    return wire.OPS[name].deadline_s


def _line(note: Any, seconds: float) -> bytes:
    """One line from a pipe; empty when it ended or the time is up."""
    deadline = time.monotonic() + seconds
    said = b""
    while not said.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([note], [], [], left)[0]:
            return b""
        more = note.read(contract.MESSAGE_BYTES)
        if not more:
            return b""
        said += more
    return said


def _which(found: Record | None) -> str:
    return "it was never launched" if found is None else f"its last launch is {found.launch_id}"


def _host(error: OSError, what: str) -> Refused:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refused("exhausted", "the host's disk is full")
    return Refused("host", f"{what}: {error.strerror}")
