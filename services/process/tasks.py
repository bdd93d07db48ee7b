"""Tasks that are never forgotten.

A bare `asyncio.create_task` may be collected while it runs, and its exception is told to
nobody. Here each task has an owner that holds it, hears of its failure and ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Log(Protocol):
    """What is needed of a log. `process.log.Log` is one."""

    def error(self, event: str, *, error: BaseException | None = None, **fields: object) -> str: ...


class TaskSet:
    """The tasks of one owner.

    Args:
        log: is told of each failure, under an id.
        on_failure: called with the task's name and its exception after logging it. The
            skeleton ends the process here: a service with a dead part is not half alive.
    """

    def __init__(
        self, log: Log, on_failure: Callable[[str, BaseException], None] | None = None
    ) -> None:
        self._log = log
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, object], *, name: str) -> None:
        """Starts a coroutine in the running loop and keeps it until it ends."""
        self._tasks.add(self.hold(work, name=name))

    def hold(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """As `spawn`, for a caller that awaits or cancels the task itself.

        Its failure is logged and told even when the caller awaits it as well.
        """
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        self._log.error("task failed", error=error, task=task.get_name())
        if self._on_failure is not None:
            self._on_failure(task.get_name(), error)

    async def drain(self) -> None:
        """Waits until all have ended of their own accord, those started meanwhile too."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Cancels all and waits until each has ended. A task that resists is waited for."""
        current = asyncio.current_task()
        while others := {task for task in self._tasks if task is not current}:
            for task in others:
                task.cancel()
            await asyncio.wait(others)
