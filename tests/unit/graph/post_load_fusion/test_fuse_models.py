"""Loading and fusing transformers' own modules, from checkpoints that transformers saved: the
logits stay theirs.
"""

import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from onboard.graph.assembly.assemble import load_pipeline
from onboard.graph.pipeline import Pipeline
from onboard.graph.transform import Stages
from tests.support.graph.harness import make_context, random_inputs, randomize, rmse

BEFORE_CACHES = list(Stages)[: list(Stages).index(Stages.CACHE_INIT)]
EXPECTED = {
    "phi3": {
        "fuse_silu_mul": 2,
        "fuse_rmsnorm": 5,
        "fuse_add_rms_norm": 4,
        "gather_logits_before_lm_head": 1,
    },
    "gemma2": {"fuse_gemms": 4, "fuse_swiglu": 2, "fuse_rmsnorm": 9, "fuse_add_rms_norm": 4},
    "cohere": {
        "fuse_gemms": 4,
        "fuse_swiglu": 2,
        "fuse_rmsnorm": 0,
        "gather_logits_before_lm_head": 1,
    },
    "gpt_neox": {"fuse_gemms": 0, "gather_logits_before_lm_head": 1},
}


@pytest.mark.drawn(few=2)
@pytest.mark.parametrize("model_type", EXPECTED)
def test_logits_after_all_fusions(tmp_path, model_type):
    context = make_context(tmp_path, model_type, mode="hf")
    config = AutoConfig.from_pretrained(context.factory.checkpoint)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model, random.randrange(10**6))
    model.save_pretrained(context.factory.checkpoint)
    pipeline = Pipeline([each for each in load_pipeline({}) if each.config.stage in BEFORE_CACHES])
    gm = pipeline.run(context)

    ids, positions = random_inputs(1, 9)
    rows = torch.tensor([8, 0, 3])
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=positions).logits[:, rows]
    assert rmse(gm(ids, positions, rows), expected) <= 1e-6
    matches = {entry.key: entry.num_matches for entry in context.history}
    assert {key: matches[key] for key in EXPECTED[model_type]} == EXPECTED[model_type]
    assert context.facts == []
