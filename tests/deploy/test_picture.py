"""A recording of a real terminal, and the picture that is drawn of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from support.source import ROOT

WORDS = "printf 'first\\033[32m\\303\\244\\033[m\\n'; printf '%0125d\\n' 7; exit 3"


def test_what_a_command_says_is_recorded_and_drawn(tmp_path: Path) -> None:
    cast, picture = tmp_path / "a.cast", tmp_path / "a.svg"
    record = [sys.executable, ROOT / "deploy/record.py", cast, "a <title>", "sh", "-c", WORDS]
    done = subprocess.run(record, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (3, b"")
    head, *said = map(json.loads, cast.read_text().splitlines())
    assert (head["version"], head["width"], head["title"]) == (2, 120, "a <title>")
    assert "".join(text for _, kind, text in said if kind == "o").encode() == done.stdout
    assert "first\x1b[32mä" in done.stdout.decode()

    subprocess.run([sys.executable, ROOT / "deploy/picture.py", cast, picture], check=True)
    drawn = ElementTree.parse(picture).getroot()
    texts = ["".join(each.itertext()) for each in drawn.iter() if each.tag.endswith("}text")]
    rows = [text.replace("\xa0", " ") for text in texts if text.strip()]
    assert rows == [
        "a <title>",
        "first",
        "ä",
        "0" * 120,
        "00007",
    ]  # it wraps where the terminal did
    assert "http" not in picture.read_text().replace("http://www.w3.org/2000/svg", "")
