"""The verbs of credentials: a value goes in, and never comes out again.

`list` and `rm` load no crypto library. A value is read from stdin, sealed to the key of the
running store, and sent; it is in no argument, variable, file or message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from agent_box.cli import link
from agent_box.cli.render import Failure, Render, Usage, table, time_text

if TYPE_CHECKING:
    from agent_box.bus.client import Client
    from agent_box.bus.schema import Wire
    from agent_box.process.secret import Secret
    from agent_box.store.contract import Credentials, Protection, Sealed, SealKey
    from agent_box.store.custody import Custody

T = TypeVar("T")

_TRIES: Final = 5  # each fails only when the store was started again in between


# ----------------------------------------------------------------------------------- set


def set_secret(out: Render, *, name: str) -> None:
    """Stores one value, read from stdin."""
    from agent_box.cli import stdin
    from agent_box.store import rules
    from agent_box.store.contract import Put, Stored

    def value() -> Secret:
        return _checked(
            stdin.read(out, f"value of {name}", rules.VALUE_MAX), rules.value, f"{name}: "
        )

    # What is piped is judged before a daemon is started for it; a person at a terminal
    # hears that the store is locked before having typed anything.
    piped = None if stdin.is_terminal() else value()
    with link.service("store", out) as store:
        key = _seal_key(store)
        if key.locked:
            raise Failure(4, "store-locked", f"{name}: not stored, the store is locked; {_UNLOCK}")
        reply = _sealed(
            store, key, piped or value(), lambda sealed: ("put", Put(name=name, value=sealed))
        )
    assert isinstance(reply, Stored)
    out.result({"name": name, "version": reply.version}, f"{name} stored (version {reply.version})")


# ---------------------------------------------------------------------------------- list


def list_secrets(out: Render) -> None:
    """Every credential, its problem if it has one, and the bindings that use it."""
    used = _bindings()
    with link.service("store", out) as store:
        held = _list(store)
    if held.locked:
        out.warning(f"the store is locked; {_UNLOCK}")
    if held.problem is not None:
        out.warning(held.problem)
    rows: list[dict[str, Any]] = [
        {
            "name": each.name,
            "version": each.version,
            "updated": time_text(each.updated_ms),
            "bindings": used.get(each.name, []),
            "problem": each.problem,
        }
        for each in held.credentials
    ]
    result = {
        "protection": held.protection,
        "locked": held.locked,
        "problem": held.problem,
        "credentials": rows,
    }
    columns = ["NAME", "VERSION", "UPDATED", "BINDINGS"]
    cells = [[r["name"], r["version"], r["updated"], ", ".join(r["bindings"]) or "-"] for r in rows]
    if any(r["problem"] for r in rows):
        columns.append("PROBLEM")
        for cell, row in zip(cells, rows, strict=True):
            cell.append(row["problem"] or "-")
    out.result(result, table(columns, cells) if rows else "no credentials")


# ------------------------------------------------------------------------------------ rm


def rm(out: Render, *, name: str) -> None:
    """Removes one credential, and says who will miss it."""
    from agent_box.config.errors import ConfigError
    from agent_box.store.contract import Name

    try:
        bound = _bindings().get(name, [])
    except ConfigError as error:
        # A credential that has leaked must go, whatever else is wrong.
        bound = []
        out.warning(f"which bindings use {name} is not known: {error}")
    with link.service("store", out) as store:
        store.call("remove", Name(name=name))
    if bound:
        out.warning(f"{name} is used by {', '.join(bound)}, whose requests will be refused now")
    out.result({"name": name, "bindings": bound}, f"{name} removed")


# -------------------------------------------------------------------------------- unlock

_UNLOCK: Final = "`agent-box secret unlock` opens it"


def unlock(out: Render) -> None:
    """Opens a store that has no key of its own after a start."""
    from agent_box.store.contract import Unlock

    with link.service("store", out) as store:
        held = _list(store)
        if held.locked:
            key = _seal_key(store)
            secret = _unlocking(out, held)
            _sealed(store, key, secret, lambda sealed: ("unlock", Unlock(secret=sealed)))
    result = {"protection": held.protection, "locked": False}
    out.result(result, "the store is open" if held.locked else "the store was open already")


def _unlocking(out: Render, held: Credentials) -> Secret:
    from agent_box.cli import stdin
    from agent_box.store import rules

    if held.protection == "passphrase":
        phrase = stdin.read(out, "passphrase of the store", rules.PASSPHRASE_MAX)
        return _checked(phrase, rules.passphrase)
    from agent_box.store import keepers

    custody = _custody()
    try:
        return keepers.fetch(custody)
    except keepers.KeeperError as error:
        raise Failure(4, "store-locked", str(error)) from None


# ------------------------------------------------------------------------------- protect


def protect(out: Render, *, protection: Protection) -> None:
    """Changes how the master key is kept. The credentials themselves are not touched."""
    with link.service("store", out) as store:
        before = _list(store)
        if before.locked:
            raise Failure(4, "store-locked", f"nothing is changed, the store is locked; {_UNLOCK}")
        if protection == "passphrase":
            _protect(store, protection, _new_passphrase(out))
        elif protection == "key-file":
            _protect(store, protection, None)
        else:
            _protect_by_keeper(out, store, protection)
    text = f"the master key is kept by {protection} now"
    if protection == "passphrase":
        text += f"; after a restart the store is locked, and {_UNLOCK}"
    out.result({"protection": protection, "before": before.protection}, text)


def _new_passphrase(out: Render) -> Secret:
    from agent_box.cli import stdin
    from agent_box.store import rules

    phrase = stdin.read(out, "new passphrase of the store", rules.PASSPHRASE_MAX)
    phrase = _checked(phrase, rules.passphrase)
    if stdin.is_terminal() and stdin.read(out, "once more", rules.PASSPHRASE_MAX) != phrase:
        raise Usage("the two passphrases differ; nothing is changed")
    return phrase


def _protect_by_keeper(out: Render, store: Client, protection: Protection) -> None:
    """A new key, given to the keeper and read back before anything depends on it."""
    from agent_box.store import keepers, seal

    name, key, blob = seal.new_id().hex(), seal.new_key(), b""
    before = _custody()
    try:
        if protection == "keyring":
            keepers.keyring_put(name, key)
            kept = keepers.keyring_get(name)
        else:
            blob = keepers.creds_encrypt(key)
            kept = keepers.creds_decrypt(blob)
        if kept != key:
            raise keepers.KeeperError(f"{protection} gave back another key than it was given")
    except keepers.KeeperError as error:
        raise Failure(1, "protection-unavailable", str(error)) from None
    try:
        _protect(store, protection, key, name=name, blob=blob)
    finally:
        # Which of the two keys counts is for the custody file to say, even when the reply
        # was lost; the other one must not stay where it is.
        if _custody().key == name:
            stale = before.key if before.protection == "keyring" else None
        else:
            stale = name if protection == "keyring" else None
        if stale is not None:
            try:
                keepers.keyring_forget(stale)
            except keepers.KeeperError as error:
                out.warning(f"a key that opens nothing stays in the keyring: {error}")


def _protect(
    store: Client,
    protection: Protection,
    secret: Secret | None,
    *,
    name: str = "",
    blob: bytes = b"",
) -> None:
    from agent_box.store.contract import Protect

    def request(sealed: Sealed | None) -> tuple[str, Wire]:
        return "protect", Protect(protection=protection, key=name, secret=sealed, blob=blob)

    if secret is None:
        store.call(*request(None))
    else:
        _sealed(store, _seal_key(store), secret, request)


# --------------------------------------------------------------------------------- below


def _bindings() -> dict[str, list[str]]:
    """The bindings by the credential that they use. Raises ConfigError."""
    path = link.place().config
    if path is None:
        return {}
    from agent_box.config.load import load

    used: dict[str, list[str]] = {}
    for binding in load(path).bindings.values():
        used.setdefault(binding.credential, []).append(binding.name)
    return used


def _custody() -> Custody:
    """How the master key is kept, as the store's own file says. Raises Failure."""
    from agent_box.store.files import FileRefused, KeyDirectory

    try:
        custody = KeyDirectory(link.place().paths.keys("store")).custody()
    except FileRefused as error:
        raise Failure(1, "tampered", str(error)) from None
    if custody is None:
        raise Failure(1, "tampered", "the store has no custody file")
    return custody


def _list(store: Client) -> Credentials:
    from agent_box.bus.schema import Empty
    from agent_box.store.contract import Credentials

    held = store.call("list", Empty())
    assert isinstance(held, Credentials)
    return held


def _seal_key(store: Client) -> SealKey:
    from agent_box.bus.schema import Empty
    from agent_box.store.contract import SealKey

    key = store.call("seal_key", Empty())
    assert isinstance(key, SealKey)
    return key


def _sealed(
    store: Client,
    key: SealKey,
    secret: Secret,
    request: Callable[[Sealed], tuple[str, Wire]],
) -> Any:
    """Calls with `secret` sealed to the store; once more for each start of it in between.

    Raises:
        Refusal: what the store said.
    """
    from agent_box.bus.errors import Refusal
    from agent_box.store import seal
    from agent_box.store.contract import Sealed

    for left in reversed(range(_TRIES)):
        method, asked = request(Sealed(to=key.key, box=seal.box(secret, key.key)))
        try:
            return store.call(method, asked)
        except Refusal as refusal:
            if refusal.facts.get("seal") != "stale" or not left:
                raise
        key = _seal_key(store)
    raise AssertionError("the last try returns or raises")


def _checked(secret: Secret, rule: Callable[[bytes], bytes], where: str = "") -> Secret:
    try:
        rule(secret.reveal())
    except ValueError as error:
        raise Usage(f"{where}{error}") from None
    return secret
