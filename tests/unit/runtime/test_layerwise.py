"""The reference that is read layer by layer is the ordinary one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from onboard.config import RuntimeConfig
from onboard.graph.context import TransformContext
from onboard.graph.factory import ModelFactory
from onboard.verify import hf_logits as reference
from onboard.verify.hf_logits import Asked, reference_logits
from tests.support.runtime.tiny import TINY

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}


def _context(
    folder: Path, model_type: str, dtype: torch.dtype, options: dict[str, Any]
) -> TransformContext:
    seed = int(torch.randint(2**31, ()))
    print(f"weights seed {seed}")
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**TINY, **options})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    factory = ModelFactory(folder, root=None, dtype=dtype, model_kwargs={})
    return TransformContext(factory, RuntimeConfig(), torch.device("cpu"), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen3_moe", MOE),
        ("gpt2", {}),
        ("mamba", {}),
    ],
)
def test_layer_by_layer_is_the_whole_model(
    model_type: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = _context(tmp_path, model_type, dtype, options)
    asked = [Asked.whole(torch.randint(90, (length,)).tolist()) for length in (7, 12, 3)]
    whole = reference_logits(context, asked)
    monkeypatch.setattr(reference, "fits", lambda *_: False)
    parts = reference_logits(context, asked)
    assert (whole.how, parts.how) == ("whole", "layer by layer")
    _assert_same(parts.exact, whole.exact, 1e-6)
    assert (parts.own is None) == (whole.own is None) == (dtype == torch.float32)
    _assert_same(parts.own or [], whole.own or [], 2e-3)


def _assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor], limit: float) -> None:
    """Libraries may round otherwise where a tensor lies elsewhere in memory, by which few numbers
    in 16 bits come out as their neighbours.
    """
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() <= limit * other.norm()
