"""The real git, and the real git http-backend, with the broker between them."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from pathlib import Path

import pytest
from support.brokerscene import REAL, Scene, run
from support.gitserver import BACKEND, Backend, doorway, git
from support.upstreams import App

pytestmark = pytest.mark.skipif(not BACKEND.exists(), reason="git is not installed")
MORE = 'basic_user = "u"\nrepos = [{ name = "o/r", push = true }, { name = "o/readonly" }]'


class Client:
    """A clone of o/r, made through the broker of a scene."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.home = scene.root / "guest"
        self.work = self.home / "r"
        self.forge = scene.root / "forge"
        self.app = App()

    async def begin(self) -> None:
        self.home.mkdir()
        for name in ("o/r.git", "o/readonly.git", "o/other.git"):
            (self.forge / name).mkdir(parents=True)
            await self.ok(self.forge / name, "init", "-q", "--bare", "-b", "main", ".")
            await self.ok(self.forge / name, "config", "receive.advertisePushOptions", "true")
        seed = self.forge / "seed"
        seed.mkdir()
        await self.ok(seed, "init", "-q", "-b", "main", ".")
        (seed / "file").write_text("seed\n")
        await self.ok(seed, "add", ".")
        await self.ok(seed, "commit", "-qm", "seed")
        for name in ("o/r.git", "o/readonly.git", "o/other.git"):
            await self.ok(seed, "push", "-q", str(self.forge / name), "main")
        pair = b64encode(b"u:" + REAL).decode()
        self.app.answer = Backend(self.forge, f"Basic {pair}").answer
        await self.app.start(self.scene.authority.server())
        self.scene.closing(self.app.stop)
        self.scene.bind("api", self.app.port, "git-basic", more=MORE, routes=None)
        await self.scene.up()
        server, self.port = await doorway(self.scene.sock())

        async def close() -> None:
            server.close()

        self.scene.closing(close)
        # as the guest's provisioning has it: the nonce, and the endpoint's name for Host
        (self.home / ".gitconfig").write_text(
            f'[http]\n\textraHeader = "Host: api.broker.internal"\n'
            f'[url "http://x:{self.scene.nonce("api")}@127.0.0.1:{self.port}/"]\n'
            f"\tinsteadOf = https://forge.example/\n"
        )

    async def run(self, *words: str, at: Path | None = None) -> tuple[int, str]:
        return await git(at or self.work, *words, home=self.home)

    async def ok(self, at: Path, *words: str) -> str:
        code, said = await git(at, *words, home=self.home)
        assert code == 0, said
        return said

    async def clone(self, *words: str) -> None:
        await self.ok(self.home, "clone", "-q", *words, "https://forge.example/o/r.git")

    async def commit(self, name: str, size: int = 10) -> None:
        (self.work / name).write_bytes(b"x" * size)
        await self.ok(self.work, "add", ".")
        await self.ok(self.work, "commit", "-qm", name)

    async def refs(self, repo: str = "o/r.git") -> list[str]:
        said = await self.ok(self.forge / repo, "for-each-ref", "--format=%(refname)")
        return said.split()


MAIN = "refs/heads/main"
MINE = "refs/heads/agent-box/work/topic"


def test_clone_commit_and_push_to_the_namespace() -> None:
    async def play(scene: Scene) -> None:
        client = Client(scene)
        await client.begin()
        await client.clone()
        await client.commit("one")
        await client.ok(client.work, "push", "-q", "origin", f"HEAD:{MINE}")
        assert await client.refs() == [MINE, MAIN]
        await client.commit("two", 3_000_000)  # chunked, after a first request without commands
        said = await client.ok(client.work, "push", "origin", f"HEAD:{MINE}", f"HEAD:{MINE}-2")
        assert "agent-box/work/topic-2" in said
        await client.ok(client.work, "fetch", "-q", "--prune", "origin")
        await client.ok(client.work, "push", "-q", "--atomic", "origin", f"+HEAD~1:{MINE}")
        await client.ok(client.work, "push", "-q", "origin", f":{MINE}-2")
        assert await client.refs() == [MINE, MAIN]
        nonce = scene.nonce("api")
        assert nonce not in repr(client.app.asked)
        assert scene.kinds().count("request-refused") == 0

    run(play)


def test_pushes_elsewhere_are_refused_and_change_nothing() -> None:
    async def play(scene: Scene) -> None:
        client = Client(scene)
        await client.begin()
        await client.clone()
        await client.commit("one")
        await client.ok(client.work, "tag", "v1")
        for words in (
            ("HEAD:main",),
            (f"HEAD:{MINE}", "HEAD:main"),
            ("--atomic", f"HEAD:{MINE}", "HEAD:refs/heads/other"),
            ("--tags",),
            ("HEAD:refs/heads/agent-box/other/x",),
            (":main",),
            ("--force", "HEAD:main"),
            ("--mirror",),
            ("-o", "merge_request.create", f"HEAD:{MINE}"),
        ):
            code, said = await client.run("push", "origin", *words)
            assert code != 0, (words, said)
            assert "403" in said, (words, said)
        assert await client.refs() == [MAIN]
        posts = [a for a in client.app.asked if a.method == "POST" and "receive" in a.target]
        assert posts == []
        facts = await scene.noted("request-refused")
        assert {fact["reason"] for fact in facts} == {"push-ref", "push-commands"}

    run(play)


def test_other_repositories_and_nonces_are_refused() -> None:
    async def play(scene: Scene) -> None:
        client = Client(scene)
        await client.begin()
        for repo, word in (("o/other", "404"), ("o/R", "404"), ("o/r/../other", "400")):
            code, said = await client.run(
                "ls-remote", f"https://forge.example/{repo}.git", at=client.home
            )
            assert code != 0
            assert word in said or "not found" in said, said
        code, said = await client.run(
            "ls-remote", "https://forge.example/o/readonly", at=client.home
        )
        assert (code, MAIN in said) == (0, True)
        await client.clone()
        await client.commit("one")
        code, said = await client.run("push", "https://forge.example/o/readonly", f"HEAD:{MINE}")
        assert code != 0
        assert "403" in said
        await scene.up()  # another boot: the nonce is void
        code, said = await client.run("fetch", "origin")
        assert code != 0
        assert "Authentication failed" in said
        assert await client.refs("o/readonly.git") == [MAIN]

    run(play)


@pytest.mark.parametrize("version", ["0", "1", "2"])
def test_shallow_clones_and_pushes_in_each_version(version: str) -> None:
    async def play(scene: Scene) -> None:
        client = Client(scene)
        await client.begin()
        seed = client.forge / "seed"
        for i in range(3):
            (seed / "file").write_text(f"{i}\n")
            await client.ok(seed, "commit", "-qam", str(i))
        await client.ok(seed, "push", "-q", str(client.forge / "o/r.git"), "main")
        await client.ok(client.home, "config", "--global", "protocol.version", version)
        await client.clone("--depth", "1")
        await client.commit("one")
        await client.ok(client.work, "push", "-q", "origin", f"HEAD:{MINE}")
        assert await client.refs() == [MINE, MAIN]
        await client.ok(client.work, "fetch", "-q", "--unshallow", "origin")

    run(play)


def test_many_fetches_at_once() -> None:
    async def play(scene: Scene) -> None:
        client = Client(scene)
        await client.begin()
        url = "https://forge.example/o/r"
        found = await asyncio.gather(
            *(client.run("ls-remote", url, at=client.home) for _ in range(8))
        )
        assert [code for code, _ in found] == [0] * 8

    run(play)
