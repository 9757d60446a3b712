"""Classes of a repository, brought up to date: what transformers asks of config and model classes
today, and code of its time does not do.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Set
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from onboard.analysis.behaviour.left_at_classes import make_anew
from onboard.analysis.blocks.wrapper_classes import telling_wrappers_apart
from onboard.analysis.source import module_source
from onboard.analysis.tiny.tiny_config import one_line
from onboard.errors import OnboardError
from onboard.hf.half_parameters import in_models_dtype, takes_models_dtype
from onboard.hf.json_floats import json_floats
from onboard.hf.old import flash_by_name, own_configs, rotary_forms
from onboard.hf.old.config_arguments import have_own_defaults, take_by_position
from onboard.hf.old.given_logits import giving_logits
from onboard.hf.old.gone import GoneModule
from onboard.hf.parameters_on import without_memory
from onboard.plain_config import OLD_ROPE_SCALING, add_old_defaults

_INPUTS = ("position_ids", "attention_mask", "use_cache")
_LAYERS, _TIES = "num_hidden_layers", "tie_word_embeddings"
_failed: dict[str, None] = {}
"""What to say of methods for first values that failed."""


def bring_up_to_date(
    package: str, config_class: Any, model_class: Any, config: Mapping[str, Any]
) -> list[str]:
    """Change the classes of a repository, and make a model of the config with them; return what
    was changed.

    Parameters of that model are on the meta device: it takes no memory.
    """
    keys = model_class._tied_weights_keys
    have_own_defaults(config_class)
    facts = [*_config_facts(config_class, model_class, config), *_taking_positions(model_class)]
    facts += own_configs.read_made_configs(package)
    if not own_configs.is_own_of_transformers(config_class.__name__):
        facts += own_configs.lend_fields(config_class, _made(config_class, config), package)
    model_class.forward = giving_logits(_leaving_inputs(model_class.forward))
    model_class.__init__ = telling_wrappers_apart(model_class.__init__, package)
    facts += make_anew(package, model_class)
    for own in _model_classes(package):
        if not isinstance(own._tied_weights_keys, dict):
            own._tied_weights_keys = {}
        if "_init_weights" in vars(own):
            own._init_weights = _keeping_shapes(vars(own)["_init_weights"])
        if "tie_weights" in vars(own):
            own.tie_weights = _tying(own.tie_weights)
        own._backward_compatibility_gradient_checkpointing = _as_it_is  # which is for training
    facts += [*_posted(package), *_of_one_dtype(package), *_plainly_saved(model_class)]
    facts += _choosing_eager(package)
    made = _made(config_class, config)
    facts += rotary_forms.give_plain_rotary(package, made)
    try:
        with without_memory(computing=True):
            model = model_class(made)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        facts += _agreeing_on_eager(package)
        made = _made(config_class, config)
        with without_memory(computing=True):
            model = model_class(made)
    if getattr(made, "_attn_implementation", None) == flash_by_name.NAME:
        facts += flash_by_name.allow_flash_by_name()  # which a constructor chose
    facts += _told_apart(model, package)
    if not keys or isinstance(keys, list | tuple) or _are_modules(keys, model):
        found = bool(keys) and _is_of_late_4(package) or _version(config) in _FINDING_HEADS
        model_class._tied_weights_keys = _tied(model, made, package, found=found)
        facts.append(f"the weights that transformers 4 ties: {model_class._tied_weights_keys}")
    declared = (model_class._tied_weights_keys or {}).keys() if made.tie_word_embeddings else set()
    facts += _wholly_saved(model_class, dict(model.named_parameters()).keys() - declared)
    if shared := _shared_by_modules(model, in_modules=True).keys() - declared:
        model_class.save_pretrained = _saving_once(model_class.save_pretrained)
        facts.append(f"modules share their weights, which are saved once: {min(shared)} and others")
    return facts + _layer_count(config_class, made, model)


def _made(config_class: Any, config: Mapping[str, Any]) -> Any:
    """Return a config with what lies inside."""
    return config_class.from_dict(json_floats(deepcopy(dict(config))))


class _Fixed:
    """A class attribute that objects have, too, whatever their constructor assigns."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __get__(self, config: Any, owner: Any) -> Any:
        return self.value

    def __set__(self, config: Any, value: Any) -> None:
        """Leave it as it is."""


def _as_it_is(model: Any) -> None:
    """Leave a model as it is."""


def _leaving_inputs(forward: Any) -> Any:
    """Return a forward that leaves what it is given by name as it is: code may change it in place."""

    @functools.wraps(forward)
    def leaving(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = {
            name: item.clone() if isinstance(item, torch.Tensor) else item
            for name, item in kwargs.items()
        }
        return forward(self, *args, **own)

    return leaving


def _told_apart(model: nn.Module, package: str) -> Iterator[str]:
    """Give classes of the repository's modules names of their own, where a model has modules of
    another class of that name, too: of transformers, or of another file.
    """
    classes = list(dict.fromkeys(type(module) for module in model.modules()))
    for cls in classes:
        names = [other.__name__ for other in classes if other is not cls]
        if cls.__name__ in names and cls.__module__.split(".")[0] == package:
            yield f"{cls.__name__} of {cls.__module__} is called Own{cls.__name__}"
            cls.__name__ = f"Own{cls.__name__}"


def _config_facts(config_class: Any, model_class: Any, config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("pruned_heads"):
        raise OnboardError(
            "config.json has pruned_heads: transformers 4 left these out, and transformers 5 does not",
            hint="Use a checkpoint that keeps all its heads",
        )
    if (_version(config) or 4) < 500:
        yield from own_configs.inherit_constructors(config_class)
    if "rope_scaling" not in vars(config_class):
        config_class.rope_scaling = OLD_ROPE_SCALING
    if not hasattr(config_class, _TIES) or _was_overwritten(config_class, model_class, config):
        setattr(config_class, _TIES, True)  # the default of its time
    add_old_defaults(config_class)
    own_configs.read_moved_fields(config_class)
    own_configs.keep_own_steps(config_class)
    take_by_position(config_class)
    if config_class.model_type != config["model_type"]:
        own = f"{config_class.__name__}.model_type is {config_class.model_type!r}"
        yield f"{own}; the model type is {config['model_type']!r}"
        config_class.model_type = config["model_type"]
    untold = {key: value for key, value in config.items() if key != "model_type"}
    if "model_type" in vars(config_class.from_dict(json_floats(deepcopy(untold)))):
        config_class.model_type = _Fixed(config["model_type"])
        yield f"{config_class.__name__} sets its model_type, which stays {config['model_type']!r}"
    known = model_class.config_class
    if known is None or known is not config_class:
        model_class.config_class = config_class


def _was_overwritten(config_class: Any, model_class: Any, config: Mapping[str, Any]) -> bool:
    """Whether what a class says of ties, beside its constructor, is code for transformers 4, whose
    base's constructor overwrote it, with True where config.json says nothing.
    """
    then = (
        isinstance(model_class._tied_weights_keys, list | tuple) and (_version(config) or 4) < 500
    )
    calls_base = "super" in inspect.unwrap(config_class.__init__).__code__.co_names
    return then and (calls_base or _TIES not in config_class.__dataclass_fields__)


def _model_classes(package: str) -> list[Any]:
    """Return the model classes that the repository's files define."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == package]
    values = {id(value): value for module in modules for value in vars(module).values()}
    return [
        value
        for value in values.values()
        if isinstance(value, type)
        and issubclass(value, PreTrainedModel)
        and value.__module__.split(".")[0] == package
    ]


def _keeping_shapes(init: Any) -> Any:
    """Have first values keep the shapes that the constructor gives: those of checkpoints. Parameters
    without memory get none. `init` is a method of any kind, static ones too; where it fails, what
    the constructor gave stays: loading a checkpoint asks for no first values.
    """

    @functools.wraps(getattr(init, "__func__", init))
    def keeping(self: Any, module: nn.Module) -> None:
        before = {name: item.data for name, item in module.named_parameters(recurse=False)}
        if any(data.is_meta for data in before.values()):
            return
        try:
            init.__get__(self, type(self))(module)
        except Exception as error:  # it is not for what a checkpoint has
            what = f"{type(self).__name__}._init_weights fails for {type(module).__name__}"
            _failed[f"{what} ({one_line(error)}); its first values are the constructor's"] = None
        for name, data in before.items():
            if module._parameters[name].shape != data.shape:  # type: ignore[union-attr]
                module._parameters[name].data = data  # type: ignore[union-attr]

    return keeping


def failed_first_values() -> list[str]:
    """Return what to say of methods for first values that have failed."""
    return list(_failed)


def _tying(tie: Any) -> Any:
    """Have a method that ties weights take the arguments that transformers 5 gives it."""
    parameters = inspect.signature(tie).parameters
    if any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
        return tie

    @functools.wraps(tie)
    def tying(self: Any, **arguments: Any) -> None:
        tie(self, **{name: value for name, value in arguments.items() if name in parameters})

    return tying


def _posted(package: str) -> list[str]:
    """Have constructors end with `post_init()` where none of the repository's calls it."""
    without = [
        cls
        for cls in _model_classes(package)
        if "__init__" in vars(cls) and not _calls_post_init(cls, package)
    ]
    for cls in without:
        cls.__init__ = _with_post_init(cls.__init__)
    names = [cls.__name__ for cls in without]
    return [f"{name} does not call post_init(); it is called after it is made" for name in names]


def _of_one_dtype(package: str) -> Iterator[str]:
    """Give what constructors make in half precision the model's dtype, where no code minds."""
    modules = {key: item for key, item in sys.modules.items() if key.startswith(f"{package}.")}
    for name in [key for key, item in modules.items() if not isinstance(item, GoneModule)]:
        source = module_source(name)
        for key, node in source.classes.items():
            cls: Any = vars(sys.modules[name]).get(key)  # it may have been imported anew
            if cls is not None and takes_models_dtype(node):
                cls.__init__ = in_models_dtype(cls.__init__)
                yield f"{key} makes parameters in half precision; they get the model's dtype"


def _calls_post_init(model_class: Any, package: str) -> bool:
    return any(
        "post_init" in cls.__init__.__code__.co_names
        for cls in model_class.__mro__
        if cls.__module__.split(".")[0] == package and hasattr(cls.__init__, "__code__")
    )


def _with_post_init(init: Any) -> Any:
    def with_post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if type(self).__init__ is with_post_init:  # a subclass has more to make
            self.post_init()

    with_post_init.__wrapped__ = init  # type: ignore[attr-defined]
    return with_post_init


def _choosing_eager(package: str) -> Iterator[str]:
    """Have classes whose method for transformers 4 took eager attention where it would have taken
    sdpa say so as transformers 5 reads it.
    """
    for own in _model_classes(package):
        if own._supports_sdpa and _chosen_by(own) == "eager":
            own._supports_sdpa = False
            yield f"{own.__name__} chose eager attention by _check_and_enable_sdpa(); it gets that"


def _agreeing_on_eager(package: str) -> Iterator[str]:
    """Have all model classes take eager attention where one within another takes nothing else."""
    classes = list(_model_classes(package))
    alone = [own.__name__ for own in classes if not own._supports_sdpa]
    for own in classes:
        own._supports_sdpa = False
    yield f"{', '.join(alone)} take eager attention alone; the whole model gets that"


def _chosen_by(model_class: Any) -> str | None:
    """Return the attention that a class chose where nobody had named one."""
    config: Any = PretrainedConfig()
    chosen = model_class._check_and_enable_sdpa(config, hard_check_only=False)
    return getattr(chosen, "_attn_implementation", None)


def _are_modules(keys: Mapping[str, str], model: nn.Module) -> bool:
    """Whether a table of ties names modules in place of their weights."""
    modules = dict(model.named_modules())
    return all(name in modules for pair in keys.items() for name in pair)


_FINDING_HEADS = range(454, 500)
"""Versions of transformers that find a model's `lm_head` where its class does not say which module
is its output embeddings, as major * 100 + minor.
"""
_LATE_NAMES = {"TransformersKwargs", "check_model_inputs"}
"""What transformers has since then, and modeling code imports."""


def _version(config: Mapping[str, Any]) -> int | None:
    """Return the version of transformers that a config.json names, as major * 100 + minor."""
    named = re.match(r"(\d+)\.(\d+)", str(config.get("transformers_version")))
    return int(named[1]) * 100 + int(named[2]) if named else None


def _is_of_late_4(package: str) -> bool:
    """Whether a repository's model files import names that came with such a version."""
    files = {sys.modules[cls.__module__] for cls in _model_classes(package)}
    return any(_LATE_NAMES & vars(module).keys() for module in files)


def _tied(model: Any, made: Any, package: str, *, found: bool) -> dict[str, str]:
    """Return what transformers 4 ties, whatever its lists say, and what the constructor has tied:
    the output embeddings, of a class that says which they are or where they are `found` all the
    same, to those of the input.
    """
    if made.tie_word_embeddings and _ties_alone(model, package):
        model.tie_weights()
    shared = _shared_by_modules(model)
    if not made.tie_word_embeddings or _ties_alone(model, package):
        return shared
    says = type(model).get_output_embeddings.__module__.split(".")[0] == package
    if not says and not found:
        return shared
    try:
        inputs, output = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:  # it says which its output's are, and not which its input's
        return shared
    names = {id(module): name for name, module in model.named_modules()}
    if output is None or output is inputs or not hasattr(output, "weight"):
        return shared
    return {f"{names[id(output)]}.weight": f"{names[id(inputs)]}.weight"}


def _ties_alone(model: Any, package: str) -> bool:
    """Whether a class has a method for ties in the place of transformers', which it does not call."""
    tie = inspect.unwrap(type(model).tie_weights)
    return tie.__module__.split(".")[0] == package and "super" not in tie.__code__.co_names


def _shared_by_modules(model: nn.Module, *, in_modules: bool = False) -> dict[str, str]:
    """Return the parameters that several modules have as one, each by the name of the first;
    `in_modules`: also those of a module that several have.
    """
    first: dict[int, str] = {}
    return {
        name: first[id(parameter)]
        for path, module in model.named_modules(remove_duplicate=not in_modules)
        for name, parameter in module.named_parameters(path, recurse=False)
        if first.setdefault(id(parameter), name) != name
    }


def _plainly_saved(model_class: Any) -> Iterator[str]:
    """Have a model save its tensors and config, and nothing that a method of its own adds."""
    if model_class.save_pretrained is not PreTrainedModel.save_pretrained:
        model_class.save_pretrained = PreTrainedModel.save_pretrained
        yield f"{model_class.__name__} saves more than tensors and config, which is left out"


def _wholly_saved(model_class: Any, own: Set[str]) -> Iterator[str]:
    """Have a model save its own parameters, which it may leave out as if they were tied."""
    left_out = set(model_class._keys_to_ignore_on_save or ())
    if kept := sorted(left_out & own):
        model_class._keys_to_ignore_on_save = sorted(left_out.difference(kept))
        yield f"{model_class.__name__} leaves {kept[0]} out of checkpoints, which is not tied; it is saved"


def _saving_once(save: Any) -> Any:
    """Have a model save what several modules have as one under the name of the first, as
    transformers 4 does.
    """

    @functools.wraps(save)
    def saving(self: Any, folder: Any, **kwargs: Any) -> None:
        others = _shared_by_modules(self, in_modules=True).keys()
        state = {name: item for name, item in self.state_dict().items() if name not in others}
        save(self, folder, **{"state_dict": state, **kwargs})

    return saving


def _taking_positions(model_class: Any) -> Iterator[str]:
    """Have a model's forward take the inputs that every other one has; those that it has not make
    no difference to it.
    """
    forward = model_class.forward
    parameters = inspect.signature(forward).parameters
    absent = [name for name in _INPUTS if name not in parameters]
    if not absent or any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
        return

    @functools.wraps(forward)
    def taking(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = {name: value for name, value in kwargs.items() if name not in absent}
        return forward(self, *args, **known)

    model_class.forward = taking
    yield f"{model_class.__name__}.forward takes no {' and '.join(absent)}; they are left out"


def _layer_count(config_class: Any, made: PretrainedConfig, model: nn.Module) -> list[str]:
    """See to it that the number of layers goes by its usual name: that of the longest list of
    modules.
    """
    if isinstance(getattr(made, _LAYERS, None), int):
        return []
    layers = max((len([*module.children()]) for module in _outermost_lists(model)), default=0)
    fields = [name for name, value in made.to_dict().items() if type(value) is int]
    named = [name for name in fields if getattr(made, name, None) == layers]
    found = sorted(named, key=lambda name: "layer" not in name)
    if not found and layers:  # it lies deeper: in a dict, say
        setattr(config_class, _LAYERS, layers)
        return [f"the config has no {_LAYERS}; the model has {layers}"]
    if not found:
        return []
    config_class.attribute_map = {**config_class.attribute_map, _LAYERS: found[0]}
    return [f"the config has no {_LAYERS}; {found[0]} has the number of layers"]


def _outermost_lists(model: nn.Module) -> list[nn.Module]:
    lists: list[nn.Module] = []
    waiting: list[nn.Module] = [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, nn.ModuleList | nn.Sequential):
            lists.append(module)
        else:
            waiting += module.children()
    return lists
