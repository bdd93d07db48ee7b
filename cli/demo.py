"""`demo config`: an example of the config file, to be copied and cut down."""

from __future__ import annotations

from typing import Final

from agent_box.cli.render import Render

EXAMPLE: Final = """\
# agent-box configuration. No credential goes in this file.
version = 1

[daemon]
log = "info"                 # error, warn, info or debug
stop_grace_seconds = 30      # default for `agent-box stop --grace`

[defaults]
profile = "rust"             # used by `create` without --profile
engine = "qemu"              # firecracker is a known name, and not built

[engine]
helper = "user"              # system is a known name, and not built

# A profile is a template for `create`. What this one needs is built by
# `agent-box image build rust --harness codex`.
[profiles.rust]
image = "rust"               # an image variant: base, python, node, rust, or one of yours
cpus = 4
memory = "8G"
disk = "30G"
policy = "dev"
bindings = ["github", "openai"]
harness = "codex"            # claude-code, opencode, gemini, pi, kage, or ["command", ...]

# Without a harness: for `exec` and `attach --shell`, not for `run`.
[profiles.quiet]
image = "base"
cpus = 2
memory = "4G"
disk = "30G"
policy = "locked"
bindings = ["anthropic"]

# A policy is the egress rule set of an instance.
[policies.dev]
mode = "allowlist"           # deny, allowlist or open

[[policies.dev.allow]]
host = "index.crates.io"
ports = [443]

[[policies.dev.allow]]
host = "static.crates.io"
ports = [443]

[policies.locked]
mode = "deny"                # broker endpoints only

# A binding is one broker endpoint. It names a credential; it never holds one.
[bindings.openai]
upstream = "https://api.openai.com"
kind = "openai"              # replaces the Authorization header
credential = "openai-api-key"
routes = [
  { path = "/v1/responses", match = "exact", methods = ["POST"] },
  { path = "/v1/models", match = "exact", methods = ["GET"] },
]
max_tokens = 20000000        # of each instance, for its whole life

[bindings.anthropic]
upstream = "https://api.anthropic.com"
kind = "anthropic"           # replaces the x-api-key header
credential = "anthropic-api-key"
routes = [
  { path = "/v1/messages", match = "exact", methods = ["POST"] },
]

[bindings.github]
upstream = "https://github.com"
kind = "git-basic"           # git smart HTTP; pushes only to the instance namespace
credential = "github-token"
basic_user = "x-access-token"
repos = [{ name = "example-org/example-repo", push = true }]
"""


def config(out: Render) -> None:
    out.result({"config": EXAMPLE}, EXAMPLE.removesuffix("\n"))
