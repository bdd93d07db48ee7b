"""The main job, shown: a coding agent in an instance changes a repository through the broker.

Run by `deploy/quickstart`, with the Python that agent-box is installed in. The model is a
scripted one, or a provider's by a key from stdin, and the forge is this machine. What is of
this machine stands behind TLS on loopback, with keys that are made for this run and that the
guest never sees. Everything lies below ~/.local/share/agent-box/quickstart, and nothing of the
operator's own agent-box is touched.
"""

from __future__ import annotations

import argparse
import datetime
import getpass
import ipaddress
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import search

HERE: Final = Path(__file__).resolve().parent
NAME: Final = "demo"
REPOSITORY: Final = "demo/hello"
BRANCH: Final = "agent-box/demo/greeting"  # below the namespace of the instance
BINARY: Final = Path(sys.executable).with_name("agent-box")
FRESH: Final = Path(sys.prefix) / "fresh"  # there until this version has had its images
WRAPPER: Final = """\
#!/bin/sh
# agent-box as the quickstart has it; root goes on as the account that it belongs to.
[ "$(id -u)" != 0 ] || exec runuser -u {account} -- "$0" "$@"
export HOME={home} XDG_CONFIG_HOME={config} XDG_STATE_HOME={state} XDG_RUNTIME_DIR={runtime}
exec {program} "$@"
"""
CONFIG: Final = """\
version = 1

[defaults]
profile = "demo"

[profiles.demo]
image = "base"
harness = "{harness}"
cpus = 2
memory = "2G"
disk = "4G"
policy = "demo"
bindings = ["forge", "model"]

[policies.demo]
mode = "allowlist"

[bindings.model]
upstream = "{upstream}"
kind = "{kind}"
credential = "demo-model"
{trust}routes = [{{ path = "{path}", match = "prefix", methods = ["GET", "POST"] }}]

[bindings.forge]
upstream = "https://127.0.0.1:{forge}"
kind = "git-basic"
credential = "demo-forge"
basic_user = "demo"
ca_file = "loopback.pem"
allow_reserved = true
repos = [{{ name = "{repository}", push = true }}]
"""
LOOPBACK: Final = 'ca_file = "loopback.pem"\nallow_reserved = true\n'
# By kind of binding: where the provider is, and below which path its API.
PROVIDERS: Final = {
    "openai": ("https://api.openai.com", "/v1/"),
    "anthropic": ("https://api.anthropic.com", "/v1/"),
    "google": ("https://generativelanguage.googleapis.com", "/v1beta/"),
}
# The binding that each harness needs; the first of a kind is the one that is meant.
HARNESSES: Final = {
    "codex": "openai",
    "claude-code": "anthropic",
    "opencode": "anthropic",
    "pi": "anthropic",
    "gemini": "google",
}
PROMPT: Final = """\
Greet in the repository, and push that as a branch of this instance: run each line below that
begins with $, as it is and in this order. Two of them are to show what is denied; let them fail.
$ cd ~/work && rm -rf hello && git clone -q https://127.0.0.1:{forge}/{repository} hello && ls hello
$ cd ~/work/hello && echo 'Hello from inside the machine.' >>README.md && git diff --stat
$ cd ~/work/hello && git config user.name agent && git config user.email agent@example.com \
&& git commit -qam 'Greet' && git push -q origin HEAD:refs/heads/{branch} 2>&1
$ curl -sS --max-time 5 https://example.com 2>&1 | head -1
$ curl -sS --max-time 5 http://198.51.100.1/ 2>&1 | head -1
"""


class Demo:
    """One showing.

    Args:
        harness: one of `HARNESSES`.
        key: the provider's; None, the model is the scripted one of this machine.
        upstream: in the place of the provider's own address.
        ca_file: whose certificates it has; None, those that this system trusts.
    """

    def __init__(
        self, harness: str, key: str | None, upstream: str | None, ca_file: Path | None
    ) -> None:
        self.harness = harness
        self.kind = HARNESSES[harness]
        self.key = key
        usual, self.path = PROVIDERS[self.kind]
        self.upstream = upstream or usual
        self.ca_file = ca_file
        self.base = Path.home() / ".local/share/agent-box/quickstart"
        for name in ("config/agent-box", "state", "private", "forge"):
            (self.base / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        self.env = {
            "HOME": str(Path.home()),
            "PATH": f"{BINARY.parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "LANG": "C.UTF-8",
            "XDG_CONFIG_HOME": str(self.base / "config"),
            "XDG_STATE_HOME": str(self.base / "state"),
            "XDG_RUNTIME_DIR": f"{runtime}/agent-box-quickstart" if runtime else self._runtime(),
        }
        Path(self.env["XDG_RUNTIME_DIR"]).mkdir(mode=0o700, exist_ok=True)
        for name, value in os.environ.items():
            if name.lower() in ("http_proxy", "https_proxy", "no_proxy") or name.startswith("npm_"):
                self.env[name] = value
        self.began = time.monotonic()

    def _runtime(self) -> str:
        """Sockets need a short path; the last run's is used again."""
        return str(Path.home() / ".ab-demo")

    # ------------------------------------------------------------------ the steps

    def show(self) -> None:
        """Raises Failed."""
        self._wrapper()
        files = self._keys()
        keys = {name: Path(file).read_text().strip() for name, file in files.items()}
        if self.key is not None:
            keys["model"] = self.key
        model_words = ("--key-file", files["model"], "--log", str(self.base / "model.log"))
        forge_words = (str(self._repository()), "--token-file", files["forge"])
        with (
            self._server("scripted_model.py", *model_words) as model,
            self._server("local_forge.py", *forge_words) as forge,
        ):
            self._configure(model, forge)
            self._images()
            self._accelerator()
            self._instance(keys)
            self._job(forge)
            self._results(keys)

    def _images(self) -> None:
        self.say(f"images: what the instance boots, and {self.harness}")
        held = self.verb("image", "list")
        if not any(image["variant"] == "base" for image in held["images"]):
            self.run("image", "build", "base", "--harness", self.harness)
        else:
            if FRESH.exists():  # the guest's code may have changed
                self.run("image", "build", "base", "--guest")
            if not any(layer["harness"] == self.harness for layer in held["layers"]):
                self.run("image", "build", "--harness", self.harness)
        if FRESH.exists():
            self.verb("daemon", "--stop")  # services of the version before may still run
            FRESH.unlink()

    def _accelerator(self) -> None:
        """Found once; a /dev/kvm that opens may still run no guest."""
        if not (self.base / "state/agent-box/services/engine/chosen.toml").exists():
            self.say("accelerator: found by running a guest")
            self.verb("setup", "--no-pull", "--no-unit")

    def _instance(self, keys: dict[str, str]) -> None:
        self.say("credentials: into the store, from stdin")
        for name in ("model", "forge"):
            self.verb("secret", "set", f"demo-{name}", stdin=keys[name])
        names = {row["name"]: row for row in self.verb("list")["instances"]}
        if NAME in names:
            self.say("instance: the last one goes")
            self.verb("delete", NAME, "--force")
        self.say("instance: create and start")
        self.verb("create", NAME)
        self.run("start", NAME)

    def _job(self, forge: int) -> None:
        by = "a SCRIPTED model on this machine" if self.key is None else self.upstream
        self.say(f"the job: {self.harness}, driven by {by}")
        prompt = PROMPT.format(forge=forge, repository=REPOSITORY, branch=BRANCH)
        self.run("run", NAME, "--timeout", "900", "--prompt", "-", stdin=prompt)

    def _results(self, keys: dict[str, str]) -> None:
        bare = str(self.base / "forge" / f"{REPOSITORY}.git")
        self.say(f"the commit that arrived at the forge, on {BRANCH}")
        shown = subprocess.run(
            ["git", "--no-pager", "-C", bare, "log", "--stat", "-1", BRANCH, "--"], check=False
        )
        if shown.returncode:
            raise Failed("the commit did not arrive at the forge")
        diff = subprocess.run(
            ["git", "-C", bare, "diff", "--numstat", "main", BRANCH, "--"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        if diff.stdout.split() != ["1", "0", "README.md"]:  # one line more, and nothing else
            raise Failed(f"the commit is not the change that was asked for: {diff.stdout!r}")
        self.say("what was denied, and what the harness was allowed")
        entries = self._events()
        for entry in entries:
            if entry["kind"] in ("flow-denied", "name-denied", "permission-allowed") or (
                "denied" in entry["kind"]
            ):
                print(f"  {entry['source']}: {entry['kind']} {json.dumps(entry['facts'])}")
        self.say("usage, counted by the broker")
        self.run("usage", NAME)
        self.say(
            "the credentials, looked for: the machine's memory and disk, and all of agent-box's"
        )
        self._absent(keys)

    def _events(self) -> list[dict[str, Any]]:
        """Of this instance: those before it, of the same name, have theirs as well."""
        id = self.verb("inspect", NAME)["id"]
        return [e for e in self.verb("logs", NAME)["events"] if e["instance"] == id]

    def _absent(self, keys: dict[str, str]) -> None:
        """Plainly and in base64. From outside of the machine: no part of it goes in for that.

        The two that may have it, the store and the broker, are the two whose memory nobody may
        read; what the store keeps in files is sealed, and is looked into as well.
        """
        forms = {f: name for name, key in keys.items() for f in search.forms(key.encode())}
        looked = 0
        for root in (self.base / "state", self.base / "config", Path(self.env["XDG_RUNTIME_DIR"])):
            for directory, below, names in os.walk(root):
                if directory.endswith("/images"):
                    below.clear()  # made before, and the same for everybody
                for file in (Path(directory) / each for each in names):
                    if file.is_file() and not file.is_symlink():
                        looked += 1
                        if form := search.holds(search.written(file), forms):
                            raise Failed(f"the credential {forms[form]} is in {file}")
        started = [e for e in self._events() if e["kind"] == "vmm-started"]
        if form := search.holds(search.memory(started[-1]["facts"]["pid"]), forms):
            raise Failed(f"the credential {forms[form]} is in the memory of the machine")
        for name in keys:
            print(
                f"  {name}: not in the machine's memory, not in {looked} files, its disk among them"
            )

    # ------------------------------------------------------------------ before and after

    def _wrapper(self) -> None:
        program = self.base / "agent-box"
        program.write_text(
            WRAPPER.format(
                account=getpass.getuser(),
                program=shlex.quote(str(BINARY)),
                home=shlex.quote(self.env["HOME"]),
                config=shlex.quote(self.env["XDG_CONFIG_HOME"]),
                state=shlex.quote(self.env["XDG_STATE_HOME"]),
                runtime=shlex.quote(self.env["XDG_RUNTIME_DIR"]),
            )
        )
        program.chmod(0o700)

    def remove(self) -> None:
        """All of it, the program too. Raises Failed."""
        self.run("uninstall", "--delete-instances", "--purge")
        shutil.rmtree(self.base)
        if not any(self.base.parent.iterdir()):  # it was ours alone
            self.base.parent.rmdir()
        shutil.rmtree(self.env["XDG_RUNTIME_DIR"])
        print(f"removed: {self.base}")

    # ------------------------------------------------------------------ what stands in

    def _keys(self) -> dict[str, str]:
        """Made for this run, or kept from the last, so that the store's fit."""
        made = {}
        for name in ("model", "forge"):
            file = self.base / "private" / name
            if not file.exists():
                file.touch(mode=0o600)
                file.write_text(f"sk-demo-{secrets.token_hex(24)}")
            made[name] = str(file)
        return made

    def _repository(self) -> Path:
        root = self.base / "forge"
        bare = root / f"{REPOSITORY}.git"
        if not bare.exists():
            work = self.base / "first"
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            (work / "README.md").write_text("# hello\n")
            who = ["-c", "user.name=demo", "-c", "user.email=demo@example.com"]
            for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "First"]):
                subprocess.run(["git", *who, *words], cwd=work, check=True)
            subprocess.run(["git", "clone", "-q", "--bare", str(work), str(bare)], check=True)
            subprocess.run(
                ["git", "-C", str(bare), "config", "http.receivepack", "true"], check=True
            )
        # what is shown at the end is what this run pushed, and nothing that lay there
        subprocess.run(
            ["git", "-C", str(bare), "update-ref", "-d", f"refs/heads/{BRANCH}"], check=True
        )
        link = root / REPOSITORY
        if not link.exists():
            link.symlink_to(bare)
        return root

    @contextmanager
    def _server(self, program: str, *words: str) -> Iterator[int]:
        cert, key = self._certificate()
        port = self.base / f"{program}.port"
        wanted = port.read_text() if port.exists() else "0"
        command = [sys.executable, str(HERE / program), *words, "--tls", cert, key]
        process = subprocess.Popen([*command, "--port", wanted], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise Failed(f"{program} did not start")
            port.write_text(line.strip())
            yield int(line)
        finally:
            process.terminate()
            process.wait()

    def _certificate(self) -> tuple[str, str]:
        """A certificate for 127.0.0.1 that signs itself; the config trusts it and no other."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        cert = self.base / "config/agent-box/loopback.pem"
        file = self.base / "private/loopback.key"
        if cert.exists() and file.exists():
            return str(cert), str(file)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "agent-box quickstart")])
        now = datetime.datetime.now(datetime.UTC)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=365))
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        file.touch(mode=0o600)
        pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        file.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
        cert.write_bytes(made.public_bytes(pem))
        return str(cert), str(file)

    def _configure(self, model: int, forge: int) -> None:
        upstream, trust = f"https://127.0.0.1:{model}", LOOPBACK
        if self.key is not None:
            upstream, trust = self.upstream, ""
            if self.ca_file is not None:  # of a gateway, which may be near
                shutil.copy(self.ca_file, self.base / "config/agent-box/upstream.pem")
                trust = 'ca_file = "upstream.pem"\nallow_reserved = true\n'
        text = CONFIG.format(
            harness=self.harness, kind=self.kind, upstream=upstream, trust=trust,
            path=self.path, forge=forge, repository=REPOSITORY,
        )  # fmt: skip
        (self.base / "config/agent-box/config.toml").write_text(text)

    # ------------------------------------------------------------------ below

    def say(self, text: str) -> None:
        print(f"\n== {time.monotonic() - self.began:5.1f} s  {text}", flush=True)

    def run(self, *words: str, stdin: str | None = None) -> None:
        """A verb, shown as a person would see it. Raises Failed."""
        print(f"$ agent-box {' '.join(words)}", flush=True)
        done = subprocess.run([BINARY, *words], env=self.env, input=stdin, text=True, check=False)
        if done.returncode:
            raise Failed(f"agent-box {words[0]} exited {done.returncode}")

    def verb(self, *words: str, stdin: str = "") -> dict[str, Any]:
        """A verb's result. Raises Failed."""
        done = subprocess.run(
            [BINARY, *words, "--json"], env=self.env, input=stdin, stdout=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise Failed(f"agent-box {' '.join(words)} exited {done.returncode}")
        found: dict[str, Any] = json.loads(done.stdout)["result"]
        return found


class Failed(Exception):
    """One line."""


def _given() -> tuple[Demo, bool]:
    """Whether it is to be removed, too. Raises Failed: stdin brings no key."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--remove", action="store_true")
    parser.add_argument("--harness", choices=list(HARNESSES))
    parser.add_argument("--provider", choices=list(PROVIDERS))
    parser.add_argument("--upstream")
    parser.add_argument("--ca-file", type=Path)
    given = parser.parse_args()
    kind = given.provider or HARNESSES.get(given.harness, "openai")
    harness = given.harness or next(name for name, of in HARNESSES.items() if of == kind)
    if HARNESSES[harness] != kind:
        raise Failed(f"{harness} speaks with {HARNESSES[harness]}, not with {kind}")
    key = None
    if given.provider is not None:
        key = sys.stdin.readline().strip()
        if not key or not key.isprintable() or " " in key:
            raise Failed("--provider: the first line of stdin must be the key")
    return Demo(harness, key, given.upstream, given.ca_file), given.remove


def main() -> int:
    try:
        demo, remove = _given()
        if remove:
            demo.remove()
            return 0
        demo.show()
    except Failed as failed:
        print(f"deploy/quickstart: {failed}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndeploy/quickstart: interrupted; run again, it goes on", file=sys.stderr)
        return 130  # as a shell has it
    demo.say("done. The machine runs on, and this is its agent-box:")
    program = demo.base / "agent-box"
    print(f"{program} attach {NAME} --shell    # or logs, usage, doctor; daemon --stop")
    print("deploy/quickstart --remove    # ends and removes all of it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
