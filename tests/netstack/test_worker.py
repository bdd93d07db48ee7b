"""The real worker, in the jail in which a machine's shim starts it."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.jailed import WAIT_S, Jailed
from support.workers import policy

from agent_box.netstack import control


@pytest.fixture
def jailed(tmp_path: Path) -> Iterator[Jailed]:
    made = Jailed(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_it_serves_in_its_jail_and_keeps_what_it_was_told(jailed: Jailed) -> None:
    assert select.select([jailed.ready], [], [], WAIT_S)[0]
    assert os.read(jailed.ready, 100) == b"READY\n"
    talk = jailed.dial()
    hello = talk.next()
    assert (hello.version, hello.instance, hello.restarts) == (control.VERSION, "ab" * 16, 2)
    assert (hello.boot, hello.policy, hello.linked, hello.forwards) == (None, None, False, [])
    assert isinstance(talk.ask(control.Count(n=1)), control.Refused)
    done = talk.ask(control.Up(n=2, boot=1, name="web", policy=policy()))
    assert (done.n, done.applied.generation) == (2, 1)
    assert talk.ask(control.Count(n=3)).counters.flows == 0
    talk.sock.close()
    talk = jailed.dial()
    again = talk.next()
    assert (again.boot, again.name, again.policy) == (1, "web", policy())
    assert again.epoch == hello.epoch
    talk.sock.close()


def test_it_has_no_new_privileges_and_no_capability(jailed: Jailed) -> None:
    assert os.read(jailed.ready, 100) == b"READY\n"
    status = Path(f"/proc/{jailed.pid}/status").read_text()
    facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (facts["NoNewPrivs"], facts["Seccomp"]) == ("1", "2")
    assert {int(facts[cap], 16) for cap in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {0}


def test_it_goes_on_when_the_shim_that_started_it_is_gone(jailed: Jailed) -> None:
    os.close(jailed.ready)
    jailed.ready = -1
    talk = jailed.dial()
    assert talk.next().version == control.VERSION
    assert talk.ask(control.Up(n=1, boot=1, name="web", policy=policy())).n == 1
    talk.sock.close()
