"""`onboard kld`: how far one way of running a model is from another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onboard.cli import options
from onboard.cli.model_argument import check_config, registered_names
from onboard.cli.options import Device, DTypeName
from onboard.cli.result import Result
from onboard.cli.setting_options import settings_of
from onboard.cli.terminal import one_line
from onboard.errors import OnboardError, UsageError

if TYPE_CHECKING:
    from onboard.verify.divergence.divergence import Divergence

PREFIX = "transformers:"
"""Before a model: transformers runs it."""
_THEIRS = ("device", "dtype", "revision", "model_kwargs")
"""Settings that mean something to transformers."""
_HELP = "Checkpoint folder, Hugging Face id or name in the registry; transformers:MODEL is transformers' own."
_A = Annotated[str, typer.Argument(metavar="A", help=_HELP)]
_B = Annotated[str, typer.Argument(metavar="B", help="The same; both need one vocabulary.")]
_SetA = Annotated[
    list[str] | None,
    typer.Option(
        "--set-a", metavar="NAME=VALUE", help="Set one field of A's configuration; repeatable."
    ),
]
_SetB = Annotated[
    list[str] | None,
    typer.Option(
        "--set-b", metavar="NAME=VALUE", help="Set one field of B's configuration; repeatable."
    ),
]
_Text = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Text in UTF-8.", show_default="one that comes with onboard"),
]
_Tokens = Annotated[int, typer.Option(metavar="N", min=1, help="Tokens to compare at.")]
_Window = Annotated[int, typer.Option(metavar="N", min=1, help="Tokens that are read together.")]
_MaxMean = Annotated[
    float | None,
    typer.Option(metavar="X", min=0, help="Exit code 1 when the mean is above it, in nats."),
]
_Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Seed of random tokens, without a tokenizer.",
        show_default="random",
    ),
]


def kld(
    a: _A,
    b: _B,
    root: options.Root = Path(),
    set_a: _SetA = None,
    set_b: _SetB = None,
    text: _Text = None,
    tokens: _Tokens = 2048,
    window: _Window = 512,
    max_mean: _MaxMean = None,
    device: options.OnDevice = Device.AUTO,
    dtype: options.InDType = DTypeName.AUTO,
    seed: _Seed = None,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> Result | int:
    """Compare the next-token distributions of A and B.

    KL(A || B) over the whole vocabulary, agreement of the most likely tokens, and the perplexity
    of both. One model is in memory at a time.
    """
    both = {"device": device.value, "dtype": dtype.value}
    settings = [_settings(model, own, both) for model, own in ((a, set_a), (b, set_b))]
    with registered_names(_plain(a), root), registered_names(_plain(b), root):
        for model, own in zip((a, b), settings, strict=True):
            check_config(_plain(model), root, None, {}, own)
        how = {"text": text, "tokens": tokens, "window": window, "seed": seed}
        found = _measure(a, b, settings, root.expanduser(), **how)
    error = _failure(found, max_mean)
    if as_json:
        return Result(found.as_dict() | {"max_mean": max_mean, "passed": error is None}, error)
    _show(found)
    if error is not None:
        print(f"FAILED: {error.message}")
    return 0 if error is None else 1


def _settings(model: str, own: list[str] | None, both: dict[str, str]) -> dict[str, Any]:
    """Return a side's settings: its own over those of both."""
    given = settings_of(own)
    strange = sorted(given.keys() - set(_THEIRS)) if model.startswith(PREFIX) else []
    if strange:
        raise UsageError(
            f"{model}: transformers has no setting {strange[0]}",
            hint=f"It takes {', '.join(_THEIRS)}",
        )
    return {name: value for name, value in both.items() if value != "auto"} | given


def _plain(model: str) -> str:
    return model.removeprefix(PREFIX)


def _measure(a: str, b: str, settings: list[dict[str, Any]], root: Path, **how: Any) -> Divergence:
    from onboard.verify.divergence.divergence import measure
    from onboard.verify.divergence.side import Side

    sides = (
        Side(model, _plain(model), root, own, by_transformers=model.startswith(PREFIX))
        for model, own in zip((a, b), settings, strict=True)
    )
    return measure(*sides, say=lambda line: print(line, file=sys.stderr, flush=True), **how)


def _failure(found: Divergence, limit: float | None) -> OnboardError | None:
    mean = found.figures.mean
    if limit is None or (mean is not None and mean <= limit):
        return None
    return OnboardError(f"the mean KL divergence is {_nats(mean)}, above {limit:g}")


def _show(found: Divergence) -> None:
    """Print the sides, the figures, and what is to be known of the runs."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    table = Table("", "model", "dtype", "device", "perplexity", box=SIMPLE_HEAD)
    figures = found.figures
    perplexities = {"A": figures.perplexity_a, "B": figures.perplexity_b}
    for (name, perplexity), side in zip(perplexities.items(), (found.a, found.b), strict=True):
        shown = "infinite" if perplexity is None else f"{perplexity:.4f}"
        model = Text(one_line(side.model))
        table.add_row(name, model, side.dtype, side.device, shown)
    console.print(table)
    names = ("KL(A || B) mean", "p99", "largest", "same top-1", "same top-5")
    numbers = Table("", *names, box=SIMPLE_HEAD)
    sizes = map(_nats, (figures.mean, figures.p99, figures.largest))
    numbers.add_row("", *sizes, f"{figures.top1:.2%}", f"{figures.top5:.2%}")
    console.print(numbers)
    seed = "" if found.seed is None else f", seed {found.seed}"
    count = "one token" if found.tokens == 1 else f"{found.tokens:,} tokens"
    print(f"in nats; {count} in windows of {found.window:,}: {one_line(found.text)}{seed}")
    notes = [
        f"{name}: {each}" for name, side in (("A", found.a), ("B", found.b)) for each in side.facts
    ]
    for fact in [*found.facts, *notes]:
        print(f"note: {one_line(fact)}")


def _nats(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.3g}"
