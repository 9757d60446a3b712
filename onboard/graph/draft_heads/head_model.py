"""A head for multi-token prediction as a module: the model around one layer like its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from onboard.errors import UsageError
from onboard.graph.draft_heads.head_tensors import HeadTensors
from onboard.graph.factory import ModelFactory
from onboard.graph.weight_load.parameters import set_parameter

HIDDEN = "hidden_states"
"""The input that has, of each token before the one that is embedded, what the head begins with."""


class ModelParts:
    """Where a generated model has its layers and its last norm, by what they are."""

    def __init__(self, model: nn.Module) -> None:
        """Raises `UsageError` where they cannot be told."""
        lists = {
            name: sum(parameter.numel() for parameter in module.parameters())
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList)
        }
        self.path = max(lists, key=lambda name: (lists[name], -len(name)), default="")
        parent, _, name = self.path.rpartition(".")
        self.list_name: str = name
        self.owner = model.get_submodule(parent)
        norms = [
            (name, module)
            for name, module in self.owner.named_children()
            if [(key, each.ndim) for key, each in module.named_parameters()] == [("weight", 1)]
        ]
        if not self.path or len(norms) != 1:
            raise UsageError(
                f"the model has {len(norms)} norms beside its layers, so its last one is not told",
                hint="Heads for multi-token prediction need one",
            )
        [(self.norm_name, self.norm)] = norms

    @property
    def layers(self) -> nn.ModuleList:
        """The layers."""
        found = self.owner.get_submodule(self.list_name)
        assert isinstance(found, nn.ModuleList)
        return found

    def leave_out_layers(self) -> None:
        """Put modules without weights, which do nothing, in the place of all layers."""
        for index in range(len(self.layers)):
            self.layers[index] = LeftOutLayer()


class LeftOutLayer(nn.Module):
    """In the place of a layer: gives back what it is given."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return the first argument."""
        return hidden_states


class JoiningLayer(nn.Module):
    """A layer that reads a projection of two normed inputs: the embedding of a token and the hidden
    state of the token before it (section 2.2, equation 21).
    """

    def __init__(self, layer: nn.Module, norm: nn.Module, head: HeadTensors) -> None:
        super().__init__()
        weight, bias = norm.get_parameter("weight"), head.projection_bias is not None
        size, device, dtype = len(weight), weight.device, weight.dtype
        self.embedding_norm, self.hidden_norm = deepcopy(norm), deepcopy(norm)
        self.projection = nn.Linear(2 * size, size, bias=bias, device=device, dtype=dtype)
        self.layer = layer
        self.hidden_first = head.hidden_first
        self.given: list[torch.Tensor] = []

    @contextmanager
    def reading(self, hidden_states: torch.Tensor) -> Iterator[None]:
        """Read these hidden states [batch, sequence, hidden] in what is run inside."""
        self.given.append(hidden_states)
        try:
            yield
        finally:
            self.given.pop()

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; `hidden_states` [batch, sequence, hidden] are the embeddings."""
        parts = self.embedding_norm(hidden_states), self.hidden_norm(self.given[-1])
        joined = torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1)
        return self.layer(self.projection(joined), *args, **kwargs)


class DraftHead(nn.Module):
    """A generated model of which one layer is left, which joins two inputs.

    Embedding, rotary tables and what comes after the last norm are the model's. Parameters have the
    names that the checkpoint has for them first, and those of the module besides.
    """

    def __init__(self, model: nn.Module, head: HeadTensors) -> None:
        super().__init__()
        parts = ModelParts(model)
        layer = parts.layers[head.layer]
        joining = JoiningLayer(layer, parts.norm, head)
        own: dict[str, nn.Module] = {
            head.embedding_norm: joining.embedding_norm,
            head.hidden_norm: joining.hidden_norm,
            head.projection: joining.projection,
        }
        if head.projection_bias is not None:
            own[head.projection_bias] = joining.projection
        if head.final_norm is not None:
            own[head.final_norm] = deepcopy(parts.norm)
            setattr(parts.owner, parts.norm_name, own[head.final_norm])
        for name, module in own.items():
            _put(self, name, module, name.rpartition(".")[2])
        for name, stored in head.block.items():
            _put(self, stored, layer, name)
        parts.leave_out_layers()
        named = {id(parameter) for parameter in self.parameters()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) not in named:
                set_parameter(self, name, parameter)
        parts.layers[head.layer] = joining
        self.joining, self.of_model = joining, model

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, hidden_states: torch.Tensor
    ) -> Any:
        """Return the model's output for the tokens after `input_ids` [batch, sequence], given the
        hidden states [batch, sequence, hidden] of the tokens before them.
        """
        with self.joining.reading(hidden_states):
            return self.of_model(input_ids, position_ids)


class HeadFactory(ModelFactory):
    """Builds a head of the model that another factory builds."""

    def __init__(self, whole: ModelFactory, head: HeadTensors, hidden_size: int) -> None:
        super().__init__(
            whole.checkpoint,
            root=whole.root,
            dtype=whole.dtype,
            model_kwargs=whole.model_kwargs,
            mode=whole.mode,
        )
        self._head, self._hidden_size = head, hidden_size

    def build_model(self, device: str = "meta") -> nn.Module:
        """Build the head as the model is built."""
        head = DraftHead(super().build_model(device), self._head)
        return head.eval().requires_grad_(False)

    def example_inputs(self) -> dict[str, torch.Tensor]:
        """Return those of the model, and hidden states of the tokens before."""
        inputs = super().example_inputs()
        shape = (*inputs["input_ids"].shape, self._hidden_size)
        return {**inputs, HIDDEN: torch.zeros(shape, dtype=self.dtype)}


def _put(target: nn.Module, stored: str, layer: nn.Module, name: str) -> None:
    """Give a layer's parameter, or persistent buffer, a further name in `target`."""
    path, _, leaf = name.rpartition(".")
    owner = layer.get_submodule(path)
    if leaf in owner._parameters:
        set_parameter(target, stored, layer.get_parameter(name))
        return
    *folders, leaf = stored.split(".")
    for folder in folders:
        if not hasattr(target, folder):
            target.add_module(folder, nn.Module())
        target = getattr(target, folder)
    target.register_buffer(leaf, layer.get_buffer(name))
