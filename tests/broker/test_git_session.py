"""git itself through the broker to `git http-backend`: clone, fetch, and pushes of all kinds."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import tempfile
from base64 import b64encode
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.brokerscene import ID, REAL, Client, Scene, run
from support.nginxgit import ENV, PRESENT, USER, GitServer
from support.until import until

from agent_box.broker import git as broker_git
from agent_box.broker.contract import NoncesOf
from agent_box.channel.provisioning import plan

pytestmark = pytest.mark.skipif(not PRESENT, reason="needs nginx, fcgiwrap and git")
SIZE = 8 << 20  # bytes of a push that is no small one
MINE = "refs/heads/agent-box/work/"


class Guest:
    """git as a guest has it: its configuration from the provisioning, and a way to the socket.

    A guest reaches the endpoint by name; here a relay on loopback stands for its network, and
    a header for the name.
    """

    def __init__(self, scene: Scene, home: Path, server: GitServer) -> None:
        self.scene, self.home, self.server = scene, home, server

    async def begin(self) -> None:
        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            up_reader, up_writer = await self.scene.connect()
            await asyncio.gather(_copy(reader, up_writer), _copy(up_reader, writer))

        self._relay = await asyncio.start_server(relay, "127.0.0.1", 0)
        port = self._relay.sockets[0].getsockname()[1]
        of = NoncesOf(instance=ID, boot=self.scene.boot)
        nonces = self.scene.broker.nonces(of, None).nonces  # type: ignore[arg-type]
        made = plan(nonces, None, str(self.home))
        (file,) = made.files
        self.url = f"http://127.0.0.1:{port}"
        text = file.content.replace(nonces[0].endpoint, self.url)
        text += f'[http "{self.url}/"]\n\textraHeader = "Host: code.broker.internal"\n'
        _write(Path(file.path), text)
        self.env = ENV | made.environment | {"HOME": str(self.home)}

    async def git(self, *words: str, ok: bool = True) -> str:
        ran = await asyncio.to_thread(
            subprocess.run,
            ["git", *words],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=300,
            cwd=self.home,
        )
        assert (ran.returncode == 0) is ok, ran.stderr
        assert REAL.decode() not in ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    async def end(self) -> None:
        self._relay.close()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.transport.abort()


def played(root: Path, play: Callable[[Guest], Awaitable[None]]) -> None:
    """With `o/app`, to which may be pushed, `o/lib`, to which not, and `o/hidden`."""

    async def main(scene: Scene) -> None:
        place = Path(tempfile.mkdtemp(prefix="ab."))  # short: sockets lie in it
        server = GitServer(place, scene.authority, REAL.decode())
        try:
            for name in ("o/app", "o/lib", "o/hidden"):
                server.make(name)
            repos = "".join(
                f'[[bindings.code.repos]]\nname = "{name}"\npush = {push}\n'
                for name, push in (("o/app", "true"), ("o/lib", "false"))
            )
            scene.bind(
                "code", server.port, "git-basic", more=f'basic_user = "{USER}"\n{repos}',
                routes=None,
            )  # fmt: skip
            await scene.up()
            guest = Guest(scene, root, server)
            await guest.begin()
            try:
                await play(guest)
            finally:
                await guest.end()
        finally:
            server.close()
            shutil.rmtree(place)

    run(main)


def test_clone_fetch_commit_and_push_to_the_namespace(tmp_path: Path) -> None:
    async def play(guest: Guest) -> None:
        origin = f"https://localhost:{guest.server.port}/o/app.git"
        await guest.git("clone", "-q", origin, "app")
        await guest.git("-C", "app", "commit", "-q", "--allow-empty", "-m", "mine")
        await guest.git("-C", "app", "push", "-q", "origin", f"HEAD:{MINE}topic")
        assert guest.server.refs("o/app") == [f"{MINE}topic", "refs/heads/main"]
        await guest.git("-C", "app", "fetch", "-q", "origin")
        await guest.git("-C", "app", "push", "-q", "origin", f":{MINE}topic")
        assert guest.server.refs("o/app") == ["refs/heads/main"]
        await guest.git("clone", "-q", f"https://localhost:{guest.server.port}/o/lib", "lib")
        assert {line.split()[-1] for line in guest.server.asked()} == {USER}
        assert guest.scene.kinds() == []

    played(tmp_path, play)


def test_a_push_elsewhere_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async def play(guest: Guest) -> None:
        await guest.git("clone", "-q", f"{guest.url}/o/app.git", "app")
        await guest.git("-C", "app", "commit", "-q", "--allow-empty", "-m", "mine")
        await guest.git("-C", "app", "tag", "v1")
        for refs in (
            ["HEAD:refs/heads/main"],
            ["HEAD:refs/heads/agent-box/other/x"],
            ["v1"],
            [f"HEAD:{MINE}ok", "HEAD:refs/heads/main"],
            ["--atomic", f"HEAD:{MINE}ok", "HEAD:refs/heads/main"],
            ["--force", "HEAD:main"],
            ["--mirror"],
            [":main"],
        ):
            said = await guest.git("-C", "app", "push", "origin", *refs, ok=False)
            assert "403" in said, said
            assert guest.server.refs("o/app") == ["refs/heads/main"], refs
        assert not any("POST" in line and "receive" in line for line in guest.server.asked())
        reasons = {facts["reason"] for facts in await guest.scene.noted("request-refused")}
        assert reasons == {"push-ref"}

    played(tmp_path, play)


def test_repositories_that_are_not_listed_or_not_for_pushes(tmp_path: Path) -> None:
    async def play(guest: Guest) -> None:
        await guest.git("clone", f"{guest.url}/o/hidden.git", "hidden", ok=False)
        await guest.git("clone", f"{guest.url}/o/../o/hidden.git", "hidden", ok=False)
        assert guest.server.asked() == []
        await guest.git("clone", "-q", f"{guest.url}/o/lib.git", "lib")
        await guest.git("-C", "lib", "commit", "-q", "--allow-empty", "-m", "mine")
        said = await guest.git("-C", "lib", "push", "origin", f"HEAD:{MINE}x", ok=False)
        assert "403" in said
        assert guest.server.refs("o/lib") == ["refs/heads/main"]

    played(tmp_path, play)


@pytest.mark.parametrize(
    "mib", [8, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_a_larger_push_is_streamed_as_it_is(tmp_path: Path, mib: int) -> None:
    """Relay and broker run in this process, and hold no pack."""
    size = mib << 20

    async def play(guest: Guest) -> None:
        await guest.git("clone", "-q", f"{guest.url}/o/app.git", "app")
        with (tmp_path / "app" / "noise").open("wb") as noise:
            for _ in range(mib):
                noise.write(os.urandom(1 << 20))
        await guest.git("-C", "app", "add", "noise")
        await guest.git("-C", "app", "commit", "-q", "-m", "large")
        before = peak_mib()
        await guest.git("-C", "app", "push", "-q", "origin", f"HEAD:{MINE}large")
        assert f"{MINE}large" in guest.server.refs("o/app")
        assert guest.scene.used()["code"]["bytes_up"] > size
        await guest.git("clone", "-q", "-b", "agent-box/work/large", f"{guest.url}/o/app", "again")
        assert (tmp_path / "again" / "noise").stat().st_size == size
        grown = peak_mib() - before
        print(f"\n{mib} MiB pushed and fetched: at most {grown:.1f} MiB more of memory")
        assert grown < 64

    played(tmp_path, play)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_a_pack_over_the_limit_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(guest: Guest) -> None:
        await guest.git("clone", "-q", f"{guest.url}/o/app.git", "app")
        (tmp_path / "app" / "noise").write_bytes(os.urandom(SIZE))
        await guest.git("-C", "app", "add", "noise")
        await guest.git("-C", "app", "commit", "-q", "-m", "large")
        monkeypatch.setattr(broker_git, "PACK_MAX", SIZE // 2)
        push = ("-C", "app", "push", "-q", "origin", f"HEAD:{MINE}large")
        await guest.git(*push, ok=False)  # in chunks: seen when it is over
        said = await guest.git("-c", f"http.postBuffer={2 * SIZE}", *push, ok=False)
        assert "413" in said  # with its length: nothing was sent on
        assert guest.server.refs("o/app") == ["refs/heads/main"]
        monkeypatch.undo()
        await guest.git(*push)
        assert f"{MINE}large" in guest.server.refs("o/app")

    played(tmp_path, play)


def test_a_second_repository_on_the_same_connection_is_judged_anew(tmp_path: Path) -> None:
    async def play(guest: Guest) -> None:
        scene = guest.scene
        pair = b64encode(f"x:{scene.nonce('code')}".encode()).decode()
        headers = [("Host", "code.broker.internal"), ("Authorization", f"Basic {pair}")]
        client = Client(*await scene.connect())
        for name, service, status in (
            ("o/app", "git-upload-pack", 200),
            ("o/hidden", "git-upload-pack", 404),
            ("o/lib", "git-upload-pack", 200),
            ("o/lib", "git-receive-pack", 403),
            ("o/app", "git-receive-pack", 200),
            ("o/app", "git-upload-archive", 404),
        ):
            target = f"/{name}.git/info/refs?service={service}"
            reply = await client.ask("GET", target, headers)
            assert reply.status == status, (name, service, reply)
        client.close()
        # The server notes a request once it has answered it.
        until("three were asked", lambda: len(guest.server.asked()) == 3)
        assert all(" 200 " in line for line in guest.server.asked())

    played(tmp_path, play)
