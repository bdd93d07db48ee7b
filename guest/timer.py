"""How fast the kernel believes that its timer counts.

An emulated machine has one timer, the local APIC's, and the kernel measures its rate once, at
boot, against the processor's counter (Linux, arch/x86/kernel/apic/apic.c,
calibrate_APIC_clock). When a busy host takes the vCPU away at that moment the rate is wrong for
the machine's life, and all that waits in it does so too long or wakes many times for nothing
(measured: 48 to 118 % of the true rate in 18 boots on a host with a load of 15). In the worst
case the kernel finds the timer "too slow" and goes without: then whatever sleeps never wakes.

The true rate is known to whoever emulates the timer, so the host tells it, and what is to be
done is the host's to decide.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from typing import Final

_TOLD: Final = re.compile(r"(?:^|\s)box\.timer_mult=([0-9]{1,10})(?:\s|$)", re.ASCII)
_BELIEVED: Final = re.compile(
    r"^Clock Event Device: *lapic\n(?:(?!Clock Event Device:).*\n)*? *mult: *([0-9]+)$",
    re.ASCII | re.MULTILINE,
)


def rate() -> int | None:
    """What the kernel believes, in thousandths of the truth; None when the host did not tell
    the truth, as it need not where the timer is not measured.

    Raises:
        OSError: the kernel does not say what it believes.
    """
    with open("/proc/cmdline") as file:
        truth = told(file.read(1 << 14))
    if truth is None:
        return None
    with open("/proc/timer_list") as file:  # root's alone
        return believed(file.read()) * 1000 // truth


def told(command_line: str) -> int | None:
    """Ticks for each nanosecond, in 32 binary places; None when it is not said."""
    found = _TOLD.search(command_line)
    return int(found[1]) or None if found else None


def believed(timer_list: str) -> int:
    """The same as the kernel has it; 0 when it has no timer."""
    found = _BELIEVED.search(timer_list)
    return int(found[1]) if found else 0
