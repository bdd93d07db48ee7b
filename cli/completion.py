"""Completion in bash, zsh and fish: from the table of verbs, and live names from services.

A script asks `agent-box --complete WORD...`, the words of the line up to the cursor, and gets
one candidate per line, with a tab and a description where there is one. A first line
``:files`` means that the shell's own completion of file names applies. Nothing is started
for it: without a daemon there are no names, and there is never an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from agent_box.cli import values
from agent_box.cli.render import Render
from agent_box.cli.verbs import BY_NAME, GROUPS, VERBS, Arg, Verb

if TYPE_CHECKING:
    from agent_box.config.model import Config

FILES: Final = ":files"
_ASK_S: Final = 0.5  # a shell waits for this

_BASH: Final = """\
_agent_box() {
  local IFS=$'\\n'
  mapfile -t COMPREPLY < <("$1" --complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
  COMPREPLY=("${COMPREPLY[@]%%$'\\t'*}")
  if [[ ${COMPREPLY[0]-} == :files ]]; then
    COMPREPLY=()
    compopt -o default
  fi
}
complete -F _agent_box agent-box
"""
_ZSH: Final = """\
#compdef agent-box
_agent_box() {
  local -a lines described
  local line
  lines=("${(@f)$("${words[1]}" --complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  if [[ ${lines[1]} == :files ]]; then
    _files
    return
  fi
  for line in $lines; do
    described+=("${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}")
  done
  _describe 'agent-box' described
}
if [[ ${funcstack[1]-} == _agent_box ]]; then
  _agent_box "$@"
else
  compdef _agent_box agent-box
fi
"""
_FISH: Final = """\
function __agent_box_complete
  set -l words (commandline -opc) (commandline -ct)
  set -l lines (command $words[1] --complete $words[2..-1] 2>/dev/null)
  if test "$lines[1]" = :files
    __fish_complete_path (commandline -ct)
  else
    printf '%s\\n' $lines
  end
end
complete -c agent-box -f -a '(__agent_box_complete)'
"""
_SCRIPTS: Final = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def script(out: Render, *, shell: str) -> None:
    text = _SCRIPTS[shell]
    out.result({"shell": shell, "script": text}, text.removesuffix("\n"))


def candidates(words: Sequence[str]) -> list[str]:
    """The lines that complete the last of `words`, which may be empty."""
    *before, begun = words or [""]
    found = _find(before)
    if found is None:
        return _verbs(before, begun)
    verb, rest = found
    return _matching(begun, _argument(verb, rest, begun))


def _find(words: Sequence[str]) -> tuple[Verb, Sequence[str]] | None:
    for length in (1, 2):
        verb = BY_NAME.get(" ".join(words[:length])) if len(words) >= length else None
        if verb is not None:
            return verb, words[length:]
    return None


def _verbs(before: Sequence[str], begun: str) -> list[str]:
    if not before:
        lone = [f"{v.name}\t{v.summary}" for v in VERBS if " " not in v.name]
        groups = [f"{g}\t{_of_group(g)}" for g in sorted(GROUPS)]
        return _matching(begun, sorted([*lone, *groups, "--help", "--version"]))
    if len(before) == 1 and before[0] in GROUPS:
        of = [v for v in VERBS if v.name.startswith(before[0] + " ")]
        return _matching(begun, [f"{v.name.partition(' ')[2]}\t{v.summary}" for v in of])
    return []


def _of_group(group: str) -> str:
    return ", ".join(v.name.partition(" ")[2] for v in VERBS if v.name.startswith(group + " "))


def _argument(verb: Verb, rest: Sequence[str], begun: str) -> Iterable[str]:
    """What may stand next, after `rest` of the verb's words."""
    if "--" in rest:
        return []
    options = {a.flag: a for a in verb.args if a.flag}
    taken, expects = 0, None
    for word in rest:
        if expects is not None:
            expects = None
        elif word in options:
            expects = options[word] if options[word].parse is not None else None
        elif not word.startswith("-"):
            taken += 1
    if expects is not None:
        return _values(expects)
    if begun.startswith("-"):
        flags = [f"{a.flag}\t{a.help}" for a in options.values() if a.many or a.flag not in rest]
        return [*flags, "--json\tprint JSON on stdout", "--help\ttell the arguments"]
    positionals = [a for a in verb.args if not a.flag]
    if taken < len(positionals):
        return _values(positionals[taken])
    return _values(positionals[-1]) if positionals and positionals[-1].many else []


def _values(arg: Arg) -> Iterable[str]:
    if isinstance(arg.parse, values.OneOf):
        return arg.parse.words
    if arg.complete == "files":
        return [FILES]
    ask = _NAMES.get(arg.complete)
    if ask is None:
        return []
    try:
        return ask()
    except Exception:  # noqa: BLE001 - a shell in the middle of a line: no names, no noise
        return []


def _matching(begun: str, lines: Iterable[str]) -> list[str]:
    return [line for line in lines if line == FILES or line.startswith(begun)]


# ------------------------------------------------------------------- live names


def _instances() -> list[str]:
    from agent_box.bus.schema import Empty

    rows = _ask("registry", "list", Empty())
    return [f"{row.name}\t{row.state}, {row.profile}" for row in rows.instances]


def _credentials() -> list[str]:
    from agent_box.bus.schema import Empty

    return [each.name for each in _ask("store", "list", Empty()).credentials]


def _profiles() -> list[str]:
    return sorted(_config().profiles)


def _policies() -> list[str]:
    return sorted(_config().policies)


_NAMES: Final[dict[str, Callable[[], list[str]]]] = {
    "instances": _instances,
    "credentials": _credentials,
    "profiles": _profiles,
    "policies": _policies,
}


def _ask(service: str, method: str, request: Any) -> Any:
    """One call to a service that runs already. Raises whatever stands against it."""
    from agent_box.cli import link

    here = link.place()
    if link.holder(here) is None:
        raise LookupError("no daemon")
    client = link.connect(here, service)
    try:
        return client.call(method, request, deadline_s=_ASK_S)
    finally:
        client.close()


def _config() -> Config:
    from agent_box.config import load, search

    return load.load(search.find(os.environ))
