"""The towers of a multimodal model, run eagerly by transformers: they turn a prompt's images or
sound into inputs of the text graph.

The multimodal model's own forward runs up to the call of its text model; the arguments of that call
become the graph's inputs. An argument that the graph cannot take is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from onboard.cache.step_buffer import IntArray
from onboard.errors import OnboardError, UsageError
from onboard.graph.context import TransformContext
from onboard.graph.fx import graph_modules
from onboard.graph.weight_load.quantised_folder import open_checkpoint
from onboard.graph.weight_load.weight_names import match_names, module_renaming
from onboard.ops.attention.block_attention import allowed
from onboard.runtime.multimodal.added_states import added_states
from onboard.runtime.multimodal.image_inputs import ImageInputs
from onboard.runtime.multimodal.media_processor import MediaProcessor, load_processor
from onboard.runtime.multimodal.tower_memory import ShapesAlone

_TAKEN = ("inputs_embeds", "position_ids", "attention_mask")
_TEXT_ONLY = "This model runs with text alone"


class _HandedOver(Exception):
    """The multimodal model called its text model."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class Towers:
    """Transformers' multimodal model of a checkpoint, with weights for its towers and its token
    embedding alone.
    """

    def __init__(self, context: TransformContext) -> None:
        self.context = context
        self._text: nn.Module | None = None

    def share(self, gm: nn.Module) -> None:
        """Read the token embedding of a run's text graph, instead of a second copy."""
        self._text = gm

    @cached_property
    def processor(self) -> MediaProcessor:
        """The checkpoint's processor; raises `UsageError` without one."""
        return load_processor(self.context.factory.checkpoint, self.context.factory.config)

    @cached_property
    def embedding(self) -> str:
        """Path of the token embedding."""
        modules: list[tuple[str, nn.Module]] = list(self._bare.named_modules())
        return next(path for path, child in modules if child is self._bare.get_input_embeddings())

    @torch.inference_mode()
    def prepare(self, tokens: list[int], inputs: Mapping[str, Any]) -> ImageInputs:
        """Run the towers on the processor's `inputs` (pixel values and the like) for a prompt.

        Raises:
            UsageError: the model does not take these inputs, or they do not fit the tokens.
            OnboardError: the text model gets an argument that the graph cannot take.
        """
        device = self.context.device
        moved = {
            key: value.to(device) if isinstance(value, torch.Tensor) else value
            for key, value in inputs.items()
        }
        handed = self._handed_over(self.model, torch.tensor([tokens], device=device), moved)
        embeds = handed.get("inputs_embeds")
        if embeds is None:
            raise OnboardError(
                f"{type(self.model).__name__} gives its text model no embeddings", hint=_TEXT_ONLY
            )
        added = self._added(handed)
        place, tables = self._positions(embeds, handed.get("position_ids"))
        last = (
            int(place.max())
            if tables is None
            else int(handed["position_ids"].max()) - self.context.first_position
        )
        blocks = self._blocks(handed.get("attention_mask"), len(tokens))
        return ImageInputs(embeds[0], place, last + 1 - len(tokens), tables, blocks, added)

    @cached_property
    def model(self) -> Any:
        """The model with the weights of its towers and of its embedding."""
        model, device = self._bare, self.context.device
        state = model.state_dict(keep_vars=True)
        prefixes = tuple(
            f"{path}." for path in (*self.context.factory.eager_modules, self.embedding)
        )
        wanted = [name for name in state if f"{name}.".startswith(prefixes)]
        checkpoint = open_checkpoint(self.context.factory.checkpoint)
        found = match_names(list(state), checkpoint.names(), module_renaming(model))
        if missing := [name for name in wanted if name not in found]:
            raise OnboardError(f"the checkpoint has no {missing[0]}", hint=_TEXT_ONLY)
        shared = self._shared_embedding()
        for name in wanted:
            if shared is not None and name == f"{self.embedding}.weight":
                _place(model, name, shared)
                continue
            _place(
                model,
                name,
                checkpoint.read(found[name], device).to(
                    device, self._dtype(state[name]), copy=True
                ),
            )
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        return model

    def _shared_embedding(self) -> torch.Tensor | None:
        """Return the text graph's token embedding; None where it has none as the checkpoint has it,
        which is a fact.
        """
        name = f"{self.embedding}.weight"
        (_, graph), *_ = graph_modules(self._text) if self._text is not None else [("", None)]
        found = dict(graph.named_parameters()).get(name) if graph is not None else None
        own = self._bare.get_parameter(name)
        if found is not None and (found.shape, found.dtype) == (own.shape, self.context.dtype):
            return found.detach()
        self.context.facts.append("towers have a token embedding of their own beside the graph's")
        return None

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that are loaded for the towers, and of all buffers."""
        modules = [self._bare.get_submodule(path) for path in self.context.factory.eager_modules]
        own = {id(each): each.nbytes for part in modules for each in part.parameters()}
        buffers = {id(each): each.nbytes for each in self._bare.buffers()}
        return sum((own | buffers).values())

    def traced_peak(self, tokens: list[int], inputs: Mapping[str, Any]) -> int:
        """Return the most bytes that tensors take at a time while the towers read `inputs`, these
        included, without computing anything.

        Raises:
            OnboardError: shapes do not tell it.
        """
        given = {
            key: value.to("meta")
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for key, value in inputs.items()
        }
        held = sum(each.nbytes for each in given.values() if isinstance(each, torch.Tensor))
        meter = ShapesAlone()
        for each in (*self._bare.parameters(), *self._bare.buffers()):
            meter.exclude(each)
        with torch.inference_mode(), meter:
            self._handed_over(self._bare, torch.tensor([tokens]), given)
        return held + meter.peak

    @cached_property
    def _bare(self) -> Any:
        return self.context.factory.multimodal_model()

    @property
    def _text_model(self) -> Any:
        return self._bare.get_submodule(self.embedding.rpartition(".")[0])

    def _dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self.context.dtype if tensor.is_floating_point() else tensor.dtype

    def _handed_over(
        self, model: Any, ids: torch.Tensor, inputs: Mapping[str, Any]
    ) -> dict[str, Any]:
        def hand_over(*args: Any, **kwargs: Any) -> None:
            raise _HandedOver(kwargs)

        text = self._text_model
        text.forward = hand_over  # the instance's own attribute: the class stays as it is
        try:
            model(input_ids=ids, use_cache=False, **inputs)
        except _HandedOver as handed:
            return handed.arguments
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UsageError(f"{type(model).__name__} refuses these inputs: {reason}") from error
        finally:
            del text.forward
        raise OnboardError(
            f"{type(model).__name__} does not call {self.embedding}'s model", hint=_TEXT_ONLY
        )

    def _added(self, handed: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the effect of the text model's other arguments: path of a layer -> what is added
        to its output, [tokens, hidden].
        """
        others = [key for key, value in handed.items() if key not in _TAKEN and _matters(value)]
        if not others:
            return {}
        text, count = (
            self._text_model,
            getattr(self.context.factory.text_config, "num_hidden_layers", None),
        )
        lists = [name for name, child in text.named_children() if isinstance(child, nn.ModuleList)]
        layers = next((name for name in lists if len(getattr(text, name)) == count), None)
        problem = f"{type(self.model).__name__} gives its text model {others[0]}, too"
        if layers is None:
            raise OnboardError(problem, hint=_TEXT_ONLY)
        try:
            added = added_states(text, layers, handed, others)
        except OnboardError as error:
            raise OnboardError(f"{problem}: {error}", hint=_TEXT_ONLY) from error
        path = f"{self.embedding.rpartition('.')[0]}.{layers}".lstrip(".")
        return {f"{path}.{index}": rows for index, rows in enumerate(added) if bool(rows.any())}

    def _positions(
        self, embeds: torch.Tensor, position_ids: torch.Tensor | None
    ) -> tuple[IntArray, tuple[torch.Tensor, torch.Tensor] | None]:
        """Return the positions [tokens], and the rotary tables if positions have several axes."""
        count = np.arange(embeds.shape[1])
        if position_ids is None:
            return count, None
        first = self.context.first_position
        if position_ids.dim() == 2:
            return position_ids[0].cpu().numpy() - first, None
        if bool((position_ids == position_ids[:1]).all()):
            return position_ids[0, 0].cpu().numpy() - first, None
        rotary = getattr(self._text_model, "rotary_emb", None)
        if rotary is None:
            raise OnboardError(
                "positions go along several axes and there is no rotary embedding", hint=_TEXT_ONLY
            )
        cos, sin = rotary(embeds, position_ids)
        return count, (cos[0], sin[0])

    def _blocks(self, masks: Any, length: int) -> IntArray | None:
        """Return the blocks in which masks let tokens see later ones; None when all are causal.

        Raises:
            OnboardError: a mask is not causal outside of blocks, and the layers' sliding window.
        """
        if masks is None:
            return None
        named = masks if isinstance(masks, dict) else {"full_attention": masks}
        seen = {
            key: _seen(mask) for key, mask in named.items() if mask is not None and mask.dim() == 4
        }
        if not seen:
            return None
        blocks = _later_seen(seen.get("full_attention", next(iter(seen.values()))))
        for key, mask in seen.items():
            window = (
                getattr(self.context.factory.text_config, "sliding_window", None)
                if "sliding" in key
                else None
            )
            if not torch.equal(mask, allowed(blocks, length, window)):
                raise OnboardError(f"the {key} mask is neither causal nor blocks", hint=_TEXT_ONLY)
        return blocks.cpu().numpy() if bool((blocks >= 0).any()) else None


def _seen(mask: torch.Tensor) -> torch.Tensor:
    """Return which keys each query sees, [queries, keys] bool; masks are bool or added to
    scores.
    """
    return mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0


def _later_seen(seen: torch.Tensor) -> torch.Tensor:
    """Number the blocks of tokens that see later ones, [tokens] int32, -1 outside."""
    blocks = torch.full((len(seen),), -1, dtype=torch.int32, device=seen.device)
    start = number = 0
    lasts = [int(row.nonzero().max()) for row in seen]
    while start < len(lasts):
        if (last := lasts[start]) > start:
            blocks[start : last + 1] = number
            number += 1
        start = max(last, start) + 1
    return blocks


def _matters(value: Any) -> bool:
    """Whether an argument of the text model holds a tensor."""
    if isinstance(value, list | tuple | dict):
        return any(map(_matters, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor)


def _place(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor
