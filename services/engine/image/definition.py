"""What a variant is made of: a small TOML file, ours or the operator's."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from agent_box.config.values import name as variant_name
from agent_box.engine.image import reference
from agent_box.engine.image.errors import DefinitionError, UnknownVariant

SIZE_MAX: Final = 1 << 16  # bytes of a file
DEPTH_MAX: Final = 8  # of `extends`
SUITES: Final = ("trixie",)  # what the kernel, the guest and the tests were made for
PACKAGE: Final = re.compile(r"[a-z0-9][a-z0-9+.-]{1,127}")  # Debian policy 5.6.1
KEYS: Final = ("description", "suite", "packages", "extends", "pull")


@dataclass(frozen=True)
class Definition:
    """A variant with all that it extends."""

    name: str
    description: str
    suite: str  # empty when it can only be pulled
    packages: tuple[str, ...]  # sorted, each once
    pull: str | None  # where `image pull` finds it: HOST/REPOSITORY@sha256:DIGEST

    @property
    def sha256(self) -> str:
        """Of what decides the content: the description does not."""
        content = json.dumps([self.name, self.suite, list(self.packages)], separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()


def shipped() -> list[str]:
    """The names of the variants that come with the program."""
    files = resources.files("agent_box.engine.image.variants").iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def own(config_dir: Path | None) -> list[str]:
    """The names of the operator's variants: ``variants/NAME.toml`` beside the config file."""
    if config_dir is None or not (config_dir / "variants").is_dir():
        return []
    return sorted(file.stem for file in (config_dir / "variants").glob("*.toml"))


def load(name: str, config_dir: Path | None) -> Definition:
    """A variant by its name. The operator's wins over ours of the same name.

    Args:
        config_dir: where the config file lies; None when there is no config directory.

    Raises:
        DefinitionError: its file cannot be used.
        UnknownVariant: nobody defines it.
    """
    chain = [_one(variant_name(name), config_dir, own_first=True)]
    while (above := chain[-1].extends) is not None:
        if len(chain) > DEPTH_MAX:
            raise DefinitionError(chain[0].source, "extends leads in a circle")
        # base may extend our base: a copy need not repeat what it only adds to
        chain.append(_one(above, config_dir, own_first=above != chain[-1].name))
    pull = chain[0].pull
    suite = next((each.suite for each in chain if each.suite is not None), None)
    if suite is None and pull is None:
        raise DefinitionError(chain[-1].source, "suite is missing")
    packages = sorted({package for each in chain for package in each.packages})
    return Definition(name, chain[0].description, suite or "", tuple(packages), pull)


@dataclass(frozen=True)
class _File:
    source: str
    name: str
    description: str
    suite: str | None
    packages: tuple[str, ...]
    extends: str | None
    pull: str | None


def _one(name: str, config_dir: Path | None, *, own_first: bool) -> _File:
    if own_first and name in own(config_dir):
        assert config_dir is not None
        file = config_dir / "variants" / f"{name}.toml"
        try:
            with file.open("rb") as handle:
                return _parse(name, handle.read(SIZE_MAX + 1), str(file))
        except OSError as error:
            raise DefinitionError(str(file), (error.strerror or "cannot be read").lower()) from None
    if name in shipped():
        packed = resources.files("agent_box.engine.image.variants") / f"{name}.toml"
        return _parse(name, packed.read_bytes(), f"{name}.toml")
    known = ", ".join(sorted({*shipped(), *own(config_dir)}))
    raise UnknownVariant(f"no image variant is named {name}; there are {known}")


def _parse(name: str, untrusted: bytes, source: str) -> _File:
    if len(untrusted) > SIZE_MAX:
        raise DefinitionError(source, f"larger than {SIZE_MAX} bytes")
    try:
        table: dict[str, Any] = tomllib.loads(untrusted.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DefinitionError(source, f"no TOML: {error}") from None
    for key in table:
        if key not in KEYS:
            raise DefinitionError(source, f"unknown key {key}; there are {', '.join(KEYS)}")
    description = table.get("description", "")
    if not isinstance(description, str) or not description.isprintable() or len(description) > 200:
        raise DefinitionError(source, "description must be one line of at most 200 characters")
    suite = table.get("suite")
    if suite is not None and suite not in SUITES:
        raise DefinitionError(source, f"suite must be {' or '.join(SUITES)}, not {suite!r}")
    packages = table.get("packages", [])
    if not isinstance(packages, list):
        raise DefinitionError(source, "packages must be a list of names")
    for package in packages:
        if not isinstance(package, str) or not PACKAGE.fullmatch(package):
            raise DefinitionError(source, f"packages: {package!r} is not the name of a package")
    extends = table.get("extends")
    if extends is not None:
        try:
            variant_name(extends if isinstance(extends, str) else "")
        except ValueError:
            raise DefinitionError(source, "extends must be the name of a variant") from None
    pull = table.get("pull")
    if pull is not None:
        try:
            reference.parse(pull if isinstance(pull, str) else "")
        except ValueError as error:
            raise DefinitionError(source, f"pull must be {error}") from None
    return _File(source, name, description, suite, tuple(packages), extends, pull)
