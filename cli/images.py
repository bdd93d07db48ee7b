"""The verbs of images: build, pull, list, verify and gc. They work in this process.

A service never builds or fetches anything: the operator's own command does, with the
operator's rights, and services boot what it put there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent_box.cli import link
from agent_box.cli.render import Failure, Render, Usage, table

if TYPE_CHECKING:
    from agent_box.cli.probes import Line
    from agent_box.cli.values import ImageSource
    from agent_box.config.model import Config
    from agent_box.config.presets import Preset
    from agent_box.engine.image import layers
    from agent_box.engine.image.cache import Held, Image, Tier, Verdict
    from agent_box.engine.image.layers import Kept
    from agent_box.engine.image.manifest import Manifest
    from agent_box.process.paths import Paths
    from agent_box.registry.contract import Rows

ASK_S: Final = 5.0  # for the registry, where the answer can also be that nobody knows


def build(
    out: Render, *, variants: list[str], mirror: str | None, guest: bool, harness: str | None
) -> None:
    """Builds variants, or only their drive `guest`, and the layer of a harness."""
    from agent_box.engine.image import build as building
    from agent_box.engine.image import definition

    here, config_dir = _place()
    tell = _quiet if out.json else out.progress
    built = []
    with _told():
        names = variants or ([] if harness is not None else ["base"])
        preset = None if harness is None else _preset(harness)
        definitions = [] if guest else [definition.load(name, config_dir) for name in names]
        for number, name in enumerate(names):
            if guest:
                done = building.refresh(here, name, tell=tell)
            else:
                done = building.build(here, definitions[number], mirror=mirror, tell=tell)
            built.append(
                {
                    **_described(done.manifest, done.sha256),
                    "changed": done.changed,
                    "phases": {k: round(v * 1000) for k, v in done.phases.items()},
                }
            )
        layer = None if preset is None else _layer(here, preset, tell)
    lines = list(map(_line, built))
    if layer is not None:
        lines.append(_layer_line(layer))
    out.result({"images": built, "layer": layer}, "\n".join(lines))


def _preset(name: str) -> Preset:
    from agent_box.config import presets

    try:
        return presets.load(name)
    except LookupError as error:
        raise Failure(3, "not-found", str(error.args[0]), harness=name) from None


def _layer(here: Paths, preset: Preset, tell: Callable[[str], None]) -> dict[str, Any]:
    from agent_box.engine.image import harness as layering

    kept, changed, phases = layering.build(here, preset, tell=tell)
    return {
        **_layered(kept),
        "changed": changed,
        "phases": {k: round(v * 1000) for k, v in phases.items()},
    }


def _layered(kept: Kept) -> dict[str, Any]:
    return {
        "harness": kept.layer.harness,
        "digest": kept.layer.drive.sha256,
        "manifest": kept.sha256,
        "packages": kept.layer.count,
        "size": kept.size,
    }


def _layer_line(layer: dict[str, Any]) -> str:
    same = "" if layer.get("changed", True) else ", as it was"
    number = layer["packages"]
    return (
        f"harness {layer['harness']}: sha256 {layer['digest']}, {number} "
        f"package{'' if number == 1 else 's'}, {layer['size'] >> 20} MiB{same}"
    )


def pull(out: Render, *, sources: list[ImageSource]) -> None:
    """Fetches images by digest: as written, or as the files of the variants say."""
    from agent_box.cli.values import ImageSource
    from agent_box.engine.image import definition, oci, reference

    here, config_dir = _place()
    tell = _quiet if out.json else out.progress
    pulled = []
    with _told():
        wanted: list[tuple[str | None, reference.Reference]] = []
        for name, written in sources or [ImageSource(_default_variant(), None)]:
            if written is not None:
                wanted.append((None, written))
                continue
            assert name is not None
            found = definition.load(name, config_dir).pull
            if found is None:
                raise Failure(
                    3,
                    "not-found",
                    f"no place to pull {name} from is known: give HOST/REPOSITORY@sha256:DIGEST, "
                    f"or set `pull` in its file, or `agent-box image build {name}`",
                )
            wanted.append((name, reference.parse(found)))
        trusted = oci.keys(config_dir)
        for name, where in wanted:
            sha256, image, fetched = oci.pull(here, where, trusted, name=name, tell=tell)
            pulled.append(
                {**_described(image, sha256), "reference": str(where), "fetched": fetched}
            )
    out.result({"images": pulled}, "\n".join(map(_line, pulled)))


def list_images(out: Render) -> None:
    """The cached images, and the instances that record each where a daemon can tell."""
    from agent_box.engine.image import cache, layers

    here, _ = _place()
    held, kept = cache.held(here), layers.held(here)
    rows = recorded(link.place())
    images = []
    for image in held.images:
        users = None if rows is None else _users(rows, image)
        images.append(
            {
                **_described(image.manifest, image.sha256),
                "current": image.current,
                "format": cache.FORMAT,
                "size": image.size,
                "files": _files(image.manifest),
                "instances": users,
            }
        )
    layered = [
        {
            **_layered(each),
            "current": each.current,
            "format": cache.FORMAT,
            "instances": None if rows is None else _layer_users(rows, each),
        }
        for each in kept.layers
    ]
    problems = [*_problems(held), *_problems(kept)]
    out.result(
        {"images": images, "layers": layered, "problems": problems},
        _list_text([*images, *({**x, "variant": f"harness {x['harness']}"} for x in layered)]),
    )
    for sha256, why in (held.bad | kept.bad).items():
        out.warning(f"{why} ({sha256[:12]})")


def verify(out: Render, *, variants: list[str]) -> None:
    """Hashes the cache again. What is not as it was is removed.

    Raises:
        Failure: exit 3; a file is corrupt or gone. The digests stand in the error.
    """
    from agent_box.engine.image import blobs, cache, layers, oci
    from agent_box.engine.image.manifest import ImageMissing

    here, config_dir = _place()
    with _told():
        blobs.make(here)
        held = cache.held(here)
        for name in variants:
            if not any(image.manifest.name == name for image in held.images):
                raise ImageMissing(
                    f"there is no image {name}; `agent-box image build {name}` makes it"
                )
        chosen = [i for i in held.images if not variants or i.manifest.name in variants]
        verdicts = cache.verify(
            here, chosen, oci.keys(config_dir), _quiet if out.json else out.progress
        )
        kept = layers.Held([], {}) if variants else layers.held(here)
        tiers = cache.verify_layers(here, kept.layers)
        corrupt, gone = _bad(verdicts, kept, tiers)
        cache.discard(here, corrupt)
    judged = [_judged(verdict) for verdict in verdicts]
    facts: dict[str, Any] = {
        "images": judged,
        "layers": [
            {**_layered(each), "current": each.current, "files": tiers[each.sha256]}
            for each in kept.layers
        ],
        "corrupt": corrupt,
        "missing": gone,
        "problems": [*_problems(held), *_problems(kept)],
    }
    lines = [*map(_verdict_text, verdicts), *(_tiers_text(k, tiers) for k in kept.layers)]
    text = "\n".join(lines) or "no image is cached"
    if corrupt or gone or held.bad or kept.bad:
        told = [
            *(f"{digest} did not match and was removed" for digest in corrupt),
            *(f"{digest} is gone" for digest in gone),
            *held.bad.values(),
            *kept.bad.values(),
        ]
        raise Failure(3, "image-digest-mismatch", "; ".join(told), text=text, **facts)
    out.result(facts, text)


def gc(out: Render) -> None:
    """Removes what no instance records.

    Raises:
        Failure: the registry cannot be asked, or holds a record that cannot be read: then
            nobody knows what is in use, and nothing is removed.
    """
    from agent_box.bus.schema import Empty
    from agent_box.engine.image import blobs, cache
    from agent_box.registry.contract import Rows

    here, _ = _place()
    with _told():
        blobs.make(here)
        with blobs.locked(here):  # so that no instance is made in between
            with link.service("registry", out) as registry:
                rows = registry.call("list", Empty())
            assert isinstance(rows, Rows)
            if rows.problems:
                names = ", ".join(problem.name for problem in rows.problems)
                raise Failure(
                    1,
                    "record-unusable",
                    f"the records of {names} cannot be read, so nobody knows which images they "
                    "use; nothing was removed",
                )
            used = {digest for row in rows.instances for digest in _digests(row.images)}
            removed = cache.collect(here, used)
    result = {"manifests": removed.manifests, "blobs": removed.blobs, "bytes": removed.bytes}
    number = len(removed.manifests)
    text = f"{number} image{'' if number == 1 else 's'} removed, {removed.bytes >> 20} MiB freed"
    out.result(result, text)


def report(paths: Paths, config: Config, rows: Rows | None) -> Iterator[Line]:
    """The lines of `doctor` about what machines boot. Every file is hashed; none is removed.

    Args:
        rows: of the registry; None when nobody answers.
    """
    from agent_box.cli.probes import note, ok
    from agent_box.engine.image import boxguest, cache

    held = cache.held(paths)
    verdicts = cache.verify(paths, held.images, {}, _quiet)
    current = {v.image.manifest.name: v for v in verdicts if v.image.current}
    variant = config.profiles[config.defaults.profile].image
    evidence = "sha256 of each file, Ed25519 of its manifest"
    kernel = current.get(variant)
    if kernel is None:
        yield note("guest-kernel", "none is installed", "image-not-pulled", evidence)
    else:
        yield _kernel_line(kernel, evidence)
    code = boxguest.digest(boxguest.sources())
    for verdict in verdicts:
        users = None if rows is None else _users(rows, verdict.image)
        value = _verdict_text(verdict) + (
            ", used by: unknown" if users is None else f", used by {len(users)}"
        )
        if not verdict.good:
            yield note("image", value, "image-digest-mismatch", evidence)
        elif verdict.image.current and verdict.image.manifest.source.guest != code:
            yield note("image", value, "image-outdated", evidence)
        else:
            yield ok("image", value, evidence)
    for sha256, why in held.bad.items():
        yield note("image", f"{why} ({sha256[:12]})", "image-digest-mismatch", evidence)
    for name in sorted({profile.image for profile in config.profiles.values()} - set(current)):
        value = f"{name}: none is installed; `agent-box image build {name}` makes it{_unfit()}"
        yield note("image", value, "image-not-pulled", "list the cache")


def _unfit() -> str:
    """What building lacks on this host, as the end of a line."""
    from agent_box.engine.image import debian
    from agent_box.engine.image.errors import HostUnfit

    try:
        debian.check()
    except HostUnfit as error:
        return f", which this host cannot: {error}"
    return ""


def _kernel_line(verdict: Verdict, evidence: str) -> Line:
    from agent_box.cli.probes import note, ok

    part, source = verdict.image.manifest.kernel, verdict.image.manifest.source
    value = f"vmlinux {source.kernel}, sha256 {part.sha256}"
    if verdict.files["kernel"] != "verified":
        why = f"{value}, {verdict.files['kernel']}"
        return note("guest-kernel", why, "image-digest-mismatch", evidence)
    return ok("guest-kernel", f"{value}, verified (tier {2 if verdict.signers else 1})", evidence)


# ----------------------------------------------------------------------------- below


def _place() -> tuple[Paths, Path | None]:
    """Where images lie, and the directory of the config file, or where one would lie.

    Raises:
        Failure, PathsError, ConfigError: as `link.place`.
    """
    here = link.place()
    if here.config is not None:
        return here.paths, here.config.parent
    base = os.environ.get("XDG_CONFIG_HOME") or f"{os.environ.get('HOME', '')}/.config"
    return here.paths, Path(base) / "agent-box" if os.path.isabs(base) else None


@contextmanager
def _told() -> Iterator[None]:
    """What building and pulling raise, as the command line says it."""
    from agent_box.engine.image.errors import ImageError

    try:
        yield
    except ImageError as error:
        if error.kind == "usage":
            raise Usage(str(error)) from None
        raise Failure(error.exit, error.kind, str(error)) from None
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        raise Failure(1, "image-failed", f"{what}{(error.strerror or 'failed').lower()}") from None


def _quiet(text: str) -> None:
    """With `--json` nobody reads what goes on."""


def _default_variant() -> str:
    """The variant of the default profile."""
    from agent_box.config import search
    from agent_box.config.load import load

    config = load(search.find(os.environ))
    return config.profiles[config.defaults.profile].image


def _described(manifest: Manifest, sha256: str) -> dict[str, Any]:
    return {
        "variant": manifest.name,
        "digest": manifest.variant.sha256,
        "manifest": sha256,
        "suite": manifest.source.suite,
        "kernel": manifest.source.kernel,
        "packages": manifest.source.packages,
    }


def _files(manifest: Manifest) -> dict[str, dict[str, Any]]:
    return {k: {"sha256": v.sha256, "size": v.size} for k, v in manifest.parts.items()}


def _line(image: dict[str, Any]) -> str:
    same = "" if image.get("changed", True) else ", as it was"
    return (
        f"{image['variant']}: sha256 {image['digest']}, {image['packages']} packages, "
        f"kernel {image['kernel']}{same}"
    )


def recorded(here: link.Place) -> Rows | None:
    """What the registry holds; None when no daemon runs, or it does not say. Starts nothing."""
    from agent_box.bus.errors import Refusal
    from agent_box.bus.schema import Empty
    from agent_box.registry.contract import Rows

    try:
        if link.holder(here) is None:
            return None
        registry = link.connect(here, "registry")
    except Failure:
        return None
    try:
        rows = registry.call("list", Empty(), deadline_s=ASK_S)
    except Refusal:
        return None
    finally:
        registry.close()
    assert isinstance(rows, Rows)
    return rows


def _digests(images: Any) -> set[str]:
    """The files that a record names."""
    named = (images.kernel, images.initramfs, images.variant, images.guest, images.harness)
    return {digest for digest in named if digest is not None}


def _users(rows: Rows, image: Image) -> list[str]:
    """The instances that boot the variant drive of an image."""
    return [
        row.name for row in rows.instances if row.images.variant == image.manifest.variant.sha256
    ]


def _problems(held: Held | layers.Held) -> list[dict[str, str]]:
    return [{"manifest": sha256, "problem": why} for sha256, why in held.bad.items()]


def _list_text(images: list[dict[str, Any]]) -> str:
    if not images:
        return "no image is cached; `agent-box image build` makes one"
    rows = []
    for image in images:
        users = image["instances"]
        rows.append(
            (
                image["variant"] if image["current"] else f"{image['variant']} (older)",
                image["digest"][:12],
                image["format"],
                f"{image['size'] >> 20}M",
                "unknown: no daemon runs" if users is None else ", ".join(users) or "none",
            )
        )
    return table(("VARIANT", "SHA256", "FORMAT", "SIZE", "INSTANCES"), rows)


def _bad(
    verdicts: list[Verdict], kept: layers.Held, tiers: dict[str, dict[str, Tier]]
) -> tuple[list[str], list[str]]:
    """Digests of files that are corrupt, and of those that are gone."""
    found: dict[str, set[str]] = {"mismatch": set(), "missing": set(), "verified": set()}
    for verdict in verdicts:
        parts = verdict.image.manifest.parts
        for what, tier in verdict.files.items():
            found[tier].add(parts[what].sha256)
    for each in kept.layers:
        for what, tier in tiers[each.sha256].items():
            found[tier].add(each.layer.parts[what].sha256)
    return sorted(found["mismatch"]), sorted(found["missing"])


def _tiers_text(kept: Kept, tiers: dict[str, dict[str, Tier]]) -> str:
    bad = [f"{what} {tier}" for what, tier in tiers[kept.sha256].items() if tier != "verified"]
    name = f"harness {kept.layer.harness}" + ("" if kept.current else " (older)")
    return ", ".join([f"{name}, sha256 {kept.layer.drive.sha256}", *(bad or ["tier 1 verified"])])


def _layer_users(rows: Rows, kept: Kept) -> list[str]:
    """The instances that boot with this layer."""
    return [r.name for r in rows.instances if r.images.harness == kept.layer.drive.sha256]


def _judged(verdict: Verdict) -> dict[str, Any]:
    from agent_box.engine.image.cache import NO_VERIFIER

    return {
        **_described(verdict.image.manifest, verdict.image.sha256),
        "current": verdict.image.current,
        "files": dict(verdict.files),
        "tiers": {
            "tier_1": "verified" if verdict.good else "failed",
            "tier_2": "verified" if verdict.signers else "failed",
            "tier_3": NO_VERIFIER,
        },
        "signers": verdict.signers,
    }


def _verdict_text(verdict: Verdict) -> str:
    from agent_box.engine.image.cache import FORMAT

    judged = _judged(verdict)
    bad = [f"{what} {tier}" for what, tier in verdict.files.items() if tier != "verified"]
    name = judged["variant"] + ("" if verdict.image.current else " (older)")
    tiers = [f"{tier.replace('_', ' ')} {said}" for tier, said in judged["tiers"].items()]
    return ", ".join([f"{name}, sha256 {judged['digest']}", FORMAT, *tiers, *bad])
