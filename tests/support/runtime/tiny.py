"""A random tiny checkpoint whose generated file is hand-written, and transformers' model with the
same weights.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from onboard.config import RuntimeConfig
from onboard.runtime.build import build_engine
from onboard.runtime.engine import Engine
from tests.support import checkpoints
from tests.support.runtime.greedy_tokens import GreedyTokens, greedy_tokens

TINY = {
    **checkpoints.TINY,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


@dataclass
class Tiny:
    """A random tiny checkpoint, the root that holds its hand-written model file, and transformers'
    own model.
    """

    checkpoint: Path
    root: Path
    hf: Any

    def engine(self, **runtime: Any) -> Engine:
        settings = {"max_seq_len": 64, "max_batch_size": 4, "max_num_tokens": 64, **runtime}
        settings["kv_cache_config"] = {"tokens_per_block": 4, **settings.get("kv_cache_config", {})}
        config = RuntimeConfig(**{"device": "cpu", "dtype": "float32", **settings})
        return build_engine(self.checkpoint, config, root=self.root)

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        return self.hf(torch.tensor([ids]), use_cache=False).logits[0]

    def greedy(self, ids: list[int], count: int) -> GreedyTokens:
        """Return transformers' greedy tokens, each from a full pass over what is known."""
        return greedy_tokens(self.logits, ids, count)


def save_tokenizer(folder: Path, text: str) -> int:
    """Train a byte-level tokenizer on `text` and save it; return its vocabulary's size."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        [text], trainers.BpeTrainer(special_tokens=["<eos>"], initial_alphabet=alphabet)
    )
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>").save_pretrained(folder)
    return fast.get_vocab_size()


def make_tiny(
    folder: Path, model_type: str = "llama", *, own_file: bool = True, **options: Any
) -> Tiny:
    """`own_file` False: the model's file is the one that ships."""
    seed = int(torch.randint(2**31, ()))
    print(f"weights seed {seed}")
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**TINY, **options})
    hf = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    # Larger than the usual initialisation: logits far apart, norms not all ones
    for parameter in hf.parameters():
        parameter.data.normal_(std=0.2).add_(1.0 if parameter.ndim == 1 else 0.0)
    checkpoint, root = folder / "checkpoint", folder / "root"
    hf.save_pretrained(checkpoint)
    (root / "models").mkdir(parents=True)
    if own_file:
        shutil.copy(checkpoints.MODEL_FILE, root / "models" / f"modeling_{model_type}.py")
    return Tiny(checkpoint, root, hf)
