"""Blocks of a spec with parameters as the analysis finds them in common models."""

from __future__ import annotations

from typing import Any

from onboard.analysis.spec import ModelSpec
from onboard.analysis.spec_blocks import Block, make_block

_PARAMETERS: dict[str, dict[str, Any]] = {
    "rmsnorm": {"eps": "variance_epsilon", "unit_offset": False},
    "layernorm": {"eps": "eps", "per_head": False, "weight": "self.weight", "bias": "None"},
    "l2norm": {"eps": "eps"},
    "rotary": {"style": "cos_sin", "per_layer_type": False, "longrope": False, "axes": False},
    "rope": {"op": "torch_rope_with_explicit_cos_sin"},
    "mlp": {"mlp": "gated", "activation": "silu"},
    "scan_module": {"op": "torch_mlstm", "eps": "eps"},
    "experts": {
        "layout": "modules",
        "gate": "gate_proj",
        "down": "down_proj",
        "up": "up_proj",
        "transposed": False,
        "down_stack": "down_proj",
        "up_offset": 0.0,
        "activation": "silu",
        "gated": True,
        "x": "hidden_states",
        "indices": "top_k_index",
        "weights": "top_k_weights",
    },
}


def sample_block(
    class_name: str, kind: str, path: str = "", source: str = "x.py:1", **parameters: Any
) -> Block:
    """Return a block; its parameters are those that are usual, and those given."""
    found = _PARAMETERS.get(kind, {}) | parameters
    return make_block(class_name=class_name, kind=kind, path=path, source=source, parameters=found)


def edited(spec: ModelSpec, kind: str, **parameters: Any) -> str:
    """Return a spec as text, with other parameters for the first block of a kind, as someone might
    edit the file.
    """
    text = spec.to_yaml()
    block = next(block for block in spec.blocks if block.kind == kind)
    for key, value in parameters.items():
        old = getattr(block.parameters, key)
        start = text.index(f"class_name: {block.class_name}")
        place = text.index(f"{key}: ", start)
        end = text.index("\n", place)
        assert str(old) in text[place:end]
        text = f"{text[:place]}{key}: {value!r}{text[end:]}"
    return text
