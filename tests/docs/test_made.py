"""The pages of docs/ that are made from the code say what the code says."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
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


def _anchors(text: str) -> set[str]:
    """What the headings of a page can be linked by, as forges make it of their words."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def _broken(pages: dict[str, str], there: Callable[[str], bool]) -> list[str]:
    """Links of pages to files that are not there, and to headings that are not in them."""
    broken = []
    for page, text in pages.items():
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
            if "://" in target:
                continue
            file = os.path.normpath(os.path.join(os.path.dirname(page), target)) if target else page
            lost = anchor and file in pages and anchor not in _anchors(pages[file])
            if lost or not there(file):
                broken.append(f"{page}: {target}#{anchor}")
    return broken


def test_links_between_pages_lead_somewhere() -> None:
    pages = {path: text for path, text in texts() if path.endswith(".md")}
    assert {"README.md", "docs/guide-operator.md", "docs/limits.md"} <= pages.keys()
    assert _broken(pages, lambda file: (ROOT / file).exists()) == []


def test_a_link_that_leads_nowhere_is_noticed() -> None:
    pages = {
        "docs/a.md": "# A `b`, c\n[x](b.md) [y](../R.md#one) [z](#a-b-c) [u](https://e/none)",
        "R.md": "# Two\n```\n# One\n```\n[to a](docs/a.md#a-b-c)",
    }
    assert _broken(pages, lambda file: file in pages) == [
        "docs/a.md: b.md#",
        "docs/a.md: ../R.md#one",
    ]


def test_every_page_is_reached_from_the_first() -> None:
    pages = {path: text for path, text in texts() if path.endswith(".md")}
    linked = set(re.findall(r"\]\((docs/[^)#]+)", pages["README.md"]))
    assert {path for path in pages if path.startswith("docs/")} <= linked
