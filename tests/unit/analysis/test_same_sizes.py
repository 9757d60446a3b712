"""Sizes that a small model has in common with the whole one."""

from __future__ import annotations

import ast

from transformers import LlamaConfig

from onboard.analysis.behaviour.code_numbers import same_sizes
from onboard.analysis.tiny.tiny_config import tiny_config
from onboard.analysis.tiny.tiny_model import build_small
from onboard.codegen.translate.language.program.classes import Translator
from onboard.codegen.translate.mechanisms.order import MECHANISMS

WHOLE = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 200}


def test_sizes_that_code_reads_and_that_are_the_same_are_told() -> None:
    whole = LlamaConfig(**WHOLE, intermediate_size=96, head_dim=24, num_key_value_heads=4)
    model = build_small(small := tiny_config(whole))
    found = same_sizes(model, small, whole)
    assert found == {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96}
    other = LlamaConfig(**WHOLE | {"num_attention_heads": 8}, intermediate_size=96, head_dim=24)
    assert "num_attention_heads" not in same_sizes(model, tiny_config(other), other)


def test_what_recordings_take_for_granted_is_asked_where_the_model_is_made() -> None:
    model = build_small(tiny_config(LlamaConfig(**WHOLE)))
    translator = Translator(model, None, MECHANISMS)
    wanted = "config.num_attention_heads == 4"
    translator.sizes = [ast.parse(wanted, mode="eval").body]
    assert wanted in map(ast.unparse, translator.translate().guards)
