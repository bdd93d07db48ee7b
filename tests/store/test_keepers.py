"""Those who keep the master key outside the store: asked, bounded, and not believed.

The OS keyring is tested for real in tests/cli/test_secrets.py, with gnome-keyring on a
session bus of its own. systemd-creds is a stand-in here: see `keepers`.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.creds import stand_in
from support.stores import custody

from agent_box.process.secret import Secret
from agent_box.store import keepers
from agent_box.store.keepers import KeeperError

KEY = bytes(range(32))


# ------------------------------------------------------------------------- systemd-creds


@pytest.fixture
def creds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory at the front of PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_a_key_goes_to_systemd_creds_and_comes_back(creds: Path) -> None:
    stand_in(creds)
    blob = keepers.creds_encrypt(Secret(KEY))
    assert KEY not in blob
    assert keepers.creds_decrypt(blob).reveal() == KEY
    calls = (creds / "calls").read_text().splitlines()
    assert calls == [
        "--version",
        "encrypt --user --name=agent-box-store - -",
        "--version",
        "decrypt --user --name=agent-box-store - -",
    ]


@pytest.mark.parametrize("version", [250, 252, 255])
def test_a_systemd_that_keeps_no_credentials_of_users_is_refused(creds: Path, version: int) -> None:
    stand_in(creds, version=f"systemd {version} ({version}.38-1~deb12u1)")
    with pytest.raises(KeeperError, match=f"of systemd {version} here.*systemd 256"):
        keepers.creds_encrypt(Secret(KEY))


def test_without_systemd_creds_the_version_that_is_needed_is_named(
    creds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(creds))
    with pytest.raises(KeeperError, match="not installed; it needs systemd 256"):
        keepers.creds_encrypt(Secret(KEY))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"version": "elogind 255"}, "does not tell its version"),
        ({"body": "echo 'no such\x1b[31m secret' >&2; exit 1"}, r"failed: no such\?\[31m secret"),
        ({"body": "exit 3"}, "failed: it does not say why"),
        ({"body": "exit 0"}, "gave nothing"),
        ({"body": "head -c 20000 /dev/zero"}, "more than 16384 bytes"),
    ],
)
def test_a_systemd_creds_that_fails_is_a_reason(creds: Path, how: dict[str, str], why: str) -> None:
    stand_in(creds, **how)
    with pytest.raises(KeeperError, match=why) as refused:
        keepers.creds_encrypt(Secret(KEY))
    assert str(refused.value).isprintable()


def test_a_systemd_creds_that_gives_another_thing_is_refused(creds: Path) -> None:
    stand_in(creds, body="printf short")
    with pytest.raises(KeeperError, match="not a key of this store"):
        keepers.creds_decrypt(b"blob")


def test_a_systemd_creds_that_hangs_is_given_up(
    creds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers, "ANSWER_S", 0.3)
    stand_in(creds, body="exec sleep 60")
    with pytest.raises(KeeperError, match="did not answer"):
        keepers.creds_encrypt(Secret(KEY))


def test_a_systemd_creds_that_cannot_be_run_is_a_reason(creds: Path) -> None:
    (creds / "systemd-creds").write_bytes(b"\x7fELF nonsense")
    (creds / "systemd-creds").chmod(0o755)
    with pytest.raises(KeeperError, match="cannot be run"):
        keepers.creds_encrypt(Secret(KEY))


# ------------------------------------------------------------------------------- keyring


class Ring:
    """A keyring as the package `keyring` presents it."""

    priority: float = 5

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], str] = {}

    def set_password(self, service: str, name: str, value: str) -> None:
        self.kept[service, name] = value

    def get_password(self, service: str, name: str) -> str | None:
        return self.kept.get((service, name))

    def delete_password(self, service: str, name: str) -> None:
        del self.kept[service, name]


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Ring:
    ring, module = Ring(), ModuleType("keyring")
    module.get_keyring = lambda: ring  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "keyring", module)
    return ring


def test_a_key_goes_to_the_keyring_and_comes_back(ring: Ring) -> None:
    keepers.keyring_put("ab" * 16, Secret(KEY))
    assert keepers.keyring_get("ab" * 16).reveal() == KEY
    keepers.keyring_forget("ab" * 16)
    assert not ring.kept


def test_a_keyring_without_the_key_or_with_another_thing_gives_none(ring: Ring) -> None:
    with pytest.raises(KeeperError, match="no key of this store"):
        keepers.keyring_get("ab" * 16)
    for nonsense in ("", "zz" * 32, "ab" * 31, "ab" * 33, "ab" * 32 + "\n", "AB" * 32):
        ring.set_password(keepers.KEYRING_SERVICE, "ab" * 16, nonsense)
        with pytest.raises(KeeperError, match="not a key of this store") as refused:
            keepers.keyring_get("ab" * 16)
        assert nonsense == "" or nonsense not in str(refused.value)


def test_a_keyring_that_keeps_keys_in_plain_files_is_refused(ring: Ring) -> None:
    ring.priority = 0.5
    with pytest.raises(KeeperError, match=r"no OS keyring answers.*only .*Ring"):
        keepers.keyring_put("ab" * 16, Secret(KEY))
    assert not ring.kept


def test_a_keyring_that_fails_in_a_way_of_its_own_is_a_reason(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LockedOut(Exception):
        pass

    def fails(*arguments: Any) -> Any:
        raise LockedOut(f"with the value in it: {arguments}")

    monkeypatch.setattr(ring, "set_password", fails)
    with pytest.raises(KeeperError, match=r"does not answer \(LockedOut\)") as refused:
        keepers.keyring_put("ab" * 16, Secret(KEY))
    assert KEY.hex() not in str(refused.value)


def test_a_keyring_that_hangs_is_given_up(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for a person who is asked for the keyring's password and is not there."""
    monkeypatch.setattr(keepers, "ANSWER_S", 1)
    monkeypatch.setattr(ring, "get_password", lambda *_: threading.Event().wait(60))
    with pytest.raises(KeeperError, match="did not answer within 1 s"):
        keepers.keyring_get("ab" * 16)


@pytest.mark.parametrize("given", ["", "unix:path=/elsewhere"])
def test_the_session_bus_is_found_where_systemd_puts_it(
    ring: Ring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("DBUS_SESSION_BUS_ADDRESS", given)
    if not given:
        monkeypatch.delenv("DBUS_SESSION_BUS_ADDRESS")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    keepers.keyring_put("ab" * 16, Secret(KEY))
    assert os.environ.get("DBUS_SESSION_BUS_ADDRESS", "") == given
    (tmp_path / "bus").touch()
    keepers.keyring_put("ab" * 16, Secret(KEY))
    expected = given or f"unix:path={tmp_path}/bus"
    assert os.environ["DBUS_SESSION_BUS_ADDRESS"] == expected
    monkeypatch.setenv("DBUS_SESSION_BUS_ADDRESS", expected)  # taken back after the test


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keyring", None)
    with pytest.raises(KeeperError, match=r"pip install 'agent-box\[keyring\]'"):
        keepers.keyring_get("ab" * 16)


def test_only_what_is_kept_outside_is_fetched(ring: Ring, creds: Path) -> None:
    ring.set_password(keepers.KEYRING_SERVICE, custody("keyring").key, KEY.hex())
    assert keepers.fetch(custody("keyring")).reveal() == KEY
    for protection in ("key-file", "passphrase"):
        with pytest.raises(ValueError, match="kept by nobody"):
            keepers.fetch(custody(protection))
