"""Whoever connects and whatever is said, the helper serves the others."""

from __future__ import annotations

import array
import json
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.helperhouse import Client, HelperHouse, fresh
from support.until import until

from agent_box.helper import contract, link, proof, server, wire
from agent_box.helper.ops import Done
from agent_box.helper.wire import Refused


@pytest.fixture(scope="module")
def shared() -> Iterator[HelperHouse]:
    made = HelperHouse()
    made.start()
    try:
        yield made
    finally:
        made.close()


def raw(place: HelperHouse) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10)
    sock.connect(str(place.sock))
    return sock


def well(place: HelperHouse) -> None:
    """It lives, and serves an honest engine."""
    assert place.process is not None
    assert place.process.poll() is None
    with place.client() as client:
        assert client.ask("list", after=None)["more"] is False


def open_fds(place: HelperHouse) -> int:
    assert place.process is not None
    return len(os.listdir(f"/proc/{place.process.pid}/fd"))


# ------------------------------------------------------------------------ who gets in


def test_a_wrong_key_is_refused(shared: HelperHouse) -> None:
    with pytest.raises(ConnectionResetError):
        Client(shared.sock, bytes(32))
    assert "the proof is wrong" in shared.log.read_text()
    well(shared)


def test_a_recorded_conversation_is_refused(shared: HelperHouse) -> None:
    """Everything that an engine said once, said again."""
    with raw(shared) as first, raw(shared) as second:
        side = proof.EngineSide(shared.key, os.urandom(32))
        said = side.proof(first.recv(65536))
        first.send(said)
        side.accept(first.recv(65536))
        asked = wire.request(1, wire.OPS["list"], {"after": None})
        first.send(asked)
        assert first.recv(65536)
        second.recv(65536)
        second.send(said)
        assert second.recv(65536) == b""
        with pytest.raises(OSError):
            second.send(asked)


def test_nothing_is_done_before_the_proof(shared: HelperHouse) -> None:
    with raw(shared) as sock:
        sock.recv(65536)
        sock.send(wire.request(1, wire.OPS["allocate"], {"id": fresh(), "disk_bytes": 64 << 20}))
        assert sock.recv(65536) == b""
    with shared.client() as client:
        assert client.ask("list", after=None)["instances"] == []


def test_the_first_word_tells_nothing_but_a_challenge(shared: HelperHouse) -> None:
    with raw(shared) as one, raw(shared) as two:
        first, second = json.loads(one.recv(65536)), json.loads(two.recv(65536))
    assert first.keys() == {"v", "challenge"}
    assert first["challenge"] != second["challenge"]


def test_one_that_proves_nothing_is_let_go(shared: HelperHouse) -> None:
    with raw(shared) as sock:
        sock.recv(65536)
        assert sock.recv(65536) == b""  # after its time


def test_a_crowd_of_silent_ones_is_let_go_and_the_engine_gets_in_again(
    shared: HelperHouse,
) -> None:
    before = open_fds(shared)
    crowd = []
    for _ in range(60):
        try:
            crowd.append(raw(shared))
        except OSError:
            break
    # Those that came last are hung up on at once, unread; the first may still prove themselves.
    assert any(_hung_up(sock) for sock in crowd[32:])
    assert not any(_hung_up(sock) for sock in crowd[:8])
    for sock in crowd:
        sock.close()
    until("it serves again", lambda: _serves(shared))
    until("it holds nothing of them", lambda: open_fds(shared) <= before + 1)


def _hung_up(sock: socket.socket) -> bool:
    try:
        return sock.recv(65536) == b""
    except OSError:
        return True


def _serves(place: HelperHouse) -> bool:
    try:
        well(place)
    except OSError:
        return False
    return True


# ------------------------------------------------------------------------ what is said


LIVELY = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@LIVELY
@given(st.binary(max_size=2000))
def test_noise_ends_a_connection_and_nothing_else(shared: HelperHouse, data: bytes) -> None:
    with shared.client() as client:
        client.sock.send(data)
        if data:
            assert client.sock.recv(65536) == b""
    well(shared)


WORD = st.text("0123456789abcdef", min_size=32, max_size=32)
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=40) | WORD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)


@LIVELY
@given(st.sampled_from([op.name for op in contract.OPS] + ["", "exec"]), st.data())
def test_odd_arguments_are_refused_and_the_connection_goes_on(
    shared: HelperHouse, name: str, data: Any
) -> None:
    """Never a harm: an id that is good in form names nothing here."""
    op = wire.OPS.get(name)
    fields = {field for field, _ in op.request.fields} if op else {"id"}
    args = {field: data.draw(ODD | WORD) for field in fields}
    args |= data.draw(st.just({}) | st.dictionaries(st.text(max_size=9), ODD, max_size=2))
    message = json.dumps({"v": 1, "req": 5, "op": name, "args": args}).encode()
    with shared.client() as client:
        client.sock.send(message)
        said = client.sock.recv(65536)
        if said:
            answer = wire.read_answer(said)
            assert answer.req == 5
            assert answer.refused is None or answer.refused.code != "internal", answer
            client.ask("list", after=None)
        else:  # not even an envelope: nested too deeply, or a number that is too long
            with pytest.raises(wire.WireError):
                wire.read_request(message)
    assert shared.leftovers() == []


def test_descriptors_are_refused_and_closed(shared: HelperHouse) -> None:
    before = open_fds(shared)
    for count in (1, 8, 9, 250):
        with shared.client() as client:
            fds = array.array("i", [0] * count)
            asked = wire.request(1, wire.OPS["list"], {"after": None})
            client.sock.sendmsg([asked], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            assert client.sock.recv(65536) == b""
    until("none of them is open", lambda: open_fds(shared) <= before)


def test_descriptors_are_refused_before_the_proof_too(shared: HelperHouse) -> None:
    before = open_fds(shared)
    with raw(shared) as sock:
        sock.recv(65536)
        fds = array.array("i", [0, 0])
        sock.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        assert sock.recv(65536) == b""
    until("none of them is open", lambda: open_fds(shared) <= before)


def test_one_that_does_not_read_is_let_go(shared: HelperHouse) -> None:
    with shared.client() as client:
        for number in range(40_000):
            try:
                client.sock.send(wire.request(number, wire.OPS["list"], {"after": None}))
            except OSError:
                break
        else:
            pytest.fail("it never stopped reading")
        well(shared)


class Slow:
    """Operations that are done when the test says so."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.table = {op.name: self.do for op in contract.OPS}

    def do(self, _args: dict[str, Any]) -> Done:
        self.begun.release()
        assert self.may_end.wait(60)
        raise Refused("host", "at last")


def test_too_much_at_once_is_refused_by_number(tmp_path: Path) -> None:
    key, slow = os.urandom(32), Slow()
    fd = os.open(tmp_path, os.O_RDONLY)
    served = server.Server(fd, key, frozenset({os.geteuid()}), print)
    reader, writer = os.pipe()
    ended = threading.Event()

    def serve() -> None:
        served.serve(cast(Any, slow), reader)
        ended.set()

    with pytest.MonkeyPatch.context() as patch:
        for name in ("signal", "set_wakeup_fd"):  # it is not in the main thread
            patch.setattr(signal, name, lambda *_, **__: None)
        thread = threading.Thread(target=serve)
        thread.start()
        with Client(tmp_path / "sock", key) as client:
            for number in range(contract.IN_FLIGHT):
                client.sock.send(wire.request(number, wire.OPS["probe"], {}))
            for number in (900, 901):
                client.sock.send(wire.request(number, wire.OPS["probe"], {}))
                answer = wire.read_answer(client.sock.recv(65536))
                assert answer.req == number
                assert answer.refused is not None and answer.refused.code == "exhausted"
            slow.may_end.set()
            answers = [wire.read_answer(client.sock.recv(65536)) for _ in range(contract.IN_FLIGHT)]
            assert sorted(a.req for a in answers) == list(range(contract.IN_FLIGHT))
            client.sock.send(wire.request(5, wire.OPS["probe"], {}))
            assert wire.read_answer(client.sock.recv(65536)).req == 5
        os.close(writer)
        assert ended.wait(20)
        thread.join()
    for each in (reader, fd):
        os.close(each)


def test_a_slow_operation_holds_up_no_list(shared: HelperHouse) -> None:
    with shared.client() as client:
        client.sock.send(wire.request(1, wire.OPS["probe"], {}))
        client.sock.send(wire.request(2, wire.OPS["list"], {"after": None}))
        assert wire.read_answer(client.sock.recv(65536)).req == 2
        assert wire.read_answer(client.sock.recv(65536)).req == 1


def test_a_peer_that_leaves_before_its_answer_harms_nothing(shared: HelperHouse) -> None:
    before = open_fds(shared)
    for _ in range(20):
        with shared.client() as client:
            client.sock.send(wire.request(1, wire.OPS["probe"], {}))
    well(shared)
    until("nothing of them is open", lambda: open_fds(shared) <= before, seconds=60)


def test_many_at_once_over_many_connections(shared: HelperHouse) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        name = fresh()
        try:
            with shared.client() as client:
                for _ in range(4):
                    client.ask("allocate", id=name, disk_bytes=64 << 20)
                    client.ask("list", after=None)
                    if dice.random() < 0.5:
                        client.ask("release", id=name)
                client.ask("release", id=name)
        except BaseException as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert shared.leftovers() == []


# ------------------------------------------------------------------------ descriptors sent


def test_link_takes_exactly_what_is_expected() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        reader, writer = os.pipe()
        link.send(left, b"a", (writer,))
        data, fds = link.receive(right, 1)
        assert (data, len(fds)) == (b"a", 1)
        assert not os.get_inheritable(fds[0])
        link.close(fds)
        link.send(left, b"b", (writer, writer))
        with pytest.raises(wire.WireError):
            link.receive(right, 1)
        link.send(left, b"c")
        assert link.receive(right, 1) == (b"c", [])
        left.send(b"x" * (contract.MESSAGE_BYTES + 1))
        with pytest.raises(wire.WireError):
            link.receive(right)
        os.close(writer)
        assert os.read(reader, 1) == b""  # nobody holds the other end: all were closed
        os.close(reader)
        left.close()
        assert link.receive(right) == (b"", [])


def test_a_socket_of_a_long_path_can_be_bound_and_reached(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    fd = os.open(deep, os.O_RDONLY)
    (deep / "sock").write_text("stale")
    with (
        link.listen(fd, "sock", socket.SOCK_STREAM, 1) as listener,
        link.connect(fd, "sock", socket.SOCK_STREAM) as client,
    ):
        assert link.peer(client)[0] == os.getpid()
        listener.accept()[0].close()
    with pytest.raises(ConnectionRefusedError):
        link.connect(fd, "sock", socket.SOCK_STREAM)
    with pytest.raises(FileNotFoundError):
        link.connect(fd, "none", socket.SOCK_STREAM)
    os.close(fd)


# ------------------------------------------------------------------------ its life


def test_sigterm_lets_it_finish_what_it_began(place: HelperHouse) -> None:
    assert place.process is not None
    with place.client() as client:
        client.sock.send(wire.request(1, wire.OPS["probe"], {}))
        client.sock.send(wire.request(2, wire.OPS["list"], {"after": None}))
        assert wire.read_answer(client.sock.recv(65536)).req == 2
        place.process.send_signal(signal.SIGTERM)
        answer = wire.read_answer(client.sock.recv(65536))
        assert (answer.req, answer.refused) == (1, None)
    assert place.process.wait(20) == 0


def test_it_ends_with_the_other_end_of_its_lifeline(place: HelperHouse) -> None:
    assert place.process is not None and place.process.stdin is not None
    place.process.stdin.close()
    assert place.process.wait(20) == 0


def test_a_second_one_does_not_take_over(place: HelperHouse) -> None:
    import subprocess

    ran = subprocess.run(place.command(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert ran.returncode == 75
    assert "another helper" in ran.stderr
    well(place)


def run(place: HelperHouse, *words: str) -> tuple[int, str, str]:
    import subprocess
    import sys

    ran = subprocess.run(
        [sys.executable, "-I", "-m", "agent_box.helper", *words],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return ran.returncode, ran.stdout, ran.stderr


def test_system_mode_is_refused_as_not_built(shared: HelperHouse) -> None:
    code, _, said = run(shared, "--mode", "system")
    assert code == 70
    assert "not built" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--mode", "other"),
        ("--mode", "user"),
        ("--mode", "user", "--runtime", "r", "--state", "/s"),
        ("--mode", "user", "--mode", "user"),
        ("--mode",),
        ("--help",),
    ],
)
def test_wrong_arguments_are_told_in_one_line(shared: HelperHouse, words: tuple[str, ...]) -> None:
    code, _, said = run(shared, *words)
    assert code == 64
    assert said.count("\n") == 1


@pytest.mark.parametrize("spoil", ["missing", "open", "short", "noise", "link"])
def test_a_key_that_is_none_is_fatal(spoil: str) -> None:
    made = HelperHouse()
    try:
        match spoil:
            case "missing":
                made.key_file.unlink()
            case "open":
                made.key_file.chmod(0o644)
            case "short":
                made.key_file.write_text("ab\n")
            case "noise":
                made.key_file.write_bytes(b"\xff" * 64)
            case "link":
                made.key_file.rename(made.root / "elsewhere")
                made.key_file.symlink_to(made.root / "elsewhere")
        code, _, said = run(made, *made.command()[5:])
        assert code == 71
        assert "key" in said and said.count("\n") == 1
    finally:
        made.key_file.unlink(missing_ok=True)
        made.key_file.write_text(made.key.hex())
        made.key_file.chmod(0o600)
        made.close()


def test_directories_that_others_can_enter_are_fatal() -> None:
    made = HelperHouse()
    (made.state / "instances").mkdir(0o755)
    (made.state / "instances").chmod(0o755)
    code, _, said = run(made, *made.command()[5:])
    assert code == 71
    assert "instances" in said
    (made.state / "instances").chmod(0o700)
    made.close()


def test_check_tells_what_probe_would(shared: HelperHouse) -> None:
    code, said, _ = run(shared, *shared.command("--check")[5:])
    assert code == 0
    with shared.client() as client:
        assert json.loads(said).keys() == client.ask("probe").keys()
    wire.check(contract.PROBED, json.loads(said))


def test_refused_carries_its_code() -> None:
    with pytest.raises(KeyError):
        wire.refusal(1, "nope", "")
    assert Refused("conflict", "x").code == "conflict"
