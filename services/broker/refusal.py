"""Why a request was refused, and what the guest is told of it.

A message is one of ours, whole: nothing that a guest or an upstream sent stands in it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    # what arrived is no request that all parsers read alike
    HEAD_BAD = "head-bad"
    HEAD_TOO_LARGE = "head-too-large"
    HTTP_VERSION = "http-version"
    FRAMING = "framing"  # Content-Length and Transfer-Encoding
    TARGET_BAD = "target-bad"  # absolute-form, dot segments, encoded slashes and the like
    # 1: whose socket
    NOT_RUNNING = "not-running"
    BINDINGS_INCOMPLETE = "bindings-incomplete"
    # 2: which binding
    HOST_BAD = "host-bad"  # missing, twice, or no plain name
    HOST_UNKNOWN = "host-unknown"
    # 3: which route
    PATH_UNKNOWN = "path-unknown"
    METHOD = "method"
    UPGRADE = "upgrade"
    REPO = "repo"
    PUSH_OFF = "push-off"
    PUSH_COMMANDS = "push-commands"  # the command list cannot be read, or is too long
    PUSH_REF = "push-ref"  # outside refs/heads/agent-box/<instance>/
    LFS_UNKNOWN = "lfs-unknown"
    # 4: which nonce
    NONCE_MISSING = "nonce-missing"
    NONCE_WRONG = "nonce-wrong"
    # 5, 6, 7: which upstream
    UPSTREAM_PLAIN = "upstream-plain"
    UPSTREAM_OTHER = "upstream-other"  # the connection leads elsewhere than the binding
    CERTIFICATE = "certificate"
    ADDRESS = "address"
    # 8: the store's answer
    STORE = "store"
    CREDENTIAL_MISSING = "credential-missing"
    CREDENTIAL_UNUSABLE = "credential-unusable"
    # beside the gate
    BUDGET = "budget"
    REPLY_BAD = "reply-bad"
    HEAD_TIMEOUT = "head-timeout"
    BODY_BAD = "body-bad"  # not framed as its head says, or too large
    UPSTREAM_DNS = "upstream-dns"
    UPSTREAM_CONNECT = "upstream-connect"
    UPSTREAM_TLS = "upstream-tls"
    UPSTREAM_TIMEOUT = "upstream-timeout"
    UPSTREAM_GARBAGE = "upstream-garbage"  # no HTTP, or the connection's end in place of a reply


@dataclass(frozen=True)
class Refuse:
    """One refusal: the rule that was broken, an HTTP status, and a line for people."""

    reason: Reason
    status: int
    message: str


def body(refuse: Refuse) -> bytes:
    """The JSON body of a refusal, in a shape that the SDKs of all providers show to people."""
    error = {"type": "agent_box_refused", "code": str(refuse.reason), "message": refuse.message}
    return json.dumps({"type": "error", "error": error}).encode() + b"\n"
