"""The part of us that runs inside supervisord.

supervisord loads it as an RPC interface, its official way to be extended, named in the
generated configuration. It does three things: it counts deaths and keeps a service down
that dies again and again; it answers `agent_box.status`; and it makes supervisord act on a
death at once, where by itself it would notice within a second.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from supervisor import events
from supervisor.states import ProcessStates, SupervisorStates, getProcessStateDescription
from supervisor.xmlrpc import Faults, RPCError

from agent_box.process import notices
from agent_box.process.paths import told
from agent_box.process.supervision import EXIT_FATAL, GROUP, NOTICES_LINK

DEATHS: Final = 5
WITHIN_S: Final = 30.0
# A service that has died this often lately waits for supervisord's own slow step (up to a
# second) before it is started again, so that a crash loop does not eat the machine.
HASTE: Final = 2


class Deaths:
    """Counts the deaths of one service and says when it is enough. Knows no clock.

    A restart by the operator is not a death, and neither is the death of supervisord, with
    which every service dies.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=DEATHS)

    def count(self, now: float) -> int:
        """Notes a death at `now` (seconds) and gives the number within `WITHIN_S`."""
        self._times.append(now)
        while now - self._times[0] > WITHIN_S:
            self._times.popleft()
        return len(self._times)

    def forget(self) -> None:
        self._times.clear()


class Watch:
    """Listens to what happens to the programs.

    Args:
        log: takes one line; supervisord's own log.
        wake: makes supervisord's loop turn at once.
        note: takes the name of a program that stays down, and why.
    """

    def __init__(
        self,
        log: Callable[[str], object],
        wake: Callable[[], object],
        note: Callable[[str, str], object],
    ) -> None:
        self._log = log
        self._wake = wake
        self._note = note
        self._deaths: dict[str, Deaths] = {}
        self._reasons: dict[str, str] = {}
        self._starts: Counter[str] = Counter()

    def restarts(self, name: str) -> int:
        return max(0, self._starts[name] - 1)

    def reason(self, name: str) -> str:
        return self._reasons.get(name, "")

    def pardon(self, name: str) -> None:
        """Forgets the deaths so far: the operator wants it tried again."""
        self._deaths.pop(name, None)
        self._reasons.pop(name, None)

    def on_starting(self, event: Any) -> None:
        self._starts[event.process.config.name] += 1

    def on_exited(self, event: Any) -> None:
        """Called within supervisord's `finish`, after it set EXITED and the exit status."""
        process = event.process
        name, status = process.config.name, process.exitstatus
        deaths = self._deaths.setdefault(name, Deaths()).count(time.monotonic())
        how = "by a signal" if status == -1 else f"with exit status {status}"
        if status == EXIT_FATAL:
            self._give_up(process, "it said that starting it again cannot help; see its log")
        elif deaths >= DEATHS:
            self._give_up(process, f"{deaths} deaths in {WITHIN_S:.0f} s, the last {how}")
        elif deaths <= HASTE:
            self._wake()

    def on_fatal(self, event: Any) -> None:
        """supervisord gave up by itself: it could not even start it."""
        process = event.process
        name = process.config.name
        if name not in self._reasons:
            self._reasons[name] = process.spawnerr or "it could not be started"
            self._note(name, self._reasons[name])

    def _give_up(self, process: Any, reason: str) -> None:
        name = process.config.name
        self._reasons[name] = reason
        process.change_state(ProcessStates.FATAL)
        self._log(f"{name} failed and stays down: {reason}; agent-box service restart {name}")
        self._note(name, reason)


class Wake:
    """A pipe in supervisord's loop: a byte in it makes the loop turn.

    Python writes one for every signal (`signal.set_wakeup_fd`). Without that, poll() goes on
    waiting when a child has died.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def __call__(self) -> None:
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            pass  # full: the loop will turn anyway

    def fileno(self) -> int:
        return self._read

    # The face of a dispatcher in supervisord's loop.

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def handle_read_event(self) -> None:
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            pass

    def handle_error(self) -> None:
        """Called while an error of ours is being handled: it is a defect and goes on up."""
        raise


class Interface:
    """`agent_box.*` on supervisord's control socket."""

    def __init__(self, supervisord: Any, watch: Watch) -> None:
        self._supervisord = supervisord
        self._watch = watch

    def status(self) -> list[dict[str, Any]]:
        """Every program: name, state, pid (0: none), uptime_ms, restarts, reason."""
        now = time.time()
        return [
            {
                "name": name,
                "state": getProcessStateDescription(process.get_state()).lower(),
                "pid": process.pid,
                # A float, since XML-RPC's int has 32 bits: 24 days of milliseconds.
                "uptime_ms": float(max(0, int((now - process.laststart) * 1000))),
                "restarts": self._watch.restarts(name),
                "reason": self._watch.reason(name),
            }
            for name, process in self._processes()
        ]

    def pardon(self, name: str) -> bool:
        """Forgets the deaths of a program, so that a start of it counts from none."""
        if name not in dict(self._processes()):
            raise RPCError(Faults.BAD_NAME, str(name))
        self._watch.pardon(name)
        return True

    def _processes(self) -> list[tuple[str, Any]]:
        return [
            (process.config.name, process)
            for process in self._supervisord.process_groups[GROUP].processes.values()
        ]


def make_rpcinterface(supervisord: Any, **_config: str) -> Interface:
    """supervisord calls this once, when it opens its control socket."""
    options = supervisord.options
    wake = Wake()
    options.get_socket_map()[wake.fileno()] = wake
    wake()  # the first turn starts the programs

    def log(line: str) -> None:
        options.logger.error(line)

    def note(name: str, reason: str) -> None:
        try:
            notices.leave(Path(NOTICES_LINK), name, reason)
        except OSError as error:
            log(f"that {name} stays down will not be in the journal: {told(error)}")

    watch = Watch(log, wake, note)

    def of_services(heard: Callable[[Any], None]) -> Callable[[Any], None]:
        def hear(event: Any) -> None:
            if event.process.group.config.name == GROUP:
                heard(event)

        return hear

    def on_exited(event: Any) -> None:
        if options.mood == SupervisorStates.RUNNING:
            watch.on_exited(event)

    events.subscribe(events.ProcessStateStartingEvent, of_services(watch.on_starting))
    events.subscribe(events.ProcessStateExitedEvent, of_services(on_exited))
    events.subscribe(events.ProcessStateFatalEvent, of_services(watch.on_fatal))
    return Interface(supervisord, watch)
