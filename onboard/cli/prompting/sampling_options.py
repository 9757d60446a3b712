"""Options that say how tokens are chosen, and when an output ends."""

from __future__ import annotations

from typing import Annotated

import typer

Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0: greedy.")]
TopP = Annotated[
    float, typer.Option(help="Sample from the most likely tokens with this total probability.")
]
TopK = Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0: all.")]
MinP = Annotated[
    float, typer.Option(help="Minimum probability of a token, relative to the most likely one.")
]
Seed = Annotated[int | None, typer.Option(help="Seed of sampling.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Stop text that ends the output; repeatable."),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-text token.")
]
N = Annotated[int, typer.Option("-n", help="Number of outputs for each prompt.")]
StopTokenIds = Annotated[
    str | None, typer.Option(metavar="ID,ID,...", help="Stop tokens that end the output.")
]
Logprobs = Annotated[
    int | None, typer.Option(help="Log-probabilities to report for each token (with --json).")
]
