"""The project hook: a file that bash sources as the agent before anything else of the agent's
runs, so that what it exports reaches terminals, commands and the harness."""

from __future__ import annotations

import os
import selectors
import signal

from agent_box.guest import environment, launch
from agent_box.guest.disk import HOME
from agent_box.guest.loop import Loop
from agent_box.guest.streams import Refused

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Final

SECONDS: Final = 300.0
EXPORTED_MAX: Final = 1 << 18  # bytes of `env -0`
SAID_MAX: Final = 2000  # bytes of its last output
LINES_MAX: Final = 8
ABSENT: Final = 123
# On descriptor 9: S when the file is there, and at a good end what is exported. What the hook
# itself prints goes to standard error.
SCRIPT: Final = f"""
exec 9>&1 1>&2
hook=$1
shift
[ -f "$hook" ] || exit {ABSENT}
printf S >&9
trap 'hook=$?; [ $hook = 0 ] && /usr/bin/env -0 >&9; exit $hook' EXIT
. "$hook"
"""


class Hook:
    """One run of it.

    Args:
        settled: called once, when `state` is no longer "running".

    Attributes:
        state: "running", "none" (there is no such file), "done" or "failed".
        text: with failed, why, with its last lines.
        exported: variables that it set.
    """

    def __init__(
        self, loop: Loop, settled: Callable[[], None], ground: launch.Ground = launch.AGENTS
    ) -> None:
        self._loop = loop
        self._settled = settled
        self._ground = ground
        self.state = "running"
        self.text = ""
        self.exported: dict[str, str] = {}
        self._child: launch.Started | None = None
        self._before: Mapping[str, str] = {}
        self._got = [bytearray(), bytearray()]
        self._open: dict[int, int] = {}
        self._expected = False
        self._late = False

    def begin(self, path: str, before: Mapping[str, str], *, expected: bool) -> None:
        """Starts it.

        Args:
            path: absolute, or from ~/ on.
            before: the environment that it finds.
            expected: whether it is a failure when it is not there.
        """
        self._expected = expected
        self._before = before
        path = HOME + path[1:] if path.startswith("~/") else path
        argv = [b"/bin/bash", b"-c", SCRIPT.encode(), b"hook", os.fsencode(path)]
        try:
            self._child = launch.start(
                launch.Launch(argv, "agent", None, before, None), self._ground
            )
        except Refused as why:
            self._end("failed", str(why))
            return
        child = self._child
        os.close(child.input)
        self._open = {0: child.outputs[0], 1: child.outputs[1], 2: child.said}
        for source, fd in self._open.items():
            self._loop.watch(fd, selectors.EVENT_READ, self._reading(source))
        self._loop.watch(child.pidfd, selectors.EVENT_READ, self._exited)
        self._loop.later(SECONDS, self._too_late)

    def _reading(self, source: int) -> Callable[[int], None]:
        def read(_: int) -> None:
            self._read(source)

        return read

    def _read(self, source: int) -> bool:
        """Whether there may be more."""
        try:
            data = os.read(self._open[source], 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            fd = self._open.pop(source)
            self._loop.watch(fd, 0, self._exited)
            os.close(fd)
            return False
        if source == 0:
            self._got[0] += data[: EXPORTED_MAX + 1 - len(self._got[0])]
        else:
            self._got[1] += data
            del self._got[1][:-SAID_MAX]
        return True

    def _too_late(self) -> None:
        if self._child is not None:
            self._late = True
            try:
                os.killpg(self._child.pid, signal.SIGKILL)
            except ProcessLookupError:
                return  # it ends just now

    def _exited(self, _: int) -> None:
        child = self._child
        assert child is not None
        for source in list(self._open):
            left = launch.unread(self._open[source])  # a child of its may write for ever
            while left > 0 and source in self._open:
                before = sum(map(len, self._got))
                if not self._read(source):
                    break
                left -= max(1 << 16, sum(map(len, self._got)) - before)
        for fd in (*self._open.values(), child.pidfd):
            self._loop.watch(fd, 0, self._exited)
            os.close(fd)
        self._open.clear()
        self._child = None
        _, status = os.waitpid(child.pid, 0)
        self._judge(os.waitstatus_to_exitcode(status))

    def _judge(self, status: int) -> None:
        exported = bytes(self._got[0])
        if self._late:
            self._end("failed", self._told(f"it took longer than {SECONDS:.0f} s"))
        elif status == ABSENT and not exported:
            if self._expected:
                self._end("failed", "there is no such file")
            else:
                self._end("none", "")
        elif status < 0:
            self._end("failed", self._told(f"it was ended by signal {-status}"))
        elif status:
            self._end("failed", self._told(f"it ended with status {status}"))
        elif len(exported) > EXPORTED_MAX:
            self._end("failed", f"what it exports is over {EXPORTED_MAX} bytes")
        else:
            self.exported = environment.exported(self._before, exported[1:])
            self._end("done", "")

    def _told(self, why: str) -> str:
        lines = self._got[1].decode(errors="replace").strip().splitlines()[-LINES_MAX:]
        return ": ".join((why, " | ".join(lines))) if lines else why

    def _end(self, state: str, text: str) -> None:
        self.state, self.text = state, text
        self._settled()
