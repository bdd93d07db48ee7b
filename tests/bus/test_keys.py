from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path

import pytest
import zmq

from agent_box.bus import keys

ROLES = ("store", "operator")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_keys_are_made_and_loaded(home: Path) -> None:
    keys.make_keys(home, ROLES)
    for role in ROLES:
        pair = keys.load_secret(home / role)
        assert keys.load_public(home / "public", role) == pair.public
        assert zmq.curve_public(pair.reveal()) == pair.public
    assert len(set(keys.load_all_public(home / "public", ROLES).values())) == 2


def test_modes_are_private_whatever_the_umask(home: Path) -> None:
    os.umask(0)
    keys.make_keys(home, ROLES)
    for path in (home, *home.rglob("*")):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.lstat().st_mode) == wanted, path
    assert not list(home.rglob("*.part"))


def test_making_again_changes_nothing(home: Path) -> None:
    keys.make_keys(home, ROLES)
    before = {p: p.read_bytes() for p in home.rglob("*") if p.is_file()}
    keys.make_keys(home, (*ROLES, "broker"))
    assert before.items() <= {p: p.read_bytes() for p in home.rglob("*") if p.is_file()}.items()
    assert keys.load_public(home / "public", "broker")


def test_after_a_crash_between_secret_and_public_key(home: Path) -> None:
    keys.make_keys(home, ROLES)
    (home / "public" / "store").unlink()
    keys.make_keys(home, ROLES)
    secret = keys.load_secret(home / "store")
    assert keys.load_public(home / "public", "store") == secret.public


def test_a_public_key_of_another_is_named(home: Path) -> None:
    keys.make_keys(home, ROLES)
    (home / "public" / "store").write_bytes(keys.load_public(home / "public", "operator"))
    with pytest.raises(keys.KeysError, match="public/store: does not belong"):
        keys.make_keys(home, ROLES)


@pytest.mark.parametrize("content", [b"", b"x" * 39, b"x" * 41, b"\x00" * 40, b"~" * 40, b"x" * 99])
def test_what_is_no_key_is_refused_and_not_repeated(home: Path, content: bytes) -> None:
    keys.make_keys(home, ROLES)
    (home / "store" / keys.SECRET_FILE).write_bytes(content)
    with pytest.raises(keys.KeysError) as caught:
        keys.load_secret(home / "store")
    assert str(caught.value) == f"{home}/store/curve.secret: not a CURVE key"


def test_a_key_that_others_can_read_is_refused(home: Path) -> None:
    keys.make_keys(home, ROLES)
    (home / "store" / keys.SECRET_FILE).chmod(0o640)
    with pytest.raises(keys.KeysError, match="mode is 0640"):
        keys.load_secret(home / "store")


def test_a_directory_that_others_can_read_is_refused(home: Path) -> None:
    home.mkdir()
    home.chmod(0o750)
    with pytest.raises(keys.KeysError, match="mode is 0750"):
        keys.make_keys(home, ROLES)


@pytest.mark.parametrize("kind", ["symlink", "directory", "fifo", "missing"])
def test_only_a_regular_file_is_a_key(home: Path, kind: str) -> None:
    keys.make_keys(home, ROLES)
    path = home / "store" / keys.SECRET_FILE
    path.rename(home / "elsewhere")
    if kind == "symlink":
        path.symlink_to(home / "elsewhere")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    with pytest.raises(keys.KeysError, match=r"curve\.secret: "):
        keys.load_secret(home / "store")


def test_a_secret_is_not_shown() -> None:
    pair = keys.fresh()
    shown = f"{pair} {pair!r} {vars(type(pair)).get('__dict__')}"
    assert pair.reveal().decode() not in shown and "***" in shown
    with pytest.raises(TypeError):
        pickle.dumps(pair)
