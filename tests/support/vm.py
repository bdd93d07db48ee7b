"""A whole agent-box with real machines: one image, made once, for every test that boots.

The image is taken from `AGENT_BOX_TEST_IMAGES`, the `images` directory of some state
directory, where that is set. Otherwise it is the one that `built` keeps.
Machines run emulated, so that every host gives the same result.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

from support import built, procs
from support.live import Live
from support.until import until

CONFIG = """\
version = 1
[engine]
accel = "tcg"
[profiles.default]
cpus = 1
memory = "256M"
disk = "256M"
"""
START_S = 180.0  # a bound on a hang: emulated, and the host may be busy


def images() -> Path:
    """The directory with the image `base`."""
    given = os.environ.get("AGENT_BOX_TEST_IMAGES")
    return Path(given) if given else built.ready()[0].images


class Machines(Live):
    """An agent-box that can boot. `close` ends every machine, too."""

    def __init__(self, *, config: str = CONFIG, with_image: bool = True) -> None:
        super().__init__()
        file = self.home / "config" / "agent-box" / "config.toml"
        file.parent.mkdir(parents=True, mode=0o700)
        file.write_text(config)
        file.chmod(0o600)
        if with_image:
            self.paths.state.mkdir(mode=0o700, parents=True)
            shutil.copytree(images(), self.paths.images, symlinks=True)

    def start(self, name: str) -> None:
        ran = self.run("start", name, "--json", timeout=START_S)
        assert ran.exit == 0, (ran, self.events(name))

    def state(self, name: str) -> str:
        rows = self.run("list", "--json").result["instances"]
        return next((str(row["state"]) for row in rows if row["name"] == name), "gone")

    def events(self, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.run("logs", name, "--json").result["events"]
        return found

    def kinds(self, name: str) -> list[str]:
        return [event["kind"] for event in self.events(name)]

    def last(self, name: str, kind: str) -> dict[str, Any]:
        """The facts of the last event of a kind."""
        facts: dict[str, Any] = [e for e in self.events(name) if e["kind"] == kind][-1]["facts"]
        return facts

    def vmm(self, name: str) -> int:
        """The pid of the VMM that runs the instance."""

        def noted() -> int:
            started = [e for e in self.events(name) if e["kind"] == "vmm-started"]
            return started[-1]["facts"]["pid"] if started else 0

        return until(f"the VMM of {name} is noted", noted)

    def left(self) -> list[str]:
        """What is there of any instance: directories, and processes outside of the daemon."""
        roots = [
            self.paths.state / "instances",
            *(self.paths.runtime / "vm").glob("*"),
        ]
        found = [str(p) for root in roots if root.is_dir() for p in root.iterdir()]
        return found + [f"process {pid}" for pid in self.walls()]

    def walls(self) -> list[int]:
        """The bubblewraps round the VMMs of this agent-box, one each: their arguments name the
        image that they let in, and what runs inside them is their child."""
        return [pid for pid in procs.with_word(str(self.home)) if _is_wall(procs.cmdline(pid))]

    def kill(self, program: str) -> None:
        """SIGKILL to a service, to the helper, or to supervisord."""
        if program == "supervisord":
            pids = [pid for pid in self.pids() if "supervisord" in " ".join(procs.cmdline(pid))]
        else:
            pids = self.inner(program)
        for pid in pids:
            procs.send(pid, signal.SIGKILL)

    def close(self) -> None:
        try:
            if self.walls() or self.daemon_pid():
                for row in self.run("list", "--json").result["instances"]:
                    self.run("delete", row["name"], "--force", timeout=60)
        finally:
            super().close()


def _is_wall(words: list[str]) -> bool:
    """Whether the host name within it is that of a VMM's jail (`helper.jail.Jail.name`)."""
    return "--hostname" in words and words[words.index("--hostname") + 1].startswith("vmm-")
