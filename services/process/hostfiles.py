"""The host's resolver files, as services on the host's network see them.

A mount of /etc/resolv.conf itself would go on showing the old file after the host had changed
networks, because the new one comes by rename. So the services see copies in a directory of
ours, and the daemon renews them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from agent_box.process.paths import Paths

NAMES: Final = ("hosts", "nsswitch.conf", "resolv.conf")
_ETC: Final = Path("/etc")
# The host's own may name services whose sockets are not mounted.
_NSSWITCH: Final = b"passwd: files\ngroup: files\nhosts: files dns\n"
_SIZE_MAX: Final = 1 << 20


def refresh(paths: Paths) -> bool:
    """Renews the copies. Cheap enough to be done every second.

    Returns:
        Whether anything changed.

    Raises:
        OSError: the runtime directory cannot be written.
    """
    changed = [name for name in NAMES if _renew(paths.host_files / name, _content(name))]
    return bool(changed)


def _content(name: str) -> bytes:
    if name == "nsswitch.conf":
        return _NSSWITCH
    try:
        with open(_ETC / name, "rb") as file:
            return file.read(_SIZE_MAX)
    except OSError:
        return b""  # none, as far as this account can see


def _renew(target: Path, content: bytes) -> bool:
    try:
        if target.read_bytes() == content:
            return False
    except FileNotFoundError:
        pass
    part = target.with_name(f".{target.name}.part")
    part.write_bytes(content)
    os.replace(part, target)
    return True
