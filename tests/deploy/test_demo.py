"""What the quickstart shows is so: the search finds what is there, and the config is one."""

from __future__ import annotations

import base64
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from support.source import ROOT

from agent_box.config import load

SECRET = b"sk-demo-0123456789abcdef"


@pytest.fixture(scope="module")
def demo() -> Any:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "deploy/demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("before", range(3))
def test_a_credential_is_found_in_base64_wherever_it_begins(demo: Any, before: int) -> None:
    text = base64.b64encode(b"x" * before + SECRET + b"yz")
    assert demo._holds(iter([text]), demo._forms(SECRET)) is not None
    other = base64.b64encode(b"x" * before + SECRET[::-1] + b"yz")
    assert demo._holds(iter([other]), demo._forms(SECRET)) is None


def test_a_credential_is_found_over_the_border_of_two_pieces(demo: Any) -> None:
    whole = b"a" * 50 + SECRET + b"b" * 50
    for cut in range(len(whole)):
        for further in (cut, cut + 1, cut + 7):
            pieces = [whole[:cut], whole[cut:further], whole[further:]]
            assert demo._holds(iter(pieces), [SECRET]) == SECRET
    assert demo._holds(iter([b"", b""]), [SECRET]) is None


def test_a_file_is_read_without_its_holes(demo: Any, tmp_path: Path) -> None:
    file = tmp_path / "disk"
    with file.open("wb") as opened:
        opened.seek(1 << 30)
        opened.write(SECRET)
        opened.truncate(2 << 30)
    pieces = list(demo._written(file))
    assert SECRET in b"".join(pieces)
    assert sum(map(len, pieces)) <= demo.PIECE
    assert list(demo._written(Path(os.devnull))) == []


def test_memory_is_looked_into(demo: Any) -> None:
    held = bytearray(SECRET)
    assert demo._holds(demo._memory(os.getpid()), [bytes(held)]) == SECRET


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
