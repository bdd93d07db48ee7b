"""`git http-backend` behind nginx behind TLS, with Basic authentication: a forge of one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from support.until import until
from support.upstreams import Authority

NGINX, FCGIWRAP = "/usr/sbin/nginx", "/usr/sbin/fcgiwrap"
BACKEND = "/usr/lib/git-core/git-http-backend"
PRESENT = all(map(os.path.exists, (NGINX, FCGIWRAP, BACKEND)))
USER = "real-user"


class GitServer:
    """Args:
    root: an empty directory, short enough for sockets.
    password: of `USER`; each request needs it, and none else gets in.
    """

    def __init__(self, root: Path, authority: Authority, password: str) -> None:
        self.root = root
        self.repos = root / "repos"
        self.repos.mkdir()
        self.log = root / "access.log"
        certificate, key = authority.files(root)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        hashed = subprocess.run(
            ["openssl", "passwd", "-apr1", password], capture_output=True, text=True, check=True
        ).stdout.strip()
        (root / "htpasswd").write_text(f"{USER}:{hashed}\n")
        (root / "nginx.conf").write_text(
            f"""daemon off; pid {root}/pid; error_log {root}/error.log; worker_processes 1;
events {{ worker_connections 64; }}
http {{
  log_format asked '$request_method $request_uri $status $remote_user';
  access_log {self.log} asked;
  client_max_body_size 0;
  client_body_temp_path {root}/t1; proxy_temp_path {root}/t2; fastcgi_temp_path {root}/t3;
  uwsgi_temp_path {root}/t4; scgi_temp_path {root}/t5;
  server {{
    listen 127.0.0.1:{self.port} ssl;
    ssl_certificate {certificate}; ssl_certificate_key {key};
    auth_basic "git"; auth_basic_user_file {root}/htpasswd;
    location / {{
      fastcgi_pass unix:{root}/cgi;
      fastcgi_param SCRIPT_FILENAME {BACKEND};
      fastcgi_param GIT_PROJECT_ROOT {self.repos};
      fastcgi_param GIT_HTTP_EXPORT_ALL 1;
      fastcgi_param PATH_INFO $uri;
      fastcgi_param QUERY_STRING $query_string;
      fastcgi_param REQUEST_METHOD $request_method;
      fastcgi_param CONTENT_TYPE $content_type;
      fastcgi_param HTTP_CONTENT_ENCODING $http_content_encoding;
      fastcgi_param GIT_PROTOCOL $http_git_protocol;
      fastcgi_param REMOTE_USER $remote_user;
    }}
  }}
}}
"""
        )
        # fcgiwrap leaves its children behind when it is told to end: each in a group of its own
        quiet = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.DEVNULL,
            "start_new_session": True,
        }
        self._running = [
            subprocess.Popen([FCGIWRAP, "-s", f"unix:{root}/cgi", "-c", "4"], **quiet),  # type: ignore[call-overload]
            subprocess.Popen([NGINX, "-c", f"{root}/nginx.conf", "-p", str(root)], **quiet),  # type: ignore[call-overload]
        ]
        until("the server listens", self._listens)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return (self.root / "cgi").exists()

    def make(self, name: str) -> Path:
        """A bare repository with one commit on main."""
        bare = self.repos / f"{name}.git"
        bare.parent.mkdir(exist_ok=True)
        work = self.root / "first"
        for words in (
            ["init", "-q", "-b", "main", str(work)],
            ["-C", str(work), "commit", "-q", "--allow-empty", "-m", "first"],
            ["clone", "-q", "--bare", str(work), str(bare)],
            ["-C", str(bare), "config", "http.receivepack", "true"],
        ):
            subprocess.run(["git", *words], check=True, env=ENV | {"HOME": str(self.root)})
        shutil.rmtree(work)
        return bare

    def refs(self, name: str) -> list[str]:
        shown = subprocess.run(
            ["git", "-C", str(self.repos / f"{name}.git"), "for-each-ref", "--format=%(refname)"],
            capture_output=True, text=True, check=True, env=ENV | {"HOME": str(self.root)},
        )  # fmt: skip
        return shown.stdout.split()

    def asked(self) -> list[str]:
        """What nginx logged: method, URI, status, user."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def close(self) -> None:
        for process in reversed(self._running):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(20)


ENV = {
    "PATH": "/usr/bin:/bin",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.com",
    "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@example.com",
}  # fmt: skip
