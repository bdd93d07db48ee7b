"""How a verb reaches a service.

The way: which directories, which config file, is a daemon there, does it use the same config
file, start one if there is none, then a connection to the service, and the service's own
word that it is ready. Whether a daemon is there is decided by its lock alone, never by a
file or socket that lies about.

Only what every verb needs is imported at the top.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agent_box.cli.render import Failure
from agent_box.process import lock
from agent_box.process.paths import OPERATOR, RUNTIME_LOCK, Paths

if TYPE_CHECKING:
    from agent_box.bus.base import Hello
    from agent_box.bus.client import Client
    from agent_box.cli.render import Render
    from agent_box.process.supervision import Control, Status

READY_S: Final = 20.0  # from the first try to the service's word that it is ready
SILENT_S: Final = 5.0  # what a service that started long ago may take for its first word
_HELLO_S: Final = 1.0  # for one try; then the lock and supervisord are looked at again
_SLOW_S: Final = 1.0  # what takes longer is told


class Place(NamedTuple):
    """What a command line is about: one operator's daemon."""

    paths: Paths
    config: Path | None


def place(env: Mapping[str, str] | None = None) -> Place:
    """The directories and the config file that this environment names. Touches nothing.

    Raises:
        Failure: run by root.
        PathsError: no runtime directory, or one that cannot be used.
        ConfigError: AGENT_BOX_CONFIG names a file that is missing.
    """
    env = os.environ if env is None else env
    refuse_root()
    from agent_box.config import search

    return Place(Paths.from_env(env).for_instances(), search.find(env))


def refuse_root() -> None:
    """Nothing that serves, or starts what serves, runs as uid 0.

    Raises:
        Failure: with what to do instead.
    """
    if os.geteuid() != 0:
        return
    import pwd

    name, uid = os.environ.get("SUDO_USER", ""), ""
    try:
        uid = str(pwd.getpwnam(name).pw_uid) if name and name != "root" else ""
    except KeyError:
        pass
    name, uid = (name, uid) if uid else ("NAME", "$(id -u NAME)")
    raise Failure(
        2,
        "root",
        "agent-box does not run as root; run it as an ordinary user, e.g. "
        f"runuser -u {name} -- env XDG_RUNTIME_DIR=/run/user/{uid} agent-box ... "
        f"(once before: loginctl enable-linger {name})",
    )


@contextmanager
def service(name: str, out: Render) -> Iterator[Client]:
    """A connection to a service that is ready; starts the daemon when there is none.

        with link.service("registry", out) as registry:
            reply = registry.call("list", Empty())

    Raises:
        Failure: exit 2; it did not get ready within `READY_S`, or has failed, or the daemon
            cannot be started or uses another config file, or another daemon has the runtime
            directory. Exit 14; the daemon runs, and the service does not answer.
        PathsError, ConfigError: as `place`.
    """
    client, _ = ready(place(), name, out)
    try:
        yield client
    finally:
        client.close()


def supervisor(out: Render) -> tuple[Place, Control]:
    """supervisord's control, once it answers; starts the daemon when there is none.

    Raises:
        Failure, PathsError, ConfigError: as `service`.
    """
    from agent_box.process.supervision import Control, ControlError

    here = place()
    deadline = time.monotonic() + READY_S
    control = Control(here.paths.supervisor)
    told = _Told(out)
    while True:
        holder = started(here, told, deadline)
        try:
            control.statuses()
            return here, control
        except ControlError as error:  # the lock is taken before supervisord is there
            if time.monotonic() > deadline:
                raise Failure(2, "daemon-failed", str(error)) from error
        _pause(holder.pid, 0.05)


def connect(here: Place, name: str) -> Client:
    """A connection to a service that may not even run. Starts nothing and waits for nothing.

    Raises:
        Failure: there are no keys yet.
    """
    from importlib import import_module

    from agent_box.bus import keys
    from agent_box.bus.client import Client

    paths = here.paths
    try:
        secret = keys.load_secret(paths.keys("operator"))
        server_key = keys.load_public(paths.public_keys, name)
    except keys.KeysError as error:
        raise Failure(2, "daemon-failed", f"keys: {error}") from error
    return Client(
        "operator",
        name,
        sock=paths.sock(name),
        secret=secret,
        server_key=server_key,
        contract=import_module(f"agent_box.{name}.contract").CONTRACT,
    )


def ask_hello(client: Client, seconds: float) -> Hello:
    """What a service says of itself.

    Raises:
        Refusal: it does not say anything in time.
    """
    from agent_box.bus.base import Hello
    from agent_box.bus.schema import Empty

    hello = client.call("hello", Empty(), deadline_s=seconds)
    assert isinstance(hello, Hello)
    return hello


class _Told:
    """Says once, when it takes long, what is waited for."""

    def __init__(self, out: Render) -> None:
        self._out = out
        self._did = False

    def once(self, text: str) -> None:
        if not self._did:
            self._did = True
            self._out.progress(text)


def started(here: Place, told: _Told, deadline: float) -> lock.Holder:
    """Makes sure that a daemon runs, with our config file, and says who it is.

    Raises:
        Failure: exit 2; it cannot be started, or uses another config file or runtime
            directory, or another has ours, or it did not say by `deadline` (of
            `time.monotonic`) how it went.
    """
    while True:
        holder = _holder(here.paths.lock)
        if holder is not None and holder.version is not None:
            _agree(here, holder)
            return holder
        if time.monotonic() > deadline:
            raise Failure(
                2,
                "daemon-failed",
                f"the daemon did not come up in time; see {here.paths.log('daemon')}",
            )
        # The lock beside is taken first: it tells of a daemon that is on its way.
        on_its_way = holder or _holder(here.paths.runtime / RUNTIME_LOCK)
        if on_its_way is None:
            _start(here, told, deadline)
            continue
        if holder is None and on_its_way.version is not None:
            _refuse_other_state(here, on_its_way)
        _pause(on_its_way.pid, 0.05)  # it will take the lock, or write its name, next


def holder(here: Place) -> lock.Holder | None:
    """Who the daemon is, or None. Starts nothing."""
    return _holder(here.paths.lock)


def _holder(path: Path) -> lock.Holder | None:
    try:
        return lock.holder(path)
    except OSError as error:
        where = "" if error.filename in (None, str(path)) else f"{error.filename}: "
        why = f"{where}{error.strerror or type(error).__name__}"
        raise Failure(2, "daemon-failed", f"cannot ask who holds {path}: {why}") from error


def _refuse_other_state(here: Place, beside: lock.Holder) -> None:
    """Two state directories cannot share one runtime directory: the services of the second
    daemon would take over the sockets of the first. Raises Failure."""
    if beside.state is not None and _same_file(beside.state, here.paths.state):
        return
    again = _holder(here.paths.lock)
    if again is not None and again.pid == beside.pid:
        return  # it is ours, and took its own lock between the two looks
    theirs = beside.state or "another one"
    raise Failure(
        2,
        "runtime-mismatch",
        f"the daemon with pid {beside.pid} serves in the runtime directory "
        f"{here.paths.runtime} with the state directory {theirs}, and this command means "
        f"{here.paths.state}; set XDG_STATE_HOME as it was set there, or another XDG_RUNTIME_DIR",
    )


def _agree(here: Place, holder: lock.Holder) -> None:
    """The config path is fixed when the daemon starts: a verb that means another must not
    get the answers of this one."""
    how = "`agent-box daemon --stop` ends it; the next verb starts one that agrees"
    if not _same_file(holder.config, here.config):
        theirs = "no config file" if holder.config is None else f"the config {holder.config}"
        ours = "no config file" if here.config is None else f"the config {here.config}"
        raise Failure(
            2,
            "config-mismatch",
            f"the running daemon (pid {holder.pid}) uses {theirs}, this command {ours}; {how}",
        )
    beside = _holder(here.paths.runtime / RUNTIME_LOCK)
    if beside is None or beside.pid != holder.pid:
        # Its own lock is taken last, so this is no daemon that is still on its way; but it
        # may have ended between the two looks.
        again = _holder(here.paths.lock)
        if again is not None and again.pid == holder.pid:
            raise Failure(
                2,
                "runtime-mismatch",
                f"the running daemon (pid {holder.pid}) uses another runtime directory than "
                f"{here.paths.runtime}; {how}",
            )


def _same_file(theirs: str | None, ours: Path | None) -> bool:
    if theirs is None or ours is None:
        return theirs is None and ours is None
    if theirs == str(ours):
        return True
    try:
        return os.path.samefile(theirs, ours)
    except OSError:
        return False  # theirs is gone


def _start(here: Place, told: _Told, deadline: float) -> None:
    """Starts the daemon in a session of its own and waits for its word.

    Another that was faster is as good. Raises Failure.
    """
    from agent_box.process import daemon

    reader, writer = os.pipe()
    try:
        child = os.posix_spawn(
            (words := daemon.command(here.config, background=True, report=3))[0],
            words,
            daemon.environment(os.environ),
            setsid=True,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, writer, 3),
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
        )
    finally:
        os.close(writer)
    os.waitpid(child, 0)  # it forks and leaves
    with open(reader, "rb", buffering=0) as pipe:
        begun = time.monotonic()
        answer = b""
        while True:  # to the pipe's end: what refused has ended then
            ready, _, _ = select.select([pipe], [], [], _SLOW_S)
            if ready:
                piece = pipe.read(4096)
                if not piece:
                    break
                answer += piece
            elif time.monotonic() > deadline:
                raise Failure(
                    2,
                    "daemon-failed",
                    f"the daemon did not start in {time.monotonic() - begun:.0f} s; see "
                    f"{here.paths.log('daemon')}",
                )
            else:
                told.once("starting agent-box ...")
    _judge(here, answer)


def _judge(here: Place, answer: bytes) -> None:
    import json

    if not answer:
        raise Failure(
            2, "daemon-failed", f"the daemon died at its start; see {here.paths.log('daemon')}"
        )
    report: dict[str, Any] = json.loads(answer)
    if report["ok"] or report["kind"] == "held":
        return  # held: by which daemon, and whether that will do, is for the locks to tell
    raise Failure(2, str(report["kind"]), str(report["message"]))


def ready(
    here: Place, name: str, out: Render, *, not_epoch: bytes | None = None
) -> tuple[Client, Hello]:
    """A connection to a service, once that says it is ready; and what it said.

    Args:
        not_epoch: of a process that is known to be gone or going; its word does not count.

    Raises:
        Failure, PathsError, ConfigError: as `service`.
    """
    from agent_box.bus.errors import Code, Refusal

    begun = time.monotonic()
    deadline = begun + READY_S
    told = _Told(out)
    client: Client | None = None
    problem: str | None = None  # None until the service says a word
    try:
        while True:
            holder = started(here, told, deadline)
            if client is None:
                if not _is_laid_out(here) and time.monotonic() < deadline:
                    _pause(holder.pid, 0.05)  # another verb has just started it
                    continue
                client = connect(here, name)
            try:
                left = max(0.05, deadline - time.monotonic())
                hello = ask_hello(client, min(_HELLO_S, left))
            except Refusal as refusal:
                if refusal.code not in (Code.UNAVAILABLE, Code.DEADLINE, Code.UNKNOWN_OUTCOME):
                    raise
            else:
                if hello.ready and hello.epoch != not_epoch:
                    found, client = client, None
                    return found, hello
                problem = hello.problem or "it is not ready"
            status = _status(here, name)
            now = time.monotonic()
            is_old = status is not None and (status.uptime_ms or 0) > READY_S * 1000
            if problem is None and now - begun > (SILENT_S if is_old else READY_S):
                raise Failure(
                    14,
                    "unavailable",
                    f"{name} does not answer; see agent-box service list, then "
                    f"agent-box service restart {name}",
                )
            if now > deadline:
                raise Failure(
                    2,
                    "service-not-ready",
                    f"{name} did not get ready in {READY_S:.0f} s: {problem}; see "
                    f"agent-box service logs {name}",
                )
            if now - begun > _SLOW_S:
                if problem is None:
                    why = ", which does not answer" if is_old else " to start"
                else:
                    why = f": {problem}"
                told.once(f"waiting for {name}{why}")
            _pause(holder.pid, 0.05)
    finally:
        if client is not None:
            client.close()


def _is_laid_out(here: Place) -> bool:
    """Whether the daemon has made all keys: the first ever start does, with the lock held."""
    return (here.paths.public_keys / OPERATOR).exists()


def _status(here: Place, name: str) -> Status | None:
    """What supervisord says of a service; None when it says nothing.

    Raises:
        Failure: it stays down until somebody looks, so it is not waited for.
    """
    from agent_box.process.supervision import Control, ControlError

    try:
        status = Control(here.paths.supervisor).statuses().get(name)
    except ControlError:
        return None  # it may be starting, or dying; the lock will tell
    if status is not None and status.state == "fatal":
        raise Failure(
            2,
            "service-failed",
            f"{name} has failed and stays down: {status.reason}; see agent-box service logs "
            f"{name}, then agent-box service restart {name}",
        )
    return status


def _pause(pid: int, seconds: float) -> None:
    """Waits, but not for one who is dead: returns at once when that process ends."""
    try:
        descriptor = os.pidfd_open(pid) if pid else -1
    except ProcessLookupError:
        return
    try:
        select.select([descriptor] if descriptor >= 0 else [], [], [], seconds)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
