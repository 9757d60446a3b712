"""Linears compute with a checkpoint's integers of eight bits, and say what the decoded model, or their
writer's, says.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from onboard import LLM
from onboard.graph.weight_load.quantised_folder import open_checkpoint
from tests.support import quantised

KEY = "quantize_int8_linear_from_config"
SAME = 1e-5
NEAR = 2e-3
"""A token's largest magnitude lies on a tie, at 127.5 steps: its last bit decides which way it
goes.
"""


def run(folder: Path, backend: str) -> LLM:
    config = {"max_seq_len": 64, "transforms": {KEY: {"backend": backend}}}
    return LLM(str(folder), device="cpu", dtype="float32", config=config)


def matches(llm: LLM) -> int:
    return next(entry.num_matches for entry in llm.engine.history if entry.key == KEY)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("variant", "count"),
    [
        *(("gptq_8bit", 4), ("bnb_int8", 8), ("torchao_int8", 8)),
        # Their inputs are exact: scales are of groups, and inputs float8
        *(("ct_w4a8", 4), ("ct_w4afp8", 4)),
    ],
)
def test_codes_say_what_the_decoded_model_says(variant: str, count: int) -> None:
    folder = quantised.FOLDER / variant
    expected = load_file(folder / "expected.safetensors")
    ids = expected["ids"].tolist()
    codes, decoded = run(folder, "torch"), run(folder, "auto")
    assert (matches(codes), matches(decoded)) == (count, 0)
    assert error(codes.logits(ids), decoded.logits(ids)) < SAME
    assert error(codes.logits(ids), expected["logits"]) < SAME


def test_inputs_are_integers_as_their_writer_has_them() -> None:
    folder = quantised.FOLDER / "ct_w8a8"
    expected = load_file(folder / "expected.safetensors")
    ids = expected["ids"].tolist()
    found = run(folder, "torch").logits(ids)
    assert error(found, expected["activation_logits"]) < NEAR
    assert error(found, expected["logits"]) > 5 * NEAR


@pytest.mark.parametrize("variant", ["ct_w8a8", "gptq_8bit", "bnb_int8"])
def test_memory_is_that_of_the_codes(variant: str) -> None:
    folder = quantised.FOLDER / variant
    parameters = list(run(folder, "torch").engine.gm.parameters())
    checkpoint = open_checkpoint(folder)
    elements = sum(weight.shape[0] * weight.shape[1] for weight in checkpoint.weights.values())
    codes = [each for each in parameters if each.dtype == torch.int8]
    assert sum(each.numel() for each in codes) == elements
    plain = checkpoint.names().keys() - checkpoint.weights.keys()
    unquantised = sum(checkpoint.read(name).numel() for name in plain)
    scales = sum(each.numel() for each in parameters) - elements - unquantised
    assert 0 < scales <= elements / 16
