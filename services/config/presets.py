"""Harness presets: what a profile's `harness = "codex"` means, from small TOML files.

A preset says how its image layer is made, which kind of binding it needs, what it finds in
its environment and files, and how it is started. The files come with the program; they are
checked all the same, so that a slip in one is a message and not a strange machine.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Any, Final

from agent_box.config.model import HARNESSES, KINDS

ENDPOINT: Final = "{{endpoint}}"
NONCE: Final = "{{nonce}}"
MODE: Final = 0o600
LAYERS: Final = ("npm", "none")
_PACKAGE: Final = "agent_box.config.harnesses"
_TEXTS: Final = ("description", "layer", "binding", "permission", "tested")
_OPTIONAL: Final = ("mode", "authenticate")


class PresetError(ValueError):
    """A preset's file cannot be used. One line that names the file and the key."""


@dataclass(frozen=True)
class File:
    """A file below the home of the agent.

    Attributes:
        path: relative to the home.
        content: with `ENDPOINT` where the URL of the binding belongs.
    """

    path: str
    content: str


@dataclass(frozen=True)
class Preset:
    """One harness.

    Attributes:
        layer: npm, its packages are a drive of their own; none, the variant brings it.
        binding: the kind of binding that it needs.
        command: speaks ACP on its standard input and output.
        tui: its own terminal program; empty when it has none.
        path: directories in the guest that come first in the agent's PATH.
        mode: to be set in each session (session/set_mode), so that it asks; None: it does.
        authenticate: the id of the method to choose before a session; None: none is needed.
        permission: how it asks for leave, for a person.
        tested: where it was tried, for a person.
    """

    name: str
    description: str
    layer: str
    binding: str
    command: tuple[str, ...]
    tui: tuple[str, ...]
    path: tuple[str, ...]
    mode: str | None
    authenticate: str | None
    permission: str
    tested: str
    environment: Mapping[str, str]
    files: tuple[File, ...]

    def settings(self, endpoint: str, nonce: str) -> dict[str, str]:
        """The environment variables of the harness.

        Args:
            endpoint: URL of the binding in the guest, without a slash at its end.
            nonce: the token that stands for the credential there.
        """
        return {name: _filled(text, endpoint, nonce) for name, text in self.environment.items()}

    def configuration(self, endpoint: str, nonce: str) -> list[File]:
        """Its configuration files, filled in."""
        return [File(f.path, _filled(f.content, endpoint, nonce)) for f in self.files]


def _filled(text: str, endpoint: str, nonce: str) -> str:
    return text.replace(ENDPOINT, endpoint).replace(NONCE, nonce)


def load(name: str) -> Preset:
    """A preset by its name, one of `HARNESSES`.

    Raises:
        LookupError: there is none of that name.
        PresetError: its file cannot be used.
    """
    if name not in HARNESSES:
        raise LookupError(f"no harness is named {name}; there are {', '.join(HARNESSES)}")
    return parse(name, (resources.files(_PACKAGE) / f"{name}.toml").read_text(encoding="utf-8"))


def parse(name: str, text: str) -> Preset:
    """A preset from the text of its file.

    Raises:
        PresetError
    """
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PresetError(f"{name}.toml: {error}") from None
    known = {*_TEXTS, *_OPTIONAL, "command", "tui", "path", "environment", "files"}
    _rule(name, not (unknown := sorted(table.keys() - known)), f"unknown: {', '.join(unknown)}")
    for key in _TEXTS:
        _rule(name, _text(table.get(key)), f"{key} must be a text")
    for key in _OPTIONAL:
        _rule(name, key not in table or _text(table[key]), f"{key} must be a text")
    command, tui, path = (table.get(key, []) for key in ("command", "tui", "path"))
    environment, files = table.get("environment", {}), table.get("files", [])
    _rule(name, _texts(command) and bool(command), "command must be an array of texts")
    _rule(name, _texts(tui), "tui must be an array of texts")
    _rule(
        name,
        _texts(path) and all(p.startswith("/") and ":" not in p for p in path),
        "path must be an array of absolute directories",
    )
    _rule(name, table["layer"] in LAYERS, f"layer must be one of {', '.join(LAYERS)}")
    _rule(name, table["binding"] in KINDS, f"binding must be one of {', '.join(KINDS)}")
    _rule(
        name,
        isinstance(environment, dict)
        and "PATH" not in environment
        and all(k.isidentifier() and k.isascii() and _text(v) for k, v in environment.items()),
        "environment must be a table of texts, and PATH is made from `path`",
    )
    _rule(name, isinstance(files, list) and all(map(_file, files)), "files: path and content")
    return Preset(
        name=name,
        description=table["description"],
        layer=table["layer"],
        binding=table["binding"],
        command=tuple(command),
        tui=tuple(tui),
        path=tuple(path),
        mode=table.get("mode"),
        authenticate=table.get("authenticate"),
        permission=table["permission"],
        tested=table["tested"],
        environment=MappingProxyType(environment),
        files=tuple(File(f["path"], f["content"].removeprefix("\n")) for f in files),
    )


def _rule(name: str, kept: bool, rule: str) -> None:
    if not kept:
        raise PresetError(f"{name}.toml: {rule}")


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _file(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"path", "content"}:
        return False
    path = value["path"]
    return (
        _text(path)
        and _text(value["content"])
        and not path.startswith("/")
        and posixpath.normpath(path) == path
        and path.split("/")[0] != ".."
    )


@dataclass(frozen=True)
class Lock:
    """Which packages make a layer: the texts that npm reads, and what they come to.

    Attributes:
        package: of package.json.
        lock: of package-lock.json; every package in it has its integrity, and none says from
            where it is to be fetched: npm's own configuration does.
    """

    package: str
    lock: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.lock.encode()).hexdigest()


def lock(preset: Preset) -> Lock:
    """The packages of a preset whose layer npm makes.

    Raises:
        PresetError: there are none, or one of them is not pinned.
    """
    file = resources.files(_PACKAGE) / f"{preset.name}.lock.json"
    _rule(preset.name, preset.layer == "npm", "it has no layer")
    text = file.read_text(encoding="utf-8")
    packages = json.loads(text)["packages"]
    top = packages[""]
    for path, each in packages.items():
        pinned = str(each.get("integrity", "")).startswith("sha512-") and "resolved" not in each
        _rule(f"{preset.name}.lock", path == "" or pinned, f"{path} is not pinned")
    wanted = {k: top[k] for k in ("name", "version", "dependencies")}
    return Lock(json.dumps({**wanted, "private": True}), text)
