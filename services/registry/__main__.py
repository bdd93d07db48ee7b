"""`python -I -m agent_box.registry`, behind the wall that its contract declares."""

from __future__ import annotations

from agent_box.process import skeleton
from agent_box.registry.contract import CONTRACT
from agent_box.registry.service import build

if __name__ == "__main__":
    skeleton.run(CONTRACT, build)
