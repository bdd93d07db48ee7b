"""Server names out of ClientHellos: those that ssl makes, whole and in pieces, and bent ones."""

from __future__ import annotations

import random
import ssl

import pytest

from agent_box.netstack.sni import HELLO_MAX, MALFORMED, NO_NAME, Hello, read_hello


def hello(name: str | None) -> bytes:
    """What Python's own TLS client says first."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


NAMED = hello("files.example.com")
BODY = NAMED[5:]


def records(message: bytes, *sizes: int) -> bytes:
    """The same handshake message, spread over records of these sizes and a last one."""
    out = b""
    for size in (*sizes, len(message)):
        part, message = message[:size], message[size:]
        if part:
            out += b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part
    return out


def test_a_name_is_found_and_its_lack_too() -> None:
    assert read_hello(NAMED) == Hello("named", "files.example.com")
    assert read_hello(hello(None)) == NO_NAME


def test_nothing_is_said_before_the_message_is_whole() -> None:
    for end in range(len(NAMED)):
        assert read_hello(NAMED[:end]) is None, end
    assert read_hello(NAMED + b"more") == Hello("named", "files.example.com")


def test_a_message_over_several_records() -> None:
    rng = random.Random(1)
    for _ in range(200):
        sizes = [rng.randrange(1, 100) for _ in range(rng.randrange(1, 8))]
        data = records(BODY, *sizes)
        assert read_hello(data) == Hello("named", "files.example.com"), sizes
        assert read_hello(data[:-1]) is None


def test_what_is_no_tls_names_nobody() -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", b"\0", b"\x16\x02\x01", b"\x80\x2e"):
        assert read_hello(data) == NO_NAME
    server_hello = b"\x16\x03\x03\x00\x06\x02\x00\x00\x02ab"
    assert read_hello(server_hello) == NO_NAME


def _bent(extension: bytes) -> Hello | None:
    """A ClientHello with just this extension block."""
    body = b"\x03\x03" + bytes(32) + b"\0" + b"\0\x02\x13\x01" + b"\x01\0"
    body += len(extension).to_bytes(2, "big") + extension
    return read_hello(records(b"\x01" + len(body).to_bytes(3, "big") + body))


def _name(name: bytes, kind: int = 0) -> bytes:
    entry = bytes((kind,)) + len(name).to_bytes(2, "big") + name
    return len(entry).to_bytes(2, "big") + entry


def _extension(value: bytes) -> bytes:
    return b"\0\0" + len(value).to_bytes(2, "big") + value


def test_two_names_are_none_that_any_policy_allows() -> None:
    good = _extension(_name(b"a.test"))
    assert _bent(good) == Hello("named", "a.test")
    both = _name(b"a.test")[2:] + _name(b"b.test")[2:]
    for bad in (
        good + good,
        _extension(len(both).to_bytes(2, "big") + both),
        _extension(_name(b"")),
        _extension(_name(b"a.test", kind=1)),
        _extension(_name(b"a.test") + b"x"),
        _extension(b""),
        good + b"\0",
        good[:-1],
    ):
        assert _bent(bad) == MALFORMED, bad


def test_odd_bytes_in_a_name_stay_odd() -> None:
    found = _bent(_extension(_name("é.test".encode())))
    assert found is not None and found.sni == "\\xc3\\xa9.test"


def test_it_is_bounded() -> None:
    endless = b"\x16\x03\x01\x40\x00" + b"\x01\x00\xff\xff" + bytes(HELLO_MAX)
    assert read_hello(endless) in (MALFORMED, NO_NAME)
    assert read_hello(b"\x16\x03\x01\x40\x00\x01\xff\xff\xff") == MALFORMED
    tiny = (b"\x16\x03\x01\x00\x01" + b"\x01") * (HELLO_MAX // 6 + 1)
    assert read_hello(tiny) == MALFORMED


def _fuzz(count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        data = bytearray(records(BODY, rng.randrange(1, len(BODY))))
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(data))
            what = rng.random()
            if what < 0.6:
                data[at] = rng.randrange(256)
            elif what < 0.8:
                del data[at : at + rng.randrange(1, 20)]
            else:
                data[at:at] = rng.randbytes(rng.randrange(1, 20))
            if not data:
                break
        found = read_hello(data)
        assert found is None or found.kind in ("named", "no-name")
        assert found is None or (found.sni is None) == (found.kind == "no-name")


def test_nothing_breaks_it() -> None:
    _fuzz(5_000, 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_of_a_million_breaks_it() -> None:
    _fuzz(1_000_000, 2)
