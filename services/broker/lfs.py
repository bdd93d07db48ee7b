"""git-lfs: links to objects, which stay on the host.

The reply to a batch call tells a client where each object lies and which headers, with what
secrets in them, open it. The guest gets a link to its own endpoint instead; the broker keeps
the rest. Source: git-lfs, docs/api/batch.md and docs/api/basic-transfers.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent_box.config.model import Upstream


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
