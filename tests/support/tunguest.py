"""A guest for a plane without a machine: the kernel's own TCP in a network namespace of its own,
behind a TUN device that is pumped as box-guest pumps it, or by its very pump.

`TunGuest.socket` makes sockets inside that namespace for use by the test itself, since a socket
stays where it was made. Needs /dev/net/tun to be open to this account; `unavailable` says why
it is not.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

from agent_box.guest import network
from agent_box.guest.wire import HOST_CID

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 1, 0x1000, 0x4000
_OFFLOADS = 0x7  # checksums, TSO for IPv4 and IPv6
MTU = 65520
ADDRESS = "198.18.0.2"
GATEWAY = "198.18.0.1"


def unavailable() -> str | None:
    """Why there can be no such guest on this host; None when there can."""
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"this account cannot open /dev/net/tun: {error.strerror}"
    found = subprocess.run(
        ["unshare", "-Urn", "ip", "link"], capture_output=True, text=True, check=False
    )
    return None if found.returncode == 0 else f"no network namespace: {found.stderr.strip()}"


class TunGuest:
    """One namespace with tun0."""

    def __init__(self, mtu: int = MTU, offload: bool = True, own: bool = True) -> None:
        """`own`: pumped by this module, which keeps the device when the link ends; or by
        `agent_box.guest.network`.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(
            ["unshare", "-Urn", "--kill-child", sys.executable, __file__, str(theirs.fileno()),
             str(mtu), str(int(offload)), str(int(own))],
            pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()
        self._control = ours
        self._control.settimeout(60)
        assert self._control.recv(16) == b"up"

    def new_link(self) -> socket.socket:
        """The plane's end of a stream of frames; an earlier one ends."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._ask(b"link", theirs)
        theirs.close()
        ours.setblocking(False)
        return ours

    def socket(self, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
        """A socket of the guest's."""
        self._control.sendall(f"socket {kind} {protocol}".encode())
        message, fds, _, _ = socket.recv_fds(self._control, 256, 1)
        assert message == b"ok", message
        made = socket.socket(fileno=fds[0])
        made.settimeout(60)
        return made

    def run(self, *words: str) -> str:
        """A command inside, such as `ip link set tun0 down`."""
        found = subprocess.run(self.inside(*words), capture_output=True, text=True, check=True)
        return found.stdout

    def inside(self, *words: str) -> list[str]:
        """The command line that runs another one inside."""
        return ["nsenter", "--preserve-credentials", "-U", "-n", "-t", str(self.pid()), *words]

    def close(self) -> None:
        self._control.close()
        self.process.kill()
        self.process.wait()

    def pid(self) -> int:
        """Of the process that pumps."""
        self._control.sendall(b"pid")
        return int(self._control.recv(64))

    def _ask(self, words: bytes, passed: socket.socket) -> None:
        socket.send_fds(self._control, [words], [passed.fileno()])
        assert self._control.recv(64) == b"ok"


# -- inside the namespace


class _Guest:
    """Its TUN and the link that is used at present."""

    def __init__(self, tun: int) -> None:
        self.tun = tun
        self.link: socket.socket | None = None

    def pump_out(self) -> None:
        """From tun0 to the link, several frames at a time; lost when there is no link."""
        buffer = bytearray(1 << 20)
        view = memoryview(buffer)
        while True:
            at = 0
            while at < (256 << 10):
                try:
                    count = os.readv(self.tun, [view[at + 4 : at + 4 + 65600]])
                except BlockingIOError:
                    break
                struct.pack_into("<I", buffer, at, count)
                at += 4 + count
            if not at:
                _wait_for(self.tun)
                continue
            try:
                if self.link is not None:
                    self.link.sendall(view[:at])
            except OSError:
                pass  # the plane hung up


def _wait_for(tun: int) -> None:
    poll = select.poll()
    poll.register(tun, select.POLLIN)
    poll.poll()


def _pump_in(tun: int, link: socket.socket) -> None:
    buffer = bytearray(1 << 20)
    view = memoryview(buffer)
    have = 0
    while True:
        try:
            count = link.recv_into(view[have:])
        except OSError:
            return
        if not count:
            return
        end = have + count
        at = 0
        while end - at >= 4:
            length = int.from_bytes(buffer[at : at + 4], "little")
            if end - at - 4 < length:
                break
            try:
                os.write(tun, view[at + 4 : at + 4 + length])
            except OSError:
                pass  # tun0 is down: lost, as it would be
            at += 4 + length
        buffer[: end - at] = buffer[at:end]
        have = end - at


class _Listener(socket.socket):
    """Accepts what the control socket brings, for box-guest's pump; answers as it does that."""

    def accept(self) -> tuple[socket.socket, tuple[int, int]]:
        message, fds, _, _ = socket.recv_fds(self, 256, 1)
        if not message:
            os._exit(0)
        if not fds:
            self.sendall(str(os.getpid()).encode() if message == b"pid" else b"no")
            raise OSError("it was not a link")
        self.sendall(b"ok")
        return socket.socket(fileno=fds[0]), (HOST_CID, 0)


def _pump_as_the_guest(tun: int, control: socket.socket) -> None:
    listener = _Listener(fileno=control.detach())
    network.system.log = lambda text: None
    network.Pump(tun, listener).run()


def _serve(control: socket.socket, mtu: int, offload: bool, own: bool) -> None:
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        tun, _TUNSETIFF, struct.pack("16sH22x", b"tun0", _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
    )
    fcntl.ioctl(tun, _TUNSETOFFLOAD, _OFFLOADS if offload else 0)
    for words in (
        f"link set tun0 mtu {mtu} txqueuelen 5000 up",
        "link set lo up",
        f"addr add {ADDRESS} peer {GATEWAY} dev tun0",
        f"route add default via {GATEWAY}",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    Path("/proc/sys/net/ipv4/ping_group_range").write_text("0 0")
    control.sendall(b"up")
    if not own:
        _pump_as_the_guest(tun, control)
    guest = _Guest(tun)
    threading.Thread(target=guest.pump_out, daemon=True).start()
    while True:
        message, fds, _, _ = socket.recv_fds(control, 256, 1)
        if not message:
            return
        words = message.split()
        if words[0] == b"link":
            link = socket.socket(fileno=fds[0])
            old, guest.link = guest.link, link
            if old is not None:
                old.shutdown(socket.SHUT_RDWR)
            threading.Thread(target=_pump_in, args=(tun, link), daemon=True).start()
            control.sendall(b"ok")
        elif words[0] == b"pid":
            control.sendall(str(os.getpid()).encode())
        else:
            made = socket.socket(socket.AF_INET, int(words[1]), int(words[2]))
            socket.send_fds(control, [b"ok"], [made.fileno()])
            made.close()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3] == "1",
           sys.argv[4] == "1")  # fmt: skip
