"""`python -I -m agent_box.broker`, behind the wall that its contract declares."""

from __future__ import annotations

from agent_box.broker.adapter import build
from agent_box.broker.contract import CONTRACT
from agent_box.process import skeleton

if __name__ == "__main__":
    skeleton.run(CONTRACT, build)
