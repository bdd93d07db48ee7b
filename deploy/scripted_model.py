#!/usr/bin/env python3
"""A scripted model: it stands in for a provider, and thinks nothing.

    scripted_model.py --key-file FILE [--tls CERT KEY] [--port N] [--log FILE]

It answers as OpenAI's Responses API (/v1/responses), Anthropic's Messages API (/v1/messages)
and Google's generateContent do, well enough for coding agents, to whoever shows the key in
FILE. Each line of the prompt that begins with "$ " is a command: for each it makes one tool
call, and when all have their results it says which were run. A prompt with a line TRUNCATE,
REFUSE or SLOW is answered with an end at the token limit, a refusal, or a drip of words.

It listens on 127.0.0.1 and prints its port. Standard library only.
"""

from __future__ import annotations

import argparse
import gzip
import hmac
import json
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any, Final

BODY_MAX: Final = 32 << 20
DRIP_S: Final = 0.5
DRIPS: Final = 240
# Names of tools that run a command, the best first.
SHELLS: Final = (
    *("exec_command", "shell_command", "shell", "local_shell"),
    *("Bash", "bash", "run_shell_command", "execute_command"),
)
_numbers: Final = count(1)


@dataclass(frozen=True)
class Asked:
    """What a request comes to, whatever API it came by.

    Attributes:
        prompt: the text of the last user message.
        results: how many tool results came after it.
        tools: name and JSON schema of each that is offered.
        stream: whether the answer is wanted as server-sent events.
        schema: of the JSON that the answer has to be; None: words.
    """

    model: str
    prompt: str
    results: int
    tools: list[tuple[str, dict[str, Any]]]
    stream: bool
    schema: dict[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """A tool call, or words.

    Attributes:
        tool: its name, and `arguments` for it; None for words.
        stop: end, truncated or refused.
    """

    tool: str | None
    arguments: dict[str, Any]
    words: list[str]
    stop: str = "end"
    drip: bool = False

    @property
    def text(self) -> str:
        return "".join(self.words)


def decide(asked: Asked) -> Answer:
    """The script."""
    if asked.schema is not None:  # an agent that asks which model to ask
        return Answer(None, {}, [json.dumps(example(asked.schema))])
    lines = [line.strip() for line in asked.prompt.splitlines()]
    commands = [line[2:] for line in lines if line.startswith("$ ")]
    if "SLOW" in lines:
        return Answer(None, {}, ["tick "] * DRIPS, drip=True)
    if "TRUNCATE" in lines:
        return Answer(None, {}, ["this is cut o"], "truncated")
    if "REFUSE" in lines:
        return Answer(None, {}, ["I will not."], "refused")
    tool = next(((n, s) for name in SHELLS for n, s in asked.tools if n == name), None)
    if asked.results < len(commands) and tool is not None:
        name, schema = tool
        return Answer(name, arguments(schema, commands[asked.results]), [])
    if commands and tool is not None:
        ran = len(commands)
        return Answer(None, {}, [f"{ran} command{'' if ran == 1 else 's'} of the script ran."])
    return Answer(None, {}, ["This is a scripted model; ", "it has nothing to say."])


def arguments(schema: dict[str, Any], command: str) -> dict[str, Any]:
    """Arguments of a tool, by its schema, so that it runs a command."""
    properties = schema.get("properties", {})
    made: dict[str, Any] = {}
    for name in ("command", "cmd", "script"):
        if name in properties:
            types = properties[name].get("type")
            array = types == "array" or (isinstance(types, list) and "array" in types)
            made[name] = ["bash", "-lc", command] if array else command
            break
    for name in ("timeout_ms", "yield_time_ms"):  # codex's; emulated machines are slow
        if name in properties:
            made[name] = 60_000
    for name in schema.get("required", []):
        if name not in made:
            kind = properties.get(name, {}).get("type")
            fillers = {"integer": 60_000, "number": 60_000, "boolean": False, "array": []}
            made[name] = fillers.get(kind, "a command of the script")
    return made


def example(schema: dict[str, Any]) -> Any:
    """The least that a JSON schema takes."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = str(schema.get("type")).lower()
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: example(properties.get(name, {})) for name in schema.get("required", [])}
    if kind in ("integer", "number"):
        return schema.get("minimum", 1)
    return {"boolean": False, "array": []}.get(kind, "as the script says")


def text_of(content: Any) -> str:
    """The text of a message's content, in any of the APIs' shapes."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [c.get("text") for c in content if isinstance(c, dict)]
        return "\n".join(p for p in parts if isinstance(p, str))
    return ""


# ------------------------------------------------------------------------- Responses API


def from_responses(body: dict[str, Any]) -> Asked:
    items = body.get("input", [])
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    last = max((n for n, i in enumerate(items) if i.get("role") == "user"), default=-1)
    after = [i for i in items[last + 1 :] if str(i.get("type", "")).endswith("_output")]
    tools = [
        (t["name"], t.get("parameters") or {})
        for t in body.get("tools", [])
        if t.get("type") == "function"
    ]
    prompt = text_of(items[last].get("content")) if last >= 0 else ""
    return Asked(str(body.get("model")), prompt, len(after), tools, bool(body.get("stream")))


def as_responses(asked: Asked, answer: Answer) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    number = next(_numbers)
    if answer.tool is not None:
        item: dict[str, Any] = {
            "type": "function_call",
            "id": f"fc_{number}",
            "call_id": f"call_{number}",
            "name": answer.tool,
            "arguments": json.dumps(answer.arguments),
            "status": "completed",
        }
    else:
        part = {"type": "output_text", "text": answer.text, "annotations": []}
        item = {
            "type": "message",
            "id": f"msg_{number}",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }
    cut = answer.stop == "truncated"
    whole = {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "model": asked.model,
        "output": [item],
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": {
            "input_tokens": len(asked.prompt.split()) + 10,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": len(answer.words) + 5,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(asked.prompt.split()) + len(answer.words) + 15,
        },
    }

    def events() -> Iterator[dict[str, Any]]:
        yield {
            "type": "response.created",
            "response": {**whole, "status": "in_progress", "output": []},
        }
        place = {"output_index": 0, "item_id": item["id"]}
        if answer.tool is not None:
            begun = {**item, "arguments": "", "status": "in_progress"}
            yield {"type": "response.output_item.added", "output_index": 0, "item": begun}
            kind = "response.function_call_arguments"
            yield {"type": f"{kind}.delta", **place, "delta": item["arguments"]}
            yield {"type": f"{kind}.done", **place, "arguments": item["arguments"]}
        else:
            begun = {**item, "content": [], "status": "in_progress"}
            yield {"type": "response.output_item.added", "output_index": 0, "item": begun}
            place["content_index"] = 0
            empty = {"type": "output_text", "text": "", "annotations": []}
            yield {"type": "response.content_part.added", **place, "part": empty}
            for word in answer.words:
                yield {"type": "response.output_text.delta", **place, "delta": word}
            yield {"type": "response.output_text.done", **place, "text": answer.text}
            yield {"type": "response.content_part.done", **place, "part": item["content"][0]}
        yield {"type": "response.output_item.done", "output_index": 0, "item": item}
        yield {"type": "response.incomplete" if cut else "response.completed", "response": whole}

    return whole, ({**e, "sequence_number": n} for n, e in enumerate(events()))


# -------------------------------------------------------------------------- Messages API


def from_messages(body: dict[str, Any]) -> Asked:
    messages = body.get("messages", [])

    def results(message: dict[str, Any]) -> int:
        content = message.get("content")
        if not isinstance(content, list):
            return 0
        return sum(1 for c in content if c.get("type") == "tool_result")

    own = [n for n, m in enumerate(messages) if m.get("role") == "user" and not results(m)]
    last = max(own, default=-1)
    tools = [(t["name"], t.get("input_schema") or {}) for t in body.get("tools", []) if "name" in t]
    prompt = text_of(messages[last].get("content")) if last >= 0 else ""
    after = sum(map(results, messages[last + 1 :]))
    return Asked(str(body.get("model")), prompt, after, tools, bool(body.get("stream")))


def as_messages(asked: Asked, answer: Answer) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    number = next(_numbers)
    reason = {"end": "end_turn", "truncated": "max_tokens", "refused": "refusal"}[answer.stop]
    if answer.tool is not None:
        reason = "tool_use"
        block: dict[str, Any] = {
            "type": "tool_use",
            "id": f"toolu_{number}",
            "name": answer.tool,
            "input": answer.arguments,
        }
    else:
        block = {"type": "text", "text": answer.text}
    usage = {
        "input_tokens": len(asked.prompt.split()) + 10,
        "output_tokens": len(answer.words) + 5,
    }
    whole: dict[str, Any] = {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": [block],
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": usage,
    }

    def events() -> Iterator[dict[str, Any]]:
        begun = {**whole, "content": [], "stop_reason": None}
        yield {"type": "message_start", "message": begun}
        if answer.tool is not None:
            first = {**block, "input": {}}
            yield {"type": "content_block_start", "index": 0, "content_block": first}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(answer.arguments)}
            yield {"type": "content_block_delta", "index": 0, "delta": delta}
        else:
            first = {"type": "text", "text": ""}
            yield {"type": "content_block_start", "index": 0, "content_block": first}
            for word in answer.words:
                delta = {"type": "text_delta", "text": word}
                yield {"type": "content_block_delta", "index": 0, "delta": delta}
        yield {"type": "content_block_stop", "index": 0}
        ended = {"stop_reason": reason, "stop_sequence": None}
        yield {"type": "message_delta", "delta": ended, "usage": usage}
        yield {"type": "message_stop"}

    return whole, events()


# ----------------------------------------------------------------------- generateContent


def from_google(body: dict[str, Any], stream: bool) -> Asked:
    contents = body.get("contents", [])

    def results(content: dict[str, Any]) -> int:
        return sum(1 for p in content.get("parts", []) if "functionResponse" in p)

    own = [n for n, c in enumerate(contents) if c.get("role") == "user" and not results(c)]
    last = max(own, default=-1)
    tools = [
        (f["name"], f.get("parametersJsonSchema") or f.get("parameters") or {})
        for t in body.get("tools", [])
        for f in t.get("functionDeclarations", [])
    ]
    prompt = text_of(contents[last].get("parts")) if last >= 0 else ""
    after = sum(map(results, contents[last + 1 :]))
    wanted = body.get("generationConfig", {})
    schema = wanted.get("responseJsonSchema") or wanted.get("responseSchema")
    return Asked("scripted", prompt, after, tools, stream, schema)


def as_google(asked: Asked, answer: Answer) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    reason = {"end": "STOP", "truncated": "MAX_TOKENS", "refused": "SAFETY"}[answer.stop]

    def reply(part: dict[str, Any], finish: str | None) -> dict[str, Any]:
        candidate: dict[str, Any] = {"index": 0, "content": {"role": "model", "parts": [part]}}
        if finish is not None:
            candidate["finishReason"] = finish
        usage = {"promptTokenCount": 10, "candidatesTokenCount": 5, "totalTokenCount": 15}
        return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "scripted"}

    if answer.tool is not None:
        call = {"functionCall": {"name": answer.tool, "args": answer.arguments}}
        return reply(call, "STOP"), iter([reply(call, "STOP")])
    parts = [reply({"text": word}, None) for word in answer.words[:-1]]
    parts.append(reply({"text": answer.words[-1]}, reason))
    return reply({"text": answer.text}, reason), iter(parts)


# -------------------------------------------------------------------------------- server


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are noted by `_note`, without their headers."""

    def do_HEAD(self) -> None:
        self._note("HEAD", 200, None)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        if not self._authorised():
            return
        self._note("GET", 200, None)
        self._json(200, {"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    def do_POST(self) -> None:
        body = self._body()
        if not self._authorised():
            return
        path = self.path.partition("?")[0]
        if path.endswith(("/count_tokens", ":countTokens")):
            self._note("POST", 200, None)
            self._json(200, {"input_tokens": 10, "totalTokens": 10})
            return
        if path.endswith("/responses"):
            asked, shape = from_responses(body), as_responses
        elif path.endswith("/messages"):
            asked, shape = from_messages(body), as_messages
        elif ":streamGenerateContent" in path or ":generateContent" in path:
            asked, shape = from_google(body, ":stream" in path), as_google
        else:
            self._note("POST", 404, None)
            self._json(404, {"error": {"type": "not_found_error", "message": "no such path"}})
            return
        answer = decide(asked)
        self._note("POST", 200, answer)
        whole, events = shape(asked, answer)
        if asked.stream:
            self._events(events, answer.drip)
        else:
            self._json(200, whole)

    def _authorised(self) -> bool:
        shown = self.headers.get("Authorization", "").removeprefix("Bearer ")
        for header in ("x-api-key", "x-goog-api-key"):
            shown = shown or self.headers.get(header, "")
        if hmac.compare_digest(shown.encode(), self.server.key.encode()):
            return True
        self._note(self.command, 401, None)
        error = {"type": "authentication_error", "message": "not the key of this model"}
        self._json(401, {"type": "error", "error": error})
        return False

    def _body(self) -> dict[str, Any]:
        raw = b""
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            while size := int(self.rfile.readline().split(b";")[0], 16):
                raw += self.rfile.read(size)
                self.rfile.readline()
                if len(raw) > BODY_MAX:
                    raise ValueError("a body that is too large")
            self.rfile.readline()
        else:
            raw = self.rfile.read(min(int(self.headers.get("Content-Length") or 0), BODY_MAX))
        if self.headers.get("Content-Encoding") == "gzip":
            raw = gzip.decompress(raw)
        try:
            body = json.loads(raw or b"{}")
        except ValueError:
            return {}
        return body if isinstance(body, dict) else {}

    def _json(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _events(self, events: Iterator[dict[str, Any]], drip: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event in events:
                named = f"event: {event['type']}\n" if "type" in event else ""
                data = f"{named}data: {json.dumps(event)}\n\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()
                if drip and "delta" in str(event.get("type", "delta")):
                    time.sleep(DRIP_S)  # the script says: slowly
            self.wfile.write(b"0\r\n\r\n")
        except (BrokenPipeError, ConnectionResetError, ssl.SSLError):
            self.close_connection = True  # whoever asked has gone
            self._note("gone", 0, None)

    def _note(self, method: str, status: int, answer: Answer | None) -> None:
        did = None
        if answer is not None:
            did = answer.tool or answer.stop
        self.server.note({"method": method, "path": self.path, "status": status, "did": did})


class Server(ThreadingHTTPServer):
    """Args:
    key: that callers must show.
    log: gets a line of JSON for each request; never the key.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int, key: str, log: Path | None) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.key = key
        self._log = log
        self._lock = threading.Lock()

    def note(self, fields: dict[str, Any]) -> None:
        if self._log is not None:
            with self._lock, self._log.open("a") as file:
                file.write(json.dumps(fields) + "\n")

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception() if sys.version_info >= (3, 11) else None
        self.note({"method": "failed", "path": "", "status": 0, "did": type(error).__name__})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--key-file", type=Path, required=True)
    parser.add_argument("--tls", nargs=2, metavar=("CERT", "KEY"))
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", type=Path)
    given = parser.parse_args()
    server = Server(given.port, given.key_file.read_text().strip(), given.log)
    if given.tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*given.tls)
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    print(server.server_address[1], flush=True)
    with suppress(KeyboardInterrupt):  # of the terminal, and so for whoever started us
        server.serve_forever()


if __name__ == "__main__":
    main()
