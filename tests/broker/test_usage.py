"""Tokens as providers tell them, however the reply comes; and budgets."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import brokering as b

from agent_box.broker import prices, usage
from agent_box.broker.refusal import Reason, Refuse
from agent_box.broker.usage import UNKNOWN, Spent, Tokens, allowed, charged, meter

SSE = b"text/event-stream; charset=utf-8"
JSON = b"application/json"


def event(name: str | None, data: object) -> bytes:
    start = f"event: {name}\n" if name else ""
    return (start + f"data: {json.dumps(data)}\n\n").encode()


# A model that writes a usage of its own: as text, and as the input of a tool.
FORGED = {
    "usage": {"input_tokens": 1, "output_tokens": 1},
    "usageMetadata": {"promptTokenCount": 1},
}

ANTHROPIC = {
    "type": "message",
    "model": "claude-sonnet-4-5-20250929",
    "content": [{"type": "tool_use", "name": "x", "input": FORGED}],
    "usage": {
        "input_tokens": 2095,
        "cache_creation_input_tokens": 300,
        "cache_read_input_tokens": 4000,
        "output_tokens": 503,
        "server_tool_use": {"web_search_requests": 1},
    },
}
ANTHROPIC_STREAM = b"".join(
    [
        event(
            "message_start",
            {
                "type": "message_start",
                "message": {
                    "model": "claude-sonnet-4-5-20250929",
                    "content": [],
                    "usage": {
                        "input_tokens": 2095,
                        "cache_creation_input_tokens": 300,
                        "cache_read_input_tokens": 4000,
                        "output_tokens": 1,
                    },
                },
            },
        ),
        event("ping", {"type": "ping"}),
        event(
            "content_block_delta",
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "input_json_delta", "partial_json": json.dumps(FORGED)},
            },
        ),
        event(
            "message_delta",
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn"},
                "usage": {"output_tokens": 503},
            },
        ),
        event("message_stop", {"type": "message_stop"}),
    ]
)
OPENAI_USAGE = {
    "prompt_tokens": 6395,
    "completion_tokens": 503,
    "total_tokens": 6898,
    "prompt_tokens_details": {"cached_tokens": 4000},
    "completion_tokens_details": {"reasoning_tokens": 12},
}
OPENAI = {
    "object": "chat.completion",
    "model": "gpt-5-2025-08-07",
    "choices": [{"message": {"content": json.dumps(FORGED)}}],
    "usage": OPENAI_USAGE,
}
OPENAI_STREAM = b"".join(
    [
        event(None, {"model": "gpt-5-2025-08-07", "choices": [{"delta": {}}], "usage": None}),
        event(None, {"model": "gpt-5-2025-08-07", "choices": [], "usage": OPENAI_USAGE}),
        b"data: [DONE]\n\n",
    ]
)
RESPONSE = {
    "object": "response",
    "model": "gpt-5-2025-08-07",
    "usage": {
        "input_tokens": 6395,
        "input_tokens_details": {"cached_tokens": 4000},
        "output_tokens": 503,
    },
}
RESPONSE_STREAM = b"".join(
    [
        event("response.created", {"type": "response.created", "response": {"usage": None}}),
        event("response.output_text.delta", {"delta": json.dumps(FORGED)}),
        event("response.completed", {"type": "response.completed", "response": RESPONSE}),
    ]
)
GOOGLE_PARTS = [
    {
        "candidates": [{"content": {"parts": [{"functionCall": {"args": FORGED}}]}}],
        "usageMetadata": {"promptTokenCount": 6395, "cachedContentTokenCount": 4000},
        "modelVersion": "gemini-2.5-pro",
    },
    {
        "candidates": [{"content": {}}],
        "usageMetadata": {
            "promptTokenCount": 6395,
            "cachedContentTokenCount": 4000,
            "candidatesTokenCount": 400,
            "thoughtsTokenCount": 103,
            "totalTokenCount": 6898,
        },
        "modelVersion": "gemini-2.5-pro",
    },
]
GOOGLE_STREAM = b"".join(event(None, part).replace(b"\n", b"\r\n") for part in GOOGLE_PARTS)

REPLIES = {
    "anthropic": ("anthropic", JSON, json.dumps(ANTHROPIC).encode(), 2095, 300),
    "anthropic stream": ("anthropic", SSE, ANTHROPIC_STREAM, 2095, 300),
    "openai": ("openai", JSON, json.dumps(OPENAI, indent=1).encode(), 2395, 0),
    "openai stream": ("openai", SSE, OPENAI_STREAM, 2395, 0),
    "response": ("openai", JSON, json.dumps(RESPONSE).encode(), 2395, 0),
    "response stream": ("openai", SSE, RESPONSE_STREAM, 2395, 0),
    "google": ("google", JSON, json.dumps(GOOGLE_PARTS[1]).encode(), 2395, 0),
    "google array": ("google", JSON, json.dumps(GOOGLE_PARTS).encode(), 2395, 0),
    "google stream": ("google", SSE, GOOGLE_STREAM, 2395, 0),
}
MODELS = {
    "anthropic": "claude-sonnet-4-5-20250929",
    "openai": "gpt-5-2025-08-07",
    "google": "gemini-2.5-pro",
}


def read(kind: str, type_: bytes, pieces: list[bytes]) -> Tokens:
    found = meter(kind, type_)
    assert found is not None
    for piece in pieces:
        found.feed(piece)
    return found.tokens()


@pytest.mark.parametrize("name", REPLIES)
@given(cuts=st.lists(st.integers(0, 1 << 20), max_size=20))
@settings(max_examples=40, deadline=None)
def test_all_formats_wherever_the_pieces_end(name: str, cuts: list[int]) -> None:
    kind, type_, body, fresh, written = REPLIES[name]
    edges = [0, *sorted(cut % len(body) for cut in cuts), len(body)]
    pieces = [body[i:j] for i, j in zip(edges, edges[1:], strict=False)]
    found = read(kind, type_, pieces)
    assert found == Tokens(MODELS[kind], fresh, 503, 4000, written, known=True)


@given(body=st.binary(max_size=400), kind=st.sampled_from(sorted(MODELS)), events=st.booleans())
@settings(deadline=None)
def test_garbage_tells_nothing_and_breaks_nothing(body: bytes, kind: str, events: bool) -> None:
    type_ = SSE if events else JSON
    assert read(kind, type_, [body, b'\n\ndata: {"usage": 7}\n\n']) == UNKNOWN


@pytest.mark.parametrize(
    "count", [-1, 1.5, "7", True, None, 10**13, {}, [], 10**400], ids=lambda c: str(c)[:12]
)
def test_a_count_that_is_none(count: object) -> None:
    for kind, document in (
        ("anthropic", {"usage": {"input_tokens": count}}),
        ("openai", {"usage": {"prompt_tokens": count}}),
        ("google", {"usageMetadata": {"promptTokenCount": count}}),
    ):
        assert read(kind, JSON, [json.dumps(document).encode()]) == UNKNOWN


def test_a_model_with_another_name_is_not_repeated() -> None:
    reply = {"model": "x\n<script>", "usage": {"input_tokens": 5}}
    assert read("anthropic", JSON, [json.dumps(reply).encode()]).model == ""


def test_nesting_is_no_way_in() -> None:
    assert read("anthropic", JSON, [b"[" * 100_000]) == UNKNOWN


def test_what_is_too_long_is_not_kept() -> None:
    found = meter("anthropic", SSE)
    assert found is not None
    for _ in range(40):
        found.feed(b"data: " + b"x" * 100_000)  # one line without an end
        assert len(found._rest) <= usage.EVENT_MAX + 200_000
    found.feed(b"\n\n")
    for _ in range(40):
        found.feed(b"data: " + b"x" * 100_000 + b"\n")  # one event without an end
    assert sum(map(len, found._data)) <= usage.EVENT_MAX
    found.feed(b"\n" + ANTHROPIC_STREAM)  # and what comes after is read again
    assert found.tokens().output == 503
    whole = meter("openai", JSON)
    assert whole is not None
    for _ in range(100):
        whole.feed(b" " * 100_000)
        assert len(whole._rest) <= usage.JSON_MAX
    assert whole.tokens() == UNKNOWN


def test_other_kinds_and_types_have_no_meter() -> None:
    assert meter("header", JSON) is None
    assert meter("anthropic", b"text/html") is None
    assert meter("anthropic", None) is None


def test_a_reply_that_does_not_tell_is_charged_by_its_bytes() -> None:
    assert charged(UNKNOWN, "POST", 4001, 803) == Tokens("", 1001, 201, 0, 0, known=False)
    assert charged(UNKNOWN, "GET", 4001, 803) == UNKNOWN
    known = Tokens("m", 1, 2, 3, 4, known=True)
    assert charged(known, "POST", 4001, 803) == known
    assert known.total() == 10


# ---------------------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("key", "spent"),
    [
        ("max_requests", Spent(10, 0, 0)),
        ("max_tokens", Spent(0, 10, 0)),
        ("max_cost", Spent(0, 0, 10)),
    ],
)
def test_a_budget_is_used_up_exactly(key: str, spent: Spent) -> None:
    table = prices.parse(TABLE, "prices.toml")
    assert allowed(b.binding("anthropic"), spent, table) is None
    assert allowed(b.binding("anthropic", **{key: 11}), spent, table) is None
    refused = allowed(b.binding("anthropic", **{key: 10}), spent, table)
    assert isinstance(refused, Refuse)
    assert (refused.reason, refused.status) == (Reason.BUDGET, 403)
    assert key in refused.message


def test_a_cost_without_prices_is_refused() -> None:
    refused = allowed(b.binding("google", max_cost=5), Spent(0, 0, 0), prices.NONE)
    assert isinstance(refused, Refuse)
    assert "prices.toml" in refused.message


TABLE = b"""
version = 1
currency = "EUR"
[[models]]
kind = "anthropic"
model = "m"
input = 1
output = 1
"""
