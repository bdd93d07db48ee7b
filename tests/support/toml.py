"""Writes TOML, for tests that change a document and read it back."""

from __future__ import annotations

import json
from typing import Any


def dumps(document: dict[str, Any]) -> str:
    """Each key of the top level on a line, all below it inline."""
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in document.items())


def _key(key: str) -> str:
    return '"' + "".join(_escaped(char) for char in key) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    if char < " " or char == "\x7f":
        return f"\\u{ord(char):04x}"
    return char


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return _key(value)
    return json.dumps(value)
