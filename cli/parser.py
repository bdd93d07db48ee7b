"""From the table to typer and back: one verb at a time.

Only the asked verb becomes a typer command, so the price does not grow with the table. The
command's function does nothing but hand over its words; they are checked by `main` with the
parsers of the table, and the body runs outside typer, where no handler of its own stands
between an exception and the exit code. Rich is not loaded and nothing prints locals.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Annotated, Any, Final, cast

import typer

from agent_box.cli.render import Usage
from agent_box.cli.verbs import Arg, Verb

# typer has carried click inside since 0.26 and used the package before: this is the base of
# every mistake in a command line in both.
_MISTAKE: Final = cast(type[Exception], typer.BadParameter.__mro__[1])

_JSON: Final = Arg("json", "--json", "", None, "print JSON on stdout")


def words(verb: Verb, rest: Sequence[str]) -> dict[str, Any]:
    """The raw words of a command line by the `dest` of each argument.

    Raises:
        Usage: unknown, missing or surplus arguments.
    """
    got: dict[str, Any] = {}

    def command(**given: Any) -> None:
        got.update(given)

    parameters = [_parameter(arg) for arg in (*verb.args, _JSON)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name=verb.name, add_help_option=False)(command)
    try:
        app(args=list(rest), prog_name=f"agent-box {verb.name}", standalone_mode=False)
    except _MISTAKE as mistake:
        raise Usage(f"{verb.name}: {_one_line(mistake)}") from None
    if not got:  # typer swallows an interrupt
        raise KeyboardInterrupt
    return got


def _parameter(arg: Arg) -> inspect.Parameter:
    if arg.parse is None:
        info: Any = typer.Option(arg.flag, help=arg.help)
        kind: Any = bool
        default: Any = False
    else:
        if arg.flag:
            info = typer.Option(arg.flag, metavar=arg.metavar, help=arg.help)
        else:
            info = typer.Argument(metavar=arg.metavar, help=arg.help, show_default=False)
        kind = list[str] if arg.many else str
        if arg.required:
            default = inspect.Parameter.empty
        else:
            kind = kind | None
            default = arg.default
    return inspect.Parameter(
        arg.dest,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, info],
    )


def _one_line(mistake: Any) -> str:
    return " ".join(str(mistake.format_message()).split()).rstrip(".")
