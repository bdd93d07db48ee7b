"""QMP, through qemu.qmp: pause, resume, and whether the vCPUs run.

QEMU serves one client at a time, so a conversation is short: connect, ask, leave, and always
under a deadline. What it answers is read as data of a process that may be the guest's by now.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final, Literal

from agent_box.bus.errors import Reason, Refusal

ANSWER_S: Final = 0.3  # a running QEMU answers in 1 ms; a stopped process never does
CHANGE_S: Final = 10.0
VmState = Literal["running", "paused", "unreachable"]

_STATES: Final[dict[str, VmState]] = {
    "running": "running",
    "paused": "paused",
    "prelaunch": "paused",
    "suspended": "paused",
}


async def state(stream: socket.socket) -> VmState:
    """What the VMM says of its vCPUs. Owns and closes `stream`."""
    try:
        untrusted = await _ask(stream, "query-status", ANSWER_S)
    except Refusal:
        return "unreachable"
    word = untrusted.get("status") if isinstance(untrusted, dict) else None
    return _STATES.get(word, "unreachable") if isinstance(word, str) else "unreachable"


async def change(stream: socket.socket, command: Literal["stop", "cont"]) -> None:
    """Freezes or frees the vCPUs; answered when it is done. Owns and closes `stream`.

    Raises:
        Refusal: STATE_UNKNOWN, the VMM did not do it or did not say so.
    """
    await _ask(stream, command, CHANGE_S)


async def _ask(stream: socket.socket, command: str, seconds: float) -> Any:
    from qemu.qmp import QMPClient, QMPError  # only who speaks QMP pays for it

    client = QMPClient("agent-box")
    client.logger.disabled = True  # it logs what the VMM says
    try:
        async with asyncio.timeout(seconds):
            await client.connect(stream)
            return await client.execute(command)
    except (TimeoutError, QMPError, OSError, EOFError) as error:
        raise Refusal(
            Reason.STATE_UNKNOWN,
            f"the monitor of the VMM did not do {command}: {type(error).__name__}",
        ) from None
    finally:
        stream.close()
        try:
            async with asyncio.timeout(ANSWER_S):
                await client.disconnect()
        except (TimeoutError, QMPError, OSError, EOFError):
            pass  # it was not connected, or it is gone: either way there is nothing to leave
