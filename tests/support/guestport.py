"""Code run inside a machine, for tests: box-guest as it is, with one port more.

`drive` makes a drive `guest` from an image's own, whose agent process answers on port 5005 what
the tests ask: each stream brings Python code, which runs as root in a child, and takes back
what it printed. Nothing serves that port yet; nothing of this is in the product.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import zipfile
from pathlib import Path
from typing import Final

from support.until import until

from agent_box.bus.errors import Refusal
from agent_box.bus.handover import HandoverClient
from agent_box.engine.contract import Dial
from agent_box.guest.wire import NETWORK_PORT

PORT: Final = 5005
MAIN: Final = """
import os, sys, traceback
from agent_box.guest import agent, pid1

def serve(connection):
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        connection.close()
        return
    try:
        if os.fork():  # PID 1 reaps it, as it does whatever is orphaned
            os._exit(0)
        connection.setblocking(True)
        code = b""
        while piece := connection.recv(65536):
            code += piece
        for fd in (1, 2):
            os.dup2(connection.fileno(), fd)
        sys.stdout = open(1, "w", closefd=False)
        exec(compile(code, "asked", "exec"), {"__name__": "asked"})
        sys.stdout.flush()
    except BaseException:
        os.write(1, traceback.format_exc().encode())
    finally:
        os._exit(0)

agent._nobody = serve
pid1.main()
"""


def drive(guest: Path, made: Path, *, main: str = MAIN) -> None:
    """Writes the drive `made` from the drive `guest`; `main` is what the kernel starts."""
    work = made.with_suffix(".work")
    work.mkdir()
    subprocess.run(
        ["fsck.erofs", f"--extract={work / 'tree'}", "--no-preserve", str(guest)],
        check=True, capture_output=True,
    )  # fmt: skip
    archive = work / "tree" / "box-guest.pyz"
    with zipfile.ZipFile(archive) as old:
        files = {n: old.read(n) for n in old.namelist() if not n.startswith("__main__.")}
    os.chmod(archive, 0o600)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as new:
        for name, content in files.items():
            new.writestr(name, content)
        new.writestr("__main__.py", main)
    os.chmod(archive, 0o444)
    subprocess.run(
        ["mkfs.erofs", "-T0", "-x-1", "--all-root", str(made), str(work / "tree")],
        check=True, capture_output=True,
    )  # fmt: skip


async def _dial(
    runtime: Path, service: str, instance: str, boot: int, port: int, seconds: float
) -> socket.socket:
    client = HandoverClient(runtime / "dial" / service / "sock")
    request = Dial(instance=instance, boot=boot, port=port, deadline_ms=int(seconds * 1000))
    try:
        stream = socket.socket(fileno=await client.ask(request, deadline_s=seconds + 1))
    finally:
        client.close()
    stream.setblocking(False)
    return stream


def network(runtime: Path, instance: str, *, boot: int = 1, seconds: float = 30) -> socket.socket:
    """The stream of the machine's frames, as netstack is given it."""
    return asyncio.run(_dial(runtime, "netstack", instance, boot, NETWORK_PORT, seconds))


def run(runtime: Path, instance: str, code: str, *, boot: int = 1, seconds: float = 30) -> str:
    """What the code printed, or its traceback. The engine must have been told of the boot."""

    async def main() -> str:
        with await _dial(runtime, "channel", instance, boot, PORT, seconds) as stream:
            loop = asyncio.get_running_loop()
            said = b""
            async with asyncio.timeout(seconds):
                await loop.sock_sendall(stream, code.encode())
                stream.shutdown(socket.SHUT_WR)
                while piece := await loop.sock_recv(stream, 65536):
                    said += piece
            return said.decode(errors="replace")

    def again() -> str | None:
        try:
            return asyncio.run(main()) + " "
        except (Refusal, OSError, TimeoutError):
            return None  # the agent process begins again

    return until("the guest ran it", again, seconds=seconds)[:-1]
