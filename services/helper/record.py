"""What is written down of an instance's last launch: by its shim while that lives, else by the
helper. Two copies: one that outlasts the host, and one beside the sockets, which is there also
when the disk is full or somebody removed the first. The newer one counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from agent_box.helper import contract, procs, wire
from agent_box.helper.procs import Proc, alive, boot_id

FILE: Final = "state.json"
MAX_BYTES: Final = 16384
JAIL_S: Final = 3.0  # for what keeps a jail to end by itself
NAMES: Final = ("shim", "device_jail", "device", "vmm_jail", "vmm", "worker_jail", "worker")
_PROC: Final = contract.Maybe(
    contract.Struct((("pid", contract.PID), ("start", contract.Int(0, 1 << 62))))
)
_FIELDS: Final = contract.Struct(
    (
        ("v", contract.Int(1, 1)),
        ("serial", contract.Int(0, 1 << 53)),
        ("launch_id", contract.LAUNCH),
        ("state", contract.Word(("starting", "running", "exited", "failed"))),
        ("boot_id", contract.Text(64)),
        ("procs", contract.Struct(tuple((name, _PROC) for name in NAMES))),
        ("restarts", contract.Int(0, 1 << 31)),
        ("exit", contract.Maybe(contract.EXIT)),
        ("error", contract.Maybe(contract.Text(1000))),
    )
)


class Record(NamedTuple):
    """Immutable; each change is a new one with the next serial."""

    launch_id: str
    state: str
    boot_id: str
    procs: dict[str, Proc | None]
    restarts: int = 0
    exit: dict[str, Any] | None = None
    error: str | None = None
    serial: int = 0

    def change(self, **fields: Any) -> Record:
        return self._replace(serial=self.serial + 1, **fields)

    def lives(self, name: str) -> bool:
        return self.boot_id == boot_id() and alive(self.procs.get(name))

    def end(self, seconds: float) -> bool:
        """Ends all of its processes, the shim too; False when one is still there."""
        return self.boot_id != boot_id() or end(self.procs, seconds)


def end(found: dict[str, Proc | None], seconds: float) -> bool:
    """Ends processes by their names in a record, but for our own: programs first, then what
    keeps their jails; False when one is still there."""
    own = [name for name, proc in found.items() if proc is not None and proc.pid == os.getpid()]
    rest = {name: proc for name, proc in found.items() if name not in own}
    jails = [proc for name, proc in rest.items() if name.endswith("_jail")]
    ended = [procs.end([p for n, p in rest.items() if not n.endswith("_jail")], seconds)]
    ended += [procs.end_jail(proc, patience=JAIL_S, seconds=seconds) for proc in jails]
    return all(ended)


def write(directories: Iterable[int], record: Record) -> list[OSError]:
    """Replaces each copy in one step; what could not be written is told, not raised.

    A directory that was removed is no error: nobody asks for its copy.
    """
    fields = record._asdict()
    fields["v"] = 1
    fields["procs"] = {
        name: None if (proc := record.procs.get(name)) is None else proc._asdict() for name in NAMES
    }
    wire.check(_FIELDS, fields)
    data = json.dumps(fields).encode() + b"\n"
    problems = []
    for directory in directories:
        try:
            _replace(directory, data)
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(error)
    return problems


def _replace(directory: int, data: bytes) -> None:
    temporary = f".{FILE}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        with open(fd, "wb") as file:
            file.write(data)
        os.rename(temporary, FILE, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        os.unlink(temporary, dir_fd=directory)
        raise


def read(directories: Iterable[int]) -> Record | None:
    """The newest copy that can be read; None when there is none."""
    found = [record for fd in directories if (record := _read(fd)) is not None]
    now = boot_id()
    # A copy of this run of the host is newer than any of another.
    return max(found, key=lambda record: (record.boot_id == now, record.serial), default=None)


def _read(directory: int) -> Record | None:
    try:
        fd = os.open(FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return None
    with open(fd, "rb") as file:
        data = file.read(MAX_BYTES)
    try:
        fields = wire.check(_FIELDS, wire.decode(data))
    except wire.WireError:
        return None  # cut off by a crash of the host, or spoiled; then nothing of it lives
    procs = {n: None if p is None else Proc(**p) for n, p in fields.pop("procs").items()}
    del fields["v"]
    return Record(procs=procs, **fields)
