"""`agent-box --help`: every verb of the table, grouped, within 80 columns."""

from __future__ import annotations

from agent_box.cli.verbs import VERBS, Verb

ABOUT = "Runs coding agents in persistent Linux microVMs, every credential on the host."
FOOT = """\
* not built yet: exits 70.
`agent-box VERB --help` tells a verb's arguments. Every verb takes --json.
Exit codes, the config file and the rest: docs/cli.md.
"""


def overview(group: str | None = None) -> str:
    """The verbs of all groups, or of one such as ``policy``."""
    shown = [v for v in VERBS if group is None or v.name.startswith(group + " ")]
    lines = [f"Usage: agent-box {group or 'VERB'} ...", ""]
    if group is None:
        lines += [
            "Runs coding agents in persistent Linux microVMs, with every credential",
            "held on the host.",
            "",
        ]
    for section in dict.fromkeys(v.section for v in shown):
        lines.append(f"{section}:")
        lines += [_line(v) for v in shown if v.section == section]
        lines.append("")
    return "\n".join(lines) + FOOT


def _line(verb: Verb) -> str:
    return f"  {verb.name:<16}  {verb.summary}{'' if verb.body else ' *'}".rstrip()
