"""The config as it is now on disk: searched by `search`, read by `parse`, its files seen to."""

from __future__ import annotations

import os
from pathlib import Path

from agent_box.config import search
from agent_box.config.errors import ConfigError
from agent_box.config.model import Binding, Config
from agent_box.config.parse import builtin, parse


def load(path: Path | None) -> Config:
    """The config of a file, or the built-in defaults for None.

    Args:
        path: what `search.find` gave, or what the daemon was started with.

    Raises:
        ConfigError: one line that names the file and the key.
    """
    if path is None:
        return builtin()
    config = parse(search.read(path), str(path))
    for binding in config.bindings.values():
        ca_path(binding, path)
    return config


def ca_path(binding: Binding, config: Path) -> Path | None:
    """The file of a binding's `ca_file`, links followed; None when it has none.

    Args:
        config: path of the config file. The CA file lies in the directory of the real file.

    Raises:
        ConfigError: it is missing, no regular file, unreadable, or outside that directory.
    """
    if binding.ca_file is None:
        return None
    directory = search.real(config).parent
    what = f"ca_file in [bindings.{binding.name}]:"  # of that table no value is repeated
    try:
        file = (directory / binding.ca_file).resolve(strict=True)
    except (OSError, RuntimeError):
        raise ConfigError(str(config), f"{what} there is no such file in {directory}") from None
    if not file.is_relative_to(directory):
        raise ConfigError(str(config), f"{what} it leads out of {directory}")
    if not file.is_file() or not os.access(file, os.R_OK):
        raise ConfigError(str(config), f"{what} it cannot be read")
    return file
