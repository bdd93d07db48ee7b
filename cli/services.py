"""The administrator's verbs: the daemon, and the services one by one.

`service list` and `service inspect` ask three that need not agree: supervisord whether the
process exists, /proc what it is, and the service itself whether it is well.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent_box.cli import link
from agent_box.cli.render import Failure, Render, table
from agent_box.process.paths import HELPER, PROGRAMS, SERVICES, Paths, told

if TYPE_CHECKING:
    from agent_box.bus.base import Confinement, Hello
    from agent_box.process.supervision import Control, Status

HELLO_S: Final = 2.0  # what a service has to answer in
YOUNG_S: Final = 5.0  # the same, and the age, of one that was started just now
HELPER_S: Final = 20.0  # what the helper has to serve again in
STOP_S: Final = 40.0  # what the daemon has to end in; its services have 10 s each, at once
FOLLOW_TAIL: Final = 10


def daemon(out: Render, *, stop: bool) -> None:
    """Becomes the daemon, or with `stop` ends the one that runs."""
    here = link.place()
    if stop:
        _stop(here, out)
        return
    holder = link.holder(here)
    if holder is not None:
        config = f", config {holder.config}" if holder.config else ""
        raise Failure(2, "held", f"a daemon runs already: pid {holder.pid}{config}")
    from agent_box.process import daemon as process

    words = process.command(here.config, json=out.json)
    os.execve(words[0], words, process.environment(os.environ))


def _stop(here: link.Place, out: Render) -> None:
    pid = end_daemon(here, out)
    if pid is None:
        out.result({"stopped": False, "pid": None}, "no daemon runs")
        return
    out.result({"stopped": True, "pid": pid}, f"the daemon (pid {pid}) ended")


def end_daemon(here: link.Place, out: Render) -> int | None:
    """Ends the daemon and returns its pid; None when there is none.

    Raises:
        Failure: it did not end.
    """
    holder = link.holder(here)
    if holder is None:
        return None
    out.progress(f"stopping the daemon (pid {holder.pid}) ...")
    if not _end(here, holder.pid):
        raise Failure(1, "still-running", f"the daemon (pid {holder.pid}) did not end")
    return holder.pid


def _end(here: link.Place, pid: int) -> bool:
    """SIGTERM to the holder of the lock and nobody else; waits for its end."""
    if pid == 0:
        raise Failure(2, "daemon-failed", "the daemon runs in another PID namespace")
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        again = link.holder(here)
        if again is None or again.pid != pid:
            return True  # it ended, and the number may be somebody else's by now
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        ready, _, _ = select.select([handle], [], [], STOP_S)
        return bool(ready)
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------- list


def list_services(out: Render) -> None:
    """One row per service. A service that is stuck does not hold up the others."""
    here, control = link.supervisor(out)
    statuses = _statuses(control)
    hellos = _hellos(here, statuses)
    holder = link.holder(here)
    rows = [_row(name, statuses.get(name), hellos[name]) for name in SERVICES]
    if HELPER in statuses:  # in system mode it is the host's, and no affair of ours
        rows.append(_helper_row(here, statuses[HELPER]))
    out.result(
        {
            "daemon": {
                "pid": None if holder is None else holder.pid,
                "version": None if holder is None else holder.version,
                "config": None if holder is None else holder.config,
            },
            "services": rows,
        },
        _table(rows),
    )


def _table(rows: list[dict[str, Any]]) -> str:
    header = ("NAME", "STATE", "READY", "PID", "UPTIME", "RESTARTS", "EPOCH")
    lines = [
        (
            row["name"],
            row["state"],
            _ready_word(row),
            row["pid"] or "-",
            "-" if row["uptime_ms"] is None else _duration(row["uptime_ms"]),
            row["restarts"],
            (row["epoch"] or "-")[:8],
        )
        for row in rows
    ]
    problems = [f"{row['name']}: {row['problem']}" for row in rows if row["problem"]]
    return "\n".join([table(header, lines), *([""] if problems else []), *problems])


def _row(name: str, status: Status | None, hello: Hello | str) -> dict[str, Any]:
    answered = None if isinstance(hello, str) else hello
    problem: str | None
    if status is not None and status.reason:
        problem = status.reason
    else:
        problem = hello if isinstance(hello, str) else hello.problem
    return {
        "name": name,
        "state": "unknown" if status is None else status.state,
        "answering": answered is not None,
        "ready": answered is not None and answered.ready,
        "pid": None if status is None or status.pid is None else confined_pid(status.pid),
        "uptime_ms": None if status is None else status.uptime_ms,
        "restarts": 0 if status is None else status.restarts,
        "epoch": None if answered is None else answered.epoch.hex(),
        "version": None if answered is None else answered.version,
        "problem": problem,
    }


def _helper_row(here: link.Place, status: Status) -> dict[str, Any]:
    """The helper says to strangers only that it is there: it greets who connects."""
    silent = _helper_silence(here, HELLO_S)
    return {
        "name": HELPER,
        "state": status.state,
        "answering": silent is None,
        "ready": silent is None,
        "pid": status.pid,
        "uptime_ms": status.uptime_ms,
        "restarts": status.restarts,
        "epoch": None,
        "version": None,
        "problem": status.reason or silent,
    }


def _helper_silence(here: link.Place, seconds: float) -> str | None:
    """Why the helper greets nobody; None when it does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(seconds)
        try:
            sock.connect(str(here.paths.helper_sock))
            return None if sock.recv(1024) else "it hung up"
        except TimeoutError:
            return f"no answer in {seconds:.0f} s"
        except OSError as error:
            return error.strerror or str(error)


def _ready_word(row: dict[str, Any]) -> str:
    if not row["answering"]:
        return "not answering"
    return "yes" if row["ready"] else "no"


def _duration(ms: int) -> str:
    seconds = ms // 1000
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def _hellos(here: link.Place, statuses: dict[str, Status]) -> dict[str, Hello | str]:
    """What each says, all asked at the same time."""
    from concurrent.futures import ThreadPoolExecutor

    def ask(name: str) -> Hello | str:
        status = statuses.get(name)
        age_ms = None if status is None else status.uptime_ms
        is_young = age_ms is not None and age_ms < YOUNG_S * 1000
        return _hello(here, name, YOUNG_S if is_young else HELLO_S)

    with ThreadPoolExecutor(len(SERVICES)) as pool:
        return dict(zip(SERVICES, pool.map(ask, SERVICES), strict=True))


def _hello(here: link.Place, name: str, seconds: float = HELLO_S) -> Hello | str:
    """What the service says of itself, or why it said nothing."""
    from agent_box.bus.errors import Refusal

    try:
        client = link.connect(here, name)
        try:
            return link.ask_hello(client, seconds)
        finally:
            client.close()
    except (Refusal, Failure) as error:
        return error.message


def _statuses(control: Control) -> dict[str, Status]:
    from agent_box.process.supervision import ControlError

    try:
        return control.statuses()
    except ControlError as error:
        raise Failure(2, "daemon-failed", str(error)) from error


def confined_pid(outer: int) -> int:
    """The service's own process on the host, below the processes that wall it in.

    `outer` is what supervisord started: bubblewrap, whose child is bubblewrap again as the
    first process of the new PID namespace, whose child is the service. While the wall is
    still being built, the innermost process that is there.
    """
    pid = outer
    for _ in range(8):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                program = os.path.basename(file.read().split(b"\0", 1)[0])
            with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
                children = file.read().split()
        except OSError:
            return pid
        if program not in (b"bwrap", b"sh") or not children:
            return pid
        pid = int(children[0])
    return pid


# ------------------------------------------------------------------------- restart


def restart(out: Render, *, name: str) -> None:
    """Lets a service finish, starts it anew, and waits for the new one to be ready."""
    here, control = link.supervisor(out)
    names: tuple[str, ...] = (name,)
    if name == "all":
        names = PROGRAMS if HELPER in _statuses(control) else SERVICES
    rows = [_restart(here, control, each, out) for each in names]
    text = "\n".join(f"{r['name']} is ready again after {r['took_ms']} ms" for r in rows)
    out.result({"services": rows}, text)


def _restart(here: link.Place, control: Control, name: str, out: Render) -> dict[str, Any]:
    from agent_box.process.supervision import ControlError

    before = "" if name == HELPER else _hello(here, name)
    begun = time.monotonic()
    out.progress(f"restarting {name} ...")
    try:
        control.stop(name)
        control.start(name)
    except ControlError as error:
        raise Failure(1, "restart-failed", f"{name}: {error}") from error
    if name == HELPER:
        _until_helper(here)
        took_ms = int((time.monotonic() - begun) * 1000)
        return {"name": name, "epoch": None, "version": None, "took_ms": took_ms}
    old = None if isinstance(before, str) else before.epoch
    client, hello = link.ready(here, name, out, not_epoch=old)
    client.close()
    return {
        "name": name,
        "epoch": hello.epoch.hex(),
        "version": hello.version,
        "took_ms": int((time.monotonic() - begun) * 1000),
    }


def _until_helper(here: link.Place) -> None:
    """Nothing tells when its socket is bound, so it is tried."""
    deadline = time.monotonic() + HELPER_S
    while (silent := _helper_silence(here, HELLO_S)) is not None:
        if time.monotonic() > deadline:
            raise Failure(1, "restart-failed", f"helper: {silent}")
        select.select([], [], [], 0.02)


# ------------------------------------------------------------------------- inspect


def inspect(out: Render, *, name: str) -> None:
    """The wall of a service: declared, as the kernel shows it, and as the service says."""
    from importlib import import_module

    from agent_box.cli import walls
    from agent_box.process.confine import ConfineError
    from agent_box.process.seccomp import SeccompError

    contract = import_module(f"agent_box.{name}.contract").CONTRACT
    here, control = link.supervisor(out)
    status = _statuses(control).get(name)
    if status is not None and status.uptime_ms is not None and status.uptime_ms < YOUNG_S * 1000:
        client, _ = link.ready(here, name, out)  # its inner walls may not stand yet
        client.close()
        status = _statuses(control).get(name)
    if status is None or status.pid is None:
        state = "unknown" if status is None else status.state
        raise Failure(4, "wrong-state", f"{name} does not run: {state}", state=state)
    said = _confinement(here, name)
    pid = confined_pid(status.pid)
    try:
        holder = link.holder(here)  # it may name the same config file in another way
        config = None if holder is None or holder.config is None else Path(holder.config)
        lines = walls.lines(
            contract,
            here.paths,
            config,
            walls.see(status.pid, pid),
            None if isinstance(said, str) else said,
        )
    except (OSError, ConfineError, SeccompError) as error:
        raise Failure(1, "not-observed", f"{name}: {told(error)}") from error
    if isinstance(said, str):
        out.warning(f"{name} says nothing of itself: {said}")
    different = [line.key for line in lines if line.verdict == "differs"]
    facts = {"service": name, "pid": pid, "lines": [line.fields() for line in lines]}
    text = "\n".join(line.text() for line in lines)
    if different:
        message = f"{name}: not as declared: {', '.join(different)}"
        raise Failure(1, "wall-differs", message, text=text, **facts)
    out.result(facts, text)


def _confinement(here: link.Place, name: str) -> Confinement | str:
    """What the service reads of itself, or why it said nothing."""
    from agent_box.bus.base import Confinement
    from agent_box.bus.errors import Refusal
    from agent_box.bus.schema import Empty

    try:
        client = link.connect(here, name)
        try:
            said = client.call("confinement", Empty(), deadline_s=YOUNG_S)
            assert isinstance(said, Confinement)
            return said
        finally:
            client.close()
    except (Refusal, Failure) as error:
        return error.message


# ---------------------------------------------------------------------------- logs


def logs(out: Render, *, name: str, follow: bool, tail: int | None) -> None:
    """The lines that a service wrote. Starts nothing: it may be wanted because nothing starts."""
    from agent_box.cli import logfile

    link.refuse_root()
    log = Paths.from_env(os.environ).log(name)
    try:
        if follow:
            with logfile.Follower(log, FOLLOW_TAIL if tail is None else tail) as follower:
                for line in follower.lines():
                    out.item("line", {"service": name, "line": line}, line)
            return
        if not logfile.files(log):
            raise Failure(3, "not-found", f"there is no log of {name} yet")
        lines = logfile.last(log, tail)
    except FileNotFoundError:
        raise Failure(3, "not-found", f"there is no log of {name} yet") from None
    except OSError as error:
        raise Failure(1, "log-unreadable", f"{log}: {error.strerror}") from error
    out.result({"service": name, "lines": lines}, "\n".join(lines))
