"""Which config file applies, and its bytes.

The first of these that exists is the whole config; files are never merged:

1. ``$AGENT_BOX_CONFIG``, which ends the search: if it is missing, that is an error.
2. ``$XDG_CONFIG_HOME/agent-box/config.toml``, skipped when the variable is unset or empty.
3. ``~/.config/agent-box/config.toml``
4. ``/etc/agent-box/config.toml``

The working directory is never searched, also not by a relative path in a variable: a cloned
project could plant a file there. Every verb runs `find`, so this module is light.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agent_box.config.errors import ConfigError

SYSTEM: Final = Path("/etc/agent-box/config.toml")
SIZE_MAX: Final = 1 << 20  # bytes
VARIABLE: Final = "AGENT_BOX_CONFIG"


def find(env: Mapping[str, str], *, system: Path = SYSTEM) -> Path | None:
    """The path of the config file that applies, absolute; None when there is none.

    It is the path as the search names it, for people; two searches found the same file when
    `real` of both is the same.

    Raises:
        ConfigError: the file that ``AGENT_BOX_CONFIG`` names is missing, or the variable is
            not an absolute path; or it cannot be told whether a file exists.
    """
    named = env.get(VARIABLE, "")
    if named:
        if not os.path.isabs(named):
            raise ConfigError("", f"{VARIABLE} is not an absolute path: {named}")
        path = Path(named)
        if not _exists(path):
            raise ConfigError("", f"{named}: no such file ({VARIABLE} names it)")
        return path
    candidates = []
    for base in (env.get("XDG_CONFIG_HOME", ""), _below_home(env)):
        if os.path.isabs(base):
            candidates.append(Path(base) / "agent-box" / "config.toml")
    for path in (*candidates, system):
        if _exists(path):
            return path
    return None


def real(path: Path) -> Path:
    """The file itself, symbolic links followed. Files that a config names lie beside it.

    Raises:
        ConfigError: it went away, or is a link to nothing or to itself.
    """
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: a loop, before Python 3.13
        raise ConfigError(str(path), "a link that leads nowhere") from None


def read(path: Path) -> bytes:
    """The bytes of a config file.

    A file or a directory that anybody may write is refused: whoever writes the config
    decides where credentials are sent.

    Raises:
        ConfigError: it is not a regular file, too large, unreadable or writable by all.
    """
    source = str(path)
    file = real(path)
    try:
        # Not blocking: the open of a named pipe would wait for a writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(source, _why(error)) from None
    try:
        about = os.fstat(descriptor)
        if stat.S_ISDIR(about.st_mode):
            raise ConfigError(source, "a directory, not a file")
        if not stat.S_ISREG(about.st_mode):
            raise ConfigError(source, "not a regular file")
        if about.st_mode & stat.S_IWOTH:
            raise ConfigError(source, "anybody may write it: chmod o-w")
        _refuse_open_directory(source, file.parent)
        _refuse_open_directory(source, path.parent)
        return _all(descriptor, source)
    except OSError as error:
        raise ConfigError(source, _why(error)) from None
    finally:
        os.close(descriptor)


def _below_home(env: Mapping[str, str]) -> str:
    home = env.get("HOME", "")
    if not home:
        import pwd

        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            return ""
    return os.path.join(home, ".config")


def _exists(path: Path) -> bool:
    """A link to nothing exists: the operator made it, and silence would pass it over."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        why = _why(error) if isinstance(error, OSError) else "not a path"
        raise ConfigError(str(path), why) from None
    return True


def _refuse_open_directory(source: str, directory: Path) -> None:
    mode = directory.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ConfigError(source, f"anybody may write its directory: chmod o-w {directory}")


def _all(descriptor: int, source: str) -> bytes:
    pieces = []
    left = SIZE_MAX + 1
    while left and (piece := os.read(descriptor, left)):
        pieces.append(piece)
        left -= len(piece)
    if not left:
        raise ConfigError(source, f"larger than {SIZE_MAX} bytes")
    return b"".join(pieces)


def _why(error: OSError) -> str:
    return (error.strerror or "cannot be read").lower()
