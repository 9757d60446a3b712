"""Greedy texts of the demo checkpoint with everything on that makes a run faster, beside those of
the plain graph.

In float32 they are the same. In bfloat16 a step's kernels round otherwise than those of the plain
graph, and where two tokens are nearly as likely, which of them comes first is chance: such places,
and no others, may tell them apart.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from onboard import LLM, SamplingParams
from onboard.cli.commands.demo import CHECKPOINT
from onboard.graph.transform import Stages, transform_keys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
SETTINGS = {"max_seq_len": 256, "max_batch_size": 16}
UNITS = 4
"""Spacings of bfloat16 between two logits that it may order either way: each may be off by one in
either run.
"""


def _off() -> dict[str, Any]:
    """The plain graph: torch's own operators, no fusions, no CUDA graphs, one step after the
    other.
    """
    stages = transform_keys().items()
    faster = [
        key
        for key, stage in stages
        if stage == Stages.POST_LOAD_FUSION or key.startswith("fuse_gemms")
    ]
    transforms = {key: {"enabled": False} for key in faster}
    return {
        "attn_backend": "torch",
        "compile_backend": "torch-simple",
        "overlap": False,
        "transforms": transforms,
    }


def _prompts(llm: LLM) -> list[list[int]]:
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    stories = (CHECKPOINT / "heldout.txt").read_text("utf-8").split("---")
    texts = (CHECKPOINT / "prompts.txt").read_text("utf-8").splitlines()
    return [tokenizer.encode(text) for text in texts] + [
        tokenizer.encode(story)[:24] for story in stories
    ]


def _texts(root: Path, dtype: str, **config: Any) -> list[tuple[list[int], list[int]]]:
    """Return each prompt with its greedy tokens."""
    llm = LLM(CHECKPOINT, root=root, device="cuda", config={"dtype": dtype, **SETTINGS, **config})
    prompts = _prompts(llm)
    return list(
        zip(prompts, [output.token_ids for output in llm.generate(prompts, GREEDY)], strict=True)
    )


def _spacing(size: float) -> float:
    """The distance of neighbours in bfloat16, which has 8 significant bits."""
    return 2.0 ** (math.floor(math.log2(size)) - 7)


def test_float32(tmp_path: Path) -> None:
    assert _texts(tmp_path, "float32") == _texts(tmp_path, "float32", **_off())


def test_bfloat16(tmp_path: Path) -> None:
    exact = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float64).cuda().eval()
    on, off = _texts(tmp_path, "bfloat16"), _texts(tmp_path, "bfloat16", **_off())
    apart = [
        (prompt, one, other)
        for (prompt, one), (_, other) in zip(on, off, strict=True)
        if one != other
    ]
    print(f"{len(apart)} of {len(on)} texts differ")
    assert len(apart) < len(on) / 2
    for prompt, one, other in apart:
        place = next(
            index for index, pair in enumerate(zip(one, other, strict=True)) if len(set(pair)) > 1
        )
        with torch.no_grad():
            logits = exact(torch.tensor([prompt + one[:place]], device="cuda")).logits[0, -1]
        first, second = sorted((float(logits[one[place]]), float(logits[other[place]])))
        assert second - first <= UNITS * _spacing(float(logits.max())), (
            f"token {place} after {prompt}"
        )
