"""What a config file can get wrong."""

from __future__ import annotations


class ConfigError(ValueError):
    """The config cannot be used. One printable line that names the file and the thing.

    The verb exits 2 (`errors.Reason.CONFIG_INVALID`); nothing of the file is in force.
    """

    def __init__(self, source: str, message: str) -> None:
        line = f"{source}: {message}" if source else message
        super().__init__("".join(c if c.isprintable() else "?" for c in line))
