"""From the table to typer and back: one verb at a time, and its words as they were written.

Only the asked verb becomes a typer command, so the price does not grow with the table. typer
splits the line into options and arguments and refuses what the verb does not have. It does
not convert: for a single string it would load pydantic (60 ms), and the table has parsers
whose refusals name the rule. The body runs outside typer, where no handler of its own stands
between an exception and the exit code.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Annotated, Any, Final, cast

import typer
from typer.core import TyperCommand

from agent_box.cli.render import Usage
from agent_box.cli.verbs import Arg, Verb

# typer carries click inside from some version on and used the package before: this is the
# base of every mistake in a command line in both.
_MISTAKE: Final = cast(type[Exception], typer.BadParameter.__mro__[1])

_JSON: Final = Arg("json", "--json", "", None, "print JSON on stdout")


class _Unconverted(TyperCommand):
    """Leaves in `ctx.params` what the line said, and nothing where it said nothing."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        said, surplus, _ = self.make_parser(ctx).parse_args(args=args)
        ctx.params = {
            # A marker of click's own stands for what was not given.
            name: list(value) if isinstance(value, list | tuple) else value
            for name, value in said.items()
            if isinstance(value, str | bool | list | tuple)
        }
        ctx.args = list(surplus)
        return list(surplus)


def words(verb: Verb, rest: Sequence[str]) -> dict[str, Any]:
    """The raw words of a command line by the `dest` of each argument: a string, a list of
    them, True for a switch, and None for what was not given and has no default.

    Raises:
        Usage: unknown, missing or surplus arguments.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name=verb.name, cls=_Unconverted, add_help_option=False)(_signed(verb))
    command = typer.main.get_command(app)
    try:
        context = command.make_context(f"agent-box {verb.name}", list(rest))
    except _MISTAKE as mistake:
        raise Usage(f"{verb.name}: {_one_line(mistake)}") from None
    if context.args:
        # Not what it was: somebody may have tried to give a secret on the command line.
        wanted = " ".join(arg.metavar for arg in verb.args if not arg.flag)
        told = f"it takes {wanted} and no more" if wanted else "it takes no arguments"
        raise Usage(f"{verb.name}: {told}")
    return {arg.dest: _word(verb, arg, context.params.get(arg.dest)) for arg in verb.args}


def _word(verb: Verb, arg: Arg, said: Any) -> Any:
    if said in (None, []):
        if arg.required:
            raise Usage(f"{verb.name}: {arg.flag or arg.metavar} is missing")
        return arg.default
    return said


def _signed(verb: Verb) -> Any:
    """A function with the signature from which typer makes the command. It is never called."""

    def command(**_: Any) -> None:
        raise AssertionError("the line is parsed and not run")

    parameters = [_parameter(arg) for arg in (*verb.args, _JSON)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _parameter(arg: Arg) -> inspect.Parameter:
    kind: Any = bool if arg.parse is None else list[str] if arg.many else str
    info = typer.Option(arg.flag) if arg.flag else typer.Argument(metavar=arg.metavar)
    return inspect.Parameter(
        arg.dest,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if arg.parse is None else None,
        annotation=Annotated[kind if arg.parse is None else kind | None, info],
    )


def _one_line(mistake: Any) -> str:
    return " ".join(str(mistake.format_message()).split()).rstrip(".")
