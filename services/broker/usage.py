"""Tokens, from the replies of providers as they pass, and whether a budget allows more.

A meter keeps little and reads only what a provider itself says at the place where it says
it: a model can write a `usage` of its own into an answer, and that one is not looked at.
Formats: Anthropic's Messages API, OpenAI's Chat Completions, Responses and Embeddings APIs,
Google's Gemini API; each as one JSON text and as server-sent events (WHATWG HTML, 9.2.5).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from agent_box.broker.refusal import Reason, Refuse
from agent_box.config.model import Binding

EVENT_MAX: Final = 1 << 20  # bytes of one event; a longer one is not read
JSON_MAX: Final = 8 << 20  # bytes of a reply in one piece; a longer one is not read
COUNT_MAX: Final = 10**12  # tokens of one reply; more is nonsense
BYTES_A_TOKEN: Final = 4  # where a reply does not tell: about what text takes, or less
_MODEL: Final = re.compile(r"[A-Za-z0-9._:/@-]{1,128}")


class Tokens(msgspec.Struct, frozen=True):
    """Of one reply. `input` is without what came from or went into a cache.

    `known`: the provider said so; else all are 0, or guessed by `charged`.
    """

    model: str  # empty when the reply does not say
    input: int
    output: int
    cache_read: int
    cache_write: int
    known: bool

    def total(self) -> int:
        return self.input + self.output + self.cache_read + self.cache_write


UNKNOWN: Final = Tokens("", 0, 0, 0, 0, known=False)


class Meter:
    """Reads one reply's decoded body, piece by piece."""

    def __init__(self, read: Callable[[Any, dict[str, int]], str], *, events: bool) -> None:
        self._read = read
        self._events = events
        self._rest = bytearray()  # an unfinished line, or the JSON text so far
        self._after_cr = False  # the last piece ended in a CR: an LF at once belongs to it
        self._skip = False  # the line or the text is too long
        self._data: list[bytes] = []  # lines of an unfinished event
        self._size = 0  # of those
        self._counts: dict[str, int] = {}
        self._model = ""

    def feed(self, untrusted: bytes) -> None:
        if self._events:
            self._feed_events(untrusted)
        elif not self._skip:
            self._rest += untrusted
            if len(self._rest) > JSON_MAX:
                self._skip = True
                self._rest.clear()

    def tokens(self) -> Tokens:
        """What the reply has told so far; of a JSON text, at its end."""
        if self._events:
            self._event()  # one that its end cut off
        elif self._rest:
            if b'"usage' in self._rest:
                self._take(bytes(self._rest))
            self._rest.clear()
        if not self._counts:
            return UNKNOWN
        counts = {name: self._counts.get(name, 0) for name in _SORTS}
        return Tokens(self._model, **counts, known=True)

    def _feed_events(self, untrusted: bytes) -> None:
        if self._after_cr and untrusted.startswith(b"\n"):
            untrusted = untrusted[1:]
        if untrusted:
            self._after_cr = untrusted.endswith(b"\r")
        if b"\r" in untrusted:
            untrusted = untrusted.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = untrusted.split(b"\n")
        for line in lines:
            if self._skip:
                self._skip = False
                self._rest.clear()
                continue
            self._line(bytes(self._rest) + line if self._rest else line)
            self._rest.clear()
        if not self._skip:
            self._rest += rest
            if len(self._rest) > EVENT_MAX:
                self._skip = True
                self._rest.clear()

    def _line(self, line: bytes) -> None:
        if not line:
            self._event()
        elif line.startswith(b"data:"):
            self._size += len(line)
            if self._size <= EVENT_MAX:
                self._data.append(line[5:].removeprefix(b" "))

    def _event(self) -> None:
        data, whole = b"\n".join(self._data), self._size <= EVENT_MAX
        self._data.clear()
        self._size = 0
        if whole and b'"usage' in data:
            self._take(data)

    def _take(self, untrusted: bytes) -> None:
        try:
            document = json.loads(untrusted)
        except (ValueError, RecursionError):
            return  # nothing is told by it
        for each in document if isinstance(document, list) else (document,):
            if isinstance(each, dict):
                model = self._read(each, self._counts)
                if _MODEL.fullmatch(model):
                    self._model = model


_SORTS: Final = ("input", "output", "cache_read", "cache_write")


def _dict(untrusted: Any, name: str) -> dict[str, Any]:
    value = untrusted.get(name)
    return value if isinstance(value, dict) else {}


def _text(untrusted: Mapping[str, Any], name: str) -> str:
    value = untrusted.get(name)
    return value if isinstance(value, str) else ""


def _count(untrusted: Mapping[str, Any], *names: str) -> int | None:
    """The first of these that is there and is a count."""
    for name in names:
        value = untrusted.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= COUNT_MAX:
            return value
    return None


def _anthropic(untrusted: Any, counts: dict[str, int]) -> str:
    """A message, or the events message_start and message_delta, whose counts are totals."""
    message = _dict(untrusted, "message")
    for usage in (_dict(message, "usage"), _dict(untrusted, "usage")):
        for sort, name in (
            ("input", "input_tokens"),
            ("output", "output_tokens"),
            ("cache_read", "cache_read_input_tokens"),
            ("cache_write", "cache_creation_input_tokens"),
        ):
            count = _count(usage, name)
            if count is not None:
                counts[sort] = count
    return _text(message, "model") or _text(untrusted, "model")


def _openai(untrusted: Any, counts: dict[str, int]) -> str:
    """A completion, its last chunk, a response, or an event that ends one."""
    response = _dict(untrusted, "response") or untrusted
    usage = _dict(response, "usage")
    whole = _count(usage, "prompt_tokens", "input_tokens")
    if whole is not None:
        details = _dict(usage, "prompt_tokens_details") or _dict(usage, "input_tokens_details")
        cached = min(_count(details, "cached_tokens") or 0, whole)
        counts["input"], counts["cache_read"] = whole - cached, cached
        counts["output"] = _count(usage, "completion_tokens", "output_tokens") or 0
    return _text(response, "model")


def _google(untrusted: Any, counts: dict[str, int]) -> str:
    """A reply, an event or an element of the array; each tells the totals so far."""
    usage = _dict(untrusted, "usageMetadata")
    whole = _count(usage, "promptTokenCount")
    if whole is not None:
        cached = min(_count(usage, "cachedContentTokenCount") or 0, whole)
        tools = _count(usage, "toolUsePromptTokenCount") or 0
        counts["input"], counts["cache_read"] = whole - cached + tools, cached
    written = [_count(usage, name) for name in ("candidatesTokenCount", "thoughtsTokenCount")]
    if any(count is not None for count in written):
        counts["output"] = sum(count or 0 for count in written)
    return _text(untrusted, "modelVersion")


_READ: Final[Mapping[str, Callable[[Any, dict[str, int]], str]]] = {
    "anthropic": _anthropic,
    "openai": _openai,
    "google": _google,
}


def meter(kind: str, content_type: bytes | None) -> Meter | None:
    """A meter for a reply; None when its kind or its type tells nothing."""
    read = _READ.get(kind)
    type_ = (content_type or b"").partition(b";")[0].strip().lower()
    if read is None or type_ not in (b"application/json", b"text/event-stream"):
        return None
    return Meter(read, events=type_ == b"text/event-stream")


def charged(tokens: Tokens, method: str, bytes_up: int, bytes_down: int) -> Tokens:
    """What a budget counts for one reply.

    A client can ask for a stream that tells no usage, or leave before it is told. So a POST
    whose reply told nothing is charged by the bytes of its bodies, rather more than less.
    """
    if tokens.known or method != "POST":
        return tokens
    guess = (-(-bytes_up // BYTES_A_TOKEN), -(-bytes_down // BYTES_A_TOKEN))
    return Tokens(tokens.model, guess[0], guess[1], 0, 0, known=False)


@dataclass(frozen=True)
class Spent:
    """What an instance used of a binding in all its life."""

    requests: int
    tokens: int
    cost: int  # millionths


class Priced(Protocol):
    """A table of prices (`prices.Prices`)."""

    def knows(self, kind: str) -> bool: ...


def limited(binding: Binding) -> bool:
    """Whether a binding has a budget at all."""
    limits = (binding.max_requests, binding.max_tokens, binding.max_cost)
    return limits != (None, None, None)


def allowed(binding: Binding, spent: Spent, prices: Priced) -> Refuse | None:
    """Whether the binding's budget allows another request.

    Requests under way are not in `spent` with their tokens yet, so a budget of tokens or
    money can be passed by what those cost, and not by more.
    """
    if binding.max_cost is not None and not prices.knows(binding.kind):
        return Refuse(
            Reason.BUDGET, 503, "the binding has max_cost, and prices.toml no price for its kind"
        )
    for key, most, used in (
        ("max_requests", binding.max_requests, spent.requests),
        ("max_tokens", binding.max_tokens, spent.tokens),
        ("max_cost", binding.max_cost, spent.cost),
    ):
        if most is not None and used >= most:
            return Refuse(
                Reason.BUDGET,
                403,
                f"this instance has used up {key} of the binding; no retry helps",
            )
    return None
