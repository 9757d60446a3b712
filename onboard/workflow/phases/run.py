"""run: build the model from its registry entry and compare it with transformers, reduced layers
first, then all.

The reduced run is in float32, where rounding hides nothing; the full one in the dtype that the
model is served in. Each run is a process of its own (`onboard.workflow.run_model.run_model`). Every
prompt and every output is kept verbatim in `run.json`; the processes' log is archived beside it.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from onboard import registry
from onboard.analysis.spec import ModelSpec
from onboard.composition import compose
from onboard.config import RuntimeConfig
from onboard.content import content_path
from onboard.errors import OnboardError
from onboard.extensions import extensions_digest
from onboard.gpu import device_memory
from onboard.sources.gguf_source import GGUF_FILE
from onboard.untrusted.bounds import RUN_SECONDS
from onboard.workflow import run_model, team
from onboard.workflow.checkpoint.checkpoint_size import layer_kinds, native_values
from onboard.workflow.phase import Phase, PhaseResult, RunContext
from onboard.workflow.phases.register import ARTIFACT as REGISTRATION
from onboard.workflow.processes.programs import NOTHING
from onboard.workflow.processes.watched import last_line, watched
from onboard.workflow.reduced_depth import MOST_REDUCED_LAYERS, reduced_depth
from onboard.workflow.registry_results import now
from onboard.workflow.registry_status import recorded
from onboard.workflow.reporting.provenance import log_head, provenance
from onboard.workflow.run_model.own_gpu import own_gpu, worth_another
from onboard.workflow.run_model.runner_record import RETRY, note_runs, runner_record
from onboard.workflow.run_state import hash_inputs

ARTIFACT = "run.json"


class Run(Phase):
    """Runs the model with reduced layers, then with all; both must succeed."""

    name = "run"
    starts_programs = True
    needs_weights: ClassVar[bool] = True

    def inputs(self, context: RunContext) -> dict[str, Any]:
        """Depend on the config, the model file, extensions, the weights and the device."""
        model_file = content_path("models", f"modeling_{context.spec.family}.py", root=context.root)
        return {
            "config": hash_inputs(_composed(context), {}),
            "model_file": context.files.digest(model_file),
            "extensions": extensions_digest(context.root),
            "weights": _weights_identity(context),
            "options": [context.options.device, context.options.dtype],
            **({"strict": True} if context.options.strict else {}),
        }

    @recorded
    def run(self, context: RunContext) -> PhaseResult:
        """Run both, and say in the registry how they ended; see `carry_out`."""
        return self.carry_out(context)

    def carry_out(self, context: RunContext) -> PhaseResult:
        """Run both and archive the log.

        Raises:
            OnboardError: a run failed; with the log's place.
        """
        if context.options.dry_run:
            return PhaseResult(summary="a dry run builds and generates nothing")
        context.source.weights()
        check_ranks(context)
        runs = self._runs(context)
        status = next(
            (run["status"] for run in runs.values() if run["status"] != "success"), "success"
        )
        log = _archive_log(context, status)
        result = {
            "status": status,
            "date": now(),
            "config": context.read_json(REGISTRATION)["config"],
            "files": _files(context),
            "command": agent_command(context),
            "provenance": provenance(context),
            "world_size": _ranks_of(runs),
            "log": log.name,
            "runs": runs,
        }
        path = context.write_json(ARTIFACT, result)
        note_runs(context, result)
        if status != "success":
            run = next(run for run in runs.values() if run["status"] == status)
            raise OnboardError(
                f"the {run['description']} run ended in {status}: {run['error']}",
                hint=f"Log: {log}",
            )
        if context.options.strict and (facts := runs["full"]["facts"]):
            more = f" (and {len(facts) - 1} more)" if len(facts) > 1 else ""
            raise OnboardError(f"--strict: {facts[0]}{more}", hint=f"See {context.relative(path)}")
        artifacts = {"run": path, "run_log": log}
        return PhaseResult(
            artifacts={name: context.relative(path) for name, path in artifacts.items()},
            summary=summary(runs),
        )

    def _runs(self, context: RunContext) -> dict[str, dict[str, Any]]:
        needed, total = reduced_layers(context.spec)
        layers, refusal = accepted_layers(context, needed, total)
        log = context.artifact("run.log")
        log.write_text(log_head(provenance(context)), encoding="utf-8")
        runs: dict[str, dict[str, Any]] = {}
        if layers < total:
            exact = _fits_float32(context, layers / total)
            described = f"{layers} of {total} layers{', float32' if exact else ''}"
            runs["reduced"] = run_somewhere(
                context, log, described, layers, dtype="float32" if exact else None
            )
            if runs["reduced"]["status"] == "compile_error" and context.spec.repository is not None:
                # The config's class may tell the layers apart anew, by how many there are.
                layers, refusal = total, str(runs.pop("reduced")["error"])
            elif runs["reduced"]["status"] != "success":
                return runs
        full = runs["full"] = run_somewhere(context, log, "all layers", None)
        if refusal:
            full.setdefault("facts", []).append(f"no run with fewer layers: {refusal}")
        if layers == total and full.get("settings", {}).get("dtype") != "float32" and _passed(runs):
            if _fits_float32(context, 1.0):
                runs["exact"] = run_somewhere(
                    context, log, "all layers, float32", None, dtype="float32"
                )
            else:
                full["facts"].append(
                    "no run in float32, where rounding hides no fault: it does not fit"
                )
        if _passed(runs):
            _judge_text(context, full, log)
        return runs


def check_ranks(context: RunContext) -> None:
    """Raise `UsageError` where the model is registered with more GPUs than there are, and does not
    fit those, or where so many cannot divide it.
    """
    settings = _composed(context)
    if settings.get("world_size", 1) == 1:
        return
    from onboard.runtime.ranks.leading import division_for

    asked = {"device": context.options.device, "dtype": context.options.dtype}
    settings |= {name: value for name, value in asked.items() if value != "auto"}
    name = context.read_json(REGISTRATION)["name"]
    runtime = RuntimeConfig.model_validate(settings)
    files = context.source.files()
    division_for(files, runtime, root=context.root, model=name, must=False)


def _ranks_of(runs: Mapping[str, Mapping[str, Any]]) -> int:
    """Return on how many devices the model ran; one where it did not come to that."""
    sizes = (run.get("settings", {}).get("world_size", 1) for run in runs.values())
    return max(sizes, default=1)


def _judge_text(context: RunContext, full: dict[str, Any], log: Path) -> None:
    """Have the runner, where it is more than the rules, judge the full run's texts: what it does not
    like is a fact.
    """
    if (judged := team.judged_text(context, full, log)) is not None:
        full["judged"] = judged
        if judged["verdict"] == "incoherent":
            full["facts"].append(f"the runner calls the text incoherent: {judged['reason']}")


def _passed(runs: dict[str, dict[str, Any]]) -> bool:
    return all(run["status"] == "success" for run in runs.values())


def _fits_float32(context: RunContext, share: float) -> bool:
    """Whether a share of the layers fits the device in float32, in which a fault shows that half
    precision hides.
    """
    config = native_values(context.spec.config)
    tables = 2 * (config.get("vocab_size") or 0) * (config.get("hidden_size") or 0)
    return (
        4 * (share * context.spec.num_parameters + tables)
        < 0.8 * device_memory(context.options.device).total
    )


def reduced_layers(spec: ModelSpec) -> tuple[int, int]:
    """Return how many layers a reduced run has, enough for every kind of layer if few are, and how
    many there are.
    """
    kinds = layer_kinds(spec)
    total = sum(len(kind.layers) for kind in kinds)
    return reduced_depth((min(kind.layers) for kind in kinds if kind.layers), total), total


def accepted_layers(context: RunContext, needed: int, total: int) -> tuple[int, str]:
    """Return with how many layers, `needed` at least, transformers' model has weights of the whole
    one; else `total`.

    The second is why fewer than `total` do not do; empty where they do, or `needed` are all.
    """
    if needed >= total:
        return needed, ""
    if context.spec.repository is not None and shares_list(context.spec):
        return total, "other modules lie in the list of layers, and their places change with it"
    whole, refusal = _shapes(context, {}), ""
    for layers in range(needed, min(total, max(needed, MOST_REDUCED_LAYERS) + 1)):
        try:
            cut = _shapes(context, {"num_hidden_layers": layers})
        except Exception as error:  # whatever a config's or a model's class refuses
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        else:
            if (
                other := next((name for name in cut if cut[name] != whole.get(name)), None)
            ) is None:
                return layers, ""
            problem = f"{other} has another shape than in all {total}"
        refusal = (
            refusal
            or f"transformers' model of {layers} cannot have the checkpoint's weights: {problem}"
        )
    return total, refusal


def shares_list(spec: ModelSpec) -> bool:
    """Whether other modules come before the layers in the list that holds them."""
    first = {min(kind.layers): kind.path for kind in spec.layer_kinds if kind.layers}
    return 0 in first and re.search(r"\.0$", first[0]) is None


def _shapes(context: RunContext, changes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of transformers' model, built on the meta device; of the
    generated one where the code is a repository's.
    """
    import torch

    from onboard.graph.factory import ModelFactory

    folder = context.source.files()
    factory = ModelFactory(folder, root=context.root, dtype=torch.float32, model_kwargs=changes)
    # A repository's code is run in its sandbox alone
    model = factory.hf_model() if context.spec.repository is None else factory.build_model()
    return {
        name: tuple(each.shape) for name, each in model.named_parameters(remove_duplicate=False)
    }


def agent_command(context: RunContext) -> str:
    """Return the command that repeats the full run, from the root."""
    command = ["python", "-m", run_model.MODULE, "--root", ".", "--output", "run.json"]
    return shlex.join(
        [*command, "--entry", context.read_json(REGISTRATION)["name"], *_overrides(context)]
    )


def run_somewhere(
    context: RunContext,
    log: Path,
    description: str,
    layers: int | None,
    *,
    dtype: str | None = None,
) -> dict[str, Any]:
    """Run the agent where there is room: see `run_agent`.

    A run for which one of several GPUs had no room is repeated on another, as often as the runner's
    settings say; each failure is a fact of the last one, and in the log.
    """
    learnt: list[str] = []
    inputs = [layers, dtype, *_overrides(context)]
    ranks = _composed(context).get("world_size", 1)
    with runner_record(context, description, inputs, ranks) as record:
        while True:
            described = "; ".join([description, *learnt[-1:]])
            with own_gpu(context, record.waits, ranks) as (environment, shared):
                record.starts(environment)
                result = run_agent(context, log, described, layers, dtype=dtype, given=environment)
            again = worth_another(context, result)
            if not again or len(learnt) + 1 >= context.options.agents.runner.attempts:
                break
            learnt.append(f"{RETRY}{again}")
            record.learns(again)
            context.worklog.append(
                "run agent: retry", again, role="runner", description=description
            )
        record.ends(result)
    facts = [*result.get("facts", []), *learnt, *filter(None, [shared])]
    return {**result, "description": description} | ({"facts": facts} if facts else {})


def run_agent(
    context: RunContext,
    log: Path,
    description: str,
    layers: int | None,
    *,
    dtype: str | None = None,
    given: Mapping[str, str] = NOTHING,
) -> dict[str, Any]:
    """Run the agent in a process of its own, its output appended to `log`; return its result.

    `dtype` is this run's own, in place of the one that the user asked for; its environment has what
    is `given` besides.
    """
    output = context.artifact("agent.json")
    output.unlink(missing_ok=True)
    arguments = [
        "--entry",
        context.read_json(REGISTRATION)["name"],
        "--root",
        context.root,
        "--output",
        output,
    ]
    arguments += ["--exit-with-parent"]
    arguments += _overrides(context, dtype)
    arguments += ["--layers", str(layers)] if layers is not None else []
    words = [run_model.MODULE, *map(str, arguments)]
    # The weights are here by now: nothing is to be fetched from inside the run.
    offline = {"HF_HUB_OFFLINE": "1"} if context.options.offline else {}
    environment = {"PYTHONUNBUFFERED": "1", **offline, **given}
    with log.open("a+", encoding="utf-8") as file:
        command = shlex.join(["python", "-m", *words]).replace(str(context.root), ".")
        file.write(f"=== {description}\n$ {command}\n")
        file.flush()
        with watched(file, last_line, lambda line: context.doing(f"{description}: {line}")):
            code = context.run_module(words, file, environment=environment)
    result = _read_result(output, code)
    output.unlink(missing_ok=True)
    return {"description": description, **result}


def summary(runs: dict[str, dict[str, Any]]) -> str:
    """Return one line on the full run."""
    full = runs["full"]
    device, dtype = full["settings"]["device"], full["settings"]["dtype"]
    largest = max(check["error"] for check in full["comparison"]["checks"])
    found = [f"{device} {dtype}", f"logits within {largest:.1e} of {full['comparison']['beside']}"]
    found += [
        f"{full['tokens_per_second']:.0f} tokens/s",
        f"text {full['text']['verdict']}: {full['text']['reason']}",
    ]
    return ", ".join(found)


def _overrides(context: RunContext, dtype: str | None = None) -> list[str]:
    """Return the agent's arguments that are the user's (device and dtype) or the model's."""
    asked = {"--device": context.options.device, "--dtype": dtype or context.options.dtype}
    words = [word for name, value in asked.items() if value != "auto" for word in (name, value)]
    # As a probe of transformers' model found: it takes any of equals, and which ones hangs on the
    # text's length.
    words += ["--distinct"] if "repeated_tokens" in context.spec.traits else []
    return words + (_consent(context) if context.spec.repository else [])


def _consent(context: RunContext) -> list[str]:
    """Return the options that run the model's own code beside it."""
    options = context.options
    agreed = {
        "--trust-remote-code": options.trust_remote_code,
        "--unsandboxed": options.unsandboxed,
    }
    return [name for name, given in agreed.items() if given]


def _read_result(output: Path, code: int) -> dict[str, Any]:
    """Return what the agent wrote, or what its exit code says when it could not write."""
    if output.exists():
        result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return result
    if code == -signal.SIGKILL:
        error = "the process was killed, most likely because memory ran out"
    elif code == -signal.SIGALRM:
        error = f"it was ended after {RUN_SECONDS.most:,} seconds, its bound"
    else:
        error = f"the process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'} and no result"
    return {"status": "runtime_error", "error": error}


def _files(context: RunContext) -> dict[str, str | None]:
    """Return the digests of the model's own files that a run is made with; a shipped model file is
    not the root's.
    """
    paths = [f"models/modeling_{context.spec.family}.py", context.read_json(REGISTRATION)["config"]]
    return {path: digest for path, digest in context.digest_of(*paths).items() if digest}


def _archive_log(context: RunContext, status: str) -> Path:
    config_id = context.read_json(REGISTRATION)["config_id"]
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return context.artifact("run.log").rename(context.artifact(f"{config_id}_{stamp}_{status}.log"))


def _composed(context: RunContext) -> dict[str, Any]:
    """Return what the model's entry runs with."""
    name = context.read_json(REGISTRATION)["name"]
    entry = next(
        (entry for entry in registry.load_entries(context.root) if entry.name == name), None
    )
    if entry is None:
        raise OnboardError(
            f"{name} is no longer in registry/models.yaml", hint="Go on with --from register"
        )
    return compose(entry, context.root).model_dump(mode="json", exclude_unset=True)


def _weights_identity(context: RunContext) -> Any:
    """Return the commit of a Hub model, or size and time of a local folder's weight files."""
    if context.source.revision:
        return context.source.revision
    folder = context.source.files()
    files = sorted([*folder.glob("*.safetensors"), *folder.glob(GGUF_FILE)])
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
