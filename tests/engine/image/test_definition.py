"""The files of variants: ours are good, an operator's may be added, and a bad one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_box.engine.image import definition
from agent_box.engine.image.errors import DefinitionError, UnknownVariant


def own(tmp_path: Path, name: str, text: str) -> Path:
    """A config directory with one variant of the operator's."""
    (tmp_path / "variants").mkdir(exist_ok=True)
    (tmp_path / "variants" / f"{name}.toml").write_text(text)
    return tmp_path


def test_ours() -> None:
    assert definition.shipped() == ["base", "node", "python", "rust"]
    base = definition.load("base", None)
    for name in definition.shipped():
        loaded = definition.load(name, None)
        assert loaded.name == name
        assert loaded.suite == "trixie"
        assert loaded.description
        assert set(base.packages) <= set(loaded.packages)
        assert loaded.packages == tuple(sorted(set(loaded.packages)))
    needed = {"python3", "git", "ca-certificates", "curl", "build-essential", "e2fsprogs", "sudo"}
    assert needed <= set(base.packages)
    assert len({definition.load(name, None).sha256 for name in definition.shipped()}) == 4


def test_a_copy_of_ours_is_a_variant(tmp_path: Path) -> None:
    import importlib.resources

    text = importlib.resources.files("agent_box.engine.image.variants") / "base.toml"
    config = own(tmp_path, "mine", text.read_text())
    mine = definition.load("mine", config)
    assert mine.packages == definition.load("base", None).packages
    assert mine.sha256 != definition.load("base", None).sha256  # another name, another image
    assert definition.own(config) == ["mine"]


def test_an_operators_variant_wins_and_may_extend_what_it_replaces(tmp_path: Path) -> None:
    config = own(tmp_path, "base", 'extends = "base"\npackages = ["htop"]')
    loaded = definition.load("base", config)
    assert "htop" in loaded.packages
    assert "git" in loaded.packages
    assert "htop" in definition.load("rust", config).packages
    assert "htop" not in definition.load("base", None).packages


def test_what_decides_the_content_decides_the_digest(tmp_path: Path) -> None:
    one = definition.load("a", own(tmp_path, "a", 'suite = "trixie"\npackages = ["git", "vim"]'))
    two = definition.load(
        "a",
        own(
            tmp_path,
            "a",
            'suite = "trixie"\ndescription = "x"\npackages = ["vim", "git", "git"]',
        ),
    )
    assert one.sha256 == two.sha256
    three = definition.load("a", own(tmp_path, "a", 'suite = "trixie"\npackages = ["git"]'))
    assert three.sha256 != one.sha256


def test_a_variant_may_only_be_pulled(tmp_path: Path) -> None:
    where = f"registry.example.com/agent-box/rust@sha256:{'a' * 64}"
    loaded = definition.load("far", own(tmp_path, "far", f'pull = "{where}"'))
    assert loaded.pull == where
    assert loaded.suite == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("packages = [", "no TOML"),
        ("\xff", "no TOML"),
        ('suite = "trixie"\nfoo = 1', "unknown key foo; there are description, suite"),
        ('suite = "sid"', "suite must be trixie, not 'sid'"),
        ("suite = 13", "suite must be trixie"),
        ('packages = ["git"]', "suite is missing"),
        ('suite = "trixie"\npackages = "git"', "packages must be a list"),
        ('suite = "trixie"\npackages = [1]', "packages: 1 is not the name"),
        ('suite = "trixie"\npackages = ["git,vim"]', "'git,vim' is not the name"),
        ('suite = "trixie"\npackages = ["-o=x"]', "'-o=x' is not the name"),
        ('suite = "trixie"\npackages = ["git/sid"]', "'git/sid' is not the name"),
        ('suite = "trixie"\npackages = ["?essential"]', "is not the name"),
        ('suite = "trixie"\ndescription = "a\\nb"', "description must be one line"),
        ('extends = "../x"', "extends must be the name of a variant"),
        ("extends = 1", "extends must be the name of a variant"),
        ('extends = "mine"', "extends leads in a circle"),
        ('pull = "registry.example.com/x:latest"', r"pull must be HOST\[:PORT\]"),
        ("pull = 1", "pull must be"),
    ],
)
def test_a_bad_file_is_refused_and_named(tmp_path: Path, text: str, said: str) -> None:
    config = own(tmp_path, "mine", "")
    (config / "variants" / "mine.toml").write_bytes(text.encode("latin-1"))
    if text == 'extends = "mine"':
        own(tmp_path, "mine", 'extends = "other"')
        own(tmp_path, "other", 'extends = "mine"')
    with pytest.raises(DefinitionError, match=said) as caught:
        definition.load("mine", config)
    assert str(config / "variants" / "mine.toml") in str(caught.value)
    assert (caught.value.exit, caught.value.kind) == (2, "config-invalid")


def test_a_huge_or_unreadable_file_is_refused(tmp_path: Path) -> None:
    config = own(tmp_path, "mine", "#" * (definition.SIZE_MAX + 1))
    with pytest.raises(DefinitionError, match="larger than"):
        definition.load("mine", config)
    (config / "variants" / "dir.toml").mkdir()
    with pytest.raises(DefinitionError, match="is a directory"):
        definition.load("dir", config)


def test_nobody_defines_it(tmp_path: Path) -> None:
    config = own(tmp_path, "mine", 'suite = "trixie"')
    with pytest.raises(UnknownVariant, match="there are base, mine, node, python, rust") as caught:
        definition.load("other", config)
    assert caught.value.exit == 3
    with pytest.raises(UnknownVariant, match="no image variant is named gone"):
        definition.load("mine", own(tmp_path, "mine", 'extends = "gone"'))
