"""Exports of tiny models of several kinds, and their logits from a process that has no onboard."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from onboard.standalone.export import Exported, export_model
from tests.support.runtime.tiny import Tiny, make_tiny

_WINDOW_THEN_NONE = ["sliding_attention", "full_attention"]

MODELS: dict[tuple[str, str], dict[str, Any]] = {
    ("llama", "plain"): {"tie_word_embeddings": True},
    ("deepseek_v3", "plain"): {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    ("qwen3_next", "plain"): {
        "num_hidden_layers": 4,
        "head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    ("gpt_oss", "vllm-plugin"): {
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
    },
}
"""Options of the configs, by model type and kind of export."""

MORE: dict[tuple[str, str], dict[str, Any]] = {
    ("gemma2", "vllm-plugin"): {
        "head_dim": 8,
        "query_pre_attn_scalar": 12,
        "sliding_window": 5,
        "attn_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    ("mamba", "plain"): {"state_size": 4},
    ("lfm2", "plain"): {"layer_types": ["conv", "full_attention"]},
    ("granitemoe", "plain"): {"num_local_experts": 4, "num_experts_per_tok": 2},
    ("bloom", "vllm-plugin"): {},
    ("gpt2", "vllm-plugin"): {"n_positions": 128},
    ("opt", "vllm-plugin"): {"ffn_dim": 48, "word_embed_proj_dim": 32},
    ("qwen3", "vllm-plugin"): {"head_dim": 16},
    ("cohere2", "vllm-plugin"): {
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": _WINDOW_THEN_NONE,
    },
    ("phi", "vllm-plugin"): {},
    ("mixtral", "vllm-plugin"): {"num_local_experts": 4, "head_dim": 8},
}
"""The same, of models that take longer together than a test may."""


@dataclass(frozen=True)
class Case:
    """An exported model, transformers' own and what the export computed."""

    tiny: Tiny
    exported: Exported
    texts: list[list[int]]
    logits: list[torch.Tensor]


def make_cases(
    folder: Path, models: dict[tuple[str, str], dict[str, Any]]
) -> dict[tuple[str, str], Case]:
    """Return models, exported here and run together in one process without onboard."""
    seed = int(torch.randint(2**31, ()))
    print(f"texts seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    made, jobs = {}, {}
    for (model_type, to), options in models.items():
        tiny = make_tiny(folder / model_type, model_type, own_file=False, **options)
        if model_type == "llama":
            _without_prefix(tiny.checkpoint / "model.safetensors")
        exported = export_model(str(tiny.checkpoint), to, root=tiny.root)
        texts = [
            torch.randint(3, 97, (length,), generator=generator).tolist() for length in (13, 1, 9)
        ]
        made[model_type, to] = tiny, exported, texts
        place = {
            "folder": str(exported.folder),
            "package": exported.package,
            "checkpoint": str(tiny.checkpoint),
        }
        jobs[model_type] = {"to": to, "texts": texts, **place}
    tensors = _outside(jobs, folder)
    return {
        key: Case(*what, [tensors[f"{key[0]}.{index}"] for index in range(3)])
        for key, what in made.items()
    }


def _without_prefix(path: Path) -> None:
    """Keep a checkpoint as the base model alone would be: its names lack the first part."""
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}, path
    )


def _outside(jobs: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    path, results = folder / "jobs.json", folder / "results.safetensors"
    path.write_text(json.dumps(jobs))
    command = [
        sys.executable,
        "-P",
        str(Path(__file__).with_name("outside.py")),
        str(path),
        str(results),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return load_file(results)
