"""Draws all that a recording of `deploy/record.py` shows as one picture (SVG), for a reader.

python3 deploy/picture.py CAST SVG
"""

from __future__ import annotations

import io
import json
import sys
from typing import Final

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

# rich's own template fetches a font from elsewhere; every viewer has one of its own.
FORMAT: Final = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; \
line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" \
clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def draw(cast: str) -> str:
    """The picture of a cast (asciinema, version 2). Lines wrap as they did in the terminal."""
    first, *rest = cast.splitlines()
    head = json.loads(first)
    said = "".join(text for _, kind, text in map(json.loads, rest) if kind == "o")
    console = Console(
        record=True, width=head["width"], file=io.StringIO(), force_terminal=True,
        color_system="standard", highlight=False,
    )  # fmt: skip
    text = Text.from_ansi(said.replace("\r\n", "\n").strip("\n"))
    for line in text.split("\n", allow_blank=True):
        for row in line.divide(range(console.width, len(line), console.width)):
            console.print(row, no_wrap=True)
    return console.export_svg(
        title=head["title"], theme=DIMMED_MONOKAI, code_format=FORMAT, unique_id="cast"
    )


def main(cast: str, picture: str) -> None:
    with open(cast, encoding="utf-8") as file:
        made = draw(file.read())
    with open(picture, "w", encoding="utf-8") as file:
        file.write(made)


if __name__ == "__main__":
    main(*sys.argv[1:])
