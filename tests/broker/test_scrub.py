"""The credential never passes in a reply, and everything else does, byte for byte."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable
from urllib.parse import quote

import brotli
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support import brokering as b

from agent_box.broker.scrub import Cut, Needles, Scrub, in_headers, is_text, plain

SECRET = b.CREDENTIAL
NEEDLES = Needles(b.injected("anthropic"))


def deflate_raw(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


ENCODE: dict[bytes | None, Callable[[bytes], bytes]] = {
    None: bytes,
    b"identity": bytes,
    b"gzip": gzip.compress,
    b"deflate": zlib.compress,
    b"DEFLATE ": deflate_raw,
    b"br": brotli.compress,
    b"zstd": zstandard.ZstdCompressor().compress,
    b"gzip, br": lambda body: brotli.compress(gzip.compress(body)),
}


# of a bomb: as small as it gets, soon
PACK = ENCODE | {b"br": lambda body: brotli.compress(body, quality=2)}


def json_escaped(secret: bytes) -> bytes:
    return b"".join(b"\\u%04x" % byte for byte in secret)


FORMS: dict[str, bytes] = {
    "itself": SECRET,
    "base64": b64encode(SECRET),
    "basic": b64encode(b"x-access-token:" + SECRET),
    "shifted": b64encode(b"a" + SECRET + b"bc"),
    "urlsafe": urlsafe_b64encode(b"ab" + SECRET),
    "percent": b"".join(b"%%%02X" % byte for byte in SECRET),
    "percent, lowercase": b"".join(b"%%%02x" % byte for byte in SECRET),
    "percent, some": SECRET.replace(b"-", b"%2D").replace(b"a", b"%61"),
    "quoted base64": quote(b64encode(SECRET), safe="").encode(),
    "json": json_escaped(SECRET),
    "json, some": SECRET.replace(b"k", b"\\u006b"),
    "in json": json.dumps({"echo": {"x-api-key": SECRET.decode()}}).encode(),
}


def run(
    body: bytes,
    cuts: list[int],
    *,
    encoding: bytes | None = None,
    type_: bytes | None = b"text/plain",
    needles: Needles = NEEDLES,
) -> tuple[bytes, str | None]:
    """What went on, and why it was cut; the body comes in pieces."""
    edges = [0, *sorted(c % (len(body) + 1) for c in cuts), len(body)]
    out = b""
    try:
        scrub = Scrub(needles, type_, encoding, None)
        for start, end in zip(edges, edges[1:], strict=False):
            out += scrub.feed(body[start:end])
        out += scrub.finish()
    except Cut as cut:
        return out, cut.why
    return out, None


CUTS = st.lists(st.integers(0, 1 << 30), max_size=12)


@given(
    body=st.binary(max_size=3000),
    cuts=CUTS,
    encoding=st.sampled_from(list(ENCODE)),
    near=st.sampled_from(
        (b"", SECRET[:-1], SECRET[1:], b64encode(SECRET)[:20], b"%73%6", b"\\u00")
    ),
)
@settings(max_examples=400, deadline=None)
def test_whatever_is_not_the_credential_passes_byte_for_byte(
    body: bytes, cuts: list[int], encoding: bytes | None, near: bytes
) -> None:
    sent = ENCODE[encoding](body + b"\n" + near + b"\n" + body)  # or it may complete it
    assert run(sent, cuts, encoding=encoding) == (sent, None)


@given(
    before=st.binary(max_size=300),
    after=st.binary(max_size=300),
    cuts=CUTS,
    encoding=st.sampled_from(list(ENCODE)),
    form=st.sampled_from(sorted(FORMS)),
)
@settings(max_examples=600, deadline=None)
def test_the_credential_is_cut_in_each_form_and_coding_wherever_the_pieces_end(
    before: bytes, after: bytes, cuts: list[int], encoding: bytes | None, form: str
) -> None:
    # a backslash before it, or a half escape, is another text
    body = before + b" " + FORMS[form] + b" " + after
    sent = ENCODE[encoding](body)
    passed, why = run(sent, cuts, encoding=encoding)
    assert why == "credential"
    assert len(passed) < len(sent)
    if encoding in (None, b"identity"):
        assert passed == sent[: len(passed)]
        assert SECRET[:8] not in plain(passed)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_one_byte_at_a_time(form: str) -> None:
    body = b"error: " + FORMS[form]
    passed, why = run(body, list(range(len(body))))
    assert why == "credential"
    assert SECRET[:8] not in passed


def test_an_event_waits_for_nothing() -> None:
    """What ends in a line's end is no beginning of a credential."""
    scrub = Scrub(NEEDLES, b"text/event-stream", None, None)
    for text in (b"s", b"sk", b"sk-ant-api03-", b"c2stYW50"):
        event = b'data: {"text": "' + text + b'"}\n\n'
        assert scrub.feed(event) == event


def test_a_beginning_waits_for_its_continuation() -> None:
    scrub = Scrub(NEEDLES, None, None, None)
    assert scrub.feed(b"key: " + SECRET[:20]) == b"key: "
    assert scrub.feed(b"") == b""
    assert scrub.feed(b" it is not") == SECRET[:20] + b" it is not"
    assert scrub.feed(SECRET[:10]) == b""
    assert scrub.finish() == SECRET[:10]


def test_compressed_bytes_wait_as_a_whole() -> None:
    packer = zlib.compressobj(wbits=31)
    first = packer.compress(b"key: " + SECRET[:20]) + packer.flush(zlib.Z_SYNC_FLUSH)
    second = packer.compress(b" no") + packer.flush(zlib.Z_SYNC_FLUSH)
    third = packer.compress(SECRET) + packer.flush()
    scrub = Scrub(NEEDLES, None, b"gzip", None)
    assert scrub.feed(first) == b""
    assert scrub.feed(second) == first + second
    with pytest.raises(Cut, match="credential"):
        scrub.feed(third)


def test_several_members_are_read_on() -> None:
    passed, why = run(gzip.compress(b"one") + gzip.compress(SECRET), [], encoding=b"gzip")
    assert (passed, why) == (b"", "credential")
    passed, why = run(gzip.compress(b"one") + b"\0tail " + SECRET, [], encoding=b"gzip")
    assert why == "credential"
    frames = zstandard.compress(b"one") + zstandard.compress(SECRET)
    assert run(frames, [3], encoding=b"zstd")[1] == "credential"
    assert run(brotli.compress(b"one") + SECRET, [], encoding=b"br") == (b"", "unreadable")


@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"zstd"])
def test_what_is_not_what_its_coding_says_is_cut(encoding: bytes) -> None:
    assert run(b"\xffthis is no such thing at all" * 9, [], encoding=encoding)[1] == "unreadable"


@pytest.mark.parametrize("encoding", [b"compress", b"gzip, gzip, gzip", b"x-own"])
def test_a_coding_that_cannot_be_read_is_cut(encoding: bytes) -> None:
    assert run(b"x", [], encoding=encoding)[1] == "encoding"
    assert run(b"x", [], encoding=encoding, type_=b"image/png") == (b"x", None)


@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"zstd", b"deflate"])
def test_a_bomb_is_cut(encoding: bytes) -> None:
    bomb = PACK[encoding](bytes(100 << 20))
    assert run(bomb, [1 << 10], encoding=encoding)[1] == "bomb"


@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"zstd", b"deflate"])
def test_pieces_are_bounded(encoding: bytes) -> None:
    largest = 0

    def tap(piece: bytes) -> None:
        nonlocal largest
        largest = max(largest, len(piece))

    Scrub(NEEDLES, None, encoding, tap).feed(PACK[encoding](bytes(48 << 20)))
    assert 0 < largest <= 16 << 20


def test_the_tap_gets_the_text() -> None:
    pieces: list[bytes] = []
    text = os.urandom(300_000).hex().encode()
    body = brotli.compress(text, quality=3)
    scrub = Scrub(NEEDLES, b"application/json", b"br", pieces.append)
    out = b"".join(scrub.feed(body[i : i + 999]) for i in range(0, len(body), 999))
    assert out + scrub.finish() == body
    assert b"".join(pieces) == text


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        (None, True),
        (b"text/html; charset=utf-8", True),
        (b"application/json", True),
        (b"image/svg+xml", True),
        (b"application/vnd.git-lfs+json", True),
        (b"application/x-git-upload-pack-advertisement", True),
        (b"application/octet-streams", True),
        (b"image/png", False),
        (b"Application/Octet-Stream", False),
        (b"application/x-git-upload-pack-result", False),
    ],
)
def test_what_is_text(type_: bytes | None, text: bool) -> None:
    assert is_text(type_) is text


@pytest.mark.parametrize("form", sorted(FORMS))
def test_headers(form: str) -> None:
    assert in_headers(NEEDLES, [(b"a", b"b"), (b"location", b"/?x=" + FORMS[form])])
    assert not in_headers(NEEDLES, [(b"location", FORMS[form][:12])])


def test_a_short_value_is_not_looked_for() -> None:
    short = Needles(b.injected("basic", credential_value=b"abcde"))
    assert run(b"abcde", [], needles=short) == (b"abcde", None)
    six = Needles(b.injected("basic", credential_value=b"abcdef"))
    assert run(b"x abcdef", [], needles=six)[1] == "credential"
