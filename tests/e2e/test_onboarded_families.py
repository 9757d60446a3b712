"""Every family: onboarded with one command from a random checkpoint, then equal to transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from onboard import LLM, SamplingParams
from onboard.analysis.tiny.tiny_model import build_tiny
from tests.support.checkpoints import save_tokenizer
from tests.support.drawing import some_of
from tests.support.families import FAMILIES, VARIANTS, config_dict
from tests.support.warm import Warm

LENGTHS = (3, 11, 26, 41)
"""Ragged prompts; the tiny models' windows are shorter than the longest."""
NEW_TOKENS = 32


@pytest.mark.parametrize("family", some_of(FAMILIES, always=("llama",), by_chance=1))
def test_onboarded_with_one_command_and_equal_to_transformers(
    family: str, warm: Warm, tmp_path: Path
) -> None:
    variants = list(VARIANTS[family])
    root = tmp_path / "root"
    for variant in variants:
        checkpoint = _save_checkpoint(family, variant, tmp_path / f"{family}-{variant}")
        if variant == variants[0]:
            _onboard(warm, checkpoint, root)
        _assert_equal(checkpoint, root, label=f"{family}/{variant}")


def _save_checkpoint(family: str, variant: str, folder: Path) -> Path:
    fields = config_dict(family, variant)
    model = build_tiny(AutoConfig.for_model(fields.pop("model_type"), **fields))
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def _onboard(warm: Warm, checkpoint: Path, root: Path) -> None:
    done = warm("onboard", checkpoint, "--root", root, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(done.stdout)
    assert document["status"] == "done"
    tests = json.loads(Path(document["artifacts"]["tests"]).read_text())
    assert {case["status"] for case in tests["tests"]} == {"passed"}


def _assert_equal(checkpoint: Path, root: Path, label: str) -> None:
    seed = random.randrange(2**31)
    print(f"{label} seed {seed}")
    draw = random.Random(seed)
    reference = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    vocabulary = reference.config.vocab_size
    prompts = [[draw.randrange(vocabulary) for _ in range(length)] for length in LENGTHS]
    llm = LLM(str(checkpoint), root=root, device="cpu", dtype="float32")

    for prompt in prompts:
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0]
        error = (llm.logits(prompt) - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
        assert error <= 1e-5, (
            f"{label}: rmse ratio {error:.1e} of the logits of {len(prompt)} tokens"
        )

    outputs = llm.generate(
        prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == _greedy(reference, prompt), (
            f"{label}: prompt of {len(prompt)} tokens"
        )


@torch.no_grad()
def _greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """Return transformers' tokens, each from a full pass: its cache is wrong where longrope changes
    tables in 5.17.
    """
    ids = torch.tensor([prompt])
    options = {
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    options["use_cache"] = False
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
    return tokens[0, len(prompt) :].tolist()  # type: ignore[no-any-return]
