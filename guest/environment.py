"""The environment of what runs in the guest: built from nothing, never inherited."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agent_box.guest.disk import HOME

TYPE_CHECKING = False  # typing itself would cost a tenth of all that a guest imports
if TYPE_CHECKING:
    from typing import Final

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Of a shell itself, so nobody else's business after a hook.
_OF_A_SHELL: Final = frozenset(("_", "PWD", "OLDPWD", "SHLVL", "SHELL"))


def build(
    user: str,
    provisioned: Iterable[tuple[str, str]],
    hook: Mapping[str, str],
    asked: Iterable[tuple[str, str]],
    term: str | None,
) -> dict[str, str]:
    """What a program of that user sees; later ones win. What only the guest's /etc/passwd
    tells, the shell and root's home, is added when it starts.

    Args:
        provisioned: given by the host; the agent's alone, as is what the hook exported.
        asked: with the terminal or command.
        term: of a terminal; None for a command without one.
    """
    found = {"PATH": PATH, "USER": user, "LOGNAME": user, "LANG": "C.UTF-8"}
    if user == "agent":
        found["PATH"] = f"{HOME}/.local/bin:{PATH}"
        found["HOME"] = HOME
        found.update(provisioned)
        found.update(hook)
    if term is not None:
        found["TERM"] = term or "xterm-256color"
        found["COLORTERM"] = "truecolor"
    found.update(asked)
    return found


def exported(before: Mapping[str, str], untrusted_after: bytes) -> dict[str, str]:
    """What a shell exported on top of `before`, from what `env -0` says."""
    found = {}
    for item in untrusted_after.split(b"\0"):
        name, equals, value = item.decode(errors="surrogateescape").partition("=")
        if equals and name and name not in _OF_A_SHELL and before.get(name) != value:
            found[name] = value
    return found
