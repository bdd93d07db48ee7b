"""What a guest finds that lets its tools use bindings: environment and files, from the nonces.

Pure. A nonce stands where a key would stand, and the endpoint where the provider's address
would, so tools need not know about us. Where several bindings have one kind, the one that is
named like the kind, or else the first by name, gets the usual variables; each has its own
`AGENT_BOX_<BINDING>_URL` and `_KEY`.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from agent_box.broker.contract import Nonce
from agent_box.config import presets
from agent_box.config.model import HARNESSES

PRIVATE: Final = 0o600
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # of any guest
GIT_CONFIG: Final = ".config/agent-box/git"  # below the agent's home
_GIT_USER: Final = "agent-box"  # any will do: the nonce is the password

Environment = dict[str, str]


@dataclass(frozen=True)
class File:
    """A file for the guest.

    Attributes:
        path: absolute, below the agent's home.
        yields: the agent may make it its own: what it changed is left as it is.
    """

    path: str
    mode: int
    content: str
    yields: bool


@dataclass(frozen=True)
class Plan:
    environment: Environment
    files: list[File]


def plan(nonces: Sequence[Nonce], harness: str | None, home: str) -> Plan:
    """Everything for one boot.

    Args:
        nonces: of all bindings of the instance.
        harness: name of a preset; another, or None, adds nothing.
        home: the agent's home in the guest, absolute.
    """
    environment: Environment = {}
    files: list[File] = []
    for nonce in nonces:
        prefix = f"AGENT_BOX_{_variable(nonce.binding)}"
        environment |= {f"{prefix}_URL": nonce.endpoint, f"{prefix}_KEY": nonce.nonce}
    for kind, usual in _USUAL.items():
        first = _first(nonces, kind)
        if first is not None:
            environment |= usual(first)
    git = [nonce for nonce in nonces if nonce.kind == "git-basic"]
    if git:
        files.append(File(f"{home}/{GIT_CONFIG}", PRIVATE, "".join(map(_git, git)), yields=False))
        environment |= {
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "include.path",
            "GIT_CONFIG_VALUE_0": f"{home}/{GIT_CONFIG}",
        }
    if harness in HARNESSES:
        preset = presets.load(harness)
        chosen = _first(nonces, preset.binding)
        if chosen is not None:
            environment |= preset.settings(chosen.endpoint, chosen.nonce)
            if preset.path:
                environment["PATH"] = ":".join([*preset.path, f"{home}/.local/bin", PATH])
            files += [
                File(f"{home}/{file.path}", presets.MODE, file.content, yields=True)
                for file in preset.configuration(chosen.endpoint, chosen.nonce)
            ]
    return Plan(environment, files)


def _anthropic(nonce: Nonce) -> Environment:
    return {"ANTHROPIC_BASE_URL": nonce.endpoint, "ANTHROPIC_API_KEY": nonce.nonce}


def _openai(nonce: Nonce) -> Environment:
    # its SDKs append the path to a base that ends in /v1
    return {"OPENAI_BASE_URL": f"{nonce.endpoint}/v1", "OPENAI_API_KEY": nonce.nonce}


def _google(nonce: Nonce) -> Environment:
    return {
        "GOOGLE_GEMINI_BASE_URL": nonce.endpoint,
        "GEMINI_API_KEY": nonce.nonce,
        "GOOGLE_API_KEY": nonce.nonce,
    }


_USUAL: Final[dict[str, Callable[[Nonce], Environment]]] = {
    "anthropic": _anthropic,
    "openai": _openai,
    "google": _google,
}


def _first(nonces: Sequence[Nonce], kind: str) -> Nonce | None:
    alike = [nonce for nonce in nonces if nonce.kind == kind]
    named = [nonce for nonce in alike if nonce.binding == kind]
    return min(named or alike, key=lambda nonce: nonce.binding, default=None)


def _variable(binding: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", binding.upper())


def _git(nonce: Nonce) -> str:
    """A part of git's configuration: listed repositories are reached through the endpoint, by
    whatever address they are called, and the nonce goes to the endpoint alone.

    `insteadOf` compares beginnings, so a repository whose name begins with a listed one's is
    led here too, and refused.
    """
    pair = b64encode(f"{_GIT_USER}:{nonce.nonce}".encode()).decode()
    lines = [f'[http "{nonce.endpoint}/"]', f'\textraHeader = "Authorization: Basic {pair}"']
    host = nonce.upstream.partition("://")[2].partition(":")[0]
    for repo in nonce.repos:
        lines.append(f'[url "{nonce.endpoint}/{repo}"]')
        for base in (f"{nonce.upstream}/", f"git@{host}:", f"ssh://git@{host}/"):
            lines.append(f"\tinsteadOf = {base}{repo}")
    return "\n".join(lines) + "\n"
