"""generate: write the family's model file, once it is proven equal to Hugging Face block by
block.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from onboard.analysis.spec import ModelSpec
from onboard.content import CONTENT_ROOT
from onboard.errors import EagerDiffersError, OnboardError, UntranslatableError
from onboard.workflow import team
from onboard.workflow.lock import WORK
from onboard.workflow.phase import Phase, PhaseResult, RunContext
from onboard.workflow.phases.analyze import ARTIFACT as SPEC
from onboard.workflow.remote import client as remote
from onboard.workflow.remote.vet import vet_model_file

_REVISION = re.compile(r",\s+checkpoint revision [\w.+-]*(?=\.$)", re.MULTILINE)


class Generate(Phase):
    """`spec.yaml` -> `models/modeling_<family>.py`, which all models of the family share."""

    name = "generate"
    shared: ClassVar[frozenset[str]] = frozenset({"model_file"})

    def inputs(self, context: RunContext) -> dict[str, Any]:
        """Depend on the spec and on the templates."""
        folders = [folder / "templates" / "model" for folder in (CONTENT_ROOT, context.root)]
        templates = [path for folder in folders for path in sorted(folder.glob("*.j2"))]
        return context.digest(SPEC) | {
            "templates": [context.files.digest(path) for path in templates]
        }

    def run(self, context: RunContext) -> PhaseResult:
        """Generate, prove, write; a file that does not prove is not written."""
        made = _made(context)
        text, worst = made.text, made.worst
        path = context.root / "models" / f"modeling_{context.spec.family}.py"
        artifacts = {"model_file": context.relative(path)}
        if context.files.exists(path) and _serves_too(context.files.read(path), text):
            context.files.claim(path)
            found = "was there already"
        elif context.files.is_users(path) and not context.files.replacing:
            _prove_users(path, context)
            return PhaseResult(
                artifacts, f"{context.kept(path, self.name)}; it is proven for this model"
            )
        else:
            _prove_for_relatives(path, text, context)
            context.files.put(path, text)
            found = f"{len(text.splitlines())} lines"
        by = f", {made.by}" if made.by else ""
        return PhaseResult(artifacts, f"{found}, largest error of a block {worst:.1e}{by}")


@dataclass(frozen=True)
class _Made:
    """A proven text, and the largest error of a block."""

    text: str
    worst: float
    by: str = ""
    """Who had a hand in it beside the generator."""


def _made(context: RunContext) -> _Made:
    """Return the model file; where a block has no translation, with it as the porter has it."""
    try:
        return _of_own_code(context) if context.spec.repository else _of_transformers(context)
    except UntranslatableError as error:
        text, block = team.ported(context, error), error.block
        if text is None:
            if not context.spec.repository:
                _check_eager(context, error)
            raise
    worst = remote.in_walls(context, "check", spec=context.spec.to_yaml(), text=text)
    return _Made(text, worst, f"{block} is the porter's")


def _check_eager(context: RunContext, error: UntranslatableError) -> None:
    """Raise what says more of a class without translation: no mode of ours computes what users get."""
    from onboard.analysis.analyze import check_eager

    try:
        check_eager(context.source.config())
    except EagerDiffersError as differs:
        raise EagerDiffersError(f"{error.message}; {differs.message}", hint=differs.hint) from error


def _of_transformers(context: RunContext) -> _Made:
    """Return the proven text; where the generator's is wrong, as somebody has mended it."""
    from onboard.codegen.hints.hinted_text import hinted
    from onboard.codegen.model_file import generate_model_file
    from onboard.verify.blocks import prove

    context.doing("translating")
    text = generate_model_file(context.spec)
    context.doing("proving")
    try:
        said = hinted(text, context.spec)
        return _Made(said, max(proof.error for proof in prove(said, context.spec)))
    except OnboardError as error:
        mended = team.repaired(context, text, error.message)
        if mended is None:
            raise
    mended = hinted(mended, context.spec)
    return _Made(mended, max(proof.error for proof in prove(mended, context.spec)), team.MENDED)


def _of_own_code(context: RunContext) -> _Made:
    """Do the same in the process that may run the model's own code, and look at what comes from
    there.
    """
    from onboard.codegen.straight.recorded_classes import recorded_classes

    made = remote.call(context, "generate", spec=context.spec.to_yaml())
    vet_model_file(made.text, context.spec)
    classes = recorded_classes(made.text)
    said = f"{', '.join(classes)}: forwards as recorded, not as written" if classes else ""
    return _Made(made.text, made.worst, said)


def same_but_revision(first: str, second: str) -> bool:
    """Tell whether two model files differ at most in the checkpoint's revision, which each model
    has its own of.
    """
    return _REVISION.sub("", first, count=1) == _REVISION.sub("", second, count=1)


def _serves_too(found: str, text: str) -> bool:
    """Whether a file is the new one but for its revision, and for what it says of several ranks:
    that comes of the branches that one model's config takes.
    """
    from onboard.codegen.hints.same_text import same_but_hints

    first, second = (_REVISION.sub("", each, count=1) for each in (found, text))
    return first == second or same_but_hints(first, second)


def _prove_users(path: Path, context: RunContext) -> None:
    """Prove a file that a user wrote or changed; raise `OnboardError` when it does not serve the
    run's model.
    """
    if error := _refusal(context.files.read(path), context.spec, context):
        raise OnboardError(
            f"{context.relative(path)} is not as onboard wrote it, and does not serve the model: {error.message}",
            hint="Mend it, or let --from generate show the diff and replace it (the old file is kept beside it)",
        ) from error


def _prove_for_relatives(path: Path, text: str, context: RunContext) -> None:
    """Prove a file that is to replace another one for the models, too, that the other one
    serves.
    """
    for relative in _relatives(context):
        error = _refusal(text, relative, context)
        if (
            error is not None
            and context.files.exists(path)
            and not _refusal(context.files.read(path), relative, context)
        ):
            raise OnboardError(
                f"the model file for {context.model} does not serve {relative.model}, which shares it: {error.message}",
                hint="Onboard one of them under another --root",
            ) from error


def _refusal(text: str, relative: ModelSpec, context: RunContext) -> OnboardError | None:
    """Return why a model file does not serve a model."""
    from onboard.verify.blocks import prove

    try:
        if relative.repository:
            remote.call(context, "check", spec=relative.to_yaml(), text=text)
        else:
            prove(text, relative, export=False)
    except OnboardError as error:
        return error
    return None


def _relatives(context: RunContext) -> list[ModelSpec]:
    """Return the specs of the other models under this root that use the same file."""
    paths: list[Path] = sorted((context.root / WORK).glob(f"*/{SPEC}"))
    specs = [ModelSpec.load(path) for path in paths if path.parent != context.work_dir]
    return [spec for spec in specs if spec.family == context.spec.family]
