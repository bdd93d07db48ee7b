"""The pages of docs/ that are made from the code say what the code says."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from types import ModuleType

import pytest
from support.source import ROOT, texts


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs", ROOT / "deploy" / "docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["architecture.md", "broker.md", "cli.md", "interfaces.md"])
def test_the_page_is_what_the_code_says(docs: ModuleType, page: str) -> None:
    written = (ROOT / "docs" / page).read_text()
    assert written == docs.PAGES[page](), "stale: run deploy/docs.py"


def test_every_method_is_told_with_its_callers_and_their_reason(docs: ModuleType) -> None:
    page = (ROOT / "docs" / "interfaces.md").read_text()
    for contract in docs.contracts().values():
        for method in contract.methods:
            assert f"| `{method.name}` |" in page
    for reason in re.findall(
        r'^why = "(.*)"$', (ROOT / "services/bus/policy.toml").read_text(), re.M
    ):
        assert reason in page


def test_a_stale_page_is_noticed(
    docs: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = tmp_path_factory.mktemp("docs")
    docs.DOCS, kept = copy, docs.DOCS
    try:
        docs.PAGES, pages = {"x.md": lambda: "new"}, docs.PAGES
        (copy / "x.md").write_text("old")
        assert docs.main(["--check"]) == 1
        assert (copy / "x.md").read_text() == "old"
        assert docs.main([]) == 0
        assert docs.main(["--check"]) == 0
        assert (copy / "x.md").read_text() == "new"
    finally:
        docs.DOCS, docs.PAGES = kept, pages


def test_the_tool_says_how_it_is_used() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "deploy" / "docs.py", "--wrong"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--check" in done.stderr


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for path, text in texts():
        if not path.endswith(".md"):
            continue
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if "://" not in target and not (ROOT / path).parent.joinpath(target).exists():
                broken.append(f"{path}: {target}")
    assert broken == []
