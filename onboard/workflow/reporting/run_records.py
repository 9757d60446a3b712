"""What shows each item of a pull request that follows from review, registry, run and documents, and
from the commit itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from onboard.registry import parse_entries
from onboard.workflow.checkpoint.checkpoint_size import layer_kinds
from onboard.workflow.reporting import item_records
from onboard.workflow.reporting.branch_files import MATRIX, MODELS
from onboard.workflow.reporting.human_notes import human_notes
from onboard.workflow.reporting.item_records import Found, found, inapplicable
from onboard.workflow.reporting.tested_commit import Tested
from onboard.workflow.run_model.runner_record import RETRY


def reviewed(tested: Tested) -> Found:
    """The reviewer's verdict, and how many reviews it took."""
    review = tested.found["review"]
    items = review.get("items", [])
    if not items:
        return found(False, "no review is recorded")
    iterations = review.get("iterations", 1)
    counts = {verdict: sum(item["verdict"] == verdict for item in items) for verdict in _VERDICTS}
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    verdict = review["verdict"]
    times = f"{iterations} {'iteration' if iterations == 1 else 'iterations'}"
    return found(verdict == "PASS", f"{verdict} after {times}", f"{len(items)} items: {said}")


_VERDICTS = ("PASS", "NOTE", "FAIL")


def entry(tested: Tested) -> Found:
    """The line of the model's entry."""
    registered = tested.found["registration"].get("entry")
    if registered is None:
        return found(False, "no entry is recorded")
    line = _line_of(tested, registered["name"])
    configs = ", ".join(registered["yaml_extra"])
    place = f"{MODELS}:{line}" if line else f"{MODELS}: no entry"
    return found(line is not None, f"{place} {registered['name']}: {configs}")


def _line_of(tested: Tested, name: str) -> int | None:
    """Return the line of an entry in the registry, in which a name may be quoted."""
    text = tested.text(MODELS)
    lines = enumerate(text.splitlines(), 1)
    begins = [number for number, line in lines if line.lstrip().startswith("- name:")]
    names = [each.name for each in parse_entries(text)] if text else []
    return dict(zip(names, begins, strict=False)).get(name)


def config(tested: Tested) -> Found:
    """The standalone config's lines, and what it was composed of."""
    path = tested.found["registration"].get("config", "")
    lines = len(tested.text(path).splitlines()) if path else 0
    if not lines:
        return found(False, f"{path or 'the config'} is not there")
    status = tested.found["registration"].get("config_status", "")
    return found(True, f"{path}:1-{lines} ({status})")


def members(tested: Tested) -> Found:
    """The lines of the family's other entries, which nobody has tried."""
    registration = tested.found["registration"]
    others = [member["entry"]["name"] for member in registration.get("members", [])]
    known = registration.get("family", [])
    if not others and not known:
        note = tested.found["survey"].get("note") or "the family has no other models here"
        return inapplicable(note)
    lines = {name: _line_of(tested, name) for name in others}
    return found(
        all(lines.values()),
        *(f"{MODELS}:{line} {name} (untested)" for name, line in lines.items()),
        *(f"{name} (registered before)" for name in known if name not in others),
    )


def reduced_run(tested: Tested) -> Found:
    """The run with fewer layers."""
    runs = tested.found["run"].get("runs", {})
    if "reduced" in runs:
        return _run(runs["reduced"])
    if not runs:
        return found(False, "no run is recorded")
    total = sum(len(kind.layers) for kind in layer_kinds(tested.context.spec))
    facts = runs.get("full", {}).get("facts", [])
    refused = [fact for fact in facts if fact.startswith("no run with fewer layers")]
    return inapplicable(refused[0] if refused else f"all {total} layers are as few as are needed")


def full_run(tested: Tested) -> Found:
    """The run with all layers: where, with what, how fast."""
    run = tested.found["run"]
    full = run.get("runs", {}).get("full")
    if full is None:
        return found(False, "there was no full run")
    state, lines = _run(full)
    return Found(state, [f"config {run['config']}", *lines])


def _run(run: dict[str, Any]) -> Found:
    failed = [run["error"]] if run.get("error") else []
    lines = [f"{run['description']}: {run['status']}", *failed, *_settings(run)]
    return found(run["status"] == "success", *lines)


def _settings(run: dict[str, Any]) -> Iterator[str]:
    if "settings" in run:
        yield ", ".join(
            f"{name} {value}" for name, value in run["settings"].items() if value is not None
        )
    if "tokens_per_second" in run:
        build, memory = run["seconds"]["build"], run["peak_memory_bytes"]
        speed = f"{run['tokens_per_second']:.1f} tokens/s"
        yield f"{speed}, built in {build:.1f} s, peak memory {memory:,} bytes"


def same_logits(tested: Tested) -> Found:
    """The errors beside the reference, and how many greedy tokens are its choices."""
    comparison = _full(tested).get("comparison")
    if not comparison:
        return found(False, "nothing was compared")
    beside = comparison.get("beside", "transformers")
    tokens = comparison["tokens"]
    same = tokens["compared"] - tokens["differing"]
    choices = f"{same} of {tokens['compared']} greedy tokens are the choices of {beside}"
    lines = [_check(check) for check in comparison["checks"]]
    agrees = comparison["agrees"] and not comparison["reference"].startswith("none")
    return found(agrees, *lines, f"{choices}, {tokens['ties']} of them ties within rounding")


def _check(check: dict[str, Any]) -> str:
    numbers = [
        f"{name} {check[key]:.1e}" if check.get(key) is not None else f"{name} not a number"
        for name, key in (("relative RMSE", "error"), ("limit", "limit"))
    ]
    if (rounding := check.get("rounding")) is not None:
        errors = f"{rounding['ours']:.1e}, the reference's own {rounding['theirs']:.1e}"
        numbers.append(f"against the reference's float64 {errors}")
    tokens = f"{check['tokens']} tokens, longest {check['longest']}"
    return f"{check['what']}: {', '.join(numbers)}, {tokens}"


def coherent(tested: Tested) -> Found:
    """The verdict on the text, and the runner's where one was asked."""
    full = _full(tested)
    text, judged = full.get("text") or {}, full.get("judged")
    if not text:
        return found(False, "no text was judged")
    lines = [f"{text['verdict']}: {text['reason']}"]
    lines += [f"the runner: {judged['verdict']}: {judged['reason']}"] if judged else []
    agreed = judged is None or judged["verdict"] != "incoherent"
    return found(text["verdict"] == "equal" and agreed, *lines)


def cuda_graphs(tested: Tested) -> Found:
    """How many graphs were replayed, on a GPU."""
    full = _full(tested)
    if full.get("settings", {}).get("device") == "cpu":
        return inapplicable("the run was on a CPU")
    graphs = full.get("cuda_graphs", {"used": False, "replays": 0})
    return found(graphs["used"], f"{graphs['replays']} replays")


def log(tested: Tested) -> Found:
    """The archived log's name and length; it is no part of the branch."""
    name = tested.found["run"].get("log", "")
    path = tested.context.artifact(name)
    if not name or not path.is_file():
        return found(False, f"{name or 'the log'} is not there")
    lines = len(path.read_text(encoding="utf-8", errors="replace").splitlines())
    return found(True, f"{tested.context.relative(path)}:1-{lines} (no part of this branch)")


def tries(tested: Tested) -> Found:
    """How many tries each run took, and what failed ones taught."""
    runs = tested.found["run"].get("runs", {})
    if not runs:
        return found(False, "no run is recorded")
    lines = [
        f"{run['description']}: {1 + len(_learnt(run))}{''.join(f'; {fact}' for fact in _learnt(run))}"
        for run in runs.values()
    ]
    return found(True, *lines)


def _learnt(run: dict[str, Any]) -> list[str]:
    return [fact for fact in run.get("facts", []) if fact.startswith(RETRY)]


def unsharded(tested: Tested) -> Found:
    """The full run on one device."""
    full = _full(tested)
    size = full.get("settings", {}).get("world_size")
    if size != 1:
        return found(False, f"world_size {size}" if size else "no run is recorded")
    state, lines = same_logits(tested)
    return Found(state, ["world_size 1", *lines[:1]])


def matrix(tested: Tested) -> Found:
    """The lines of the model's row and footnote."""
    registration = tested.found["registration"]
    if not registration:
        return found(False, "the model is not registered")
    mark = f"[^{registration['config_id']}]"
    lines = tested.text(MATRIX).splitlines()
    rows = [n for n, line in enumerate(lines, 1) if line.startswith("|") and mark in line]
    notes = [n for n, line in enumerate(lines, 1) if line.startswith(f"{mark}:")]
    shown = [f"{MATRIX}:{n} the model's row" for n in rows[:1]]
    shown += [f"{MATRIX}:{n} {lines[n - 1]}" for n in notes]
    return found(bool(rows and notes), *(shown or [f"{MATRIX} has no row of the model"]))


def notebook(tested: Tested) -> Found:
    """The notebook's cells, and that none has an output."""
    from onboard.workflow.phases.cookbook import notebook_path

    if not tested.found["registration"]:
        return found(False, "the model is not registered")
    path = tested.context.relative(notebook_path(tested.context))
    text = tested.text(path)
    try:
        cells = json.loads(text)["cells"]
    except (ValueError, KeyError, TypeError):
        return found(False, f"{path} is no notebook" if text else f"{path} is not there")
    outputs = sum(len(cell.get("outputs", [])) for cell in cells)
    lines = len(text.splitlines())
    return found(not outputs, f"{path}:1-{lines} {len(cells)} cells, {outputs} outputs")


def report(tested: Tested) -> Found:
    """The report's place, and how much a human should look at."""
    path = tested.context.artifact("report.md")
    if not tested.context.files.exists(path):
        return found(False, "there is no report")
    notes = human_notes(tested.context.spec, tested.found)
    lines = len(tested.context.files.read(path).splitlines())
    place = f"{tested.context.relative(path)}:1-{lines} (no part of this branch)"
    return found(True, place, f"{len(notes)} things to look at, all below")


def commit(tested: Tested) -> Found:
    """The commit's id."""
    pushed = tested.pushed
    return found(pushed is not None, pushed.commit if pushed else "there is no commit yet")


def rebased(tested: Tested) -> Found:
    """Whether the target's tip is the commit's base."""
    if tested.pushed is None or not tested.pushed.target:
        return found(False, "no target branch was named")
    base, tip = tested.based_on()
    target = tested.pushed.target
    if not tip:
        return found(False, f"{target} is no branch of this checkout")
    return found(
        base == tip, f"{target} is at {tip}; the last commit in common is {base or 'none'}"
    )


def tested_files(tested: Tested) -> Found:
    """Which files were tested and run, and whether the commit has them."""
    if differences := tested.differences():
        return found(False, *differences)
    names = {path for name in ("tests", "run") for path in tested.found[name]["files"]}
    digests = tested.found["tests"]["files"] | tested.found["run"]["files"]
    lines = [f"{path} (sha256 {digests[path]})" for path in sorted(names)]
    return found(tested.pushed is not None, *lines)


def pairs(tested: Tested) -> Found:
    """How many prompts and tokens of output are shown."""
    prompts = _full(tested).get("prompts", [])
    tokens = sum(len(prompt["output_ids"]) for prompt in prompts)
    return found(bool(prompts), f"{len(prompts)} prompts, {tokens} tokens of output")


def reproduce(tested: Tested) -> Found:
    """The command of the run."""
    command = tested.found["run"].get("command", "")
    return found(bool(command), command or "no run is recorded")


def pytest(tested: Tested) -> Found:
    """The command of the tests, and how they ended."""
    tests = tested.found["tests"]
    statuses = [test["status"] for test in tests.get("tests", [])]
    counts = [f"{statuses.count(status)} {status}" for status in ("passed", "failed", "skipped")]
    holds = "passed" in statuses and "failed" not in statuses
    return found(holds, tests.get("command", "no test is recorded"), ", ".join(counts))


def own_code(tested: Tested) -> Found:
    """The files that the model brings, by digest."""
    repository = tested.context.spec.repository
    if repository is None:
        return inapplicable("transformers has the model's code")
    files = repository.files.items()
    return found(True, *(f"{name} (sha256 {digest})" for name, digest in files))


def _full(tested: Tested) -> dict[str, Any]:
    full: dict[str, Any] = tested.found["run"].get("runs", {}).get("full", {})
    return full


_OF_FILES = (
    item_records.memory,
    item_records.source,
    item_records.existing,
    item_records.family,
    item_records.traits,
    item_records.towers,
    item_records.blocks,
    item_records.layers,
    item_records.logits,
    item_records.export,
    item_records.cached_decode,
    item_records.several_ranks,
    item_records.on_the_cpu,
)
_OF_RUNS = (
    reviewed,
    entry,
    config,
    members,
    reduced_run,
    full_run,
    same_logits,
    coherent,
    cuda_graphs,
    log,
    tries,
    unsharded,
    matrix,
    notebook,
    report,
    commit,
    rebased,
    tested_files,
    pairs,
    reproduce,
    pytest,
    own_code,
)
RECORDS: dict[str, Callable[[Tested], Found]] = {
    each.__name__: each for each in (*_OF_FILES, *_OF_RUNS)
}
"""What an item's `record` names."""
