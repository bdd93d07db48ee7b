"""The main job without a real harness: a scripted agent in a machine pushes to a forge."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

from support import acpagent
from support.source import ROOT
from support.upstreams import Authority
from support.vm import CONFIG, Machines

REPOSITORY = "demo/hello"
AGENT = "/home/agent/acpagent.py"
NAME = "worker"


class Job(Machines):
    """An agent-box with running machines, and a forge with one repository.

    Args:
        names: of the machines.

    Attributes:
        token: what the forge wants, and only the store has.
        bare: the repository.
    """

    def __init__(self, *names: str) -> None:
        super().__init__()
        try:
            self.token = f"t{secrets.token_hex(24)}"
            self._forge()
            self.up()
            assert self.run("secret", "set", "forge", stdin=self.token).exit == 0
            agent = Path(acpagent.__file__).read_text()
            for name in names or (NAME,):
                assert self.run("create", name).exit == 0
                self.start(name)
                ran = self.run("exec", name, "--", "sh", "-c", f"cat >{AGENT}", stdin=agent)
                assert ran.exit == 0, ran
        except BaseException:
            self.close()
            raise

    def _forge(self) -> None:
        outside = self.home / "outside"  # of agent-box: what a provider has
        self.bare = outside / f"{REPOSITORY}.git"
        work = outside / "first"
        work.mkdir(parents=True)
        (work / "README.md").write_text("# hello\n")
        self.git("-C", str(work), "init", "-q", "-b", "main")
        self.git("-C", str(work), "add", ".")
        self.git("-C", str(work), "commit", "-qm", "First")
        self.git("clone", "-q", "--bare", str(work), str(self.bare))
        self.git("-C", str(self.bare), "config", "http.receivepack", "true")
        (outside / REPOSITORY).symlink_to(self.bare)
        token = outside / "token"
        token.write_text(self.token)
        authority = Authority()
        certificate, key = authority.files(outside)
        self.forge = subprocess.Popen(
            [
                *(sys.executable, str(ROOT / "deploy/local_forge.py"), str(outside)),
                *("--token-file", str(token), "--tls", str(certificate), str(key)),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.forge.stdout is not None
        port = int(self.forge.stdout.readline())
        token.unlink()  # it has read it
        config = self.home / "config/agent-box/config.toml"
        (config.parent / "ca.pem").write_bytes(authority.pem)
        url = f"https://127.0.0.1:{port}"
        config.write_text(
            f"""{CONFIG}bindings = ["forge"]
harness = ["python3", "-I", "-S", "{AGENT}", "works", "{url}/{REPOSITORY}"]
[bindings.forge]
upstream = "{url}"
kind = "git-basic"
credential = "forge"
basic_user = "demo"
ca_file = "ca.pem"
allow_reserved = true
repos = [{{ name = "{REPOSITORY}", push = true }}]
"""
        )

    def git(self, *words: str) -> str:
        env = {"PATH": "/usr/bin:/bin", "HOME": str(self.home), "GIT_CONFIG_NOSYSTEM": "1"}
        who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        done = subprocess.run(
            ["git", *who, *words], env=env, stdout=subprocess.PIPE, text=True, check=True
        )
        return done.stdout.strip()

    def branches(self) -> dict[str, str]:
        """Each branch of the forge, and its commit. The repository is whole, too."""
        self.git("-C", str(self.bare), "fsck", "--full", "--strict", "--no-dangling")
        listed = self.git(
            "-C", str(self.bare), "for-each-ref", "--format=%(refname:lstrip=2) %(objectname)"
        )
        return dict(line.split() for line in listed.splitlines())  # type: ignore[misc]

    def close(self) -> None:
        self.forge.terminate()
        self.forge.wait()
        if self.forge.stdout is not None:
            self.forge.stdout.close()
        super().close()
