"""`agent-box usage`, against a broker that answers what a test wants."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from agent_box.broker.contract import Usage, UsageOf, Used
from agent_box.cli import link, usage
from agent_box.cli.render import Render

ID = "a" * 32
DAY = 20_787  # 2026-11-30


def used(binding: str, day: int, **counts: int) -> Used:
    names = (
        *("requests", "refused", "bytes_up", "bytes_down", "tokens_in", "tokens_out"),
        *("cost", "unpriced"),
    )
    return Used(
        instance=ID, name="work", binding=binding, day=day, **(dict.fromkeys(names, 0) | counts)
    )


class Broker:
    def __init__(self, reply: Usage) -> None:
        self.reply = reply
        self.asked: list[UsageOf] = []

    def call(self, name: str, request: UsageOf) -> Usage:
        assert name == "usage"
        self.asked.append(request)
        return self.reply


def shown(
    monkeypatch: pytest.MonkeyPatch, currency: str, rows: list[Used], *, json_: bool, **more: Any
) -> tuple[str, Broker]:
    broker = Broker(Usage(currency=currency, refused_nonces=0, used=rows))

    @contextmanager
    def service(name: str, out: Render) -> Iterator[Broker]:
        assert name == "broker"
        yield broker

    monkeypatch.setattr(link, "service", service)
    text = io.StringIO()
    usage.show(Render("usage", json=json_, stdout=text, stderr=None), **more)
    return text.getvalue(), broker


def test_people_see_sums_and_programs_see_days(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        used("api", DAY, requests=2, bytes_up=10, tokens_in=100, cost=1_500_000),
        used("api", DAY + 1, requests=3, refused=1, tokens_out=7, cost=250_000),
        used("code", DAY, requests=1),
    ]
    text, _ = shown(monkeypatch, "USD", rows, json_=False, name=None, since=None)
    lines = [line.split() for line in text.splitlines()]
    assert lines[1] == ["work", "api", "5", "1", "10B", "0B", "100", "7", "1.7500", "USD"]
    assert lines[2][:3] == ["work", "code", "1"]
    told, _ = shown(monkeypatch, "USD", rows, json_=True, name=None, since=None)
    result = json.loads(told)["result"]
    assert result["currency"] == "USD"
    assert [(r["binding"], r["day"], r["cost_millionths"]) for r in result["usage"]] == [
        ("api", "2026-11-30", 1_500_000),
        ("api", "2026-12-01", 250_000),
        ("code", "2026-11-30", 0),
    ]


def test_without_prices_there_are_no_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [used("api", DAY, requests=1, unpriced=9)]
    text, _ = shown(monkeypatch, "", rows, json_=False, name=None, since=None)
    assert "COST" not in text and "*" not in text
    told, _ = shown(monkeypatch, "", rows, json_=True, name=None, since=None)
    result = json.loads(told)["result"]
    assert (result["currency"], result["usage"][0]["cost_millionths"]) == (None, None)
    assert result["usage"][0]["unpriced_tokens"] == 9


def test_since_is_a_whole_day(monkeypatch: pytest.MonkeyPatch) -> None:
    since = DAY * 86_400_000 + 5_000_000
    text, broker = shown(monkeypatch, "", [], json_=False, name=None, since=since)
    assert text == "nothing was used\n"
    assert broker.asked == [UsageOf(instance=None, since_day=DAY)]
