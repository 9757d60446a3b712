"""transformers' model in far less memory than its weights take: each layer is read from the file
when it is called.

Its own forward pass runs unchanged, once a sequence, each in a thread of its own. Before a layer
the threads wait for one another; the last one to come reads the layer's weights, and when all have
passed it they are given back.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from onboard.errors import OnboardError
from onboard.graph.weight_load.computed_tables import saved_tables
from onboard.graph.weight_load.safetensors_folder import Checkpoint

Rounding = Callable[[str, torch.Tensor], torch.Tensor]
# longest that threads wait for one another: a sequence that takes another way would never come
_SECONDS = 600.0


class LayerByLayer:
    """A model of transformers whose parameters are on the meta device, and the checkpoint that they
    are read from.

    `rounding` is applied to every parameter, given its name, when it has been read.
    """

    def __init__(
        self, model: Any, checkpoint: Checkpoint, device: torch.device, rounding: Rounding
    ) -> None:
        self.model, self.checkpoint, self.device, self.rounding = (
            model,
            checkpoint,
            device,
            rounding,
        )
        self.units = dict(_units(model))
        self.tied: dict[str, str] = dict(model.all_tied_weights_keys)
        self._files = self._files_of_parameters()
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self._tables = set(saved_tables(model))
        self._load_tables()
        inside = {name for path in self.units for name in self._names(path)}
        self._load([name for name, _ in model.named_parameters() if name not in inside])

    def run(self, calls: Sequence[Callable[[Any], torch.Tensor]]) -> list[torch.Tensor]:
        """Return what each call makes of the model; all of them have to pass the same layers in the
        same order.

        Raises:
            OnboardError: they do not, or a layer's weights are read without calling it.
        """
        results: list[Any] = [None] * len(calls)
        barriers = {path: self._barriers(path, len(calls)) for path in self.units}
        hooks = [
            hook for path, unit in self.units.items() for hook in _waiting(unit, *barriers[path])
        ]

        def work(number: int) -> None:
            try:
                with torch.inference_mode():
                    results[number] = calls[number](self.model)
            except Exception as error:  # whatever a model's code raises ends the other threads, too
                results[number] = error
                for barrier in (each for pair in barriers.values() for each in pair):
                    barrier.abort()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for hook in hooks:
            hook.remove()
        return _checked(results)

    def _barriers(self, path: str, count: int) -> tuple[threading.Barrier, threading.Barrier]:
        names = self._names(path)
        return (
            threading.Barrier(count, lambda: _apart(lambda: self._load(names)), timeout=_SECONDS),
            threading.Barrier(count, lambda: self._drop(names), timeout=_SECONDS),
        )

    def _names(self, path: str) -> list[str]:
        return [
            name
            for name, _ in self.units[path].named_parameters(prefix=path, remove_duplicate=False)
        ]

    def _files_of_parameters(self) -> dict[str, list[str]]:
        """Return the checkpoint's names by the parameter that they become, or the first one of
        several.
        """
        rules = get_model_conversion_mapping(self.model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        found: dict[str, list[str]] = defaultdict(list)
        state, prefix = self.model.state_dict(), self.model.base_model_prefix
        for name in self.checkpoint.names():
            target, _ = rename_source_key(name, renamings, converters, prefix, state)
            found[target].append(name)
        return found

    @torch.inference_mode()
    def _load_tables(self) -> None:
        """Read the buffers that the checkpoint has: they are kept, whatever layer they are of."""
        files = [file for name in sorted(self._tables) for file in self._files.get(name, ())]
        _read(self.model, {file: self.checkpoint.read(file) for file in files}, self.device)

    @torch.inference_mode()
    def _load(self, names: Sequence[str]) -> None:
        """Read parameters; a tied one by way of the one that the checkpoint has."""
        sources = {
            name: name if self._files.get(name) else self.tied.get(name, name) for name in names
        }
        modules = {name.rpartition(".")[0] for name in sources.values()}
        files = [
            file
            for target in self._files
            if target.rpartition(".")[0] in modules and target not in self._tables
            for file in self._files[target]
        ]
        _read(self.model, {file: self.checkpoint.read(file) for file in files}, self.device)
        read = {name: _parameter(self.model, source) for name, source in sources.items()}
        if missing := [name for name, parameter in read.items() if parameter.is_meta]:
            raise OnboardError(
                f"transformers finds no {missing[0]}", hint="Fetch the checkpoint again"
            )
        for name, parameter in read.items():
            _place(self.model, name, self.rounding(name, parameter))
        self._drop([source for source in sources.values() if source not in sources])

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            _place(self.model, name, _parameter(self.model, name).to("meta"))


def _units(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are read one at a time: members of lists, as layers are, and what has
    no parts.
    """
    for name, child in module.named_children():
        if isinstance(module, nn.ModuleList) or not any(True for _ in child.children()):
            if any(True for _ in child.parameters()):
                yield path + name, child
        else:
            yield from _units(child, f"{path}{name}.")


def _apart(work: Callable[[], None]) -> None:
    """Work in a thread of its own, in which no mode changes what torch's functions do, as one may
    around the model.
    """
    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result()


def _waiting(unit: nn.Module, before: threading.Barrier, after: threading.Barrier) -> list[Any]:
    return [
        unit.register_forward_pre_hook(lambda *_: void(before.wait())),
        unit.register_forward_hook(lambda *_: void(after.wait())),
    ]


def void(_: object) -> None:
    """Return nothing, which leaves a hook's inputs and outputs as they are."""


def _read(model: Any, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put tensors of a checkpoint into the model, by transformers' own rules."""
    rules = get_model_conversion_mapping(model)
    dtype = next(model.parameters()).dtype
    config = LoadStateDictConfig(dtype=dtype, device_map={"": device}, weight_mapping=rules)
    convert_and_load_state_dict_in_model(model=model, state_dict=tensors, load_config=config)


def _parameter(model: nn.Module, name: str) -> torch.Tensor:
    return model.get_parameter(name)


def _place(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def _checked(results: list[Any]) -> list[torch.Tensor]:
    """Return the results; raise what ended the first thread that failed for a reason of its own."""
    failed = [each for each in results if isinstance(each, Exception)]
    first = next(
        (each for each in failed if not isinstance(each, threading.BrokenBarrierError)), None
    )
    if first is not None:
        reason = " ".join(f"{type(first).__name__}: {first}".split())[:300]
        raise OnboardError(f"transformers' model does not run layer by layer ({reason})") from first
    if failed:
        raise OnboardError(
            "transformers' model does not run layer by layer: sequences take different ways through it"
        )
    return results
