"""nginx: before a plain server, with TLS, as a parser of requests that is not ours; and alone, as
a server of HTTP/2."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.until import until
from support.upstreams import Authority

FOUND = shutil.which("nginx", path="/usr/sbin:/usr/bin:/sbin:/bin")
_CONFIG = """
worker_processes 1;
daemon off;
master_process off;
pid {root}/pid;
error_log {root}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {root}/body;
  proxy_temp_path {root}/proxy;
  fastcgi_temp_path {root}/fastcgi;
  uwsgi_temp_path {root}/uwsgi;
  scgi_temp_path {root}/scgi;
  merge_slashes off;
  ignore_invalid_headers off;
  server {{
    listen 127.0.0.1:{port} ssl;
    ssl_certificate {certificate};
    ssl_certificate_key {key};
    location / {{
      proxy_pass http://127.0.0.1:{behind};
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $http_host;
      proxy_request_buffering off;
    }}
  }}
}}
"""
_HTTP2 = """
worker_processes 1;
daemon off;
master_process off;
pid {root}/pid;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path {root}/body;
  proxy_temp_path {root}/proxy;
  fastcgi_temp_path {root}/fastcgi;
  uwsgi_temp_path {root}/uwsgi;
  scgi_temp_path {root}/scgi;
  keepalive_timeout 1h;
  server {{
    listen 127.0.0.1:{port} http2;
    location / {{ return 200 "$server_protocol $connection\\n"; }}
  }}
}}
"""


@contextmanager
def plain_http2(root: Path) -> Iterator[int]:
    """A server without TLS that says over which of its connections it was asked; its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    config = root / "nginx.conf"
    config.write_text(_HTTP2.format(root=root, port=port))
    command = [str(FOUND), "-c", str(config), "-p", str(root), "-e", str(root / "error.log")]

    def listens() -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0

    with subprocess.Popen(command) as serving:
        try:
            until("nginx serves", listens)
            yield port
        finally:
            serving.terminate()


class Nginx:
    """`port` is where it listens; what it lets pass goes to `behind`, a plain server's port."""

    def __init__(self, root: Path, authority: Authority, behind: int) -> None:
        self._root = root
        self._authority = authority
        self._behind = behind
        self.port = 0
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> Nginx:
        assert FOUND is not None
        self._root.mkdir()
        certificate, key = self._authority.files(self._root)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        config = self._root / "nginx.conf"
        config.write_text(
            _CONFIG.format(
                root=self._root,
                port=self.port,
                behind=self._behind,
                certificate=certificate,
                key=key,
            )
        )
        self._process = await asyncio.create_subprocess_exec(
            FOUND, "-c", str(config), "-p", str(self._root), "-e", str(self._root / "error.log")
        )
        async with asyncio.timeout(60):
            while not await self._listens():
                assert self._process.returncode is None
                await asyncio.sleep(0.05)  # nginx has no event for this
        return self

    async def _listens(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()
