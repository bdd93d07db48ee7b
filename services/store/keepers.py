"""Those who keep a key for the operator: the OS keyring and systemd-creds.

Neither can be reached from behind the store's wall, which has no D-Bus and no network. So
`keysource` asks them just before the store starts, and `agent-box secret` when the operator
changes the protection. A key goes to them and comes back over their own sockets and pipes,
never in an argument, a variable or a file.

systemd-creds keeps credentials for a user (and not only for root) from systemd 256 on. That
way was tested here against a stand-in program only, because no such systemd was at hand.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, NoReturn

from agent_box.process.secret import Secret
from agent_box.store.custody import BLOB_MAX, Custody

KEYRING_SERVICE: Final = "agent-box credential store"
CREDENTIAL_NAME: Final = "agent-box-store"
SYSTEMD_NEEDED: Final = 256
ANSWER_S: Final = 60  # a desktop may first ask a person for the keyring's own password
KEY_BYTES: Final = 32


class KeeperError(Exception):
    """It does not keep, or give, a key. One line for a person that says what to do."""


def fetch(custody: Custody) -> Secret:
    """The key that a custody file of `keyring` or `systemd-creds` names.

    Raises:
        KeeperError: the keeper does not have it, or does not give it.
    """
    if custody.protection == "keyring":
        return keyring_get(custody.key)
    if custody.protection == "systemd-creds":
        return creds_decrypt(custody.blob)
    raise ValueError(f"{custody.protection} is kept by nobody outside the store")


# ---------------------------------------------------------------------------- OS keyring


def keyring_put(name: str, key: Secret) -> None:
    """Gives a key to the OS keyring under `name`. Raises KeeperError."""
    with _answering("the keyring") as backend:
        backend.set_password(KEYRING_SERVICE, name, key.reveal().hex())


def keyring_get(name: str) -> Secret:
    """The key that the OS keyring has under `name`. Raises KeeperError."""
    with _answering("the keyring") as backend:
        untrusted = backend.get_password(KEYRING_SERVICE, name)
    if untrusted is None:
        raise KeeperError("the keyring has no key of this store")
    if not re.fullmatch(rf"[0-9a-f]{{{2 * KEY_BYTES}}}", untrusted, re.ASCII):
        raise KeeperError("what the keyring has is not a key of this store")
    return Secret(bytes.fromhex(untrusted))


def keyring_forget(name: str) -> None:
    """Removes a key from the OS keyring. Raises KeeperError."""
    with _answering("the keyring") as backend:
        backend.delete_password(KEYRING_SERVICE, name)


@contextmanager
def _answering(who: str) -> Iterator[Any]:
    """The keyring, for calls that may fail in as many ways as there are desktops."""
    with _bounded(who):
        backend = _keyring()
        try:
            yield backend
        except KeeperError:
            raise
        except Exception as error:
            # Its own errors, D-Bus errors and more, of libraries that may not be here; the
            # message is left out, because nobody vouches for what is in it.
            kind = type(error).__name__
            raise KeeperError(f"{who} does not answer ({kind}): is it unlocked?") from error


def _keyring() -> Any:
    _find_session_bus()
    try:
        import keyring
    except ImportError:
        raise KeeperError(
            "the Python package `keyring` is not installed (pip install 'agent-box[keyring]')"
        ) from None
    backend = keyring.get_keyring()
    if backend.priority < 1:  # what the package itself does not recommend: plain files, nothing
        kind = f"{type(backend).__module__}.{type(backend).__name__}"
        raise KeeperError(f"no OS keyring answers in this session; there is only {kind}")
    return backend


def _find_session_bus() -> None:
    """Where systemd puts it, for the library that knows the variable alone: a daemon that was
    started by a timer or over ssh has none."""
    path = os.environ.get("XDG_RUNTIME_DIR", "") + "/bus"
    if (
        "DBUS_SESSION_BUS_ADDRESS" not in os.environ
        and re.fullmatch(r"/[0-9A-Za-z_/.-]+", path, re.ASCII)  # others an address would escape
        and os.path.exists(path)
    ):
        os.environ["DBUS_SESSION_BUS_ADDRESS"] = f"unix:path={path}"


@contextmanager
def _bounded(who: str) -> Iterator[None]:
    """Gives up after `ANSWER_S`. For the main thread of a program that does nothing else."""

    def late(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeeperError(f"{who} did not answer within {ANSWER_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(ANSWER_S)
    try:
        yield
    finally:
        signal.alarm(0)  # an alarm outlives an exec
        signal.signal(signal.SIGALRM, before)


# ------------------------------------------------------------------------- systemd-creds


def creds_encrypt(key: Secret) -> bytes:
    """What systemd-creds makes of a key, which only this user on this machine can open.

    Raises:
        KeeperError: it is missing, too old, or refuses.
    """
    blob = _creds("encrypt", key.reveal())
    if len(blob) > BLOB_MAX:
        raise KeeperError(f"systemd-creds made more than {BLOB_MAX} bytes of a key")
    return blob


def creds_decrypt(blob: bytes) -> Secret:
    """The key in what `creds_encrypt` gave. Raises KeeperError."""
    key = _creds("decrypt", blob)
    if len(key) != KEY_BYTES:
        raise KeeperError("what systemd-creds gave is not a key of this store")
    return Secret(key)


def _creds(verb: str, content: bytes) -> bytes:
    program = shutil.which("systemd-creds")
    if program is None:
        raise KeeperError(
            f"systemd-creds is not installed; it needs systemd {SYSTEMD_NEEDED} or later"
        )
    version = _systemd_version(program)
    if version < SYSTEMD_NEEDED:
        raise KeeperError(
            f"systemd-creds is of systemd {version} here, and keeps credentials of users only "
            f"from systemd {SYSTEMD_NEEDED} on"
        )
    done = _run([program, verb, "--user", f"--name={CREDENTIAL_NAME}", "-", "-"], content)
    if done.returncode != 0:
        raise KeeperError(f"systemd-creds {verb} failed: {_first_line(done.stderr)}")
    if not done.stdout:
        raise KeeperError(f"systemd-creds {verb} gave nothing")
    return done.stdout


def _systemd_version(program: str) -> int:
    untrusted = _run([program, "--version"], b"").stdout
    found = re.match(rb"systemd ([0-9]{1,6})\b", untrusted)
    if found is None:
        raise KeeperError("systemd-creds does not tell its version")
    return int(found[1])


def _run(command: list[str], content: bytes) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            command, input=content, capture_output=True, timeout=ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise KeeperError(f"systemd-creds did not answer within {ANSWER_S} s") from None
    except OSError as error:
        raise KeeperError(f"systemd-creds cannot be run: {error.strerror}") from None


def _first_line(untrusted: bytes) -> str:
    line = untrusted.decode(errors="replace").strip().partition("\n")[0][:200]
    return "".join(c if c.isprintable() else "?" for c in line) or "it does not say why"
