"""policy show, set and check, by the real binary on a whole agent-box."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import registries
from support.live import Live

CONFIG = """
version = 1
[policies.dev]
mode = "allowlist"
allow = [{ host = "index.crates.io" }, { host = "static.crates.io", ports = [443, 80] }]
deny = [{ host = "*.evil.test" }]
[policies.locked]
mode = "deny"
"""


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    made = Live()
    config = made.home / "config" / "agent-box" / "config.toml"
    config.parent.mkdir(parents=True, mode=0o700)
    config.write_text(CONFIG)
    try:
        registries.seed(
            made.paths.data("registry") / "registry.db", *(f"web{n}" for n in range(1, 9))
        )
        made.up()
        yield made
    finally:
        made.close()


def test_show(live: Live) -> None:
    result = live.run("policy", "show", "web1", "--json").result
    assert (result["policy"], result["generation"], result["mode"]) == ("dev", 1, "allowlist")
    assert [rule["id"] for rule in result["rules"]] == [
        "allow:index.crates.io:443/tcp",
        "allow:static.crates.io:80,443/tcp",
        "deny:*.evil.test:443/tcp",
    ]
    assert result["endpoints"] == ["http://github.broker.internal"]
    text = live.run("policy", "show", "web1").out
    assert "policy: dev\ngeneration: 1\nmode: allowlist\n" in text
    assert max(map(len, text.splitlines())) <= 80
    assert live.run("policy", "show", "nosuch", "--json").error["exit"] == 3


@pytest.mark.parametrize(
    ("target", "exit", "rule"),
    [
        ("index.crates.io", 0, "allow:index.crates.io:443/tcp"),
        ("INDEX.CRATES.IO.:443", 0, "allow:index.crates.io:443/tcp"),
        ("static.crates.io:80", 0, "allow:static.crates.io:80,443/tcp"),
        ("github.broker.internal:80", 0, "broker:github"),
        ("index.crates.io:22", 1, "mode:allowlist"),
        ("a.evil.test", 1, "deny:*.evil.test:443/tcp"),
        ("8.8.8.8", 1, "mode:allowlist"),
        ("[::1]:443", 1, "mode:allowlist"),
        ("bücher.example", 1, "mode:allowlist"),
    ],
)
def test_check(live: Live, target: str, exit: int, rule: str) -> None:
    ran = live.run("policy", "check", "web1", target, "--json")
    said = ran.result if exit == 0 else ran.error
    assert ran.exit == exit
    assert (said["verdict"], said["rule"]) == ("allow" if exit == 0 else "deny", rule)
    text = live.run("policy", "check", "web1", target)
    assert text.exit == exit
    assert rule in text.out


@pytest.mark.parametrize("target", ["", "a b", "127.1", "10.0.0.0/8", "a:0", "a:x", "*.a.test"])
def test_check_of_no_destination(live: Live, target: str) -> None:
    assert live.run("policy", "check", "web1", target, "--json").error["exit"] == 64


def test_set_and_check_again(live: Live) -> None:
    assert live.run("policy", "check", "web2", "example.com").exit == 1
    result = live.run("policy", "set", "web2", "--allow", "example.com", "--json").result
    assert (result["generation"], result["changes"]) == (2, 1)
    assert live.run("policy", "check", "web2", "example.com").exit == 0
    again = live.run("policy", "set", "web2", "--allow", "Example.com.", "--json").result
    assert again["generation"] == 2
    kinds = [e["kind"] for e in live.run("logs", "web2", "--json").result["events"]]
    assert kinds.count("policy-changed") == 1
    live.run("policy", "set", "web2", "--remove", "example.com", "--remove", "index.crates.io")
    assert live.run("policy", "check", "web2", "example.com").exit == 1
    assert live.run("policy", "check", "web2", "index.crates.io").exit == 1
    result = live.run("policy", "set", "web2", "--reset", "--json").result
    assert (result["generation"], result["changes"]) == (4, 0)
    assert live.run("policy", "check", "web2", "index.crates.io").exit == 0


def test_what_was_set_is_there_after_a_restart(live: Live) -> None:
    live.run("policy", "set", "web3", "--allow", "example.com:22", "--mode", "allowlist")
    before = live.run("policy", "show", "web3", "--json").result
    assert live.run("service", "restart", "registry").exit == 0
    assert live.run("policy", "show", "web3", "--json").result == before


def test_another_named_policy(live: Live) -> None:
    live.run("policy", "set", "web4", "--mode", "open", "--allow-open")
    assert live.run("policy", "check", "web4", "example.com:22").exit == 0
    result = live.run("policy", "set", "web4", "locked", "--json").result
    assert (result["policy"], result["mode"], result["changes"]) == ("locked", "deny", 0)
    assert live.run("policy", "check", "web4", "index.crates.io").exit == 1
    error = live.run("policy", "set", "web4", "nosuch", "--json").error
    assert error["exit"] == 3 and "nosuch" in error["message"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--mode", "open"), "--allow-open"),
        (("--allow", "10.0.0.1"), "--allow-reserved"),
        (("--allow", "[64:ff9b::a00:1]:443"), "--allow-reserved"),
        (("--allow", "x.broker.internal"), "broker"),
        (("--remove", "never.test"), "never.test"),
        (("--remove", "allow:never.test:443/tcp"), "never.test"),
        (("--allow", "a b"), "a b"),
        (("--file", "/nonexistent/policy.toml"), "/nonexistent/policy.toml"),
    ],
)
def test_bad_input_to_set_changes_nothing(live: Live, args: tuple[str, ...], words: str) -> None:
    before = live.run("logs", "--head", "--json").result
    error = live.run("policy", "set", "web5", *args, "--json").error
    assert error["exit"] == 64
    assert words in error["message"]
    assert live.run("logs", "--head", "--json").result == before


def test_with_leave(live: Live) -> None:
    live.run("policy", "set", "web6", "--allow", "10.0.0.1", "--allow-reserved")
    assert live.run("policy", "check", "web6", "10.0.0.1").exit == 0
    assert live.run("policy", "check", "web6", "10.0.0.2").exit == 1
    live.run("policy", "set", "web6", "--mode", "open", "--allow-open")
    assert live.run("policy", "check", "web6", "example.com:25").exit == 0
    error = live.run("policy", "check", "web6", "127.0.0.1:25", "--json").error
    assert error["rule"] == "reserved:own"


def test_a_policy_from_a_file(live: Live, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('mode = "allowlist"\nallow = [{ host = "*.example.org", sni = false }]\n')
    result = live.run("policy", "set", "web7", "--file", str(file), "--json").result
    assert [rule["id"] for rule in result["rules"]] == ["allow:*.example.org:443/tcp+no-sni"]
    assert (result["policy"], result["changes"]) == ("dev", 1)
    assert live.run("policy", "check", "web7", "a.example.org").exit == 0
    assert live.run("policy", "check", "web7", "index.crates.io").exit == 1
    for content in (
        'mode = "allowlist"\nalow = []\n',
        "mode = 1\n",
        'mode = "open"\n',
        "[",
        "\xff",
    ):
        file.write_text(content)
        error = live.run("policy", "set", "web7", "--file", str(file), "--json").error
        assert error["exit"] == 64
        assert str(file) in error["message"]
    assert live.run("policy", "show", "web7", "--json").result["generation"] == 2


def test_a_refused_config_refuses_a_set_and_leaves_what_is_in_force(live: Live) -> None:
    config = live.home / "config" / "agent-box" / "config.toml"
    config.write_text(CONFIG + "\n[policies.locked2]\nmode = 'deny'\ncolour = 1\n")
    try:
        error = live.run("policy", "set", "web8", "--allow", "a.test", "--json").error
        assert (error["exit"], error["kind"]) == (2, "config-invalid")
        assert "colour" in error["message"]
        assert live.run("policy", "show", "web8", "--json").result["generation"] == 1
    finally:
        config.write_text(CONFIG)
