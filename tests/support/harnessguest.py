"""A guest that serves harnesses alone, as a process of this host: `python harnessguest.py SOCKET`.

What listens is a Unix socket in the place of vsock port 5004; programs run as whoever runs it,
in the directory of the socket.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agent_box.guest import launch
from agent_box.guest.harness import Harnesses
from agent_box.guest.loop import Loop


def main(path: str) -> None:
    home = os.path.dirname(path)
    loop = Loop()
    ground = launch.Ground(None, home, home)
    given = [("GIVEN", "yes"), *((n, v) for n, _, v in (w.partition("=") for w in sys.argv[2:]))]
    harnesses = Harnesses(loop, lambda: (given, {}), ground)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    listener.setblocking(False)

    def accept(_: int) -> None:
        connection, _peer = listener.accept()
        connection.setblocking(False)
        harnesses.serve(connection)

    loop.register(listener, selectors.EVENT_READ, accept)
    os.write(1, b"ready\n")
    while True:
        loop.turn()


@contextmanager
def guest(
    directory: Path, wrap: Sequence[str] = (), given: Sequence[str] = ()
) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """The socket of a guest that runs, and its process.

    Args:
        wrap: words before its command line, as of a jail.
        given: NAME=VALUE, for the environment of harnesses.
    """
    path = directory / "g.sock"
    path.unlink(missing_ok=True)
    words = [*wrap, sys.executable, __file__, str(path), *given]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line == b"ready\n":
                break
        assert process.poll() is None
        yield path, process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


if __name__ == "__main__":
    main(sys.argv[1])
