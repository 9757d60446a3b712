"""Random low-rank adapters in PEFT's format, and transformers' model with one merged into it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.runtime.greedy_tokens import GreedyTokens, greedy_tokens
from tests.support.runtime.tiny import Tiny

CONFIG = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 16,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
    "revision": None,
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}
"""As PEFT 0.21.2 writes it."""


@dataclass
class Adapter:
    """One that was saved, and the model that it makes of its base."""

    folder: Path
    hf: Any
    tensors: dict[str, Tensor]
    config: dict[str, Any] = field(default_factory=dict)

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        return self.hf(torch.tensor([ids]), use_cache=False).logits[0]

    def greedy(self, ids: list[int], count: int) -> GreedyTokens:
        return greedy_tokens(self.logits, ids, count)

    def save(self, tensors: Mapping[str, Tensor] | None = None, **config: Any) -> Path:
        """Write the files again, with other tensors or other fields."""
        self.folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors or self.tensors), self.folder / "adapter_model.safetensors")
        written = json.dumps({**self.config, **config})
        (self.folder / "adapter_config.json").write_text(written)
        return self.folder


def make_adapter(
    folder: Path,
    base: Tiny,
    targets: Sequence[str],
    rank: int = 4,
    alpha: float = 8,
    *,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    **config: Any,
) -> Adapter:
    """Draw an adapter for all linear layers whose path ends with a target; merge it into a copy."""
    merged, tensors = copy.deepcopy(base.hf), {}
    for path, module in merged.named_modules():
        if isinstance(module, nn.Linear) and path.endswith(tuple(targets)):
            own = next((r for end, r in (ranks or {}).items() if path.endswith(end)), rank)
            scale = next((a for end, a in (alphas or {}).items() if path.endswith(end)), alpha)
            scale /= own**0.5 if config.get("use_rslora") else own
            down, up = torch.randn(own, module.in_features), torch.randn(module.out_features, own)
            down *= 0.2
            up *= 0.2
            tensors[f"base_model.model.{path}.lora_A.weight"] = down
            tensors[f"base_model.model.{path}.lora_B.weight"] = up
            module.weight.data += scale * up @ down
    patterns = {"rank_pattern": dict(ranks or {}), "alpha_pattern": dict(alphas or {})}
    told = {"r": rank, "lora_alpha": alpha, "target_modules": list(targets), **patterns, **config}
    made = Adapter(folder, merged, tensors, {**CONFIG, **told})
    made.save()
    return made
