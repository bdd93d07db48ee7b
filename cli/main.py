"""The command line: finds the verb, parses, runs it, tells how it went.

HOW A VERB IS ADDED. Put it into the table in `verbs` with its arguments, and give it
``body="module:function"``, a plain function in ``agent_box/cli/module.py``:

    def create(out: Render, *, name: str, profile: str | None, cpus: int | None,
               memory: int | None, disk: int | None) -> None:
        ...
        out.result({"name": name, "state": "stopped"}, f"{name} created")

- The keywords are the arguments' `dest`: parsed (a size is bytes, NAME[:/path] is a
  `values.Place`, a rule or a destination an `egress.Target`), None when left out, a list for
  `many`, a bool for a switch.
- It answers by exactly one `out.result(dict, text)`, or by `out.item(...)` lines and one
  `out.end()`; `text` is for people and may be empty. `out.progress` and `out.warning` speak
  on stderr. Nothing else prints.
- It fails by raising: an `errors.Refusal` as it came from a service, or
  `render.Failure(exit, kind, message, text=..., **facts)`; a broken combination of arguments
  is `render.Usage(message)`, best raised by the table's `check`.
- It may return an exit code that is a guest program's own (exec, attach); else None.
- Whatever is not in the standard library is imported inside the function or in a module that
  only such a verb imports: `agent-box list` should cost little more than Python itself.

`main` alone turns what was raised into the line on stderr, the JSON error and the code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from agent_box.cli import verbs
from agent_box.cli.render import Failure, ReaderGone, Render, Usage, clean, plug_descriptors
from agent_box.cli.values import Said

if TYPE_CHECKING:
    from agent_box.cli.verbs import Verb

INTERRUPTED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and gives the exit code. Never raises but at a defect in itself."""
    args = list(sys.argv[1:] if argv is None else argv)
    plug_descriptors()
    if sys.stdout is None:
        if sys.stderr is not None:
            print("agent-box: stdout is closed", file=sys.stderr)
        return 2
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    ours = args[: args.index("--")] if "--" in args else args
    out = Render(_spoken(args), json="--json" in ours, stdout=sys.stdout, stderr=sys.stderr)
    try:
        return _answer(args, out)
    except ReaderGone:
        return out.exit
    except Failure as failure:  # stdout failed while it was told what had failed before
        out.complain(failure.message)
        return out.exit or failure.exit
    except KeyboardInterrupt:  # once more
        return INTERRUPTED


def _answer(args: list[str], out: Render) -> int:
    try:
        verb, rest = _find(args, out)
        if verb is None:
            return 0
        out.verb = verb.name
        given = _parse(verb, rest)
        if not verb.body:
            raise Failure(
                70, "not-implemented", f"{verb.name} is not implemented yet", entry=verb.entry
            )
        out.streaming = verb.streams == "always" or (verb.streams == "follow" and given["follow"])
        code = _body(verb)(out, **given)
        if code is not None:  # of a guest's program, which said itself what there was to say
            return int(code)
        if not out.ended:
            out.end()
        return out.exit
    except KeyboardInterrupt:
        return _fail(out, Failure(INTERRUPTED, "interrupted", "interrupted"))
    except ReaderGone:
        raise
    except Exception as error:  # noqa: BLE001 - the border: everything becomes a line and a code
        return _fail(out, _failure(error))


def _spoken(args: Sequence[str]) -> str:
    """The verb as it was written, for the error about a verb that does not exist."""
    words: list[str] = []
    for arg in args:
        if arg.startswith("-") or len(words) == 2:
            break
        words.append(arg)
        if arg not in verbs.GROUPS:
            break
    return clean(" ".join(words))[:64]


def _find(args: list[str], out: Render) -> tuple[Verb | None, list[str]]:
    """The verb and the rest of the line. None when help was asked, and printed."""
    first, second = (*args, "", "")[:2]
    if _told(first, second, args, out):
        return None, []
    if not first:
        raise Usage("which verb? `agent-box --help` lists them")
    if first == "--json":
        raise Usage("--json goes after the verb")
    if first.startswith("-"):
        raise Usage(f"unknown flag {first!r}; `agent-box --help` lists the verbs")
    if first in verbs.BY_NAME:
        return verbs.BY_NAME[first], args[1:]
    if first not in verbs.GROUPS:
        raise Usage(f"unknown verb {first!r}{_nearest(first, [*verbs.BY_NAME, *verbs.GROUPS])}")
    known = [name.partition(" ")[2] for name in verbs.BY_NAME if name.startswith(first + " ")]
    if not second or second.startswith("-"):
        raise Usage(f"{first}: which of {', '.join(known)}?")
    if second not in known:
        raise Usage(f"unknown verb {first + ' ' + second!r}{_nearest(second, known)}")
    return verbs.BY_NAME[f"{first} {second}"], args[2:]


def _told(first: str, second: str, args: list[str], out: Render) -> bool:
    """Prints what is no verb: help, version, completions. False when none was asked."""
    if first == "--version":
        from agent_box.cli import version

        out.plain(version.line() + "\n")
        return True
    if first == "--complete":
        from agent_box.cli import completion

        out.plain("".join(f"{line}\n" for line in completion.candidates(args[1:])))
        return True
    ours = args[: args.index("--")] if "--" in args else args
    if "--help" not in ours and "-h" not in ours:
        return False
    from agent_box.cli import help

    verb = verbs.BY_NAME.get(first) or verbs.BY_NAME.get(f"{first} {second}")
    if verb is not None:
        out.plain(help.verb(verb))
    elif first in ("--help", "-h"):
        out.plain(help.overview())
    elif first in verbs.GROUPS and second in ("--help", "-h"):
        out.plain(help.overview(first))
    else:
        return False  # help for what does not exist: the error that says so
    return True


def _nearest(word: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _parse(verb: Verb, rest: list[str]) -> dict[str, Any]:
    """The keywords of the body. Raises Usage."""
    from agent_box.cli import quick

    words = quick.words(verb, rest)
    if words is None:
        from agent_box.cli import parser

        words = parser.words(verb, rest)
    given = {arg.dest: _value(verb, arg, words[arg.dest]) for arg in verb.args}
    if verb.check is not None:
        verb.check(given)
    return given


def _value(verb: Verb, arg: verbs.Arg, word: Any) -> Any:
    if arg.parse is None:
        return bool(word)
    if arg.many:
        return [_parsed(verb, arg, each) for each in word or ()]
    return None if word is None else _parsed(verb, arg, word)


def _parsed(verb: Verb, arg: verbs.Arg, word: str) -> Any:
    assert arg.parse is not None
    try:
        return arg.parse(word)
    except ValueError as error:
        told = f"{verb.name}: {arg.flag or arg.metavar}"
        if isinstance(error, Said):
            raise Usage(f"{told}: {error}") from None
        if arg.private:
            raise Usage(f"{told} must be {error}") from None
        shown = word if len(word) <= 80 else word[:80] + "..."
        raise Usage(f"{told} must be {error}, not {shown!r}") from None


def _body(verb: Verb) -> Any:
    from importlib import import_module

    module, _, function = verb.body.partition(":")
    return getattr(import_module(f"agent_box.cli.{module}"), function)


def _fail(out: Render, failure: Failure) -> int:
    if out.ended:  # the one answer is given, or half of it; only the line and the code remain
        out.complain(failure.message)
        return failure.exit
    out.error(failure.exit, failure.kind, failure.message, text=failure.text, **failure.facts)
    return failure.exit


def _failure(error: Exception) -> Failure:
    """What a raised error means to the caller."""
    if isinstance(error, Failure):
        return error
    known = _of_loaded("agent_box.bus.errors", "Refusal")
    if known is not None and isinstance(error, known):
        facts = {**error.facts, **({"id": error.id} if error.id else {})}  # type: ignore[attr-defined]
        facts = {k: v for k, v in facts.items() if k not in ("exit", "kind", "message", "text")}
        return Failure(error.exit, str(error.reason), error.message, **facts)  # type: ignore[attr-defined]
    known = _of_loaded("agent_box.config.errors", "ConfigError")
    if known is not None and isinstance(error, known):
        return Failure(2, "config-invalid", str(error))
    known = _of_loaded("agent_box.process.paths", "PathsError")
    if known is not None and isinstance(error, known):
        return Failure(2, error.kind, str(error))  # type: ignore[attr-defined]
    return _defect(error)


def _of_loaded(module: str, name: str) -> type[Exception] | None:
    """A class of a module that is loaded: of one that is not, nothing can have been raised."""
    loaded = sys.modules.get(module)
    return getattr(loaded, name, None)


def _defect(error: Exception) -> Failure:
    """An error that nobody foresaw. Its message and its locals may hold a secret: only its
    type and its place are told. AGENT_BOX_TRACEBACK=1 prints the stack, without locals."""
    place = error.__traceback__
    where = ""
    while place is not None:  # the innermost of ours, wherever we are installed
        frame = place.tb_frame
        if _module(frame.f_globals).partition(".")[0] == "agent_box":
            where = f" at {os.path.basename(frame.f_code.co_filename)}:{place.tb_lineno}"
        place = place.tb_next
    if os.environ.get("AGENT_BOX_TRACEBACK") == "1" and sys.stderr is not None:
        import traceback

        traceback.print_tb(error.__traceback__, file=sys.stderr)
    return Failure(1, "internal", f"internal error: {type(error).__name__}{where}")


def _module(namespace: dict[str, Any]) -> str:
    """The name of a frame's module, also of one that runs as a program."""
    spec = namespace.get("__spec__")
    return str(namespace.get("__name__", "") if spec is None else spec.name)


if __name__ == "__main__":
    sys.exit(main())
