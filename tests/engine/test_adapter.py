"""The engine between a helper that comes and goes and a registry that takes notes."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fakehelper import ENDED, FakeHelper, state

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.handover import HandoverClient
from agent_box.bus.schema import Empty
from agent_box.engine import adapter, chosen
from agent_box.engine.adapter import Engine
from agent_box.engine.contract import Boot, Create, Dial, Images, Instance, Vmm
from agent_box.engine.launches import launch_id
from agent_box.helper.wire import Refused
from agent_box.process.log import Log
from agent_box.process.tasks import TaskSet

ID = "a" * 32
OTHER = "b" * 32
HEX = "0" * 64
IMAGES = Images(kernel=HEX, initramfs=HEX, variant=HEX, guest=HEX, harness=None)
CALL: Any = None


class Scene:
    """An engine, a helper that does nothing, and what was noted."""

    def __init__(self, root: Path, config: str = '[engine]\naccel = "tcg"\n') -> None:
        self.root = root
        for role in ("channel", "netstack"):
            (root / "dial" / role).mkdir(parents=True, exist_ok=True)
        self.config = root / "config.toml"
        self.config.write_text("version = 1\n" + config)
        self.helper = FakeHelper(root)
        self.notes: dict[bytes, Any] = {}  # as the registry takes them: each id once
        self.registry_away = 0
        self.failed: list[str] = []
        self.tasks = TaskSet(Log(service="test"), lambda name, _: self.failed.append(name))
        self.engine = self.made()

    def made(self) -> Engine:
        self.own = TaskSet(Log(service="test"), lambda name, _: self.failed.append(name))
        context: Any = SimpleNamespace(
            config=self.config,
            epoch=os.urandom(16),
            paths=SimpleNamespace(
                runtime=self.root,
                helper_sock=self.helper.sock,
                helper_key=self.helper.key_file,
                data=lambda _: self.root,
            ),
            tasks=self.own,
            log=Log(service="test"),
            client=lambda _: SimpleNamespace(call=self._noted),
        )
        return Engine(context)

    async def _noted(self, method: str, note: Any, *, deadline_s: float) -> None:
        assert method == "note" and deadline_s > 0
        if self.registry_away:
            self.registry_away -= 1
            raise Refusal(Reason.UNAVAILABLE, "the registry starts again")
        self.notes.setdefault(note.event_id, note)

    def kinds(self, instance: str = ID) -> list[str]:
        return [note.kind for note in self.notes.values() if note.instance == instance]

    async def kill(self) -> None:
        """As kill -9: nothing of it says good-bye."""
        await self.own.cancel()
        for server in self.engine._dials:
            server.close()
        self.engine._stopping = True
        self.engine._helper.close()

    async def again(self) -> None:
        await self.kill()
        self.engine = self.made()
        await self.engine.start()

    async def boot(self, boot: int = 1, instance: str = ID, **more: Any) -> Any:
        fields = {"cpus": 1, "memory_bytes": 256 << 20, "images": IMAGES, **more}
        return await self.engine.boot(Boot(instance=instance, boot=boot, **fields), CALL)

    async def create(self, instance: str = ID, disk_bytes: int = 1 << 30) -> None:
        await self.engine.create(Create(instance=instance, disk_bytes=disk_bytes), CALL)


def played(root: Path, play: Callable[[Scene], Awaitable[None]], **more: Any) -> None:
    async def main() -> None:
        complaints: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        before = set(os.listdir("/proc/self/fd"))
        scene = Scene(root, **more)
        scene.helper.start()
        await scene.engine.start()
        await play(scene)
        await scene.engine.stop()
        await scene.own.cancel()
        await scene.helper.stop()
        await scene.tasks.cancel()
        while KEPT:
            KEPT.pop().close()
        await asyncio.sleep(0)
        assert scene.failed == [] and complaints == []
        assert set(os.listdir("/proc/self/fd")) - before == set()

    asyncio.run(main())


async def soon(what: str, look: Callable[[], object], seconds: float = 10) -> None:
    """Nothing tells when the engine's tasks did what they do unasked."""
    until = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < until, what
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "LOOK_S", 0.05)
    monkeypatch.setattr(adapter, "AGAIN_S", (0.02, 0.05, 0.1, 0.2))


def test_a_full_disk_of_the_host_freezes_a_machine_and_is_told_once(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        await s.create()
        await s.boot()
        for times in (1, 2):
            s.helper.full = True
            s.helper.status[ID] = "io-error"
            for _ in range(3):
                (seen,) = (await s.engine.every(Empty(), CALL)).instances
                assert seen.state == "paused"
            await soon("it is noted", lambda: s.kinds().count("vmm-stalled") == times)  # noqa: B023
            with pytest.raises(Refusal, match="disk is full") as refused:
                await s.engine.resume(Vmm(instance=ID, boot=1), CALL)
            assert refused.value.reason is Reason.DISK_FULL
            s.helper.full = False
            assert (await s.engine.resume(Vmm(instance=ID, boot=1), CALL)).state == "running"
        assert s.kinds() == ["vmm-started", "vmm-stalled", "vmm-stalled"]

    played(tmp_path, play)


def test_the_life_of_a_machine(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        await s.create()
        assert (await s.boot()).state == "running"
        assert (await s.engine.pause(Vmm(instance=ID, boot=1), CALL)).state == "paused"
        assert (await s.engine.pause(Vmm(instance=ID, boot=1), CALL)).state == "paused"
        assert (await s.engine.query(Instance(instance=ID), CALL)).state == "paused"
        assert (await s.engine.resume(Vmm(instance=ID, boot=1), CALL)).state == "running"
        killed = await s.engine.kill(Vmm(instance=ID, boot=1), CALL)
        assert (killed.state, killed.exit_signal, killed.boot) == ("stopped", 9, 1)
        await soon("the end is noted", lambda: "vmm-ended" in s.kinds())
        assert s.kinds() == ["vmm-started", "vmm-ended"]
        assert next(iter(s.notes.values())).facts == {"boot": 1, "pid": 77}
        await s.engine.delete(Instance(instance=ID), CALL)
        await s.engine.delete(Instance(instance=ID), CALL)
        assert (await s.engine.every(Empty(), CALL)).instances == []

    played(tmp_path, play)


def test_what_setup_found_counts_where_the_config_says_nothing(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        chosen.write(chosen.file(s.engine._context.paths), "kvm")
        assert s.engine._accel() == "kvm"
        s.config.write_text('version = 1\n[engine]\naccel = "tcg"\n')
        assert s.engine._accel() == "tcg"

    played(tmp_path, play, config="")


def test_where_firecracker_is_configured_qemu_is_not_taken_instead(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        await s.create()
        with pytest.raises(Refusal, match="firecracker") as refused:
            await s.boot()
        assert refused.value.reason is Reason.ENGINE_UNAVAILABLE
        assert refused.value.facts == {"gap": "engine-missing"}
        assert "launch" not in s.helper.asked
        await s.helper.stop()
        probed = await s.engine.probe(Empty(), CALL)
        assert probed.engine == "firecracker"
        assert [gap.name for gap in probed.gaps] == ["engine-missing", "helper-missing"]

    config = '[defaults]\nengine = "firecracker"\n[engine]\naccel = "tcg"\n'
    played(tmp_path, play, config=config)


def test_without_an_accelerator_no_boot_is_tried(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        await s.create()
        with pytest.raises(Refusal, match="setup") as refused:
            await s.boot()
        assert refused.value.facts == {"gap": "engine-accel"}
        assert "launch" not in s.helper.asked

    played(tmp_path, play, config="")


@pytest.mark.parametrize(
    "more", [{"cpus": 0}, {"memory_bytes": 0}, {"memory_bytes": 1 << 60}, {"boot": 0}, {"boot": -1}]
)
def test_sizes_that_are_none_are_the_callers_mistake(tmp_path: Path, more: dict[str, int]) -> None:
    async def play(s: Scene) -> None:
        await s.create()
        with pytest.raises(Refusal) as refused:
            await s.boot(**more)
        assert refused.value.reason is Reason.BAD_REQUEST
        with pytest.raises(Refusal) as refused:
            await s.create(OTHER, disk_bytes=5)
        assert refused.value.reason is Reason.BAD_REQUEST

    played(tmp_path, play)


def test_the_same_boot_again_is_the_same_boot_and_noted_once(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        await s.create()
        await s.boot()
        await s.boot()
        s.helper.change(ID, "exited", exit=ENDED)
        await soon("the end is noted", lambda: "vmm-ended" in s.kinds())
        assert (await s.boot()).state == "stopped"
        await s.engine._notes.flush(5)
        assert s.kinds() == ["vmm-started", "vmm-ended"]
        assert (await s.boot(2)).state == "running"
        await soon("the next is noted", lambda: len(s.kinds()) == 3)

    played(tmp_path, play)


def test_a_new_engine_adopts_and_each_end_is_noted_once(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        for instance in (ID, OTHER):
            await s.create(instance)
            await s.boot(instance=instance)
        await soon("both started", lambda: len(s.notes) == 2)
        await s.again()
        await soon("adopted", lambda: len(s.notes) == 4)
        await s.kill()
        s.helper.change(ID, "exited", exit=ENDED)  # while no engine is there
        for _ in range(3):
            await s.again()
            await soon("adopted again", lambda: s.engine._watched)
            await s.engine._notes.flush(5)
        s.helper.change(OTHER, "exited", exit=ENDED)
        await soon("noted", lambda: "vmm-ended" in s.kinds(OTHER))
        await s.again()
        await soon("asked", lambda: s.helper.asked[-1] == "list")
        await s.engine._notes.flush(5)
        assert s.kinds(ID) == ["vmm-started", "vmm-adopted", "vmm-ended"]
        assert s.kinds(OTHER) == ["vmm-started", *["vmm-adopted"] * 4, "vmm-ended"]

    played(tmp_path, play)


def test_notes_wait_for_a_registry_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(s: Scene) -> None:
        s.engine._notes._waits = (0.01,)
        s.registry_away = 20
        await s.create()
        await s.boot()
        await s.engine.kill(Vmm(instance=ID, boot=1), CALL)
        await soon("noted in order", lambda: s.kinds() == ["vmm-started", "vmm-ended"])

    played(tmp_path, play)


def test_a_device_that_is_gone_is_noted_once(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        await s.create()
        await s.boot()
        await soon("it watches", lambda: "watch" in s.helper.asked)
        for _ in range(3):
            s.helper.change(ID, "running", device=False)
            await asyncio.sleep(0.05)
        s.helper.change(ID, "exited", exit=ENDED)
        await soon("noted", lambda: "vmm-ended" in s.kinds())
        assert s.kinds() == ["vmm-started", "companion-ended", "vmm-ended"]

    played(tmp_path, play)


@pytest.mark.parametrize(
    "name", ["allocate", "launch", "monitor", "list", "kill", "release", "dial"]
)
def test_a_helper_that_starts_again_in_the_middle_is_asked_again(tmp_path: Path, name: str) -> None:
    async def play(s: Scene) -> None:
        s.helper.on_dial = _answers_ok
        s.helper.drop = {name}
        await s.create()
        assert (await s.boot()).state in ("running", "unreachable")
        assert (await s.engine.pause(Vmm(instance=ID, boot=1), CALL)).state == "paused"
        client = HandoverClient(s.root / "dial" / "channel" / "sock")
        request = Dial(instance=ID, boot=1, port=5000, deadline_ms=5000)
        os.close(await client.ask(request, deadline_s=6))
        client.close()
        assert (await s.engine.kill(Vmm(instance=ID, boot=1), CALL)).state == "stopped"
        await s.engine.delete(Instance(instance=ID), CALL)
        assert s.helper.drop == set()
        await soon("noted", lambda: "helper-back" in s.kinds(None))  # type: ignore[arg-type]
        assert "helper-lost" in s.kinds(None)  # type: ignore[arg-type]

    played(tmp_path, play)


def test_a_helper_that_is_gone_is_said_so(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        await s.create()
        await s.helper.stop()
        with pytest.raises(Refusal) as refused:
            await s.boot()
        assert refused.value.reason is Reason.HELPER_UNAVAILABLE
        with pytest.raises(Refusal) as refused:
            await s.engine.query(Instance(instance=ID), CALL)
        assert refused.value.reason is Reason.STATE_UNKNOWN
        probed = await s.engine.probe(Empty(), CALL)
        assert [gap.name for gap in probed.gaps] == ["helper-missing"]
        s.helper.start()
        assert (await s.boot()).state == "running"

    played(tmp_path, play)


def test_a_helper_that_hangs_makes_the_state_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "SEEN_S", 0.2)

    async def play(s: Scene) -> None:
        s.helper.silent = {"list"}
        began = time.monotonic()
        with pytest.raises(Refusal) as refused:
            await s.engine.every(Empty(), CALL)
        assert refused.value.reason is Reason.STATE_UNKNOWN
        assert time.monotonic() - began < 3

    played(tmp_path, play)


def test_ten_stopped_machines_do_not_delay_list(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        ids = [f"{n:032x}" for n in range(12)]
        for n, instance in enumerate(ids):
            await s.create(instance)
            await s.boot(instance=instance)
            s.helper.status[instance] = "silent" if n < 10 else "running"
        for _ in range(3):
            began = time.monotonic()
            seen = (await s.engine.every(Empty(), CALL)).instances
            assert time.monotonic() - began < 1.0
            assert [o.state for o in seen] == ["unreachable"] * 10 + ["running"] * 2
        began = time.monotonic()
        several = [s.engine.every(Empty(), CALL) for _ in range(5)]
        for observed in await asyncio.gather(*several):
            assert [o.state for o in observed.instances][10:] == ["running"] * 2
        assert time.monotonic() - began < 1.5

    played(tmp_path, play)


def test_a_monitor_has_one_client_at_a_time(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        await s.create()
        await s.boot()
        vmm = Vmm(instance=ID, boot=1)
        await asyncio.gather(
            *(s.engine.query(Instance(instance=ID), CALL) for _ in range(8)),
            *(s.engine.pause(vmm, CALL) for _ in range(4)),
            *(s.engine.resume(vmm, CALL) for _ in range(4)),
        )
        assert s.helper.monitors_most == 1
        assert len(s.engine._asking) == 0  # no lock outlives who wanted it

    played(tmp_path, play)


def test_another_boot_is_a_conflict_and_one_that_ended_the_wrong_state(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        await s.create()
        await s.boot(3)
        for change in (s.engine.pause, s.engine.resume, s.engine.kill):
            with pytest.raises(Refusal) as refused:
                await change(Vmm(instance=ID, boot=2), CALL)
            assert refused.value.reason is Reason.CONFLICT
        s.helper.change(ID, "exited", exit=ENDED)
        with pytest.raises(Refusal) as refused:
            await s.engine.pause(Vmm(instance=ID, boot=3), CALL)
        assert refused.value.reason is Reason.WRONG_STATE
        with pytest.raises(Refusal) as refused:
            await s.engine.query(Instance(instance=OTHER), CALL)
        assert refused.value.reason is Reason.NOT_FOUND

    played(tmp_path, play)


def _answers_ok(sock: socket.socket) -> None:
    sock.send(b"OK 1\nthe guest's")
    KEPT.append(sock)


def _silent(sock: socket.socket) -> None:
    KEPT.append(sock)


KEPT: list[socket.socket] = []


async def dialled(s: Scene, role: str, port: int, *, boot: int = 1, ms: int = 2000) -> int:
    client = HandoverClient(s.root / "dial" / role / "sock")
    try:
        request = Dial(instance=ID, boot=boot, port=port, deadline_ms=ms)
        return await client.ask(request, deadline_s=10)
    finally:
        client.close()


def test_streams_are_dialled_for_whom_they_are(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        s.helper.on_dial = _answers_ok
        await s.create()
        await s.boot()
        for role, port in (("channel", 5000), ("channel", 5005), ("netstack", 5003)):
            with socket.socket(fileno=await dialled(s, role, port)) as stream:
                stream.setblocking(True)
                assert stream.recv(100) == b"the guest's"
        for role, port in (("channel", 5003), ("netstack", 5000), ("channel", 22), ("channel", -1)):
            with pytest.raises(Refusal) as refused:
                await dialled(s, role, port)
            assert refused.value.reason is Reason.DENIED
        with pytest.raises(Refusal) as refused:
            await dialled(s, "channel", 5000, boot=2)
        assert refused.value.reason is Reason.CONFLICT

    played(tmp_path, play)


def test_nobody_there_and_nobody_yet_are_told_apart(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        await s.create()
        await s.boot()
        with pytest.raises(Refusal) as refused:
            await dialled(s, "channel", 5000)
        assert refused.value.facts == {"dial": "refused"}
        s.helper.on_dial = _silent
        with pytest.raises(Refusal) as refused:
            await dialled(s, "channel", 5000, ms=50)
        assert refused.value.facts == {"dial": "no-driver"}

    played(tmp_path, play)


def test_who_stops_waiting_leaves_no_stream(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        s.helper.on_dial = _silent
        await s.create()
        await s.boot()
        for steps in (1, 3, 10, 30):
            asking = s.tasks.hold(dialled(s, "channel", 5000, ms=60_000), name="dial")
            for _ in range(steps):
                await asyncio.sleep(0.001)
            asking.cancel()
            await asyncio.wait([asking])
        await asyncio.sleep(0.1)
        for sock in KEPT:
            assert await _ends(sock)
            sock.close()
        KEPT.clear()

    played(tmp_path, play)


async def _ends(sock: socket.socket) -> bool:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(5):
        while await loop.sock_recv(sock, 100):
            pass
    return True


def test_what_the_helper_refuses_is_told(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        await s.create()
        s.helper.refuses["launch"] = Refused("image_corrupt", HEX)
        with pytest.raises(Refusal) as refused:
            await s.boot()
        assert (refused.value.exit, refused.value.facts) == (3, {"image": HEX})

    played(tmp_path, play)


def test_what_another_made_is_listed_too(tmp_path: Path) -> None:
    async def play(s: Scene) -> None:
        for n in range(130):
            instance = f"{n:032x}"
            s.helper.states[instance] = state(instance, "exited", launch_id(instance, n + 1))
        s.helper.states[ID] = state(ID, "exited", "f" * 32)
        seen = (await s.engine.every(Empty(), CALL)).instances
        assert [o.boot for o in seen] == [*range(1, 131), None]

    played(tmp_path, play)
