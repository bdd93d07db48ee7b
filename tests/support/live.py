"""A whole agent-box as an operator has it: `agent-box` verbs, started on demand."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from support import cli, procs
from support.until import until

from agent_box.process import lock
from agent_box.process.paths import SERVICES, Paths
from agent_box.process.supervision import Control, Status


class Live:
    """A home of its own, short because sockets lie below it. `close` ends and removes all."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="ab."))
        self.env = cli.environment(self.home)
        self.paths = Paths.from_env(self.env)

    def run(self, *args: str, stdin: str = "", timeout: float = 60.0, **env: str) -> cli.Ran:
        return cli.run(*args, env=self.env | env, stdin=stdin, timeout=timeout)

    def popen(self, *args: str, **more: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(cli.BINARY), *args],
            env=self.env,
            stdin=subprocess.DEVNULL,
            text=True,
            **more,
        )

    def up(self) -> None:
        """Starts the daemon and waits until every service is ready."""
        until("all services are ready", self.ready, seconds=120)  # the host may be busy

    def ready(self) -> bool:
        return all(row["ready"] for row in self.services().values())

    def services(self) -> dict[str, dict[str, Any]]:
        rows = self.run("service", "list", "--json").result["services"]
        return {row["name"]: row for row in rows}

    def service(self, name: str) -> dict[str, Any]:
        return self.services()[name]

    @property
    def control(self) -> Control:
        return Control(self.paths.supervisor)

    def statuses(self) -> dict[str, Status]:
        return self.control.statuses()

    def holder(self) -> lock.Holder | None:
        return lock.holder(self.paths.lock)

    def daemon_pid(self) -> int:
        holder = self.holder()
        return 0 if holder is None else holder.pid

    def pids(self, service: str | None = None) -> list[int]:
        """Every process of ours, the daemon too, or of one service: what wraps it and itself."""
        ours = [*procs.with_word(str(self.home)), *filter(None, [self.daemon_pid()])]
        if service is None:
            return ours
        return [pid for pid in ours if f"agent_box.{service}" in procs.cmdline(pid)]

    def inner(self, service: str) -> list[int]:
        """The confined processes of a service: one, if all is well."""
        words = ["-I", "-B", "-m", f"agent_box.{service}"]
        return [pid for pid in self.pids(service) if procs.cmdline(pid)[1:5] == words]

    def close(self) -> None:
        """Ends the daemon and all that it runs, and removes everything, come what may.

        Raises:
            AssertionError: it did not end by itself, or left something running.
        """
        try:
            for each in self.pids():  # one may be stopped by a test
                procs.send(each, signal.SIGCONT)
            if pid := self.daemon_pid():
                procs.send(pid, signal.SIGTERM)
            until("the daemon has ended", lambda: not self.daemon_pid(), seconds=60)
            until("nothing is left", lambda: not self.pids(), seconds=20)
        finally:
            while left := self.pids():  # the daemon among them: it starts nothing again
                for each in left:
                    procs.send(each, signal.SIGKILL)
            shutil.rmtree(self.home)


__all__ = ["SERVICES", "Live"]
