"""A checkpoint as transformers' own module sees it: read, renamed, stacked and split by
transformers' own rules.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from onboard.errors import OnboardError
from onboard.graph.weight_load.quantised_folder import decoded_state, open_checkpoint
from onboard.graph.weight_load.safetensors_folder import TensorMeta
from onboard.graph.weight_load.weight_names import explain_unused
from onboard.hf.hf_model import load_reference, without_missing_towers


class ConvertedCheckpoint:
    """The weights of `folder` under the names of transformers' module; each tensor can be read
    once.

    `on_loaded` is called with that module. Raises `OnboardError` when the checkpoint is damaged or
    does not fill it.
    """

    def __init__(
        self,
        folder: Path,
        config: Any,
        dtype: torch.dtype,
        on_loaded: Callable[[nn.Module], None] | None = None,
    ) -> None:
        files = open_checkpoint(folder)
        model, report = _loaded(folder, config, dtype)
        if missing := sorted(report["missing_keys"]):
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise OnboardError(
                f"the checkpoint has no {missing[0]}{more}", hint="It does not fit its config.json"
            )
        if on_loaded is not None:
            on_loaded(model.eval())
        self._tensors: dict[str, torch.Tensor] = dict(model.state_dict())
        del model
        # transformers' models hold reference cycles, which would keep every tensor that is taken
        gc.collect()
        self._left_out = {
            name: meta for name, meta in files.names().items() if name in report["unexpected_keys"]
        }

    def names(self) -> dict[str, TensorMeta]:
        """Return every tensor's shape, dtype and size."""
        return {
            name: TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.nbytes)
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return a tensor and forget it, so that the whole is not held longer than it needs."""
        return self._tensors.pop(name).to(device)

    def explain(self, unused: Collection[str], used: Collection[str]) -> list[str]:
        """Return facts: tensors of the module that its forward pass does not read, and of the files
        that it lacks.
        """
        facts, others = explain_unused(self._left_out, used)
        facts += [f"transformers' model leaves out {name} of the checkpoint" for name in others]
        if unused:
            facts.append(
                f"{len(unused)} tensors take no part in the forward pass, for example {sorted(unused)[0]}"
            )
        return facts


def _loaded(folder: Path, config: Any, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    try:
        state = decoded_state(folder)
        how = {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}
        if state is not None:
            return load_reference(config, folder, state=state, **how)  # type: ignore[no-any-return]
        with without_missing_towers():
            return AutoModelForCausalLM.from_pretrained(  # type: ignore[no-any-return]
                folder,
                config=config,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                **how,
            )
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise OnboardError(
            f"transformers cannot load {folder}: {reason}", hint="Fetch the checkpoint again"
        ) from error
