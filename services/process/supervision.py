"""What supervisord is told, and how it is asked.

supervisord starts the services, starts one again that died, and keeps their logs. It knows
two things more through `watch`, which runs inside it: how often a service died of late, and
that one which dies again and again must stay down until an operator says otherwise.

RUNNING is supervisord's word for "the process exists". Whether a service is ready only the
service itself can say (`hello`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent_box.process.paths import told

if TYPE_CHECKING:
    import xmlrpc.client

GROUP: Final = "agent-box"
REPORT: Final = "report"  # the program that runs once, some time after the start
TELL: Final = "tell"  # the program that runs when there are notices, and the registry
USER: Final = "agent-box"
EXIT_FATAL: Final = 71  # a service's own word that starting it again cannot help
STOP_SECONDS: Final = 10  # from SIGTERM to SIGKILL: what a service has for its drain
LOG_BYTES: Final = 1 << 20
LOG_BACKUPS: Final = 3
CONFIG_FILE: Final = "supervisord.conf"
SOCKET_FILE: Final = "sock"  # short: its path must fit in 107 bytes
PASSWORD_FILE: Final = "password"
LOGS_LINK: Final = "logs"
NOTICES_LINK: Final = "notices"

_SPECIAL: Final = re.compile(r"[^A-Za-z0-9_@%+=:,./-]")

# supervisord's fault codes (supervisor.xmlrpc.Faults); importing that costs too much.
_NOT_RUNNING: Final = 70
_ALREADY_STARTED: Final = 60
_DIED_AT_ONCE: Final = (40, 50)  # ABNORMAL_TERMINATION, SPAWN_ERROR


class ControlError(Exception):
    """supervisord cannot be asked, or refused. The message is one line for a person."""


@dataclass(frozen=True)
class Program:
    """One process under supervision.

    Attributes:
        name: a service's name; also the name of its log, ``<name>.log``.
        argv: the whole command line. No argument may hold a line feed or NUL.
    """

    name: str
    argv: tuple[str, ...]


@dataclass(frozen=True)
class Status:
    """What supervisord knows of one program.

    Attributes:
        state: supervisord's own, lower case: ``starting``, ``running``, ``backoff``,
            ``stopping``, ``stopped``, ``exited``, ``fatal`` or ``unknown``.
        pid: of the outermost process, on the host; None when there is none.
        uptime_ms: since that process was started; None when there is none.
        restarts: how often it was started after the first time, since the daemon started.
        reason: why it is ``fatal`` or ``backoff``; None otherwise.
    """

    name: str
    state: str
    pid: int | None
    uptime_ms: int | None
    restarts: int
    reason: str | None


def configuration(
    programs: Iterable[Program],
    *,
    report: tuple[str, ...] = (),
    tell: tuple[str, ...] = (),
    password: str,
    silent: bool,
) -> str:
    """The text of supervisord's configuration file.

    Every path in it is relative to the file's own directory, in which supervisord runs: the
    syntax cannot hold every absolute path. A blank followed by ``;`` starts a comment, even
    inside quotes, and ``%`` is expanded twice in the name of a log and once elsewhere.

    Args:
        programs: in any order; all are started at once and clients wait for them.
        report: the command line of what runs once when all has settled; its output is the
            log ``report.log``. Empty for none.
        tell: the command line of what takes notices into the journal. Empty for none.
        password: for the control socket; only its digest is written.
        silent: whether supervisord's own log goes to the log file only, not to stdout too.

    Raises:
        ValueError: an argument holds a line feed or NUL.
    """
    programs = tuple(programs)
    # Not a defence against guessing: the password has 256 random bits. It only keeps it
    # out of this file, which one may want to show.
    digest = hashlib.sha1(password.encode(), usedforsecurity=False).hexdigest()
    sections = [
        f"""\
[supervisord]
identifier = {GROUP}
nodaemon = true
silent = {"true" if silent else "false"}
nocleanup = true
umask = 077
childlogdir = .
logfile = {LOGS_LINK}/daemon.log
logfile_maxbytes = {LOG_BYTES}
logfile_backups = {LOG_BACKUPS}
loglevel = info
minfds = 256
minprocs = 16

[unix_http_server]
file = {SOCKET_FILE}
chmod = 0600
username = {USER}
password = {{SHA}}{digest}

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface

[rpcinterface:agent_box]
supervisor.rpcinterface_factory = agent_box.process.watch:make_rpcinterface

[group:{GROUP}]
programs = {",".join(p.name for p in programs)}
"""
    ]
    sections += [
        # startsecs 0: ready is for the service to say, and what dies early is started again
        # at once instead of after a growing pause. `watch` counts the deaths.
        # exitcodes: 0 is not among them, so a drained service comes back; a stop by the
        # operator is a state of its own and not an exit.
        f"""\
[program:{program.name}]
command = {_command(program.argv)}
directory = /
umask = 077
autostart = true
autorestart = unexpected
exitcodes = {EXIT_FATAL}
startsecs = 0
startretries = 5
stopsignal = TERM
stopwaitsecs = {STOP_SECONDS}
stopasgroup = true
killasgroup = true
redirect_stderr = true
stdout_logfile = {LOGS_LINK}/{program.name}.log
stdout_logfile_maxbytes = {LOG_BYTES}
stdout_logfile_backups = {LOG_BACKUPS}
"""
        for program in programs
    ]
    for name, argv in ((REPORT, report), (TELL, tell)):
        if not argv:
            continue
        sections.append(
            f"""\
[program:{name}]
command = {_command(argv)}
directory = /
umask = 077
autostart = false
autorestart = false
startsecs = 0
startretries = 0
stopasgroup = true
killasgroup = true
redirect_stderr = true
stdout_logfile = {LOGS_LINK}/{name}.log
stdout_logfile_maxbytes = {LOG_BYTES}
stdout_logfile_backups = {LOG_BACKUPS}
"""
        )
    return "\n".join(sections)


def _command(argv: tuple[str, ...]) -> str:
    return " ".join(map(_word, argv))


def _word(argument: str) -> str:
    """One argument as supervisord reads it: comments, blanks at the end, `%`, shell words.

    Each blank in quotes of its own, so that none stands at the end, where it would be cut
    off, or before a ``;`` or ``#``, where it would make a comment even inside quotes. Each
    other special character after a backslash.
    """
    if re.search(r"[\n\r\0]", argument):
        raise ValueError(f"supervisord cannot hold this argument: {argument!r}")
    if not argument:
        return "''"
    return _SPECIAL.sub(lambda c: f"'{c[0]}'" if c[0].isspace() else f"\\{c[0]}", argument).replace(
        "%", "%%"
    )


class Control:
    """Asks supervisord, over its Unix socket.

    Args:
        directory: the supervisor's (`Paths.supervisor`), which holds socket and password.
        timeout_s: for each step on the socket; `stop` takes up to `STOP_SECONDS` more.
    """

    def __init__(self, directory: Path, *, timeout_s: float = 5.0) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self._proxy: xmlrpc.client.ServerProxy | None = None

    def statuses(self) -> dict[str, Status]:
        """Every program's status by name.

        Raises:
            ControlError: supervisord does not answer.
        """
        untrusted: Any = self._call("agent_box.status")
        try:
            return {s["name"]: _status(s) for s in untrusted}
        except (KeyError, TypeError, ValueError) as error:
            raise ControlError(f"supervisord answered nonsense: {error!r}") from error

    def stop(self, name: str) -> None:
        """SIGTERM, then SIGKILL after `STOP_SECONDS`; returns when it is gone.

        Raises:
            ControlError: supervisord does not answer, or knows no such program.
        """
        self._call(
            "supervisor.stopProcess",
            f"{GROUP}:{name}",
            ignore=(_NOT_RUNNING,),
            timeout_s=self._timeout_s + STOP_SECONDS,
        )

    def start(self, name: str) -> None:
        """Starts it, whatever it died of before. Whether it lives, its status says.

        Raises:
            ControlError: supervisord does not answer, or knows no such program.
        """
        self._call("agent_box.pardon", name)
        ignore = (_ALREADY_STARTED, *_DIED_AT_ONCE)
        self._call("supervisor.startProcess", f"{GROUP}:{name}", ignore=ignore)

    def _call(
        self, method: str, *arguments: str, ignore: tuple[int, ...] = (), timeout_s: float = 0.0
    ) -> Any:
        import http.client
        import xmlrpc.client

        proxy = self._connection(timeout_s or self._timeout_s)
        target: Any = proxy
        for part in method.split("."):
            target = getattr(target, part)
        try:
            return target(*arguments)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode in ignore:
                return None
            raise ControlError(f"supervisord: {fault.faultString}") from fault
        except xmlrpc.client.ProtocolError as error:
            raise ControlError(f"supervisord refused: {error.errcode} {error.errmsg}") from error
        except TimeoutError:
            raise ControlError("supervisord does not answer") from None
        except (OSError, http.client.HTTPException, xmlrpc.client.Error, SyntaxError) as error:
            raise ControlError(f"supervisord cannot be reached: {told(error)}") from error

    def _connection(self, timeout_s: float) -> xmlrpc.client.ServerProxy:
        import base64
        import http.client
        import socket
        import xmlrpc.client

        socket_path = str(self._directory / SOCKET_FILE)
        try:
            password = (self._directory / PASSWORD_FILE).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise ControlError(f"supervisord cannot be reached: {told(error)}") from error
        token = base64.b64encode(f"{USER}:{password}".encode()).decode()

        class Connection(http.client.HTTPConnection):
            def connect(self) -> None:
                self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self.sock.settimeout(timeout_s)
                self.sock.connect(socket_path)

        class Transport(xmlrpc.client.Transport):
            def make_connection(self, host: Any) -> http.client.HTTPConnection:
                return Connection("localhost")

        return xmlrpc.client.ServerProxy(
            "http://localhost/RPC2",
            transport=Transport(headers=[("Authorization", f"Basic {token}")]),
        )


def _status(untrusted: dict[str, Any]) -> Status:
    pid = int(untrusted["pid"])
    return Status(
        name=str(untrusted["name"]),
        state=str(untrusted["state"]),
        pid=pid or None,
        uptime_ms=int(untrusted["uptime_ms"]) if pid else None,
        restarts=int(untrusted["restarts"]),
        reason=str(untrusted["reason"]) or None,
    )
