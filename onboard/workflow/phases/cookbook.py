"""cookbook: a notebook that loads the registered model and generates with it."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onboard.analysis.spec import ModelSpec
from onboard.composition import compose
from onboard.content import content_path
from onboard.errors import OnboardError
from onboard.registry import load_entries, load_standalone
from onboard.render import render
from onboard.workflow.checkpoint.checkpoint_size import layer_kinds, max_positions
from onboard.workflow.phase import Phase, PhaseResult, RunContext
from onboard.workflow.phases.register import ARTIFACT as REGISTRATION
from onboard.workflow.phases.run import ARTIFACT as RUN
from onboard.workflow.run_model.prompts_file import PROMPTS_FILE, own_prompts

TEMPLATE = "cookbook/notebook.j2"
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p")
PROMPTS = ("Once upon a time", "The capital of France is")
_CELL = re.compile(r"^%% (markdown|code)\n", re.MULTILINE)


class Cookbook(Phase):
    """Writes `cookbooks/<name>_cookbook.ipynb`, clean of outputs."""

    name = "cookbook"

    def inputs(self, context: RunContext) -> dict[str, Any]:
        """Depend on the template and on what it is filled with."""
        folder, digest = context.source.files(), context.files.digest
        return {
            "template": digest(content_path("templates", TEMPLATE, root=context.root)),
            "artifacts": context.digest("spec.yaml", REGISTRATION),
            "generation": digest(folder / "generation_config.json"),
            "prompts": digest(folder / PROMPTS_FILE),
            "tokenizer": has_tokenizer(folder),
            "tried": tried(context),
        }

    def run(self, context: RunContext) -> PhaseResult:
        """Render the template, validate the notebook and write it."""
        path = notebook_path(context)
        written = context.files.put(
            path, notebook_text(render(TEMPLATE, context.root, **template_values(context)))
        )
        place = context.relative(path)
        return PhaseResult({"cookbook": place}, place if written else context.kept(path, self.name))


def notebook_path(context: RunContext) -> Path:
    """Return where the notebook of a run's model goes."""
    return notebook_of(context.root, context.read_json(REGISTRATION)["config_id"])


def notebook_of(root: Path, config_id: str) -> Path:
    """Return where the notebook of a registered model goes."""
    name = re.sub(r"[^a-z0-9.]+", "_", config_id).strip("_")
    return root / "cookbooks" / f"{name}_cookbook.ipynb"


def notebook_text(cells: str) -> str:
    """Return the JSON of a notebook, from cells that each begin with a line `%% markdown` or `%%
    code`.

    Cells are numbered, so that the same cells always give the same file.
    """
    import nbformat
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    parts = _CELL.split(cells)
    make = {"markdown": new_markdown_cell, "code": new_code_cell}
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    notebook = new_notebook(
        cells=[
            make[kind](source.strip(), id=f"cell-{index:02d}")
            for index, (kind, source) in enumerate(pairs)
        ],
        metadata={
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
    )
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        raise OnboardError(f"the notebook is not valid: {str(error).splitlines()[0]}") from error
    return str(nbformat.writes(notebook)) + "\n"


def template_values(context: RunContext) -> dict[str, Any]:
    """Return everything that the template shows of a run's model."""
    folder = context.source.files()
    local = context.source.revision is None
    return notebook_values(
        context.spec,
        context.read_json(REGISTRATION),
        hub_id=None if local else context.model,
        folder=context.model if local else None,
        generation=_read_json(folder / "generation_config.json"),
        has_tokenizer=has_tokenizer(folder),
        prompts=own_prompts(folder)[:2] or PROMPTS,
        tried=tried(context),
    )


def tried(context: RunContext) -> str:
    """Return where the model's run from this configuration succeeded; empty when none did, or it
    ran with another.
    """
    if not context.files.exists(context.artifact(RUN)):
        return ""
    registration, full = (
        context.read_json(REGISTRATION),
        context.read_json(RUN)["runs"].get("full", {}),
    )
    entry = next(
        (each for each in load_entries(context.root) if each.name == registration["name"]), None
    )
    alone = context.root / registration["config"]
    if full.get("status") != "success" or entry is None or not alone.exists():
        return ""
    settings = full["settings"]
    same = compose(entry, context.root).model_dump() == load_standalone(alone).model_dump()
    return f"{settings['device']} in {settings['dtype']}" if same else ""


def notebook_values(
    spec: ModelSpec,
    registration: dict[str, Any],
    *,
    hub_id: str | None,
    folder: str | None,
    generation: dict[str, Any] | None,
    has_tokenizer: bool,
    prompts: Sequence[str] = PROMPTS,
    tried: str = "",
) -> dict[str, Any]:
    """Return everything that the template shows of a model: a Hub's, or that of a local `folder`.

    `prompts` are texts of the kind that it reads. `generation` is the checkpoint's
    generation_config.json, None where nobody has read it; `tried` says where a run of the model
    from its standalone config succeeded.
    """
    from onboard.quantised.read_method import describe_unread

    codebooks = int(spec.traits["codebooks"].value or 1) if "codebooks" in spec.traits else 1
    has_tokenizer = has_tokenizer and codebooks == 1  # codes are no text
    return {
        "tried": tried,
        "unread": describe_unread(spec.config),
        "generation_known": generation is not None,
        "title": registration["name"],
        "model": hub_id or registration["name"],
        "model_argument": shlex.quote(hub_id or folder or registration["name"]),
        "hub_id": hub_id,
        "revision": spec.revision,
        "model_file": f"models/modeling_{spec.family}.py",
        "test_file": f"tests/equivalence/test_{spec.family}_modeling.py",
        "config": registration["config"],
        "highlights": highlights(spec),
        "memory": weight_memory(spec.num_parameters),
        "has_tokenizer": has_tokenizer,
        "codebooks": codebooks,
        "prompts": example_prompts(codebooks, prompts if has_tokenizer else ()),
        "max_tokens": max(1, min(32, (max_positions(spec.config) or 512) // 4)),
        "sampling": sampling_arguments(generation or {}),
        "evaluation": [
            (name, value)
            for name in SAMPLING_FIELDS
            if (value := (generation or {}).get(name)) is not None
        ],
    }


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a checkpoint brings a tokenizer."""
    return (folder / "tokenizer_config.json").exists() or (folder / "tokenizer.json").exists()


def example_prompts(codebooks: int, texts: Sequence[str]) -> list[Any]:
    """Return prompts: texts where there are any, else token ids, or a code of each codebook at
    every position.
    """
    if texts:
        return list(texts)
    tokens = [[5, 3, 8, 2], [7, 1]]
    return (
        tokens if codebooks == 1 else [[[token] * codebooks for token in each] for each in tokens]
    )


def weight_memory(num_parameters: int) -> str:
    """Return what the weights take in the two usual dtypes."""
    half, full = (_digits(size * num_parameters / 1e9) for size in (2, 4))
    return f"{half} GB (bfloat16) or {full} GB (float32)"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def highlights(spec: ModelSpec) -> list[tuple[str, str]]:
    """Return what is worth knowing about the model, by name."""
    config, positions = spec.config, max_positions(spec.config)
    layers = layer_kinds(spec)
    kinds = ", ".join(f"{len(kind.layers)} {kind.name.replace('_', ' ')}" for kind in layers)
    found = [
        ("Architecture", f"{spec.architecture}, {spec.num_parameters:,} parameters"),
        ("Layers", f"{sum(len(kind.layers) for kind in layers)} ({kinds})"),
        ("Context", f"{positions:,} tokens" if positions else ""),
        (
            "Vocabulary",
            f"{config['vocab_size']:,} tokens" if isinstance(config.get("vocab_size"), int) else "",
        ),
    ]
    traits = [
        (name.replace("_", " ").capitalize(), str(trait.value))
        for name, trait in spec.traits.items()
    ]
    return [
        (name, value) for name, value in [*found, *traits] if value not in ("", "None", "False")
    ]


def sampling_arguments(generation: dict[str, Any]) -> str:
    """Return the checkpoint's own sampling parameters as arguments, or plain ones; only numbers get
    through.
    """
    own = {name: generation.get(name) for name in SAMPLING_FIELDS}
    numbers = {
        name: value
        for name, value in own.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
    chosen = numbers or {"temperature": 0.8, "top_p": 0.95}
    return ", ".join(f"{name}={value!r}" for name, value in chosen.items())


def _read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return content if isinstance(content, dict) else {}
