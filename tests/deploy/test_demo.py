"""The config that the quickstart writes is one, and its way back is whole."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from support.source import ROOT

from agent_box.config import load, presets


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "deploy")
    spec = importlib.util.spec_from_file_location("demo", ROOT / "deploy/demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("harness", ["codex", "claude-code", "opencode", "pi", "gemini"])
@pytest.mark.parametrize("by", ["script", "provider", "gateway"])
def test_its_config_is_one(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harness: str, by: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    authority = tmp_path / "gateway.pem"
    authority.write_text("a certificate")
    gateway = ("https://127.0.0.1:4443", authority) if by == "gateway" else (None, None)
    made = demo.Demo(harness, None if by == "script" else "sk-real", *gateway)
    made._certificate()
    made._configure(4001, 4002)
    directory = tmp_path / ".local/share/agent-box/quickstart/config/agent-box"
    config = load.load(directory / "config.toml")
    assert config.profiles["demo"].harness == harness
    model = config.bindings["model"]
    assert model.kind == presets.load(harness).binding
    where = (model.upstream.host, model.upstream.port)
    if by == "script":
        assert where == ("127.0.0.1", 4001)
    elif by == "gateway":
        assert where == ("127.0.0.1", 4443)
        assert (directory / "upstream.pem").read_text() == "a certificate"
    else:
        assert f"https://{where[0]}" == demo.PROVIDERS[model.kind][0] and where[1] == 443
        assert not model.allow_reserved


def test_the_scripts_words_are_those_of_the_program(demo: Any) -> None:
    text = (ROOT / "deploy/quickstart").read_text()
    for words in (demo.HARNESSES, demo.PROVIDERS):
        assert f"({'|'.join(words)})" in text


def test_an_interrupt_is_one_line(
    demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_given", interrupted)
    assert demo.main() == 130
    assert capsys.readouterr().err == "\ndeploy/quickstart: interrupted; run again, it goes on\n"
