"""`onboard eval`: scores on the tasks of lm-evaluation-harness."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onboard.cli import options
from onboard.cli.extras import import_extra
from onboard.cli.model_argument import check_config, registered_names
from onboard.cli.options import Device, DTypeName, ModeName
from onboard.cli.result import Result
from onboard.cli.setting_options import settings_of
from onboard.errors import OnboardError

_Tasks = Annotated[
    list[str],
    typer.Option("--task", metavar="NAME", help="A task's name, or its file; repeatable."),
]
_Limit = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Items of each task.", show_default="all")
]
_Fewshot = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="Examples before each item.", show_default="the task's"),
]
_Chat = Annotated[bool, typer.Option("--chat", help="Write prompts by the chat template.")]
_Compare = Annotated[
    bool, typer.Option("--compare", help="Also run the harness's own back end, item by item.")
]


def evaluate(
    model: options.Model,
    task: _Tasks,
    root: options.Root = Path(),
    config: options.Config = None,
    device: options.OnDevice = Device.AUTO,
    dtype: options.InDType = DTypeName.AUTO,
    mode: options.Mode = ModeName.GRAPH,
    limit: _Limit = None,
    num_fewshot: _Fewshot = None,
    chat: _Chat = False,
    compare: _Compare = False,
    set_: options.Set = None,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> Result | None:
    """Score an onboarded model on tasks of lm-evaluation-harness.

    With --compare transformers answers the same items, and exit code 1 says that some differ.
    """
    harness = import_extra("onboard.evaluation.harness_run", "eval", "tasks need")
    wanted = harness.Wanted(task, limit, num_fewshot, chat)
    settings = settings_of(set_)
    where = {"device": device.value, "dtype": dtype.value, "mode": mode.value}
    with registered_names(model, root):
        check_config(model, root, config, where, settings)
        made = harness.HarnessModel(model, str(root), config=config, settings=settings, **where)
    scores = harness.evaluate(made, wanted)
    found: dict[str, Any] = {"model": model, "tasks": scores.metrics, "facts": made.llm.facts}
    found["items"] = {name: len(items) for name, items in scores.responses.items()}
    if compare:
        found |= _compared(harness, made, wanted, scores)
    return _told(found, as_json=as_json)


def _compared(harness: Any, made: Any, wanted: Any, scores: Any) -> dict[str, Any]:
    from onboard.graph.factory import read_config
    from onboard.runtime.build import resolve_dtype
    from onboard.runtime.resolve import find_checkpoint

    runtime = made.llm.runtime
    checkpoint = find_checkpoint(runtime)
    dtype = resolve_dtype(runtime.dtype, read_config(checkpoint, None), made.llm.device)
    name = str(dtype).removeprefix("torch.")
    theirs = harness.evaluate_hf(checkpoint, wanted, made, name)
    return {"hf": theirs.metrics, "differences": harness.differences(scores, theirs)}


def _told(found: dict[str, Any], *, as_json: bool) -> Result | None:
    differing = {name: items for name, items in found.get("differences", {}).items() if items}
    error = None
    if differing:
        name, items = next(iter(differing.items()))
        error = OnboardError(f"item {items[0]} of {name} differs from transformers' ({differing})")
    if not as_json:
        _print(found)
    if error is not None and not as_json:
        raise error
    return Result(found, error=error) if as_json else None


def _print(found: dict[str, Any]) -> None:
    for name, metrics in found["tasks"].items():
        beside = found.get("hf", {}).get(name, {})
        for metric, value in metrics.items():
            more = f" (hf: {beside[metric]:.6g})" if metric in beside else ""
            print(f"{name} {metric} {value:.6g}{more}")
    if "differences" in found:
        count = sum(found["items"].values())
        print(f"{count - sum(map(len, found['differences'].values()))} of {count} items alike")
