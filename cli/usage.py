"""The verb `usage`: what instances used of their bindings, as the broker counted it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from agent_box.cli import link
from agent_box.cli.render import Render, size_text, table

if TYPE_CHECKING:
    from agent_box.broker.contract import Used

DAY_MS: Final = 86_400_000
MICRO: Final = 1_000_000
_COUNTS: Final = (
    *("requests", "refused", "bytes_up", "bytes_down", "tokens_in", "tokens_out", "cost"),
    "unpriced",
)


def show(out: Render, *, name: str | None, since: int | None) -> None:
    """Requests, bytes, tokens and cost, by instance and binding; in JSON by day, too.

    Args:
        since: Unix milliseconds; the whole day (UTC) that it lies in counts.
    """
    from agent_box.broker.contract import Usage, UsageOf

    instance = None if name is None else _id(out, name)
    since_day = 0 if since is None else since // DAY_MS
    with link.service("broker", out) as broker:
        found = broker.call("usage", UsageOf(instance=instance, since_day=since_day))
    assert isinstance(found, Usage)
    rows = [_row(used, found.currency) for used in found.used]
    result = {"currency": found.currency or None, "usage": rows}
    out.result(result, _text(found.used, found.currency))


def _id(out: Render, name: str) -> str:
    from agent_box.registry.contract import Instance, Name

    with link.service("registry", out) as registry:
        found = registry.call("inspect", Name(name=name))
    assert isinstance(found, Instance)
    return found.id


def _row(used: Used, currency: str) -> dict[str, Any]:
    row = {name: getattr(used, name) for name in _COUNTS}
    row["unpriced_tokens"] = row.pop("unpriced")
    cost = row.pop("cost")
    row["cost_millionths"] = cost if currency else None  # no number in JSON is a fraction
    day = time.strftime("%Y-%m-%d", time.gmtime(used.day * DAY_MS // 1000))
    return {"name": used.name, "id": used.instance, "binding": used.binding, "day": day, **row}


def _text(used: list[Used], currency: str) -> str:
    if not used:
        return "nothing was used"
    sums: dict[tuple[str, str, str], dict[str, int]] = {}
    for each in used:
        total = sums.setdefault((each.name, each.instance, each.binding), dict.fromkeys(_COUNTS, 0))
        for name in _COUNTS:
            total[name] += getattr(each, name)
    header = ["NAME", "BINDING", "REQUESTS", "REFUSED", "UP", "DOWN", "TOKENS IN", "TOKENS OUT"]
    rows = []
    for (name, _, binding), total in sums.items():
        sizes = [size_text(total["bytes_up"]), size_text(total["bytes_down"])]
        row = [name, binding, total["requests"], total["refused"], *sizes]
        row += [total["tokens_in"], total["tokens_out"]]
        if currency:
            row.append(f"{total['cost'] / MICRO:.4f} {currency}" + "*" * bool(total["unpriced"]))
        rows.append(row)
    if currency:
        header.append("COST")
    text = table(header, rows)
    if currency and any(total["unpriced"] for total in sums.values()):
        text += "\n* without tokens that prices.toml has no price for"
    return text
