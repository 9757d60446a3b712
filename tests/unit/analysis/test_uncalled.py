"""Helper functions that only another config's model calls are tried with what those that are called
were given.
"""

from __future__ import annotations

import torch
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from onboard.analysis.recognise.probe import probe_rope
from onboard.analysis.recognise.recorder import FunctionCall
from onboard.analysis.recognise.uncalled import with_uncalled
from onboard.analysis.spec_blocks import make_block
from onboard.analysis.traits import _from_blocks


def _call() -> FunctionCall:
    angles = torch.rand(2, 5, 4).repeat(1, 1, 2)
    given = [torch.randn(2, heads, 5, 8) for heads in (4, 1)] + [angles.cos(), angles.sin()]
    outputs = list(deepseek.apply_rotary_pos_emb_interleave(*given))
    return FunctionCall("apply_rotary_pos_emb_interleave", given, outputs, deepseek.__name__)


def test_the_other_rotation_of_a_file_is_recognised_too() -> None:
    first, second = with_uncalled([_call()], probe_rope)
    assert (first.name, second.name) == ("apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb")
    finding = probe_rope(second)
    assert finding is not None
    assert finding.parameters["op"] == "torch_rope_with_explicit_cos_sin"


def test_only_functions_beside_one_that_is_recognised_are_tried() -> None:
    assert [call.name for call in with_uncalled([_call()], lambda _: None)] == [
        "apply_rotary_pos_emb_interleave"
    ]


def test_what_is_not_called_does_not_say_how_positions_are_encoded() -> None:
    called, other = (
        make_block(
            class_name=name,
            kind="rope",
            path="",
            source="file.py:1",
            parameters=parameters,
            evidence=[],
        )
        for name, parameters in (
            ("turn", {"op": "torch_rope"}),
            ("other", {"op": "torch_other", "uncalled": True}),
        )
    )
    assert _from_blocks([called, other])["position"].value == "rope"
