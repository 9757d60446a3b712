"""Phase test: writes the equivalence tests of the model file and runs them."""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from onboard.analysis.spec import RepositoryCode
from onboard.content import content_path
from onboard.errors import CONSENT, OnboardError
from onboard.render import TEST_SUITE, TEST_TEMPLATE
from onboard.workflow.lock import WORK, exclusive
from onboard.workflow.phase import Phase, PhaseResult, RunContext
from onboard.workflow.processes.pytest_run import RunPytest, run_pytest
from onboard.workflow.remote import client as remote
from onboard.workflow.remote.agreed import check_module
from onboard.workflow.remote.handed import small_files

CODE = "code"


class TestPhase(Phase):
    """Generated tests, bottom-up: block, layer, whole model, export, cached decode; all must
    pass.
    """

    name = "test"
    starts_programs = True
    __test__ = False  # not a test class, whatever pytest thinks of its name

    def inputs(self, context: RunContext) -> dict[str, Any]:
        """The model file, the spec, what the tests are made from and inherit, and the device."""
        return {
            "model_file": context.files.digest(context.root / model_path(context)),
            "spec": context.files.digest(context.artifact("spec.yaml")),
            "template": context.files.digest(
                content_path("templates", TEST_TEMPLATE, root=context.root)
            ),
            "suite": context.files.digest(TEST_SUITE),
            "device": context.options.device,
        }

    def run(self, context: RunContext) -> PhaseResult:
        """Write and run the tests; the first that fails, bottom-up, is the error."""
        test_file, text, path = test_path(context), tests_text(context), model_path(context)
        with _alone(context):
            written = context.files.put(context.root / test_file, text)
            model_file = {
                "path": path.as_posix(),
                "sha256": context.files.digest(context.root / path),
            }
            record = _run(context, test_file)
        context.write_json("tests.json", record | {"model_file": model_file})
        tests = record["tests"]
        if failed := [test for test in tests if test["status"] == "failed"]:
            raise OnboardError(
                f"{failed[0]['name']} failed ({len(failed)} of {len(tests)} tests did): {failed[0]['message']}",
                hint=f"Repeat: {record['command']}",
            )
        artifacts = {
            "test_file": str(test_file),
            "tests": str(context.artifact("tests.json").relative_to(context.root)),
        }
        kept = [] if written else [context.kept(context.root / test_file, self.name)]
        return PhaseResult(artifacts, "; ".join([_summary(tests), *kept]))


@contextlib.contextmanager
def _alone(context: RunContext) -> Iterator[None]:
    """Keep runs of the family's other models from replacing the tests between their writing and
    their end.
    """
    if context.options.dry_run:
        yield
        return
    # No model's folder has a name that begins with a dot.
    waiting = partial(
        context.worklog.append, "test", "waits for the tests of another model of the family"
    )
    with exclusive(context.root / WORK / f".tests-{context.spec.family}", waiting=waiting):
        yield


def _run(context: RunContext, test_file: Path) -> dict[str, Any]:
    own_code = context.spec.repository is not None
    gpu = context.options.device != "cpu" and not own_code  # that runs without devices
    local = partial(run_pytest, run_module=context.run_module, tell=context.doing)
    with _runnable_root(context) as root:
        run = partial(remote.run_pytest, context, _handed(context)) if own_code else local
        record = run_tests(root, test_file, gpu=gpu, run=run, scratch=_scratch(context))
    return record | {"command": f"{CONSENT}=1 {record['command']}"} if own_code else record


def _handed(context: RunContext) -> dict[str, str]:
    """Return what tests of a model's own code need of the root: the two files and the copy of the
    code.
    """
    assert context.spec.repository is not None
    code = (context.artifact(CODE) / name for name in _copied(context.spec.repository))
    paths = [context.root / model_path(context), context.root / test_path(context), *code]
    return {context.relative(path): context.files.read(path) for path in paths}


def _copied(code: RepositoryCode) -> list[str]:
    return ["config.json", *code.files]


def _scratch(context: RunContext) -> Path | None:
    """Return the folder whose leftovers the next run removes; a dry run writes nothing there."""
    if context.options.dry_run or context.files.staging is None:
        return None
    context.files.staging.mkdir(parents=True, exist_ok=True)
    return context.files.staging


def tests_text(context: RunContext) -> str:
    """Return the generated tests; the code that a model brings is copied to the work folder for
    them.
    """
    from onboard.codegen.equivalence_test import generate_test_file, write_test_file

    spec = context.spec
    if spec.repository is None:
        return generate_test_file(spec, context.root)
    texts = small_files(context.source.files())
    for name in _copied(spec.repository):
        context.files.write(context.artifact(CODE) / name, texts[name])
    code = context.relative(context.artifact(CODE))
    measured = remote.call(context, "measure_model", spec=spec.to_yaml())
    check_module(measured.config_module, spec.repository)
    return write_test_file(spec, measured, context.root, code)


def model_path(context: RunContext) -> Path:
    """Return the path of the model file under the root."""
    return Path("models", f"modeling_{context.spec.family}.py")


def test_path(context: RunContext) -> Path:
    """Return the path of the generated tests under the root."""
    return Path("tests", "equivalence", f"test_{context.spec.family}_modeling.py")


@contextlib.contextmanager
def _runnable_root(context: RunContext) -> Iterator[Path]:
    """The root, or in a dry run a temporary one with the two files that the tests need."""
    if not context.options.dry_run:
        yield context.root
        return
    with tempfile.TemporaryDirectory() as folder:
        for path in (model_path(context), test_path(context)):
            copy = Path(folder, path)
            copy.parent.mkdir(parents=True)
            copy.write_text(context.files.read(context.root / path), encoding="utf-8")
        yield Path(folder)


def run_tests(
    root: Path,
    test_file: Path,
    gpu: bool,
    run: RunPytest = run_pytest,
    scratch: Path | None = None,
) -> dict[str, Any]:
    """Run a test file of `root` with pytest; return {command, output, tests}, `tests` as the plugin
    wrote them, in a folder below `scratch`.
    """
    seed = str(secrets.randbelow(2**31))
    arguments = ["-v", "--no-header", "-p", "no:cacheprovider", "-p", "onboard.testing.plugin"]
    arguments += [str(test_file)] if gpu else ["-m", "not gpu", str(test_file)]
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        results = Path(folder, "results.json")
        output = run([*arguments, "--onboard-results", str(results)], root, {"ONBOARD_SEED": seed})
        tests = json.loads(results.read_text(encoding="utf-8")) if results.exists() else []
    if not tests:  # the file does not even import
        raise OnboardError(f"pytest ran no test of {test_file}: {_last_error(output)}")
    command = shlex.join(["python", "-m", "pytest", *arguments])
    return {"command": f"ONBOARD_SEED={seed} {command}", "output": output, "tests": tests}


def _last_error(output: str) -> str:
    """The last line in which pytest shows an error, or the last line."""
    lines = output.strip().splitlines() or ["it printed nothing"]
    return (
        next((line for line in reversed(lines) if line.startswith("E ")), lines[-1])
        .removeprefix("E ")
        .strip()
    )


def _summary(tests: list[dict[str, Any]]) -> str:
    errors = [
        test["error"] for test in tests if test["error"] is not None and test["device"] == "cpu"
    ]
    passed = sum(test["status"] == "passed" for test in tests)
    skipped = len(tests) - passed
    worst = f", largest float32 error {max(errors):.1e}" if errors else ""
    return f"{passed} tests passed{worst}" + (
        f"; {skipped} skipped (no CUDA device)" if skipped else ""
    )
