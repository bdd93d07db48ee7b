"""Names that lie to a real machine: their look-ups go to a name server of the test's, which the
network worker asks, and TLS goes to its own port."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator

import pytest
from support.nameserver import NameServer
from support.netvm import WAIT_S, Apart
from support.until import until
from support.upstreams import Authority

pytestmark = [pytest.mark.timeout(600)]  # emulated, and hosts are busy

PLAIN, TLS = 8080, 443
NO_WAY = 7  # curl: no connection
NO_TLS = 35  # curl: the connection ended within the handshake
PUBLIC = "203.0.113.1"


class Listener:
    """Greets whoever comes, by plain HTTP or by TLS; counts them, and the bytes that they sent
    before they were greeted."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext | None = None) -> None:
        self.came = 0
        self.first: list[bytes] = []
        self._sock = sock
        self._context = context
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                return
            self.came += 1
            threading.Thread(target=self._one, args=(sock,), daemon=True).start()

    def _one(self, sock: socket.socket) -> None:
        sock.settimeout(WAIT_S)
        try:
            self.first.append(sock.recv(1, socket.MSG_PEEK))
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_side=True)
            with sock:
                sock.recv(65536)
                sock.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        except OSError:
            self.first.append(b"")  # it was reset before it had said anything


@pytest.fixture(scope="module")
def host() -> Iterator[Apart]:
    made = Apart()
    try:
        made.begin(PLAIN, TLS)
        assert made.run("create", "web").exit == 0
        made.start("web")
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def names(host: Apart) -> NameServer:
    """All names are this host's but where a test says otherwise."""
    made = NameServer(socks=(host.udp, host.tcp[53]))
    made.records = {"one.test": [("A", "127.0.0.1", 9)]}
    return made


@pytest.fixture(scope="module")
def plain(host: Apart) -> Listener:
    return Listener(host.tcp[PLAIN])


def allow(host: Apart, target: str, *more: str) -> None:
    ran = host.run("policy", "set", "web", "--allow", target, *more)
    assert ran.exit == 0, ran


def rules_of(host: Apart, table: str) -> None:
    """Puts a table of rules in the place of what the instance had."""
    file = host.home / "rules.toml"
    file.write_text(table)
    ran = host.run("policy", "set", "web", "--file", str(file))
    assert ran.exit == 0, ran


def address(host: Apart, name: str) -> str:
    """What the guest has for a name."""
    status, said = host.inside("getent", "ahostsv4", name)
    assert status == 0
    return said.split()[0]


def rules(host: Apart, name: str) -> list[str]:
    """By which flows to a name were denied, once there is one."""
    return until(
        f"{name} is denied",
        lambda: [d["rule"] for d in host.denials() if d.get("name") == name],
    )


def test_an_alias_of_a_denied_name(host: Apart, names: NameServer, plain: Listener) -> None:
    names.records |= {
        "nice.test": [("CNAME", "cdn.test", 9)],
        "cdn.test": [("CNAME", "x.bad.test", 9)],
        "x.bad.test": [("A", "127.0.0.1", 9)],
    }
    reserved = f"ports = [{PLAIN}], allow_reserved = true"
    allowed = ", ".join(f'{{ host = "{name}.test", {reserved} }}' for name in ("one", "nice"))
    rules_of(host, f'mode = "allowlist"\nallow = [{allowed}]\n')
    assert host.curl(f"http://one.test:{PLAIN}/") == (0, "hello")
    assert host.curl(f"http://nice.test:{PLAIN}/") == (0, "hello"), "an alias needs no rule"
    denied = f'deny = [{{ host = "*.bad.test", ports = [{PLAIN}] }}]\n'
    rules_of(host, f'mode = "allowlist"\nallow = [{allowed}]\n{denied}')
    came = plain.came
    assert host.curl(f"http://nice.test:{PLAIN}/")[0] == NO_WAY
    assert host.curl(f"http://one.test:{PLAIN}/") == (0, "hello")
    assert plain.came == came + 1
    assert rules(host, "nice.test") == [f"deny:*.bad.test:{PLAIN}/tcp"]


def test_a_name_that_leads_elsewhere_by_the_time_of_the_connect(
    host: Apart, names: NameServer, plain: Listener
) -> None:
    names.records["swings.test"] = [("A", PUBLIC, 0)]
    allow(host, f"swings.test:{PLAIN}")
    there = address(host, "swings.test")
    asked = names.asked.count("swings.test")
    assert asked and there.startswith("198.18.")
    names.records["swings.test"] = [("A", "127.0.0.1", 0)]
    came = plain.came

    def asked_again() -> bool:  # the answer before is kept for a moment, whatever its time to live
        assert host.curl(f"http://{there}:{PLAIN}/")[0] == NO_WAY
        return names.asked.count("swings.test") > asked

    until("it is looked up again", asked_again, seconds=WAIT_S)
    assert plain.came == came
    until(
        "it is denied for where it leads now", lambda: "reserved:own" in rules(host, "swings.test")
    )


def test_a_tls_client_that_names_another_server(host: Apart, names: NameServer) -> None:
    authority = Authority()
    secure = Listener(host.tcp[TLS], authority.server("one.test", "two.test"))
    allow(host, f"one.test:{TLS}", "--allow-reserved")
    there = address(host, "one.test")
    curl = ("curl", "-sS", "--insecure", "--max-time", "30")
    assert host.inside(*curl, "https://one.test/") == (0, "hello")
    status, said = host.inside(*curl, "--resolve", f"two.test:{TLS}:{there}", "https://two.test/")
    assert (status, said) == (NO_TLS, "")
    status, said = host.inside(*curl, f"https://{there}/")  # no name at all
    assert (status, said) == (NO_TLS, "")
    until("both were reset upstream", lambda: len(secure.first) == 3, seconds=WAIT_S)
    assert secure.first[1:] == [b"", b""], "upstream heard from it"
    until("both are events", lambda: rules(host, "one.test") == ["sni:mismatch", "sni:missing"])
    assert host.inside(*curl, "https://one.test/") == (0, "hello")
