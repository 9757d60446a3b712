"""Import a model's own code, from its repository, and have transformers know its classes: in a
child process only.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from onboard.analysis.repository_source import survey_code
from onboard.errors import OnboardError
from onboard.hf import old_transformers
from onboard.plain_config import OLD_DEFAULTS, OLD_ROPE_SCALING

PACKAGE = "repository_code"
"""What the repository's files are imported as: `repository_code.modeling_x`."""
_INSTALLED: dict[str, list[str]] = {}
"""Model types whose code was imported -> what it took."""


def install(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Import the code that a parsed config.json names, and register its classes with transformers'
    auto classes.

    Returns:
        What was put in place of things that transformers no longer has.

    Raises:
        OnboardError: the code cannot be imported, or is not what `auto_map` says.
    """
    model_type = str(config["model_type"])
    if model_type in _INSTALLED:
        return _INSTALLED[model_type]
    survey = survey_code(folder, config)
    facts = old_transformers.restore_old_interfaces()
    for name in survey.files:
        for module, names in _imported_from_transformers(
            (folder / name).read_text(encoding="utf-8")
        ):
            facts += old_transformers.provide(module, names)
    make_package(folder)
    config_class, model_class = (
        _load(survey.classes[key]) for key in ("AutoConfig", "AutoModelForCausalLM")
    )
    if not (isinstance(config_class, type) and issubclass(config_class, PretrainedConfig)):
        raise OnboardError(f"{survey.classes['AutoConfig']} is not a config class of transformers")
    own_type = getattr(config_class, "model_type", None)
    if own_type != model_type:
        raise OnboardError(f"config.json says {model_type!r}, the code's config class {own_type!r}")
    facts += _adapt(config_class, model_class, config)
    AutoConfig.register(model_type, config_class)
    AutoModelForCausalLM.register(config_class, model_class)
    _INSTALLED[model_type] = list(dict.fromkeys(facts))
    return _INSTALLED[model_type]


def make_package(folder: Path) -> None:
    """Make the folder's Python files importable as modules of `PACKAGE`."""
    package = ModuleType(PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[PACKAGE] = package


def is_installed(model_type: object) -> bool:
    """Whether a model type is one whose code was imported."""
    return model_type in _INSTALLED


def facts_of(model_type: str) -> list[str] | None:
    """Return what importing a model type's code took; None for one that transformers has itself."""
    return _INSTALLED.get(model_type)


def _imported_from_transformers(text: str) -> list[tuple[str, list[str]]]:
    """Return modules under `transformers` and the names that are imported from them; imports under
    `try` may fail.
    """
    tree = ast.parse(text)
    tried = {
        id(node) for item in ast.walk(tree) if isinstance(item, ast.Try) for node in ast.walk(item)
    }
    return [
        (node.module, [alias.name for alias in node.names])
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module is not None
        and node.module.split(".")[0] == "transformers"
        and id(node) not in tried
    ]


def _load(reference: str) -> Any:
    module, _, name = reference.rpartition(".")
    try:
        return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise OnboardError(
            f"the model's code, {reference}, cannot be imported ({reason})"
        ) from error


def _adapt(config_class: Any, model_class: Any, config: Mapping[str, Any]) -> list[str]:
    """Bring the classes themselves up to date."""
    facts = []
    if "rope_scaling" not in vars(config_class):
        config_class.rope_scaling = OLD_ROPE_SCALING
    for name, value in OLD_DEFAULTS.items():
        if not hasattr(config_class, name):
            setattr(config_class, name, value)
    if model_class.config_class is None:
        model_class.config_class = config_class
    if isinstance(model_class._tied_weights_keys, list) and not hasattr(
        config_class, "tie_word_embeddings"
    ):
        config_class.tie_word_embeddings = True  # the default of its time
    if isinstance(keys := model_class._tied_weights_keys, list | tuple):
        model_class._tied_weights_keys = _tied(config_class, model_class, config, list(keys))
        facts.append(
            f"_tied_weights_keys is a list; as a mapping: {model_class._tied_weights_keys}"
        )
    if not _calls_post_init(model_class):
        model_class.__init__ = _with_post_init(model_class.__init__)
        facts.append(
            f"{model_class.__name__} does not call post_init(); it is called after it is made"
        )
    return facts


def _tied(
    config_class: Any, model_class: Any, config: Mapping[str, Any], keys: list[str]
) -> dict[str, str]:
    """Return which weight each of the old list's is tied to: that of the input embeddings."""
    model_class._tied_weights_keys = None
    with torch.device("meta"):
        model = model_class(config_class.from_dict(dict(config)))
    inputs = model.get_input_embeddings()
    source = next(f"{name}.weight" for name, module in model.named_modules() if module is inputs)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {key: source for key in keys if key in names and key != source}


def _calls_post_init(model_class: Any) -> bool:
    return any(
        "post_init" in cls.__init__.__code__.co_names
        for cls in model_class.__mro__
        if _has_own_init(cls)
    )


def _has_own_init(cls: Any) -> bool:
    return cls.__module__.startswith(PACKAGE) and hasattr(cls.__init__, "__code__")


def _with_post_init(init: Any) -> Any:
    def with_post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.post_init()

    return with_post_init
