"""A guest that was taken over, in a real machine, beside one that was not."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import guestport
from support.machines import Machines

from agent_box.bus.errors import Reason, Refusal

pytestmark = [
    pytest.mark.timeout(600),
]
# It greets as box-guest does, and then says more than anybody asked for, on every stream.
HOSTILE = """
import os
from agent_box.guest import agent, pid1
from agent_box.guest.wire import Kind, pack

def flood(connection):
    if os.fork():
        connection.close()
        return
    connection.setblocking(True)
    hello = {"versions": [1], "guest": "x" * 400, "boot": 9, "streams": [],
             "disk": {"state": "ok", "bytes": 1, "text": ""}}
    try:
        connection.sendall(pack(Kind.HELLO, 0, hello))
        connection.recv(65536)
        lie = pack(Kind.REPLY, 1, {"ok": True, "now_ns": 1}) * 2
        while True:
            connection.sendall(lie + os.urandom(1 << 20))
    finally:
        os._exit(0)

agent.Agent._control = lambda self, connection: flood(connection)
pid1.main()
"""


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


def test_only_its_own_stream_ends(machines: Machines) -> None:
    drive = machines.root / "hostile.erofs"
    guestport.drive(machines.part("guest"), drive, main=HOSTILE)
    hostile, good = machines.create(), machines.create()
    machines.boot(hostile, guest=machines.add(drive))
    machines.boot(good)
    machines.provision(good)
    with pytest.raises(Refusal) as refused:
        machines.provision(hostile)
    assert refused.value.reason is Reason.CONNECTION_LOST
    before = resident_kib(machines.pid("channel"))

    def attack(_: int) -> None:
        try:
            machines.set_time(hostile)
        except Refusal as refusal:
            assert refusal.reason is Reason.CONNECTION_LOST

    with ThreadPoolExecutor(1) as pool:
        attacks = pool.submit(lambda: [attack(n) for n in range(20)])
        with machines.client("channel", "registry") as other:
            from agent_box.channel.contract import Guest

            while not attacks.done():
                began = time.monotonic()
                guest = Guest(instance=good, boot=1)
                found = other.call("set_time", guest, deadline_s=10)
                assert abs(found.skew_ms) < 1000  # type: ignore[attr-defined]
                assert time.monotonic() - began < 3
        attacks.result()
    assert resident_kib(machines.pid("channel")) - before < 8192
    notes = machines.notes.wait("forgery-refused")
    assert {note.instance for note in notes} == {hostile}
    assert len(notes) <= 3
    assert machines.query(hostile).state == "running"
