from __future__ import annotations

import builtins
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from agent_box.process import seccomp
from agent_box.process.seccomp import BASE, BY_REQUEST, NEVER, Rule, SeccompError

KILL_PROCESS, ALLOW, ERRNO = 0x80000000, 0x7FFF0000, 0x00050000


def calls(filter_: seccomp.Filter, *, allow: bool) -> set[str]:
    return {rule.call for rule in filter_.rules if rule.allow is allow and not rule.where}


def test_a_call_is_spoken_of_once() -> None:
    assert not BASE & NEVER
    assert not BASE & BY_REQUEST
    assert not NEVER & BY_REQUEST


@pytest.mark.parametrize("host_network", [False, True])
def test_what_is_not_named_is_refused(host_network: bool) -> None:
    wanted = seccomp.outer(host_network=host_network, extra=())
    assert wanted.otherwise is not None
    assert calls(wanted, allow=True) == BASE
    assert calls(wanted, allow=False) == (NEVER | BY_REQUEST) - {"socket.netlink"}
    assert {"clone3", "clone", "ioctl", "prctl", "socket"}.isdisjoint(calls(wanted, allow=True))


def test_a_contract_may_ask_for_some_calls_only() -> None:
    wanted = seccomp.outer(host_network=False, extra=("memfd_create", "chmod"))
    assert {"memfd_create", "chmod"} <= calls(wanted, allow=True)
    assert not {"memfd_create", "chmod"} & calls(wanted, allow=False)
    for name in ("ptrace", "nonsense", "execve", "socket"):
        with pytest.raises(ValueError, match=f"a contract cannot ask for {name}"):
            seccomp.outer(host_network=False, extra=(name,))


def test_netlink_comes_by_request() -> None:
    def families(*extra: str) -> set[int]:
        wanted = seccomp.outer(host_network=True, extra=extra)
        return {r.where[0][2] for r in wanted.rules if r.call == "socket" and r.allow}

    assert families() == {1, 2, 10}
    assert families("socket.netlink") == {1, 2, 10, 16}


def test_without_network_only_unix_sockets_can_be_made() -> None:
    wanted = seccomp.outer(host_network=False, extra=())
    assert [r.where for r in wanted.rules if r.call == "socket" and r.allow] == [((0, 4, 1),)]
    refused = {r.where[0][2] for r in wanted.rules if r.call == "socket" and not r.allow}
    assert refused == set(range(47)) - {1}


# ---------------------------------------------------------------- the compiled program


class Machine:
    """Runs a compiled filter as the kernel would (classic BPF, the subset that is generated)."""

    def __init__(self, program: bytes) -> None:
        assert len(program) % 8 == 0
        self.code = [struct.unpack_from("=HBBI", program, i) for i in range(0, len(program), 8)]

    def run(self, number: int, arguments: tuple[int, ...] = (), arch: int = 0) -> int:
        arguments = (*arguments, *([0] * (6 - len(arguments))))
        data = struct.pack("=iIQ6Q", number, arch or ARCH, 0, *arguments)
        at = accumulator = 0
        memory: dict[int, int] = {}
        while True:
            code, true, false, k = self.code[at]
            at += 1
            if code == 0x20:  # ld [k]
                accumulator = struct.unpack_from("=I", data, k)[0]
            elif code == 0x02:  # st
                memory[k] = accumulator
            elif code == 0x60:  # ld M[k]
                accumulator = memory[k]
            elif code == 0x54:  # and
                accumulator &= k
            elif code == 0x06:  # ret
                return k
            elif code == 0x05:  # ja
                at += k
            else:
                taken = {0x15: accumulator == k, 0x25: accumulator > k, 0x35: accumulator >= k}
                at += true if taken[code] else false


def _arch() -> int:
    import pyseccomp

    return int(pyseccomp.system_arch())


ARCH = _arch()


def number(name: str) -> int:
    import pyseccomp

    found = seccomp._number(pyseccomp, name)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def programs() -> dict[str, Machine]:
    wanted = {
        "none": seccomp.outer(host_network=False, extra=()),
        "host": seccomp.outer(host_network=True, extra=()),
        "netlink": seccomp.outer(host_network=True, extra=("socket.netlink",)),
        "inner": seccomp.inner(),
    }
    return {name: Machine(seccomp.program(each)) for name, each in wanted.items()}


PASS, EPERM, ENOSYS = ALLOW, ERRNO | 1, ERRNO | 38
THREAD = 0x3D0F00  # what pthread_create asks clone for


@pytest.mark.parametrize(
    ("filter_", "call", "arguments", "answer"),
    [
        ("none", "read", (), PASS),
        ("none", "ptrace", (), EPERM),
        ("none", "clone3", (), ENOSYS),
        ("none", "clone", (THREAD,), PASS),
        ("none", "clone", (17,), ENOSYS),
        ("none", "clone", (0x4111,), ENOSYS),  # vfork's flags
        *[("none", "clone", (THREAD | new,), ENOSYS) for new in (
            0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
        )],
        ("none", "socket", (1, 1, 0), PASS),
        ("none", "socket", (1, 0x80801, 0), PASS),
        ("none", "socket", (2, 1, 0), EPERM),
        ("none", "socket", (10, 1, 6), EPERM),
        ("none", "socket", (40, 1, 0), EPERM),
        ("none", "socket", (16, 3, 0), EPERM),
        ("none", "socket", (99, 1, 0), ENOSYS),
        ("none", "socketpair", (1, 1, 0), PASS),
        ("none", "socketpair", (2, 1, 0), ENOSYS),
        ("host", "socket", (2, 1, 0), PASS),
        ("host", "socket", (2, 0x80801, 6), PASS),
        ("host", "socket", (10, 0x802, 17), PASS),
        ("host", "socket", (2, 2, 1), ENOSYS),  # ping sockets
        ("host", "socket", (2, 1, 132), ENOSYS),  # SCTP
        ("host", "socket", (2, 3, 1), EPERM),
        ("host", "socket", (2, 0x80803, 255), EPERM),
        ("host", "socket", (2, 10, 0), EPERM),
        ("host", "socket", (17, 3, 0), EPERM),
        ("host", "socket", (40, 1, 0), EPERM),
        ("host", "socket", (16, 3, 0), EPERM),
        ("netlink", "socket", (16, 0x80003, 0), PASS),
        ("netlink", "socket", (16, 3, 9), ENOSYS),  # audit
        ("none", "ioctl", (0, 0x5421), PASS),
        ("none", "ioctl", (0, 0x1_0000_5421), PASS),  # the kernel sees the same
        ("none", "ioctl", (0, 0x5412), EPERM),
        ("none", "ioctl", (0, 0x1_0000_5412), EPERM),
        ("none", "ioctl", (0, 0xDEAD_BEEF_0000_541C), EPERM),
        ("none", "ioctl", (0, 0x5414), ENOSYS),
        ("none", "prctl", (3,), PASS),
        ("none", "prctl", (0x1_0000_0003,), ENOSYS),
        ("none", "prctl", (22,), ENOSYS),  # PR_SET_SECCOMP
        ("none", "sched_setscheduler", (0, 0), PASS),
        ("none", "sched_setscheduler", (0, 1), ENOSYS),
        ("none", "execve", (), PASS),
        ("none", "execveat", (), EPERM),
        ("inner", "execve", (), EPERM),
        ("inner", "execveat", (), EPERM),
        ("inner", "read", (), PASS),
        ("inner", "prctl", (4, 1), EPERM),
        ("inner", "prctl", (3,), PASS),
        ("inner", "prlimit64", (0, 7, 0, 1), PASS),
        ("inner", "prlimit64", (0, 7, 1, 0), EPERM),
        ("inner", "prlimit64", (0, 7, 1 << 32, 0), EPERM),
        ("inner", "setrlimit", (), EPERM),
        ("inner", "seccomp", (), EPERM),
    ],
)  # fmt: skip
def test_the_program_says(
    programs: dict[str, Machine],
    filter_: str,
    call: str,
    arguments: tuple[int, ...],
    answer: int,
) -> None:
    assert programs[filter_].run(number(call), arguments) == answer


@pytest.mark.parametrize("filter_", ["none", "host", "inner"])
def test_another_table_of_calls_kills(programs: dict[str, Machine], filter_: str) -> None:
    machine = programs[filter_]
    assert machine.run(number("getpid"), arch=0x40000003) == KILL_PROCESS  # i386
    assert machine.run(number("getpid"), arch=ARCH ^ 1) == KILL_PROCESS
    if ARCH == 0xC000003E:
        assert machine.run(0x40000000 | number("getpid")) == KILL_PROCESS  # x32


@pytest.mark.parametrize("filter_", ["none", "host"])
def test_a_call_of_a_newer_kernel_does_not_exist(
    programs: dict[str, Machine], filter_: str
) -> None:
    for unknown in (463, 500, 600, 1000):
        assert programs[filter_].run(unknown) == ENOSYS


def test_every_base_call_passes_and_every_other_does_not(programs: dict[str, Machine]) -> None:
    import pyseccomp

    for name in BASE | NEVER | (BY_REQUEST - {"socket.netlink"}):
        found = seccomp._number(pyseccomp, name)
        if found is not None:
            assert programs["none"].run(found) == (PASS if name in BASE else EPERM), name


# ---------------------------------------------------------------- what can go wrong


def test_export_replaces_in_one_step(tmp_path: Path) -> None:
    target = tmp_path / "a.bpf"
    target.write_bytes(b"old")
    seccomp.export(seccomp.inner(), target)
    assert target.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_bytes() == seccomp.program(seccomp.inner())
    with pytest.raises(OSError):
        seccomp.export(seccomp.inner(), tmp_path / "missing" / "b.bpf")


def test_a_rule_that_libseccomp_refuses_is_told() -> None:
    wrong = seccomp.Filter((Rule("read", True, ((9, seccomp.EQ, 1),)),), 38)
    with pytest.raises(SeccompError, match="libseccomp refuses a rule"):
        seccomp.program(wrong)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("No module named 'pyseccomp'"), "package pyseccomp is missing"),
        (RuntimeError("Unable to find libseccomp"), "libseccomp is missing: install"),
    ],
)
def test_without_libseccomp_there_is_no_filter(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name == "pyseccomp":
            raise error
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SeccompError, match=words):
        seccomp.program(seccomp.inner())


def test_a_service_does_not_load_libseccomp() -> None:
    ran = subprocess.run(
        [
            *(sys.executable, "-I", "-c"),
            "import agent_box.process.skeleton, sys; print('pyseccomp' in sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "False\n"
