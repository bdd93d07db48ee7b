"""How a published image is named: HOST[:PORT]/REPOSITORY@sha256:DIGEST, and in no other way.

A tag says something else tomorrow; a digest does not.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final, NamedTuple

from agent_box.config.addresses import plain

RULE: Final = "HOST[:PORT]/REPOSITORY@sha256: and 64 hex digits"
_PART: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"  # of the OCI distribution specification
_WHOLE: Final = re.compile(
    r"(?P<host>[A-Za-z0-9.-]{1,253}|\[[0-9a-fA-F:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?"
    rf"/(?P<repository>{_PART}(?:/{_PART})*)@sha256:(?P<digest>[0-9a-f]{{64}})",
    re.ASCII,
)


class Reference(NamedTuple):
    host: str  # without brackets
    port: int | None
    repository: str
    digest: str  # of the OCI manifest

    @property
    def loopback(self) -> bool:
        """Whether it is this machine: there alone it may be asked without TLS."""
        return is_loopback(self.host)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{host}{port}/{self.repository}@sha256:{self.digest}"


def parse(untrusted: str) -> Reference:
    """Raises ValueError: the rule."""
    found = _WHOLE.fullmatch(untrusted)
    if found is None or len(found["repository"]) > 255:
        raise ValueError(RULE)
    port = None if found["port"] is None else int(found["port"])
    if port is not None and not 1 <= port <= 65535:
        raise ValueError(RULE)
    return Reference(found["host"].strip("[]"), port, found["repository"], found["digest"])


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return plain(ipaddress.ip_address(host)).is_loopback
    except ValueError:
        return False
