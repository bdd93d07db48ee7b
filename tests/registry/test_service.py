"""A registry that cannot have its database: what it answers, and when it gives up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_box.bus import durable
from agent_box.bus.errors import Reason, Refusal
from agent_box.process.skeleton import CannotServe
from agent_box.registry.contract import CONTRACT
from agent_box.registry.database import Database
from agent_box.registry.service import DATABASE, Closed, RegistryService, build


class Log:
    def info(self, event: str, **fields: object) -> None: ...

    warning = info


def context(data: Path) -> Any:
    return SimpleNamespace(
        data=data, config=None, epoch=b"e" * 16, log=Log(), problem=None, tasks=None
    )


def test_every_method_has_a_handler(tmp_path: Path) -> None:
    service = build(context(tmp_path))
    assert isinstance(service, RegistryService)
    assert set(service.handlers) == {method.name for method in CONTRACT.methods}
    service._registry.close()


@pytest.mark.parametrize(
    ("mode", "reason", "exit"), [(0o500, Reason.EXHAUSTED, 1), (0o000, Reason.EXHAUSTED, 1)]
)
def test_a_directory_that_cannot_be_written(
    tmp_path: Path, mode: int, reason: Reason, exit: int
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(mode)
    try:
        at = context(data)
        service = build(at)
    finally:
        data.chmod(0o700)
    assert isinstance(service, Closed)
    assert "registry has no database" in at.problem and str(data) in at.problem
    for method in CONTRACT.methods:
        with pytest.raises(Refusal) as error:
            service.handlers[method.name](None, None)  # type: ignore[arg-type]
        assert (error.value.reason, error.value.exit) == (reason, exit)
    assert service.outcomes is not None
    with pytest.raises(Refusal):
        service.outcomes.lookup("operator", b"r" * 16)
    with pytest.raises(Refusal):
        service.outcomes.record("operator", b"r" * 16, "create", "done", b"")


def test_a_full_disk_at_the_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "create", full)
    service = build(context(tmp_path))
    assert isinstance(service, Closed)
    with pytest.raises(Refusal) as error:
        service.handlers["list"](None, None)  # type: ignore[arg-type]
    assert error.value.reason is Reason.DISK_FULL


def test_damage_is_told_and_nothing_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / DATABASE
    Database(path).close()
    path.write_bytes(path.read_bytes()[:2000])
    damaged = path.read_bytes()
    at = context(tmp_path)
    service = build(at)
    assert isinstance(service, Closed)
    assert "stays closed" in at.problem
    with pytest.raises(Refusal) as error:
        service.handlers["create"](None, None)  # type: ignore[arg-type]
    assert error.value.reason is Reason.TAMPERED
    assert path.read_bytes() == damaged


def test_a_database_that_another_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_BUSY_S", 0.05)
    holder = Database(tmp_path / DATABASE)
    with pytest.raises(CannotServe, match="in use by another"):
        build(context(tmp_path))
    holder.close()
