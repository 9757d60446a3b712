"""What a model file imports."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from typing import Any

import transformers
from transformers import PretrainedConfig

from onboard.analysis.repository_source import PACKAGE
from onboard.analysis.spec import ModelSpec
from onboard.codegen.config_class import base_of_transformers
from onboard.codegen.translate.language.object_values import Config
from onboard.codegen.translate.language.program.classes import Translator
from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.mechanisms.constructors.put_in_places import FUNCTION as PUT
from onboard.codegen.translate.mechanisms.constructors.taken_away import FUNCTION as LEFT_OUT
from onboard.codegen.translate.mechanisms.rescaled import LINEAR
from onboard.codegen.translate.output.ties import FUNCTION

_ROPES = "ROPE_INIT_FUNCTIONS"
_FIXED_IMPORTS = {
    "torch": "import torch",
    "nn": "from torch import nn",
    "math": "import math",
    "Any": "from typing import Any",
    "F": "import torch.nn.functional as F",
}


def import_lines(
    names: set[str], translator: Translator, spec: ModelSpec, blocks: list[str]
) -> list[str]:
    """Return the import statements of a model file with these blocks of text, which read these names."""
    own = {state.cls.__name__ for state in translator.states.values()} | translator.functions.keys()
    own |= translator.own_norms
    lines = {
        "import torch",
        "from torch import nn",
        "import onboard.ops  # noqa: F401  (registers the canonical ops)",
    }
    own_names = [
        name
        for name in ("AlibiSlopes", "FoldedHeads", "Codebooks", LINEAR, FUNCTION, LEFT_OUT, PUT)
        if any(name in block for block in blocks)
    ]
    modeling = sorted(["CausalLMOutput", "register_causal_lm", *own_names])
    lines.add(f"from onboard.modeling import {', '.join(modeling)}")
    if spec.repository:
        lines |= _config_base_imports(type(translator.model.config))
    else:
        lines.update(
            _config_import(cls)
            for cls in config_classes(translator)
            if _mentions(blocks, cls.__name__)
        )
    if any(_ROPES in block for block in blocks):
        place = "onboard.plain_config" if spec.repository else "transformers.modeling_rope_utils"
        lines.add(f"from {place} import {_ROPES}")
    for name in sorted(names & translator.globals.keys() - own - _FIXED_IMPORTS.keys() - {_ROPES}):
        lines.add(_import_line(name, *translator.globals[name]))
    lines.update(_FIXED_IMPORTS[name] for name in names & _FIXED_IMPORTS.keys())
    return sorted(lines)


def _config_base_imports(config_class: type) -> set[str]:
    """Return what the config class that a file defines by itself needs."""
    lines, base = (
        {"from onboard.modeling import register_config"},
        base_of_transformers(config_class),
    )
    if base is PretrainedConfig:
        return lines | {"from onboard.plain_config import PlainConfig"}
    return lines | {"from onboard.plain_config import OldFields", _config_import(base)}


def config_classes(translator: Translator) -> set[type]:
    """Return the classes of the configs that the model's classes are made with."""
    facts = [fact for known in translator.argument_facts.values() for fact in known.values()]
    return {type(fact.obj) for fact in facts if isinstance(fact, Config)}


def _mentions(blocks: list[str], name: str) -> bool:
    return any(re.search(rf"\b{name}\b", block) for block in blocks)


def _config_import(cls: type) -> str:
    place = "transformers" if hasattr(transformers, cls.__name__) else cls.__module__
    return f"from {place} import {cls.__name__}"


def _import_line(name: str, obj: Any, source: Any) -> str:
    """Return the import of a global name, from where the Hugging Face file has it."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    package = source.module.__name__.split(".")[: -node.level] if node.level else []
                    module = ".".join([*package, *([node.module] if node.module else [])])
                    import_module(module)
                    if module.split(".")[0] == PACKAGE:
                        raise Untranslatable(f"{name}, which {module} has")
                    return f"from {module} import {alias.name}" + (
                        f" as {alias.asname}" if alias.asname else ""
                    )
        if isinstance(node, ast.Import):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
    if _is_shared(source.module.__name__) and getattr(source.module, name, None) is obj:
        return f"from {source.module.__name__} import {name}"  # of transformers' shared code
    raise Untranslatable(f"the global {name} ({type(obj).__name__})")


def _is_shared(module: str) -> bool:
    """Whether a module is transformers' own and no model's: a generated file never imports what it
    is compared with.
    """
    return module.startswith("transformers.") and not module.startswith("transformers.models.")
