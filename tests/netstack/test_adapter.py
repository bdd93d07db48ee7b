"""The service and its workers: what either knows outlives the other."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.workers import ID, OTHER, WAIT_S, NetScene, WorkerThread, policy, soon

from agent_box.bus.errors import Reason, Refusal
from agent_box.netstack.contract import Packets


def played(root: Path, play: Callable[[NetScene, WorkerThread], Awaitable[None]]) -> None:
    async def main() -> None:
        scene = NetScene(root)
        worker = scene.worker()
        try:
            async with scene:
                await play(scene, worker)
        finally:
            worker.close()

    asyncio.run(main())


def test_a_worker_gets_its_policy_and_its_guest(tmp_path: Path) -> None:
    async def play(scene: NetScene, worker: WorkerThread) -> None:
        applied = await scene.up(boot=7)
        assert (applied.generation, applied.revoked) == (1, 0)
        assert worker.plane.policy == policy()
        await soon("linked", lambda: worker.plane.linked)
        assert scene.dialled == [(ID, 7, 5003)]
        assert (await scene.up(boot=7)).generation == 1 and len(worker.planes) == 1
        assert (await scene.counters()).denied == 3

    played(tmp_path, play)


def test_without_a_worker_it_is_said(tmp_path: Path) -> None:
    async def main() -> None:
        async with NetScene(tmp_path) as scene:
            from support.workers import call

            from agent_box.netstack.contract import InstanceUp

            request = InstanceUp(instance=OTHER, name="o", boot=1, policy=policy())
            with pytest.raises(Refusal, match="network worker") as refused:
                await scene.net.instance_up(request, call(1.3))
            assert refused.value.reason is Reason.UNAVAILABLE
            with pytest.raises(Refusal) as refused:
                await scene.forward(0, 80, instance=OTHER)
            assert refused.value.reason in (Reason.WRONG_STATE, Reason.UNAVAILABLE)

    asyncio.run(main())


def test_it_dials_until_the_guest_answers_and_again_when_it_is_lost(tmp_path: Path) -> None:
    async def play(scene: NetScene, worker: WorkerThread) -> None:
        scene.guest = False
        await scene.up()
        await soon("tried", lambda: len(scene.dialled) >= 3)
        assert not worker.plane.linked
        scene.guest = True
        await soon("linked", lambda: worker.plane.linked)
        scene.guests[-1].close()
        await soon("dialled anew", lambda: len(scene.guests) == 2 and worker.plane.linked)

    played(tmp_path, play)


def test_a_restart_of_the_service_changes_nothing(tmp_path: Path) -> None:
    async def play(scene: NetScene, worker: WorkerThread) -> None:
        await scene.up()
        await soon("linked", lambda: worker.plane.linked)
        made = await scene.forward(0, 3000)
        await scene.restart()
        await soon("connected", lambda: scene.net._held[ID].forwards == [made])
        assert len(worker.planes) == 1 and worker.plane.linked and len(scene.guests) == 1
        assert (await scene.apply(policy(2))).generation == 2
        await soon("noted", lambda: len(scene.noted("netstack-started")) == 2)
        with socket.create_connection(("127.0.0.1", made.host_port), WAIT_S):
            pass

    played(tmp_path, play)


def test_what_was_denied_while_nobody_was_there_is_told_once(tmp_path: Path) -> None:
    async def play(scene: NetScene, worker: WorkerThread) -> None:
        await scene.up()
        await scene.net.stop()
        for number in range(20):
            worker.deny(f"r{number}", number)
        scene.registry_away = True
        scene.net = scene.made()
        await scene.net.start()
        worker.deny("last")
        await scene.restart()
        scene.registry_away = False
        rules = [f"r{n}" for n in range(20)] + ["last"]
        await soon("all are told", lambda: len(scene.noted("flow-denied")) == 21)
        told = scene.noted("flow-denied")
        assert [facts["rule"] for facts in told] == rules
        assert told[3] == {
            "rule": "r3", "why": "w", "name": "x.y", "port": 443, "protocol": "tcp", "count": 3,
        }  # fmt: skip
        await soon("all are acknowledged", lambda: not worker._worker._notices)

    played(tmp_path, play)


def test_too_many_denials_are_counted_and_the_newest_kept(tmp_path: Path) -> None:
    async def play(scene: NetScene, worker: WorkerThread) -> None:
        await scene.up()
        await scene.net.stop()
        worker.do(
            lambda: (
                [worker._worker.notice("flow-denied", {"rule": f"r{n}"}) for n in range(2000)]
                and None
            )
        )
        assert len(worker._worker._notices) == 512
        await scene.restart()
        await soon("told", lambda: len(scene.noted("flow-denied")) == 512)
        worker.deny("after")
        await soon("told", lambda: scene.noted("denials-dropped") == [{"count": 1488}])

    played(tmp_path, play)


def test_a_worker_that_was_started_anew_is_told_everything_again(tmp_path: Path) -> None:
    async def play(scene: NetScene, worker: WorkerThread) -> None:
        await scene.up()
        await scene.apply(policy(5))
        made = await scene.forward(0, 3000)
        worker.kill()
        worker.begin()
        await soon("it has its policy", lambda: len(worker.planes) == 2)
        await soon("it has its guest", lambda: worker.plane.linked)
        assert worker.plane.policy == policy(5)
        await soon("it listens", lambda: len(worker.plane.listeners) >= 1)
        with socket.create_connection(("127.0.0.1", made.host_port), WAIT_S):
            pass
        await soon("noted", lambda: scene.noted("worker-started") == [{"restarts": 1}])

    played(tmp_path, play)


def test_an_older_policy_is_refused_and_a_newer_one_tells_what_it_cut(tmp_path: Path) -> None:
    async def play(scene: NetScene, worker: WorkerThread) -> None:
        await scene.up(told=policy(3))
        worker.plane.revokes = 2
        assert (await scene.apply(policy(4))).revoked == 2
        await soon("noted", lambda: scene.noted("policy-applied"))
        assert scene.noted("policy-applied") == [{"generation": 4, "revoked": 2}]
        with pytest.raises(Refusal, match="generation 4 is in force"):
            await scene.apply(policy(3))
        assert (await scene.apply(policy(4))).revoked == 0
        assert worker.plane.policy == policy(4)

    played(tmp_path, play)


def test_a_policy_that_cannot_be_enforced_reaches_no_worker(tmp_path: Path) -> None:
    async def play(scene: NetScene, worker: WorkerThread) -> None:
        bad = msgspec.structs.replace(policy(), mode="open")
        with pytest.raises(Refusal, match="allow_open"):
            await scene.up(told=bad)
        assert worker.planes == []

    played(tmp_path, play)


def test_down_ends_everything_and_another_boot_begins_anew(tmp_path: Path) -> None:
    async def play(scene: NetScene, worker: WorkerThread) -> None:
        await scene.up()
        made = await scene.forward(0, 3000)
        await scene.down()
        assert worker.plane.closed
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", made.host_port), WAIT_S)
        await soon("noted", lambda: len(scene.noted("forward-closed")) == 1)
        await scene.down()
        await scene.up(boot=2)
        assert len(worker.planes) == 2
        await soon("linked", lambda: worker.plane.linked)
        assert scene.dialled[-1] == (ID, 2, 5003)

    played(tmp_path, play)


# ---------------------------------------------------------------------- forwards


def test_a_forward_is_on_both_loopback_addresses_and_the_same_again_is_one(
    tmp_path: Path,
) -> None:
    async def play(scene: NetScene, worker: WorkerThread) -> None:
        await scene.up()
        made = await scene.forward(0, 3000)
        assert made.host_port > 0 and not made.public
        assert await scene.forward(0, 3000) == made == await scene.forward(made.host_port, 3000)
        assert {port for _, port in worker.plane.listeners} == {3000}
        for listener, _ in worker.plane.listeners:
            address = listener.getsockname()
            assert address[0] in ("127.0.0.1", "::1") and address[1] == made.host_port
        await scene.unforward(made.host_port)
        assert worker.plane.listeners == []
        with pytest.raises(Refusal) as refused:
            await scene.unforward(made.host_port)
        assert refused.value.reason is Reason.NOT_FOUND
        await soon("noted", lambda: scene.noted("forward-opened") and scene.noted("forward-closed"))

    played(tmp_path, play)


def test_a_taken_port_names_who_has_it(tmp_path: Path) -> None:
    async def play(scene: NetScene, worker: WorkerThread) -> None:
        other = scene.worker(OTHER)
        try:
            await scene.up()
            await scene.up(OTHER)
            made = await scene.forward(0, 3000)
            with pytest.raises(Refusal, match="it leads to work:3000") as refused:
                await scene.forward(made.host_port, 4000, instance=OTHER)
            assert refused.value.reason is Reason.CONFLICT
            assert refused.value.facts["holder"] == "work"
            with socket.create_server(("127.0.0.1", 0)) as taken:
                port = taken.getsockname()[1]
                with pytest.raises(Refusal, match=f"127.0.0.1:{port} is taken") as refused:
                    await scene.forward(port, 3000)
                assert refused.value.facts == {"port": str(port), "address": "127.0.0.1"}
        finally:
            other.close()

    played(tmp_path, play)


@pytest.mark.parametrize(
    ("address", "host_port", "guest_port"),
    [("192.0.2.1", 0, 80), ("x", 0, 80), ("127.0.0.1", 70000, 80), ("127.0.0.1", 0, 0)],
)
def test_what_is_no_forward(tmp_path: Path, address: str, host_port: int, guest_port: int) -> None:
    async def play(scene: NetScene, _worker: WorkerThread) -> None:
        await scene.up()
        with pytest.raises(Refusal) as refused:
            await scene.forward(host_port, guest_port, address)
        assert refused.value.reason is Reason.BAD_REQUEST

    played(tmp_path, play)


# ---------------------------------------------------------------------- captures


def test_a_capture_shows_packets_and_ends_at_its_count(tmp_path: Path) -> None:
    async def play(scene: NetScene, worker: WorkerThread) -> None:
        await scene.up()
        got: list[bytes] = []

        async def send(item: Packets) -> None:
            got.append(item.pcap)

        task = scene.tasks.hold(scene.capture(send, 3, snap=40), name="capture")
        await soon("it began", lambda: worker.plane.sink is not None)
        sink = worker.plane.sink
        assert sink is not None
        for number in range(5):
            worker.do(lambda n=number: sink(bytes([0x45]) + bytes([n]) * 99, 1.5) and None)
        ended = await asyncio.wait_for(task, WAIT_S)
        assert (ended.packets, ended.dropped) == (3, 0)
        data = b"".join(got)
        assert struct.unpack_from("<IIII", data) == (1, 500_000, 40, 100)
        assert len(data) == 3 * (16 + 40)
        worker.do(lambda: sink(b"x", 1.0) and None)
        assert worker.plane.sink is None  # nobody looks any more

    played(tmp_path, play)


def test_a_capture_that_is_not_read_loses_packets_and_counts_them(tmp_path: Path) -> None:
    async def play(scene: NetScene, worker: WorkerThread) -> None:
        await scene.up()
        stuck, go = asyncio.Event(), asyncio.Event()
        seen = 0

        async def send(item: Packets) -> None:
            nonlocal seen
            stuck.set()
            await go.wait()
            seen += 1

        task = scene.tasks.hold(scene.capture(send, None), name="capture")
        await soon("it began", lambda: worker.plane.sink is not None)
        sink: Any = worker.plane.sink
        worker.do(lambda: sink(bytes(1000), 1.0) and None)
        await asyncio.wait_for(stuck.wait(), WAIT_S)
        taken: list[bool] = []
        worker.do(lambda: taken.extend(sink(bytes(60000), 1.0) for _ in range(500)))
        assert taken[0] and not taken[-1]
        go.set()
        await soon("the rest came", lambda: seen >= 2)
        worker.do(lambda: sink(bytes(10), 1.0) and None)
        await scene.down()  # ends it
        ended = await asyncio.wait_for(task, WAIT_S)
        assert ended.dropped == taken.count(False)
        assert ended.packets == 2 + taken.count(True)

    played(tmp_path, play)


# ---------------------------------------------------------------------- the worker's manners


def test_the_newest_controller_wins(tmp_path: Path) -> None:
    async def play(scene: NetScene, worker: WorkerThread) -> None:
        await scene.up()
        late = socket.socket(socket.AF_UNIX)
        late.settimeout(WAIT_S)
        late.connect(str(scene.rooms / ID / "ctl"))
        assert late.recv(1)  # its hello
        late.close()
        assert (await scene.apply(policy(2))).generation == 2

    played(tmp_path, play)


@pytest.mark.parametrize(
    "said",
    [b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1", b"\x04\0\0\0" + b"\x81\xa2op", b"\0\0\0\0", b""],
)
def test_what_is_no_message_ends_the_connection_and_nothing_else(
    tmp_path: Path, said: bytes
) -> None:
    async def play(scene: NetScene, worker: WorkerThread) -> None:
        await scene.up()
        bad = socket.socket(socket.AF_UNIX)
        bad.settimeout(WAIT_S)
        bad.connect(str(scene.rooms / ID / "ctl"))
        bad.send(said + b"x" * 64) if said else bad.shutdown(socket.SHUT_WR)
        while bad.recv(65536):
            continue
        bad.close()
        assert (await scene.apply(policy(2))).generation == 2
        assert len(worker.planes) == 1

    played(tmp_path, play)


def test_a_link_without_its_descriptor_is_refused(tmp_path: Path) -> None:
    async def play(scene: NetScene, worker: WorkerThread) -> None:
        from agent_box.netstack import control

        await scene.up()
        bad = socket.socket(socket.AF_UNIX)
        bad.settimeout(WAIT_S)
        bad.connect(str(scene.rooms / ID / "ctl"))
        bad.send(control.frame(control.Link(n=1)))
        while bad.recv(65536):
            continue
        bad.close()
        assert (await scene.apply(policy(2))).generation == 2

    played(tmp_path, play)
