"""The broker's limits and timeouts, all of them (design: the broker)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Times in seconds, sizes in bytes."""

    head_s: float = 10.0  # from a request's first byte to the end of its head
    idle_s: float = 120.0  # without a byte, in either direction; between requests, too
    answer_s: float = 300.0  # from the request to the upstream's response head
    transfer_s: float = 1800.0  # of a whole exchange
    upgraded_idle_s: float = 1800.0  # of an upgraded connection
    connect_s: float = 10.0  # to one address, and as much again for TLS
    resolve_s: float = 10.0
    pool_idle_s: float = 20.0  # less than any upstream keeps a silent connection
    pool_each: int = 32  # kept connections of an instance to a binding's upstream
    addresses: int = 4  # of an upstream that are tried
    head_bytes: int = 65536
    connections: int = 512  # of a guest at once
    linger_s: float = 2.0  # after a refusal, for what the guest was still sending
    linger_bytes: int = 1 << 20
    chunk: int = 1 << 18  # read at a time
    buffer: int = 1 << 18  # written before a slow reader is waited for


LIMITS = Limits()
