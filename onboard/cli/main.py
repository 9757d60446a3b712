"""The command `onboard`: what it understands, and how its failures reach the user."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import typer

from onboard.cli import bench, check, demo, doctor, model, plan, registry, status, sweep, tune, verify
from onboard.cli import run as run_command
from onboard.cli.group import DEFAULT, HELP, DefaultCommandGroup
from onboard.errors import INTERRUPTED, OnboardError, exit_code

# Click's class, or that of the copy of click which newer versions of typer carry.
_ClickUsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    cls=DefaultCommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=f"Help for a command: onboard {HELP} COMMAND. A model whose id is a command's name: onboard {DEFAULT} ID.",
)
app.command(DEFAULT)(model.onboard)
app.command("run")(run_command.run)
app.command("verify")(verify.verify)
app.command("plan")(plan.plan)
app.command("bench")(bench.bench)
app.command("tune")(tune.tune)
app.command("sweep")(sweep.sweep)
app.add_typer(registry.app, name="registry")
app.command("check")(check.check)
app.command("status")(status.status)
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)


@app.callback()
def _group(
    version: bool = typer.Option(False, "--version", "-V", help="Print the version.", callback=lambda on: _version(on)),
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
    sys.exit(run([word for word in sys.argv[1:] if word != "--debug"], debug=debug))


def run(arguments: list[str], *, debug: bool = False) -> int:
    """Run one command line; return its exit code. Every failure is one line on stderr."""
    try:
        result = app(arguments, prog_name="onboard", standalone_mode=False)
        code = result if isinstance(result, int) else 0
        # Some versions of typer turn an interrupt into this code, others raise.
        return _fail("interrupted", code) if code == INTERRUPTED else code
    except typer.Exit as error:
        return int(error.exit_code)
    except _ClickUsageError as error:
        command = error.ctx.command_path.removesuffix(f" {DEFAULT}") if error.ctx else "onboard"
        return _fail(f"{error.format_message().rstrip('.')}. See {command} --help", 2)
    except OnboardError as error:
        return _fail(str(error), exit_code(error), debug=debug)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (whoever read the output has gone; exit without a complaint)
        return 0
    # The user is owed one line for our own defects too.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return _fail(f"internal error: {reason}. Run with --debug for the traceback", exit_code(error), debug=debug)


def _fail(message: str, code: int, *, debug: bool = False) -> int:
    if debug:
        traceback.print_exc()
    print(f"onboard: {' '.join(message.split())}", file=sys.stderr)
    return code


def _silence_libraries() -> None:
    """Turn off progress bars and warnings of the libraries, before they are imported; the user's own settings win."""
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
