"""A store that is killed, or whose disk fails, at every point at which it changes anything.

Whatever happens, afterwards there is the old value or the new one, what was acknowledged is
there, and everything else is as it was.
"""

from __future__ import annotations

import errno
import os
import random
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import syscalls
from support.stores import Box, listed, protect, put, remove, reveal

from agent_box.bus.errors import Refusal
from agent_box.process.secret import Secret
from agent_box.store.adapter import Store
from agent_box.store.handing import Handed

REFUSED = 3
UNTOLD = 4  # done, but the pipe of the test itself was made to fail
ACKNOWLEDGED = b"A"


class Scene:
    """A store as it was before, made anew for each attempt, and work on it in a child."""

    def __init__(self, root: Path, before: Callable[[Store], None]) -> None:
        self._root = root
        self._count = 0
        self.original = Box(root / "original")
        with self.original.opened() as store:
            before(store)

    def attempt(self, work: Callable[[Store], None], **how: int | None) -> Attempt:
        self._count += 1
        place = self._root / f"attempt{self._count}"
        shutil.copytree(self.original.data.parent, place)
        return Attempt(place, work, **how)


class Attempt:
    """`work` in a child process that dies, or whose disk fails, at one system call."""

    def __init__(self, place: Path, work: Callable[[Store], None], **how: int | None) -> None:
        self.box = Box(place)
        acknowledged, tell = os.pipe()

        def child() -> None:
            os.close(acknowledged)
            with Box(place).opened() as store:
                if store.problem is not None:
                    raise syscalls.Refused(REFUSED)
                try:
                    work(store)
                except Refusal:
                    raise syscalls.Refused(REFUSED) from None
                try:
                    os.write(tell, ACKNOWLEDGED)
                except OSError:
                    raise syscalls.Refused(UNTOLD) from None

        at = how.pop("at")
        assert at is not None
        self.ended = syscalls.run(child, at=at, **how)  # type: ignore[arg-type]
        os.close(tell)
        self.acknowledged = os.read(acknowledged, 1) == ACKNOWLEDGED
        os.close(acknowledged)


def every_point(scene: Scene, work: Callable[[Store], None]) -> range:
    """All calls that have an effect, from the first on which nothing was done."""
    whole = scene.attempt(work, at=-1)
    assert whole.ended.status == 0, "the work itself fails"
    assert whole.acknowledged
    assert whole.ended.reached > 5
    return range(whole.ended.reached)


def test_a_put_that_is_killed_leaves_the_old_or_the_new_value(tmp_path: Path) -> None:
    def before(store: Store) -> None:
        put(store, "a", b"old")
        put(store, "b", b"other")

    def work(store: Store) -> None:
        put(store, "a", b"new" * 3000)  # over more than one page

    scene, found = Scene(tmp_path, before), set()
    for at in every_point(scene, work):
        attempt = scene.attempt(work, at=at)
        assert os.WTERMSIG(attempt.ended.status) == signal.SIGKILL
        with attempt.box.opened() as store:
            assert store.problem is None, (at, attempt.ended)
            value = reveal(store, "a")
            assert value in (b"old", b"new" * 3000), (at, attempt.ended)
            assert value != b"old" or not attempt.acknowledged, (at, attempt.ended)
            assert listed(store)["a"].version == (1 if value == b"old" else 2)
            assert reveal(store, "b") == b"other"
            assert put(store, "a", b"next") > 1
            assert not any(c.problem for c in listed(store).values())
        found.add(value)
        shutil.rmtree(attempt.box.data.parent)
    assert len(found) == 2, "the moments before and after the commit were both visited"


def test_a_removal_that_is_killed_is_done_or_not(tmp_path: Path) -> None:
    def before(store: Store) -> None:
        put(store, "a", b"old")
        put(store, "b", b"other")

    def work(store: Store) -> None:
        remove(store, "a")

    scene, found = Scene(tmp_path, before), set()
    for at in every_point(scene, work):
        attempt = scene.attempt(work, at=at)
        with attempt.box.opened() as store:
            there = "a" in listed(store)
            assert not (there and attempt.acknowledged), (at, attempt.ended)
            if there:
                assert reveal(store, "a") == b"old"
            assert reveal(store, "b") == b"other"
            assert not any(c.problem for c in listed(store).values())
        found.add(there)
        shutil.rmtree(attempt.box.data.parent)
    assert found == {True, False}


def test_a_first_start_that_is_killed_can_be_made_again(tmp_path: Path) -> None:
    def first(place: Path) -> Callable[[], None]:
        def child() -> None:
            with Box(place).opened() as store:
                put(store, "a", b"one")

        return child

    whole = syscalls.run(first(tmp_path / "whole"), at=-1)
    assert whole.status == 0
    for at in range(whole.reached):
        place = tmp_path / f"first{at}"
        ended = syscalls.run(first(place), at=at)
        box = Box(place)
        for value in (b"two", b"three"):  # and at the start after that
            with box.opened() as store:
                assert store.problem is None, (at, ended, store.problem)
                assert not listed(store) or reveal(store, "a") in (b"one", b"two")
                put(store, "a", value)
                assert reveal(store, "a") == value
        assert sorted(p.name.split("-")[0] for p in box.keys.iterdir()) == [
            "custody.json",
            "master",
        ]
        assert "credentials.db.new" not in {p.name for p in box.data.iterdir()}
        shutil.rmtree(place)


KEY = b"k" * 32


@pytest.mark.parametrize("protection", ["key-file", "keyring"])
def test_a_change_of_protection_that_is_killed_leaves_the_old_or_the_new(
    tmp_path: Path, protection: str
) -> None:
    def before(store: Store) -> None:
        put(store, "a", b"one")

    def work(store: Store) -> None:
        if protection == "key-file":
            protect(store, "key-file")
        else:
            protect(store, "keyring", KEY, key="ab" * 16)

    scene, found = Scene(tmp_path, before), set()
    old = next(scene.original.keys.glob("master-*")).name
    for at in every_point(scene, work):
        attempt = scene.attempt(work, at=at)
        for _ in range(2):
            with attempt.box.opened(lambda: Handed(Secret(KEY), None)) as store:
                assert store.problem is None, (at, attempt.ended, store.problem)
                assert reveal(store, "a") == b"one"
                now = store.list().protection
        keys = [p.name for p in attempt.box.keys.glob("master-*")]
        assert len(keys) == (0 if now == "keyring" else 1), (at, keys)
        changed = keys != [old]
        assert changed or not attempt.acknowledged
        found.add(changed)
        shutil.rmtree(attempt.box.data.parent)
    assert found == {True, False}


@pytest.mark.skipif(not syscalls.CAN_INJECT, reason="calls are made to fail on x86-64 only")
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("times", [1, 1000])
def test_a_put_on_a_disk_that_fails_is_refused_or_done_and_loses_nothing(
    tmp_path: Path, error: int, times: int
) -> None:
    """From one call on, the disk fails once or for good; then the process is gone."""

    def before(store: Store) -> None:
        put(store, "a", b"old")
        put(store, "b", b"other")

    def work(store: Store) -> None:
        try:
            put(store, "a", b"new" * 3000)
        except Refusal:
            # the next request sees what the answer said
            assert reveal(store, "a") == b"old"
            assert listed(store)["a"].version == 1
            raise
        assert reveal(store, "a") == b"new" * 3000

    scene, ends = Scene(tmp_path, before), set()
    for at in every_point(scene, work):
        attempt = scene.attempt(work, at=at, error=error, times=times)
        status = os.waitstatus_to_exitcode(attempt.ended.status)
        assert status in (0, REFUSED, UNTOLD), (at, attempt.ended)
        with attempt.box.opened() as store:
            assert store.problem is None, (at, attempt.ended, store.problem)
            value = reveal(store, "a")
            assert value in (b"old", b"new" * 3000), (at, attempt.ended)
            assert value != b"old" or not attempt.acknowledged, (at, attempt.ended)
            assert reveal(store, "b") == b"other"
            put(store, "a", b"next")
            assert reveal(store, "a") == b"next"
        ends.add(status)
        shutil.rmtree(attempt.box.data.parent)
    assert ends >= {0, REFUSED}


@pytest.mark.skipif(not syscalls.CAN_INJECT, reason="calls are made to fail on x86-64 only")
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("times", [1, 1000])
def test_a_change_of_protection_on_a_disk_that_fails_opens_afterwards(
    tmp_path: Path, error: int, times: int
) -> None:
    def before(store: Store) -> None:
        put(store, "a", b"one")

    def work(store: Store) -> None:
        try:
            protect(store, "key-file")
        finally:
            assert reveal(store, "a") == b"one"

    scene = Scene(tmp_path, before)
    for at in every_point(scene, work):
        attempt = scene.attempt(work, at=at, error=error, times=times)
        status = os.waitstatus_to_exitcode(attempt.ended.status)
        assert status in (0, REFUSED, UNTOLD), (at, attempt.ended)
        for _ in range(2):
            with attempt.box.opened() as store:
                assert store.problem is None, (at, attempt.ended, store.problem)
                assert reveal(store, "a") == b"one"
        assert len(list(attempt.box.keys.glob("master-*.key"))) == 1
        shutil.rmtree(attempt.box.data.parent)


def _writer(box: Box, tell: int) -> None:
    """Puts numbered values under two names for ever and tells each when it is acknowledged."""
    number = 0
    with box.opened() as store:
        for name, credential in listed(store).items():
            assert credential.problem is None, name
            number = max(number, int(reveal(store, name).split(b" ")[0]))
        while True:
            number += 1
            name = "ab"[number % 2]
            put(store, name, b"%d " % number + b"x" * random.randrange(3000))
            os.write(tell, b"%d\n" % number)


@pytest.mark.parametrize(
    "kills", [20, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_nothing_acknowledged_is_lost_by_kills_at_random_moments(
    tmp_path: Path, kills: int
) -> None:
    box, acknowledged, seed = Box(tmp_path / "store"), 0, random.randrange(1 << 32)
    random.seed(seed)
    for _ in range(kills):
        hear, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(hear)
            try:
                _writer(box, tell)
            finally:
                os._exit(1)
        os.close(tell)
        until, text = time.monotonic() + random.uniform(0, 0.12), b""
        while (left := until - time.monotonic()) > 0:
            if select.select([hear], [], [], left)[0]:
                piece = os.read(hear, 1 << 16)
                assert piece, f"the writer ended by itself (seed {seed})"
                text += piece
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while piece := os.read(hear, 1 << 16):
            text += piece
        os.close(hear)
        told = [int(line) for line in text.split(b"\n")[:-1]]
        acknowledged = max(told, default=acknowledged)
        with box.opened() as store:
            assert store.problem is None, (seed, store.problem)
            found = listed(store)
            assert not any(c.problem for c in found.values()), (seed, found)
            values = {name: int(reveal(store, name).split(b" ")[0]) for name in found}
        # the last one told is there, or the one after it, which was not told any more
        for number in (acknowledged, acknowledged - 1):
            if number > 0:
                assert values["ab"[number % 2]] in (number, number + 2), (seed, number, values)
        acknowledged = max([acknowledged, *values.values()])
    assert acknowledged > kills / 2
