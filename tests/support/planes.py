"""A plane that runs in a thread of the test, and what it needs of a host."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from agent_box.config import egress
from agent_box.config.egress import Action
from agent_box.netstack.contract import Policy, Rule
from agent_box.netstack.plane import Plane
from agent_box.netstack.reports import Report
from agent_box.netstack.tcp import DEAD, KEPT_MAX, Tcp

T = TypeVar("T")
GRACE_MS = 1  # a kernel that is late with what was sent over the link
PIECE_S = 3600.0  # of simulated time in one `do`, which has a bound


def rule(
    target: str, *, action: str = "allow", sni: bool = True, allow_reserved: bool = False
) -> Rule:
    """`target` is HOST[:PORTS][/udp], as the command line has it."""
    read = egress.parse_target(target, wildcard=True)
    return Rule(**egress.rule_fields(Action(action), read, sni=sni, allow_reserved=allow_reserved))


def here(target: str, **more: Any) -> Rule:
    """A rule that allows even what is reserved, as all of a test's own servers are."""
    return rule(target, allow_reserved=True, **more)


def policy(
    *rules: Rule, mode: str = "allowlist", endpoints: tuple[str, ...] = (), generation: int = 1
) -> Policy:
    return msgspec.convert(
        {
            "generation": generation,
            "mode": mode,
            "allow_open": mode == "open",
            "rules": list(rules),
            "endpoints": list(endpoints),
        },
        Policy,
    )


def etc(directory: Path, hosts: dict[str, str] | None = None, nameserver: str = "") -> Path:
    """A directory with resolv.conf and hosts; `hosts` maps names to addresses."""
    directory.mkdir(exist_ok=True)
    text = "".join(f"{address} {name}\n" for name, address in (hosts or {}).items())
    for name, content in (
        ("hosts", text),
        ("resolv.conf", f"nameserver {nameserver}\n" if nameserver else ""),
    ):
        part = directory / f".{name}"
        part.write_text(content)
        part.replace(directory / name)
    return directory


class Running:
    """Runs a plane in a thread. `do` calls into it from there, as its owner would. `late` seconds
    are added to its clock."""

    def __init__(self, **how: Any) -> None:
        self.late = 0.0
        self.reports: list[Report] = []
        self.plane = Plane(
            report=self.reports.append, clock=lambda: time.monotonic() + self.late, **how
        )
        self._todo: list[Callable[[], None]] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._over = False
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def do(self, what: Callable[[Plane], T]) -> T:
        done = threading.Event()
        result: list[T] = []
        failed: list[Exception] = []

        def call() -> None:
            try:
                result.append(what(self.plane))
            except (OSError, ValueError) as error:  # handed to who asked
                failed.append(error)
            finally:
                done.set()

        self._todo.append(call)
        os.eventfd_write(self._wake, 1)
        assert done.wait(60), f"the plane hangs: {self._failed}"
        if failed:
            raise failed[0]
        return result[0]

    def go_by(self, seconds: float) -> None:
        """Lets so much time go by, timer by timer, each at its own. Whatever the guest or an
        upstream says to one is heard before the next."""

        end = self.late + seconds

        def through(plane: Plane) -> None:
            poll = select.poll()
            poll.register(plane.fileno(), select.POLLIN)
            until = min(self.late + PIECE_S, end)
            while self.late < until:
                wait = plane.run()
                if wait != 0 and not poll.poll(GRACE_MS):
                    left = until - self.late
                    self.late += left if wait is None else min(wait, left)

        while self.late < end:
            self.do(through)

    def close(self) -> None:
        if self._thread.is_alive():
            self.do(lambda plane: plane.close())
        self._over = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(60)
        os.close(self._wake)
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        try:
            self._loop()
        finally:
            self._failed = sys.exc_info()[1]

    def _loop(self) -> None:
        poll = select.poll()
        poll.register(self.plane.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            wait = self.plane.run()
            poll.poll(None if wait is None else int(wait * 1000) + 1 if wait else 0)
            try:
                os.eventfd_read(self._wake)
            except BlockingIOError:
                continue
            while self._todo:
                self._todo.pop(0)()
            if self._over or self.plane.closed:
                return


def machine_invariants(machine: Tcp) -> None:
    """What holds of a TCP machine after whatever it saw."""
    mask = 0xFFFFFFFF
    wire = machine.wire
    flight = (machine.snd_nxt - machine.snd_una) & mask
    kept = machine._rtx or []
    assert flight <= wire.sending + 2
    assert sum((end - seq) & mask for seq, end, _, _ in kept) <= flight + 65535
    for (_, end, _, _), (start, _, _, _) in zip(kept, kept[1:], strict=False):
        assert end == start, "a hole in what is kept"
    assert 0 <= machine.holding <= wire.window
    assert 0 <= machine._shown <= wire.window
    assert wire.held >= 0 and wire.kept >= 0
    assert len(kept) <= KEPT_MAX
    if machine.state == DEAD:
        assert machine.deadline == inf and not kept and not machine.holding
    if machine.fin_acked:
        assert machine.fin_sent and not flight
    if machine.resend is not None:
        assert (machine.resend - machine.snd_una) & mask <= flight
