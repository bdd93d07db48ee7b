"""Runs our supervisord over programs that a test names. The daemon does so for services.

python supervised.py DIRECTORY '[["name", "word", ...], ...]'
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from agent_box.process import daemon, supervise
from agent_box.process.paths import Paths
from agent_box.process.supervision import Program


def main() -> None:
    os.umask(0o077)
    root = Path(sys.argv[1])
    paths = Paths(root / "run", root / "state")
    paths.make()
    programs = [Program(words[0], tuple(words[1:])) for words in json.loads(sys.argv[2])]
    daemon.write(paths, programs, silent=True)
    supervise.run(
        paths.supervisor,
        on_running=lambda: print("running", flush=True),
        refresh=lambda: None,
    )


if __name__ == "__main__":
    main()
