"""Which addresses of this host a forward may take."""

from __future__ import annotations

import pytest

from agent_box.bus.errors import Reason, Refusal
from agent_box.netstack.contract import Forward
from agent_box.netstack.forwardbind import checked


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize(
    ("address", "loopback", "plain"),
    [
        ("127.0.0.1", True, "127.0.0.1"),
        ("::1", True, "::1"),
        ("::ffff:127.0.0.1", True, "127.0.0.1"),  # libraries differ in whether it is
        ("::ffff:10.0.0.1", False, "10.0.0.1"),
        ("::", False, "::"),
    ],
)
def test_loopback_is_not_public(address: str, loopback: bool, plain: str, public: bool) -> None:
    wanted = Forward(address=address, host_port=0, guest_port=80, public=public)
    if public != loopback:
        assert checked(wanted).address == plain
    else:
        with pytest.raises(Refusal) as refused:
            checked(wanted)
        assert refused.value.reason is Reason.BAD_REQUEST
