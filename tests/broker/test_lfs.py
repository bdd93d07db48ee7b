"""LFS: the guest gets links to its endpoint, and nothing of what opens the objects."""

from __future__ import annotations

import json
from base64 import b64decode
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import brokering as b

from agent_box.broker import forward, gate, git, lfs
from agent_box.broker.gate import Inject, Later, Peer, judge
from agent_box.broker.lfs import Batch, BatchReader, Links
from agent_box.broker.refusal import Reason, Refuse
from agent_box.broker.routes import Target
from agent_box.config.model import Upstream

OID = "a" * 64
SECRET = "RemoteAuth 5ecret-of-the-object-store"
BINDING = b.binding("git-basic")
NOW = b.running(BINDING)
NONCE = NOW.nonces["git-basic"]


def links() -> Links:
    tokens = count(1)
    return Links(b.INSTANCE, 1, lambda: f"t{next(tokens)}")


def reply(**changed: Any) -> dict[str, Any]:
    """A batch's reply, one object with one action, some of its keys changed."""
    action: dict[str, Any] = {
        "href": "https://objects.example.net/store/aa?sig=x%2Fy&e=1",
        "header": {"Authorization": SECRET, "Transfer-Encoding": "chunked"},
        "expires_in": 600,
        "expires_at": "2030-01-01T00:00:00Z",
    }
    action.update({k: v for k, v in changed.items() if k in action})
    names = changed.get("actions", ["download"])
    actions = dict.fromkeys(names, action) if isinstance(names, list) else names
    whole = {"oid": OID, "size": 12, "actions": actions, "x-secret": SECRET}
    whole.update({k: v for k, v in changed.items() if k in ("oid", "size", "error")})
    return {"transfer": changed.get("transfer", "basic"), "objects": [whole], "own": SECRET}


def rewritten(table: Links, document: Any, *, upload: bool = False) -> Any:
    sent = json.dumps(document).encode()
    done = table.rewrite(sent, Batch(upload), BINDING, NONCE, 100.0)
    if isinstance(done, Refuse):
        return done.reason
    assert b"5ecret" not in done
    assert b"example.net" not in done
    return json.loads(done)


def find(table: Links, token: str, now: float = 101.0) -> lfs.Issued | None:
    path = f"/.agent-box/lfs/{token}"
    return table.find(Target(path, (".agent-box", "lfs", token), None), now)


def test_a_reply_is_rewritten_and_its_secrets_stay() -> None:
    table = links()
    (entry,) = rewritten(table, reply())["objects"]
    assert (entry["oid"], entry["size"], entry["authenticated"]) == (OID, 12, True)
    action = entry["actions"]["download"]
    assert action["href"] == "http://git-basic.broker.internal/.agent-box/lfs/t1"
    assert action["expires_in"] == 600
    (authorization,) = action["header"].values()
    assert b64decode(authorization.removeprefix("Basic ")).decode() == f"agent-box:{NONCE}"
    issued = find(table, "t1")
    assert issued is not None
    assert issued.upstream == Upstream(scheme="https", host="objects.example.net", port=443)
    assert issued.target == b"/store/aa?sig=x%2Fy&e=1"
    assert issued.headers == ((b"authorization", SECRET.encode()),)
    assert issued.method == "GET"


def test_an_upload_is_put_and_verified() -> None:
    table = links()
    document = reply(actions=["upload", "verify", "download", "x"])
    (entry,) = rewritten(table, document, upload=True)["objects"]
    assert list(entry["actions"]) == ["upload", "verify"]
    methods = [found.method for token in ("t1", "t2") if (found := find(table, token))]
    assert methods == ["PUT", "POST"]
    assert find(table, "t3") is None
    # to one who asked to download, no link to upload is given
    (entry,) = rewritten(links(), document)["objects"]
    assert list(entry["actions"]) == ["download"]


def test_links_end() -> None:
    table = links()
    rewritten(table, reply(expires_in=5))
    assert find(table, "t1", 104.9) is not None
    assert find(table, "t1", 105.0) is None
    assert find(table, "t2") is None
    assert find(table, "") is None
    for given_, life in ((0, 3600), (-1, 3600), (True, 3600), ("9", 3600), (10**9, 6 * 3600)):
        (entry,) = rewritten(table, reply(expires_in=given_))["objects"]
        assert entry["actions"]["download"]["expires_in"] == life


def test_links_are_not_kept_without_end() -> None:
    table = links()
    (entry,) = reply()["objects"]
    many = {"objects": [entry] * (lfs.LINKS_MAX // 2)}
    for _ in range(3):
        rewritten(table, many)
    assert len(table._links) == lfs.LINKS_MAX
    assert find(table, "t1") is None
    assert find(table, f"t{lfs.LINKS_MAX}") is not None


def test_an_error_of_one_object_is_told() -> None:
    document = reply(error={"code": 404, "message": "no such object", "x": SECRET})
    (entry,) = rewritten(links(), document)["objects"]
    assert entry == {"oid": OID, "size": 12, "error": {"code": 404, "message": "no such object"}}
    (entry,) = rewritten(links(), reply(actions={}))["objects"]
    assert entry["actions"] == {}


@pytest.mark.parametrize(
    "changed",
    [
        {"transfer": "tus"},
        {"transfer": None},
        {"oid": "../../x"},
        {"oid": 5},
        {"size": -1},
        {"size": "5"},
        {"size": True},
        {"actions": "download"},
        {"actions": {"download": "x"}},
        {"href": None},
        {"href": "ftp://objects.example.net/x"},
        {"href": "https://user:pass@objects.example.net/x"},
        {"href": "https://objects.example.net\\@evil/x"},
        {"href": "https://objects.example.net/x#y"},
        {"href": "https://objects.example.net/a b"},
        {"href": "https://objects.example.net/a\r\nX: y"},
        {"href": "https://objects.example.net:99999/x"},
        {"href": "https://github.broker.internal/x"},
        {"href": "https://127.1/x"},
        {"href": "/relative"},
        {"href": "https://objects.example.net/" + "x" * 9000},
        {"header": "x"},
        {"header": {"a b": "c"}},
        {"header": {"a": "b\r\nc: d"}},
        {"header": {"a": 5}},
        {"header": {"": "x"}},
    ],
)
def test_a_reply_that_cannot_be_read_goes_nowhere(changed: dict[str, Any]) -> None:
    assert rewritten(links(), reply(**changed)) is Reason.REPLY_BAD


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"objects": 5}', b'{"objects": [5]}', b'{"objects": [], "objects": []}'],
)
def test_a_reply_that_is_none(body: bytes) -> None:
    refused = links().rewrite(body, Batch(False), BINDING, NONCE, 0.0)
    assert isinstance(refused, Refuse)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["objects", "oid", "size", "actions", "download", "href", "header", "error"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(document=JSON)
@settings(max_examples=300, deadline=None)
def test_any_reply_is_rewritten_or_refused(document: Any) -> None:
    for body in (document, {"objects": [document]}, reply(actions={"download": document})):
        found = links().rewrite(json.dumps(body).encode(), Batch(False), BINDING, NONCE, 0.0)
        assert isinstance(found, bytes | Refuse)


# -------------------------------------------------------------------- what is asked


def asked(body: bytes, *, step: int = 10**6) -> Batch | Reason:
    reader = BatchReader(len(body))
    answer = None
    for at in range(0, len(body), step):
        answer = reader.feed(body[at : at + step])
    answer = answer or reader.finish()
    return answer.reason if isinstance(answer, Refuse) else answer


@pytest.mark.parametrize("step", [1, 7, 10**6])
def test_a_batch_call(step: int) -> None:
    objects = [{"oid": OID, "size": 5}]
    for operation in ("upload", "download"):
        body = {
            "operation": operation,
            "transfers": ["lfs-standalone-file", "basic", "ssh"],
            "ref": {"name": "refs/heads/x"},
            "objects": objects,
            "hash_algo": "sha256",
        }
        found = asked(json.dumps(body).encode() + b"\n", step=step)
        assert found == Batch(upload=operation == "upload")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"operation": "delete"}',
        b'{"operation": ["upload"]}',
        b'{"operation": "Upload"}',
        b'{"operation": "download", "operation": "upload"}',
        b'{"operation": "download", "Operation": "upload"}',
        b'{"operation": "download", "oper\\u0061tion": "upload"}',
        b'{"operation": "download", "x": 1}',
        b'{"operation": "download", "objects": [NaN]}',
        b'{"operation": "download"} {"operation": "upload"}',
        b'\xef\xbb\xbf{"operation": "download"}',
        '{"operation": "download"}'.encode("utf-16"),
        b'{"operation": "download\xff"}',
        b"[" * 5000,
    ],
)
def test_a_batch_call_that_can_be_read_in_two_ways_is_refused(body: bytes) -> None:
    assert asked(body) is Reason.PUSH_COMMANDS


def test_a_batch_calls_length() -> None:
    for length, status in ((None, 411), (lfs.BATCH_MAX + 1, 413)):
        refused = BatchReader(length).feed(b"{}")
        assert isinstance(refused, Refuse)
        assert refused.status == status


# ------------------------------------------------------------------------ at the gate


def batch_call(repo: str, commands: object) -> Inject | Later | Refuse:
    raw = b.raw("git-basic", NONCE, path=f"/org/{repo}.git/info/lfs/objects/batch")
    head = b.head(raw)
    return judge(head, b.facts(NOW, BINDING, commands=commands))


def test_a_batch_call_is_judged_by_what_it_does() -> None:
    for repo in ("repo", "readonly"):
        later = batch_call(repo, None)
        assert isinstance(later, Later)
        assert later.wants_commands
        raw = b.head(b.raw("git-basic", NONCE))
        assert isinstance(gate.reader(raw, later), BatchReader)
        assert isinstance(batch_call(repo, Batch(upload=False)), Inject)
        # a push's command list says nothing about a batch call
        assert isinstance(batch_call(repo, git.Commands(())), Later)
    assert isinstance(batch_call("repo", Batch(upload=True)), Inject)
    refused = batch_call("readonly", Batch(upload=True))
    assert isinstance(refused, Refuse)
    assert refused.reason is Reason.PUSH_OFF


def test_and_a_push_by_its_commands() -> None:
    head = b.head(b.raw("git-basic", NONCE, path="/org/repo.git/git-receive-pack"))
    later = judge(head, b.facts(NOW, BINDING, commands=Batch(upload=False)))
    assert isinstance(later, Later)
    assert isinstance(gate.reader(head, later), git.CommandReader)


def test_a_batch_call_asks_for_a_reply_that_can_be_read() -> None:
    leave = b.head(
        b.raw(
            "git-basic",
            NONCE,
            path="/org/repo.git/info/lfs/objects/batch",
            more=b"Content-Length: 2\r\nAccept-Encoding: gzip\r\n",
        )
    )
    inject = judge(leave, b.facts(NOW, BINDING, commands=Batch(False)))
    assert isinstance(inject, Inject)
    assert (b"accept-encoding", b"identity") in list(forward.request(inject).headers)


def objects_head(issued: lfs.Issued, more: bytes = b"") -> list[tuple[bytes, bytes]]:
    path = f"/.agent-box/lfs/{issued.token}"
    head = b.head(b.raw("git-basic", NONCE, method=issued.method, path=path, more=more))
    verified = issued.upstream.host
    peer = Peer(issued.upstream, "93.184.215.14", verified, None)
    inject = judge(head, b.facts(NOW, BINDING, issued=issued, peer=peer))
    assert isinstance(inject, Inject)
    return list(forward.request(inject).headers)


def test_what_opens_an_object() -> None:
    table = links()
    rewritten(table, reply(header={"Authorization": SECRET, "Content-Type": "a/b"}))
    elsewhere = find(table, "t1")
    assert elsewhere is not None
    lines = b"Content-Type: c/d\r\nRange: bytes=5-\r\nX-Own: 1\r\nCookie: a\r\n"
    headers = objects_head(elsewhere, lines)
    assert headers == [
        (b"host", b"objects.example.net"),
        (b"range", b"bytes=5-"),
        (b"authorization", SECRET.encode()),
        (b"content-type", b"a/b"),
    ]
    # on the binding's own host, where the reply gave no header: the credential
    own = replace(elsewhere, upstream=BINDING.upstream, headers=())
    assert any(name == b"authorization" for name, _ in objects_head(own))
    bare = replace(elsewhere, headers=())
    assert not any(name == b"authorization" for name, _ in objects_head(bare))
