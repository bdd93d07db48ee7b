"""Which git requests there are, and what may hide in a push: nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import brokering as b

from agent_box.broker import git, routes
from agent_box.broker.git import Command, CommandReader, Commands, Service, access, allowed
from agent_box.broker.refusal import Reason, Refuse
from agent_box.broker.routes import Target

OLD, NEW, ZERO = b"1" * 40, b"2" * 40, b"0" * 40
MINE = b"refs/heads/agent-box/work/topic"
CAPS = b"\x00 report-status-v2 side-band-64k atomic object-format=sha1 agent=git/2.39.5"


def pkt(line: bytes) -> bytes:
    return b"%04x" % (len(line) + 4) + line


def command(ref: bytes, *, old: bytes = OLD, new: bytes = NEW, caps: bytes = b"") -> bytes:
    return pkt(old + b" " + new + b" " + ref + caps)


FLUSH = b"0000"
PACK = b"PACK\x00\x00\x00\x02" + bytes(100)


def read(body: bytes, *, step: int | None = None) -> Commands | Refuse:
    reader = CommandReader()
    for at in range(0, len(body), step or len(body) or 1):
        answer = reader.feed(body[at : at + (step or len(body))])
        if answer is not None:
            assert reader.feed(b"0000 and more") is answer
            return answer
    return reader.finish()


def verdict(body: bytes, name: str = "work") -> Reason | None:
    """Why a push is refused, if it is, however its body is cut; the same for all cuts."""
    found = set()
    for step in (None, 1, 7):
        commands = read(body, step=step)
        refused = commands if isinstance(commands, Refuse) else allowed(commands, name)
        found.add(None if refused is None else refused.reason)
    (only,) = found
    return only


@pytest.mark.parametrize(
    "body",
    [
        FLUSH,  # git asks first whether it may
        command(MINE, caps=CAPS) + FLUSH + PACK,
        command(MINE, caps=CAPS + b"\n") + FLUSH + PACK,
        command(MINE) + FLUSH + PACK,
        command(MINE, caps=CAPS) + command(MINE + b"2") + command(MINE + b"/3\n") + FLUSH + PACK,
        command(MINE, old=ZERO, caps=CAPS) + FLUSH + PACK,
        command(MINE, new=ZERO, caps=CAPS) + FLUSH,  # its own to delete
        pkt(b"shallow " + OLD) + pkt(b"shallow " + NEW + b"\n") + command(MINE, caps=CAPS) + FLUSH,
        command(MINE, old=b"1" * 64, new=b"2" * 64, caps=b"\x00object-format=sha256") + FLUSH,
        command("refs/heads/agent-box/work/größe".encode(), caps=CAPS) + FLUSH,
    ],
)
def test_a_push_to_the_namespace_is_allowed(body: bytes) -> None:
    assert verdict(body) is None


@pytest.mark.parametrize(
    "ref",
    [
        b"refs/heads/main",
        b"refs/heads/agent-box/other/topic",
        b"refs/heads/agent-box/work",
        b"refs/heads/agent-box/work/",
        b"refs/heads/agent-box/work2/topic",
        b"refs/heads/agent-box",
        b"refs/heads/agent-box/work/../../main",
        b"refs/heads/agent-box/work/./x",
        b"refs/heads/agent-box/work//x",
        b"refs/heads/agent-box/work/x.lock",
        b"refs/heads/agent-box/work/x.lock/y",
        b"refs/heads/agent-box/work/.x",
        b"refs/heads/agent-box/work/x.",
        b"refs/heads/agent-box/work/x/",
        b"refs/heads/agent-box/work/x y",
        b"refs/heads/agent-box/work/x\ty",
        b"refs/heads/agent-box/work/x~1",
        b"refs/heads/agent-box/work/x^",
        b"refs/heads/agent-box/work/x:refs/heads/main",
        b"refs/heads/agent-box/work/x\\y",
        b"refs/heads/agent-box/work/x?",
        b"refs/heads/agent-box/work/x*",
        b"refs/heads/agent-box/work/x[y",
        b"refs/heads/agent-box/work/x@{1}",
        b"refs/heads/agent-box/work/\xff",
        b"refs/heads/agent-box/work/\xc2\xa0",
        b"refs/heads/agent-box/work/" + b"x" * 1024,
        b"refs/tags/v1",
        b"refs/tags/agent-box/work/v1",
        b"refs/agent-box/work/x",
        b"refs/for/main",
        b"refs/merge-requests/1/head",
        b"Refs/heads/agent-box/work/x",
        b"refs/heads/Agent-Box/work/x",
        b"/refs/heads/agent-box/work/x",
        b"heads/agent-box/work/x",
        b"HEAD",
        b"main",
    ],
)
def test_a_push_elsewhere_is_refused(ref: bytes) -> None:
    for body in (
        command(ref, caps=CAPS) + FLUSH + PACK,
        command(ref, new=ZERO, caps=CAPS) + FLUSH,
        command(MINE, caps=CAPS) + command(ref) + FLUSH + PACK,
        command(ref, caps=CAPS) + command(MINE) + FLUSH + PACK,
    ):
        assert verdict(body) is Reason.PUSH_REF


MAIN = OLD + b" " + NEW + b" refs/heads/main"


@pytest.mark.parametrize(
    "body",
    [
        # a second command behind a NUL, a line's end or among capabilities
        command(MINE, caps=CAPS) + pkt(OLD + b" " + NEW + b" " + MINE + b"2\x00" + MAIN) + FLUSH,
        command(MINE, caps=b"\x00report-status\n" + MAIN) + FLUSH,
        command(MINE, caps=b"\x00report-status\x00" + MAIN) + FLUSH,
        command(MINE, caps=b"\n" + MAIN) + FLUSH,
        command(MINE + b"\n", caps=CAPS) + FLUSH,
        command(MINE, caps=b"\x00" + MAIN) + FLUSH,
        # other packets
        b"0001" + command(MINE) + FLUSH,
        command(MINE, caps=CAPS) + b"0001" + command(b"refs/heads/main") + FLUSH,
        command(MINE, caps=CAPS) + b"0002" + command(b"refs/heads/main") + FLUSH,
        command(MINE, caps=CAPS) + b"0003" + FLUSH,
        command(MINE, caps=CAPS) + b"0004" + FLUSH,
        # lengths
        b"00zz" + MAIN,
        b"-001" + MAIN,
        b" 5f " + MAIN,
        b"0x5f" + MAIN,
        b"+05f" + MAIN,
        # what changes the format, or asks the server for more
        command(MINE, caps=b"\x00report-status push-options") + FLUSH + pkt(b"merge") + FLUSH,
        command(MINE, caps=b"\x00push-cert=nonce") + FLUSH,
        pkt(b"push-cert\x00report-status\n") + pkt(b"certificate version 0.1\n") + FLUSH,
        command(MINE, caps=b"\x00something-new") + FLUSH,
        command(MINE, caps=b"\x00agent=a\x01b") + FLUSH,
        # a shallow line that is none, or comes late
        pkt(b"shallow " + OLD + b" " + MAIN) + command(MINE) + FLUSH,
        pkt(b"shallow x") + command(MINE) + FLUSH,
        command(MINE, caps=CAPS) + pkt(b"shallow " + OLD) + FLUSH,
        # no commands
        pkt(MINE) + FLUSH,
        pkt(OLD + b"  " + NEW + b" " + MINE) + FLUSH,
        pkt(OLD + b"\t" + NEW + b" " + MINE) + FLUSH,
        pkt(OLD[:-1] + b" " + NEW + b" " + MINE) + FLUSH,
        pkt(OLD + b" " + b"2" * 64 + b" " + MINE) + FLUSH,
        pkt(OLD.replace(b"1", b"G") + b" " + NEW + b" " + MINE) + FLUSH,
        # protocol v2
        pkt(b"command=push\n") + b"0001" + FLUSH,
        # cut off
        b"",
        b"00",
        command(MINE, caps=CAPS),
        command(MINE, caps=CAPS) + b"000",
        command(MINE, caps=CAPS)[:-1],
        b"ffff" + MAIN,
        # compressed after all
        b"\x1f\x8b\x08\x00" + bytes(20),
    ],
)
def test_a_command_list_with_something_in_it_is_refused(body: bytes) -> None:
    assert verdict(body) is Reason.PUSH_COMMANDS


def test_a_ref_twice_is_refused() -> None:
    assert verdict(command(MINE, caps=CAPS) + command(MINE) + FLUSH) is Reason.PUSH_REF


def test_a_list_is_held_only_so_long() -> None:
    reader = CommandReader()
    line = pkt(b"shallow " + OLD)
    answer = None
    sent = 0
    while answer is None:
        answer = reader.feed(line * 100)
        sent += len(line) * 100
    assert isinstance(answer, Refuse)
    assert sent <= git.COMMANDS_MAX + 100 * len(line)
    refs = b"".join(command(MINE + b"%d" % i) for i in range(git.REFS_MAX))
    assert verdict(refs + FLUSH) is None
    assert verdict(refs + command(MINE) + FLUSH) is Reason.PUSH_COMMANDS


@given(
    body=st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.binary(max_size=60).map(pkt),
            st.sampled_from(
                [
                    FLUSH,
                    b"0001",
                    command(MINE),
                    command(MINE, caps=CAPS),
                    command(b"refs/heads/main"),
                ]
            ),
        ),
        max_size=6,
    ).map(b"".join),
    step=st.integers(1, 50),
)
@settings(max_examples=500, deadline=None)
def test_cuts_change_nothing_and_main_is_never_allowed(body: bytes, step: int) -> None:
    whole, cut = read(body), read(body, step=step)
    assert whole == cut
    if isinstance(whole, Commands) and allowed(whole, "work") is None:
        first, _, _ = body.partition(FLUSH)
        assert b"refs/heads/main" not in first


def test_what_is_read() -> None:
    body = command(MINE, caps=CAPS) + command(b"refs/tags/x", new=ZERO) + FLUSH
    assert read(body) == Commands((Command(MINE, False), Command(b"refs/tags/x", True)))


# ----------------------------------------------------------------------------- paths


def asked(method: str, target: str) -> git.Access | Reason:
    read_ = routes.read(target.encode())
    assert isinstance(read_, Target)
    found = access(b.REPOS, method, read_)
    return found.reason if isinstance(found, Refuse) else found


@pytest.mark.parametrize("name", ["/org/repo", "/org/repo.git"])
def test_paths_of_a_repository(name: str) -> None:
    for method, path, service, push in (
        ("GET", "/info/refs?service=git-upload-pack", Service.REFS, False),
        ("GET", "/info/refs?service=git-receive-pack", Service.REFS, True),
        ("POST", "/git-upload-pack", Service.UPLOAD_PACK, False),
        ("POST", "/git-receive-pack", Service.RECEIVE_PACK, True),
        ("POST", "/info/lfs/objects/batch", Service.LFS_BATCH, False),
    ):
        found = asked(method, name + path)
        assert isinstance(found, git.Access)
        assert (found.service, found.push, found.repo) == (service, push, b.REPOS[0])


@pytest.mark.parametrize(
    ("method", "target", "reason"),
    [
        ("GET", "/org/repo.git/info/refs", Reason.PATH_UNKNOWN),
        ("GET", "/org/repo.git/info/refs?", Reason.PATH_UNKNOWN),
        ("GET", "/org/repo.git/info/refs?service=git-upload-archive", Reason.PATH_UNKNOWN),
        ("GET", "/org/repo.git/info/refs?service=git-upload-pack&x", Reason.PATH_UNKNOWN),
        ("GET", "/org/repo.git/info/refs?x&service=git-receive-pack", Reason.PATH_UNKNOWN),
        ("GET", "/org/repo.git/info/refs?service=git%2dreceive-pack", Reason.PATH_UNKNOWN),
        ("POST", "/org/repo.git/git-receive-pack?x", Reason.PATH_UNKNOWN),
        ("GET", "/org/repo.git/HEAD", Reason.PATH_UNKNOWN),
        ("GET", "/org/repo.git/objects/info/packs", Reason.PATH_UNKNOWN),
        ("GET", "/org/repo", Reason.PATH_UNKNOWN),
        ("GET", "/", Reason.PATH_UNKNOWN),
        ("HEAD", "/", Reason.PATH_UNKNOWN),
        ("POST", "/git-upload-pack", Reason.PATH_UNKNOWN),
        ("POST", "/org/repo.git/info/lfs/locks/verify", Reason.PATH_UNKNOWN),
        ("POST", "/org/repo.git/git-upload-archive", Reason.PATH_UNKNOWN),
        ("POST", "/org/other.git/git-upload-pack", Reason.REPO),
        ("POST", "/org/repo.git.git/git-upload-pack", Reason.REPO),
        ("POST", "/org/repo.GIT/git-upload-pack", Reason.REPO),
        ("POST", "/Org/repo/git-upload-pack", Reason.REPO),
        ("POST", "/repo/git-upload-pack", Reason.REPO),
        ("POST", "/x/org/repo/git-upload-pack", Reason.REPO),
        ("POST", "/org/repo/x/git-upload-pack", Reason.REPO),
        ("POST", "/org/repo/git-upload-pack/git-upload-pack", Reason.REPO),
        ("GET", "/org/repo.git/git-upload-pack", Reason.METHOD),
        ("POST", "/org/repo.git/info/refs?service=git-upload-pack", Reason.METHOD),
        ("PUT", "/org/repo.git/git-receive-pack", Reason.METHOD),
        ("POST", "/org/readonly.git/git-receive-pack", Reason.PUSH_OFF),
        ("GET", "/org/readonly.git/info/refs?service=git-receive-pack", Reason.PUSH_OFF),
        ("DELETE", "/.agent-box/lfs/t", Reason.METHOD),
        ("GET", "/.agent-box/lfs", Reason.PATH_UNKNOWN),
        ("GET", "/.agent-box/lfs/t/x", Reason.PATH_UNKNOWN),
    ],
)
def test_other_paths_are_refused(method: str, target: str, reason: Reason) -> None:
    assert asked(method, target) is reason
