"""The command `onboard`: what it understands, and how its failures reach the user."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from contextlib import redirect_stdout
from typing import Any

import typer

from onboard.cli.commands import (
    check,
    demo,
    doctor,
    explain,
    export,
    model,
    plan,
    pr,
    registry,
    serve,
    status,
    sweep,
    verify,
)
from onboard.cli.commands import run as run_command
from onboard.cli.commands.measure import bench, kld, score_tasks, tune
from onboard.cli.group import DEFAULT, HELP, DefaultCommandGroup
from onboard.cli.result import Document, Result
from onboard.cli.terminal import one_line
from onboard.errors import INTERRUPTED, OnboardError, UsageError, exit_code, unfit_package

# Click's class, or that of the copy of click which newer versions of typer carry.
_ClickUsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    cls=DefaultCommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=f"Help for a command: onboard {HELP} COMMAND. A model whose id is a command's name: onboard {DEFAULT} ID.",
)
app.command(DEFAULT, help=model.ABOUT)(model.onboard)
app.command("run")(run_command.run)
app.command("serve")(serve.serve)
app.command("verify")(verify.verify)
app.command("plan")(plan.plan)
app.command("kld")(kld.kld)
app.command("eval")(score_tasks.evaluate)
app.command("bench")(bench.bench)
app.command("tune")(tune.tune)
app.command("sweep")(sweep.sweep)
app.command("explain")(explain.explain)
app.command("export")(export.export)
app.add_typer(registry.app, name="registry")
app.add_typer(pr.app, name="pr")
app.command("check")(check.check)
app.command("status")(status.status)
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)


@app.callback()
def _group(
    version: bool = typer.Option(
        False, "--version", "-V", help="Print the version.", callback=lambda on: _version(on)
    ),
) -> None:
    """Onboard a Hugging Face causal language model: fast, proven and servable."""


def _version(requested: bool) -> None:
    if requested:
        from onboard import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line and exit."""
    debug = "--debug" in sys.argv
    if not debug:
        _silence_libraries()
    # Every command has the option, so none of them needs to know it.
    code = run([word for word in sys.argv[1:] if word != "--debug"], debug=debug)
    # or the interpreter, as it ends, looks through the libraries for garbage: a second and more
    gc.freeze()
    sys.exit(code)


def run(arguments: list[str], *, debug: bool = False) -> int:
    """Run one command line; return its exit code. Every failure is one line on stderr.

    With --json stdout has one document, however the command ends.
    """
    try:
        result = _call(arguments)
        if isinstance(result, Result):
            _print_document(arguments, result)
            return (
                0
                if result.error is None
                else _fail(*_words(result.error), debug=debug, error=result.error)
            )
        if isinstance(result, Document):
            print(json.dumps(result.content, indent=2))
            return result.code
        return result
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (whoever read the output has gone; exit without a complaint)
        return 0
    # The user is owed one line for our own defects too.
    except (Exception, KeyboardInterrupt) as error:
        if "--json" in arguments:
            _print_document(arguments, Result(error=error))
        return _fail(*_words(error), debug=debug, error=error)


def _call(arguments: list[str]) -> Result | Document | int:
    """Run the command; return its exit code or what it leaves to be printed."""
    _refuse_what_is_no_text(arguments)
    # What libraries print, as transformers does of some classes, is no part of a document
    output = sys.stderr if "--json" in arguments else sys.stdout
    try:
        with redirect_stdout(output):
            result = app(arguments, prog_name="onboard", standalone_mode=False)
    except typer.Exit as error:
        return int(error.exit_code)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except _ClickUsageError as error:
        command = error.ctx.command_path.removesuffix(f" {DEFAULT}") if error.ctx else "onboard"
        raise UsageError(error.format_message().rstrip("."), hint=f"See {command} --help") from None
    # Some versions of typer turn an interrupt into this code, others raise
    if result == INTERRUPTED:
        raise KeyboardInterrupt
    return result if isinstance(result, Result | Document | int) else 0


def _refuse_what_is_no_text(arguments: list[str]) -> None:
    """Raise `UsageError` for a word that is not Unicode: no file that we write could name it."""
    for word in arguments:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UsageError(f"the command line has {word!r:.80}, which is no UTF-8") from None


def _print_document(arguments: list[str], result: Result) -> None:
    from onboard.cli.documents import render

    print(render(command_name(arguments), result))


def command_name(arguments: list[str]) -> str:
    """Return the name of the command that is run, that of a group's command with the group's."""
    words = [word for word in arguments[:2] if not word.startswith("-")]
    if words and any(group.name == words[0] for group in app.registered_groups):
        return " ".join(words)
    known = [command.name for command in app.registered_commands]
    return words[0] if words and words[0] in known and words[0] == arguments[0] else DEFAULT


def _words(error: BaseException) -> tuple[str, int]:
    """Return the line about an error, and its exit code."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, OnboardError):
        return str(error), exit_code(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'a file'}: {error.strerror}", exit_code(error)
    if (unfit := unfit_package(error)) is not None:
        return str(unfit), unfit.exit_code
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return f"internal error: {reason}. Run with --debug for the traceback", exit_code(error)


def _fail(message: str, code: int, *, error: BaseException, debug: bool = False) -> int:
    if debug and not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error)
    print(f"onboard: {one_line(message)}", file=sys.stderr)
    return code


def _silence_libraries() -> None:
    """Turn off progress bars and warnings of the libraries, before they are imported; the user's
    own settings win.
    """
    defaults = {
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    import warnings

    warnings.simplefilter("ignore")
