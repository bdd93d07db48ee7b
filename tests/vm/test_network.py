"""The network of a real machine: what it reaches, what is cut, and what outlives whom."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support import netattacks, nginx, shelves
from support.netvm import WAIT_S, Networked
from support.until import until
from support.vm import START_S

from agent_box.netstack import routes

pytestmark = [pytest.mark.timeout(600)]  # emulated, and hosts are busy

RESET = 56  # curl: the connection was reset
NO_NAME = 6  # curl: the name does not resolve
NO_WAY = 7  # curl: no connection


@pytest.fixture(scope="module")
def host() -> Iterator[Networked]:
    made = Networked()
    try:
        made.begin()
        assert made.run("create", "web").exit == 0
        made.allow("one")
        made.allow("two")
        made.start("web")
        yield made
    finally:
        made.close()


def test_what_is_allowed_works_and_what_is_not_fails_at_once(host: Networked) -> None:
    assert host.curl(host.url("one")) == (0, "hello")
    assert host.curl("http://denied.test/")[0] == NO_NAME
    assert host.curl("http://203.0.113.1/")[0] == NO_WAY
    assert host.curl(f"http://127.0.0.1:{host.server.port}/")[0] == NO_WAY  # its own loopback
    until("both are events", lambda: len({d.get("name") for d in host.denials()}) == 2)
    named = [d for d in host.denials() if d.get("name") == "denied.test"]
    assert {d["rule"] for d in named} == {"mode:allowlist"}
    bare = [d for d in host.denials() if d.get("address") == "203.0.113.1"]
    assert [(d["port"], d["rule"]) for d in bare] == [(80, "mode:allowlist")]
    counters = host.run("inspect", "web", "--json").result["counters"]
    assert counters["denied"] >= 2 and counters["flows_total"] >= 1
    assert counters["bytes_down"] > 0


def test_git_and_apt_fetch_what_is_allowed_and_say_at_once_what_is_not(host: Networked) -> None:
    clone = "cd $(mktemp -d) && git clone --quiet {} boxed && cat boxed/saying"
    there = clone.format(host.url("one", "/git/boxed.git"))
    assert host.shell(there) == (0, shelves.SAYS)
    for url, why in (
        ("http://denied.test/boxed.git", "Could not resolve host: denied.test"),
        ("http://203.0.113.1/boxed.git", "Failed to connect to 203.0.113.1 port 80"),
    ):
        status, said = host.shell(clone.format(url))
        assert status and why in said, said
    apt = (
        "echo 'deb [trusted=yes] {} ./' > /tmp/list; set -e; "
        "o='-qq -o Acquire::Retries=0 -o Dir::Etc::sourcelist=/tmp/list "
        "-o Dir::Etc::sourceparts=/none'; "
        "apt-get $o -o APT::Update::Error-Mode=any update; cd $(mktemp -d); "
        "apt-get $o download boxed; dpkg-deb --extract boxed_*.deb .; sh usr/bin/boxed"
    )
    status, said = host.shell(apt.format(host.url("one", "/apt")), user="root")
    assert status == 0 and said.splitlines()[-1] == shelves.SAYS, said
    for url, why in (
        ("http://denied.test/apt", "Could not resolve 'denied.test'"),
        ("http://203.0.113.1/apt", "No route to host"),
    ):
        status, said = host.shell(apt.format(url), user="root")
        assert status and why in said, said


@pytest.mark.skipif(nginx.FOUND is None, reason="there is no nginx")
def test_http_2(host: Networked, tmp_path: Path) -> None:
    with nginx.plain_http2(tmp_path) as port:
        ran = host.run("policy", "set", "web", "--allow", f"one.test:{port}", "--allow-reserved")
        assert ran.exit == 0, ran
        urls = f"http://one.test:{port}/" + "{a,b,c}"
        status, said = host.inside("curl", "-sS", "--http2-prior-knowledge", "-Z", urls)
        lines = said.splitlines()
        assert status == 0 and len(lines) == 3 and len(set(lines)) == 1, "one connection"
        assert lines[0].startswith("HTTP/2.0 ")


def test_root_in_the_guest_gets_nowhere_else(host: Networked) -> None:
    port = host.server.port
    own = ["127.0.0.1", *sorted(_own_addresses())]
    reserved = ["169.254.169.254", "10.0.0.1", "192.168.1.1", "100.64.0.1", *own[1:]]
    disguised = ["2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518",
                 "::ffff:169.254.169.254", "::ffff:10.0.0.1"]  # fmt: skip
    unassigned = ["198.18.9.9", "198.18.0.3", "198.19.255.254"]
    v6 = ["64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1", "fd00:ec2::254", "2001:db8::1"]
    names = ["meta.test", "nat64.test", "sixtofour.test", "mapped.test", "own.test"]
    with _decoys(own, port) as reached:
        for name in names:
            ran = host.run("policy", "set", "web", "--allow", f"{name}:{port}")
            assert ran.exit == 0, ran
        before = host.run("inspect", "web", "--json").result["counters"]["denied"]
        facts = {
            "port": port,
            "addresses": [*reserved, *disguised, *unassigned, *v6],
            "numbers": ["169.254.169.254", "198.18.9.9", "203.0.113.53"],
            "names": [*names, "x.one.test", "localhost.test"],
            "questions": ["c2VjcmV0.evil.test", "c2VjcmV0.one.test", "a9fea9fe"],
            "allowed": "one.test",
            "sources": ["198.18.0.1", "198.18.0.3", "203.0.113.9", *own[1:]],
            "protocols": [41, 47, 132],
            "six": v6,
        }
        found = json.loads(host.script(Path(netattacks.__file__), json.dumps(facts)))
        for where in [*reserved, *disguised, *unassigned]:
            assert found.pop(f"tcp {where}") == "EHOSTUNREACH", where
        for where in v6:
            assert found.pop(f"tcp {where}") == "ENETUNREACH", where
        for where in facts["numbers"]:
            assert found.pop(f"udp {where}") == "EHOSTUNREACH", where
        for name in names:
            assert found.pop(f"name {name}") == "EHOSTUNREACH", name
        for name in facts["questions"]:
            assert (found.pop(f"A {name}"), found.pop(f"TXT {name}")) == ("rcode 3", "rcode 3")
        assert "THROUGH" not in found.values() and len(found) == 2, found
        assert reached() == []
    counted = len(reserved + disguised + unassigned + names)
    counted += sum(len(facts[key]) for key in ("numbers", "sources", "protocols", "six"))
    counted += 2 * len(facts["questions"]) + 2
    after = host.run("inspect", "web", "--json").result["counters"]["denied"]
    assert after - before >= counted
    until("its rules are told", lambda: {
        "reserved", "address:unassigned", "source:forged", "protocol:unknown", "protocol:ipv6",
        "mode:allowlist",
    } <= {re.sub("^reserved:.*", "reserved", d["rule"]) for d in host.denials()})  # fmt: skip
    assert host.curl(host.url("one")) == (0, "hello")


def test_a_paused_machine_and_a_tun_that_was_down_lose_no_flow(host: Networked) -> None:
    path = "/stream/paused"
    # A command ends for its caller when the machine pauses, so this one has none.
    curl = f"setsid curl -sS -o /dev/null {host.url('one', path)}"
    status, pid = host.inside("sh", "-c", f"{curl} >/dev/null 2>&1 </dev/null & echo $!")

    def goes_on() -> None:
        before = host.server.sent.get(path, 0)
        until("it goes on", lambda: host.server.sent.get(path, 0) > before + 50_000, seconds=WAIT_S)
        assert path not in host.server.ended

    try:
        assert status == 0
        goes_on()
        assert host.run("pause", "web").exit == 0
        time.sleep(4)  # for TCP on both sides to try again meanwhile
        assert host.run("resume", "web").exit == 0
        goes_on()
        down = "ip link set tun0 down; sleep 1.5; ip link set tun0 up"
        route = "ip route replace default via 198.18.0.1 dev tun0"
        assert host.inside("sh", "-c", f"{down}; {route}", user="root")[0] == 0
        goes_on()
    finally:
        host.inside("kill", pid.strip())


def test_a_rule_that_is_removed_cuts_its_download_and_no_other(host: Networked) -> None:
    kept, cut = host.download("one", "/stream/kept"), host.download("two", "/stream/cut")
    try:
        rule = f"two.test:{host.server.port}"
        assert host.run("policy", "set", "web", "--remove", rule).exit == 0
        assert cut.wait(WAIT_S) == RESET
        until("the server heard it", lambda: "/stream/cut" in host.server.ended)
        before = host.server.sent["/stream/kept"]
        until("the other goes on", lambda: host.server.sent["/stream/kept"] > before)
        assert kept.poll() is None
        until("it is an event", lambda: "policy-applied" in host.kinds("web"))
        assert host.last("web", "policy-applied")["revoked"] == 1
        assert host.curl(host.url("two"))[0] == NO_NAME
        host.allow("two")
        assert host.curl(host.url("two")) == (0, "hello")
    finally:
        kept.terminate()
        kept.wait(WAIT_S)


def test_flows_outlive_the_service_and_its_time_is_not_lost(host: Networked) -> None:
    download = host.download("one", "/stream/outlives")
    try:
        host.kill("netstack")
        assert host.curl("http://meanwhile.test/")[0] == NO_NAME
        until("it is back", host.ready, seconds=WAIT_S)
        until(
            "it is told",
            lambda: any(d.get("name") == "meanwhile.test" for d in host.denials()),
            seconds=WAIT_S,
        )
        before = host.server.sent["/stream/outlives"]
        until("it goes on", lambda: host.server.sent["/stream/outlives"] > before)
        assert download.poll() is None and "/stream/outlives" not in host.server.ended
    finally:
        download.terminate()
        download.wait(WAIT_S)


def test_a_worker_that_was_killed_resets_its_flows_and_another_serves(host: Networked) -> None:
    download = host.download("one", "/stream/reset")
    pid = host.worker()
    os.kill(pid, signal.SIGKILL)
    assert download.wait(WAIT_S) == RESET
    until("the server heard it", lambda: "/stream/reset" in host.server.ended)
    assert host.curl(host.url("one")) == (0, "hello")
    assert host.worker() != pid
    until("it is an event", lambda: "worker-started" in host.kinds("web"))


def test_a_forward_leads_into_the_guest(host: Networked) -> None:
    made = host.run("forward", "web", "0:3000", "--json").result["forwards"][0]
    port = made["host_port"]
    serving = host.popen("exec", "web", "--", "python3", "-m", "http.server", "3000",
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        until("it serves", lambda: _get(port).startswith(b"HTTP/1.0 200"), seconds=WAIT_S)
        if _has_ipv6():
            assert _get(port, "::1").startswith(b"HTTP/1.0 200")
        taken = host.run("forward", "web", f"{port}:4000", "--json")
        assert taken.error["exit"] == 5 and "web:3000" in taken.error["message"]
        with socket.create_server(("127.0.0.1", 0)) as other:
            ran = host.run("forward", "web", f"{other.getsockname()[1]}:4000", "--json")
            assert f"pid {os.getpid()} " in ran.error["message"]
        assert host.run("forward", "web", "--remove", str(port)).exit == 0
        assert _get(port) == b""
    finally:
        serving.terminate()
        serving.wait(WAIT_S)


def _get(port: int, address: str = "127.0.0.1") -> bytes:
    """The beginning of the answer; empty when there is none."""
    try:
        with socket.create_connection((address, port), WAIT_S) as sock:
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return sock.recv(100)
    except OSError:
        return b""


def _own_addresses() -> set[str]:
    """This host's IPv4 addresses but for its loopback."""
    return {str(one.network_address) for one in routes.delivered()
            if one.version == 4 and not one.is_loopback and one.prefixlen == 32}  # fmt: skip


@contextmanager
def _decoys(addresses: list[str], port: int) -> Iterator[Callable[[], list[str]]]:
    """Listens at a port of each address where that is free; tells who was reached."""
    with ExitStack() as stack:
        decoys = []
        for address in addresses:
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                sock = stack.enter_context(socket.socket(socket.AF_INET, kind))
                try:
                    sock.bind((address, port))
                except OSError:
                    continue  # the server's own, or no address of an interface
                if kind == socket.SOCK_STREAM:
                    sock.listen()
                decoys.append(sock)
        yield lambda: [str(sock) for sock in select.select(decoys, [], [], 0)[0]]


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_a_capture_prints_and_writes_packets(host: Networked, tmp_path: Path) -> None:
    download = host.download("one", "/stream/seen")
    try:
        shown = host.run("capture", "web", "--count", "5", "--filter", "tcp", "--json")
        assert shown.exit == 0 and len(shown.lines) == 6
        assert "TCP 198.18." in shown.lines[0]["summary"].replace("IP / ", "")
        file = tmp_path / "x.pcap"
        assert host.run("capture", "web", "-w", str(file), "--count", "3").exit == 0
        data = file.read_bytes()
        assert struct.unpack_from("<IHHiIII", data) == (0xA1B2C3D4, 2, 4, 0, 0, 65535, 101)
        from scapy.utils import rdpcap

        assert len(rdpcap(str(file))) == 3
    finally:
        download.terminate()
        download.wait(WAIT_S)


def test_forwards_end_with_the_machine_and_it_starts_again(host: Networked) -> None:
    port = host.run("forward", "web", "0:3000", "--json").result["forwards"][0]["host_port"]
    assert host.run("stop", "web", timeout=START_S).exit == 0
    assert _get(port) == b""
    assert host.run("forward", "web", "--list").exit == 4
    host.start("web")
    assert host.run("forward", "web", "--list", "--json").result["forwards"] == []
    assert host.curl(host.url("one")) == (0, "hello")


@pytest.mark.slow  # a second machine
def test_no_machine_reaches_another(host: Networked) -> None:
    """Each has the same addresses for itself, so what is left is the host's side of a forward."""
    assert host.run("create", "other").exit == 0
    host.start("other")
    made = host.run("forward", "other", "0:3000", "--json").result["forwards"][0]
    port = made["host_port"]
    serving = host.popen("exec", "other", "--", "python3", "-m", "http.server", "3000",
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        until("it serves", lambda: _get(port).startswith(b"HTTP/1.0 200"), seconds=WAIT_S)
        before = host.run("inspect", "web", "--json").result["counters"]["denied"]
        own = sorted(_own_addresses())
        for address in (*own, "198.18.0.3", "198.18.1.0"):
            status, said = host.inside("curl", "-sS", "--max-time", "30",
                                       f"http://{address}:{port}/")  # fmt: skip
            assert (status, said) == (NO_WAY, ""), address
        for url in (f"http://127.0.0.1:{port}/", "http://198.18.0.2:3000/"):  # itself
            assert host.curl(url)[0] == NO_WAY
        after = host.run("inspect", "web", "--json").result["counters"]["denied"]
        assert after - before == len(own) + 2
        assert _get(port).startswith(b"HTTP/1.0 200")
    finally:
        serving.terminate()
        serving.wait(WAIT_S)
        host.run("delete", "other", "--force", timeout=WAIT_S)
