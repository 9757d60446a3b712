"""Small random checkpoints in Hugging Face format, and the digest of a folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

MODEL_FILE = Path(__file__).parent / "models" / "modeling_llama.py"
"""Llama and Mistral in canonical ops, written by hand: what the graph framework and the runtime are
tested with.
"""

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_checkpoint(
    folder: Path, model_type: str = "llama", *, shard_size: str = "5GB", **config: Any
) -> Path:
    """Save a random model of the given type and a tokenizer of single characters; return the
    folder.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    hf_config = AutoConfig.for_model(model_type, **{**TINY, **config})
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size=shard_size)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,!?'\"-"
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def tree(folder: Path, *, ignore: tuple[str, ...] = ()) -> dict[str, str]:
    """Return every path below `folder` with the sha256 of its content ("" for a folder); `ignore`
    are file names.
    """
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else ""
        for path in sorted(folder.rglob("*"))
        if path.name not in ignore
    }
