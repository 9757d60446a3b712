"""The parts of a layer: in the order in which they run, with MLA, windows and experts named."""

from __future__ import annotations

import random
from typing import Any

from onboard.analysis.spec import LayerKind, ModelSpec, Trait
from onboard.workflow.reporting.layer_picture import layer_parts
from tests.support.phases import make_spec
from tests.unit.spec_samples import sample_block

CONFIG = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "sliding_window": 4096,
    "intermediate_size": 1200,
}


def _spec(blocks: dict[str, str], **changes: Any) -> ModelSpec:
    found = [sample_block(name, kind) for name, kind in blocks.items()]
    return make_spec("org/tiny", blocks=found, **changes)


def _kind(name: str, modules: dict[str, str]) -> LayerKind:
    return LayerKind(name=name, layers=[0], path="model.layers.0", modules=modules)


def test_parts_are_of_this_kind_alone_and_in_its_order() -> None:
    spec = _spec({"N": "rmsnorm", "A": "attention", "M": "mlp", "S": "scan_module"})
    kind = _kind("sliding_attention", {"norm_1": "N", "attn.q_norm": "N", "attn": "A", "mlp": "M"})
    parts = layer_parts(spec, kind, CONFIG)
    assert [part.title for part in parts] == ["norm_1", "attn", "mlp"]
    assert [part.what for part in parts] == ["rmsnorm", "GQA", "mlp"]
    assert parts[1].details == ["8 heads", "window 4,096", "2 of keys and values"]
    assert parts[1].inner == ["q_norm"]
    assert parts[2].details == ["1,200 wide"]


def test_latent_attention_is_told_by_the_probe_and_has_its_latents() -> None:
    spec = make_spec(
        "org/tiny", blocks=[sample_block("A", "attention", expand="e", kv_b_proj="kv_b_proj")]
    )
    config = CONFIG | {"q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    [part] = layer_parts(spec, _kind("full_attention", {"attn": "A"}), config)
    assert part.what == "MLA"
    assert part.details == [
        "8 heads",
        "keys and values from a latent of 512",
        "64 channels with RoPE beside it",
    ]


def test_a_mixture_shows_its_experts() -> None:
    count = random.randrange(300, 1000)
    traits = {
        "experts": Trait(value=count, evidence=""),
        "experts_per_token": Trait(value=6, evidence=""),
        "shared_experts": Trait(value=2, evidence=""),
    }
    spec = _spec({"W": "other", "R": "other", "E": "experts", "M": "mlp"}, traits=traits)
    modules = {
        "moe.gate": "R",
        "moe.experts": "E",
        "moe.shared": "M",
        "moe.list.0.w": "M",
        "moe.list.1.w": "M",
    }
    [part] = layer_parts(spec, _kind("moe", {**modules, "moe": "W"}), {})
    assert (part.what, part.kind) == ("mixture of experts", "experts")
    assert part.experts is not None
    assert str(part.experts) == f"6 of {count} experts a token, and 2 shared"
    assert part.experts.drawn == 256
    assert part.inner == ["gate", "experts", "shared", "list.0.w"]
