"""A process started exactly as the VMM is, and one as the vsock device is, reach nothing."""

from __future__ import annotations

import inspect
import json
import os
import random
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import procs as proc_facts
from support.helperhouse import fresh
from support.until import until

from agent_box.helper import bpf, capped, jail, machine, procs
from agent_box.helper.jail import Jail

MEMORY_MIB = 64
DISK = 1 << 20
SOURCE = Path(__file__).parents[1].joinpath("support", "jailattacks.py").read_text()


def inside(wanted: Jail, argv: list[str], given: tuple[int, ...]) -> tuple[int, str]:
    """Starts it as the shim does; its wait status, and what it said."""
    filter_fd = os.memfd_create("filter")
    os.write(filter_fd, wanted.filter())
    os.lseek(filter_fd, 0, 0)
    status, status_end = os.pipe()
    gate_end, gate = os.pipe()
    words, words_end = os.pipe()
    null = os.open("/dev/null", os.O_RDWR)
    pid = procs.spawn(
        jail.command(wanted, argv),
        (null, words_end, words_end, filter_fd, status_end, gate_end, *given),
    )
    for fd in (filter_fd, status_end, gate_end, words_end, null):
        os.close(fd)
    told = b""
    while b"}" not in told and (more := os.read(status, 4096)):
        told += more
    if told:
        jail.limit(json.loads(told.split(b"\n")[0])["child-pid"], wanted)
        os.write(gate, jail.GO)
    os.close(gate)
    said = b""
    while select.select([words], [], [], 60)[0] and (more := os.read(words, 65536)):
        said += more
    os.close(words)
    os.close(status)
    return os.waitpid(pid, 0)[1], said.decode()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What there is to be attacked, all of the same uid."""
    for name in ("kernel", "variant", "data.img", "other.img", "store.db", "helper.key"):
        (tmp_path / name).write_bytes(b"golden" * 100)
    (tmp_path / "variant").chmod(0o444)
    sockets = []
    for name, kind in (("bus", socket.SOCK_STREAM), ("helper", socket.SOCK_SEQPACKET)):
        sock = socket.socket(socket.AF_UNIX, kind)
        os.chdir(tmp_path)
        sock.bind(name)
        sock.listen()
        sockets.append(sock)
    data = os.open(tmp_path / "data.img", os.O_RDWR)
    os.ftruncate(data, DISK)
    yield {
        "directory": tmp_path,
        "data": data,
        "paths": [str(tmp_path), os.path.expanduser("~"), "/etc", "/home", "/tmp", "/run",
                  "/var", "/sys", "/proc/self", "/dev/kvm", "/dev/vsock", "/dev/tty"],
        "sockets": [str(tmp_path / name) for name in ("bus", "helper")],
        "pid": os.getpid(),
    }  # fmt: skip
    os.close(data)
    for sock in sockets:
        sock.close()


def attack(wanted: Jail, host: dict[str, Any], **more: Any) -> dict[str, list[Any]]:
    facts = {k: v for k, v in host.items() if k not in ("directory", "data")} | more
    data = more["data_fd"] is not None
    given = (host["data"],) if data else ()
    facts["fds"] = [jail.FIRST_FD] if data else []
    argv = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", SOURCE, json.dumps(facts)]
    status, said = inside(wanted, argv, given)
    assert status == 0, said
    results: dict[str, list[Any]] = json.loads(said.splitlines()[-1])
    return results


def succeeded(results: dict[str, list[Any]]) -> dict[str, str]:
    return {name: saw for name, (success, saw) in results.items() if success}


def as_vmm(host: dict[str, Any]) -> Jail:
    images = [(name, str(host["directory"] / name)) for name in ("kernel", "variant")]
    return jail.vmm("ab" * 16, images, kvm=False, memory_mib=MEMORY_MIB, disk=DISK)


def test_nothing_succeeds_from_a_process_started_as_the_vmm(host: dict[str, Any]) -> None:
    results = attack(
        as_vmm(host),
        host,
        images=["/machine/kernel", "/machine/variant"],
        memory=(MEMORY_MIB << 20) + (2 << 30),
        open_files=1100,
        data_fd=jail.FIRST_FD,
        disk=MEMORY_MIB << 20,  # the limit is the larger of the two
    )
    assert succeeded(results) == {}
    assert len(results) > 90
    for name in ("kernel", "variant"):
        assert (host["directory"] / name).read_bytes() == b"golden" * 100
    assert (host["directory"] / "variant").stat().st_mode & 0o777 == 0o444


def test_nothing_succeeds_from_a_process_started_as_the_device(host: dict[str, Any]) -> None:
    results = attack(
        jail.device("ab" * 16, MEMORY_MIB),
        host,
        images=[f"{jail.CODE}/agent_box/helper/jail.py"],
        memory=2 * (MEMORY_MIB << 20) + (2 << 30),
        open_files=4200,
        data_fd=None,
        disk=0,
    )
    assert succeeded(results) == {}


def test_a_worker_reaches_the_network_and_no_more(host: dict[str, Any]) -> None:
    broker, resolver = host["directory"] / "broker", host["directory"] / "host"
    broker.mkdir()
    resolver.mkdir()
    results = attack(
        jail.worker("ab" * 16, str(broker), str(resolver)),
        host,
        images=[],
        memory=2 << 30,
        open_files=jail.WORKER_FILES + 100,
        data_fd=None,
        disk=0,
    )
    allowed = {f"socket_{f}" for f in (1, 2, 10, 16)} | {"socket_inet_datagram", "socketpair"}
    done = succeeded(results)
    assert done.pop("reach_a_path_of_the_host") == "['/etc']"  # three links, and nothing else
    assert set(done) == allowed


def test_the_attacks_are_real(host: dict[str, Any]) -> None:
    """Outside of the jail the same program does most of it."""
    facts = {k: v for k, v in host.items() if k not in ("directory", "data")}
    facts |= {"images": [str(host["directory"] / "variant")], "memory": 3 << 30}
    facts |= {"open_files": 100, "data_fd": host["data"], "disk": DISK, "fds": []}
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", SOURCE, json.dumps(facts)],
        capture_output=True, text=True, pass_fds=[host["data"]], timeout=60,
        env={"PATH": "/usr/bin", "SECRET": "x"}, check=True,
    )  # fmt: skip
    done = set(succeeded(json.loads(ran.stdout)))
    assert {
        "reach_a_path_of_the_host", "connect_to_a_socket_of_the_host", "see_processes",
        "see_accounts", "signal_a_process_of_the_host", "make_a_namespace", "socket_1",
        "socket_2", "write_an_image", "make_a_file_anywhere", "gain_privileges",
        "have_a_descriptor_that_was_not_given", "take_more_memory", "take_more_descriptors",
        "write_a_larger_file", "find_something_in_the_environment", "call_pidfd_open",
        "call_shmget", "call_name_to_handle_at", "socketpair", "clone3",
    } <= done  # fmt: skip


@pytest.mark.parametrize("closed", ["the mount", "the filter"])
def test_either_wall_alone_keeps_a_shared_image(closed: str, host: dict[str, Any]) -> None:
    """As a same-uid process: with a descriptor only, the filter; with a mount only, that."""
    image = host["directory"] / "variant"
    program = inspect.cleandoc(
        """
        import os, sys
        for way in (lambda: os.fchmod(6, 0o666), lambda: os.chmod("/machine/variant", 0o666),
                    lambda: os.write(os.open("/machine/variant", os.O_RDWR), b"evil"),
                    lambda: os.write(os.open("/proc/self/fd/6", os.O_RDWR), b"evil")):
            try: way()
            except OSError: pass
        """
    )
    argv = [os.path.realpath(sys.executable), "-I", "-S", "-c", program]
    number = os.open(image, os.O_RDONLY)
    if closed == "the filter":
        status, said = inside(as_vmm(host)._replace(files=()), argv, (number,))
    else:
        words = jail.command(as_vmm(host), argv)
        bare = [*words[: words.index("--json-status-fd")], "--", *argv]
        ran = subprocess.run(bare, capture_output=True, text=True, timeout=60, check=False)
        status, said = ran.returncode, ran.stderr
    os.close(number)
    assert status == 0, said
    assert image.read_bytes() == b"golden" * 100
    assert image.stat().st_mode & 0o777 == 0o444


def test_a_jail_whose_starter_dies_ends_at_its_gate(host: dict[str, Any]) -> None:
    wanted = as_vmm(host)
    reader, writer = os.pipe()
    starter = os.fork()
    if starter == 0:
        os.close(reader)
        filter_fd = os.memfd_create("filter")
        os.write(filter_fd, wanted.filter())
        os.lseek(filter_fd, 0, 0)
        gate_end, _gate = os.pipe()
        null = os.open("/dev/null", os.O_RDWR)
        procs.spawn(
            jail.command(wanted, ["/usr/bin/sleep", "1000"]),
            (null, null, null, filter_fd, writer, gate_end),
        )
        signal_me = os.getpid()
        select.select([], [], [], 0.2)
        os.kill(signal_me, 9)
    os.close(writer)
    told = b""
    while b"}" not in told:
        told += os.read(reader, 4096)
    waiting = json.loads(told.split(b"\n")[0])["child-pid"]
    os.waitpid(starter, 0)
    until("the jail has ended", lambda: proc_facts.state(waiting) in "XZ")
    os.close(reader)


@pytest.mark.parametrize("stopped", ["at its gate", "while it is built"])
def test_a_jail_can_be_ended_at_any_time(host: dict[str, Any], stopped: str) -> None:
    """Also in the moment in which bubblewrap has made a process that waits for it: killed then
    and there, it would leave that one waiting for ever."""
    dice = random.Random(3)
    for _ in range(12 if stopped == "while it is built" else 1):
        wanted = jail.vmm(fresh(), (), kvm=False, memory_mib=MEMORY_MIB, disk=DISK)
        filter_fd = os.memfd_create("filter")
        os.write(filter_fd, wanted.filter())
        os.lseek(filter_fd, 0, 0)
        gate_end, gate = os.pipe()
        null = os.open("/dev/null", os.O_RDWR)
        pid = procs.spawn(
            jail.command(wanted, ["/usr/bin/sleep", "1000"]),
            (null, null, null, filter_fd, null, gate_end),
        )
        outer = procs.find(pid)
        select.select([], [], [], 0.3 if stopped == "at its gate" else dice.uniform(0, 0.006))
        assert procs.end_jail(outer, patience=0, seconds=20)
        os.waitpid(pid, 0)
        for fd in (filter_fd, gate_end, null):
            os.close(fd)
        # With the gate still open, so that nothing ends by itself.
        until("nothing of it is left", lambda w=wanted: not proc_facts.with_word(w.name))
        os.close(gate)


@pytest.mark.parametrize("reader", ["stays", "goes"])
def test_a_jail_whose_starter_dies_while_it_is_built_ends(reader: str) -> None:
    """Nobody reads what bubblewrap tells, and the gate is closed."""
    for _ in range(8):
        wanted = jail.vmm(fresh(), (), kvm=False, memory_mib=MEMORY_MIB, disk=DISK)
        filter_fd = os.memfd_create("filter")
        os.write(filter_fd, wanted.filter())
        os.lseek(filter_fd, 0, 0)
        gate_end, gate = os.pipe()
        status, status_end = jail.status_pipe()
        null = os.open("/dev/null", os.O_RDWR)
        if reader == "goes":
            os.close(status)
        pid = procs.spawn(
            jail.command(wanted, ["/usr/bin/sleep", "1000"]),
            (null, null, null, filter_fd, status_end, gate_end),
        )
        for fd in (filter_fd, gate_end, gate, null, status_end):
            os.close(fd)
        until("it has ended", lambda p=pid: proc_facts.state(p) in "XZ")
        assert os.waitpid(pid, 0)[1] != 0
        if reader == "stays":
            assert b"child-pid" in os.read(status, 4096)
            while os.read(status, 4096):  # and then it ends, with bubblewrap
                pass
            os.close(status)
        assert not proc_facts.with_word(wanted.name)


def test_the_status_pipe_ends_with_bubblewrap_and_not_with_the_program(
    host: dict[str, Any],
) -> None:
    """Else a shim would wait in vain when bubblewrap is killed."""
    program = (
        "import os\nfor fd in (3, 4, 5):\n  try: os.fstat(fd); print(fd)\n  except OSError: pass"
    )
    argv = [os.path.realpath(sys.executable), "-I", "-S", "-c", program]
    assert inside(as_vmm(host), argv, ()) == (0, "")


# ------------------------------------------------------------------------ the filter


def run_filter(program: bytes, number: int, *arguments: int, arch: int = 0xC000003E) -> int:
    """What the kernel would return for a call: a small interpreter of classic BPF."""
    import struct

    data = struct.pack("=iIQ6Q", number, arch, 0, *(*arguments, *([0] * (6 - len(arguments)))))
    code = list(struct.iter_unpack("=HBBI", program))
    at = accumulator = 0
    while True:
        op, yes, no, value = code[at]
        at += 1
        if op == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif op == 0x06:
            return int(value)
        else:
            true = {
                0x15: accumulator == value,
                0x35: accumulator >= value,
                0x45: bool(accumulator & value),
            }[op]
            at += yes if true else no


ALLOW, KILL, EPERM, ENOSYS, NOFAMILY = 0x7FFF0000, 0x80000000, 0x50001, 0x50026, 0x50061


def test_the_filter_says_what_it_should() -> None:
    none, some = bpf.program(()), bpf.program((1, 2))
    for group in bpf.REFUSED.values():
        for number in group.values():
            assert run_filter(none, number) == EPERM
    for number in (0, 1, 9, 10, 202, 257, 59, 288, 47, 46, 319):
        assert run_filter(none, number) == ALLOW
    assert run_filter(none, 0, arch=0x40000003) == KILL  # i386
    assert run_filter(none, 0x40000000 + 1) == KILL
    assert run_filter(none, 457) == ENOSYS
    assert run_filter(none, 435) == ENOSYS
    assert run_filter(none, 56, 0x11) == ALLOW
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert run_filter(none, 56, flag | 0x11) == EPERM
    assert run_filter(none, 16, 0, 0x5412) == EPERM
    assert run_filter(none, 16, 0, 0x1_0000_5412) == EPERM
    assert run_filter(none, 16, 0, 0xAE80) == ALLOW  # KVM_RUN
    for call in (41, 53):
        for family in (*range(50), 0x1_0000_0001):
            assert run_filter(none, call, family) == NOFAMILY
            wanted = ALLOW if family & 0xFFFFFFFF in (1, 2) else NOFAMILY
            assert run_filter(some, call, family) == wanted


def test_no_number_is_refused_twice_and_all_are_those_of_this_kernel() -> None:
    pyseccomp = pytest.importorskip("pyseccomp")
    seen: dict[int, str] = {}
    for group in bpf.REFUSED.values():
        for name, number in group.items():
            assert seen.setdefault(number, name) == name
            known = pyseccomp.resolve_syscall(pyseccomp.Arch.X86_64, name)
            assert known in (number, -1) or known < 0, name


def test_another_machine_has_no_jail() -> None:
    with pytest.raises(bpf.FilterError, match="aarch64"):
        bpf.program((), "aarch64")


# ------------------------------------------------------------------------ command lines


def test_a_jail_outlives_who_started_it_and_shares_nothing() -> None:
    for wanted in (
        jail.vmm("ab" * 16, (), kvm=True, memory_mib=64, disk=0),
        jail.device("ab" * 16, 64),
        jail.worker("ab" * 16, "/run/b", "/run/host"),
    ):
        words = jail.command(wanted, ["x"])
        assert "--die-with-parent" not in words
        assert "--proc" not in words
        assert {"--as-pid-1", "--new-session", "--unshare-user", "--clearenv"} <= set(words)
        assert ("--unshare-net" in words) == ("worker" not in wanted.name)
        assert "--bind" not in words and "--bind-try" not in words  # nothing writable
    assert "/dev/kvm" in jail.command(
        jail.vmm("ab" * 16, (), kvm=True, memory_mib=64, disk=0), ["x"]
    )
    assert "/dev/kvm" not in jail.command(
        jail.vmm("ab" * 16, (), kvm=False, memory_mib=64, disk=0), ["x"]
    )


PROFILE = {
    "engine": "qemu", "accel": "tcg", "cpus": 2, "memory_mib": 512, "kernel": "k",
    "initramfs": "i", "variant": "v", "guest": "g", "harness": None,
}  # fmt: skip


def options(words: list[str], name: str) -> list[str]:
    return [words[at + 1] for at, word in enumerate(words) if word == name]


def test_the_machine_is_what_the_profile_says_and_has_no_way_out() -> None:
    words = machine.command("/usr/bin/qemu", {**PROFILE, "harness": "h"}, 2_600_000)
    assert options(words, "-accel") == ["tcg,tb-size=256"]
    assert options(words, "-cpu") == ["max,erms=off,fsrm=off"]
    (line,) = options(words, "-append")
    assert "tsc_early_khz=2600000 tsc=reliable" in line
    drives = options(words, "-drive")
    assert [d.split(",")[0] for d in drives] == ["id=variant", "id=data", "id=guest", "id=harness"]
    for drive in drives:
        assert ("readonly=on" in drive) != drive.startswith("id=data")
        assert ("discard=unmap" in drive) == drive.startswith("id=data")
    devices = options(words, "-device")
    assert [d for d in devices if "net" in d or "9p" in d or "virtiofs" in d] == []
    assert "vhost-user-vsock-device,chardev=vsock" in devices
    assert "virtio-balloon-device,id=balloon" in devices
    assert options(words, "-m") == ["512M"] and options(words, "-smp") == ["2"]
    alone = machine.command("qemu", {**PROFILE, "cpus": 1}, 2_400_000)
    assert options(alone, "-smp") == ["1,maxcpus=2"], "its barriers would be translated to nothing"
    alone = machine.command("qemu", {**PROFILE, "cpus": 1, "accel": "kvm"}, None)
    assert options(alone, "-smp") == ["1"]
    denied = ("obsolete", "elevateprivileges", "spawn", "resourcecontrol")
    assert options(words, "-sandbox") == [",".join(["on", *(f"{d}=deny" for d in denied)])]
    assert {"-nodefaults", "-no-user-config", "-no-reboot"} <= set(words)
    assert "rtc=off" not in " ".join(words)


def test_the_accelerator_is_never_another_one() -> None:
    words = machine.command("/usr/bin/qemu", {**PROFILE, "accel": "kvm"}, None)
    assert options(words, "-accel") == ["kvm"]
    assert options(words, "-cpu") == ["host"]
    assert "tsc" not in options(words, "-append")[0]
    assert [d for d in options(words, "-drive") if "harness" in d] == []


def test_console_and_messages_are_of_limited_size() -> None:
    for shape in (capped.CONSOLE, capped.MESSAGES):
        assert shape.first + 2 * shape.next <= 512 << 10
