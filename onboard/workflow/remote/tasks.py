"""What is done with a model's own code; each task takes and returns what JSON has, for it runs in a
child process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from onboard.analysis.spec import ModelSpec
from onboard.errors import CONSENT


def measure(folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """Build the model without memory for its parameters; return its elements by dtype."""
    from onboard.analysis.repository import build_without_memory
    from onboard.workflow.checkpoint.parameter_count import module_counts

    return module_counts(build_without_memory(config))


def analyze(folder: Path, config: dict[str, Any], model: str, revision: str | None) -> str:
    """Return the model's spec as YAML."""
    from onboard.analysis.analyze import analyze

    return analyze(config, folder, model=model, revision=revision).to_yaml()


def generate(folder: Path, config: dict[str, Any], spec: str) -> dict[str, Any]:
    """Generate and prove the model file; return its text and the largest error of a block."""
    from onboard.codegen.model_file import generate_model_file
    from onboard.verify.blocks import prove

    parsed = ModelSpec.from_yaml(spec)
    text = generate_model_file(parsed)
    return {"text": text, "worst": max(proof.error for proof in prove(text, parsed))}


def check(folder: Path, config: dict[str, Any], spec: str, text: str) -> None:
    """Prove a model file for another model of its family."""
    from onboard.verify.blocks import prove

    prove(text, ModelSpec.from_yaml(spec), export=False)


def write_tests(folder: Path, config: dict[str, Any], spec: str, root: str, code: str) -> str:
    """Return the text of the model file's tests."""
    from onboard.codegen.equivalence_test import generate_test_file

    return generate_test_file(ModelSpec.from_yaml(spec), Path(root), code)


def run_pytest(
    folder: Path, config: dict[str, Any], arguments: list[str], working: str, results: str
) -> dict[str, str]:
    """Run pytest; return what it printed and the plugin's results."""
    from onboard.workflow.processes import pytest_run

    path = Path("results.json").absolute()
    changed = [str(path) if item == results else item for item in arguments]
    output = pytest_run.run_pytest(
        [*changed, "--basetemp", str(Path("pytest").absolute())], Path(working), {CONSENT: "1"}
    )
    return {"output": output, "results": path.read_text(encoding="utf-8") if path.exists() else ""}


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
    for task in (measure, analyze, generate, check, write_tests, run_pytest, review)
}
