"""What the engine makes of the helper's words, and what it refuses before asking."""

from __future__ import annotations

from typing import Any

import pytest

from agent_box.bus.errors import Reason, Refusal
from agent_box.engine import core
from agent_box.engine.contract import Boot, Images
from agent_box.engine.helper import Exit, HelperLost, HelperRefused, State
from agent_box.engine.launches import launch_id
from agent_box.helper.contract import ERRORS, STATE, Word

ID = "a" * 32


def state(word: str, ended: Exit | None = None, launch: str | None = None) -> State:
    return State(
        id=ID, state=word, launch_id=launch or launch_id(ID, 3), disk_bytes=1, vmm=None, shim=True,
        device=True, worker=False, restarts=0, exit=ended, error=None,
    )  # fmt: skip


def boot(**more: Any) -> Boot:
    images = Images(kernel="1", initramfs="2", variant="3", guest="4", harness=None)
    fields = {"instance": ID, "boot": 3, "cpus": 2, "memory_bytes": 512 << 20, **more}
    return Boot(images=images, **fields)


@pytest.mark.parametrize(
    "untrusted", ["", "a" * 31, "a" * 33, "A" * 32, "a" * 32 + "\n", "../../x"]
)
def test_only_an_id_is_an_id(untrusted: str) -> None:
    with pytest.raises(Refusal) as refused:
        core.instance_id(untrusted)
    assert refused.value.reason is Reason.BAD_REQUEST


@pytest.mark.parametrize("untrusted", [0, -1, 1 << 53, 1 << 80])
def test_only_a_boot_is_a_boot(untrusted: int) -> None:
    with pytest.raises(Refusal) as refused:
        core.boot_number(untrusted)
    assert refused.value.reason is Reason.BAD_REQUEST


def test_without_an_accelerator_nothing_is_guessed() -> None:
    with pytest.raises(Refusal) as refused:
        core.profile(boot(), None, "qemu")
    assert refused.value.reason is Reason.ENGINE_UNAVAILABLE
    assert refused.value.facts == {"gap": "engine-accel"}


def test_the_profile_is_what_was_asked_for() -> None:
    made = core.profile(boot(), "tcg", "qemu")
    assert (made.accel, made.cpus, made.memory_mib, made.kernel) == ("tcg", 2, 512, "1")
    assert made.harness is None


@pytest.mark.parametrize(
    ("word", "monitor", "seen"),
    [
        ("running", "running", "running"),
        ("running", "paused", "paused"),
        ("running", "stalled", "paused"),
        ("running", "unreachable", "unreachable"),
        ("running", None, "unreachable"),
        ("starting", None, "unreachable"),
        ("exited", None, "stopped"),
        ("failed", None, "stopped"),
        ("allocated", None, "stopped"),
        ("partial", None, "stopped"),
    ],
)
def test_each_state_of_the_helper_is_one_of_ours(word: str, monitor: Any, seen: str) -> None:
    found = core.observed(state(word), monitor)
    assert (found.instance, found.state, found.boot) == (ID, seen, 3)


def test_every_state_that_the_helper_has_is_tried_above() -> None:
    words = dict(STATE.fields)["state"]
    assert isinstance(words, Word)
    assert set(words.words) == {"partial", "allocated", "starting", "running", "exited", "failed"}


def test_how_it_ended_is_told_when_it_ended() -> None:
    ended = Exit(code=None, signal=9, by="kill", at_ms=1)
    found = core.observed(state("exited", ended), None)
    assert (found.exit_status, found.exit_signal) == (None, 9)
    running = core.observed(state("running", ended), "running")
    assert (running.exit_status, running.exit_signal) == (None, None)


def test_a_launch_of_nobody_is_no_boot() -> None:
    assert core.observed(state("exited", launch="f" * 32), None).boot is None


def test_every_code_of_the_helper_has_a_reason_of_its_own_or_is_a_defect() -> None:
    told = {code: core.refusal(HelperRefused(code, "why")).reason for code in ERRORS}
    assert [c for c, reason in told.items() if reason is Reason.INTERNAL] == ["internal"]
    assert told["precondition"] is Reason.WRONG_STATE
    assert told["conflict"] is Reason.CONFLICT
    assert core.refusal(HelperRefused("new", "")).reason is Reason.INTERNAL


def test_an_image_is_named() -> None:
    missing = core.refusal(HelperRefused("image_missing", "abc"))
    corrupt = core.refusal(HelperRefused("image_corrupt", "abc"))
    assert missing.facts == corrupt.facts == {"image": "abc"}
    assert "missing" in missing.message and "corrupt" in corrupt.message
    assert missing.exit == corrupt.exit == 3


def test_a_lost_helper_has_its_own_exit_code() -> None:
    assert core.refusal(HelperLost("gone", sent=True)).exit == 11
