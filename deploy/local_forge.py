#!/usr/bin/env python3
"""A forge of one machine: git's own HTTP backend behind TLS, for whoever shows the token.

    local_forge.py ROOT --token-file FILE --tls CERT KEY [--port N]

It listens on 127.0.0.1, serves the repositories below ROOT, and prints its port. Standard
library only; a stand-in for demonstrations.
"""

from __future__ import annotations

import argparse
import base64
import hmac
import os
import ssl
import subprocess
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

BACKEND: Final = "/usr/lib/git-core/git-http-backend"


class Handler(BaseHTTPRequestHandler):
    """One connection; each request is one run of the backend (CGI, RFC 3875)."""

    protocol_version = "HTTP/1.1"
    server: Forge

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is noted."""

    def do_GET(self) -> None:
        self._serve(b"")

    def do_POST(self) -> None:
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._serve(body)

    def _serve(self, body: bytes) -> None:
        if not hmac.compare_digest(self.headers.get("Authorization", ""), self.server.wanted):
            self._answer(401, [("WWW-Authenticate", "Basic")], b"")
            return
        path, _, query = self.path.partition("?")
        variables = {
            "PATH": "/usr/bin:/bin",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_PROJECT_ROOT": str(self.server.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "HOME": str(self.server.root),
            "REMOTE_USER": "demo",
            "REQUEST_METHOD": self.command,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
        }
        done = subprocess.run(
            [BACKEND], env=variables, input=body, stdout=subprocess.PIPE, check=False
        )
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        status, headers = 200, []
        for line in head.decode().splitlines():
            name, _, value = line.partition(": ")
            if name == "Status":
                status = int(value.split()[0])
            elif name:
                headers.append((name, value))
        self._answer(status, headers, content)

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class Forge(ThreadingHTTPServer):
    """Args:
    root: of the repositories.
    token: the password of any user.
    """

    daemon_threads = True

    def __init__(self, port: int, root: Path, user: str, token: str) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.root = root
        self.wanted = f"Basic {base64.b64encode(f'{user}:{token}'.encode()).decode()}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--user", default="demo")
    parser.add_argument("--tls", nargs=2, metavar=("CERT", "KEY"), required=True)
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    token = given.token_file.read_text().strip()
    forge = Forge(given.port, given.root.resolve(), given.user, token)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*given.tls)
    forge.socket = context.wrap_socket(
        forge.socket, server_side=True, do_handshake_on_connect=False
    )
    print(forge.server_address[1], flush=True)
    with suppress(KeyboardInterrupt):  # of the terminal, and so for whoever started us
        forge.serve_forever()


if __name__ == "__main__":
    os.umask(0o077)
    main()
