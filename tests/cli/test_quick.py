"""What is split without typer is split as typer splits it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_box.cli import parser, quick, verbs
from agent_box.cli.render import Usage

WORDS = ["web1", "x", "10", "", "-", "--", "-x", "--json", "--jso", "-1", "--=", "a=b", "--user=x"]
lines = st.sampled_from(verbs.VERBS).flatmap(
    lambda verb: st.tuples(
        st.just(verb),
        st.lists(st.sampled_from([*WORDS, *(a.flag for a in verb.args if a.flag)] * 2), max_size=8),
    )
)


def agree(verb: verbs.Verb, rest: list[str]) -> bool:
    """Whether it is plain; then typer says the same."""
    found = quick.words(verb, rest)
    if found is None:
        return False
    assert found == parser.words(verb, rest), (verb.name, rest)
    return True


@given(lines)
@settings(max_examples=200, deadline=None)
def test_typer_says_the_same(line: tuple[verbs.Verb, list[str]]) -> None:
    agree(*line)


@pytest.mark.slow
@given(lines)
@settings(max_examples=5_000, deadline=None)
def test_typer_says_the_same_very_often(line: tuple[verbs.Verb, list[str]]) -> None:
    agree(*line)


@pytest.mark.parametrize(
    "line",
    [
        "exec web1 -- true",
        "exec --user root --env A=b --env C=d web1:/x --tty -- sh -c --json",
        "attach web1 --shell",
        "list --json",
        "create web1",
        "logs web1 --follow",
    ],
)
def test_what_people_write_is_plain(line: str) -> None:
    name, *rest = line.split()
    assert agree(verbs.BY_NAME[name], rest)


@pytest.mark.parametrize(
    "line", ["exec", "list x", "attach web1 --shel", "exec web1 --user", "start web1 --no-hook=x"]
)
def test_a_mistake_is_typers(line: str) -> None:
    name, *rest = line.split()
    assert not agree(verbs.BY_NAME[name], rest)
    with pytest.raises(Usage):
        parser.words(verbs.BY_NAME[name], rest)
