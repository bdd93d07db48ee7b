"""`python -I -m agent_box.process.daemon`: takes the lock, lays everything out, supervises.

What `agent-box daemon` and the start on demand run. It ends with 0 after SIGTERM and with 2
when it could not start; then one line on stderr, in the log and, when a starter waits at the
other end of a pipe, on that pipe, says why.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, TextIO

from agent_box.process import hostfiles, lock
from agent_box.process.paths import (
    HELPER,
    ROLES,
    RUNTIME_LOCK,
    SERVICES,
    Paths,
    PathsError,
    make_private,
    told,
)
from agent_box.process.supervision import (
    CONFIG_FILE,
    LOGS_LINK,
    NOTICES_LINK,
    PASSWORD_FILE,
    Program,
    configuration,
)

EXIT_CANNOT: Final = 2
_ANSWER: Final = {"schema": 1, "verb": "daemon"}
KEPT: Final = (
    "DBUS_SESSION_BUS_ADDRESS", "HOME", "LANG", "LC_ALL", "LOGNAME", "TZ", "USER",
    "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME",
)  # fmt: skip
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Cannot(Exception):
    """The daemon does not start.

    Args:
        kind: for a program: ``held``, ``config-invalid``, ``runtime-dir-missing``, ``root``,
            ``confinement-failed`` or ``daemon-failed``.
        message: one line for a person.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Options(NamedTuple):
    config: Path | None
    json: bool  # stdout gets one JSON object at the end, and no log
    background: bool  # fork once more and keep off stdout; the starter has made the session
    report: int | None  # a descriptor that takes one line of JSON: how the start went


def command(
    config: Path | None,
    *,
    json: bool = False,
    background: bool = False,
    report: int | None = None,
) -> list[str]:
    """The command line of the daemon.

    Args:
        config: the config file that the search found; None when there is none.
    """
    words = [sys.executable, "-I", "-m", "agent_box.process.daemon"]
    words += ["--no-config"] if config is None else ["--config", str(config)]
    words += ["--json"] if json else []
    words += ["--background"] if background else []
    words += [] if report is None else ["--report", str(report)]
    return words


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """What the daemon keeps of an environment: nothing that could be a credential."""
    return {"PATH": PATH} | {name: env[name] for name in KEPT if name in env}


def parse(words: Sequence[str]) -> Options:
    """Reads what `command` wrote.

    Raises:
        Cannot: it was written by somebody else.
    """
    config: Path | None = None
    chosen = json = background = False
    report: int | None = None
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--no-config":
            chosen = True
        elif word == "--json":
            json = True
        elif word == "--background":
            background = True
        elif word == "--config" and rest and rest[0].startswith("/"):
            config, chosen = Path(rest.pop(0)), True
        elif word == "--report" and rest and rest[0].isdecimal():
            report = int(rest.pop(0))
        else:
            raise Cannot("daemon-failed", f"the daemon's program does not know {word!r}")
    if not chosen:
        raise Cannot("daemon-failed", "say --config FILE or --no-config; or run agent-box daemon")
    return Options(config, json, background, report)


def main(words: Sequence[str] | None = None) -> int:
    """Runs the daemon; returns its exit code."""
    signal.signal(signal.SIGTERM, _leave)  # until supervisord takes it over
    end = _End()
    try:
        options = parse(sys.argv[1:] if words is None else words)
        end.json = options.json
        end.report = report = Report(options.report)
        if options.background and os.fork():
            # The starter waits for this process, which ends at once; ours is nobody's
            # child then, leaves no zombie to anyone, and can get no controlling terminal.
            os._exit(0)
        _settle()
        paths = Paths.from_env(os.environ).for_instances()
        end.log = paths.log("daemon")
        _run(paths, options, report)
    except Cannot as cannot:
        return end.refuse(cannot)
    except PathsError as error:
        return end.refuse(Cannot(error.kind, str(error)))
    except lock.Held as held:
        return end.refuse(Cannot("held", f"a daemon runs already: {held}"))
    except OSError as error:
        return end.refuse(Cannot("daemon-failed", told(error)))
    except Exception as error:  # noqa: BLE001 - the border: a defect ends in the log
        return end.refuse(
            Cannot("daemon-failed", f"internal error: {type(error).__name__}"),
            detail=traceback.format_exc(),
        )
    return end.done()


class _End:
    """Says how it ended, wherever somebody may listen."""

    def __init__(self) -> None:
        self.json = False
        self.report: Report | None = None
        self.log: Path | None = None

    def done(self) -> int:
        if self.json:
            _say(sys.stdout, json.dumps(_ANSWER | {"ok": True, "result": {}}))
        return 0

    def refuse(self, cannot: Cannot, *, detail: str = "") -> int:
        if self.report is not None:
            self.report.tell(ok=False, kind=cannot.kind, message=str(cannot))
        _say(sys.stderr, f"agent-box: {cannot}")
        if self.json:
            error = {"exit": EXIT_CANNOT, "kind": cannot.kind, "message": str(cannot)}
            _say(sys.stdout, json.dumps(_ANSWER | {"ok": False, "error": error}))
        if self.log is not None and cannot.kind != "held":  # that log is the holder's
            _append(self.log, f"agent-box daemon: {cannot}\n{detail}".rstrip())
        return EXIT_CANNOT


def _say(stream: TextIO | None, line: str) -> None:
    try:
        print(line, file=stream, flush=True)
    except OSError:
        pass  # closed; the exit code tells


class Report:
    """Tells the starter how it went, once. Who goes on closes the pipe then; who refuses leaves
    that to its end, which the starter waits for."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        if descriptor is not None:
            os.set_inheritable(descriptor, False)

    def tell(self, *, ok: bool, **facts: Any) -> None:
        if self._descriptor is None:
            return
        told, self._descriptor = self._descriptor, None
        try:
            os.write(told, json.dumps({"ok": ok} | facts).encode() + b"\n")
        except BrokenPipeError:
            pass  # the starter has given up; the daemon serves whoever comes next
        if ok:
            os.close(told)


def _leave(_number: int, _frame: object) -> NoReturn:
    sys.exit(0)


def _settle() -> None:
    """Makes this process fit to hold everything: its rights, its limits, its environment."""
    if os.geteuid() == 0:
        raise Cannot("root", "nothing of agent-box serves as root: run it as an ordinary user")
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kept = environment(os.environ)
    os.environ.clear()
    os.environ.update(kept)


def _run(paths: Paths, options: Options, report: Report) -> None:
    version = version_of("agent-box")
    # Two locks, because two state directories may share one runtime directory, and the
    # services of the second would take over the sockets of the first. The one in the state
    # directory is taken last: who sees it held may rely on the other. The second daemon makes
    # nothing but what a lock lies in, so that it leaves no half of a state directory behind.
    make_private(paths.runtime)
    beside = _locked(runtime_lock(paths), paths, options, version)
    make_private(paths.state)
    _locks = (beside, _locked(paths.lock, paths, options, version))
    paths.make()
    _in_child(lambda: _prepare(paths, options))

    from agent_box.process import supervise

    try:
        supervise.run(
            paths.supervisor,
            on_running=lambda: report.tell(ok=True, pid=os.getpid()),
            refresh=lambda: hostfiles.refresh(paths),
        )
    except supervise.SupervisorError as error:
        raise Cannot("daemon-failed", str(error)) from error


def _locked(path: Path, paths: Paths, options: Options, version: str) -> lock.Lock:
    try:
        return lock.acquire(path, config=options.config, version=version, state=paths.state)
    except OSError as error:  # a full disk is not told by the name of a file
        raise OSError(error.errno, error.strerror, str(path)) from error


def runtime_lock(paths: Paths) -> Path:
    """The lock of the runtime directory, held beside `Paths.lock`."""
    return paths.runtime / RUNTIME_LOCK


def report_command(config: Path | None) -> tuple[str, ...]:
    """Prints the startup report. Each gap in it refuses what needs it; none stops the daemon."""
    variables = [] if config is None else [f"AGENT_BOX_CONFIG={config}"]
    return ("/usr/bin/env", *variables, sys.executable, "-I", "-m", "agent_box.cli.main", "doctor")


def tell_command(paths: Paths) -> tuple[str, ...]:
    """Takes the supervisor's notices into the journal; it ends when they are there."""
    words = ["--runtime", str(paths.runtime), "--state", str(paths.state)]
    return (sys.executable, "-I", "-B", "-m", "agent_box.registry.notices", *words)


def write(
    paths: Paths,
    programs: Sequence[Program],
    *,
    report: tuple[str, ...] = (),
    tell: tuple[str, ...] = (),
    silent: bool,
) -> None:
    """Writes what supervisord reads, new at each start, with a new password.

    Raises:
        OSError: the runtime directory is full or not ours.
    """
    directory = paths.supervisor
    password = secrets.token_urlsafe(32)
    for link, target in (
        (directory / LOGS_LINK, paths.log(SERVICES[0]).parent),
        (directory / NOTICES_LINK, paths.notices),
    ):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    conf = configuration(programs, report=report, tell=tell, password=password, silent=silent)
    for name, text in (
        (PASSWORD_FILE, password),
        (CONFIG_FILE, conf),
    ):
        (directory / name).unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(directory / name, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(text)


def _prepare(paths: Paths, options: Options) -> None:
    """Everything that must lie there before the first service starts."""
    from agent_box.process import leftovers

    try:
        mode = _check_config(options.config)
        leftovers.end_walls(paths)
        _make_keys(paths)
        _try_wall(paths)
        found = programs(paths, options.config)
        if mode == "user":
            make_private(paths.helper_sock.parent)
            found.append(Program(HELPER, helper_command(paths)))
        write(
            paths,
            found,
            report=report_command(options.config),
            tell=tell_command(paths),
            silent=options.background or options.json,
        )
    except PathsError as error:
        raise Cannot(error.kind, str(error)) from error
    except OSError as error:  # a full disk is not told by the name of a file
        where = error.filename or paths.state
        raise Cannot("daemon-failed", f"{where}: {error.strerror}") from error


def _try_wall(paths: Paths) -> None:
    """One line now, instead of six services that die again and again.

    Raises:
        Cannot: this host builds no wall, e.g. because it forbids user namespaces.
    """
    from agent_box.process import confine

    gap = confine.probe(paths.supervisor)
    if gap is not None:
        raise Cannot("confinement-failed", gap.fix)


def programs(paths: Paths, config: Path | None) -> list[Program]:
    """Every service, inside the wall that its contract declares.

    Raises:
        Cannot: a wall cannot be built on this host.
        PathsError: a directory that a wall needs cannot be made.
        OSError: the filters cannot be written.
    """
    from agent_box.process import confine
    from agent_box.process.seccomp import SeccompError

    found = []
    for service in SERVICES:
        contract = import_module(f"agent_box.{service}.contract").CONTRACT
        try:
            confine.prepare(contract, paths)
            wall = confine.profile(contract, paths, config)
            filters = confine.write_filters(wall, paths.supervisor)
            argv = confine.command(wall, confine.arguments(contract, paths, config), filters)
            argv = [*_launcher(contract.wall.launcher, paths.keys(service)), *argv]
        except (confine.ConfineError, SeccompError) as error:
            raise Cannot("confinement-failed", str(error)) from error
        found.append(Program(service, tuple(argv)))
    return found


def helper_command(paths: Paths) -> tuple[str, ...]:
    """The user-mode helper. It stands behind no wall: bubblewrap cannot start inside one."""
    words = ["--mode", "user", "--runtime", str(paths.runtime), "--state", str(paths.state)]
    return (sys.executable, "-I", "-B", "-m", "agent_box.helper", *words)


def _launcher(module: str, keys: Path) -> list[str]:
    """What runs before the wall is built, and becomes the confined service."""
    if not module:
        return []
    return [sys.executable, "-I", "-B", "-m", module, "--keys", str(keys), "--"]


def _check_config(config: Path | None) -> str:
    """A config that no service will accept stops the daemon, and nothing is started.

    Returns:
        The helper's mode.
    """
    from agent_box.config.errors import ConfigError
    from agent_box.config.load import load

    try:
        return load(config).engine.helper
    except ConfigError as error:
        raise Cannot("config-invalid", str(error)) from error


def _make_keys(paths: Paths) -> None:
    from agent_box.bus import keys

    try:
        keys.make_keys(paths.public_keys.parent, ROLES)
    except keys.KeysError as error:
        raise Cannot("daemon-failed", str(error)) from error
    _make_helper_key(paths.helper_key)


def _make_helper_key(path: Path) -> None:
    """Once; a helper that a daemon before this one started goes by the same."""
    if path.exists():
        return
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(new, flags, 0o600), "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32) + "\n")
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)


def _in_child(work: Callable[[], None]) -> None:
    """Does `work` in a process of its own, so that this one, which lives long and holds
    everything, need not hold the libraries for it: 15 MB.

    Raises:
        Cannot: the work did, or it died.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        code = 1
        try:
            work()
            code = 0
        except Cannot as cannot:
            os.write(writer, json.dumps([cannot.kind, str(cannot)]).encode())
        except Exception:  # noqa: BLE001 - the border of this process
            os.write(writer, json.dumps(["", traceback.format_exc()]).encode())
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if answer:
        kind, message = json.loads(answer)
        if not kind:
            raise RuntimeError(message)
        raise Cannot(kind, message)
    if status != 0:
        raise Cannot("daemon-failed", f"laying everything out ended with status {status}")


def _append(log: Path, line: str) -> None:
    from time import strftime

    try:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{strftime('%Y-%m-%d %H:%M:%S')} CRIT {line}\n")
    except OSError:
        pass  # perhaps the very reason; it stands on stderr and on the pipe


if __name__ == "__main__":
    sys.exit(main())
