"""A machine with a network, and servers for it on this host's loopback address.

Names lead there by a hosts file that the daemon sees in a mount namespace of its own, and rules
with `--allow-reserved` let them.

`Apart` has a loopback address of its own, where a test has the ports that an account may not have
on the host's: that of a name server, which the network worker asks, and that of TLS.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from support import cli, shelves
from support.until import until
from support.vm import CONFIG, Machines

WAIT_S = 60.0  # a bound on a hang
METADATA = """\
169.254.169.254 meta.test
64:ff9b::a9fe:a9fe nat64.test
2002:a9fe:a9fe::1 sixtofour.test
::ffff:169.254.169.254 mapped.test
"""


class Server(ThreadingHTTPServer):
    """Says hello, or what is in a file of `root`; below /git/ it is a git server, and below
    /stream/ it sends without an end, and keeps count."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sent: dict[str, int] = {}
        self.ended: set[str] = set()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path.startswith("/git/"):
            self._git("GET", b"")
            return
        if not self.path.startswith("/stream/"):
            self._file()
            return
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(bytes(1000))
                self.server.sent[self.path] = self.server.sent.get(self.path, 0) + 1000
                threading.Event().wait(0.02)  # so that it fills nobody's memory
        except OSError:
            self.server.ended.add(self.path)

    def do_POST(self) -> None:
        if self.headers.get("transfer-encoding") == "chunked":
            self.send_error(411)
            return
        self._git("POST", self.rfile.read(int(self.headers.get("content-length", 0))))

    def _git(self, method: str, body: bytes) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = shelves.git_answer(self.server.root, method, self.path, headers, body)
        head, _, content = answer.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        self.send_response(int(fields.pop("Status", "200").split()[0]))
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _file(self) -> None:
        path = self.server.root / self.path.partition("?")[0].strip("/")
        content = b"hello"
        if path != self.server.root:
            path = path / "index.html" if path.is_dir() else path
            if not path.is_file():
                self.send_error(404)
                return
            content = path.read_bytes()
        self.send_response(200)
        kind = {".html": "text/html", "": "application/json"}.get(path.suffix)
        self.send_header("content-type", kind or "application/octet-stream")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Tests have their own."""


class Web(Machines):
    """An agent-box with an instance `web`."""

    def inside(self, *argv: str, user: str = "agent") -> tuple[int, str]:
        """The exit status and the output of a command in the guest."""
        done = subprocess.run(
            [str(cli.BINARY), "exec", "web", "--user", user, "--", *argv],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=4 * WAIT_S,
        )
        return done.returncode, done.stdout

    def shell(self, script: str, user: str = "agent") -> tuple[int, str]:
        """The exit status of a script in the guest, and all that it wrote."""
        return self.inside("sh", "-c", f"exec 2>&1\n{script}", user=user)

    def script(self, source: Path, *argv: str) -> str:
        """What a Python script prints as the guest's root."""
        done = subprocess.run(
            [str(cli.BINARY), "exec", "web", "--user", "root", "--", "python3", "-", *argv],
            env=self.env,
            input=source.read_text(),
            capture_output=True,
            text=True,
            check=False,
            timeout=4 * WAIT_S,
        )
        assert done.returncode == 0, done
        return done.stdout

    def curl(self, url: str) -> tuple[int, str]:
        return self.inside("curl", "-sS", "--max-time", "30", url)

    def worker(self) -> int:
        found = self.run("inspect", "web", "--json").result["id"]
        record = json.loads((self.paths.state / "instances" / found / "state.json").read_text())
        pid: int = record["procs"]["worker"]["pid"]
        return pid

    def denials(self) -> list[dict[str, Any]]:
        return [e["facts"] for e in self.events("web") if e["kind"] == "flow-denied"]


class Networked(Web):
    """Its instance may reach `one` and `two`."""

    def __init__(self, *, config: str = CONFIG, with_image: bool = True) -> None:
        super().__init__(config=config, with_image=with_image)
        (self.home / "shelves").mkdir()
        self.server = Server(self.home / "shelves")
        shelves.stock(self.server.root, self.url("one", "").rstrip("/"))

    def begin(self) -> None:
        hosts = self.home / "hosts"
        hosts.write_text("127.0.0.1 localhost one.test two.test own.test\n" + METADATA)
        # whoever is first starts the daemon, here where /etc/hosts is another one
        command = ["bwrap", "--dev-bind", "/", "/", "--ro-bind", str(hosts), "/etc/hosts"]
        subprocess.run(
            [*command, str(cli.BINARY), "list"],
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=WAIT_S,
        )
        self.up()

    def url(self, name: str, path: str = "/") -> str:
        return f"http://{name}.test:{self.server.port}{path}"

    def download(self, name: str, path: str) -> subprocess.Popen[str]:
        """A download that does not end by itself, once it has begun."""
        process = self.popen("exec", "web", "--", "curl", "-sS", "-o", "/dev/null",
                             self.url(name, path), stderr=subprocess.PIPE)  # fmt: skip
        until("it downloads", lambda: self.server.sent.get(path), seconds=WAIT_S)
        return process

    def allow(self, name: str) -> None:
        rule = f"{name}.test:{self.server.port}"
        ran = self.run("policy", "set", "web", "--allow", rule, "--allow-reserved")
        assert ran.exit == 0, ran

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        super().close()


# Makes sockets for the test, then becomes the command without the right to it.
_BOUND = """
import os, socket, sys
tcp = [socket.create_server(("127.0.0.1", port)) for port in map(int, sys.argv[2].split())]
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("127.0.0.1", 53))
made = [each.fileno() for each in (udp, *tcp)]
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"made"], made)
drop = ["setpriv", "--ambient-caps=-all", "--inh-caps=-all"]
os.execvp(drop[0], [*drop, *sys.argv[3:]])
"""


class Apart(Web):
    """An agent-box in a network namespace of its own; `begin` starts it.

    Attributes:
        udp: bound to port 53 of its loopback address.
        tcp: listening there, by port.
    """

    def begin(self, *ports: int) -> None:
        """`ports` are listened on, besides 53."""
        resolv, hosts = self.home / "resolv.conf", self.home / "hosts"
        resolv.write_text("nameserver 127.0.0.1\n")
        hosts.write_text("127.0.0.1 localhost\n")
        wanted = (53, *ports)
        ours, theirs = socket.socketpair()
        began = subprocess.run(
            [
                *("bwrap", "--dev-bind", "/", "/", "--unshare-user", "--unshare-net"),
                *("--cap-add", "CAP_NET_BIND_SERVICE"),
                *("--ro-bind", str(resolv), "/etc/resolv.conf"),
                *("--ro-bind", str(hosts), "/etc/hosts"),
                *(sys.executable, "-c", _BOUND, str(theirs.fileno())),
                *(" ".join(map(str, wanted)), str(cli.BINARY), "list"),
            ],
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=2 * WAIT_S,
            pass_fds=[theirs.fileno()],
        )
        # 14: it started the daemon, whose answer took too long on a busy host
        assert began.returncode in (0, 14), began
        with ours, theirs:
            _, fds, _, _ = socket.recv_fds(ours, 16, 1 + len(wanted))
        self.udp, *tcp = (socket.socket(fileno=fd) for fd in fds)
        self.tcp = dict(zip(wanted, tcp, strict=True))
        self.up()
