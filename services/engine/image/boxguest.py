"""The drive `guest`: box-guest as one zip file, compiled for the Python of the image.

It is a drive of its own, so that the guest's code can be replaced without building a variant
anew, and can never be replaced from inside a machine.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from importlib import resources
from pathlib import Path
from typing import Final

MAIN: Final = "from agent_box.guest.pid1 import main\n\nmain()\n"
NAME: Final = "box-guest.pyz"
_TIME: Final = (1980, 1, 1, 0, 0, 0)  # the first that a zip file can tell


def sources() -> dict[str, str]:
    """The text of each module of the guest by its path in the zip file."""
    found = {"__main__.py": MAIN, "agent_box/__init__.py": ""}
    for file in resources.files("agent_box.guest").iterdir():
        if file.name.endswith(".py") and file.name != "__main__.py":
            found[f"agent_box/guest/{file.name}"] = file.read_text(encoding="utf-8")
    return dict(sorted(found.items()))


def digest(texts: dict[str, str]) -> str:
    """The sha256 of the guest's source: tells whether a drive was made from it."""
    return hashlib.sha256(json.dumps(sorted(texts.items())).encode()).hexdigest()


def lay_out(texts: dict[str, str], directory: Path) -> None:
    """Writes the modules as files, to be compiled."""
    for name, text in texts.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")


def pack(compiled: Path, drive: Path) -> None:
    """Writes the tree of the drive from the directory in which the modules were compiled."""
    drive.mkdir()
    with zipfile.ZipFile(drive / NAME, "w", zipfile.ZIP_STORED) as archive:
        for file in sorted(compiled.rglob("*")):
            if file.is_file():
                about = zipfile.ZipInfo(str(file.relative_to(compiled)), _TIME)
                about.external_attr = 0o100644 << 16
                archive.writestr(about, file.read_bytes())
    (drive / NAME).chmod(0o444)
    drive.chmod(0o755)
