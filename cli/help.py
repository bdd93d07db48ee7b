"""Help, within 80 columns, from the table of verbs: all of them, one group, one verb."""

from __future__ import annotations

from typing import Final

from agent_box.cli.verbs import VERBS, Arg, Verb

WIDTH: Final = 80
_ABOUT: Final = "Runs coding agents in persistent Linux microVMs, every credential on the host."
_STAR: Final = "* not built yet: exits 70.\n"
_FOOT: Final = """\
`agent-box VERB --help` tells a verb's arguments. Every verb takes --json.
`agent-box --version` prints version and commit. The rest: docs/cli.md.
"""
_JSON: Final = Arg("json", "--json", "", None, "print JSON on stdout")


def overview(group: str | None = None) -> str:
    """The verbs of all groups, or of one such as ``policy``."""
    shown = [v for v in VERBS if group is None or v.name.startswith(group + " ")]
    lines = [f"Usage: agent-box {group + ' ' if group else ''}VERB ...", ""]
    if group is None:
        lines += [_ABOUT, ""]
    for section in dict.fromkeys(v.section for v in shown):
        lines.append(f"{section}:")
        for verb in shown:
            if verb.section == section:
                lines.append(f"  {verb.name:<15}  {verb.summary}{'' if verb.body else ' *'}")
        lines.append("")
    star = _STAR if any(not verb.body for verb in shown) else ""
    return "\n".join(lines) + star + _FOOT


def verb(verb: Verb) -> str:
    """One verb: usage, what it does, its arguments."""
    lines = [*_wrapped(f"Usage: agent-box {verb.name}", synopsis(verb)), "", verb.summary]
    if verb.detail:
        lines += ["", *_paragraph(verb.detail)]
    if not verb.body:
        lines += ["", f"Not built yet: it exits 70 and names what is missing ({verb.entry})."]
    for title, args in (
        ("Arguments", [a for a in verb.args if not a.flag]),
        ("Options", [*(a for a in verb.args if a.flag), _JSON]),
    ):
        if args:
            lines += ["", f"{title}:", *_rows(args)]
    return "\n".join(lines) + "\n"


def synopsis(verb: Verb) -> list[str]:
    """The arguments as the usage line writes them, e.g. ``NAME``, ``[--cpus N]``."""
    words = [_usage(arg) for arg in verb.args]
    end = len(words) - sum(word.startswith("-- ") for word in words)
    return [*words[:end], "[--json]", *words[end:]]


def _usage(arg: Arg) -> str:
    if not arg.flag:
        word = arg.metavar + ("..." if arg.many else "")
        if arg.dest == "command":
            word = f"-- {word}"
    else:
        word = f"{arg.flag} {arg.metavar}".strip()
    if arg.required:
        return word
    return f"[{word}]" + ("..." if arg.flag and arg.many else "")


def _wrapped(head: str, words: list[str]) -> list[str]:
    indent = " " * min(len(head) + 1, 24)
    lines = [head]
    for word in words:
        if len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append(indent + word)
        else:
            lines[-1] += " " + word
    return lines


def _paragraph(text: str, width: int = WIDTH) -> list[str]:
    from textwrap import wrap

    return wrap(text, width, break_on_hyphens=False)


def _rows(args: list[Arg]) -> list[str]:
    left = [f"{a.flag} {a.metavar}".strip() for a in args]
    column = min(max(map(len, left)), 28) + 4
    lines = []
    for name, arg in zip(left, args, strict=True):
        text = arg.help if arg.default is None else f"{arg.help}; else {arg.default}"
        first, *more = _paragraph(text, WIDTH - column)
        if len(name) + 4 > column:
            lines += [f"  {name}", " " * column + first]
        else:
            lines.append(f"  {name:<{column - 2}}{first}")
        lines += [" " * column + line for line in more]
    return lines
