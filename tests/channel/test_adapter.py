"""The channel among guests of every kind: good, slow, dead, flooding and lying."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.guests import ID, OTHER, FakeClocks, Good, Scene, Serve

from agent_box.bus.errors import Reason, Refusal
from agent_box.channel import adapter
from agent_box.channel.contract import Hook
from agent_box.guest.claims import Said
from agent_box.guest.wire import VERSION, Kind, encode, pack

HELLO = {
    "versions": [VERSION],
    "guest": "1",
    "boot": None,
    "disk": {"state": "ok", "bytes": 1, "text": ""},
}
HOURS_4 = 4 * 3600 * 10**9


def played(root: Path, play: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Scene(root, FakeClocks()) as scene:
            await play(scene)

    asyncio.run(main())


async def soon(what: str, look: Callable[[], object], seconds: float = 10) -> None:
    """The fakes run in this loop, and nothing tells when one was served."""
    until = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < until, what
        await asyncio.sleep(0.01)


def says(data: bytes, *, end: bool = False) -> Serve:
    async def serve(sock: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, data)
        if not end:
            await asyncio.Event().wait()

    return serve


def test_a_guest_is_given_all_of_it(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        good = scene.guests[ID] = Good()
        provisioned = await scene.provision(boot=7)
        assert provisioned.version == "1.2" and abs(provisioned.skew_ms) < 500
        assert good.ops == ["provision"]
        assert good.asked[0]["boot"] == 7 and good.asked[0]["hostname"] == "work"
        await soon("noted", lambda: scene.noted("guest-ready"))
        assert scene.noted("guest-ready")[0]["boot"] == 7

    played(tmp_path, play)


def test_what_a_guest_tells_is_on_record_before_it_is_seen(tmp_path: Path) -> None:
    seen: list[bytes] = []

    async def tells(sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        facts = {"process": "x", "pid": 7, "dropped": 0}
        hello = pack(Said.HELLO, 0, {"versions": [1], "run": "0" * 16})
        event = pack(Said.EVENT, 1, {"number": 1, "kind": "guest-oom", "facts": facts})
        await loop.sock_sendall(sock, hello + event)
        while data := await loop.sock_recv(sock, 65536):
            seen.append(data)

    async def lies(sock: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, b"\xff" * 9)

    async def play(scene: Scene) -> None:
        scene.guests[ID] = Good()
        scene.tellers[ID] = tells
        await scene.provision()
        await soon("seen", lambda: b'"number":1' in b"".join(seen))
        assert scene.noted("guest-oom") == [{"process": "x", "pid": 7, "dropped": 0}]
        scene.guests[OTHER] = Good()
        scene.tellers[OTHER] = lies
        await scene.provision(OTHER)
        await soon("noted", lambda: scene.noted("forgery-refused"))
        assert scene.noted("forgery-refused")[0]["port"] == 5002

    played(tmp_path, play)


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("state", ["none", "done", "failed"])
def test_the_end_of_a_hook_is_noted_and_fails_the_start_where_it_must(
    tmp_path: Path, state: str, required: bool
) -> None:
    async def play(scene: Scene) -> None:
        good = scene.guests[ID] = Good()
        good.hook = {"state": state, "line": "line 3\x1b"}
        hook = Hook(path="~/x", expected=True, required=required)
        if required and state == "failed":
            with pytest.raises(Refusal, match="line 3\\?") as refused:
                await scene.provision(hook=hook)
            assert refused.value.reason is Reason.BOOT_FAILED
        else:
            await scene.provision(hook=hook)
        assert good.asked[0]["hook"] == {"path": "~/x", "expected": True}
        await soon("asked", lambda: "hook" in good.ops)
        if state != "none":
            await soon("noted", lambda: scene.noted(f"hook-{state}"))

    played(tmp_path, play)


def test_it_waits_for_a_guest_that_boots(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        waiting = scene.tasks.hold(scene.provision(), name="provision")
        await soon("dialled", lambda: len(scene.dialled) >= 3)
        scene.guests[ID] = Good()
        assert (await waiting).version == "1.2"

    played(tmp_path, play)


def test_a_guest_that_never_comes_up_is_a_timeout(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        for serve in (None, says(b""), says(b"", end=True)):
            if serve is not None:
                scene.guests[ID] = serve
            with pytest.raises(Refusal) as refused:
                await scene.provision(seconds=1.3)
            assert refused.value.reason is Reason.BOOT_TIMEOUT

    played(tmp_path, play)


def test_a_guest_that_hangs_is_a_lost_connection(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        scene.guests[ID] = says(b"")
        for ask in (scene.set_time, scene.poweroff):
            with pytest.raises(Refusal, match="did not answer") as refused:
                await ask(seconds=1.3)
            assert refused.value.reason is Reason.CONNECTION_LOST

    played(tmp_path, play)


@pytest.mark.parametrize("reason", [Reason.NOT_FOUND, Reason.CONFLICT, Reason.WRONG_STATE])
def test_what_the_engine_says_of_a_machine_is_told(tmp_path: Path, reason: Reason) -> None:
    async def play(scene: Scene) -> None:
        scene.guests[ID] = Refusal(reason, "it is gone")
        with pytest.raises(Refusal) as refused:
            await scene.provision()
        assert refused.value.reason is reason

    played(tmp_path, play)


def test_a_disk_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        disk = {"state": "damaged", "bytes": 1, "text": "no ext4\x1b"}
        good = scene.guests[ID] = Good(disk=disk)
        with pytest.raises(Refusal, match="no ext4\\?") as refused:
            await scene.provision()
        assert refused.value.reason is Reason.DISK_DAMAGED
        assert good.ops == []

    played(tmp_path, play)


@pytest.mark.parametrize(
    ("timer", "wanted", "taken"),
    [
        (None, "right", True), (1000, "right", True), (700, "right", True), (1150, "right", True),
        (699, "right", False), (1151, "right", False), (0, "right", False),
        (699, "any", True), (5000, "any", True), (0, "any", False),
    ],
)  # fmt: skip
def test_a_guest_whose_kernel_misjudged_its_timer_is_refused(
    tmp_path: Path, timer: int | None, wanted: str, taken: bool
) -> None:
    async def play(scene: Scene) -> None:
        good = scene.guests[ID] = Good(timer=timer)
        if taken:
            await scene.provision(timer=wanted)
            return
        with pytest.raises(Refusal, match=f"it took {timer / 10:.0f} % of the rate") as refused:
            await scene.provision(timer=wanted)
        assert refused.value.facts == {"timer": str(timer)}
        assert good.ops == []

    played(tmp_path, play)


def test_another_version_is_one_clear_line_and_no_forgery(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        scene.guests[ID] = says(pack(Kind.HELLO, 0, {**HELLO, "versions": [2]}))
        with pytest.raises(Refusal, match="speaks version 2 .*image build") as refused:
            await scene.provision()
        assert refused.value.reason is Reason.BOOT_FAILED
        assert scene.noted("forgery-refused") == []

    played(tmp_path, play)


def test_a_refusal_of_the_guest_is_its_own_line(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        good = scene.guests[ID] = Good()
        good.refuses = "provision: no room"
        with pytest.raises(Refusal, match="no room"):
            await scene.provision()

    played(tmp_path, play)


def test_a_lost_stream_is_dialled_again_and_the_request_repeated(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        good = scene.guests[ID] = Good()
        good.ends_after = 0
        await scene.provision()
        assert (good.streams, good.ops) == (2, ["provision"])
        good.ends_after = 1
        await scene.set_time()
        assert good.ops == ["provision", "time"]

    played(tmp_path, play)


FORGED = {
    "garbage": os.urandom(4000),
    "an endless frame": (1 << 31).to_bytes(4, "little"),
    "a number skipped": pack(Kind.HELLO, 1, HELLO),
    "a reply first": pack(Kind.REPLY, 0, {"ok": True}),
    "unasked": pack(Kind.HELLO, 0, HELLO) + pack(Kind.REPLY, 1, {"ok": True, "now_ns": 1}),
    "no JSON": encode(Kind.HELLO, b"{"),
    "deep": encode(Kind.HELLO, b"[" * 60_000),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forgery_ends_that_stream_is_noted_and_harms_nobody(tmp_path: Path, name: str) -> None:
    async def play(scene: Scene) -> None:
        scene.guests[ID] = says(FORGED[name])
        scene.guests[OTHER] = Good()
        await scene.provision(OTHER)
        for _ in range(5):
            with pytest.raises(Refusal) as refused:
                await scene.provision()
            assert refused.value.reason is Reason.CONNECTION_LOST
        await soon("noted", lambda: scene.noted("forgery-refused"))
        assert len(scene.noted("forgery-refused")) == 1  # and not five
        assert abs((await scene.set_time(OTHER)).skew_ms) < 500

    played(tmp_path, play)


def test_forgeries_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "FORGED_S", 0.5)

    async def play(scene: Scene) -> None:
        scene.guests[ID] = says(FORGED["garbage"])

        async def forged() -> None:
            with pytest.raises(Refusal):
                await scene.provision()

        for _ in range(4):
            await forged()
        await asyncio.sleep(0.6)
        await forged()
        await soon("noted", lambda: len(scene.noted("forgery-refused")) == 2)
        assert [facts["count"] for facts in scene.noted("forgery-refused")] == [1, 4]
        assert scene.noted("forgery-refused")[0]["port"] == 5000

    played(tmp_path, play)


@pytest.mark.parametrize(
    "reply", [{"ok": True}, {"ok": 1, "now_ns": 1}, {"ok": True, "now_ns": -1}]
)
def test_a_reply_of_another_shape_is_a_forgery(tmp_path: Path, reply: dict[str, object]) -> None:
    async def play(scene: Scene) -> None:
        async def serve(sock: socket.socket) -> None:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, pack(Kind.HELLO, 0, HELLO))
            await loop.sock_recv(sock, 4096)
            await loop.sock_sendall(sock, pack(Kind.REPLY, 1, reply))
            assert await loop.sock_recv(sock, 4096) == b""  # the stream is ended

        scene.guests[ID] = serve
        with pytest.raises(Refusal) as refused:
            await scene.provision()
        assert refused.value.reason is Reason.CONNECTION_LOST
        await soon("noted", lambda: scene.noted("forgery-refused"))
        await asyncio.wait(scene.streams, timeout=5)

    played(tmp_path, play)


def test_floods_cost_no_memory_and_no_neighbour_its_time(tmp_path: Path) -> None:
    async def flood(sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, pack(Kind.HELLO, 0, HELLO))
        await loop.sock_recv(sock, 4096)
        number = 1
        while True:  # every one in turn, but only the first was asked for
            await loop.sock_sendall(sock, pack(Kind.REPLY, number, {"ok": True, "now_ns": 1}))
            number += 1

    async def dribble(sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for byte in pack(Kind.HELLO, 0, HELLO) + encode(2, b" " * 60_000):
            await loop.sock_sendall(sock, bytes([byte]))

    async def play(scene: Scene) -> None:
        scene.guests[OTHER] = Good()
        await scene.provision(OTHER)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        bad = [f"{n:032x}" for n in range(20)]
        for n, instance in enumerate(bad):
            scene.guests[instance] = flood if n % 2 else dribble
        asking = [scene.tasks.hold(_quiet(scene.provision(i, seconds=3)), name="p") for i in bad]
        for _ in range(5):
            began = time.monotonic()
            await scene.set_time(OTHER)
            assert time.monotonic() - began < 1.0
        await asyncio.wait(asking)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # KiB

    played(tmp_path, play)


async def _quiet(work: Awaitable[object]) -> None:
    try:
        await work
    except Refusal:
        pass


def test_a_jump_of_the_clock_reaches_every_guest_though_one_hangs(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        hanging, good = Good(), Good()
        scene.guests = {ID: hanging, OTHER: good}
        await scene.provision(ID)
        await scene.provision(OTHER)
        hanging.frozen.clear()
        for by in (HOURS_4, -2 * HOURS_4):
            count = len(good.set_at)
            jumped = time.monotonic()
            scene.clocks.wall_off += by
            await soon("the time was set", lambda: len(good.set_at) > count)  # noqa: B023
            assert good.set_at[count] - jumped < 2.0
            assert abs(good.off_ns - scene.clocks.wall_off) < 10**9
        hanging.frozen.set()

    played(tmp_path, play)


def test_each_minute_every_guest_gets_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "EVERY_S", 0.2)
    monkeypatch.setattr(adapter, "LOOK_S", 0.05)

    async def play(scene: Scene) -> None:
        good = scene.guests[ID] = Good()
        await scene.provision()
        await soon("three times", lambda: good.ops.count("time") >= 3)
        ats = [asked["at_ns"] for asked in good.asked]
        assert ats == sorted(ats) and len(set(ats)) == len(ats)

    played(tmp_path, play)


def test_a_boot_that_is_over_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "EVERY_S", 0.1)
    monkeypatch.setattr(adapter, "LOOK_S", 0.05)

    async def play(scene: Scene) -> None:
        good = scene.guests[ID] = Good()
        good.ends_after = 1
        await scene.provision()
        scene.guests[ID] = Refusal(Reason.WRONG_STATE, "the launch is exited")
        await soon("dropped", lambda: scene.channel._kept.boots == {})
        assert scene.channel._links == {}

    played(tmp_path, play)


def test_the_time_of_a_boot_that_ended_unseen_does_not_disturb_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine is killed and started again; the minute passes while its guest still boots."""
    monkeypatch.setattr(adapter, "EVERY_S", 0.1)
    monkeypatch.setattr(adapter, "LOOK_S", 0.02)

    async def play(scene: Scene) -> None:
        scene.guests[ID] = Good()
        await scene.provision()
        slow = scene.guests[ID] = Good()
        slow.frozen.clear()
        booting = scene.tasks.hold(scene.provision(boot=2), name="booting")
        await soon("the old one is dropped", lambda: scene.channel._kept.boots == {})
        slow.frozen.set()
        assert (await booting).version
        assert scene.channel._kept.boots == {ID: 2}

    played(tmp_path, play)


def test_after_a_restart_the_guests_are_kept_on_time(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        good = scene.guests[ID] = Good()
        await scene.provision()
        await scene.channel.stop()
        await scene.tasks.cancel()
        scene.channel = scene.made()
        await scene.channel.start()
        await soon("set again", lambda: "time" in good.ops)
        await soon("asked for its hook", lambda: "hook" in good.ops)
        assert good.streams == 3

    played(tmp_path, play)


def test_a_hook_that_ended_while_nobody_listened_is_noted(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        good = scene.guests[ID] = Good()
        await scene.provision()
        await scene.channel.stop()
        await scene.tasks.cancel()
        good.hook = {"state": "failed", "line": "last words"}
        scene.channel = scene.made()
        await scene.channel.start()
        await soon("noted", lambda: scene.noted("hook-failed"))
        assert scene.noted("hook-failed") == [{"boot": 1, "claim": "last words"}]

    played(tmp_path, play)


def test_a_guest_of_another_boot_is_not_spoken_to(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        first = scene.guests[ID] = Good()
        await scene.provision(boot=1)
        first.frozen.clear()
        waiting = scene.tasks.hold(_reason(scene.set_time(boot=1)), name="old")
        await soon("it is asked", lambda: scene.channel._links[ID]._turn.locked())
        second = scene.guests[ID] = Good()
        await scene.provision(boot=2)
        assert second.ops == ["provision"]
        assert await asyncio.wait_for(waiting, 5) is Reason.CONFLICT
        first.frozen.set()

    played(tmp_path, play)


async def _reason(work: Awaitable[object]) -> Reason | None:
    try:
        await work
    except Refusal as refusal:
        return refusal.reason
    return None


def test_who_waits_behind_another_has_a_deadline_of_its_own(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        scene.guests[ID] = says(b"")
        waiting = scene.tasks.hold(_quiet(scene.provision(seconds=60)), name="provision")
        await soon("it waits", lambda: scene.dialled)
        began = time.monotonic()
        with pytest.raises(Refusal) as refused:
            await scene.set_time(seconds=1.2)
        assert refused.value.reason is Reason.CONNECTION_LOST
        assert time.monotonic() - began < 3
        waiting.cancel()
        await asyncio.wait([waiting])

    played(tmp_path, play)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 13, 20, 30])
def test_a_cancelled_call_leaves_nothing_behind(tmp_path: Path, steps: int) -> None:
    async def play(scene: Scene) -> None:
        scene.guests[ID] = Good()
        asking = scene.tasks.hold(scene.provision(), name="provision")
        for _ in range(steps):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        assert (await scene.provision()).version == "1.2"

    played(tmp_path, play)


def test_poweroff_is_asked_and_the_guest_forgotten(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        good = scene.guests[ID] = Good()
        await scene.provision()
        await scene.poweroff()
        assert good.ops == ["provision", "poweroff"]
        assert scene.channel._kept.boots == {} and scene.channel._links == {}

    played(tmp_path, play)
