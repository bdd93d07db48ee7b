"""A published image has one name, and that by digest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_box.engine.image import reference

DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("registry.example.com/box", ("registry.example.com", None, "box")),
        ("127.0.0.1:5000/agent-box/base", ("127.0.0.1", 5000, "agent-box/base")),
        ("[::1]:5000/a.b/c__d/e-f", ("::1", 5000, "a.b/c__d/e-f")),
        ("localhost:1/x", ("localhost", 1, "x")),
    ],
)
def test_what_is_one(text: str, parts: tuple[str, int | None, str]) -> None:
    found = reference.parse(f"{text}@sha256:{DIGEST}")
    assert found == (*parts, DIGEST)
    assert str(found) == f"{text}@sha256:{DIGEST}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "base",
        f"base@sha256:{DIGEST}",
        "h/r",
        "h/r:latest",
        f"h/r@sha256:{DIGEST[1:]}",
        f"h/r@sha256:{DIGEST.upper()}",
        f"h/r@sha512:{DIGEST}",
        f"h/R@sha256:{DIGEST}",
        f"h/../r@sha256:{DIGEST}",
        f"h//r@sha256:{DIGEST}",
        f"h/r/@sha256:{DIGEST}",
        f"h:0/r@sha256:{DIGEST}",
        f"h:70000/r@sha256:{DIGEST}",
        f"u:p@h/r@sha256:{DIGEST}",
        f"http://h/r@sha256:{DIGEST}",
        f"h/{'r' * 256}@sha256:{DIGEST}",
        f"h/r@sha256:{DIGEST}\n",
        f"h\n/r@sha256:{DIGEST}",
    ],
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="HOST"):
        reference.parse(text)


@given(st.text(max_size=80))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST"):
        reference.parse(text)


@pytest.mark.parametrize(
    ("host", "is_it"),
    [
        ("localhost", True),
        ("LOCALHOST", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost.example.com", False),
        ("10.0.0.1", False),
        ("192.0.2.1", False),
        ("::ffff:127.0.0.1", True),  # it leads there; libraries differ in what they call it
        ("::ffff:10.0.0.1", False),
        ("127.0.0.1.nip.example", False),
    ],
)
def test_only_this_machine_is_loopback(host: str, is_it: bool) -> None:
    assert reference.is_loopback(host) == is_it
