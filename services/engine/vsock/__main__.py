"""``python -I -m agent_box.engine.vsock --vhost-fd N --listen-fd N --ready-fd N --cid N``

Started by the machine's shim, with three inherited descriptors: one end of a socket pair whose
other end the VMM has, the listening hybrid socket, and a pipe. ``READY\\n`` on the pipe says
that all rights are dropped and that the VMM may be started. Clients may connect before that.

Exit status: 0 after the VMM went away, 64 for wrong arguments, 65 after the VMM broke the
protocol, 71 when a right could not be dropped. At its end it writes one line to standard
error, a JSON object with counts and, when it broke, the reason; at SIGUSR1 another one.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import stat
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Final

from agent_box.engine.vsock import seal
from agent_box.engine.vsock.device import Device
from agent_box.engine.vsock.vhost import LinkError

USAGE: Final = 64
BROKEN: Final = 65
UNSEALED: Final = 71
MIN_CID: Final = 3  # below are the hypervisor, the host and the guest itself
MAX_CID: Final = 0xFFFFFFFE
_OPTIONS: Final = ("--vhost-fd", "--listen-fd", "--ready-fd", "--cid")


def main(arguments: list[str]) -> int:
    """Runs the device. `arguments` without the program's name."""
    try:
        vhost_fd, listen_fd, ready_fd, cid = _parse(arguments)
        link = _socket(vhost_fd, listening=False)
        listener = _socket(listen_fd, listening=True)
        if not stat.S_ISFIFO(os.fstat(ready_fd).st_mode):
            raise ValueError("--ready-fd is not a pipe")
        if sys.byteorder != "little":
            raise ValueError("the device needs a little-endian host")
    except (OSError, ValueError) as error:
        _say({"error": str(error)})
        return USAGE
    try:
        max_clients = seal.limit_descriptors()
        device = Device(link, listener, cid, max_clients=max_clients)

        def report(_signal: int, _frame: FrameType | None) -> None:
            _say(device.statistics())

        signal.signal(signal.SIGUSR1, report)
        gc.collect()
        gc.freeze()
        seal.seal()
    except seal.SealError as error:
        _say({"error": str(error)})
        return UNSEALED
    try:
        os.write(ready_fd, b"READY\n")
        os.close(ready_fd)
    except BrokenPipeError:
        return 0  # who wanted us is gone
    try:
        device.run()
    except LinkError as error:
        _say({"error": f"the VMM broke the protocol: {error}", **device.statistics()})
        return BROKEN
    _say(device.statistics())
    return 0


def _parse(arguments: list[str]) -> tuple[int, int, int, int]:
    values: dict[str, int] = {}
    if len(arguments) != 2 * len(_OPTIONS):
        raise ValueError(f"arguments are {' N '.join(_OPTIONS)} N")
    for name, text in zip(arguments[::2], arguments[1::2], strict=True):
        if name not in _OPTIONS or name in values or not (text.isascii() and text.isdigit()):
            raise ValueError(f"{name} {text}: arguments are {' N '.join(_OPTIONS)} N")
        values[name] = int(text)
    vhost_fd, listen_fd, ready_fd, cid = (values[name] for name in _OPTIONS)
    if len({vhost_fd, listen_fd, ready_fd}) < 3 or min(vhost_fd, listen_fd, ready_fd) < 3:
        raise ValueError("three different descriptors are needed, none of them standard")
    if not MIN_CID <= cid <= MAX_CID:
        raise ValueError(f"--cid is from {MIN_CID} to {MAX_CID}")
    return vhost_fd, listen_fd, ready_fd, cid


def _socket(fd: int, *, listening: bool) -> socket.socket:
    sock = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    accepts = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if (sock.family, sock.type) != (socket.AF_UNIX, socket.SOCK_STREAM) or accepts != listening:
        sock.detach()
        raise ValueError(f"descriptor {fd} is not the socket that it should be")
    return sock


def _say(what: Mapping[str, int | str]) -> None:
    """One line for people, unless nobody reads: the device never waits for its log."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    if any(event & select.POLLOUT for _, event in poll.poll(0)):
        try:
            os.write(2, json.dumps(what).encode() + b"\n")
        except OSError:
            pass  # the log is full or gone: no reason to end a machine's streams


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
