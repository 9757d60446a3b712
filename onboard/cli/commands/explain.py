"""`onboard explain`: what became of a model, layer by layer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from onboard.cli import options
from onboard.cli.model_argument import registered_names
from onboard.cli.result import Result
from onboard.cli.terminal import shown
from onboard.gpu_kinds import read_bandwidth

_Gpu = Annotated[
    str | None,
    typer.Option(
        metavar="GPU", help="GPU type for the floor: H100.", show_default="that of onboard bench"
    ),
]
_Context = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Context length for the floor.", show_default="1,024"),
]
_Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write the page as HTML.")
]


def explain(
    model: options.Model,
    root: options.Root = Path(),
    gpu: _Gpu = None,
    context: _Context = None,
    html: _Html = None,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
) -> Result | None:
    """Explain an onboarded model, layer by layer.

    What transformers has and what the generated file has, what each graph transform did and why
    others did nothing, and the least time that a token takes. Measures nothing.
    """
    if gpu is not None:
        read_bandwidth(gpu)  # a wrong name is found before torch is imported
    with registered_names(model, root):
        from onboard.explain.explanation import explanation

        document = explanation(model, root, gpu, context)
    if html is not None:
        _write(document, root, html)
    if as_json:
        return Result(document)
    if html is None:
        _print(document, root)
    return None


def _write(document: dict[str, object], root: Path, path: Path) -> None:
    from onboard.explain import explain_page
    from onboard.workflow.files import write_atomically

    write_atomically(path, explain_page.html(document, root.expanduser()))
    print(f"wrote {path}", file=sys.stderr)


def _print(document: dict[str, object], root: Path) -> None:
    from onboard.explain import explain_page

    text = explain_page.markdown(document, root.expanduser())
    if not sys.stdout.isatty():
        print(text, end="")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(shown(text).replace("<!-- -->", "")))
