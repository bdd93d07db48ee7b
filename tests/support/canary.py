"""A value that is known again in every disguise, and a search for it everywhere."""

from __future__ import annotations

import base64
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, quote_plus

FILE_MAX = 64 << 20  # bytes; images and disks of others are larger, and nothing of ours here
PIECE = 12  # bytes of its beginning and of its end that are searched for by themselves


class Found(NamedTuple):
    where: str
    form: str


class Canary:
    """A secret value. One that nobody else has, and that looks different in each encoding.

    Args:
        value: made up when None: random, with characters that JSON, URLs and shells escape.
    """

    def __init__(self, value: bytes | None = None) -> None:
        if value is None:
            value = f'c{secrets.token_hex(8)}/+="\\ %<é>{secrets.token_hex(8)}'.encode()
        self.value = value
        self.forms = dict(_forms(value))

    def and_also(self, other: Canary) -> Canary:
        """Both at once, for one walk through all files."""
        both = Canary(self.value)
        both.forms |= {f"{name}, of the other": form for name, form in other.forms.items()}
        return both

    def within(self, data: bytes) -> list[str]:
        """The names of the forms in which it is in `data`."""
        # several forms of a plain value are the same bytes: each is looked for once
        held = {form: form in data for form in set(self.forms.values())}
        return [name for name, form in self.forms.items() if held[form]]

    @property
    def longest(self) -> int:
        """Bytes of the longest form."""
        return max(map(len, self.forms.values()))

    def in_files(
        self,
        roots: Iterable[Path],
        *,
        since_ns: int = 0,
        deep: bool = True,
        longest: int = FILE_MAX,
    ) -> list[Found]:
        """Looks into every file of ours below `roots`, by content and by name, but for huge ones.

        Args:
            since_ns: leaves out what was not written since then (Unix time).
            deep: whether to go into the directories of `roots`.
            longest: bytes of the largest file that is looked into.
        """
        found = []
        for path in _files(roots, since_ns, deep, longest):
            name = os.fsencode(path.name)
            found += [Found(str(path), f"{form}, in the name") for form in self.within(name)]
            try:
                if not stat.S_ISREG(path.stat().st_mode):
                    continue  # a pipe would never end
                content = path.read_bytes()
            except OSError:
                continue  # gone meanwhile
            found += [Found(str(path), form) for form in self.within(content)]
        return found

    def in_processes(self) -> list[Found]:
        """Looks at what every process shows of itself: arguments, environment, name."""
        found = []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
            for what in ("cmdline", "environ", "comm"):
                try:
                    content = Path(f"/proc/{pid}/{what}").read_bytes()
                except OSError:
                    continue  # gone, of somebody else, or closed even to us
                found += [Found(f"/proc/{pid}/{what}", form) for form in self.within(content)]
        return found


def _forms(value: bytes) -> Iterator[tuple[str, bytes]]:
    yield "plain", value
    yield "its beginning", value[:PIECE]
    yield "its end", value[-PIECE:]
    yield "hex", value.hex().encode()
    yield "HEX", value.hex().upper().encode()
    yield "hex, spaced", value.hex(" ").encode()
    for shift in range(3):
        # Whatever stands before it in the same base64 text, one of three alignments is its.
        # The characters at both ends that also depend on its neighbours are left out.
        encoded = base64.b64encode(bytes(shift) + value).rstrip(b"=")
        first = (8 * shift + 5) // 6
        last = 8 * (shift + len(value)) // 6
        yield f"base64 at {shift}", encoded[first:last]
        yield f"base64url at {shift}", encoded[first:last].translate(bytes.maketrans(b"+/", b"-_"))
    yield "percent", quote(value, safe="").encode()
    yield "percent, lower case", _lower(quote(value, safe=""))
    yield "form", quote_plus(value, safe="").encode()
    yield "percent, all", "".join(f"%{byte:02X}" for byte in value).encode()
    yield "percent, all, lower case", "".join(f"%{byte:02x}" for byte in value).encode()
    text = value.decode(errors="surrogateescape")
    yield "JSON", json.dumps(text)[1:-1].encode()
    if text.isprintable():
        yield "JSON, not ASCII", json.dumps(text, ensure_ascii=False)[1:-1].encode()
        yield "UTF-16", text.encode("utf-16-le")
    yield "JSON, all", "".join(f"\\u{ord(c):04x}" for c in text).encode()
    yield "repr", repr(value)[2:-1].encode()
    yield "repr of text", repr(text)[1:-1].encode(errors="backslashreplace")
    yield "backslash x", "".join(f"\\x{byte:02x}" for byte in value).encode()
    yield "list of numbers", ", ".join(map(str, value)).encode()


def _lower(quoted: str) -> bytes:
    parts = quoted.split("%")
    return "%".join([parts[0], *(part[:2].lower() + part[2:] for part in parts[1:])]).encode()


def _files(roots: Iterable[Path], since_ns: int, deep: bool, longest: int) -> Iterator[Path]:
    uid = os.geteuid()
    for root in roots:
        for directory, below, names in os.walk(root):
            if not deep:
                below.clear()
            for name in names:
                path = Path(directory) / name
                try:
                    facts = path.lstat()
                except OSError:
                    continue
                ours = facts.st_uid == uid and facts.st_size <= longest
                if ours and facts.st_mtime_ns >= since_ns:
                    yield path
