"""Grammars on a GPU: their masks are found while a captured step is computed, and a second choice
behind it keeps to them.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from onboard import SamplingParams, StructuredOutputs
from onboard.runtime.constraints.structured import Grammars
from onboard.runtime.scheduling.request import Request
from tests.support.runtime.tiny import Tiny
from tests.support.serving import speaking_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
TOKENS = 440
"""More than there are characters, with all the white space that the grammar allows."""
TOLERANCE = 1e-3
"""Of logits whose spread is about 1: what two float32 implementations differ by, and ties."""
EXPRESSION = r"[a-f]{3,40}(-[0-9]{2,4}){1,6}"
SCHEMA = {
    "type": "object",
    "properties": {
        "ages": {"type": "array", "items": {"enum": [7, "old", None]}, "minItems": 1, "maxItems": 2}
    },
    "required": ["ages"],
    "additionalProperties": False,
}
WANTED = [StructuredOutputs(json_schema=SCHEMA), None, StructuredOutputs(regex=EXPRESSION), None]


@pytest.mark.parametrize("overlap", [False, True])
def test_replayed_steps_keep_to_grammars(tmp_path: Path, overlap: bool) -> None:
    """Greedy requests of both kinds and free ones in one batch, batches of other sizes behind one
    another: each token is the likeliest one of those that the grammar allows on the CPU, and free
    requests have transformers' own.
    """
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, model = random.Random(seed), speaking_model(tmp_path)
    settings = {"device": DEVICE, "max_seq_len": 512, "max_batch_size": 8, "overlap": overlap}
    engine = model.engine(**settings)
    vocabulary = range(1, model.hf.config.vocab_size)
    for wanted in (WANTED * 2, WANTED[:3], WANTED[2:]):
        prompts = [rng.choices(vocabulary, k=rng.randint(2, 20)) for _ in wanted]
        each = [
            SamplingParams(
                temperature=0.0, structured_outputs=one, max_tokens=TOKENS if one else 30
            )
            for one in wanted
        ]
        requests = [engine.submit(*pair)[0] for pair in zip(prompts, each, strict=True)]
        engine.run()
        for request, structure in zip(requests, wanted, strict=True):
            assert_likeliest(model, request, engine.grammars, structure)
        for request, structure in zip(requests, wanted, strict=True):
            if structure is not None:
                assert_kept(request, structure)
    assert (engine.stats.steps_ahead > 20) is overlap
    if DEVICE == "cuda":
        assert engine.stats.graph_replays > 100


def assert_likeliest(
    model: Tiny, request: Request, grammars: Grammars, wanted: StructuredOutputs | None
) -> None:
    """Each token is the likeliest of those that are allowed, given what precedes it."""
    logits = model.logits([*request.prompt, *request.generated])[len(request.prompt) - 1 :]
    matcher = grammars.matcher(wanted)
    for row, token in zip(logits, request.generated, strict=False):
        kept = np.full(-(-len(row) // 8), 255, dtype=np.uint8)
        if matcher is not None:
            matcher.exclude(kept)
            matcher.took(token)
        may = torch.from_numpy(np.unpackbits(kept, bitorder="little")[: len(row)]).bool()
        assert may[token]
        assert row[token] >= row[may].max() - TOLERANCE


def assert_kept(request: Request, wanted: StructuredOutputs) -> None:
    """The text is what was asked for, as Python's own readers say."""
    assert request.finish_reason == "stop", request.text
    if wanted.regex is not None:
        assert re.fullmatch(wanted.regex, request.text)
        return
    found = json.loads(request.text)
    assert set(found) == {"ages"}
    assert 1 <= len(found["ages"]) <= 2
    assert all(age in (7, "old", None) for age in found["ages"])
