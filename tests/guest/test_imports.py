"""What the guest imports costs a tenth of a second a module when it is emulated."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from agent_box import guest

SLOW = {"dataclasses", "inspect", "subprocess", "threading", "typing", "logging", "tempfile"}
CODE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import agent_box.guest.pid1, agent_box.guest.agent
print(json.dumps(sorted(sys.modules)))
"""


def test_nothing_slow_and_nothing_but_the_standard_library(tmp_path: Path) -> None:
    (tmp_path / "agent_box").mkdir()
    (tmp_path / "agent_box" / "__init__.py").touch()
    shutil.copytree(Path(guest.__path__[0]), tmp_path / "agent_box" / "guest")
    command = [sys.executable, "-I", "-S", "-B", "-c", CODE, str(tmp_path)]
    loaded = set(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
    assert not loaded & SLOW
    ours = {name for name in loaded if name.startswith("agent_box")}
    assert {name.split(".")[0] for name in loaded - ours - {"__main__"}} <= sys.stdlib_module_names
    assert all(name == "agent_box" or name.startswith("agent_box.guest") for name in ours)
