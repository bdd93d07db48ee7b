"""`python -I -m agent_box.channel`, behind the wall that its contract declares."""

from __future__ import annotations

from agent_box.channel.adapter import build
from agent_box.channel.contract import CONTRACT
from agent_box.process import skeleton

if __name__ == "__main__":
    skeleton.run(CONTRACT, build)
