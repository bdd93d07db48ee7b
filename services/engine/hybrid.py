"""The hybrid vsock scheme from the host's side: `CONNECT <port>\\n`, then `OK <n>\\n`.

It is Firecracker's (docs/vsock.md of that project, "Host-Initiated Connections"), and our
vsock device speaks it too. The other end is a process that may have been taken over by a
guest, so what it says is read byte by byte up to a bound, and nothing after it is touched:
those bytes are the guest's, and belong to whoever gets the descriptor.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from agent_box.bus.errors import Reason, Refusal

ANSWER_MAX: Final = 32  # bytes: "OK ", a u32 in decimal, a line feed


async def connect(stream: socket.socket, port: int, *, deadline_s: float) -> None:
    """Asks for `port` on a connected, non-blocking stream socket.

    Raises:
        Refusal: UNAVAILABLE with fact `dial` = `refused` when nobody in the guest has bound
            the port; DEADLINE with `no-driver` when the guest said nothing in time.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(deadline_s):
            await loop.sock_sendall(stream, f"CONNECT {port}\n".encode())
            untrusted = b""
            while not untrusted.endswith(b"\n"):
                # one byte at a time: the next ones may already be the guest's
                piece = await loop.sock_recv(stream, 1)
                if not piece or len(untrusted) >= ANSWER_MAX:
                    raise _refused(port)
                untrusted += piece
    except TimeoutError:
        raise Refusal(
            Reason.DEADLINE, f"the guest did not answer on port {port}", facts={"dial": "no-driver"}
        ) from None
    except OSError:
        raise _refused(port) from None
    if not (untrusted.startswith(b"OK ") and untrusted[3:-1].isdigit()):
        raise _refused(port)


def _refused(port: int) -> Refusal:
    return Refusal(
        Reason.UNAVAILABLE,
        f"nobody in the guest serves port {port}",
        facts={"dial": "refused"},
    )
