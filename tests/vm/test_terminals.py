"""Terminals and commands in a real machine, through the real channel service."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import guestport, procs
from support.machines import Machines
from support.remote import Command, attached
from support.until import until

from agent_box.bus.client import Client
from agent_box.bus.errors import Reason, Refusal
from agent_box.channel.contract import Ended, Hook, Instance, Run, Size, Variable

pytestmark = [
    pytest.mark.timeout(600),
]
# Its control port is as it should be until it is provisioned. Of the streams of each port some are
# garbage, some a frame that is too large, and the others begin as they should and put out more
# than anybody asked for, until a number skips.
HOSTILE = """
import os
from agent_box.guest import agent, claims, events, harness, pid1, streams, terminal, wire
from agent_box.guest.streams import Frame

counts = {}

def good_output():
    yield streams.note(Frame.OPENED, {"id": "a", "offsets": [0, 0], "taken": 0})
    for offset in range(0, 1 << 24, 1 << 16):
        yield streams.data(Frame.OUTPUT, offset, bytes(1 << 16), 0)
    yield streams.data(Frame.OUTPUT, 5, b"x", 0) * 1000

def good_events():
    yield wire.pack(claims.Said.HELLO, 0, {"versions": [1], "run": "0" * 16})
    facts = {"phase": "serves", "uptime_ms": 1, "dropped": 0}
    for number in range(1, 1 << 20):
        fields = {"number": number, "kind": "guest-phase", "facts": facts}
        yield wire.pack(claims.Said.EVENT, number, fields)

def good_control():
    for number in range(1 << 20):
        yield wire.pack(wire.Kind.REPLY, number, {"ok": True})

def flood(connection, port, begins):
    counts[port] = count = counts.get(port, -1) + 1
    if os.fork():
        connection.close()
        return
    connection.setblocking(True)
    try:
        if count % 3 == 0:
            for piece in begins():
                connection.sendall(piece)
        elif count % 3 == 1:
            connection.sendall(b"\\xff\\xff\\xff\\x7f\\x01")
        while True:
            connection.sendall(os.urandom(1 << 20))
    finally:
        os._exit(0)

control = agent.Agent._control

def once(self, connection):
    if self.provision is None:
        control(self, connection)
    else:
        flood(connection, 5000, good_control)

agent.Agent._control = once
terminal.Terminals.serve = lambda self, connection: flood(connection, 5001, good_output)
events.Events.serve = lambda self, connection: flood(connection, 5002, good_events)
harness.Harnesses.serve = lambda self, connection: flood(connection, 5004, good_output)
pid1.main()
"""


@pytest.fixture(scope="module")
def guest(machines: Machines) -> str:
    return machines.machine(environment=[Variable(name="GIVEN", value="by the host")])


@pytest.fixture
def client(machines: Machines) -> Iterator[Client]:
    with machines.client("channel", "operator") as made:
        yield made


def test_a_command_as_the_shell_knows_it(client: Client, guest: str) -> None:
    script = "cat; echo err >&2; id -u; pwd; echo $GIVEN $HOME $A; exit 7"
    command = Command(
        client, guest, "sh", "-c", script, input=b"in ", environment=[Variable(name="A", value="b")]
    )
    assert command.run() == Ended(how="exited", status=7, signal=None)
    said = b"in 1000\n/home/agent/work\nby the host /home/agent b\n"
    assert bytes(command.out["stdout"]) == said and bytes(command.out["stderr"]) == b"err\n"


def test_root_is_root_and_only_where_asked(client: Client, guest: str) -> None:
    command = Command(client, guest, "sh", "-c", "id -u; echo $HOME$GIVEN", user="root")
    assert command.run().status == 0
    assert command.out["stdout"].split() == [b"0", b"/" + b"root"]
    command = Command(client, guest, "sh", "-c", "command -v sudo && sudo -n id -u")
    assert command.run().status != 0


def test_a_megabyte_goes_through_both_ways(client: Client, guest: str) -> None:
    data = os.urandom(1 << 20)
    command = Command(client, guest, "cat", input=data)
    assert command.run().status == 0
    assert hashlib.sha256(command.out["stdout"]).digest() == hashlib.sha256(data).digest()


@pytest.mark.slow
def test_100_megabytes_arrive_whole(client: Client, guest: str) -> None:
    script = (
        "import os, hashlib, sys\nh = hashlib.sha256()\n"
        "for n in range(1600):\n d = os.urandom(65536)\n h.update(d)\n"
        " sys.stdout.buffer.write(d)\nprint(h.hexdigest(), file=sys.stderr)"
    )
    command = Command(client, guest, "python3", "-c", script)
    began = time.monotonic()
    assert command.run().status == 0
    print(f"{100 / (time.monotonic() - began):.1f} MB/s")
    found = hashlib.sha256(command.out["stdout"]).hexdigest()
    assert found == command.out["stderr"].decode().strip()


def test_what_the_hook_exports_reaches_what_runs(
    machines: Machines, client: Client, guest: str
) -> None:
    script = "mkdir -p .agent-box; echo 'export FROM_HOOK=$PWD' > .agent-box/hook.sh"
    assert Command(client, guest, "sh", "-c", script).run().status == 0
    hook = Hook(path="~/work/.agent-box/hook.sh", expected=True, required=True)
    machines.provision(guest, hook=hook)
    command = Command(client, guest, "sh", "-c", "echo $FROM_HOOK")
    assert command.run().status == 0
    assert bytes(command.out["stdout"]) == b"/home/agent/work\n"
    machines.notes.wait("hook-done")


def test_a_guest_that_floods_and_lies_on_every_port(
    machines: Machines, client: Client, guest: str
) -> None:
    drive = machines.root / "hostile.erofs"
    guestport.drive(machines.part("guest"), drive, main=HOSTILE)
    hostile = machines.create()
    machines.boot(hostile, guest=machines.add(drive))
    machines.provision(hostile)
    before = resident_kib(machines.pid("channel"))
    for number in range(9):
        command = Command(client, hostile, "x", command=f"{number:x}")
        with pytest.raises(Refusal) as refused:
            command.once()
        assert refused.value.reason is Reason.CONNECTION_LOST
        with pytest.raises(Refusal) as refused:
            client.call("terminals", Instance(instance=hostile), deadline_s=10)
        assert refused.value.reason is Reason.CONNECTION_LOST
        if number % 3 == 0:
            run = f"{number:032x}"
            request = Run(
                run=run, instance=hostile, harness=["x"], prompt="x", session=None,
                directory=None, timeout_ms=None,
            )  # fmt: skip
            client.call("run", request, deadline_s=10)
            until("the run has failed", _ended(client, hostile, run))
        assert Command(client, guest, "true").run().status == 0
    machines.restart("channel")  # and asks on port 5000 anew, which floods by now
    with pytest.raises(Refusal):
        machines.set_time(hostile)
    assert Command(client, guest, "true").run().status == 0
    print("KiB more", resident_kib(machines.pid("channel")) - before)
    assert resident_kib(machines.pid("channel")) - before < 8 << 10
    assert {n.instance for n in machines.notes.wait("forgery-refused")} == {hostile}


def _ended(client: Client, instance: str, run: str) -> Callable[[], bool]:
    def look() -> bool:
        rows = client.call("runs", Instance(instance=instance), deadline_s=10).runs  # type: ignore[attr-defined]
        return any(row.run == run and not row.live for row in rows)

    return look


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


@dataclass
class Held:
    """What a process holds.

    Attributes:
        slots: for descriptors; the kernel doubles them, and tells nobody else how many are in use.
    """

    slots: int
    threads: int
    kib: int


def held(pid: int) -> Held:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return Held(int(status["FDSize"]), int(status["Threads"]), int(status["VmRSS"].split()[0]))


# Of box-guest's processes: descriptors, threads, KiB; then how many there are of the agent's.
HELD = """
import os
found, others = [], 0
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline").read()
        lines = dict(row.split(":", 1) for row in open(f"/proc/{pid}/status").read().splitlines())
    except OSError:
        continue
    if "box-guest" in words:
        fds = len(os.listdir(f"/proc/{pid}/fd"))
        found.append((int(pid), fds, int(lines["Threads"]), int(lines["VmRSS"].split()[0])))
    elif words and int(pid) != os.getpid():
        others += 1
print(found, others)
"""


def _everywhere(machines: Machines, client: Client, guest: str) -> tuple[dict[str, Held], str]:
    assert machines.helper is not None
    pids = {service: machines.pid(service) for service in ("channel", "engine")}
    for pid in procs.descendants(machines.helper.pid):
        words = procs.cmdline(pid)
        if "agent_box.engine.vsock" in words:
            pids[f"device {len(pids)}"] = pid
    inside = Command(client, guest, "python3", "-c", HELD, user="root")
    assert inside.run().status == 0
    return {name: held(pid) for name, pid in pids.items()}, inside.out["stdout"].decode()


def _many(machines: Machines, client: Client, guest: str, count: int) -> None:
    """Commands, and each tenth a terminal; looked at when caches are full, and at the end."""
    before = {}
    begun = time.monotonic()
    for number in range(count):
        if number == count // 5:
            before, inside = _everywhere(machines, client, guest)
            print(number, inside, before)
        if number % 10 == 9:
            with attached(client, guest, "sh", "-c", "echo here") as screen:
                screen.until(b"here")
                assert screen.ended().status == 0
        else:
            command = Command(client, guest, "sh", "-c", f"cat; echo {number}", input=b"in ")
            assert command.run().status == 0
            assert bytes(command.out["stdout"]) == f"in {number}\n".encode()
    print(f"{(time.monotonic() - begun) / count * 1000:.0f} ms each")
    after, inside = _everywhere(machines, client, guest)
    print(count, inside, after)
    for name, now in after.items():
        assert now.slots <= before[name].slots * 2, name
        assert now.threads <= before[name].threads, name
        assert now.kib <= before[name].kib + 2048, name


def test_commands_in_a_row_leave_nothing(machines: Machines, client: Client, guest: str) -> None:
    _many(machines, client, guest, 30)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_5000_commands_in_a_row_leave_nothing(
    machines: Machines, client: Client, guest: str
) -> None:
    _many(machines, client, guest, 5000)


def test_ends_of_every_kind(client: Client, guest: str) -> None:
    assert Command(client, guest, "no-such-program").run().status == 127
    assert Command(client, guest, "/etc/passwd").run().status == 126
    ended = Command(client, guest, "sh", "-c", "kill -9 $$").run()
    assert ended == Ended(how="signalled", status=None, signal=9)
    ended = Command(client, guest, "sleep", "1000", timeout_ms=300).run()
    assert ended == Ended(how="timed-out", status=None, signal=None)
    with pytest.raises(Refusal, match="No such file") as refused:
        Command(client, guest, "pwd", directory="/no/such/place").run()
    assert refused.value.reason is Reason.BAD_REQUEST


def test_a_channel_that_is_killed_loses_and_doubles_nothing(
    machines: Machines, client: Client, guest: str
) -> None:
    kills = [200_000, 700_000]

    def during(command: Command) -> None:
        if kills and len(command.out["stdout"]) > kills[0]:
            kills.pop(0)
            machines.restart("channel")

    script = "seq 1 200000; cat | sha256sum >&2"
    data = os.urandom(500_000)
    command = Command(client, guest, "sh", "-c", script, input=data)
    assert command.run(during=during).status == 0
    assert bytes(command.out["stdout"]) == b"".join(b"%d\n" % n for n in range(1, 200_001))
    assert command.out["stderr"].split()[0].decode() == hashlib.sha256(data).hexdigest()
    assert command.opened == 3


def test_a_terminal_lives_on_over_a_killed_channel(
    machines: Machines, client: Client, guest: str
) -> None:
    with attached(client, guest, size=Size(rows=31, columns=97)) as screen:
        screen.type(b"stty size; tty; echo $TERM $COLORTERM $((40+2))\n")
        shown = screen.until(b"truecolor 42")
        assert b"31 97" in shown and b"/dev/pts/" in shown and b"xterm-256color" in shown
        screen.type(b"", Size(rows=50, columns=132))
        screen.type(b"stty size\n")
        screen.until(b"50 132")
        screen.type("echo 'ä漢🙂'$((1+1)); MARK=kept\n".encode())
        screen.until("ä漢🙂2".encode())
        id, end = screen.id, screen.end
        machines.restart("channel")
        with pytest.raises(Refusal):
            while True:
                screen.read()

    def listed() -> bool:
        found = client.call("terminals", Instance(instance=guest), deadline_s=10)
        return any(t.terminal == id and not t.attached for t in found.terminals)

    until("it is listed", lambda: _answers(listed))
    with attached(client, guest, id=id, offset=end) as screen:
        assert screen.start == end
        screen.type(b"echo $MARK; exit 3\n")
        screen.until(b"kept")
        assert screen.ended() == Ended(how="exited", status=3, signal=None)


def _answers(look: object) -> bool:
    try:
        return bool(look())  # type: ignore[operator]
    except Refusal:
        return False  # the service starts again


def test_what_is_left_lives_on_and_what_is_closed_does_not(client: Client, guest: str) -> None:
    with attached(client, guest, "sh", "-c", "echo up; sleep 1; echo later; sleep 1000") as screen:
        screen.until(b"up")
        id = screen.id
    with attached(client, guest, id=id) as screen:
        assert screen.until(b"later").startswith(b"up")
        with attached(client, guest, id=id) as newer:
            newer.until(b"later")
            assert screen.ended().how == "taken"
    with pytest.raises(Refusal) as refused, attached(client, guest, id="abcdef"):
        pass
    assert refused.value.reason is Reason.NOT_FOUND


def test_a_machine_that_ends_under_a_command(machines: Machines, client: Client) -> None:
    other = machines.machine()

    def end(command: Command) -> None:
        if command.opened == 1 and command.out["stdout"]:
            command.opened = 0
            machines.engine("kill", machines.vmm(other))

    command = Command(client, other, "sh", "-c", "echo up; sleep 1000", ends_input=False)
    assert command.run(during=end).how == "left-running"
    with pytest.raises(Refusal) as refused:
        Command(client, other, "true").run()
    assert refused.value.reason in (Reason.WRONG_STATE, Reason.CONNECTION_LOST)
