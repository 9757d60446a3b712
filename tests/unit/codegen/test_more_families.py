"""Decoders beyond the dense families: post-norm ones, counted positions, attention that is written
out.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

import pytest
import torch

from onboard.analysis.analyze import analyze
from onboard.analysis.spec import ModelSpec
from onboard.codegen.model_file import generate_model_file
from onboard.errors import OnboardError
from onboard.verify.blocks import prove
from onboard.verify.tolerances import SAME

CONFIGS: dict[str, dict[str, Any]] = {
    # post-norm decoders that serve as encoders, too
    "bert": {"is_decoder": True},
    "roberta": {"is_decoder": True},
    "electra": {"is_decoder": True},
    "megatron-bert": {"is_decoder": True},
    "rembert": {"is_decoder": True},
    # decoders of encoder-decoder families, which count positions by themselves
    "bart": {"scale_embedding": True},
    "mbart": {},
    "pegasus": {},
    "marian": {},
    "mvp": {},
    # learned positions with an offset, projections that only some sizes have
    "opt": {},
    "biogpt": {},
    "gpt_bigcode": {},
    # attention that is written out
    "gptj": {},
    "codegen": {},
    "gpt_neo": {},
    "ctrl": {},
    "xglm": {},
    # Its mask is of truth values, made beside one of the padding, and filled in in place
    "xlm": {"causal": True},
    # an adapter for each language, one of which texts are in
    "xmod": {
        "is_decoder": True,
        "languages": ["en_XX", "de_DE", "fr_XX"],
        "default_language": "de_DE",
    },
    # a norm with weight 1 + w and bias; the text model of a multimodal model
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
    "emu3": {},
    # layers of two classes, attention within each token to what earlier layers made of it, sinks of
    # each query, convolutions whose weights hang on the token, experts with caps
    "inkling2_text": {},
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("opt", {"do_layer_norm_before": False, "enable_bias": False}),
    ("opt", {"word_embed_proj_dim": 512}),
    ("bert", {"is_decoder": True, "hidden_act": "relu", "tie_word_embeddings": False}),
    ("inkling2_text", {"n_layers_per_attn_res_block": 1, "log_scaling_alpha": 0.7}),
    ("gpt_neo", {"attention_types": [[["local"], 12], [["global"], 12]]}),
]
COUNTED = {"bart", "mbart", "pegasus", "marian", "mvp"}


@cache
def _spec(family: str) -> ModelSpec:
    return analyze({"model_type": family, **CONFIGS[family]}, model=f"test/{family}")


@cache
def _text(family: str) -> str:
    return generate_model_file(_spec(family))


@pytest.mark.parametrize("family", CONFIGS)
def test_the_file_of_a_family_equals_transformers(family: str) -> None:
    proofs = prove(_text(family), _spec(family), export=False)
    assert max(proof.error for proof in proofs) <= SAME
    assert proofs[-1].path == ""


def test_a_block_stands_for_its_class_that_ran_on_a_text() -> None:
    (adapter,) = [block for block in _spec("xmod").blocks if block.class_name == "XmodAdapter"]
    assert adapter.path.endswith("adapter_modules.de_DE")


def test_the_same_class_as_an_encoder_is_refused() -> None:
    with pytest.raises(OnboardError, match="is not causal"):
        analyze({"model_type": "bert", "is_decoder": False}, model="test/encoder")


@pytest.mark.parametrize("family", CONFIGS)
def test_attention_is_the_canonical_op(family: str) -> None:
    names = {
        node.attr for node in ast.walk(ast.parse(_text(family))) if isinstance(node, ast.Attribute)
    }
    assert "torch_attention" in names
    assert not names & {"softmax", "matmul", "bmm", "tril"} - (
        {"tril"} if family == "gpt_neo" else set()
    )


@pytest.mark.parametrize(("family", "fields"), VARIANTS)
def test_one_file_serves_the_variants(family: str, fields: dict[str, Any]) -> None:
    prove(_text(family), analyze({"model_type": family, **fields}, model="x"), export=False)


@pytest.mark.parametrize("family", CONFIGS)
def test_counted_positions_are_position_ids(family: str) -> None:
    spec = _spec(family)
    assert ("positions" in spec.traits) is (family in COUNTED)
    if family in COUNTED:
        assert "arange" not in _text(family)
        assert "self.embed_positions(position_ids)" in _text(family)


def test_a_wrong_scale_of_written_out_attention_is_found() -> None:
    right = "1.0 / self.scale_attn"
    assert right in _text("gptj")
    with pytest.raises(OnboardError, match=r"h\.0\.attn\.out_proj .* differs from transformers"):
        prove(_text("gptj").replace(right, "self.scale_attn"), _spec("gptj"), export=False)


def test_weights_that_nothing_runs_are_kept_and_named() -> None:
    assert "Not run, for checkpoints have them: encoder_attn, encoder_attn_layer_norm." in _text(
        "bart"
    )
    assert "model.decoder.layers.0.encoder_attn" in _spec("bart").never_called
    assert "model.decoder.layers.0.self_attn" not in _spec("bart").never_called


@pytest.mark.parametrize(
    ("family", "reason"),
    [("reformer", "analysed|build|run"), ("xmod", "run")],
)
def test_what_cannot_be_analysed_is_refused_in_one_line(family: str, reason: str) -> None:
    with pytest.raises(OnboardError, match=reason) as error:
        analyze({"model_type": family}, model="x")
    assert "\n" not in str(error.value)


def test_a_model_that_looks_ahead_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from onboard.analysis import analyze as module

    real = module.build_tiny

    def sees_ahead(config: Any, seed: int = 0) -> torch.nn.Module:
        model = real(config, seed)
        head = model.lm_head
        head.register_forward_hook(lambda _, args, out: out + out.flip(1))
        return model

    monkeypatch.setattr(module, "build_tiny", sees_ahead)
    with pytest.raises(OnboardError, match="not causal"):
        module.analyze({"model_type": "llama"}, model="x")


@pytest.mark.parametrize(
    ("family", "says"),
    [
        (
            "gpt_neo",
            {
                "GPTNeoSelfAttention": "attention",
                "GPTNeoBlock": "One decoder",
                "GPTNeoModel": "Embedding",
            },
        ),
        (
            "opt",
            {"OPTDecoderLayer": "One decoder", "OPTDecoder": "Embedding", "OPTModel": "Embedding"},
        ),
    ],
)
def test_a_class_says_what_it_is(family: str, says: dict[str, str]) -> None:
    classes = [node for node in ast.parse(_text(family)).body if isinstance(node, ast.ClassDef)]
    docstrings = {node.name: ast.get_docstring(node) or "" for node in classes}
    assert all(words in docstrings[name] for name, words in says.items())
