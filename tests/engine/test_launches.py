"""A launch is made of a boot and read back; nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.engine.launches import BOOT_MAX, boot_of, launch_id

IDS = st.text("0123456789abcdef", min_size=32, max_size=32)
BOOTS = st.integers(1, BOOT_MAX)


@given(IDS, BOOTS)
def test_what_is_made_is_read_back(instance: str, boot: int) -> None:
    launch = launch_id(instance, boot)
    assert len(launch) == 32 and set(launch) <= set("0123456789abcdef")
    assert boot_of(instance, launch) == boot


@given(IDS, IDS, BOOTS, BOOTS)
def test_of_another_instance_or_boot_it_is_another(a: str, b: str, m: int, n: int) -> None:
    assert (launch_id(a, m) == launch_id(b, n)) == ((a, m) == (b, n))
    if a != b:
        assert boot_of(b, launch_id(a, m)) is None


@pytest.mark.parametrize("untrusted", [None, "", "x" * 32, "f" * 32, "0" * 32, "0" * 16 + "0x1"])
def test_what_is_not_ours_is_no_boot(untrusted: str | None) -> None:
    assert boot_of("a" * 32, untrusted) is None
