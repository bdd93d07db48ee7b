"""Command lines that leave no question, split without typer, whose import alone costs as much as
the rest of a verb.

Whatever is not plain gives None and is typer's, which refuses or understands it: a flag that the
verb does not have, a value in the same word, a word that is missing or too many. So no mistake
is told from here, and what is understood here typer understands in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_box.cli.verbs import Arg, Verb


def words(verb: Verb, rest: Sequence[str]) -> dict[str, Any] | None:
    """As `parser.words`; None where typer has to look."""
    flags = {arg.flag: arg for arg in verb.args if arg.flag}
    said: dict[str, Any] = {}
    loose: list[str] = []
    line = iter(rest)
    for word in line:
        if word == "--":
            loose += line
        elif not word or word[0] != "-":
            loose.append(word)
        elif word != "--json":
            arg = flags.get(word)
            value = None if arg is None else True if arg.parse is None else next(line, None)
            if arg is None or value is None or not _say(said, arg, value):
                return None
    for arg in verb.args:
        if not arg.flag and loose:
            said[arg.dest], loose = (loose, []) if arg.many else (loose[0], loose[1:])
    if loose or any(arg.required and arg.dest not in said for arg in verb.args):
        return None
    return {arg.dest: said.get(arg.dest, arg.default) for arg in verb.args}


def _say(said: dict[str, Any], arg: Arg, value: Any) -> bool:
    """Notes an option. False: it may mean something else."""
    if isinstance(value, str) and value.startswith("-"):
        return False
    if arg.many:
        said.setdefault(arg.dest, []).append(value)
        return True
    return said.setdefault(arg.dest, value) is value
