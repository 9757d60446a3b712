"""Runs a tiny checkpoint in a mode that needs no model file, and compares what comes out with
transformers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from onboard.config import Mode
from onboard.errors import OnboardError
from onboard.graph.weight_load.quantised_folder import decoded_state
from onboard.hf.architecture import decoder_config
from onboard.hf.hf_model import load_reference
from onboard.runtime.llm import LLM
from onboard.runtime.sampling_params import SamplingParams
from onboard.verify.error import rmse_ratio
from onboard.verify.tolerances import SAME

BUILD = "build"
_LENGTHS = (3, 11, 26, 41)
_NEW_TOKENS = 32
_SEED = 11


def run_mode(
    checkpoint: Path, mode: Mode, device: str, emit: Callable[..., None], world_size: int = 1
) -> None:
    """Build the model and generate for four ragged prompts; emit the phase `build` and a row a
    level.
    """
    emit(step=BUILD)
    started = time.monotonic()
    phase: dict[str, Any] = {"name": BUILD, "status": "done"}
    llm = None
    try:
        config = {
            "max_seq_len": max(_LENGTHS) + _NEW_TOKENS,
            "kv_cache_config": {"tokens_per_block": 4},
        }
        llm = LLM(
            checkpoint,
            root=checkpoint.parent,
            device=device,
            dtype="float32",
            config=config,
            mode=mode,
            world_size=world_size,
        )
    except OnboardError as error:
        phase |= {"status": "failed", "error": str(error)}
    except Exception as error:  # a model's own code may raise anything; the coverage tells it
        phase |= {
            "status": "failed",
            "error": " ".join(f"{type(error).__name__}: {error}".split()),
            "internal": True,
        }
    emit(phase=phase | {"seconds": round(time.monotonic() - started, 2)})
    if llm is not None:
        emit(tests=_compare(llm, checkpoint, device))


def _compare(llm: LLM, checkpoint: Path, device: str) -> list[dict[str, Any]]:
    """Return a row for the logits (relative error) and one for the greedy tokens (share of those
    that differ).
    """
    prompts = _prompts(llm.engine.vocab_size or 2)
    params = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0.0, ignore_eos=True)
    generated = [output.token_ids for output in llm.generate(prompts, params)]
    errors, differing = [], 0
    for prompt, tokens, (expected, logits) in zip(
        prompts, generated, _reference(checkpoint, prompts), strict=True
    ):
        errors.append(rmse_ratio(llm.logits([*prompt, *expected]), logits))
        differing += sum(ours != theirs for ours, theirs in zip(tokens, expected, strict=True))
    worst = float(torch.tensor(errors).max())  # NaN if any is
    return [
        _row("logits", worst, device),
        _row("tokens", differing / (len(prompts) * _NEW_TOKENS), device),
    ]


@torch.inference_mode()
def _reference(
    checkpoint: Path, prompts: list[list[int]]
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield transformers' greedy tokens for each prompt, each from a full pass, and the logits of
    the whole.
    """
    config = decoder_config(AutoConfig.from_pretrained(checkpoint, trust_remote_code=False))
    model = load_reference(
        config,
        checkpoint,
        state=decoded_state(checkpoint),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    for prompt in prompts:
        known = list(prompt)
        for _ in range(_NEW_TOKENS):
            known.append(int(_logits(model, known)[-1].argmax()))
        yield known[len(prompt) :], _logits(model, known)


def _logits(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def _row(level: str, error: float, device: str) -> dict[str, Any]:
    status = "passed" if error <= SAME else "failed"
    return {
        "level": level,
        "block": "",
        "status": status,
        "error": error,
        "tolerance": SAME,
        "device": device,
    }


def _prompts(vocabulary: int) -> list[list[int]]:
    draw = random.Random(_SEED)
    return [[draw.randrange(vocabulary) for _ in range(length)] for length in _LENGTHS]
