"""The logits that the child process writes of a model, from the weights as open files."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from onboard.graph.weight_load.quantised_folder import open_checkpoint
from onboard.graph.weight_load.stored_places import open_files
from onboard.hub import read_config
from onboard.verify.error import rmse_ratio
from onboard.verify.own_logits import Order, write_logits
from onboard.verify.rounding.in_float64 import InFloat64
from tests.support.remote_models import quantise_in_blocks

IDS = [[5, 3, 9, 11, 2, 40], [7, 8, 6]]


@pytest.fixture
def small(tmp_path: Path) -> LlamaForCausalLM:
    """A model that is saved."""
    torch.manual_seed(seed := int(torch.randint(2**31, ())))
    print(f"seed {seed}")
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
    config = LlamaConfig(num_hidden_layers=2, vocab_size=97, tie_word_embeddings=False, **sizes)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    return model


def written(folder: Path, written_in: torch.dtype, **changes: Any) -> torch.Tensor:
    """Return the logits that are written of all texts, [passes x tokens, 97]."""
    checkpoint = open_checkpoint(folder)
    with ExitStack() as stack, (folder / "logits").open("w+b") as output:
        _, stored = open_files(checkpoint, stack, checkpoint.names())
        asked = [(ids, list(range(len(ids)))) for ids in IDS]
        order = {"asked": asked, "stored": stored, "dtype": "float32", "overrides": {}, **changes}
        assert write_logits(read_config(folder), Order.model_validate(order), output) == 97
    return torch.frombuffer(bytearray((folder / "logits").read_bytes()), dtype=written_in).view(
        -1, 97
    )


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in IDS])


@pytest.mark.parametrize("in_float64", [False, True])
def test_logits_are_those_of_the_dtype_that_was_asked_for(
    small: LlamaForCausalLM, tmp_path: Path, in_float64: bool
) -> None:
    dtype = torch.float64 if in_float64 else torch.float32
    rows = written(tmp_path, dtype, in_float64=in_float64)
    least, most = (0.0, 1e-12) if in_float64 else (1e-8, 1e-6)
    assert least <= rmse_ratio(rows, logits_of(InFloat64(small))) < most


def test_quantised_weights_are_handed_over_decoded(small: LlamaForCausalLM, tmp_path: Path) -> None:
    values = quantise_in_blocks(tmp_path)
    before = logits_of(small)
    small.load_state_dict(values)
    rows = written(tmp_path, torch.float32)
    assert rmse_ratio(rows, logits_of(small)) < 1e-6
    assert rmse_ratio(rows, before) > 1e-3


def test_the_pass_in_the_runs_dtype_quantises_what_its_layers_are_given(
    small: LlamaForCausalLM, tmp_path: Path
) -> None:
    """And the pass in float32 does not."""
    layer = "model.layers.1.mlp.down_proj"
    inputs = {f"{layer}.weight": {"how": "token", "scale": None, "dtype": "fp8"}}
    rows = written(tmp_path, torch.float32, dtype="bfloat16", inputs=inputs)
    own, exact = rows.chunk(2)
    model = LlamaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    plain = logits_of(model).float()

    def near(module: Any, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x = given[0].float()
        scale = x.abs().amax(-1, keepdim=True) / 448
        return ((x / scale).to(torch.float8_e4m3fn).float() * scale).to(given[0].dtype)

    model.get_submodule(layer).register_forward_pre_hook(near)
    assert rmse_ratio(own, logits_of(model).float()) < 2e-4
    assert rmse_ratio(own, plain) > 4e-4
    rounded = {name: weight.float() for name, weight in model.state_dict().items()}
    small.load_state_dict(rounded)
    assert rmse_ratio(exact, logits_of(small)) < 1e-6
