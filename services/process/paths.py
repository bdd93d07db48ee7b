"""Where everything lies: two directories, and fixed names below them.

The runtime directory holds sockets and what is made anew at each start; the state directory
holds what must outlast a reboot. Both are private to one account. The names are the same
inside a service's mount namespace and outside it, so a path in a log means one thing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SERVICES: Final = ("registry", "store", "broker", "netstack", "channel", "engine")
SUPERVISOR: Final = "supervisor"  # it serves nothing; what it may say, policy.toml names
OPERATOR: Final = "operator"
ROLES: Final = (*SERVICES, SUPERVISOR, OPERATOR)
HELPER: Final = "helper"  # runs beside the services, on no bus and behind no wall
PROGRAMS: Final = (*SERVICES, HELPER)

NAME: Final = "agent-box"
RUNTIME_LOCK: Final = "daemon.lock"  # in the runtime directory, beside `Paths.lock`
SOCKET_PATH_MAX: Final = 107  # bytes; sockaddr_un.sun_path less its terminating NUL (unix(7))
_LONGEST_SOCKET: Final = "bus/registry/events"
_LONGEST_OF_INSTANCE: Final = f"vm/broker/{'0' * 32}/sock"  # or vm/shim/ID/vsock


class PathsError(Exception):
    """The runtime or state directory cannot be used. One line that names it; exit code 2."""

    exit: Final = 2

    @property
    def kind(self) -> str:
        """For a program: the gap of `doctor` where it is one, else that a directory is bad."""
        if str(self).startswith("XDG_RUNTIME_DIR"):
            return "runtime-dir-missing"
        return "directory-unusable"


@dataclass(frozen=True)
class Paths:
    """The two roots, and every name below them. Making one touches nothing.

    Args:
        runtime: absolute; usually ``$XDG_RUNTIME_DIR/agent-box``.
        state: absolute; usually ``~/.local/state/agent-box``.
    """

    runtime: Path
    state: Path

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Paths:
        """The paths that an environment names (XDG Base Directory Specification 0.8).

        Nothing is created. There is no fallback to /tmp: another account could own it first.

        Raises:
            PathsError: XDG_RUNTIME_DIR is unset, relative, missing, not a directory, not ours
                or open to others; the state directory is relative or not ours; a socket's
                path would not fit in `SOCKET_PATH_MAX` bytes.
        """
        untrusted_runtime = env.get("XDG_RUNTIME_DIR", "")
        if not untrusted_runtime:
            raise PathsError("XDG_RUNTIME_DIR is not set: log in through a session that sets it")
        _refuse_unless_private("XDG_RUNTIME_DIR", untrusted_runtime)
        untrusted_state = env.get("XDG_STATE_HOME", "")
        if not untrusted_state:
            home = env.get("HOME", "")
            if not home:
                raise PathsError("neither XDG_STATE_HOME nor HOME is set")
            if not os.path.isabs(home):
                raise PathsError(f"HOME is not an absolute path: {home}")
            untrusted_state = f"{home}/.local/state"
        elif not os.path.isabs(untrusted_state):
            raise PathsError(f"XDG_STATE_HOME is not an absolute path: {untrusted_state}")
        return cls.checked(Path(untrusted_runtime) / NAME, Path(untrusted_state) / NAME)

    @classmethod
    def checked(cls, runtime: Path, state: Path) -> Paths:
        """Paths below two given directories, normalised without following symbolic links.

        Raises:
            PathsError: one is relative, has characters that a path of ours must not have, or
                is too long for a socket.
        """
        for path in (runtime, state):
            if not path.is_absolute():
                raise PathsError(f"not an absolute path: {path}")
            if not str(path).isprintable():
                raise PathsError(f"control characters in the path {str(path)!r}")
        runtime, state = Path(os.path.normpath(runtime)), Path(os.path.normpath(state))
        _refuse_too_long(runtime, _LONGEST_SOCKET)
        return cls(runtime, state)

    def for_instances(self) -> Paths:
        """These, where the sockets of an instance fit, too.

        Raises:
            PathsError: they do not.
        """
        _refuse_too_long(self.runtime, _LONGEST_OF_INSTANCE)
        return self

    def bus(self, service: str) -> Path:
        """The directory of a service's sockets. Callers see it read-only."""
        return self.runtime / "bus" / service

    def sock(self, service: str) -> Path:
        return self.bus(service) / "sock"

    def doorbell(self, service: str) -> Path:
        return self.bus(service) / "events"

    @property
    def supervisor(self) -> Path:
        """supervisord's socket and configuration, and the filters. No service sees it."""
        return self.runtime / "supervisor"

    @property
    def notices(self) -> Path:
        """What the supervisor has to tell the registry and has not yet. No service sees it."""
        return self.state / "notices"

    @property
    def host_files(self) -> Path:
        """Copies of the host's resolver files, for services that use the host's network."""
        return self.runtime / "host"

    @property
    def helper_sock(self) -> Path:
        """Where the user-mode helper listens. Of the services only the engine sees it."""
        return self.runtime / HELPER / "sock"

    @property
    def helper_key(self) -> Path:
        """What the engine proves itself with to the helper, as 64 hexadecimal digits."""
        return self.keys("engine") / "helper.key"

    @property
    def lock(self) -> Path:
        return self.state / "daemon.lock"

    def keys(self, role: str) -> Path:
        """The directory of a role's secret key. Only that role sees it."""
        return self.state / "keys" / role

    @property
    def public_keys(self) -> Path:
        return self.state / "keys" / "public"

    def data(self, service: str) -> Path:
        """The only place where a service may keep anything."""
        return self.state / "services" / service

    def log(self, service: str) -> Path:
        return self.state / "logs" / f"{service}.log"

    @property
    def images(self) -> Path:
        """What virtual machines boot: blobs, manifests, and the keys that sign them."""
        return self.state / "images"

    def blob(self, digest: str) -> Path:
        """A file of an image, by its sha256 in lowercase hex."""
        return self.images / "blobs" / "sha256" / digest

    def make(self) -> None:
        """Creates the directories that every start needs, each 0700. Twice is as once.

        Raises:
            PathsError: one exists and is not a directory of ours that is closed to others, or
                cannot be made (a full or read-only disk); the line names it.
        """
        for directory in (
            self.runtime,
            self.runtime / "bus",
            self.supervisor,
            self.host_files,
            self.state,
            self.state / "keys",
            self.public_keys,
            self.state / "services",
            self.state / "logs",
            self.notices,
            *(self.bus(service) for service in SERVICES),
            *(self.data(service) for service in SERVICES),
            *(self.keys(role) for role in ROLES),
        ):
            make_private(directory)


def told(error: Exception) -> str:
    """An error of the system for a person: the path, once, and what is wrong with it, without
    a number. Of another error, its own words."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error) or type(error).__name__
    if error.filename is None:
        return error.strerror
    return f"{os.fsdecode(error.filename)}: {error.strerror}"


def make_private(directory: Path) -> None:
    """Creates one directory with mode 0700, parents too, or checks the one that is there.

    Raises:
        PathsError: it cannot be made, or is not ours, or is open to others.
    """
    try:
        directory.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        pass
    except OSError as error:
        raise PathsError(f"cannot make {directory}: {error.strerror}") from error
    _refuse_unless_private("the directory", str(directory))


def _refuse_too_long(runtime: Path, socket: str) -> None:
    longest = os.fsencode(runtime / socket)
    if len(longest) > SOCKET_PATH_MAX:
        raise PathsError(
            f"{runtime} is too long: a socket below it would need {len(longest)} bytes, "
            f"and {SOCKET_PATH_MAX} is the most"
        )


def _refuse_unless_private(what: str, untrusted_path: str) -> None:
    if not os.path.isabs(untrusted_path):
        raise PathsError(f"{what} is not an absolute path: {untrusted_path}")
    try:
        found = os.lstat(untrusted_path)
        if stat.S_ISLNK(found.st_mode) and what == "XDG_RUNTIME_DIR":
            found = os.stat(untrusted_path)  # some hosts link it; the target must be private
    except OSError as error:
        raise PathsError(f"{what} {untrusted_path}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise PathsError(f"{what} {untrusted_path} is not a directory")
    if found.st_uid != os.geteuid():
        raise PathsError(f"{what} {untrusted_path} belongs to another account")
    if stat.S_IMODE(found.st_mode) & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise PathsError(f"{what} {untrusted_path} is open to others (mode {mode:04o}, not 0700)")
    if not os.access(untrusted_path, os.W_OK | os.X_OK):
        raise PathsError(f"{what} {untrusted_path} is not writable")
