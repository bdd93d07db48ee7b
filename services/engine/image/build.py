"""Builds an image from Debian packages, as an ordinary user, in the process of the caller.

Packages go through mmdebstrap in a user namespace; what comes out is settled, turned into
drives and put among the blobs, and only then does a manifest name them. Killed at any time,
a build leaves the image that was there before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import msgspec

from agent_box.engine.image import archive, blobs, boxguest, debian, initramfs
from agent_box.engine.image.blobs import OWN_NAMESPACE
from agent_box.engine.image.definition import Definition
from agent_box.engine.image.errors import BuildFailed
from agent_box.engine.image.manifest import (
    SCHEMA,
    Checked,
    Manifest,
    Signed,
    Source,
    current,
    find,
    local_key,
    sign,
    store,
)
from agent_box.process.paths import Paths

# Fixed, so that a build does not tell when it was done: the day on which trixie came out.
EPOCH: Final = 1_754_697_600
VARIANT_UUID: Final = "626f7876-6172-4961-8e74-000000000001"
GUEST_UUID: Final = "626f7867-7565-4374-8000-000000000001"
KERNEL: Final = "linux-image-cloud-amd64"
APT: Final = (
    'Acquire::Languages "none"',
    'APT::Install-Recommends "false"',
    'APT::Get::AllowUnauthenticated "false"',
)
# Man pages, translations and documents, but for licences, are left out of an image.
DPKG: Final = (
    "force-unsafe-io",  # a tree that is thrown away at a crash need not be synced
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-include=/usr/share/doc/apt/examples/debian.sources",
)
# Runs with the tree as $1: fetches what a machine needs beside its tree, by the same apt, whose
# signatures and indexes hold for it too.
FETCH: Final = """set -eu
export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
find='s/^ *Depends: \\(linux-image-[0-9][^ ]*\\)$/\\1/p'
kernel=$(apt-cache depends KERNEL | sed -n "$find" | head -n 1)
test -n "$kernel"
mkdir -m 0777 "$1/fetched"
cd "$1/fetched"
apt-get -q download "$kernel" busybox-static
mv linux-image-*.deb kernel.deb
mv busybox-static_*.deb busybox.deb
dpkg-deb -W --showformat '${Package} ${Version} ${Architecture}\\n' kernel.deb >list
dpkg-deb -W --showformat '${Package} ${Version} ${Architecture}\\n' busybox.deb >>list
""".replace("KERNEL", KERNEL)
FETCHED: Final = ("kernel.deb", "busybox.deb", "list")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Built:
    """An image, now the current one of its variant.

    Attributes:
        sha256: of its manifest.
        phases: seconds that each step took, in order.
        changed: whether anything in it differs from the image that was current before.
    """

    manifest: Manifest
    sha256: str
    phases: dict[str, float]
    changed: bool


class _Clock:
    """Tells each step when it begins, and keeps how long it took."""

    def __init__(self, tell: Tell) -> None:
        self.phases: dict[str, float] = {}
        self._tell = tell

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._tell(f"{phase} ...")
        begun = time.monotonic()
        yield
        self.phases[phase] = time.monotonic() - begun
        self._tell(f"{phase}: {self.phases[phase]:.1f} s")


def build(paths: Paths, definition: Definition, *, mirror: str | None, tell: Tell) -> Built:
    """Builds a variant and makes it the current image of that name.

    Args:
        mirror: a URL instead of those that this host's apt uses.
        tell: gets a line about each step, for a person.

    Raises:
        HostUnfit: something is missing on this host; exit 4, the line says what to do.
        BuildFailed: a step failed, e.g. the network, a package that does not exist, the disk.
        PathsError: the state directory cannot be used.
    """
    debian.check()
    blobs.make(paths)
    clock = _Clock(tell)
    where = debian.repositories(definition.suite, mirror)
    with _steps(), blobs.workshop(paths.images / "work") as work:
        with blobs.workshop(debian.scratch(), 0o711) as scratch:
            with clock("packages"):
                _packages(definition, where, work, scratch, paths.images / "build.log", tell)
            with clock("kernel"):
                kernel, ramdisk, version = _kernel(scratch)
            fetched = (scratch / "list").read_text()
        with clock("drives"):
            texts = boxguest.sources()
            boxguest.lay_out(texts, work / "guest")
            _inside(
                tar=str(work / "root.tar"),
                directory=str(work / "root"),
                variant=str(work / "variant.erofs"),
                uuid=VARIANT_UUID,
                epoch=EPOCH,
                secrets=list(where.secrets),
                packages=str(work / "packages"),
                sources=str(work / "guest"),
            )
            _guest_drive(work)
            listed = sorted([*(work / "packages").read_text().splitlines(), *fetched.splitlines()])
        with clock("checksums"), blobs.locked(paths):
            manifest = Manifest(
                schema=SCHEMA,
                name=definition.name,
                description=definition.description,
                kernel=blobs.add_bytes(paths, work, kernel),
                initramfs=blobs.add_bytes(paths, work, ramdisk),
                variant=blobs.add(paths, work / "variant.erofs"),
                guest=blobs.add(paths, work / "guest.erofs"),
                packages=blobs.add_bytes(paths, work, "".join(f"{x}\n" for x in listed).encode()),
                source=Source(
                    suite=definition.suite,
                    architecture=debian.ARCHITECTURES[os.uname().machine],
                    kernel=version,
                    packages=len(listed),
                    definition=definition.sha256,
                    guest=boxguest.digest(texts),
                ),
            )
            return _publish(paths, manifest, clock.phases)


def refresh(paths: Paths, variant: str, *, tell: Tell) -> Built:
    """Makes the drive `guest` of an image anew, from the guest's code of this program.

    The image is the same but for that drive, and becomes the current one of its variant.

    Raises:
        ImageMissing, ImageCorrupt: there is no good image of that variant.
        HostUnfit, BuildFailed, PathsError: as `build`.
    """
    debian.check()
    blobs.make(paths)
    clock = _Clock(tell)
    old = find(paths, variant)
    Checked().check(paths, old)
    with _steps(), blobs.workshop(paths.images / "work") as work:
        with clock("guest"):
            texts = boxguest.sources()
            boxguest.lay_out(texts, work / "guest")
            drive = str(paths.blob(old.variant.sha256))
            _run("fsck.erofs", f"--extract={work / 'root'}", "--no-preserve", drive)
            _inside(
                tar=None,
                directory=str(work / "root"),
                sources=str(work / "guest"),
            )
            _guest_drive(work)
        with clock("checksums"), blobs.locked(paths):
            manifest = msgspec.structs.replace(
                old,
                guest=blobs.add(paths, work / "guest.erofs"),
                source=msgspec.structs.replace(old.source, guest=boxguest.digest(texts)),
            )
            return _publish(paths, manifest, clock.phases)


def _publish(paths: Paths, manifest: Manifest, phases: dict[str, float]) -> Built:
    for part in manifest.parts.values():
        os.stat(paths.blob(part.sha256))  # nobody has taken it away meanwhile
    signed = Signed(manifest=manifest, signatures=[sign(manifest, local_key(paths))])
    before = current(paths).get(manifest.name)
    after = store(paths, signed)
    return Built(manifest, after, phases, before != after)


# ------------------------------------------------------------------------------ steps


@contextmanager
def _steps() -> Iterator[None]:
    """What goes wrong in a step, as one line.

    Raises:
        BuildFailed
    """
    try:
        yield
    except archive.ArchiveError as error:
        raise _failed("kernel", str(error)) from None
    except OSError as error:
        what = f" {error.filename}" if error.filename else ""
        raise _failed("disk", f"{(error.strerror or 'failed').lower()}{what}") from None


def _packages(
    definition: Definition,
    where: debian.Repositories,
    work: Path,
    scratch: Path,
    log: Path,
    tell: Tell,
) -> None:
    """Has mmdebstrap install the packages: ``root.tar`` in `work`, `FETCHED` in `scratch`."""
    command = [
        *("mmdebstrap", "--mode=unshare", "--variant=minbase", "--format=tar"),
        f"--include={','.join(definition.packages)}",
        *(f"--aptopt={option}" for option in (*APT, *where.options)),
        *(f"--dpkgopt={option}" for option in DPKG),
        f"--customize-hook={FETCH}",
        *(f"--customize-hook=download /fetched/{name} {name}" for name in FETCHED),
        '--customize-hook=rm -rf "$1/fetched"',
        *(definition.suite, "-", *where.lines),
    ]
    environment = debian.environment(EPOCH) | {"TMPDIR": str(scratch)}
    log.unlink(missing_ok=True)
    with open(work / "root.tar", "wb") as tar, open(log, "w", encoding="utf-8") as kept:
        os.fchmod(kept.fileno(), 0o600)
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=scratch,
            stdin=subprocess.DEVNULL,
            stdout=tar,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        try:
            assert process.stderr is not None
            said = _relay(process.stderr, kept, tell, where.secrets)
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if status != 0:
        raise _failed("packages", said or f"mmdebstrap ended with {status}", log)


def _relay(source: IO[str], log: IO[str], tell: Tell, secrets: Sequence[str]) -> str:
    """Passes on what mmdebstrap is at; returns the line that says best why it failed."""
    why = ""
    for line in source:
        for secret in secrets:
            line = line.replace(secret, "***")
        log.write(line)
        log.flush()
        word, _, rest = line.strip().partition(": ")
        if word == "I" and rest.startswith(_TOLD):
            tell(f"  {rest}")
        elif word == "E" and (not why or not why.startswith("E: ")):
            why = line.strip()
    return why.removeprefix("E: ")


_TOLD: Final = ("running apt-get", "downloading", "extracting", "installing", "creating")


def _kernel(fetched: Path) -> tuple[bytes, bytes, str]:
    """vmlinux, initramfs and the kernel's version, from the packages that were fetched."""
    kernel, version, builtin = b"", "", ""
    modules: dict[str, bytes] = {}
    for name, content in archive.deb_files(fetched / "kernel.deb"):
        directory, _, file = name.rpartition("/")
        if directory == "boot" and file.startswith("vmlinuz-"):
            kernel, version = archive.vmlinux(content), file.removeprefix("vmlinuz-")
        elif file == "modules.builtin":
            builtin = content.decode()
        elif ".ko" in file:
            modules[file] = content
    busybox = next(
        (c for name, c in archive.deb_files(fetched / "busybox.deb") if name.endswith("/busybox")),
        None,
    )
    if not kernel or busybox is None:
        raise archive.ArchiveError("the packages hold no kernel or no busybox")
    return kernel, initramfs.make(busybox, modules, builtin), version


def _inside(**job: object) -> None:
    """Runs the job of `inside` in a user namespace.

    Raises:
        BuildFailed: with its last word.
    """
    done = subprocess.run(
        [*OWN_NAMESPACE, sys.executable, "-I", "-B", "-m", "agent_box.engine.image.inside"],
        env={"PATH": debian.PATH, "LC_ALL": "C.UTF-8"},
        input=json.dumps(job),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise _failed("drives", _last(done.stderr))


def _guest_drive(work: Path) -> None:
    boxguest.pack(work / "guest", work / "drive")
    drive, tree = str(work / "guest.erofs"), str(work / "drive")
    _run("mkfs.erofs", "-T0", "-x-1", "--all-root", "-U", GUEST_UUID, drive, tree)


def _run(*command: str) -> None:
    done = subprocess.run(
        command,
        env={"PATH": debian.PATH, "LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise _failed(command[0], _last(done.stderr))


def _failed(step: str, said: str, log: Path | None = None) -> BuildFailed:
    more = f"; all of it is in {log}" if log is not None else ""
    return BuildFailed(f"{step}: {said}{more}")


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no word"
