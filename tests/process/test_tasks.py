from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from agent_box.process.tasks import TaskSet


class Log:
    def __init__(self) -> None:
        self.errors: list[tuple[str, BaseException | None, dict[str, object]]] = []

    def error(self, event: str, *, error: BaseException | None = None, **fields: object) -> str:
        self.errors.append((event, error, fields))
        return "id"


def test_a_task_is_kept_although_nobody_holds_it() -> None:
    async def main() -> None:
        tasks, done = TaskSet(Log()), asyncio.Event()

        async def work() -> None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            # Nothing but the task refers to this future, and nothing but it to the task.
            weakref.finalize(future, lambda: None)
            asyncio.get_running_loop().call_later(0.01, _finish, weakref.ref(future))
            await future
            done.set()

        tasks.spawn(work(), name="work")
        await asyncio.sleep(0)
        gc.collect()
        await asyncio.wait_for(done.wait(), 5)
        await tasks.drain()
        assert len(tasks) == 0

    asyncio.run(main())


def _finish(reference: weakref.ref[asyncio.Future[None]]) -> None:
    future = reference()
    assert future is not None
    future.set_result(None)


def test_a_failure_is_logged_and_told() -> None:
    log, told = Log(), []

    async def main() -> None:
        tasks = TaskSet(log, lambda name, error: told.append((name, error)))

        async def work() -> None:
            raise ValueError("broken")

        tasks.spawn(work(), name="worker")
        await tasks.drain()
        await asyncio.sleep(0)

    asyncio.run(main())
    ((event, error, fields),) = log.errors
    assert (event, repr(error), fields) == (
        "task failed",
        "ValueError('broken')",
        {"task": "worker"},
    )
    assert [(name, repr(e)) for name, e in told] == [("worker", "ValueError('broken')")]


def test_a_cancelled_task_is_no_failure() -> None:
    log, told = Log(), []

    async def main() -> None:
        tasks = TaskSet(log, lambda name, error: told.append(name))
        tasks.spawn(asyncio.sleep(60), name="sleeper")
        await asyncio.sleep(0)
        await tasks.cancel()
        assert len(tasks) == 0

    asyncio.run(main())
    assert log.errors == [] == told


def test_a_held_task_gives_its_result() -> None:
    async def main() -> int:
        async def work() -> int:
            return 3

        return await TaskSet(Log()).hold(work(), name="work")

    assert asyncio.run(main()) == 3


def test_drain_waits_for_tasks_that_tasks_start() -> None:
    ended: list[str] = []

    async def main() -> None:
        tasks = TaskSet(Log())

        async def second() -> None:
            await asyncio.sleep(0)
            ended.append("second")

        async def first() -> None:
            tasks.spawn(second(), name="second")
            ended.append("first")

        tasks.spawn(first(), name="first")
        await tasks.drain()

    asyncio.run(main())
    assert ended == ["first", "second"]


def test_cancel_waits_for_a_task_that_cleans_up_and_spares_the_caller() -> None:
    ended: list[str] = []

    async def main() -> None:
        tasks = TaskSet(Log())

        async def slow() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.01)
                ended.append("slow")

        async def caller() -> None:
            await asyncio.sleep(0)
            await tasks.cancel()
            ended.append("caller")

        tasks.spawn(slow(), name="slow")
        tasks.spawn(caller(), name="caller")
        await tasks.drain()

    asyncio.run(main())
    assert ended == ["slow", "caller"]


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c")])
def test_names_are_the_tasks_names(names: tuple[str, ...]) -> None:
    async def main() -> set[str]:
        tasks = TaskSet(Log())
        for name in names:
            tasks.spawn(asyncio.sleep(60), name=name)
        found = {task.get_name() for task in asyncio.all_tasks()} & set(names)
        await tasks.cancel()
        return found

    assert asyncio.run(main()) == set(names)


FORGOTTEN = """
import asyncio

async def work() -> int:
    return 1

async def main() -> None:
    work()
    {}
"""


CONFIG = str(Path(__file__).parents[2] / "pyproject.toml")


def _tool(directory: Path, line: str, *words: str) -> subprocess.CompletedProcess[str]:
    file = directory / "forgotten.py"
    file.write_text(FORGOTTEN.format(line))
    return subprocess.run(
        [sys.executable, "-m", *words, str(file)],
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
    )


@pytest.mark.parametrize(
    "line",
    [
        "asyncio.create_task(work())",
        "x = asyncio.create_task(work())",
        "asyncio.ensure_future(work())",
    ],
)
def test_lint_refuses_a_bare_task(tmp_path: Path, line: str) -> None:
    ran = _tool(tmp_path, line, "ruff", "check", "--no-cache", "--config", CONFIG)
    assert ran.returncode == 1
    assert "TID251" in ran.stdout


def test_the_type_checker_refuses_what_is_not_awaited(tmp_path: Path) -> None:
    line = "asyncio.get_running_loop().create_task(work())"
    cache = str(tmp_path / "cache")
    ran = _tool(tmp_path, line, "mypy", "--config-file", CONFIG, "--cache-dir", cache)
    assert ran.returncode == 1, ran.stderr
    assert "forgotten.py:8: error" in ran.stdout  # the coroutine
    assert "forgotten.py:9: error" in ran.stdout  # the task
