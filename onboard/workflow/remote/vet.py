"""A look at the text of a model file that a process with a repository's code in it has handed over,
before anything else is done with it.
"""

from __future__ import annotations

import ast

from onboard.analysis.spec import ModelSpec
from onboard.errors import OnboardError
from onboard.vetting.model_text import registered, vet_model_text

_BASES = {"PlainConfig", "OldFields"}


def vet_model_file(text: str, spec: ModelSpec) -> None:
    """Raise `OnboardError` unless a model file passes the allow-list, and registers the classes of
    its spec and no others.
    """
    vet_model_text(text)
    names = registered(text)
    if names != {spec.config_class, spec.architecture} or not _has_plain_config(text):
        shown = ", ".join(sorted(names)) or "nothing"
        raise _other(f"registers {shown[:200]}, not {spec.config_class} and {spec.architecture}")
    if _model_type(text, spec.config_class) != spec.family:
        raise _other(f"defines another model type than {spec.family}")


def _has_plain_config(text: str) -> bool:
    imports = [item for item in ast.parse(text).body if isinstance(item, ast.ImportFrom)]
    return any(
        item.module == "onboard.plain_config" and {a.name for a in item.names} & _BASES
        for item in imports
    )


def _model_type(text: str, config_class: str) -> object:
    """Return the literal that a config class has as `model_type`."""
    for item in ast.parse(text).body:
        if isinstance(item, ast.ClassDef) and item.name == config_class:
            for line in item.body:
                match line:
                    case ast.Assign(
                        targets=[ast.Name(id="model_type")], value=ast.Constant(value=value)
                    ):
                        return value
    return None


def _other(what: str) -> OnboardError:
    return OnboardError(
        f"the model file that the model's code led to {what}", hint="Do not trust this model"
    )
