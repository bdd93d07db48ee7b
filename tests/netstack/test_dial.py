"""Connecting in turn."""

from __future__ import annotations

import errno
import socket

from support.until import until

from agent_box.netstack.dial import STAGGER_S, Dial, full, order, usable
from agent_box.netstack.poller import Poller


def dial(*addresses: str, port: int) -> tuple[socket.socket | None, str | None, int]:
    now = [0.0]
    poller = Poller(lambda: now[0])
    done: list[tuple[socket.socket | None, str | None, int]] = []
    Dial(poller, addresses, port, lambda *result: done.append(result)).start()

    def look() -> bool:
        now[0] += STAGGER_S
        poller.tick()
        poller.poll()
        return bool(done)

    until("it is done", look)
    poller.close()
    assert len(done) == 1
    return done[0]


def test_families_take_turns() -> None:
    assert order(["1.1.1.1", "1.1.1.2", "::1", "::2", "::3"]) == [
        "::1", "1.1.1.1", "::2", "1.1.1.2", "::3",
    ]  # fmt: skip


def test_the_first_that_works() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        sock, address, code = dial("::1", "127.0.0.9", "127.0.0.1", port=port)
        assert sock is not None and (address, code) == ("127.0.0.1", 0)
        assert sock.getpeername() == ("127.0.0.1", port)
        alive = sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert alive, "else an upstream that is gone without a word is never noticed"
        sock.close()


def test_one_that_does_not_answer_holds_nobody_up() -> None:
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as stuck,
        socket.socket() as first,
        socket.socket() as second,
    ):
        port = stuck.getsockname()[1]
        for sock in (first, second):
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
        with socket.create_server(("127.0.0.2", port)):
            found, address, _ = dial("127.0.0.1", "127.0.0.2", port=port)
            assert found is not None and address == "127.0.0.2"
            found.close()


def test_refused_says_more_than_unreachable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        assert dial("127.0.0.1", "::1", port=port) == (None, None, errno.ECONNREFUSED)
    assert dial(port=port) == (None, None, errno.EHOSTUNREACH)


def test_small_questions() -> None:
    assert full(errno.EMFILE) and not full(errno.ECONNREFUSED)
    assert usable("::1") and usable("127.0.0.1") and not usable("name")
