"""The logits that the child process writes of a model, from the weights as open files."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from onboard.graph.weight_load.safetensors_folder import Checkpoint
from onboard.graph.weight_load.stored_places import open_files
from onboard.hub import read_config
from onboard.verify.error import rmse_ratio
from onboard.verify.own_logits import Order, write_logits
from onboard.verify.rounding.in_float64 import InFloat64

IDS = [[5, 3, 9, 11, 2, 40], [7, 8, 6]]


@pytest.mark.parametrize("in_float64", [False, True])
def test_logits_are_those_of_the_dtype_that_was_asked_for(tmp_path: Path, in_float64: bool) -> None:
    torch.manual_seed(seed := int(torch.randint(2**31, ())))
    print(f"seed {seed}")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = LlamaConfig(num_hidden_layers=2, vocab_size=97, tie_word_embeddings=False, **sizes)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    dtype = torch.float64 if in_float64 else torch.float32
    with ExitStack() as stack, (tmp_path / "logits").open("w+b") as output:
        _, stored = open_files(Checkpoint(tmp_path), stack)
        asked = [(ids, list(range(len(ids)))) for ids in IDS]
        order = {"asked": asked, "stored": stored, "dtype": "float32", "overrides": {}}
        order |= {"in_float64": in_float64}
        assert write_logits(read_config(tmp_path), Order.model_validate(order), output) == 97
    data = bytearray((tmp_path / "logits").read_bytes())
    rows = torch.frombuffer(data, dtype=dtype).view(-1, 97)
    exact = InFloat64(model)
    with torch.no_grad():
        expected = [exact(input_ids=torch.tensor([ids])).logits[0] for ids in IDS]
    least, most = (0.0, 1e-12) if in_float64 else (1e-8, 1e-6)
    assert least <= rmse_ratio(rows, torch.cat(expected)) < most
