"""The plan of a run by its model file's own code, on tensors without values: seconds sooner than
by its graph.

Parameters, tables, inputs and caches are those of the run; a table that no layer reads, which a
graph drops, counts here. Activations are those of the
code as it is written, before transforms fuse any of it: bounds.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard.cache.budget import CUDA_RESERVE, CachePlan, Limits, MemoryPlan
from onboard.cache.resources import CacheResource
from onboard.config import RuntimeConfig, SettledConfig
from onboard.content import content_path
from onboard.hf.json_floats import json_floats
from onboard.quantised.said import says_float8_cache
from onboard.runtime.limits import ON_CPU, ON_GPU, max_positions, settled
from onboard.runtime.sketch import stand_in
from onboard.runtime.sketch.modules import Buffer, Parameter
from onboard.runtime.sketch.storage import DTYPES, INT64, MEMORY, DType, UnsureError
from onboard.runtime.sketch.tensor import Tensor
from onboard.untrusted.bounds import check_config, read_json

SPAN = 4
"""Between the bounds of what a graph's intermediate tensors take: it fuses code, and copies
sometimes.
"""
_ODD = 10007
"""Tokens with which caches are found: a prime, so that a size that it divides is one of tokens."""


@dataclass
class _Peaks:
    """The most bytes that a step's tensors take at a time."""

    inside: int
    """Up to the head, that reads the rows alone whose logits are asked for."""
    whole: int


def sketch(checkpoint: Path, runtime: RuntimeConfig, *, gpu: bool, root: Path) -> MemoryPlan:
    """Return the plan for a device of any memory; raise `UnsureError` where shapes alone do not
    tell it.

    Stand-ins for torch have to be in place, and stay so.
    """
    _refuse_what_is_not_read(runtime)
    config = _read_config(checkpoint)
    if runtime.kv_cache_config.dtype == "auto" and says_float8_cache(
        _values(checkpoint), checkpoint
    ):
        raise UnsureError("the checkpoint asks for a cache of its own")
    MEMORY.default = _dtype(runtime, config, gpu=gpu)
    model = _built(config, root)
    limited, chosen = settled(runtime, config, _first_position(config), ON_GPU if gpu else ON_CPU)
    most = max(limited.max_num_tokens, limited.max_batch_size)
    cache = _caches(model, limited, chosen, most)
    stand_in.CALLS.clear()
    prefill = _peaks(model, min(most, limited.max_batch_size * limited.max_seq_len))
    parameters, tables = model.tensors(Parameter, Buffer)
    return MemoryPlan(
        cache=cache,
        parameters=sum(each.numel() for each in parameters),
        weights=sum(each.nbytes for each in parameters),
        tables=sum(each.nbytes for each in tables),
        inputs=_inputs(cache),
        activations=2 * prefill.inside,
        step_tokens=most,
        graphs=_graphs(model, limited) if gpu else 0,
        reserve=CUDA_RESERVE if gpu else 0,
        memory=0,
        positions=max_positions(config) or limited.max_seq_len,
        span=SPAN,
        fraction=_share(limited, chosen),
        chosen=tuple(sorted(chosen)),
    )


def _refuse_what_is_not_read(runtime: RuntimeConfig) -> None:
    for name in ("model_kwargs", "transforms", "batch_invariant", "world_size", "dist_mapping"):
        if getattr(runtime, name) != RuntimeConfig.model_fields[name].get_default(
            call_default_factory=True
        ):
            raise UnsureError(f"the configuration has {name}")
    if runtime.mode != "graph":
        raise UnsureError(f"mode {runtime.mode} has no model file")


def _values(checkpoint: Path) -> Any:
    return read_json(checkpoint / "config.json")


def _read_config(checkpoint: Path) -> Any:
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    values = _values(checkpoint)
    check_config(values, checkpoint / "config.json")
    kind = values.get("model_type", "")
    if kind not in auto.CONFIG_MAPPING_NAMES:
        raise UnsureError(f"transformers has no config class for {kind!r}")
    package = f"transformers.models.{auto.model_type_to_module_name(kind)}"
    name = auto.CONFIG_MAPPING_NAMES[kind]
    config_class = _config_class(package, name)
    with stand_in.known_alone():
        config = config_class.from_dict(json_floats(values))
    if config.sub_configs:
        raise UnsureError("the config has parts")
    return config


def _config_class(package: str, name: str) -> Any:
    """Return a config class, from the one of a package's modules that has it."""
    folder = Path(importlib.import_module(package).__path__[0])
    for path in sorted(folder.glob("configuration_*.py")):
        module = importlib.import_module(f"{package}.{path.stem}")
        if hasattr(module, name):
            return getattr(module, name)
    raise UnsureError(f"{package} has no {name}")


def _dtype(runtime: RuntimeConfig, config: Any, *, gpu: bool) -> DType:
    if runtime.dtype != "auto":
        return DTYPES[runtime.dtype]
    if not gpu:
        return DTYPES["float32"]
    return config.dtype if isinstance(config.dtype, DType) else DTYPES["bfloat16"]


def _built(config: Any, root: Path) -> Any:
    from onboard.graph.export.config_windows import windowless_layer
    from onboard.modeling import load_model_file, registered_model

    path = content_path("models", f"modeling_{config.model_type}.py", root=root)
    if not path.is_file():
        raise UnsureError(f"there is no {path.name}")
    load_model_file(path)
    model_class: Any = registered_model(type(config).__name__)
    if hasattr(model_class, "codebooks") or hasattr(model_class, "eager_modules"):
        raise UnsureError("the model has codebooks or towers")
    with stand_in.known_alone():
        model = model_class(config)
    if windowless_layer(model, config) is not None:
        raise UnsureError("a layer has no window, and its type has one")
    return model


def _first_position(config: Any) -> int:
    from onboard.modeling import first_position

    return first_position(config)


# Caches: what the transforms' own descriptors say of the calls.


def _caches(model: Any, runtime: SettledConfig, chosen: frozenset[str], most: int) -> CachePlan:
    from onboard.graph.cache_init.interface import _snapshots

    MEMORY.tokens = _ODD
    _run(model, _ODD)
    MEMORY.tokens = 0
    tokens, size = runtime.kv_cache_config.max_tokens, runtime.kv_cache_config.tokens_per_block
    dtype = runtime.kv_cache_config.dtype
    states = runtime.kv_cache_config.mamba_ssm_cache_dtype
    asked = (None if name == "auto" else DTYPES[name] for name in (dtype, states))
    resources = tuple(_resources(size, *asked))
    if "max_tokens" in chosen and not sum(each.bytes_per_page for each in resources):
        tokens = None
    limits = Limits(
        runtime.max_batch_size,
        runtime.max_seq_len,
        most,
        size,
        snapshots=_snapshots(runtime),
        max_tokens=tokens,
    )
    return CachePlan(limits, resources)


def _resources(
    page_size: int, dtype: DType | None, states: DType | None
) -> Iterator[CacheResource]:
    """Yield what the calls keep, in the order in which the pipeline puts caches in."""
    from onboard.graph.assembly.assemble import shipped_keys
    from onboard.graph.transform import get_transform
    from onboard.ops import attention_ops, stateful_ops

    left = {name for name, _ in stand_in.CALLS} & (stateful_ops() | attention_ops())
    for key in shipped_keys():
        if not key.startswith("insert_cached_"):
            continue
        descriptor: Any = getattr(get_transform(key), "descriptor", None)
        if descriptor is None:
            continue
        name = descriptor.source.__name__
        left.discard(name)
        for _, arguments in (call for call in stand_in.CALLS if call[0] == name):
            node = stand_in.Node(descriptor.source, _in_rows(arguments))
            descriptor.check(node)
            kept = descriptor.resources(node, page_size, dtype)
            yield from descriptor.narrowed(kept, states).values()
    if left:
        raise UnsureError(f"no transform puts a cache in for {', '.join(sorted(left))}")
    if changed := {name for name, _ in stand_in.CALLS} & {"torch_attention_repeat_kv"}:
        raise UnsureError(f"transforms change {', '.join(changed)}")


def _in_rows(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call with tokens before heads, as `match_attention_layout` has
    them.
    """
    if arguments.get("layout") != "bnsd":
        return arguments
    turned = {name: arguments[name].transpose(1, 2) for name in ("query", "key", "value")}
    return {**arguments, **turned, "layout": "bsnd"}


# Activations.


def _run(model: Any, tokens: int) -> Any:
    row = Tensor((1, tokens), INT64), Tensor((1, tokens), INT64)
    with stand_in.known_alone():
        return model(*row).logits


def _peaks(model: Any, tokens: int) -> _Peaks:
    MEMORY.peak = start = MEMORY.live
    _run(model, tokens)
    return _Peaks(MEMORY.before_last_linear - start, MEMORY.peak - start)


def _graphs(model: Any, runtime: SettledConfig) -> int:
    from onboard.graph.compile.capture import capture_sizes

    if runtime.compile_backend not in ("auto", "torch-cudagraph", "torch-opt"):
        return 0
    sizes = capture_sizes(runtime.cuda_graph_config.batch_sizes, runtime.max_batch_size)
    if not sizes:
        return 0
    return 2 * _peaks(model, sizes[-1]).whole


def _inputs(cache: CachePlan) -> int:
    from onboard.cache.step_buffer import buffer_bytes

    limits = cache.limits
    return buffer_bytes(
        sequences=limits.max_batch_size + 1,
        tokens=limits.max_num_tokens + 1,
        pages_per_sequence=limits.pages_per_sequence,
        groups=max(len(cache.windows), 1),
    )


def _share(runtime: SettledConfig, chosen: frozenset[str]) -> float:
    from onboard.cache.budget import HOST_SHARE

    return (
        HOST_SHARE if "max_tokens" in chosen else runtime.kv_cache_config.free_gpu_memory_fraction
    )
