from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from onboard.config import RuntimeConfig
from onboard.runtime.build import build_engine
from onboard.runtime.engine import Engine

MODEL_FILE = Path(__file__).with_name("models") / "modeling_llama.py"
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


@dataclass
class Tiny:
    """A random tiny checkpoint, the root that holds its hand-written model file, and transformers' own model."""

    checkpoint: Path
    root: Path
    hf: Any

    def engine(self, **runtime: Any) -> Engine:
        settings = {"max_seq_len": 64, "max_batch_size": 4, "max_num_tokens": 64, **runtime}
        settings["kv_cache_config"] = {"tokens_per_block": 4, **settings.get("kv_cache_config", {})}
        config = RuntimeConfig(device="cpu", dtype="float32", **settings)
        return build_engine(self.checkpoint, config, root=self.root)

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        return self.hf(torch.tensor([ids]), use_cache=False).logits[0]

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """Return transformers' greedy tokens, each from a full pass over what is known."""
        known = list(ids)
        for _ in range(count):
            known.append(int(self.logits(known)[-1].argmax()))
        return known[len(ids) :]


def make_tiny(folder: Path, model_type: str = "llama", **options: Any) -> Tiny:
    seed = int(torch.randint(2**31, ()))
    print(f"weights seed {seed}")
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**TINY, **options})
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for parameter in hf.parameters():  # larger than the usual initialisation: logits far apart, norms not all ones
        parameter.data.normal_(std=0.2).add_(1.0 if parameter.ndim == 1 else 0.0)
    checkpoint, root = folder / "checkpoint", folder / "root"
    hf.save_pretrained(checkpoint)
    (root / "models").mkdir(parents=True)
    shutil.copy(MODEL_FILE, root / "models" / f"modeling_{model_type}.py")
    return Tiny(checkpoint, root, hf)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Tiny]:
    return lambda *args, **options: make_tiny(tmp_path, *args, **options)
