"""Who listens on a port."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from agent_box.cli.holders import holder


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_process_of_ours_is_named(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((address, 0))
        except OSError:
            pytest.skip("this host has no IPv6")
        listener.listen()
        port = listener.getsockname()[1]
        found = holder(port)
        assert found is not None and found.startswith(f"pid {os.getpid()} (")
    assert holder(port) is None


def test_one_that_cannot_be_seen_is_said_to_be_there(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    head = "  sl  local_address rem_address   st\n"
    line = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 0 0 0 77\n"
    (tmp_path / "net" / "tcp").write_text(head + line)
    (tmp_path / "5" / "fd").mkdir(parents=True)
    assert holder(8080, tmp_path) == "a process of another account"
    assert holder(8081, tmp_path) is None
