"""What the kernel starts: `python3 -I -S box-guest.pyz`."""

from __future__ import annotations

from agent_box.guest.pid1 import main

main()
