"""Where the config file is searched, and what kinds of file are refused."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from agent_box.config import search
from agent_box.config.errors import ConfigError

TEXT = b"version = 1\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Stands for /etc/agent-box/config.toml."""
    return tmp_path / "etc" / "agent-box" / "config.toml"


def write(path: Path, content: bytes = TEXT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        search.read(path)
    assert str(caught.value).isprintable()
    return str(caught.value)


# ----------------------------------------------------------------------------- find


def test_the_order(tmp_path: Path, home: Path, system: Path) -> None:
    env = {"HOME": str(home), "XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    assert search.find(env, system=system) is None
    write(system)
    assert search.find(env, system=system) == system
    of_home = write(home / ".config/agent-box/config.toml")
    assert search.find(env, system=system) == of_home
    of_xdg = write(tmp_path / "xdg/agent-box/config.toml")
    assert search.find(env, system=system) == of_xdg
    named = write(tmp_path / "named.toml")
    assert search.find({**env, "AGENT_BOX_CONFIG": str(named)}, system=system) == named


@pytest.mark.parametrize("value", [None, "", "relative/dir", "."])
def test_xdg_config_home_is_skipped_when_it_says_nothing(
    home: Path, system: Path, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_home = write(home / ".config/agent-box/config.toml")
    monkeypatch.chdir(home)
    write(home / "relative/dir/agent-box/config.toml")
    write(home / "agent-box/config.toml")
    env = {"HOME": str(home)} | ({} if value is None else {"XDG_CONFIG_HOME": value})
    assert search.find(env, system=system) == of_home


def test_the_working_directory_is_never_searched(
    tmp_path: Path, home: Path, system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    for name in ("config.toml", "agent-box/config.toml", ".config/agent-box/config.toml"):
        write(project / name)
    monkeypatch.chdir(project)
    for env in ({"HOME": str(home)}, {"HOME": "."}, {"HOME": str(home), "XDG_CONFIG_HOME": "."}):
        assert search.find(env, system=system) is None


def test_a_named_file_ends_the_search(home: Path, system: Path, tmp_path: Path) -> None:
    write(home / ".config/agent-box/config.toml")
    write(system)
    missing = tmp_path / "missing.toml"
    with pytest.raises(ConfigError) as caught:
        search.find({"HOME": str(home), "AGENT_BOX_CONFIG": str(missing)}, system=system)
    assert str(caught.value) == f"{missing}: no such file (AGENT_BOX_CONFIG names it)"


def test_a_named_file_is_named_in_full(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(home / "c.toml")
    monkeypatch.chdir(home)
    with pytest.raises(ConfigError, match="AGENT_BOX_CONFIG is not an absolute path: c.toml"):
        search.find({"AGENT_BOX_CONFIG": "c.toml"})


def test_an_empty_variable_names_nothing(home: Path, system: Path) -> None:
    assert search.find({"HOME": str(home), "AGENT_BOX_CONFIG": ""}, system=system) is None


def test_without_home_the_account_says_where_it_is(system: Path) -> None:
    import pwd

    expected = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".config/agent-box/config.toml"
    found = search.find({}, system=system)
    assert found == (expected if expected.exists() else None)


def test_what_cannot_be_looked_at_is_not_passed_over(home: Path, system: Path) -> None:
    write(system)
    hidden = home / ".config/agent-box"
    write(hidden / "config.toml")
    hidden.chmod(0)
    try:
        with pytest.raises(ConfigError, match="config.toml: permission denied"):
            search.find({"HOME": str(home)}, system=system)
    finally:
        hidden.chmod(0o700)


def test_a_link_to_nothing_is_not_passed_over(home: Path, system: Path) -> None:
    write(system)
    path = home / ".config/agent-box/config.toml"
    path.parent.mkdir(parents=True)
    path.symlink_to("gone")
    assert search.find({"HOME": str(home)}, system=system) == path
    assert refusal(path) == f"{path}: a link that leads nowhere"


def test_a_file_where_a_directory_should_be_is_no_config(home: Path, system: Path) -> None:
    (home / ".config").write_text("")
    assert search.find({"HOME": str(home)}, system=system) is None


# ----------------------------------------------------------------------------- read


def test_a_file_is_read(tmp_path: Path) -> None:
    assert search.read(write(tmp_path / "c.toml")) == TEXT


def test_a_link_to_elsewhere_is_fine(tmp_path: Path) -> None:
    real = write(tmp_path / "dotfiles/box.toml")
    link = tmp_path / "conf/config.toml"
    link.parent.mkdir()
    link.symlink_to(real)
    assert search.read(link) == TEXT
    assert search.real(link) == real.resolve()


def test_a_link_to_itself(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.symlink_to(path)
    assert refusal(path) == f"{path}: a link that leads nowhere"


def test_a_directory(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path}: a directory, not a file"


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    os.mkfifo(path, 0o600)
    assert refusal(path) == f"{path}: not a regular file"


def test_a_device() -> None:
    assert refusal(Path("/dev/zero")) == "/dev/zero: not a regular file"


def test_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s")
        assert refusal(tmp_path / "s").startswith(f"{tmp_path}/s: no such device")


def test_unreadable(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml")
    path.chmod(0)
    assert refusal(path) == f"{path}: permission denied"


def test_too_large(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", b"#" * search.SIZE_MAX)
    assert len(search.read(path)) == search.SIZE_MAX
    write(path, b"#" * (search.SIZE_MAX + 1))
    assert refusal(path) == f"{path}: larger than 1048576 bytes"


def test_writable_by_anybody(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml")
    path.chmod(0o646)
    assert refusal(path) == f"{path}: anybody may write it: chmod o-w"


def test_a_directory_writable_by_anybody(tmp_path: Path) -> None:
    real = write(tmp_path / "open/c.toml")
    real.parent.chmod(0o777)
    line = f"anybody may write its directory: chmod o-w {real.parent}"
    assert refusal(real) == f"{real}: {line}"
    link = tmp_path / "link.toml"
    link.symlink_to(real)
    assert refusal(link) == f"{link}: {line}"
    real.parent.chmod(0o1777)  # like /tmp: nobody can put another file in its place
    assert search.read(link) == TEXT


def test_a_name_that_is_not_printable_forges_no_line(tmp_path: Path) -> None:
    path = tmp_path / "a\n\x1b[2Jagent-box: all is well"
    assert refusal(path).endswith("a??[2Jagent-box: all is well: a link that leads nowhere")
