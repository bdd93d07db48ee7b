"""`python -I -m agent_box.engine`, behind the wall that its contract declares."""

from __future__ import annotations

from agent_box.engine.adapter import build
from agent_box.engine.contract import CONTRACT
from agent_box.process import skeleton

if __name__ == "__main__":
    skeleton.run(CONTRACT, build)
