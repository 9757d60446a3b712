"""Attention in chunks beside plain attention: the mask that exists at run time, end to end."""

from __future__ import annotations

from functools import cache

import pytest

from onboard.analysis.analyze import analyze
from onboard.analysis.spec import ModelSpec
from onboard.codegen.model_file import generate_model_file
from onboard.errors import OnboardError
from onboard.verify.blocks import prove
from onboard.verify.tolerances import SAME

FAMILY = "llama4_text"


@cache
def _generated() -> tuple[ModelSpec, str]:
    spec = analyze({"model_type": FAMILY, "num_hidden_layers": 8}, model=f"test/{FAMILY}")
    return spec, generate_model_file(spec)


def test_layers_in_chunks_and_others_equal_transformers_and_export() -> None:
    spec, text = _generated()
    proofs = prove(text, spec)
    assert proofs[-1].path == ""
    assert max(proof.error for proof in proofs) <= SAME
    assert '"full_attention": None,' in text
    assert '"chunked_attention": chunks.unsqueeze(1) == chunks,' in text


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("// self.config.attention_chunk_size", "// (self.config.attention_chunk_size + 1)"),
        ('"chunked_attention": chunks.unsqueeze(1) == chunks', '"chunked_attention": None'),
        ("+ 1.0) / self.floor_scale", "+ 2.0) / self.floor_scale"),
        ("key_states, position_embeddings\n", "key_states, position_embeddings.conj()\n"),
    ],
)
def test_another_mask_scale_or_rotation_is_found_out(right: str, wrong: str) -> None:
    spec, text = _generated()
    assert right in text
    with pytest.raises(OnboardError, match="self_attn"):
        prove(text.replace(right, wrong), spec, export=False)
