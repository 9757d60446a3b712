"""Import a model's own code, from its repository, and have transformers know its classes: in a
child process only.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from onboard.analysis.behaviour.position_fields import USUAL, position_field
from onboard.analysis.repository_classes import bring_up_to_date, failed_first_values
from onboard.analysis.repository_source import PACKAGE, CodeSurvey, lacking, survey_code
from onboard.analysis.tiny import conditional_names
from onboard.analysis.tiny.environment_reads import environment_reads
from onboard.analysis.tiny.tiny_config import (
    asks_hub,
    is_own_check,
    of_its_time,
    one_line,
    own_place,
)
from onboard.errors import OnboardError, unfit_package
from onboard.hf import given_inputs
from onboard.hf.json_floats import json_floats
from onboard.hf.old import (
    flash_by_name,
    interfaces,
    names,
    own_configs,
    packages,
    rotary_forms,
)
from onboard.hf.old.fla import token_axis
from onboard.hf.old.given_logits import given_by
from onboard.hf.old.gone import GoneModule, importing, keep_nothing
from onboard.hf.old.layers import (
    attention_modules,
    kernel_casts,
    layer_outputs,
    rotary_heirs,
    unnumbered_layers,
)
from onboard.hf.old.layers.eager_arguments import spare_arguments
from onboard.hf.old.layers.own_triangles import hide_later_tokens
from onboard.hf.parameters_on import without_memory
from onboard.hub import known_type, with_own_type

_INSTALLED: dict[str, list[str]] = {}
"""Model types whose code was imported -> what it took."""
_environment: dict[str, str] = {}
"""`file.py:12` -> the environment variable that is read there."""
_HALF = re.compile(r"\b(BFloat16|Half)\b")
"""What an error of torch calls a dtype in half precision."""
_USUAL_ATTENTION = "sdpa"
"""What transformers calls the attention that a model gets whose config.json names none."""
_CHECK = "That is a check of its own: have the config, or a copy of the code, meet it"
_written_for: dict[str, Any] = {}
"""Classes as `auto_map` names them -> the transformers that their config.json names, if any."""


def install(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Import the code that a parsed config.json names, and register its classes with transformers'
    auto classes.

    Returns:
        What was put in place of things that transformers no longer has, and of packages.

    Raises:
        OnboardError: the code cannot be imported, or is not what `auto_map` says.
    """
    config = with_own_type(config)
    model_type = str(config["model_type"])
    if model_type in _INSTALLED:
        return _INSTALLED[model_type]
    survey = survey_code(folder, config)
    _written_for[survey.classes["AutoModelForCausalLM"]] = config.get("transformers_version")
    facts = interfaces.restore_old_interfaces() + packages.provide_whole()
    facts += [f"{at} imports {name}, which is not there" for name, at in survey.absent.items()]
    for name in survey.files:
        text = (folder / name).read_text(encoding="utf-8-sig")  # as Python reads it
        facts += [*_without_environment(name, text), *interfaces.stay_on_cpu(text)]
        for module, wanted in _imported_from_transformers(text):
            facts += names.provide(module, wanted)
        facts += names.provide_by_stars(text)
        if packages.is_missing("flash_attn"):
            facts += kernel_casts.leave_out_casts(PACKAGE, name, text)
    config_class, model_class = _standing(folder, survey, config, facts)
    eager = config.get("attn_implementation") == "eager" or not model_class._supports_sdpa
    facts += [] if eager else spare_arguments(_own_modules())
    facts += hide_later_tokens(_own_modules(), eager=eager)
    _watch(model_class)
    facts += _position_facts(config_class, model_class, config)
    CONFIG_MAPPING.register(model_type, config_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    _INSTALLED[model_type] = list(dict.fromkeys(facts))
    return _INSTALLED[model_type]


def _without_environment(file: str, text: str) -> Iterator[str]:
    """Note which environment variables a file reads; say which have no value."""
    read = environment_reads(text)
    for line, name in read.items():
        _environment[f"{Path(file).name}:{line}"] = name
    for name in sorted({name for name in read.values() if name not in os.environ}):
        yield f"{file} reads the environment variable {name}, which has no value for it"


def _watch(model_class: Any) -> None:
    """Have what stands in for functions of flash-linear-attention see how long texts are."""
    if packages.stands_in("fla"):
        token_axis.watch(model_class)


def _own_modules() -> list[ModuleType]:
    return [item for name, item in sys.modules.items() if name.startswith(f"{PACKAGE}.")]


def _position_facts(config_class: Any, model_class: Any, config: Mapping[str, Any]) -> list[str]:
    """See to it that the number of positions goes by its usual name."""
    made = config_class.from_dict(json_floats(deepcopy(dict(config))))
    field = position_field(model_class, made)
    if field is None:
        return []
    config_class.attribute_map = {**config_class.attribute_map, USUAL: field}
    return [f"the config has no {USUAL}; {field} has the number of positions"]


def build_without_memory(config: Mapping[str, Any]) -> Any:
    """Return the model of a parsed config.json, whose code was imported: its parameters are on the
    meta device, what its constructors compute has values.
    """
    config = with_own_type(config)
    config_class = CONFIG_MAPPING[str(config["model_type"])]
    model_class = AutoModelForCausalLM._model_mapping[config_class]
    with without_memory(computing=True):
        return model_class(config_class.from_dict(json_floats(deepcopy(dict(config)))))


def _standing(
    folder: Path, survey: CodeSurvey, config: Mapping[str, Any], facts: list[str]
) -> tuple[Any, Any]:
    """Return the classes, which a model of this config was made with; a package that its
    constructor asks for, by name or by what an import that was tried would have bound, is stood in
    for, and so is the attention of one. Each try imports the code anew; one that fails as an earlier
    one did, with no more in place, is the last.
    """
    tried = set[tuple[str, frozenset[str]]]()
    while True:
        classes = _classes(folder, survey, str(config["model_type"]), facts)
        try:
            facts += bring_up_to_date(PACKAGE, *classes, config)
            return classes
        except Exception as error:
            if flash_by_name.is_refused(error) and (said := flash_by_name.allow_flash_by_name()):
                facts += said
                continue
            had = (repr(error), frozenset(facts))
            wanted = packages.asked_for(error, survey.imports)
            said = [fact for name in wanted for fact in packages.stand_in(name)]
            said = said or conditional_names.bind_absent()
            if (not said or had in tried) and not keep_nothing():
                raise _failure(survey.classes["AutoModelForCausalLM"], "fails", error) from error
            tried.add(had)
            facts += said


def _classes(
    folder: Path, survey: CodeSurvey, model_type: str, facts: list[str]
) -> tuple[Any, Any]:
    """Import the classes of config and model; packages that are not installed are stood in for."""
    reference = survey.classes["AutoModelForCausalLM"]
    while True:
        make_package(folder)
        stand_in_for_neighbours(folder, survey.absent)
        try:
            with importing(), interfaces.without_registering():
                model_class = _load(reference)
                config_class = _config_class(survey, model_type)
            facts += rotary_forms.give_rotary_forms(PACKAGE)
            facts += attention_modules.give_attention_modules(PACKAGE)
            facts += unnumbered_layers.give_layer_numbers(PACKAGE)
            facts += rotary_heirs.give_rotary_bases(PACKAGE)
            facts += layer_outputs.give_tuples(PACKAGE)
            break
        except Exception as error:
            module = not_found(error)
            if module.startswith(f"{PACKAGE}."):
                raise lacking(
                    f"{module.removeprefix(f'{PACKAGE}.').replace('.', '/')}.py"
                ) from error
            top = module.split(".")[0]
            is_missing = top and not (folder / f"{top}.py").is_file() and packages.missing([top])
            if not is_missing:
                raise _failure(reference, "cannot be imported", error) from error
            facts += packages.stand_in(module)
    if not (isinstance(config_class, type) and issubclass(config_class, PretrainedConfig)):
        raise OnboardError(f"{survey.classes['AutoConfig']} is not a config class of transformers")
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise OnboardError(
            f"{reference} is not a model class of transformers: its base is another one",
            hint="Have a copy of the code inherit from PreTrainedModel of transformers",
        )
    if own_configs.is_of_transformers(config_class):
        facts.append(f"the config class is transformers' {config_class.__name__}")
        module = f"{PACKAGE}.{reference.rpartition('.')[0]}"
        config_class = own_configs.own_config_class(config_class, model_type, module)
    return config_class, model_class


def not_found(error: BaseException | None) -> str:
    """Return the module whose absence an error says, or another one behind it; "" where none does:
    code may catch the error, to raise one with advice.
    """
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__ or error.__context__
    return "" if error is None else error.name or ""


def _config_class(survey: CodeSurvey, model_type: str) -> Any:
    """Return the class that `auto_map` names; transformers' own where it names none."""
    if "AutoConfig" in survey.classes:
        return _load(survey.classes["AutoConfig"])
    return CONFIG_MAPPING[str(known_type(model_type))]


def _failure(reference: str, what: str, error: Exception) -> OnboardError:
    if isinstance(error, OnboardError):
        return error
    if asks_hub(error):
        return OnboardError(
            f"the model's code, {reference}, {what} (it loads files of a repository by its name, at "
            f"{own_place(error)})",
            hint="Code gets its own repository's Python and JSON files, and no network: have a copy of "
            "it work without others",
        )
    return unfit_package(error) or OnboardError(
        f"the model's code, {reference}, {what} ({one_line(error)})",
        hint=_advice(reference, error),
    )


def _advice(reference: str, error: BaseException) -> str:
    """Return what to do where a class, as `auto_map` names it, fails with an error."""
    if (file := _missing_file(error)) is not None:
        wanted = f"the code wants a file of its own, {file}, and gets its repository's Python and JSON files"
        return f"{wanted} alone: have a copy of the code work without it"
    if isinstance(error, RuntimeError) and _HALF.search(str(error)):
        return "It computes in half precision by itself: have a copy of the code keep its input's dtype"
    if isinstance(error, PackageNotFoundError):
        wanted = "the code asks which version of a package there is, and there is none"
        return f"{wanted}: {packages.to_install(str(error.name))}"
    if isinstance(error, KeyError) and error.args == (_USUAL_ATTENTION,):
        missing = f"The code has no {_USUAL_ATTENTION} attention, which users get"
        return (
            f'{missing}: name one that it has in config.json, "attn_implementation": "eager", say'
        )
    variable = _environment.get(own_place(error))
    if variable is None or variable in os.environ:
        met = f"{_CHECK}. " if is_own_check(error) else ""
        return f"{met}{of_its_time(_written_for.get(reference))}"
    no_value = f"{variable} is an environment variable, and this code gets none"
    return f"{no_value}: write its value in a copy of the code"


def _missing_file(error: BaseException) -> str | None:
    """Return the file that code asked for by a path of its own, no absolute one, and that is not there."""
    if not isinstance(error, FileNotFoundError) or not own_place(error):
        return None
    name = error.filename
    return name if isinstance(name, str) and not os.path.isabs(name) else None


def bind_absent(model_type: str) -> bool:
    """Bind what a model type's code has only where packages are installed; it is told for the
    report. Whether there was any.
    """
    facts = conditional_names.bind_absent()
    _watch(AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[model_type]])
    _INSTALLED[model_type] += [fact for fact in facts if fact not in _INSTALLED[model_type]]
    return bool(facts)


def give_masks(model_class: Any) -> None:
    """Give the models of a class a mask wherever they get none; it is told for the report."""
    given_inputs.give_masks(model_class)
    facts = _INSTALLED[model_class.config_class.model_type]
    facts.append(f"{model_class.__name__}.forward fails without attention_mask; it gets ones")


def give_truth_masks(model_class: Any) -> None:
    """Give the models of a class masks as truth values; it is told for the report."""
    given_inputs.give_truth_masks(model_class)
    facts = _INSTALLED[model_class.config_class.model_type]
    what = "fails with an attention_mask of integers; it gets truth values"
    facts.append(f"{model_class.__name__}.forward {what}")


def give_positions(model_class: Any) -> None:
    """Give the models of a class positions wherever they get none; it is told for the report."""
    given_inputs.give_positions(model_class)
    facts = _INSTALLED[model_class.config_class.model_type]
    facts.append(f"{model_class.__name__}.forward fails without position_ids; it gets them")


def spare_positions(model_class: Any) -> None:
    """Give the models of a class no positions; it is told for the report."""
    given_inputs.spare_positions(model_class)
    facts = _INSTALLED[model_class.config_class.model_type]
    facts.append(f"{model_class.__name__}.forward fails with position_ids; it gets none")


def spare_masks(model_class: Any, *, always: bool = False) -> None:
    """Give the models of a class no mask with texts of one token, or always; it is told for the
    report.
    """
    given_inputs.spare_masks(model_class, always=always)
    facts = _INSTALLED[model_class.config_class.model_type]
    what = "fails with attention_mask where a text has one token; it gets none there"
    if always:
        what = "fails with attention_mask, and its generation passes none; it gets none"
    facts.append(f"{model_class.__name__}.forward {what}")


def give_caches(model_class: Any) -> None:
    """Have the models of a class keep what they would for later tokens; it is told for the report."""
    given_inputs.give_caches(model_class)
    facts = _INSTALLED[model_class.config_class.model_type]
    facts.append(
        f"{model_class.__name__}.forward fails with use_cache=False; it gets use_cache=True"
    )


def note_outputs(model_class: Any) -> None:
    """Tell the report what the models of a class, which have run, give besides plain logits."""
    facts = _INSTALLED[model_class.config_class.model_type]
    said = [*given_by(model_class).said(model_class.__name__), *failed_first_values()]
    if token_axis.shown_by(model_class):
        said.append("functions of flash-linear-attention are given heads before tokens")
    facts += [fact for fact in said if fact not in facts]


def make_package(folder: Path) -> None:
    """Make the folder's Python files importable as modules of `PACKAGE`."""
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]
    package = ModuleType(PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[PACKAGE] = package


def stand_in_for_neighbours(folder: Path, files: Collection[str]) -> None:
    """Have functions import from files that are not there; what they use of them is refused."""
    for file in files:
        parts = file.removesuffix(".py").split("/")
        for end in range(1, len(parts) + 1):
            name = ".".join([PACKAGE, *parts[:end]])
            if not folder.joinpath(*parts[:end]).is_dir():
                shown = ".".join(parts[:end])
                sys.modules[name] = GoneModule(name, shown, "Fetch the repository anew")


def is_installed(model_type: object) -> bool:
    """Whether a model type is one whose code was imported."""
    return model_type in _INSTALLED


def what_to_do(model_class: type, error: BaseException) -> str:
    """Return what to do with code that fails with an error."""
    module = model_class.__module__.removeprefix(f"{PACKAGE}.")
    return _advice(f"{module}.{model_class.__name__}", error)


def facts_of(model_type: str) -> list[str] | None:
    """Return what importing a model type's code took; None for one that transformers has itself."""
    return _INSTALLED.get(model_type)


def _imported_from_transformers(text: str) -> list[tuple[str, list[str]]]:
    """Return modules under `transformers` and the names that are imported from them, or had of them
    where they are imported as a whole; imports under `try` may fail.
    """
    tree = ast.parse(text)
    tried = {
        id(node) for item in ast.walk(tree) if isinstance(item, ast.Try) for node in ast.walk(item)
    }
    nodes = [node for node in ast.walk(tree) if id(node) not in tried]
    found = [
        (node.module, [alias.name for alias in node.names])
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        and node.module is not None
        and node.module.split(".")[0] == "transformers"
    ]
    return found + [
        (alias.name, _had_of(alias.asname, tree))
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.startswith("transformers.") and alias.asname
    ]


def _had_of(variable: str, tree: ast.Module) -> list[str]:
    """Return the names of the attributes that code has of a variable."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    of_it = (
        node.attr
        for node in found
        if isinstance(node.value, ast.Name) and node.value.id == variable
    )
    return list(dict.fromkeys(of_it))


def _load(reference: str) -> Any:
    module, _, name = reference.rpartition(".")
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
