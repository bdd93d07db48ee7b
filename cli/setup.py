"""setup and uninstall: what this account needs to run instances, and the way back.

The user part. It writes below the state directory, and one systemd user unit where systemd
runs; never the config file, which is the operator's. Each step may be done twice. `uninstall`
takes away exactly that, and with ``--purge`` also what was made since: instances' records,
images and credentials.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent_box.cli import instances, lifecycle, link, services
from agent_box.cli.render import Failure, Render
from agent_box.process.paths import told

if TYPE_CHECKING:
    from agent_box.config.model import Config
    from agent_box.engine.chosen import Accel
    from agent_box.engine.image.manifest import Manifest
    from agent_box.registry.contract import Rows

UNIT: Final = "agent-box.service"
SYSTEMD: Final = Path("/run/systemd/system")  # there when systemd runs (sd_booted(3))
SYSTEMCTL_S: Final = 30.0
PROBE_S: Final = {"kvm": 60.0, "tcg": None}  # seconds; None: as long as any start may take
PROBE_MEMORY: Final = 256 << 20
PROBE_DISK: Final = 64 << 20
_TEXT: Final = """\
[Unit]
Description=agent-box: sandboxes for coding agents
Documentation=man:agent-box(1)

[Service]
ExecStart={program} daemon
# Machines outlive the services: only the daemon itself is ended.
KillMode=process
Restart=on-failure
{environment}
[Install]
WantedBy=default.target
"""
# What decides where we look for things; the unit must agree with the operator's shell.
_KEPT: Final = ("AGENT_BOX_CONFIG", "XDG_CONFIG_HOME", "XDG_STATE_HOME")


def setup(out: Render, *, system: bool, user: str | None, no_pull: bool, no_unit: bool) -> None:
    """Directories, the user unit, the image, the accelerator by a guest that really ran, and
    doctor's report."""
    if system:
        raise Failure(
            70, "not-implemented", "setup --system is not implemented yet", entry="system"
        )
    del user  # goes with --system
    from agent_box.cli import doctor
    from agent_box.config.load import load

    here = link.place()
    config = load(here.config)
    here.paths.make()
    out.progress(f"state directory: {here.paths.state}")
    unit = None if no_unit else _install_unit(out, os.environ)
    image = _image(out, here, config, build=not no_pull)
    accel = _accelerator(out, here, config, image)
    lines = list(doctor.report(os.environ))
    result: dict[str, Any] = {
        "state": str(here.paths.state),
        "unit": None if unit is None else str(unit),
        "image": image,
        "accel": accel,
        **doctor.facts(lines),
    }
    out.result(result, doctor.text(lines))


def uninstall(out: Render, *, system: bool, purge: bool, delete_instances: bool) -> None:
    """Takes away what setup installed.

    Raises:
        Failure: exit 4; there are instances, and nobody said that they may go.
    """
    if system:
        raise Failure(
            70, "not-implemented", "uninstall --system is not implemented yet", entry="system"
        )
    here = link.place()
    if here.paths.state.exists():
        _instances(out, here, delete_instances)
    unit = _remove_unit(out, os.environ)
    services.end_daemon(here, out)
    from agent_box.engine import chosen

    removed = [] if unit is None else [str(unit)]
    choice = chosen.file(here.paths)
    if choice.exists():
        choice.unlink()
        removed.append(str(choice))
    if here.paths.runtime.exists():
        shutil.rmtree(here.paths.runtime)
        removed.append(str(here.paths.runtime))
    if purge and here.paths.state.exists():
        shutil.rmtree(here.paths.state)
        removed.append(str(here.paths.state))
    kept = "" if purge or not here.paths.state.exists() else f"; {here.paths.state} stays (--purge)"
    out.result(
        {"removed": removed, "purged": purge},
        (f"removed: {', '.join(removed)}" if removed else "nothing was installed") + kept,
    )


# ----------------------------------------------------------------------------- the unit


def unit_path(env: Mapping[str, str]) -> Path:
    base = env.get("XDG_CONFIG_HOME") or f"{env.get('HOME') or os.path.expanduser('~')}/.config"
    return Path(base) / "systemd" / "user" / UNIT


def unit_text(program: Path, env: Mapping[str, str]) -> str:
    """The unit. Words of the environment are quoted as systemd.syntax(7) wants them."""
    lines = [f"Environment={_quoted(f'{k}={env[k]}')}\n" for k in _KEPT if env.get(k)]
    return _TEXT.format(program=_quoted(str(program)), environment="".join(lines))


def _quoted(word: str) -> str:
    if not word.isprintable():
        raise Failure(2, "setup-failed", f"control characters in {word!r}")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _install_unit(out: Render, env: Mapping[str, str]) -> Path | None:
    if not SYSTEMD.is_dir():
        out.progress("user unit: none, systemd does not run here; verbs start the daemon on demand")
        return None
    path = unit_path(env)
    text = unit_text(_program(), env)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    _systemctl("daemon-reload")
    _systemctl("enable", UNIT)
    out.progress(f"user unit: {path}; `loginctl enable-linger` lets it run without a login")
    return path


def _remove_unit(out: Render, env: Mapping[str, str]) -> Path | None:
    path = unit_path(env)
    if not path.exists():
        return None
    if SYSTEMD.is_dir():
        try:
            _systemctl("disable", "--now", UNIT)
        except Failure as failure:
            out.warning(failure.message)
    path.unlink()
    for directory in (path.parent, path.parent.parent):
        try:
            directory.rmdir()  # if it was ours alone
        except OSError:
            break
    if SYSTEMD.is_dir():
        try:
            _systemctl("daemon-reload")
        except Failure as failure:
            out.warning(failure.message)
    return path


def _program() -> Path:
    """The command that is running, as a path that stays."""
    found = shutil.which(sys.argv[0])
    if found is None:
        raise Failure(2, "setup-failed", f"{sys.argv[0]} is not found")
    return Path(found).absolute()


def _systemctl(*words: str) -> None:
    try:
        ran = subprocess.run(
            ["systemctl", "--user", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SYSTEMCTL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failure(2, "setup-failed", f"systemctl --user {words[0]}: {told(error)}") from error
    if ran.returncode != 0:
        why = ran.stderr.strip().splitlines()
        raise Failure(
            2, "setup-failed", f"systemctl --user {words[0]}: {why[-1] if why else ran.returncode}"
        )


# ---------------------------------------------------------------------------- the image


def _image(out: Render, here: link.Place, config: Config, *, build: bool) -> str | None:
    """The digest of the default profile's image; built when there is none."""
    from agent_box.engine.image import manifest

    variant = config.profiles[config.defaults.profile].image
    try:
        found = manifest.find(here.paths, variant)
    except manifest.ImageMissing as missing:
        if not build:
            out.progress(f"image: {missing.message}")
            return None
        out.progress(f"image: building {variant} ...")
        found = _built(out, here, variant)
    out.progress(f"image: {variant}, sha256 {found.variant.sha256}")
    return found.variant.sha256


def _built(out: Render, here: link.Place, variant: str) -> Manifest:
    from agent_box.engine.image import build, definition
    from agent_box.engine.image.errors import ImageError

    beside = None if here.config is None else here.config.parent
    try:
        wanted = definition.load(variant, beside)
        return build.build(here.paths, wanted, mirror=None, tell=out.progress).manifest
    except ImageError as error:
        raise Failure(error.exit, error.kind, str(error)) from None


# ---------------------------------------------------------------------- the accelerator


def _accelerator(
    out: Render, here: link.Place, config: Config, image: str | None
) -> dict[str, Any] | None:
    """Which accelerator, and why: the config's word, or what a guest ran with.

    Raises:
        Failure: exit 10; a guest starts with none of them.
    """
    from agent_box.engine import chosen

    named = config.engine.accel
    if named is not None:
        out.progress(f"accelerator: {named}, as the config says")
        return {"accel": named, "by": "config", "why": None}
    choice = chosen.file(here.paths)
    before = chosen.read(choice)
    if image is None:
        out.progress("accelerator: not tried, there is no image to run")
        return None if before is None else {"accel": before, "by": "setup", "why": None}
    why = _no_kvm()
    tried: list[Accel] = ["tcg"] if why is not None else ["kvm", "tcg"]
    works = False
    try:
        for accel in tried:
            out.progress(f"accelerator: running a guest with {accel} ...")
            chosen.write(choice, accel)  # where the engine looks when it starts that guest
            problem = _runs(out, PROBE_S[accel])
            if problem is None:
                works = True
                told = f", because with kvm: {why}" if why is not None else ""
                out.progress(f"accelerator: {accel}{told}")
                return {"accel": accel, "by": "setup", "why": why}
            why = problem if why is None else f"{why}; {problem}"
    finally:
        if not works:  # nor did it when we are interrupted
            if before is None:
                choice.unlink(missing_ok=True)
            else:
                chosen.write(choice, before)
    raise Failure(10, "engine-unavailable", f"no guest starts on this host: {why}")


def _no_kvm() -> str | None:
    """Why KVM need not be tried; None: it answers."""
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC))
    except PermissionError as error:  # the usual case of an account without a desktop
        return (
            f"/dev/kvm: {error.strerror}; if its group may open it, join that, log in again, "
            "then `agent-box daemon --stop` and `agent-box setup`"
        )
    except OSError as error:
        return f"/dev/kvm: {error.strerror}"
    return None


def _runs(out: Render, within_s: float | None) -> str | None:
    """Starts a guest of its own and removes it; None, or why it did not come up."""
    from agent_box.bus.errors import Refusal

    name = f"setup-{secrets.token_hex(4)}"
    quiet = Render(out.verb, json=False, stdout=io.StringIO(), stderr=None)
    try:
        instances.make(quiet, name, profile=None, cpus=1, memory=PROBE_MEMORY, disk=PROBE_DISK)
        try:
            lifecycle.bring_up(quiet, name, within_s=within_s)
        finally:
            lifecycle.remove(quiet, name)
    except (Refusal, Failure) as error:
        return error.message
    return None


# ------------------------------------------------------------------------- the way back


def _instances(out: Render, here: link.Place, delete_all: bool) -> None:
    from agent_box.bus.schema import Empty
    from agent_box.registry.contract import Rows

    if not (here.paths.data("registry") / "registry.db").exists():
        return
    with link.service("registry", out) as registry:
        rows = registry.call("list", Empty())
    assert isinstance(rows, Rows)
    _refuse_unreadable(rows)
    names = [row.name for row in rows.instances]
    if names and not delete_all:
        raise Failure(
            4,
            "instances-exist",
            f"there are instances: {', '.join(names)}; delete them, or give --delete-instances",
        )
    for name in names:
        out.progress(f"deleting {name} ...")
        lifecycle.remove(out, name)


def _refuse_unreadable(rows: Rows) -> None:
    if rows.problems:
        names = ", ".join(problem.name for problem in rows.problems)
        raise Failure(4, "instances-exist", f"the records of {names} cannot be used; see doctor")
    if rows.strays:
        ids = ", ".join(rows.strays)
        raise Failure(4, "instances-exist", f"the engine holds {ids} without a record; see doctor")
