"""QMP, through qemu.qmp: pause, resume, and whether the vCPUs run.

QEMU serves one client at a time, so a conversation is short: connect, ask, leave, and always
under a deadline. What it answers is read as data of a process that may be the guest's by now:
a line is at most `LINE_MAX`, a conversation at most `LINES_MAX`, and nothing of it is logged.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any, Final, Literal

from agent_box.bus.errors import Reason, Refusal

if TYPE_CHECKING:
    from qemu.qmp import QMPClient

ANSWER_S: Final = 0.3  # a running QEMU answers in 1 ms; a stopped process never does
CHANGE_S: Final = 10.0
LEAVE_S: Final = 0.2
LINE_MAX: Final = 16384  # bytes; the longest that we ask for is QEMU's greeting, 200
LINES_MAX: Final = 64  # greeting, two answers, and what events come in between
# `stalled`: the VMM froze the vCPUs itself, because the host's disk is full.
VmState = Literal["running", "paused", "stalled", "unreachable"]

_STATES: Final[dict[str, VmState]] = {
    "running": "running",
    "paused": "paused",
    "prelaunch": "paused",
    "suspended": "paused",
    "io-error": "stalled",  # of all drives only the data disk stops for one: werror=enospc
}
_client_type: type[QMPClient] | None = None


def prepare() -> None:
    """Imports the library now, so that the first question does not wait for it."""
    _bounded()


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
    client = _bounded()("agent-box", readbuflen=LINE_MAX)
    try:
        async with asyncio.timeout(seconds):
            await client.connect(stream)
            return await client.execute(command)
    except Exception as error:  # noqa: BLE001 - the library raises whatever the VMM made it raise
        raise Refusal(
            Reason.STATE_UNKNOWN,
            f"the monitor of the VMM did not do {command}: {type(error).__name__}",
        ) from None
    finally:
        await _leave(client, stream)


async def _leave(client: QMPClient, stream: socket.socket) -> None:
    """Ends the conversation, whatever the other end does; also when we are cancelled here."""
    from qemu.qmp import Runstate

    try:
        stream.shutdown(socket.SHUT_RDWR)  # so that the library need not wait for the VMM
    except OSError:
        pass  # it ended first, or the library closed it
    try:
        async with asyncio.timeout(LEAVE_S):
            await client.disconnect()
    except Exception as error:  # noqa: BLE001 - why it ended, which the caller was told already
        logging.getLogger(__name__).debug("left a monitor: %s", type(error).__name__)
    finally:
        if client.runstate == Runstate.IDLE:
            stream.close()  # otherwise the library has it still, and closes it at its end


def _bounded() -> type[QMPClient]:
    """A client that takes no more than it needs. Only who speaks QMP pays for the import."""
    global _client_type
    if _client_type is None:
        from qemu.qmp import Message, QMPClient, QMPError

        # The library logs what it is told, and why it failed, which holds what it was told.
        logging.getLogger("qemu.qmp").setLevel(logging.CRITICAL + 1)

        class Bounded(QMPClient):
            """`_cb_inbound` and `_cb_outbound` are the library's hooks for this."""

            _lines = 0

            def _cb_inbound(self, msg: Message) -> Message:
                self._lines += 1
                if self._lines > LINES_MAX:
                    raise QMPError("the VMM says too much")
                return msg

            def _cb_outbound(self, msg: Message) -> Message:
                return msg

        _client_type = Bounded
    return _client_type
