"""A spec that a process with a repository's code in it has handed over says of the model what is
known here, and names nothing but it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from onboard.analysis.repository_source import PACKAGE, survey_code
from onboard.analysis.spec import ModelSpec, RepositoryCode
from onboard.errors import OnboardError
from onboard.workflow.phase import RunContext
from onboard.workflow.remote.handed import small_files


def check_spec(spec: ModelSpec, context: RunContext) -> None:
    """Raise `OnboardError` where a spec differs from what was read here, without running anything:
    config.json and the files of the code.
    """
    wrong = list(_differences(spec, context))
    if wrong:
        raise OnboardError(
            f"the spec that the model's code led to is not of this model ({', '.join(wrong)})",
            hint="Do not trust this model",
        )


def _differences(spec: ModelSpec, context: RunContext) -> Iterator[str]:
    from onboard.hf.old.own_configs import is_own_of_transformers

    config, folder = context.source.config(), context.source.files()
    survey, texts = survey_code(folder, config), small_files(folder)
    code = spec.repository
    known = {
        "family": (spec.family, config["model_type"]),
        "model": (spec.model, context.model),
        "revision": (spec.revision, context.source.revision),
        "config": (_plain(spec.config), _plain(config)),
        "files": (code and code.files, survey.files),
        "classes": (code and code.classes, survey.classes),
    }
    yield from (name for name, (told, read) in known.items() if told != read)
    if file_of(spec.hf_module) not in survey.files:
        yield "hf_module"
    code_text = "\n".join(texts.get(name, "") for name in survey.files)
    if not _defines(code_text, spec.architecture):
        yield "architecture"
    if not _defines(code_text, spec.config_class) and not is_own_of_transformers(spec.config_class):
        yield "config_class"


def _defines(code: str, name: str) -> bool:
    return re.search(rf"^\s*class {name}\b", code, re.MULTILINE) is not None


def file_of(module: str) -> str:
    """Return the name of the repository's file that a module of `PACKAGE` is."""
    return f"{module.removeprefix(f'{PACKAGE}.').replace('.', '/')}.py"


def check_module(module: str, code: RepositoryCode) -> None:
    """Raise `OnboardError` unless a module is one of the repository's files."""
    if not module.startswith(f"{PACKAGE}.") or file_of(module) not in code.files:
        raise OnboardError(
            f"the model's code says that its config class is in {module[:100]}",
            hint="Do not trust this model",
        )


def _plain(config: object) -> str:
    return json.dumps(config, sort_keys=True)
