"""pip, npm and apt of Debian in a real machine: what is allowed comes, what is not is said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import shelves
from support.netvm import Networked

# An image is built, which takes minutes and a mirror of Debian.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

CONFIG = """\
version = 1
[engine]
accel = "tcg"
[profiles.default]
cpus = 1
memory = "1G"
disk = "1G"
image = "tools"
"""
VARIANT = """\
description = "base, with pip and npm"
extends = "base"
packages = ["nodejs", "npm", "python3-pip"]
"""


@pytest.fixture(scope="module")
def host() -> Iterator[Networked]:
    made = Networked(config=CONFIG)
    try:
        variants = made.home / "config" / "agent-box" / "variants"
        variants.mkdir()
        (variants / "tools.toml").write_text(VARIANT)
        made.begin()
        there = [each["variant"] for each in made.run("image", "list", "--json").result["images"]]
        if "tools" not in there:
            assert made.run("image", "build", "tools", timeout=3000).exit == 0
        assert made.run("create", "web").exit == 0
        made.allow("one")
        made.start("web")
        yield made
    finally:
        made.close()


def test_pip(host: Networked) -> None:
    install = (
        "set -e; cd $(mktemp -d); python3 -m pip install --quiet --no-cache-dir --target . "
        "--trusted-host {0} --index-url http://{0}{1} boxed; python3 -c 'import boxed'"
    )
    where = f"one.test:{host.server.port}"
    status, said = host.shell(install.format(where, "/simple/"))
    assert status == 0 and said.splitlines()[-1] == shelves.SAYS, said
    for where, why in (
        ("denied.test", "Name or service not known"),
        ("203.0.113.1", "No route to host"),
    ):
        status, said = host.shell(install.format(where, "/simple/"))
        assert status and why in said, said


def test_apt(host: Networked) -> None:
    install = (
        "set -e; echo 'deb [trusted=yes] {} ./' > /etc/apt/sources.list; "
        "rm -f /etc/apt/sources.list.d/*; apt-get -qq update; apt-get -qq install boxed; boxed"
    )
    status, said = host.shell(install.format(host.url("one", "/apt")), user="root")
    assert status == 0 and said.splitlines()[-1] == shelves.SAYS, said


def test_npm(host: Networked) -> None:
    install = (
        # npm itself tries again for 70 s after whatever fails, wherever it runs.
        "set -e; cd $(mktemp -d); "
        "npm install --no-update-notifier --fetch-retries 0 --registry {}/npm/ boxed; "
        "node -e 'require(\"boxed\")'"
    )
    status, said = host.shell(install.format(host.url("one", "")))
    assert status == 0 and said.splitlines()[-1] == shelves.SAYS, said
    for where, why in (("denied.test", "ENOTFOUND"), ("203.0.113.1", "EHOSTUNREACH")):
        status, said = host.shell(install.format(f"http://{where}"))
        assert status and why in said, said
