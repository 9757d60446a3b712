"""The facts of a model that a report shows, with their evidence."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig

from onboard.analysis.mixture_traits import mixture
from onboard.analysis.recognise.recorder import Recording
from onboard.analysis.spec import Trait
from onboard.analysis.spec_blocks import Block, L2Norm, LayerNorm, Mlp, RMSNorm, Rope
from onboard.hf.architecture import text_config


def traits(
    whole: PretrainedConfig, tiny: nn.Module, recording: Recording, blocks: list[Block]
) -> dict[str, Trait]:
    """Return what applies to a model of this config, in reading order."""
    config = text_config(whole)
    found = {
        **_attention(config, text_config(tiny.config), recording),
        **_from_blocks(blocks),
        **mixture(config, blocks),
        **_rope(config, blocks),
        **_from_config(whole, config),
    }
    order = (
        "attention",
        "position",
        "rope",
        "norm",
        "mlp",
        "activation",
        "sliding_window",
        "attention_softcap",
    )
    return {key: found[key] for key in (*order, *found) if key in found}


def _attention(config: Any, tiny: Any, recording: Recording) -> dict[str, Trait]:
    if not recording.attention:
        return {}
    fields = config.to_dict()  # where layers have heads of their own, these are the others'
    heads = fields.get(config.attribute_map.get("num_attention_heads", "num_attention_heads"))
    kv_heads = fields.get(config.attribute_map.get("num_key_value_heads", "num_key_value_heads"))
    kv_heads = heads if kv_heads is None else kv_heads
    kind = "mha" if kv_heads == heads else "mqa" if kv_heads == 1 else "gqa"
    source = "num_key_value_heads"
    # All heads read one latent, of which keys and values are made
    if isinstance(fields.get("kv_lora_rank"), int):
        kind, source = "mla", "kv_lora_rank"
    evidence = f"probe: canonical attention leaves the logits as they are; config.json: {source}"
    out = {"attention": Trait(value=kind, evidence=evidence)}
    first = recording.attention[0]
    if any(call.window is not None for call in recording.attention):
        value = getattr(config, "sliding_window", None)
        out["sliding_window"] = Trait(
            value=value, evidence="probe: the mask is causal within the window"
        )
    if first.keywords["softcap"] is not None:
        out["attention_softcap"] = _softcap(config, tiny, first.keywords["softcap"])
    if first.keywords["s_aux"] is not None:
        out["attention_sinks"] = Trait(value=True, evidence="probe: keyword s_aux")
    return out


def _softcap(config: Any, tiny: Any, value: float) -> Trait:
    """The field that attention took its cap from in the tiny model has another value in the full
    one.
    """
    names = (
        name for name, own in tiny.to_dict().items() if own == value and isinstance(own, float)
    )
    if (name := next(names, None)) is None:
        return Trait(value=value, evidence="probe: keyword softcap")
    return Trait(
        value=getattr(config, name), evidence=f"probe: keyword softcap; config.json: {name}"
    )


def _from_blocks(blocks: list[Block]) -> dict[str, Trait]:
    out: dict[str, Trait] = {}
    for block in blocks:
        evidence = "; ".join([block.source, *block.evidence])
        match block:
            case RMSNorm(parameters=found):
                out["norm"] = Trait(
                    value="rmsnorm (1 + w)" if found.unit_offset else "rmsnorm", evidence=evidence
                )
            case LayerNorm() | L2Norm():
                out["norm"] = Trait(value=block.kind, evidence=evidence)
            case Mlp(parameters=found):
                out["mlp"] = Trait(value=found.mlp, evidence=evidence)
                out["activation"] = Trait(value=found.activation, evidence=evidence)
            case Rope(parameters=found) if not found.uncalled:
                out["position"] = Trait(value=found.op.removeprefix("torch_"), evidence=evidence)
    return out


def _rope(config: Any, blocks: list[Block]) -> dict[str, Trait]:
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or not any(block.kind == "rotary" for block in blocks):
        return {}
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    kinds = sorted({str(item.get("rope_type", "default")) for item in nested})
    return {"rope": Trait(value=", ".join(kinds), evidence="config.json: rope_parameters")}


def _from_config(whole: Any, text: Any) -> dict[str, Trait]:
    """Return what fields say: a multimodal model's own where it has them, else its text model's."""
    out = {}
    names = {
        "tie_word_embeddings": "tied_embeddings",
        "final_logit_softcapping": "logit_softcap",
        "logit_scale": "logit_scale",
    }
    for key, trait in names.items():
        value = getattr(whole, key, getattr(text, key, None))
        if value is not None:
            out[trait] = Trait(value=value, evidence=f"config.json: {key}")
    return out
