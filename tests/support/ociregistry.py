"""Debian's docker-registry on loopback, a way to publish an image there, and a bad line to it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import built
from support.until import until

from agent_box.engine.image import manifest, oci
from agent_box.engine.image.manifest import Signed
from agent_box.engine.image.reference import Reference
from agent_box.process.paths import Paths

PACKAGE = "docker-registry"
CONFIG = """
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: {root}}}
  delete: {{enabled: true}}
http: {{addr: "127.0.0.1:{port}"}}
"""


def program() -> Path:
    """The program of Debian's package. Not installed here, it is taken out of the package:
    the package would start a service that listens on every address."""
    found = shutil.which(PACKAGE)
    if found is not None:
        return Path(found)
    kept = built.kept() / "registry"
    kept.mkdir(exist_ok=True)
    binary = kept / "usr" / "bin" / PACKAGE
    with open(kept / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.is_file():
            subprocess.run(
                ["apt-get", "-q", "download", PACKAGE], cwd=kept, check=True, timeout=120
            )
            (package,) = kept.glob(f"{PACKAGE}_*.deb")
            subprocess.run(["dpkg-deb", "-x", package, kept], check=True, timeout=60)
    return binary


class Registry:
    """One that runs until `close`."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        config = directory / "registry.yml"
        config.write_text(CONFIG.format(root=directory / "storage", port=self.port))
        self._process = subprocess.Popen(
            [program(), "serve", config],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"], "OTEL_TRACES_EXPORTER": "none"},
        )
        until("the registry answers", self._answers, seconds=30)

    def _answers(self) -> bool:
        try:
            return self.ask("GET", "/v2/")[0] == 200
        except OSError:
            return False

    def ask(
        self, method: str, path: str, body: bytes | None = None, kind: str = ""
    ) -> tuple[int, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers = {"Content-Type": kind} if kind else {}
        try:
            connection.request(method, path, body=body, headers=headers)
            reply = connection.getresponse()
            reply.read()
            return reply.status, {name.lower(): value for name, value in reply.getheaders()}
        finally:
            connection.close()

    def push_blob(self, repository: str, data: bytes) -> str:
        """The digest."""
        digest = hashlib.sha256(data).hexdigest()
        status, headers = self.ask("POST", f"/v2/{repository}/blobs/uploads/")
        assert status == 202
        where = headers["location"].partition(f":{self.port}")[2] or headers["location"]
        joint = "&" if "?" in where else "?"
        status, _ = self.ask(
            "PUT", f"{where}{joint}digest=sha256:{digest}", data, "application/octet-stream"
        )
        assert status == 201
        return digest

    def push(self, paths: Paths, repository: str, signed: Signed) -> Reference:
        """Publishes an image whose files lie in a cache."""
        config = manifest.encode(signed)
        table: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": oci.MEDIA_MANIFEST,
            "config": {
                "mediaType": oci.MEDIA_CONFIG,
                "digest": f"sha256:{self.push_blob(repository, config)}",
                "size": len(config),
            },
            "layers": [
                {
                    "mediaType": oci.MEDIA_FILE.format(what),
                    "digest": "sha256:"
                    + self.push_blob(repository, paths.blob(part.sha256).read_bytes()),
                    "size": part.size,
                }
                for what, part in signed.manifest.parts.items()
            ],
        }
        return self.push_manifest(repository, json.dumps(table).encode())

    def push_manifest(self, repository: str, body: bytes) -> Reference:
        digest = hashlib.sha256(body).hexdigest()
        status, _ = self.ask(
            "PUT", f"/v2/{repository}/manifests/sha256:{digest}", body, oci.MEDIA_MANIFEST
        )
        assert status == 201
        return Reference("127.0.0.1", self.port, repository, digest)

    def stored(self, directory: Path, digest: str) -> Path:
        """Where the registry keeps a blob on its disk."""
        return directory / "storage/docker/registry/v2/blobs/sha256" / digest[:2] / digest / "data"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Line:
    """Forwards connections to a port, and cuts each after so many bytes of reply.

    Attributes:
        cut: bytes of each reply that pass; None lets all pass.
        only: text that must stand in the request for its reply to be cut.
        requests: the first line and the range of each request that was seen.
    """

    def __init__(self, port: int, cut: int | None = None, only: str = "") -> None:
        self.cut = cut
        self.only = only
        self.requests: list[tuple[str, str]] = []
        self.passed = 0
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with near, contextlib.suppress(OSError):
                self._one(near)

    def _one(self, near: socket.socket) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            piece = near.recv(4096)
            if not piece:
                return
            head += piece
        lines = head.decode().split("\r\n")
        ranges = [line.partition(": ")[2] for line in lines if line.lower().startswith("range:")]
        self.requests.append((lines[0], ranges[0] if ranges else ""))
        with socket.create_connection(("127.0.0.1", self._target)) as far:
            far.sendall(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
            left = self.cut if self.only in lines[0] else None
            while (piece := far.recv(65536)) and (left is None or left > 0):
                near.sendall(piece if left is None else piece[:left])
                self.passed += len(piece)
                if left is not None:
                    left -= len(piece)

    def close(self) -> None:
        self._listener.close()


@contextlib.contextmanager
def registry(directory: Path) -> Iterator[Registry]:
    made = Registry(directory)
    try:
        yield made
    finally:
        made.close()
