from __future__ import annotations

import errno
import os
import subprocess

import pytest
from support.house import python

from agent_box.process import linux


def test_prctl_reads_what_is_set() -> None:
    assert linux.prctl(linux.PR_GET_DUMPABLE) in (0, 1)
    before = linux.prctl_get(linux.PR_GET_PDEATHSIG)
    linux.prctl(linux.PR_SET_PDEATHSIG, 10)
    assert linux.prctl_get(linux.PR_GET_PDEATHSIG) == 10
    linux.prctl(linux.PR_SET_PDEATHSIG, before)


def test_an_error_names_the_call() -> None:
    with pytest.raises(OSError, match="prctl: Invalid argument") as raised:
        linux.prctl(12345)
    assert raised.value.errno == errno.EINVAL


@pytest.mark.parametrize("program", [b"", b"1234567", bytes(12)])
def test_what_is_no_program_is_not_given_to_the_kernel(program: bytes) -> None:
    with pytest.raises(ValueError, match="not a BPF program"):
        linux.add_seccomp_filter(program)


def test_an_unknown_machine_has_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.uname()
    other = os.uname_result((*real[:4], "riscv64"))
    monkeypatch.setattr(os, "uname", lambda: other)
    with pytest.raises(OSError) as raised:
        linux.add_seccomp_filter(bytes(8))
    assert raised.value.errno == errno.ENOSYS


THREADS = """
import errno, os, sys, threading
from pathlib import Path
from agent_box.process import linux, seccomp
target = Path(sys.argv[1])
seccomp.export(seccomp.Filter((seccomp.Rule("getppid", False),), None), target)
linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
ready, go, seen = threading.Event(), threading.Event(), []
def other():
    ready.set(); go.wait()
    seen.append(os.getppid())  # the C library hands on what the kernel says: -EPERM
thread = threading.Thread(target=other); thread.start(); ready.wait()
linux.add_seccomp_filter(target.read_bytes())
go.set(); thread.join()
print(seen)
"""


def test_a_filter_reaches_threads_that_run_already(tmp_path: object) -> None:
    ran = subprocess.run(
        python("-c", THREADS, f"{tmp_path}/f.bpf"), capture_output=True, text=True, check=False
    )
    assert ran.stdout == "[-1]\n", ran.stderr


def test_a_landlock_that_is_not_there_is_version_0(monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        @staticmethod
        def syscall(*_words: object) -> int:
            return -1

    monkeypatch.setattr(linux, "_libc", Libc)
    assert linux.landlock_abi() == 0
