"""A published image is fetched from a real registry by digest, and nothing else is believed."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support import images
from support.ociregistry import Line, Registry, registry
from support.until import until

from agent_box.engine.image import blobs, manifest, oci
from agent_box.engine.image.errors import (
    DefinitionError,
    NotPublished,
    PullFailed,
    Untrusted,
)
from agent_box.engine.image.manifest import Signed
from agent_box.engine.image.reference import Reference
from agent_box.process.paths import Paths

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
PUBLIC = KEY.public_key().public_bytes_raw().hex()
TRUSTED = {PUBLIC: "publisher"}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Registry, Path]]:
    directory = tmp_path_factory.mktemp("registry")
    with registry(directory) as running:
        yield running, directory


@pytest.fixture
def far(tmp_path: Path) -> Paths:
    """The publisher's cache."""
    return Paths(tmp_path / "far-run", tmp_path / "far")


@pytest.fixture
def near(tmp_path: Path) -> Paths:
    """Ours."""
    return Paths(tmp_path / "run", tmp_path / "near")


def signed(paths: Paths, name: str = "base", content: str = "one") -> Signed:
    planted = images.plant(paths, name, content)
    return Signed(planted, [manifest.sign(planted, b"k" * 32)])


def pull(near: Paths, where: Reference, **more: Any) -> tuple[str, manifest.Manifest, int]:
    told: list[str] = more.pop("told", [])
    arguments: dict[str, Any] = {"name": None, "tell": told.append, **more}
    return oci.pull(near, where, arguments.pop("trusted", TRUSTED), **arguments)


def test_what_was_published_arrives(shop: tuple[Registry, Path], far: Paths, near: Paths) -> None:
    published = signed(far)
    where = shop[0].push(far, "agent-box/base", published)
    sha256, image, fetched = pull(near, where)
    assert image == published.manifest == manifest.find(near, "base")
    assert fetched == sum(part.size for part in image.parts.values())
    manifest.Checked().check(near, image)
    kept = manifest.load(near, sha256)
    assert manifest.signed_by(kept, frozenset(TRUSTED)) == PUBLIC  # the publisher's word stays
    assert manifest.signed_by(kept, manifest.trusted(near)) is not None  # and ours is beside it
    assert os.listdir(near.images / "partial") == []


def test_what_is_there_is_not_fetched_again(
    shop: tuple[Registry, Path], far: Paths, near: Paths
) -> None:
    pull(near, shop[0].push(far, "again", signed(far)))
    where = shop[0].push(far, "again", signed(far, content="two"))
    _, image, fetched = pull(near, where)
    assert fetched == image.variant.size + image.packages.size
    assert pull(near, where)[2] == 0


def test_a_corrupt_file_of_ours_is_fetched_again(
    shop: tuple[Registry, Path], far: Paths, near: Paths
) -> None:
    where = shop[0].push(far, "corrupt", signed(far))
    _, image, _ = pull(near, where)
    images.flip(near.blob(image.kernel.sha256))
    assert pull(near, where)[2] == image.kernel.size
    manifest.Checked().check(near, image)


def big(far: Paths) -> Signed:
    """An image with a drive of 8 MiB."""
    planted = images.plant(far)
    with blobs.workshop(far.images / "work") as work:
        part = blobs.add_bytes(far, work, os.urandom(8 << 20))
    planted = msgspec.structs.replace(planted, variant=part)
    return Signed(planted, [manifest.sign(planted, b"k" * 32)])


def test_a_line_that_breaks_is_gone_on_with(
    shop: tuple[Registry, Path], far: Paths, near: Paths
) -> None:
    published = big(far)
    where = shop[0].push(far, "line", published)
    line = Line(shop[0].port, cut=1 << 20)
    try:
        _, image, fetched = pull(near, where._replace(port=line.port))
    finally:
        line.close()
    manifest.Checked().check(near, image)
    ranges = [r for request, r in line.requests if image.variant.sha256 in request]
    assert len(ranges) >= 8
    assert ranges[0] == ""
    starts = [int(r.removeprefix("bytes=").rstrip("-")) for r in ranges[1:]]
    assert starts == sorted(set(starts))
    assert starts[0] > 0
    assert fetched == sum(part.size for part in image.parts.values())
    assert line.passed < fetched + (2 << 20)  # nothing came twice


def test_a_line_that_brings_nothing_is_given_up(
    shop: tuple[Registry, Path], far: Paths, near: Paths
) -> None:
    old = images.plant(near)
    published = big(far)
    variant = published.manifest.variant
    where = shop[0].push(far, "barren", published)
    line = Line(shop[0].port, cut=0, only=variant.sha256)
    try:
        with pytest.raises(PullFailed, match="the same command goes on there") as caught:
            pull(near, where._replace(port=line.port))
    finally:
        line.close()
    assert caught.value.exit == 1
    assert len([r for r, _ in line.requests if variant.sha256 in r]) == oci.TRIES
    assert manifest.find(near, "base") == old


PULL = """
import sys
from pathlib import Path
from agent_box.engine.image import oci, reference
from agent_box.process.paths import Paths
paths = Paths(Path(sys.argv[1]), Path(sys.argv[2]))
oci.pull(paths, reference.parse(sys.argv[3]), {sys.argv[4]: "p"}, name=None, tell=print)
"""


def test_killed_half_way_is_harmless_and_goes_on_later(
    shop: tuple[Registry, Path], far: Paths, near: Paths
) -> None:
    old = images.plant(near)
    published = big(far)
    variant = published.manifest.variant
    where = shop[0].push(far, "killed", published)
    gate = threading.Event()
    line = _Slow(shop[0].port, gate, 3 << 20)
    partial = near.images / "partial" / variant.sha256
    process = subprocess.Popen(
        [
            *(sys.executable, "-I", "-c", PULL, str(near.runtime), str(near.state)),
            *(str(where._replace(port=line.port)), PUBLIC),
        ]
    )
    try:
        until("half of it is there", lambda: partial.exists() and partial.stat().st_size > 1 << 20)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        gate.set()
        line.close()
    begun = partial.stat().st_size
    assert 0 < begun < variant.size
    assert not near.blob(variant.sha256).exists()
    assert manifest.find(near, "base") == old
    manifest.Checked().check(near, old)
    told: list[str] = []
    _, image, fetched = pull(near, where, told=told)
    assert image == published.manifest
    assert fetched <= sum(part.size for part in image.parts.values()) - begun
    assert any("going on at" in line for line in told)
    manifest.Checked().check(near, image)


class _Slow(Line):
    """Lets so many bytes pass, then waits for the gate."""

    def __init__(self, port: int, gate: threading.Event, after: int) -> None:
        self._gate = gate
        self._after = after
        super().__init__(port)

    def _one(self, near: Any) -> None:
        class Held:
            def __init__(self, gate: threading.Event, after: int) -> None:
                self.gate, self.left = gate, after

            def recv(self, size: int) -> bytes:
                data: bytes = near.recv(size)
                return data

            def sendall(self, data: bytes) -> None:
                self.left -= len(data)
                if self.left < 0:
                    self.gate.wait(60)
                near.sendall(data)

        super()._one(Held(self._gate, self._after))  # type: ignore[arg-type]


def test_a_file_that_the_registry_spoiled_is_named_and_kept_nowhere(
    shop: tuple[Registry, Path], far: Paths, near: Paths
) -> None:
    old = images.plant(near)
    published = signed(far, content="spoiled")
    where = shop[0].push(far, "spoiled", published)
    variant = published.manifest.variant
    images.flip(shop[0].stored(shop[1], variant.sha256))
    with pytest.raises(Untrusted, match=variant.sha256) as caught:
        pull(near, where)
    assert caught.value.exit == 1
    assert not near.blob(variant.sha256).exists()
    assert (near.images / "partial" / variant.sha256).stat().st_size == 0
    assert manifest.find(near, "base") == old


def test_two_at_once_do_not_spoil_each_other(
    shop: tuple[Registry, Path], far: Paths, near: Paths
) -> None:
    published = signed(far, content="two at once")
    where = shop[0].push(far, "both", published)
    blobs.make(near)
    variant = published.manifest.variant.sha256
    with (
        oci._own(near.images / "partial" / variant, "other"),
        pytest.raises(PullFailed, match="another pull fetches it"),
    ):
        pull(near, where)


# ------------------------------------------------------------------------------- trust


def test_a_publisher_that_nobody_named_is_refused(
    shop: tuple[Registry, Path], far: Paths, near: Paths
) -> None:
    where = shop[0].push(far, "who", signed(far))
    for trusted in ({}, {"ab" * 32: "other"}):
        with pytest.raises(Untrusted, match=f"is signed by {PUBLIC}, and no file image-keys"):
            pull(near, where, trusted=trusted)
    assert list(blobs.held(near)) == []


def test_an_image_of_another_name_is_refused(
    shop: tuple[Registry, Path], far: Paths, near: Paths
) -> None:
    where = shop[0].push(far, "name", signed(far, "rust"))
    with pytest.raises(Untrusted, match="is an image of rust, not of base"):
        pull(near, where, name="base")


def test_what_is_no_image_of_ours(shop: tuple[Registry, Path], far: Paths, near: Paths) -> None:
    published = signed(far)
    server = shop[0]
    where = server.push(far, "odd", published)
    config = manifest.encode(published)
    digest = server.push_blob("odd", config)
    part = published.manifest.kernel

    def push(**changes: Any) -> Reference:
        layer = {"mediaType": "x/y", "digest": f"sha256:{part.sha256}", "size": part.size}
        table = {
            "schemaVersion": 2,
            "mediaType": oci.MEDIA_MANIFEST,
            "config": {
                "mediaType": oci.MEDIA_CONFIG,
                "digest": f"sha256:{digest}",
                "size": len(config),
            },
            "layers": [layer],
        }
        return server.push_manifest("odd", json.dumps({**table, **changes}).encode())

    text = server.push_blob("odd", b"no manifest")
    for place, said in (
        (push(), "its layers are not the files"),
        (
            push(
                config={
                    "mediaType": "application/vnd.oci.image.config.v1+json",
                    "digest": f"sha256:{digest}",
                    "size": len(config),
                }
            ),
            "is no image of agent-box",
        ),
        (
            push(config={"mediaType": oci.MEDIA_CONFIG, "digest": f"sha256:{text}", "size": 11}),
            "its manifest",
        ),
    ):
        with pytest.raises(Untrusted, match=said):
            pull(near, place)
    with pytest.raises(NotPublished, match="answered 404") as caught:
        pull(near, where._replace(digest="0" * 64))
    assert caught.value.exit == 3
    assert not (near.images / "manifests" / "base").exists()


def test_keys_are_files_beside_the_config(tmp_path: Path) -> None:
    assert oci.keys(None) == {}
    assert oci.keys(tmp_path) == {}
    (tmp_path / "image-keys").mkdir()
    (tmp_path / "image-keys" / "publisher.pub").write_text(PUBLIC + "\n")
    (tmp_path / "image-keys" / "notes.txt").write_text("x")
    assert oci.keys(tmp_path) == TRUSTED
    (tmp_path / "image-keys" / "bad.pub").write_text("x")
    with pytest.raises(DefinitionError, match=r"bad\.pub: it holds no key"):
        oci.keys(tmp_path)


# ------------------------------------------------------------------ a hostile registry


@pytest.fixture
def hostile() -> Iterator[Callable[[Any], Reference]]:
    """Starts a server whose GET is a function of its handler; gives a reference to it."""
    servers = []

    def start(answer: Any) -> Reference:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(self)

            def log_message(self, *words: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return Reference("127.0.0.1", server.server_address[1], "box", "a" * 64)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def reply(handler: Any, status: int, body: bytes = b"", **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda h: reply(h, 200, b"{}"), "the registry gave something else"),
        (lambda h: reply(h, 200, b" " * (2 << 20)), "is larger than"),
        (lambda h: reply(h, 500), "answered 500"),
        (lambda h: reply(h, 401), "wants a login"),
        (lambda h: reply(h, 401, WWW_Authenticate="Basic realm=x"), "wants a login"),
        (
            lambda h: reply(h, 401, WWW_Authenticate='Bearer realm="http://192.0.2.1/t"'),
            "plain http is for this machine alone",
        ),
        (lambda h: reply(h, 302, Location="http://192.0.2.1/x"), "plain http is for this"),
        (lambda h: reply(h, 302, Location="file:///etc/passwd"), "plain http is for this"),
        (lambda h: reply(h, 302, Location="http://[bad/x"), "sends us nowhere"),
        (lambda h: reply(h, 302, Location=h.path), "answered 302"),
        (lambda h: h.wfile.write(b"\0\1\2\n"), "127.0.0.1"),
        (lambda h: h.connection.close(), "127.0.0.1"),
    ],
)
def test_a_bad_answer_is_one_line(
    near: Paths, hostile: Callable[[Any], Reference], answer: Any, said: str
) -> None:
    with pytest.raises((PullFailed, Untrusted), match=said) as caught:
        pull(near, hostile(answer))
    assert str(caught.value).isprintable()


def test_nobody_is_there(near: Paths) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(PullFailed, match="refused"):
        pull(near, Reference("127.0.0.1", port, "box", "a" * 64))


def test_a_registry_of_the_network_cannot_send_us_to_this_machine() -> None:
    where = Reference("registry.example.com", None, "box", "a" * 64)
    for url in ("https://127.0.0.1/x", "http://localhost/x", "https://[::1]:5/x"):
        with pytest.raises(PullFailed, match="sends us to this machine"):
            oci._connect(url, where)
    with pytest.raises(PullFailed, match="plain http is for this machine alone"):
        oci._connect("http://registry.example.com/v2/", where)


def test_a_token_for_anybody_is_used_where_it_was_asked_and_nowhere_else(
    near: Paths, hostile: Callable[[Any], Reference]
) -> None:
    seen: list[tuple[str, str | None]] = []

    def answer(handler: Any) -> None:
        seen.append((handler.path, handler.headers.get("Authorization")))
        if handler.path.startswith("/token"):
            reply(handler, 200, b'{"token": "t0k"}')
        elif handler.path.startswith("/elsewhere"):
            reply(handler, 200, b"{}")
        elif handler.headers.get("Authorization") == "Bearer t0k":
            reply(handler, 307, Location="/elsewhere")
        else:
            realm = f"http://127.0.0.1:{handler.server.server_address[1]}/token"
            reply(handler, 401, WWW_Authenticate=f'Bearer realm="{realm}",service="s"')

    with pytest.raises(Untrusted, match="something else"):
        pull(near, hostile(answer))
    manifests = f"/v2/box/manifests/sha256:{'a' * 64}"
    assert seen == [
        (manifests, None),
        ("/token?service=s&scope=repository%3Abox%3Apull", None),
        (manifests, "Bearer t0k"),
        ("/elsewhere", None),
    ]


@pytest.mark.parametrize("how", ["other range", "ignores", "endless"])
def test_a_registry_that_mishandles_ranges(
    near: Paths, far: Paths, hostile: Callable[[Any], Reference], how: str
) -> None:
    published = signed(far, content="ranges")
    config = manifest.encode(published)
    parts = {p.sha256: far.blob(p.sha256).read_bytes() for p in published.manifest.parts.values()}
    import hashlib

    digest = hashlib.sha256(config).hexdigest()
    body = json.dumps(
        {
            "config": {"mediaType": oci.MEDIA_CONFIG, "digest": f"sha256:{digest}"},
            "layers": [{"digest": f"sha256:{k}", "size": len(v)} for k, v in parts.items()],
        }
    ).encode()
    variant = published.manifest.variant

    def answer(handler: Any) -> None:
        name = handler.path.rpartition(":")[2]
        if "/manifests/" in handler.path:
            reply(handler, 200, body)
        elif name == digest:
            reply(handler, 200, config)
        elif how == "other range" and handler.headers.get("Range"):
            reply(handler, 206, parts[name][1:], Content_Range="bytes 1-9/10")
        elif how == "endless":
            reply(handler, 200, parts[name] + b"more and more" * 1000)
        else:
            reply(handler, 200, parts[name])

    where = hostile(answer)._replace(digest=hashlib.sha256(body).hexdigest())
    blobs.make(near)
    (near.images / "partial" / variant.sha256).write_bytes(parts[variant.sha256][:100])
    if how == "other range":
        with pytest.raises(PullFailed, match="another range"):
            pull(near, where)
        assert not near.blob(variant.sha256).exists()
    else:
        _, image, _ = pull(near, where)
        manifest.Checked().check(near, image)
