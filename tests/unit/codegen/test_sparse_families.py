"""Attention whose keys an indexer chooses, end to end: analyze, generate, prove against
transformers.
"""

from __future__ import annotations

from functools import cache

import pytest

from onboard.analysis.analyze import analyze
from onboard.analysis.spec import ModelSpec
from onboard.codegen.model_file import generate_model_file
from onboard.errors import OnboardError
from onboard.verify.blocks import prove
from onboard.verify.tolerances import SAME

FAMILY = "glm_moe_dsa"
KINDS = {
    "num_hidden_layers": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "indexer_types": ["full", "full", "shared"],
}


BLOCKS = "qwen4_exp_text"
INDEXER = {"n_heads": 16, "kv_heads": 1, "head_dim": 256, "budget": 2048, "compress_ratio": 4}


COMPRESSED = "deepseek_v4"
RATIOS = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1}


@cache
def _compressed() -> tuple[ModelSpec, str]:
    spec = analyze({"model_type": COMPRESSED, **RATIOS}, model=f"test/{COMPRESSED}")
    return spec, generate_model_file(spec)


@cache
def _generated() -> tuple[ModelSpec, str]:
    spec = analyze({"model_type": FAMILY, **KINDS}, model=f"test/{FAMILY}")
    return spec, generate_model_file(spec)


@cache
def _of_blocks() -> tuple[ModelSpec, str]:
    fields = {f"indexer_{key}": value for key, value in INDEXER.items()}
    spec = analyze({"model_type": BLOCKS, **fields}, model=f"test/{BLOCKS}")
    return spec, generate_model_file(spec)


def test_own_and_shared_choices_of_keys_equal_transformers_and_export() -> None:
    spec, text = _generated()
    proofs = prove(text, spec)
    assert proofs[-1].path == ""
    assert max(proof.error for proof in proofs) <= SAME
    assert text.count(".torch_sparse_mla(") == 1
    assert text.count(".torch_lightning_indexer(") == 1


@pytest.mark.drawn(few=2)
@pytest.mark.parametrize(
    ("right", "wrong", "block"),
    [
        ("self.index_topk, scale", "self.index_topk - 1, scale", "indexer"),
        ("weights, self.index_topk", "weights.abs(), self.index_topk", "indexer"),
        ("topk_indices, scale", "topk_indices.sort(dim=-1).values[..., 1:], scale", "self_attn"),
    ],
)
def test_another_choice_of_keys_is_found_out(right: str, wrong: str, block: str) -> None:
    spec, text = _generated()
    assert right in text
    with pytest.raises(OnboardError, match=block):
        prove(text.replace(right, wrong), spec, export=False)


def test_chosen_blocks_of_keys_equal_transformers_and_export() -> None:
    spec, text = _of_blocks()
    proofs = prove(text, spec)
    assert proofs[-1].path == ""
    assert max(proof.error for proof in proofs) <= SAME
    assert any(proof.path.endswith("indexer") for proof in proofs)
    assert text.count(".torch_sparse_attention(") == text.count(".torch_block_indexer(") == 1


@pytest.mark.drawn(few=2)
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("None, self.block_topk, size", "None, self.block_topk - 1, size"),
        ("*tables.chunk(2, dim=-1), ", "cos, sin, "),
        ("indexer_budget // ", "indexer_budget // 2 // "),
    ],
)
def test_another_choice_of_blocks_is_found_out(right: str, wrong: str) -> None:
    spec, text = _of_blocks()
    assert right in text
    with pytest.raises(OnboardError, match=r"indexer.* differs from transformers"):
        prove(text.replace(right, wrong), spec, export=False)


@pytest.mark.parametrize("export", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_windows_with_compressed_keys_behind_them_equal_transformers_and_export(
    export: bool,
) -> None:
    """One layer has a window alone, one has chosen blocks that overlap, one has all blocks."""
    spec, text = _compressed()
    proofs = prove(text, spec, export=export)
    assert proofs[-1].path == ""
    assert max(proof.error for proof in proofs) <= SAME
    assert text.count(".torch_gated_pool(") == 3
    assert text.count(".torch_attention(") == text.count(".torch_compressed_attention(") == 1
    assert text.count(".torch_block_indexer(") == 1
    assert spec.traits["positions"].value == "from zero"


@pytest.mark.drawn(few=3)
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("self.index_topk, size", "self.index_topk - 1, size"),
        ("// size * size, ", ", "),
        ("block_bias,\n", "None,\n"),
        ("position_bias,\n            overlap", "position_bias.flip(0),\n            overlap"),
        ("position_bias\n", "position_bias.flip(0)\n"),
        ("input_ids.reshape(-1)]", "0 * input_ids.reshape(-1)]"),
    ],
)
def test_other_compressed_keys_are_found_out(right: str, wrong: str) -> None:
    spec, text = _compressed()
    assert right in text
    with pytest.raises(OnboardError, match=r"(self_attn|mlp.gate).* differs from transformers"):
        prove(text.replace(right, wrong), spec, export=False)


def test_keys_of_an_unknown_origin_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onboard.analysis.classify.probe_compressor", lambda *_: None)
    with pytest.raises(
        OnboardError, match="more keys than the text has tokens: what makes these keys has no"
    ):
        analyze({"model_type": COMPRESSED, **RATIOS}, model="x")
