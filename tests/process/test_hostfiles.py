"""Services on the host's network see the host's resolver files as they are now."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.house import House, python

from agent_box.process import confine, hostfiles


def test_a_change_of_networks_is_seen_by_a_running_service(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    etc = house.root / "etc"
    etc.mkdir()
    monkeypatch.setattr(hostfiles, "_ETC", etc)
    (etc / "resolv.conf").write_text("nameserver 192.0.2.1\n")
    assert hostfiles.refresh(house.paths)
    assert not hostfiles.refresh(house.paths)
    monkeypatch.undo()
    profile = house.profile("netstack")
    monkeypatch.setattr(hostfiles, "_ETC", etc)
    hostfiles.refresh(house.paths)
    code = (
        "import sys\nfor line in sys.stdin: print(open('/etc/resolv.conf').read(), end='',"
        " flush=True)"
    )
    filters = confine.write_filters(profile, house.paths.supervisor)
    with subprocess.Popen(
        confine.command(profile, python("-c", code), filters),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def look() -> str:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("?\n")
            process.stdin.flush()
            return process.stdout.readline()

        assert look() == "nameserver 192.0.2.1\n"
        (etc / "new").write_text("nameserver 192.0.2.2\n")
        os.replace(etc / "new", etc / "resolv.conf")
        assert hostfiles.refresh(house.paths)
        assert look() == "nameserver 192.0.2.2\n"


def test_names_are_looked_up_without_sockets_that_are_not_there(house: House) -> None:
    hostfiles.refresh(house.paths)
    assert "hosts: files dns\n" in (house.paths.host_files / "nsswitch.conf").read_text()
    code = "import socket; print(socket.gethostbyname('localhost'), open('/etc/hosts').read())"
    profile = house.profile("broker")
    filters = confine.write_filters(profile, house.paths.supervisor)
    ran = subprocess.run(
        confine.command(profile, python("-c", code), filters),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.startswith("127.0.0.1 ")
    assert Path("/etc/hosts").read_text() in ran.stdout


def test_what_cannot_be_read_is_empty(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostfiles, "_ETC", house.root / "nowhere")
    assert hostfiles.refresh(house.paths)
    assert (house.paths.host_files / "resolv.conf").read_bytes() == b""
    assert not hostfiles.refresh(house.paths)


def test_nothing_else_is_left_there(house: House) -> None:
    hostfiles.refresh(house.paths)
    assert sorted(os.listdir(house.paths.host_files)) == sorted(hostfiles.NAMES)
