"""The stub resolver against a name server on loopback, stepped by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.nameserver import NameServer
from support.planes import etc
from support.until import until

from agent_box.netstack import resolver as resolving
from agent_box.netstack.names import Found
from agent_box.netstack.poller import Poller
from agent_box.netstack.resolver import Resolver, hosts, servers


class Stepped:
    def __init__(self, directory: Path, port: int, nameserver: str = "127.0.0.1") -> None:
        self.now = 0.0
        self.poller = Poller(lambda: self.now)
        self.full = 0
        self.etc = etc(directory / "etc", {"fixed.test": "192.0.2.9"}, nameserver)
        self.resolver = Resolver(self.poller, self.etc, port, self._full)

    def _full(self) -> None:
        self.full += 1

    def step(self) -> None:
        self.poller.tick()
        self.poller.poll()

    def ask(self, name: str) -> Found:
        found: list[Found] = []
        self.poller.tick()
        self.resolver.lookup(name, found.append)

        def look() -> bool:
            self.step()
            return bool(found)

        until("an answer", look)
        return found[0]


@pytest.fixture
def server() -> Iterator[NameServer]:
    made = NameServer()
    yield made
    made.close()


def test_hosts_come_first_and_the_server_after(server: NameServer, tmp_path: Path) -> None:
    server.records = {"a.test": [("A", "192.0.2.1", 300), ("AAAA", "2001:db8::1", 300)]}
    stepped = Stepped(tmp_path, server.port)
    assert stepped.ask("fixed.test").addresses == ("192.0.2.9",)
    assert server.asked == []
    assert set(stepped.ask("a.test").addresses) == {"192.0.2.1", "2001:db8::1"}
    assert stepped.ask("none.test").status == "no-such-name"


def test_answers_are_kept_for_their_time_and_no_longer(server: NameServer, tmp_path: Path) -> None:
    server.records = {"a.test": [("A", "192.0.2.1", 30)], "long.test": [("A", "192.0.2.1", 9999)]}
    stepped = Stepped(tmp_path, server.port)
    stepped.ask("a.test")
    stepped.ask("long.test")
    server.records = {}
    stepped.now = 29
    assert stepped.ask("a.test").status == "found"
    stepped.now = 31
    assert stepped.ask("a.test").status == "no-such-name"
    assert stepped.ask("long.test").status == "found"
    stepped.now = 61
    assert stepped.ask("long.test").status == "no-such-name", "a minute is the most"


def test_a_cut_answer_is_asked_again_by_tcp(server: NameServer, tmp_path: Path) -> None:
    server.cut = True
    server.records = {"a.test": [("A", f"192.0.2.{i}", 9) for i in range(14)]}
    assert len(Stepped(tmp_path, server.port).ask("a.test").addresses) == 14


def test_silence_fails_in_the_end_and_each_server_is_tried(
    server: NameServer, tmp_path: Path
) -> None:
    server.silent = True
    stepped = Stepped(tmp_path, server.port, "127.0.0.1\nnameserver bogus\nnameserver 127.0.0.2")
    found: list[Found] = []
    stepped.poller.tick()
    stepped.resolver.lookup("a.test", found.append)
    for _ in range(12):
        stepped.step()
        stepped.now += 2.1
    stepped.step()
    assert [one.status for one in found] == ["failed"]


def test_a_forged_answer_is_not_taken(server: NameServer, tmp_path: Path) -> None:
    server.records = {"a.test": [("A", "192.0.2.1", 9)]}
    server.mangle = lambda data: bytes((data[0] ^ 1,)) + data[1:]
    stepped = Stepped(tmp_path, server.port)
    found: list[Found] = []
    stepped.poller.tick()
    stepped.resolver.lookup("a.test", found.append)
    until("the forgery is sent", lambda: len(server.asked) >= 2)
    stepped.step()
    assert found == []
    server.mangle = None
    stepped.now += 2.1

    def look() -> bool:
        stepped.step()
        return bool(found)

    until("the true answer", look)
    assert found[0].addresses == ("192.0.2.1",)


def test_one_question_for_many_who_ask_and_a_limit_for_all(
    server: NameServer, tmp_path: Path
) -> None:
    server.silent = True
    stepped = Stepped(tmp_path, server.port)
    found: list[Found] = []
    stepped.poller.tick()
    for _ in range(50):
        stepped.resolver.lookup("a.test", found.append)
    until("it is asked", lambda: len(server.asked) == 2)
    for number in range(resolving.PENDING_MAX + 10):
        stepped.resolver.lookup(f"{number}.test", found.append)
    assert stepped.full == 11 and len(found) == 11
    stepped.resolver.close()


def test_the_hosts_files() -> None:
    text = "# no\nnameserver 192.0.2.1\nnameserver\n nameserver ::1 \noptions x\n"
    assert servers(text + "nameserver a\nnameserver b") == ["192.0.2.1", "::1", "a"]
    assert hosts("127.0.0.1 A b # c\n::1 a\n\n127.0.0.1\tb\n") == {
        "a": ("127.0.0.1", "::1"),
        "b": ("127.0.0.1",),
    }
