"""Targets are read in one way or refused; the longest matching route decides."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import brokering as b

from agent_box.broker import git, routes
from agent_box.broker.refusal import Reason, Refuse
from agent_box.broker.routes import Target
from agent_box.config.model import Route

# Each is a way to write a path so that two servers see two paths.
GAMES = [
    b"/v1/messages/../admin",
    b"/v1/messages/..",
    b"/v1/./messages",
    b"/../v1/messages",
    b"/v1/messages/.",
    b"/%2e%2e/v1/messages",
    b"/v1/%2E%2e/messages",
    b"/v1/.%2e/messages",
    b"/v1/%2e/messages",
    b"/v1/...",
    b"/v1/.%20/x",
    b"/v1/..%20/x",
    b"/v1%2fmessages",
    b"/v1%2Fmessages",
    b"/v1/files%2f..%2fadmin",
    b"/v1%5cmessages",
    b"/v1\\messages",
    b"/v1/..%5cadmin",
    b"//v1/messages",
    b"/v1//messages",
    b"//evil.example/v1/messages",
    b"/v1/messages//",
    b"/v1/files;/../admin",
    b"/v1/files;x=y",
    b"/v1/files%3bx",
    b"/v1/files/..;/admin",
    b"/v1/%252e%252e/admin",
    b"/v1/%252fadmin",
    b"/v1/%25",
    b"/v1/%c0%ae%c0%ae/admin",  # overlong dots
    b"/v1/%e0%80%af/admin",  # an overlong slash
    b"/v1/%c0%af",
    b"/v1/%f0%80%80%af",
    b"/v1/%ed%a0%80",  # a surrogate
    b"/v1/%ff",
    b"/v1/messages%00",
    b"/v1/messages%00.json",
    b"/v1/messages%0d%0aX:%20y",
    b"/v1/messages%0a",
    b"/v1/messages%09",
    b"/v1/messages%7f",
    b"/v1/messages%c2%85",
    b"/v1/messages%e2%80%a8",
    b"/v1/messages%ef%bb%bf",
    b"/v1/messages\x00",
    b"/v1/messages\xe2\x80\xae",
    b"/v1/%",
    b"/v1/%2",
    b"/v1/%zz",
    b"/v1/%u002e",
    b"/v1/mess ages",
    b"/v1/messages#x",
    b"/v1/messages?x#y",
    b"/v1/messages?%0",
    b"/v1/messages?a=\x01",
    b"/v1/{x}",
    b"/v1/<x>",
    b'/v1/"x"',
    b"/v1/x^y",
    b"/v1/x|y",
    b"",
    b"*",
    b"v1/messages",
    b"?x",
    b"http://anthropic.broker.internal/v1/messages",
    b"HTTP://anthropic.broker.internal/v1/messages",
    b"https://evil.example/v1/messages",
    b"anthropic.broker.internal:80",
    b"\\v1\\messages",
    b"/" + b"a" * 8192,
    b"/a" * 129,
]
PATHS = [b"/v1/messages", b"/v1/files/x", b"/v1/models/m", b"/org/repo.git/git-upload-pack"]


@pytest.mark.parametrize("target", GAMES, ids=lambda t: repr(t[:40]))
def test_a_game_with_the_path_is_refused(target: bytes) -> None:
    refused = routes.read(target)
    assert isinstance(refused, Refuse), refused
    assert refused.reason is Reason.TARGET_BAD
    assert refused.status in (400, 414)


# Each makes another path of one, for a server that compares less strictly.
ANOTHER = [
    lambda p: p.upper(),
    lambda p: p + b"/",
    lambda p: b"/x" + p,
    lambda p: p.replace(b"s", b"%c5%bf"),  # a long s
    lambda p: p.replace(b"rep", b"%c2%adrep"),  # a soft hyphen
    lambda p: p.replace(b"e", b"%d0%b5"),  # Cyrillic
    lambda p: p.replace(b"/m", b"/%20m").replace(b"/g", b"/%20g"),
]


@pytest.mark.parametrize(
    "target", [new for p in PATHS for change in ANOTHER if (new := change(p)) != p], ids=repr
)
def test_another_path_matches_no_exact_route_or_repository(target: bytes) -> None:
    read = routes.read(target)
    assert isinstance(read, Target)
    exact = [Route(path=p.decode(), match="exact", methods=("GET",)) for p in PATHS]
    assert isinstance(routes.find(exact, "GET", read), Refuse)
    assert isinstance(git.access(b.REPOS, "POST", read), Refuse)


@pytest.mark.parametrize(
    ("sent", "path", "on"),
    [
        (b"/", "/", b"/"),
        (b"/v1/messages", "/v1/messages", b"/v1/messages"),
        (b"/v1/%6dessages", "/v1/messages", b"/v1/messages"),
        (
            b"/v1/gemini:generateContent",
            "/v1/gemini:generateContent",
            b"/v1/gemini:generateContent",
        ),
        (b"/a%20b", "/a b", b"/a%20b"),
        (b"/a%3Fb%23c", "/a?b#c", b"/a%3Fb%23c"),
        (b"/%C3%BC", "/ü", b"/%C3%BC"),
        (b"/v1/files/", "/v1/files/", b"/v1/files/"),
        (b"/.well-known/x.y", "/.well-known/x.y", b"/.well-known/x.y"),
    ],
)
def test_a_path_is_decoded_once_and_sent_on_in_one_encoding(
    sent: bytes, path: str, on: bytes
) -> None:
    target = routes.read(sent + b"?x=%2F&y")
    assert isinstance(target, Target)
    assert (target.path, target.encoded(), target.query) == (path, on, b"x=%2F&y")


@given(raw=st.binary(max_size=60))
@example(b"/%2525")
@settings(max_examples=500)
def test_what_is_sent_on_is_read_as_what_was_judged(raw: bytes) -> None:
    target = routes.read(b"/" + raw)
    if isinstance(target, Target):
        again = routes.read(target.encoded())
        assert isinstance(again, Target)
        assert again.path == target.path
        assert unquote(target.encoded().decode(), errors="strict") == target.path
        # a server that decodes a second time sees no other path
        assert unquote(target.path) == target.path
        assert not {".", ".."} & set(target.segments)
        assert "" not in target.segments[:-1]


def find(method: str, path: str, *listed: Route) -> Route | Reason:
    target = routes.read(path.encode())
    assert isinstance(target, Target)
    found = routes.find(listed, method, target)
    return found.reason if isinstance(found, Refuse) else found


def test_matching() -> None:
    exact = Route(path="/v1/models/best", match="exact", methods=("GET",))
    template = Route(path="/v1/models/{m}", match="template", methods=("GET", "DELETE"))
    prefix = Route(path="/v1", match="prefix", methods=("POST",))
    deeper = Route(path="/v1/models/", match="prefix", methods=("PUT",))
    all_ = Route(path="/", match="prefix", methods=("HEAD",))
    every = (all_, prefix, template, deeper, exact)
    for listed in (every, every[::-1]):
        assert find("GET", "/v1/models/best", *listed) is exact
        assert find("DELETE", "/v1/models/other", *listed) is template
        assert find("PUT", "/v1/models/a/b", *listed) is deeper
        assert find("POST", "/v1/chat", *listed) is prefix
        assert find("POST", "/v1", *listed) is prefix
        assert find("HEAD", "/", *listed) is all_
        # the longest match alone says which methods there are
        assert find("DELETE", "/v1/models/best", *listed) is Reason.METHOD
        assert find("HEAD", "/v1/models/best", *listed) is Reason.METHOD
    assert find("POST", "/v10/chat", prefix) is Reason.PATH_UNKNOWN
    assert find("GET", "/v1/models", template) is Reason.PATH_UNKNOWN
    assert find("GET", "/v1/models/", template) is Reason.PATH_UNKNOWN
    assert find("GET", "/v1/models/a/b", template) is Reason.PATH_UNKNOWN
    assert find("GET", "/v1/models/best/", exact) is Reason.PATH_UNKNOWN
    assert find("GET", "/x") is Reason.PATH_UNKNOWN


def test_a_second_template_that_is_narrower_wins() -> None:
    wide = Route(path="/{a}/{b}/x", match="template", methods=("GET",))
    narrow = Route(path="/{a}/y/x", match="template", methods=("POST",))
    assert find("POST", "/1/y/x", wide, narrow) is narrow
    assert find("GET", "/1/z/x", wide, narrow) is wide
