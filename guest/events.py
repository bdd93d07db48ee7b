"""Port 5002: what the guest tells of itself, kept until the host has it on record.

The newest stream has it; what was not seen over an older one is sent again, with its number.
"""

from __future__ import annotations

import os
import re
import selectors
import socket
import time
from collections import deque

from agent_box.guest import claims, system
from agent_box.guest.claims import Rate, Said
from agent_box.guest.loop import Loop
from agent_box.guest.wire import Decoder, FrameError, pack, unpack

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from typing import Any, Final

KEPT_MAX: Final = 128
KMSG: Final = "/dev/kmsg"
# <priority>,<sequence>,... of a record; a priority below 8 is the kernel's own (kmsg, facility 0)
OOM: Final = re.compile(rb"[0-7],[^;]*;.*[Kk]illed process (\d+) \((.{1,64})\)")
DISK_EVERY_S: Final = 30.0
DISK_HIGH: Final = 90  # per cent, that are told
DISK_LOW: Final = 85  # below which it may be told again


class Events:
    """All events of this agent process."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._run = os.urandom(8).hex()
        self._number = 0
        self._kept: deque[tuple[int, str, dict[str, Any]]] = deque()
        self._rate = Rate(time.monotonic())
        self._dropped = 0
        self._stream: _Stream | None = None

    def tell(self, kind: str, **facts: Any) -> None:
        """One more event, unless there were too many; then the next one says how many."""
        if not self._rate.take(time.monotonic()):
            self._dropped += 1
            return
        if len(self._kept) >= KEPT_MAX:
            self._kept.popleft()
            self._dropped += 1
        cut = {k: v[: claims.TEXT_MAX] if isinstance(v, str) else v for k, v in facts.items()}
        self._number += 1
        self._kept.append((self._number, kind, {**cut, "dropped": self._dropped}))
        self._dropped = 0
        if self._stream is not None:
            self._stream.more()

    def missed(self, count: int) -> None:
        """So many were not even tried: the next one says so."""
        self._dropped += count

    def phase(self, name: str) -> None:
        """A step of the boot is done."""
        uptime = round(time.clock_gettime(time.CLOCK_BOOTTIME) * 1000)
        self.tell("guest-phase", phase=name, uptime_ms=uptime)

    def serve(self, connection: socket.socket) -> None:
        """A new stream of the host's."""
        if self._stream is not None:
            self._stream.close()
        self._stream = _Stream(self, self._loop, connection, self._run)

    def after(self, number: int) -> list[tuple[int, str, dict[str, Any]]]:
        return [event for event in self._kept if event[0] > number]

    def seen(self, number: int) -> None:
        while self._kept and self._kept[0][0] <= number:
            self._kept.popleft()

    def closed(self, stream: _Stream) -> None:
        if self._stream is stream:
            self._stream = None


class _Stream:
    def __init__(self, events: Events, loop: Loop, connection: socket.socket, run: str) -> None:
        self._events = events
        self._loop = loop
        self._connection = connection
        self._decoder = Decoder(claims.EVENT_MAX)
        self._due = 0
        self._sent = 0  # frames
        self._told = 0  # the number of the last event that was sent
        self._unsent = bytearray()
        self._loop.register(connection, selectors.EVENT_READ, self._ready)
        self._say(Said.HELLO, {"versions": [claims.EVENTS_VERSION], "run": run})
        self._flush()

    def more(self) -> None:
        """What was not sent yet; nothing before the host has greeted."""
        if self._due:
            for number, kind, facts in self._events.after(self._told):
                self._say(Said.EVENT, {"number": number, "kind": kind, "facts": facts})
                self._told = number
            self._flush()

    def close(self) -> None:
        if self._connection.fileno() >= 0:
            self._loop.unregister(self._connection)
            self._connection.close()
            self._events.closed(self)

    def _say(self, kind: Said, fields: dict[str, Any]) -> None:
        self._unsent += pack(kind, self._sent, fields)
        self._sent += 1

    def _ready(self, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                untrusted = self._connection.recv(claims.EVENT_MAX)
                if not untrusted:
                    raise OSError("the host closed it")
                for kind, payload in self._decoder.feed(untrusted):
                    self._take(kind, unpack(payload, self._due))
                    self._due += 1
                self.more()
            if events & selectors.EVENT_WRITE:
                self._flush()
        except BlockingIOError:
            return
        except (OSError, FrameError) as error:
            system.log(f"the stream of events ended: {error}")
            self.close()

    def _take(self, kind: int, fields: dict[str, Any]) -> None:
        if not self._due:
            if kind != Said.HELLO or fields != {"version": claims.EVENTS_VERSION}:
                raise FrameError("the first frame is no hello")
            return
        number = fields.get("number")
        if kind != Said.SEEN or type(number) is not int or not 0 <= number <= self._told:
            raise FrameError("a frame that does not belong here")
        self._events.seen(number)

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass  # it is told when there is room
        except OSError:
            self.close()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._loop.modify(self._connection, events, self._ready)


class Watch:
    """Looks at what goes wrong in the guest: memory and disk.

    Args:
        disk: where the data disk is mounted.
    """

    def __init__(self, loop: Loop, events: Events, disk: str, kmsg: str = KMSG) -> None:
        self._loop = loop
        self._events = events
        self._disk = disk
        self._high = False
        try:
            self._log = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)
            loop.watch(self._log, selectors.EVENT_READ, self._kernel)
        except OSError as error:
            system.log(f"the kernel's log is not watched: {error}")
        self.look()

    def _kernel(self, _: int) -> None:
        try:
            record = os.read(self._log, 8192)
        except BlockingIOError:
            return
        except BrokenPipeError:
            return  # records were overwritten before we read them; the next read goes on
        found = OOM.match(record)
        if found is not None:
            name = found[2].decode(errors="replace")
            self._events.tell("guest-oom", process=name, pid=int(found[1]))

    def look(self) -> None:
        """At the disk, and again in a while: nothing tells when it is nearly full."""
        self._loop.later(DISK_EVERY_S, self.look)
        try:
            stat = os.statvfs(self._disk)
        except OSError:
            return  # it is not mounted; that is told otherwise
        used = 100 - stat.f_bavail * 100 // max(1, stat.f_blocks)
        if used >= DISK_HIGH and not self._high:
            self._events.tell("guest-disk", disk="data", used_percent=used)
        self._high = used >= DISK_HIGH or (self._high and used > DISK_LOW)
