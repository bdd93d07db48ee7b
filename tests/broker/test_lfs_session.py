"""git-lfs through the broker: batch, upload, verify, download, and what the guest sees of it."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

from aiohttp import web
from support.brokerscene import OTHER, REAL, Reply, Scene, run, secrets_in
from support.upstreams import App, Asked

OID = "a" * 64
OBJECT_KEY = "RemoteAuth 0bject-5ecret"
MORE = 'basic_user = "u"\nrepos = [{ name = "o/r", push = true }, { name = "o/readonly" }]'


class Forge:
    """Answers batch calls with links to itself, and keeps objects."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.href = "https://localhost:{port}"
        self.coding: str | None = None
        self.app = App(answer=self.answer)

    async def answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        if request.path.endswith("/info/lfs/objects/batch"):
            return self._batch(json.loads(asked.body))
        if asked.get("authorization") != [OBJECT_KEY]:
            return web.Response(status=403)
        oid = request.path.rpartition("/")[2]
        if request.method == "PUT":
            self.objects[oid] = asked.body
            return web.Response()
        if request.method == "POST":
            return web.json_response({})
        return web.Response(body=self.objects[oid], content_type="application/octet-stream")

    def _batch(self, asked: dict[str, Any]) -> web.Response:
        base = self.href.format(port=self.app.port)
        action = {"href": f"{base}/store/{OID}?sig=1", "header": {"Authorization": OBJECT_KEY}}
        names = {"upload": ["upload", "verify"], "download": ["download"]}[asked["operation"]]
        reply = {
            "transfer": "basic",
            "objects": [{"oid": OID, "size": 9, "actions": dict.fromkeys(names, action)}],
        }
        headers = {} if self.coding is None else {"Content-Encoding": self.coding}
        return web.json_response(
            reply, content_type="application/vnd.git-lfs+json", headers=headers
        )


async def begin(scene: Scene) -> Forge:
    forge = Forge()
    await forge.app.start(scene.authority.server())
    scene.closing(forge.app.stop)
    scene.bind("api", forge.app.port, "git-basic", more=MORE, routes=None)
    await scene.up()
    return forge


def basic(scene: Scene) -> list[tuple[str, str]]:
    pair = b64encode(f"x:{scene.nonce('api')}".encode()).decode()
    return [("Host", "api.broker.internal"), ("Authorization", f"Basic {pair}")]


async def batch(scene: Scene, operation: str, repo: str = "o/r") -> Reply:
    return await scene.ask(
        "api",
        f"/{repo}.git/info/lfs/objects/batch",
        headers=basic(scene),
        body=json.dumps({"operation": operation, "objects": [{"oid": OID, "size": 9}]}).encode(),
    )


async def follow(
    scene: Scene, action: dict[str, Any], method: str, body: bytes = b"", **other: Any
) -> Reply:
    """As git-lfs does: the link's host and path, with the headers that came with it."""
    host, _, path = action["href"].removeprefix("http://").partition("/")
    headers = [("Host", host), *action["header"].items()]
    return await scene.ask("api", f"/{path}", method=method, headers=headers, body=body, **other)


def test_an_object_goes_up_and_down_and_its_key_stays() -> None:
    async def play(scene: Scene) -> None:
        forge = await begin(scene)
        seen = b""
        reply = await batch(scene, "upload")
        assert (reply.status, reply.complete) == (200, True)
        assert reply.headers["content-type"].startswith("application/vnd.git-lfs+json")
        seen += reply.body
        (entry,) = reply.json()["objects"]
        put = await follow(scene, entry["actions"]["upload"], "PUT", b"an object")
        assert put.status == 200
        assert (await follow(scene, entry["actions"]["verify"], "POST", b"{}")).status == 200
        assert forge.objects == {OID: b"an object"}
        reply = await batch(scene, "download", "o/readonly")
        seen += reply.body
        (entry,) = reply.json()["objects"]
        got = await follow(scene, entry["actions"]["download"], "GET")
        assert (got.status, got.body) == (200, b"an object")
        assert b"5ecret" not in seen
        assert secrets_in(seen) == []
        calls = [asked for asked in forge.app.asked if "batch" in asked.target]
        pair = b64encode(b"u:" + REAL).decode()
        assert [asked.get("authorization") for asked in calls] == [[f"Basic {pair}"]] * 2
        stored = [asked for asked in forge.app.asked if "batch" not in asked.target]
        assert [asked.target for asked in stored] == [f"/store/{OID}?sig=1"] * 3
        assert scene.nonce("api") not in repr(forge.app.asked)

    run(play)


def test_links_are_good_for_what_they_were_given_for() -> None:
    async def play(scene: Scene) -> None:
        forge = await begin(scene)
        forge.objects[OID] = b"an object"
        (entry,) = (await batch(scene, "download")).json()["objects"]
        action = entry["actions"]["download"]
        before = len(forge.app.asked)
        assert (await follow(scene, action, "PUT", b"x")).code == "lfs-unknown"
        bare = {"href": action["href"], "header": {}}
        assert (await follow(scene, bare, "GET")).code == "nonce-missing"
        guessed = {"href": action["href"][:-1] + "_", "header": action["header"]}
        assert (await follow(scene, guessed, "GET")).code == "lfs-unknown"
        await scene.up("api", instance=OTHER)
        assert (await follow(scene, action, "GET", instance=OTHER)).status in (401, 404)
        assert len(forge.app.asked) == before
        await scene.up("api")  # another boot: links and nonces are void
        assert (await follow(scene, action, "GET")).status in (401, 404)
        assert len(forge.app.asked) == before

    run(play)


def test_an_upload_to_where_no_push_may_go_is_refused_before_anything_is_sent() -> None:
    async def play(scene: Scene) -> None:
        forge = await begin(scene)
        reply = await batch(scene, "upload", "o/readonly")
        assert (reply.status, reply.code) == (403, "push-off")
        assert (await batch(scene, "delete")).code == "push-commands"
        assert (await batch(scene, "download", "o/other")).code == "repo"
        assert forge.app.asked == []

    run(play)


def test_a_link_to_an_internal_address_leads_nowhere() -> None:
    """The binding may use a reserved address; where an upstream's reply points may not be one."""

    async def play(scene: Scene) -> None:
        forge = await begin(scene)
        for href in ("https://127.0.0.1:{port}", "https://127.0.0.1:1", "http://127.0.0.1:{port}"):
            forge.href = href
            reply = await batch(scene, "download")
            assert reply.status == 200
            (entry,) = reply.json()["objects"]
            before = len(forge.app.asked)
            found = await follow(scene, entry["actions"]["download"], "GET")
            assert found.code in ("address", "upstream-plain")
            assert len(forge.app.asked) == before

    run(play)


def test_a_reply_that_cannot_be_read_is_held_back() -> None:
    async def play(scene: Scene) -> None:
        forge = await begin(scene)
        forge.coding = "br"
        reply = await batch(scene, "download")
        assert (reply.status, reply.code) == (502, "reply-bad")
        assert b"5ecret" not in reply.body
        forge.coding, forge.href = None, "ftp://localhost:{port}"
        assert (await batch(scene, "download")).code == "reply-bad"

    run(play)
