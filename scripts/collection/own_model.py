"""A model by its repository's own class, where its year's transformers, a CPU and few packages are."""

from __future__ import annotations

import contextlib
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

from scripts.collection.absent import stand_in_for_absent
from scripts.collection.table import table


def own_model(folder: Path) -> Any:
    """Return the model of a folder by its own class, in float32, on the CPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    _copy_modules(folder)
    stand_in_for_absent(folder)
    torch.manual_seed(0)
    if not torch.cuda.is_available():  # some constructors put tables there
        torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
        torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment]
        torch.cuda.default_stream = lambda *_: None  # type: ignore[assignment]
        for mark in ("mark", "range_push", "range_pop"):
            setattr(torch.cuda.nvtx, mark, lambda *_: None)
        _change_arguments(_on_cpu)
    if table()[folder.name].get("kernels_of"):
        _change_arguments(_in_float32)
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=True)
    config.torch_dtype = torch.float32
    config._name_or_path = str(folder)  # which a class of its own may leave out
    asked = json.loads((folder / "config.json").read_text()).get("attn_implementation")
    how = {"attn_implementation": asked} if asked else {}
    if table()[folder.name].get("loaded_alone"):
        return _without_first_values(config, how).float().eval()
    try:
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True, **how)
    except TypeError:  # transformers before 4.36 hands it to the class
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    except ValueError as error:
        model = _made_otherwise(folder, config, str(error))
    except AttributeError:  # what sets first values fails
        model = _without_first_values(config, how)
    return model.float().eval()


def _without_first_values(config: Any, how: dict[str, Any]) -> Any:
    """Make a model as loading a checkpoint does, which sets no first values."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import no_init_weights

    told = "_enable" in inspect.signature(no_init_weights).parameters  # before 4.53
    with no_init_weights(**({"_enable": True} if told else {})):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=True, **how)


def _made_otherwise(folder: Path, config: Any, error: str) -> Any:
    """Make a model whose inner model takes eager attention alone, or whose class names another config
    class than auto_map does, as whoever uses that code does.
    """
    from transformers import AutoModelForCausalLM
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    if "scaled_dot_product_attention" in error:
        how = {"trust_remote_code": True, "attn_implementation": "eager"}
        return AutoModelForCausalLM.from_config(config, **how)
    if "config_class" not in error:
        raise ValueError(error)
    name = config.auto_map["AutoModelForCausalLM"]
    return get_class_from_dynamic_module(name, str(folder))(config)


def _on_cpu(item: Any) -> Any:
    """Return the CPU for a GPU, `device="cuda"`, and anything else as it is."""
    import torch

    on_gpu = isinstance(item, str | torch.device) and str(item).startswith("cuda")
    return "cpu" if on_gpu else item


def _in_float32(item: Any) -> Any:
    """Return float32 for a dtype in half precision, and anything else as it is."""
    import torch

    half = isinstance(item, torch.dtype) and item in (torch.bfloat16, torch.float16)
    return torch.float32 if half else item


def _change_arguments(changed: Any) -> None:
    """Have torch's functions and methods get other arguments than the code says, from here on."""
    from torch.overrides import TorchFunctionMode

    class Changed(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*map(changed, args), **{k: changed(v) for k, v in (kwargs or {}).items()})

    Changed().__enter__()  # type: ignore[no-untyped-call]


def _copy_modules(folder: Path) -> None:
    """Copy all modules to where transformers runs them: of those that a local folder's modules
    import it finds the neighbours only there.
    """
    from transformers.dynamic_module_utils import create_dynamic_module
    from transformers.utils import HF_MODULES_CACHE, TRANSFORMERS_DYNAMIC_MODULE_NAME

    place = Path(TRANSFORMERS_DYNAMIC_MODULE_NAME) / folder.name
    create_dynamic_module(place)
    for file in folder.glob("*.py"):
        shutil.copy(file, Path(HF_MODULES_CACHE) / place / file.name)
