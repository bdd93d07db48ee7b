"""A program in the place of systemd-creds of systemd 257."""

from __future__ import annotations

from pathlib import Path

# Not a cipher: it only shows that what goes in is not what comes out.
_BODY = """
case "$1" in
  encrypt) printf 'sealed:'; base64 ;;
  decrypt) sed 's/^sealed://' | base64 -d ;;
esac
"""


def stand_in(directory: Path, *, version: str = "systemd 257 (257.5-2)", body: str = _BODY) -> None:
    """Puts it into a directory, which belongs at the front of PATH; it keeps `calls` there."""
    program = directory / "systemd-creds"
    program.write_text(
        "#!/bin/sh\n"
        f"echo \"$@\" >> '{directory}/calls'\n"
        f"if [ \"$1\" = --version ]; then echo '{version}'; echo '+PAM'; exit 0; fi\n"
        f"{body}\n"
    )
    program.chmod(0o755)
