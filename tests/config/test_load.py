"""A config on disk, with the files that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_box.cli.demo import EXAMPLE
from agent_box.config.errors import ConfigError
from agent_box.config.load import ca_path, load
from agent_box.config.parse import builtin

BINDING = """
version = 1
[bindings.x]
upstream = "https://x.example"
kind = "anthropic"
credential = "x"
ca_file = "ca/root.pem"
routes = [{ path = "/", match = "exact", methods = ["GET"] }]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "conf" / "config.toml"
    (file.parent / "ca").mkdir(parents=True)
    file.write_text(BINDING)
    (file.parent / "ca" / "root.pem").write_text("pem")
    return file


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path)
    return str(caught.value).removeprefix(f"{path}: ")


def test_no_file_is_the_built_in_config() -> None:
    assert load(None) == builtin()


def test_a_file_is_the_whole_config(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(EXAMPLE)
    config = load(path)
    assert config.source == str(path)
    assert set(config.profiles) == {"default", "rust", "quiet"}


def test_a_ca_file_lies_beside_the_config(path: Path) -> None:
    binding = load(path).bindings["x"]
    assert ca_path(binding, path) == path.parent / "ca/root.pem"


def test_a_ca_file_lies_beside_the_real_config(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    assert ca_path(load(link).bindings["x"], link) == path.parent / "ca/root.pem"


def test_a_missing_ca_file_is_told_at_load(path: Path) -> None:
    (path.parent / "ca/root.pem").unlink()
    assert refusal(path) == (f"ca_file in [bindings.x]: there is no such file in {path.parent}")


def test_a_ca_file_that_leads_out(path: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.pem"
    outside.write_text("pem")
    ca = path.parent / "ca/root.pem"
    ca.unlink()
    ca.symlink_to(outside)
    assert refusal(path) == f"ca_file in [bindings.x]: it leads out of {path.parent}"


def test_a_ca_file_that_cannot_be_read(path: Path) -> None:
    ca = path.parent / "ca/root.pem"
    ca.chmod(0)
    assert refusal(path) == "ca_file in [bindings.x]: it cannot be read"
    ca.unlink()
    ca.mkdir()
    assert refusal(path) == "ca_file in [bindings.x]: it cannot be read"


def test_a_binding_without_one(path: Path) -> None:
    path.write_text(BINDING.replace('ca_file = "ca/root.pem"\n', ""))
    assert ca_path(load(path).bindings["x"], path) is None
