"""What a kernel says of its timer, beside what a host says of it."""

from __future__ import annotations

import pytest

from agent_box.guest import timer
from agent_box.helper.machine import TIMER_MULT, command

# Of Linux 6.12, one vCPU emulated by QEMU 7.2.
LIST = """Timer List Version: v0.10
HRTIMER_MAX_CLOCK_BASES: 8
now at 10415038543 nsecs

cpu: 0
 clock 0:
  .base:               0000000000000000
Tick Device: mode:     1
Broadcast device
Clock Event Device: <NULL>
tick_broadcast_mask: 0

Tick Device: mode:     1
Per CPU device: 0
Clock Event Device: lapic
 max_delta_ns:   68719485945
 min_delta_ns:   1000
 mult:           265003777
 shift:          32
 mode:           3
 next_event:     10416000000 nsecs
 set_next_event: lapic_next_event
"""


def test_the_belief_is_read() -> None:
    assert timer.believed(LIST) == 265003777
    assert timer.believed(LIST.replace("265003777", "1")) == 1


@pytest.mark.parametrize(
    "text", ["", LIST[: LIST.index("Per CPU")], LIST.replace("lapic\n", "<NULL>\n")]
)
def test_no_timer_is_none(text: str) -> None:
    assert timer.believed(text) == 0


def test_another_device_is_not_taken_for_it() -> None:
    other = "Clock Event Device: lapic\n max_delta_ns: 1\n\nClock Event Device: pit\n mult: 7\n"
    assert timer.believed(other) == 0


def test_the_truth_is_read_from_the_command_line_that_the_helper_makes() -> None:
    profile = {
        "memory_mib": 256, "accel": "tcg", "cpus": 1, "kernel": "k", "initramfs": "i",
        "variant": "v", "guest": "g", "harness": None,
    }  # fmt: skip
    words = command("qemu", profile, 2_400_000)
    line = words[words.index("-append") + 1]
    assert timer.told(line) == TIMER_MULT == 268435456
    words = command("qemu", {**profile, "accel": "kvm"}, None)
    assert timer.told(words[words.index("-append") + 1]) is None


@pytest.mark.parametrize(
    "line", ["", "quiet", "box.timer_mult=", "box.timer_mult=x", "abox.timer_mult=5",
             "box.timer_mult=5x", "box.timer_mult=0", "box.timer_mult=99999999999"],
)  # fmt: skip
def test_a_command_line_that_does_not_say_it(line: str) -> None:
    assert timer.told(line) is None


def test_a_host_that_says_nothing_asks_nothing() -> None:
    """As on the machine that this test runs on; the kernel's list is not even opened."""
    assert timer.rate() is None
