from __future__ import annotations

from typing import Any

import pytest
import torch

from onboard.analysis.analyze import analyze
from onboard.analysis.behaviour.positions import first_position
from onboard.analysis.tiny.loaded_config import load_config
from onboard.analysis.tiny.tiny_model import build_tiny
from onboard.analysis.tiny.tiny_sizes import VOCABULARY
from onboard.codegen.model_file import generate_model_file
from onboard.errors import OnboardError
from onboard.testing import fresh_seed
from tests.support.families import config_dict


@pytest.mark.parametrize(
    ("family", "value"), [("roberta", "pad_token_id + 1"), ("bert", None), ("llama", None)]
)
def test_where_positions_begin_is_probed(family: str, value: str | None) -> None:
    found = first_position(load_config({"model_type": family, "is_decoder": True}))
    assert (found.value if found else None) == value


def test_a_model_file_registers_where_positions_begin_and_takes_no_code_from_a_spec() -> None:
    spec = analyze({"model_type": "roberta", "is_decoder": True}, model="x")
    last = generate_model_file(spec).split("register_causal_lm")[-1]
    assert "first_position=lambda config: config.pad_token_id + 1" in last
    spec.traits["first_position"] = spec.traits["first_position"].model_copy(
        update={"value": "pad_token_id + 1 + x()"}
    )
    with pytest.raises(OnboardError, match="first_position"):
        generate_model_file(spec)
    spec = analyze(config_dict("llama"), model="x")
    assert "first_position" not in generate_model_file(spec)


@torch.no_grad()
def test_generate_agrees_with_forward_from_the_first_position_on() -> None:
    model: Any = build_tiny(load_config({"model_type": "roberta", "is_decoder": True}))
    for parameter in model.parameters():
        parameter.mul_(3.0)  # tokens that differ
    first = model.config.pad_token_id + 1
    text = prompt = torch.randint(
        16, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(fresh_seed())
    )
    for _ in range(8):
        text = torch.cat((text, model(text, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    given = {
        "position_ids": first + torch.arange(9)[None],
        "attention_mask": torch.ones_like(prompt),
    }
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert model.generate(prompt, **given, **options).tolist() == text.tolist()
