"""The config that the quickstart writes is one, and its way back is whole."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from support.source import ROOT

from agent_box.config import load


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "deploy")
    spec = importlib.util.spec_from_file_location("demo", ROOT / "deploy/demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("provider", [None, "openai", "anthropic"])
@pytest.mark.parametrize("gateway", [False, True])
def test_its_config_is_one(
    demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str | None, gateway: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    authority = tmp_path / "gateway.pem"
    authority.write_text("a certificate")
    upstream = "https://127.0.0.1:4443" if gateway else None
    key = None if provider is None else "sk-real"
    made = demo.Demo(provider, key, upstream, authority if gateway else None)
    made._certificate()
    made._configure(4001, 4002)
    directory = tmp_path / ".local/share/agent-box/quickstart/config/agent-box"
    config = load.load(directory / "config.toml")
    model = config.bindings["model"]
    where = (model.upstream.host, model.upstream.port)
    if provider is None:
        assert where == ("127.0.0.1", 4001)
    elif gateway:
        assert where == ("127.0.0.1", 4443)
        assert (directory / "upstream.pem").read_text() == "a certificate"
    else:
        assert where == (f"api.{provider}.com", 443) and not model.allow_reserved
    assert model.kind == (provider or "openai")
    assert config.profiles["demo"].harness == (
        "claude-code" if provider == "anthropic" else "codex"
    )
