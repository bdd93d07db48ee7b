"""git-lfs: links to objects, which stay on the host.

The reply to a batch call tells a client where each object lies and which headers, with what
secrets in them, open it. The guest gets a link to its own endpoint instead, which is worth
nothing outside its instance and boot; the broker keeps the rest. Pure: the tokens of links
and the time come from the caller. Source: git-lfs, docs/api/batch.md and
docs/api/basic-transfers.md.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from agent_box.broker.git import LFS_SEGMENTS
from agent_box.broker.refusal import Reason, Refuse
from agent_box.broker.routes import Target
from agent_box.config import words
from agent_box.config.egress import BROKER_ZONE
from agent_box.config.model import Binding, Upstream

BATCH_MAX: Final = 4 << 20  # bytes of a batch call
REPLY_MAX: Final = 16 << 20  # bytes of its reply, decoded
LINKS_MAX: Final = 20_000  # of one boot; the oldest are forgotten
LIFE_S: Final = 3600  # of a link whose reply does not say
LIFE_MAX_S: Final = 6 * 3600
_METHODS: Final = {"download": "GET", "upload": "PUT", "verify": "POST"}
_ACTIONS: Final = {"download": ("download",), "upload": ("upload", "verify")}


@dataclass(frozen=True)
class Issued:
    """One link that a batch's reply gave, for one instance's boot and one binding."""

    token: str  # the last segment of the link
    instance: str
    boot: int
    binding: str
    method: str  # GET to download, PUT to upload, POST to verify
    upstream: Upstream
    target: bytes  # path and query at the upstream, as it was given
    headers: tuple[tuple[bytes, bytes], ...]  # of the reply, lowercase names; secrets


# --------------------------------------------------------------------- what is asked


@dataclass(frozen=True)
class Batch:
    """A batch call's operation."""

    upload: bool


_KEYS: Final = frozenset(("operation", "transfers", "ref", "objects", "hash_algo"))


class BatchReader:
    """Reads the body of a batch call, as it arrives.

    Args:
        length: of the body; None when its head does not say, which is refused.
    """

    def __init__(self, length: int | None) -> None:
        self._length = length
        self._body = bytearray()

    def feed(self, untrusted: bytes) -> Batch | Refuse | None:
        """Takes the next bytes; None while there are more to come."""
        if self._length is None:
            return Refuse(Reason.PUSH_COMMANDS, 411, "an LFS batch call needs a Content-Length")
        if self._length > BATCH_MAX:
            return Refuse(Reason.PUSH_COMMANDS, 413, "an LFS batch call is too large")
        self._body += untrusted
        return None if len(self._body) < self._length else self.finish()

    def finish(self) -> Batch | Refuse:
        """The body is over."""
        document = _read(bytes(self._body))
        # Keys are compared without regard to case by some servers; so there may be no others.
        if document is None or not document.keys() <= _KEYS:
            return Refuse(Reason.PUSH_COMMANDS, 403, "the LFS batch call cannot be read")
        operation = document.get("operation")
        if not isinstance(operation, str) or operation not in _ACTIONS:
            return Refuse(Reason.PUSH_COMMANDS, 403, "the LFS operation is upload or download")
        return Batch(upload=operation == "upload")


def _read(untrusted: bytes) -> dict[str, Any] | None:
    """A JSON object without a key that stands twice; None: it is none."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key stands twice")
        return found

    def never(constant: str) -> Any:
        raise ValueError("no JSON")

    try:
        text = untrusted.decode()  # or a UTF-16 text would be guessed
        document = json.loads(text, object_pairs_hook=once, parse_constant=never)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


# ------------------------------------------------------------------ what is answered

_HREF: Final = re.compile(r"(https?://[^/?#@\\]{1,255})(/[!-\"$-~]{0,8191})?")
_NAME: Final = re.compile(r"[A-Za-z0-9-]{1,64}")
_VALUE: Final = re.compile(r"[!-~](?:[ -~]{0,8190}[!-~])?")
# What our own hops decide about.
_NOT_KEPT: Final = frozenset(
    (
        *("host", "content-length", "transfer-encoding", "connection", "keep-alive", "te"),
        *("trailer", "upgrade", "expect", "proxy-authorization", "proxy-connection"),
    )
)
_OID: Final = re.compile(r"[0-9a-f]{64}")


class _Unreadable(Exception):
    """The reply is not what the API says."""


class Links:
    """The links of one boot of an instance.

    Args:
        token: makes a new one of letters, digits, `-` and `_`, which nobody can guess.
    """

    def __init__(self, instance: str, boot: int, token: Callable[[], str]) -> None:
        self._instance = instance
        self._boot = boot
        self._token = token
        self._links: dict[str, tuple[Issued, float]] = {}  # with the end of its time

    def find(self, target: Target, now: float) -> Issued | None:
        """What a request's link stands for; None when it is none, or its time is over."""
        if target.segments[:-1] != LFS_SEGMENTS:
            return None
        found = self._links.get(target.segments[-1])
        return None if found is None or found[1] <= now else found[0]

    def rewrite(
        self, untrusted: bytes, batch: Batch, binding: Binding, nonce: str, now: float
    ) -> bytes | Refuse:
        """The reply to a batch call for the guest: our links, and no header of theirs.

        Args:
            untrusted: the upstream's, decoded and whole.
            now: seconds, of the clock that `find` is asked by.
        """
        refuse = Refuse(Reason.REPLY_BAD, 502, "the upstream's LFS reply cannot be passed on")
        document = _read(untrusted)
        if document is None or document.get("transfer", "basic") != "basic":
            return refuse
        objects = document.get("objects")
        if not isinstance(objects, list):
            return refuse
        try:
            rewritten = [self._object(each, batch, binding, nonce, now) for each in objects]
        except _Unreadable:
            return refuse
        return json.dumps({"transfer": "basic", "objects": rewritten}).encode()

    def _object(
        self, untrusted: Any, batch: Batch, binding: Binding, nonce: str, now: float
    ) -> dict[str, Any]:
        if not isinstance(untrusted, dict):
            raise _Unreadable
        oid, size = untrusted.get("oid"), untrusted.get("size", 0)
        if not isinstance(oid, str) or not _OID.fullmatch(oid) or type(size) is not int or size < 0:
            raise _Unreadable
        kept: dict[str, Any] = {"oid": oid, "size": size}
        error = untrusted.get("error")
        if isinstance(error, dict):
            code, message = error.get("code"), error.get("message")
            kept["error"] = {
                "code": code if type(code) is int else 500,
                "message": message[:1000] if isinstance(message, str) else "",
            }
            return kept
        actions = untrusted.get("actions") or {}
        if not isinstance(actions, dict):
            raise _Unreadable
        # With the nonce in its headers already, a client need not be asked for it.
        kept["authenticated"] = True
        kept["actions"] = {
            name: self._action(name, actions[name], binding, nonce, now)
            for name in _ACTIONS["upload" if batch.upload else "download"]
            if name in actions
        }
        return kept

    def _action(
        self, name: str, untrusted: Any, binding: Binding, nonce: str, now: float
    ) -> dict[str, Any]:
        if not isinstance(untrusted, dict):
            raise _Unreadable
        life = untrusted.get("expires_in")
        life = min(life, LIFE_MAX_S) if type(life) is int and life > 0 else LIFE_S
        upstream, target = _place(untrusted.get("href"))
        issued = Issued(
            token=self._token(),
            instance=self._instance,
            boot=self._boot,
            binding=binding.name,
            method=_METHODS[name],
            upstream=upstream,
            target=target,
            headers=_headers(untrusted.get("header") or {}),
        )
        while len(self._links) >= LINKS_MAX:
            del self._links[next(iter(self._links))]
        self._links[issued.token] = (issued, now + life)
        pair = b64encode(f"agent-box:{nonce}".encode()).decode()
        return {
            "href": f"http://{binding.name}.{BROKER_ZONE}/{'/'.join(LFS_SEGMENTS)}/{issued.token}",
            "header": {"Authorization": f"Basic {pair}"},
            "expires_in": life,
        }


def _place(untrusted: Any) -> tuple[Upstream, bytes]:
    """An href in two: where to connect, and what to ask there."""
    found = _HREF.fullmatch(untrusted) if isinstance(untrusted, str) else None
    if found is None:
        raise _Unreadable
    try:
        return words.upstream(found[1]), (found[2] or "/").encode()
    except ValueError:
        raise _Unreadable from None


def _headers(untrusted: Any) -> tuple[tuple[bytes, bytes], ...]:
    if not isinstance(untrusted, Mapping):
        raise _Unreadable
    kept: dict[bytes, bytes] = {}
    for name, value in untrusted.items():
        if not _NAME.fullmatch(name) or not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise _Unreadable
        if name.lower() not in _NOT_KEPT:
            kept[name.lower().encode()] = value.encode()
    return tuple(kept.items())
