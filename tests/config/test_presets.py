"""Presets of harnesses: ours are complete and pinned, and a slip in one is told."""

from __future__ import annotations

import json
import tomllib
from importlib import resources

import pytest

from agent_box.config import presets
from agent_box.config.model import HARNESSES
from agent_box.config.presets import PresetError

GOOD = """
description = "d"
layer = "none"
binding = "openai"
command = ["agent"]
permission = "never asks"
tested = "here"
"""


@pytest.mark.parametrize("name", HARNESSES)
def test_ours(name: str) -> None:
    preset = presets.load(name)
    assert preset.name == name
    assert preset.command
    endpoint, nonce = "http://model.broker.internal", "nonce-0123"
    settings = preset.settings(endpoint, nonce)
    written = preset.configuration(endpoint, nonce)
    everything = [*settings.values(), *(f.content for f in written)]
    assert any(endpoint in text for text in everything)
    assert any(nonce in text for text in everything)
    assert not any("{{" in text for text in everything)
    for file in written:
        if file.path.endswith(".json"):
            json.loads(file.content)
        else:
            tomllib.loads(file.content)


@pytest.mark.parametrize("name", [n for n in HARNESSES if presets.load(n).layer == "npm"])
def test_every_package_is_pinned_and_none_names_a_server(name: str) -> None:
    preset = presets.load(name)
    lock = presets.lock(preset)
    packages = json.loads(lock.lock)["packages"]
    assert json.loads(lock.package)["dependencies"] == packages[""]["dependencies"]
    for path, each in packages.items():
        if path:
            assert each["integrity"].startswith("sha512-")
            assert "resolved" not in each
    assert "://" not in json.dumps([v.get("version") for v in packages.values()])
    # what is started comes out of what is installed
    places = [w.removeprefix("/usr/lib/harness/") for w in preset.command if w.startswith("/usr/")]
    assert places
    for place in places:
        assert any(place.startswith(f"{path}/") for path in packages if path)


def test_no_harness_lacks_a_file_and_no_file_lacks_a_harness() -> None:
    files = {f.name for f in resources.files("agent_box.config.harnesses").iterdir()}
    assert {f for f in files if f.endswith(".toml")} == {f"{n}.toml" for n in HARNESSES}


def test_an_unknown_name() -> None:
    with pytest.raises(LookupError, match="no harness is named gone; there are kage"):
        presets.load("gone")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("command = 1", "command must be"),
        ("command = []", "command must be"),
        ('layer = "docker"', "layer must be one of npm, none"),
        ('binding = "other"', "binding must be one of"),
        ("description = 1", "description must be"),
        ("mode = 1", "mode must be"),
        ("surprise = 1", "unknown: surprise"),
        ("environment = {A = 1}", "environment must be"),
        ('environment = {"A B" = "x"}', "environment must be"),
        ('environment = {PATH = "/bin"}', "PATH is made from"),
        ('path = ["bin"]', "path must be"),
        ('path = ["/a:/b"]', "path must be"),
        ('files = [{path = "/etc/passwd", content = "x"}]', "files"),
        ('files = [{path = "../x", content = "x"}]', "files"),
        ('files = [{path = "a/../../x", content = "x"}]', "files"),
        ('files = [{path = "a"}]', "files"),
        ("=", "x.toml"),
    ],
)
def test_a_slip_is_told(change: str, said: str) -> None:
    assert presets.parse("x", GOOD).command == ("agent",)
    key = change.split(" = ")[0]
    kept = [line for line in GOOD.splitlines() if not line.startswith(f"{key} = ")]
    with pytest.raises(PresetError, match=said):
        presets.parse("x", "\n".join([*kept, change]))


def test_a_preset_without_packages_has_no_lock() -> None:
    with pytest.raises(PresetError, match="has no layer"):
        presets.lock(presets.load("kage"))
