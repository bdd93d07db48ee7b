"""git over smart HTTP: which paths there are, and what a push asks for.

A push is judged by its command list, which comes before the pack: each command names one
ref. Only the list is held back, never the pack. Every byte of the list is read by a grammar
without leeway; what git itself would not send is refused, so nothing can hide in it. Sources:
git's documentation, gitprotocol-http, gitprotocol-pack (reference update request),
gitprotocol-common (pkt-line) and git-check-ref-format; the git-lfs batch API.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from agent_box.broker.refusal import Reason, Refuse
from agent_box.broker.routes import Target
from agent_box.config.model import Repo

COMMANDS_MAX: Final = 1 << 20  # bytes of a command list
REFS_MAX: Final = 1000  # commands in it
PACK_MAX: Final = 2 << 30  # bytes of a push's body, list and pack together
NAMESPACE: Final = "refs/heads/agent-box"
LFS_SEGMENTS: Final = (".agent-box", "lfs")  # of our own endpoint, where no repository can lie


class Service(StrEnum):
    REFS = "info/refs"
    UPLOAD_PACK = "git-upload-pack"  # clone and fetch
    RECEIVE_PACK = "git-receive-pack"  # push
    LFS_BATCH = "info/lfs/objects/batch"
    LFS_OBJECT = "lfs-object"  # a link that our endpoint gave out in a batch's reply


@dataclass(frozen=True)
class Access:
    """What a request wants of which repository. `push`: it belongs to a push."""

    service: Service
    repo: Repo | None  # None for an LFS object, whose link says it
    push: bool
    token: str | None  # of an LFS object


_ENDS: Final = {
    ("info", "refs"): Service.REFS,
    ("git-upload-pack",): Service.UPLOAD_PACK,
    ("git-receive-pack",): Service.RECEIVE_PACK,
    ("info", "lfs", "objects", "batch"): Service.LFS_BATCH,
}
_METHOD: Final = {
    Service.REFS: "GET",
    Service.UPLOAD_PACK: "POST",
    Service.RECEIVE_PACK: "POST",
    Service.LFS_BATCH: "POST",
}


def access(repos: Sequence[Repo], method: str, target: Target) -> Access | Refuse:
    """What the request is about, if it is about a listed repository at all.

    A repository's name is compared exactly, with or without `.git` after it.
    """
    if target.segments[:2] == LFS_SEGMENTS and len(target.segments) == 3:
        if method not in ("GET", "PUT", "POST"):
            return Refuse(Reason.METHOD, 405, "an LFS object is fetched, put or verified")
        return Access(Service.LFS_OBJECT, None, method != "GET", target.segments[2])
    for end, service in _ENDS.items():
        if target.segments[-len(end) :] == end and len(target.segments) > len(end):
            name = "/".join(target.segments[: -len(end)])
            return _access(repos, method, target, service, name.removesuffix(".git"))
    return Refuse(Reason.PATH_UNKNOWN, 404, "no path of git's smart HTTP")


def _access(
    repos: Sequence[Repo], method: str, target: Target, service: Service, name: str
) -> Access | Refuse:
    repo = next((each for each in repos if each.name == name), None)
    if repo is None:
        return Refuse(Reason.REPO, 404, "the binding does not list this repository")
    if method != _METHOD[service]:
        return Refuse(Reason.METHOD, 405, "not the method of this path")
    push = service is Service.RECEIVE_PACK
    if service is Service.REFS:
        if target.query not in (b"service=git-upload-pack", b"service=git-receive-pack"):
            return Refuse(Reason.PATH_UNKNOWN, 404, "only smart HTTP is spoken: no such service")
        push = target.query == b"service=git-receive-pack"
    elif target.query is not None:
        return Refuse(Reason.PATH_UNKNOWN, 404, "this path takes no query")
    if push and not repo.push:
        return Refuse(Reason.PUSH_OFF, 403, "the binding has no push = true for this repository")
    return Access(service, repo, push, None)


# --------------------------------------------------------------- what a push asks for


@dataclass(frozen=True)
class Command:
    """One ref to update. `delete`: the new object id is all zeros."""

    ref: bytes
    delete: bool


@dataclass(frozen=True)
class Commands:
    """A whole command list, in order. An empty one pushes nothing: git asks so at first."""

    refs: tuple[Command, ...]


_LENGTH: Final = re.compile(rb"[0-9a-fA-F]{4}")
_OID: Final = rb"(?:[0-9a-f]{40}|[0-9a-f]{64})"
_COMMAND: Final = re.compile(rb"(" + _OID + rb") (" + _OID + rb") ([^\x00\n]+)")
_SHALLOW: Final = re.compile(rb"shallow " + _OID)
# Each that leaves the list's format as it is. push-options are not among them: some servers
# merge into other branches when an option asks for it; nor are signed pushes.
_CAPABILITIES: Final = re.compile(
    rb"report-status|report-status-v2|side-band-64k|quiet|atomic|ofs-delta|delete-refs|no-thin"
    rb"|agent=[!-~]{1,256}|session-id=[!-~]{1,256}|object-format=sha(?:1|256)"
)


def _unreadable(message: str) -> Refuse:
    return Refuse(Reason.PUSH_COMMANDS, 403, message)


class CommandReader:
    """Reads the command list of a git-receive-pack request, as its body arrives."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at = 0  # what lies before it has been read
        self._refs: list[Command] = []
        self._answer: Commands | Refuse | None = None

    def feed(self, untrusted: bytes) -> Commands | Refuse | None:
        """Takes the next bytes of the body; None while the list is not complete.

        After an answer it takes no more and gives the same again: what follows is the pack.
        """
        if self._answer is None:
            self._buffer += untrusted
            self._answer = self._read()
            if self._answer is not None:
                self._buffer.clear()
        return self._answer

    def finish(self) -> Commands | Refuse:
        """The body is over."""
        if self._answer is None:
            self._answer = _unreadable("the push ends within its command list")
        return self._answer

    def _read(self) -> Commands | Refuse | None:
        buffer = self._buffer
        while len(buffer) - self._at >= 4:
            size = bytes(buffer[self._at : self._at + 4])
            if not _LENGTH.fullmatch(size):
                return _unreadable("a pkt-line has no length")
            length = int(size, 16)
            if length == 0:
                return Commands(tuple(self._refs))
            if length <= 4:
                return _unreadable("a pkt-line of a kind that no push has")
            if self._at + length > COMMANDS_MAX:
                return _unreadable(f"the command list is longer than {COMMANDS_MAX} bytes")
            if len(buffer) - self._at < length:
                return None
            line = bytes(buffer[self._at + 4 : self._at + length])
            self._at += length
            refused = self._line(line)
            if refused is not None:
                return refused
        return None

    def _line(self, line: bytes) -> Refuse | None:
        if not self._refs and _SHALLOW.fullmatch(line.removesuffix(b"\n")):
            return None
        # the first command alone has capabilities, after a NUL
        text, nul, capabilities = line.partition(b"\x00")
        if nul and self._refs:
            return _unreadable("a later command of the push has capabilities")
        for each in capabilities.removesuffix(b"\n").split(b" "):
            if each and not _CAPABILITIES.fullmatch(each):
                return _unreadable("the push asks for a capability that is not passed on")
        found = _COMMAND.fullmatch(text if nul else text.removesuffix(b"\n"))
        if found is None or len(found[1]) != len(found[2]):
            return _unreadable("a command of the push is not OLD NEW REF")
        if len(self._refs) >= REFS_MAX:
            return _unreadable(f"the push has more than {REFS_MAX} commands")
        self._refs.append(Command(found[3], not found[2].strip(b"0")))
        return None


# git-check-ref-format(1). Stricter where that costs nobody anything.
_REF_NEVER: Final = re.compile(r"[\x00-\x20\x7f-\xa0~^:?*\[\\]|\.\.|//|@\{|/\.|\.lock(?:/|$)")


def allowed(commands: Commands, name: str) -> Refuse | None:
    """Whether each command of a push stays below `refs/heads/agent-box/<name>/`.

    Args:
        name: of the instance, which follows the rules of a DNS label.
    """
    prefix = f"{NAMESPACE}/{name}/"
    seen: set[bytes] = set()
    for command in commands.refs:
        try:
            ref = command.ref.decode()
        except UnicodeDecodeError:
            return Refuse(Reason.PUSH_REF, 403, "a ref of the push is not UTF-8")
        rest = ref.removeprefix(prefix)
        if rest == ref or not rest:
            return Refuse(Reason.PUSH_REF, 403, f"pushes go to {prefix}... and nowhere else")
        if _REF_NEVER.search(ref) or ref.endswith((".", "/")) or len(ref) > 1024:
            return Refuse(Reason.PUSH_REF, 403, "a ref of the push is no valid name")
        if command.ref in seen:
            return Refuse(Reason.PUSH_REF, 403, "the push names a ref twice")
        seen.add(command.ref)
    return None
