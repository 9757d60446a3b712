"""What is done with a model's own code; each task takes and returns what JSON has, for it runs in a
child process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onboard.analysis.spec import ModelSpec
from onboard.errors import CONSENT
from onboard.workflow.processes.programs import RunModule, in_new_interpreter

PROGRAMS: list[RunModule] = []
"""What starts programs, if it is not a new interpreter that does."""
_MEDIA: dict[Path, Any] = {}
"""What `open_media` has made, for `read_media`."""
_MOST_OUTPUT = 2**19
"""Letters of what tests print that are kept."""


def measure(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Build the model without memory for its parameters; return its elements by dtype, and the names
    of each weight that has two.
    """
    from onboard.analysis.repository import build_without_memory
    from onboard.workflow.checkpoint.parameter_count import module_counts

    model = build_without_memory(config)
    tied = [[source, target] for target, source in model.all_tied_weights_keys.items()]
    return {"counts": module_counts(model), "tied": tied}


def analyze(folder: Path, config: dict[str, Any], model: str, revision: str | None) -> str:
    """Return the model's spec as YAML."""
    from onboard.analysis.analyze import analyze

    return analyze(config, folder, model=model, revision=revision).to_yaml()


def generate(folder: Path, config: dict[str, Any], spec: str) -> dict[str, Any]:
    """Generate and prove the model file; return its text and the largest error of a block."""
    from onboard.verify.blocks import proven_model_file

    text, worst = proven_model_file(ModelSpec.from_yaml(spec))
    return {"text": text, "worst": worst}


def check(folder: Path, config: dict[str, Any], spec: str, text: str) -> float:
    """Prove a model file for a model of its family; return the largest error of a block."""
    from onboard.verify.blocks import prove

    return max(proof.error for proof in prove(text, ModelSpec.from_yaml(spec), export=False))


def recorded(folder: Path, config: dict[str, Any], spec: str, name: str) -> list[dict[str, Any]]:
    """Return the forms of what a class is given and gives in a probe."""
    from onboard.workflow.remote.ported import recorded_calls

    return recorded_calls(ModelSpec.from_yaml(spec).config, name)


def port(folder: Path, config: dict[str, Any], spec: str, name: str, block: str) -> str:
    """Return the model file that the generator makes where a class has another text.

    A repository's code has it already. The process is of no use for anything else afterwards.
    """
    from onboard.analysis.analyze import analyze
    from onboard.codegen.model_file import generate_model_file
    from onboard.workflow.remote.ported import import_ported

    parsed = ModelSpec.from_yaml(spec)
    if parsed.repository is None:
        import_ported(parsed.hf_module, name, block, folder / "ported")
    found = analyze(config, folder, model=parsed.model, revision=parsed.revision)
    return generate_model_file(found)


def measure_model(folder: Path, config: dict[str, Any], spec: str) -> dict[str, Any]:
    """Return what the tests' file needs of the model."""
    from onboard.codegen.equivalence_test import measure_model

    return measure_model(ModelSpec.from_yaml(spec)).model_dump()


def logits(folder: Path, config: dict[str, Any], order: dict[str, Any], output: int) -> int:
    """Write logits of the model with weights of open files to an open file; return the length of a
    row.
    """
    from onboard.verify.own_logits import Order, write_logits

    with os.fdopen(output, "wb", closefd=False) as file:
        return write_logits(config, Order.model_validate(order), file)


def open_media(folder: Path, config: dict[str, Any], opening: dict[str, Any]) -> dict[str, Any]:
    """Make the model's processor and towers; return what is to be known of them."""
    from onboard.workflow.remote.own_media import Opening, OwnMedia

    media = _MEDIA[folder] = OwnMedia(folder, config, Opening.model_validate(opening))
    return {"embedding": media.embedding, "facts": list(dict.fromkeys(media.facts))}


def read_media(folder: Path, config: dict[str, Any], asked: dict[str, Any]) -> list[int]:
    """Return the token ids of a text with images, and write the embeddings of its tokens."""
    from onboard.workflow.remote.own_media import Asked

    return _MEDIA[folder].read(Asked.model_validate(asked))  # type: ignore[no-any-return]


def run_pytest(
    folder: Path,
    config: dict[str, Any],
    files: dict[str, str],
    arguments: list[str],
    environment: dict[str, str],
    results: str,
) -> dict[str, Any]:
    """Run pytest on a root of these files; return what it printed and the plugin's rows."""
    from onboard.workflow.processes import pytest_run

    root, path = Path("root").absolute(), Path("results.json").absolute()
    path.unlink(missing_ok=True)
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
    changed = [str(path) if item == results else item for item in arguments]
    output = pytest_run.run_pytest(
        [*changed, "--basetemp", str(Path("pytest").absolute())],
        root,
        {**environment, CONSENT: "1"},
        (PROGRAMS or [in_new_interpreter])[0],
    )
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return {"output": output[-_MOST_OUTPUT:], "rows": rows}


def review(
    folder: Path, config: dict[str, Any], spec: str, model: str, tests: str, names: list[str]
) -> dict[str, Any]:
    """Review a model file and its tests, given as texts and relative paths; return the review."""
    from onboard.review.reviewer import review

    paths = [Path(name) for name in names]
    for path, text in zip(paths, (model, tests), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return review(paths[0], paths[1], ModelSpec.from_yaml(spec), root=Path()).as_json()


TASKS: dict[str, Callable[..., Any]] = {
    task.__name__: task
    for task in (
        *(measure, analyze, generate, check, logits, recorded, port),
        *(measure_model, run_pytest, review, open_media, read_media),
    )
}
