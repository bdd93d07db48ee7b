"""What the engine decides, without I/O: from what the helper and a monitor say to what is
reported, and from what they refuse to the closed set of errors.
"""

from __future__ import annotations

import re
from typing import Final, Literal

from agent_box.bus.errors import Reason, Refusal
from agent_box.engine.contract import Boot, Observed
from agent_box.engine.helper import HelperLost, HelperRefused, Profile, State
from agent_box.engine.launches import BOOT_MAX, boot_of
from agent_box.engine.monitor import VmState

PORTS: Final = {
    "channel": frozenset((5000, 5001, 5002, 5004, 5005)),
    "netstack": frozenset((5003,)),
}
NO_FIRECRACKER: Final = "firecracker is configured, and this version cannot drive it"
_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_MIB: Final = 1 << 20

_REASONS: Final[dict[str, Reason]] = {
    "bad_request": Reason.BAD_REQUEST,
    "not_found": Reason.NOT_FOUND,
    "conflict": Reason.CONFLICT,
    "precondition": Reason.WRONG_STATE,
    "exhausted": Reason.DISK_FULL,
    "unavailable": Reason.STATE_UNKNOWN,
    "image_missing": Reason.NOT_FOUND,
    "image_corrupt": Reason.NOT_FOUND,
    "launch_failed": Reason.ENGINE_UNAVAILABLE,
    "host": Reason.ENGINE_UNAVAILABLE,
}


def instance_id(untrusted: str) -> str:
    """Raises:
    Refusal: BAD_REQUEST, it is no instance id.
    """
    if _ID.fullmatch(untrusted) is None:
        raise Refusal(Reason.BAD_REQUEST, "an instance is named by 32 hexadecimal digits")
    return untrusted


def boot_number(untrusted: int) -> int:
    """Raises:
    Refusal: BAD_REQUEST, no boot has that number.
    """
    if not 1 <= untrusted <= BOOT_MAX:
        raise Refusal(Reason.BAD_REQUEST, f"{untrusted} is no number of a boot")
    return untrusted


def profile(request: Boot, accel: str | None, configured: str) -> Profile:
    """What the helper launches.

    Raises:
        Refusal: ENGINE_UNAVAILABLE, the configured engine is not QEMU, or no accelerator was
            chosen; nothing else is taken instead.
    """
    if configured != "qemu":
        raise Refusal(Reason.ENGINE_UNAVAILABLE, NO_FIRECRACKER, facts={"gap": "engine-missing"})
    if accel is None:
        raise Refusal(
            Reason.ENGINE_UNAVAILABLE,
            "no accelerator is chosen: run `agent-box setup`, or set [engine] accel in the config",
            facts={"gap": "engine-accel"},
        )
    images = request.images
    return Profile(
        engine="qemu",
        accel=accel,
        cpus=request.cpus,
        memory_mib=request.memory_bytes // _MIB,
        kernel=images.kernel,
        initramfs=images.initramfs,
        variant=images.variant,
        guest=images.guest,
        harness=images.harness,
    )


def observed(state: State, monitor: VmState | None) -> Observed:
    """The helper's word on the processes, and the VMM's own on its vCPUs.

    Args:
        monitor: None when no VMM runs that could be asked.
    """
    word: Literal["stopped", "running", "paused", "unreachable"]
    if state.state == "running":
        word = "paused" if monitor == "stalled" else monitor or "unreachable"
    elif state.state == "starting":
        word = "unreachable"
    else:
        word = "stopped"
    ended = state.exit if word == "stopped" else None
    return Observed(
        instance=state.id,
        state=word,
        boot=boot_of(state.id, state.launch_id),
        exit_status=None if ended is None else ended.code,
        exit_signal=None if ended is None else ended.signal,
    )


def refusal(error: HelperRefused | HelperLost) -> Refusal:
    """The same in the words of the bus. What the helper says may name a digest or a state,
    never a path or a secret."""
    if isinstance(error, HelperLost):
        return Refusal(Reason.HELPER_UNAVAILABLE, f"the helper: {error}")
    reason = _REASONS.get(error.code, Reason.INTERNAL)
    if error.code in ("image_missing", "image_corrupt"):
        what = "is missing" if error.code == "image_missing" else "is corrupt"
        return Refusal(
            reason, f"image {error.detail} {what}: build or pull it", facts={"image": error.detail}
        )
    return Refusal(reason, f"the helper refuses: {error.detail}")
