"""Boots that come and go: what is over is served no longer, whatever goes wrong meanwhile."""

from __future__ import annotations

import asyncio
import socket

import pytest
from support.brokerscene import ID, OTHER, Client, Scene, run
from support.upstreams import App

from agent_box.bus.errors import Reason, Refusal


async def up(scene: Scene) -> App:
    made = await App().start(scene.authority.server())
    scene.closing(made.stop)
    scene.bind("api", made.port)
    await scene.up()
    return made


def test_a_boot_that_a_full_disk_remembers_is_served_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(instance: str) -> None:
        raise Refusal(Reason.DISK_FULL, "the disk is full")

    async def play(scene: Scene) -> None:
        upstream = await up(scene)
        client = Client(*await scene.connect())
        headers = scene.headers("api")
        assert (await client.ask("POST", "/v1/x", headers, b"{}")).status == 200
        monkeypatch.setattr(scene.broker._ledger, "remove_boot", full)
        with pytest.raises(Refusal) as refused:
            await scene.down()
        assert refused.value.reason is Reason.DISK_FULL
        assert not (await client.reply()).complete  # it was reset
        client.close()
        with pytest.raises(OSError):
            await scene.connect()
        assert (len(upstream.asked), len(scene.broker._ledger.boots())) == (1, 1)
        monkeypatch.undo()
        await scene.down()
        assert scene.broker._ledger.boots() == []

    run(play)


def test_down_is_down_however_often_it_is_said() -> None:
    async def play(scene: Scene) -> None:
        await up(scene)
        for _ in range(3):
            await scene.down()
        await scene.down(OTHER)  # of which there was never anything
        assert not scene.sock().exists()
        await scene.up()
        assert (await scene.ask("api", body=b"{}")).status == 200

    run(play)


def test_a_socket_of_no_boot_goes_at_the_start() -> None:
    async def play(scene: Scene) -> None:
        await up(scene)
        await scene.end()
        stale = scene.sock(OTHER)
        stale.parent.mkdir(mode=0o700)
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(stale))
        await scene.begin()
        assert not stale.exists()
        assert (await scene.ask("api", body=b"{}")).status == 200
        assert scene.sock(ID).exists()

    run(play)


def test_a_stop_resets_what_is_under_way() -> None:
    async def play(scene: Scene) -> None:
        await up(scene)
        held = [await scene.connect() for _ in range(3)]
        head = "".join(f"{name}: {value}\r\n" for name, value in scene.headers("api"))
        for _, writer in held:
            writer.write(f"POST /v1/x HTTP/1.1\r\n{head}Content-Length: 9\r\n\r\n123".encode())
        await scene.store.was_asked.wait()
        await scene.down()
        for reader, writer in held:
            try:
                got = await asyncio.wait_for(reader.read(), 20)
            except OSError:
                got = b""
            assert got == b""
            writer.close()

    run(play)
