"""Experts that are quantised one by one, in checkpoints of models that have them in stacks: as
llm-compressor writes Llama 4 and gpt-oss. Each is compared with weights drawn number by number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from onboard import LLM
from onboard.errors import OnboardError
from onboard.graph.context import TransformContext
from onboard.graph.weight_load.experts.quantised_mixtures import EXPERT_KEYS
from onboard.graph.weight_load.quantised_folder import (
    QuantisedCheckpoint,
    decoded_state,
    open_checkpoint,
)
from onboard.hf.hf_model import load_reference
from onboard.verify.quantised_inputs import quantise_inputs
from onboard.workflow.checkpoint.parameter_count import build_on_meta
from onboard.workflow.checkpoint.usable_weights import check_fit
from tests.support.checkpoints import save_tokenizer
from tests.support.quantised_drawing import Layer, eight_bits, packed

EXPERTS, HIDDEN, INNER = 3, 64, 32
IGNORED = ["re:.*lm_head", "re:.*self_attn", "re:.*router", "re:.*vision_model.*"]
"""As releases have it; 2 * INNER is HIDDEN: one shape does not tell which side is inputs'."""
LLAMA4 = "language_model.model.layers.0.feed_forward.experts"
GPT_OSS = "model.layers.0.mlp.experts"
Tensors = dict[str, torch.Tensor]


def drawn(draw: random.Random, kind: Callable[..., Layer]) -> dict[str, Layer]:
    """Layers of all experts in one scheme."""
    shapes = {
        "gate_proj": (INNER, HIDDEN),
        "up_proj": (INNER, HIDDEN),
        "down_proj": (HIDDEN, INNER),
    }
    seed, found = draw.random(), {}
    for expert in range(EXPERTS):
        for name, shape in shapes.items():
            found[f"{expert}.{name}"] = kind(random.Random(seed), shape)
    return found


def text_config(model_type: str) -> dict[str, Any]:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": EXPERTS}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    rest = {"vocab_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 64}
    return {"model_type": model_type, **sizes, **heads, **rest, "num_experts_per_tok": 1}


def llama4(folder: Path, layers: dict[str, Layer]) -> Path:
    """The whole model's layout, with the names that the text model has in it."""
    text = text_config("llama4_text") | {
        "intermediate_size_mlp": INNER,
        "interleave_moe_layer_step": 1,
    }
    config = {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"]}
    return written(folder, {**config, "text_config": text}, LLAMA4, layers)


def gpt_oss(folder: Path, layers: dict[str, Layer]) -> Path:
    config = text_config("gpt_oss") | {"architectures": ["GptOssForCausalLM"]}
    sizes = {"gate_proj": INNER, "up_proj": INNER, "down_proj": HIDDEN}
    biases = {f"{n}.{k}.bias": torch.randn(s) for n in range(EXPERTS) for k, s in sizes.items()}
    return written(folder, config, GPT_OSS, layers, biases)


def written(
    folder: Path,
    config: dict[str, Any],
    path: str,
    layers: dict[str, Layer],
    more: Tensors | None = None,
) -> Path:
    """A checkpoint of experts, and of what else the model has."""
    said = {
        "quant_method": "compressed-tensors",
        "ignore": IGNORED,
        "config_groups": groups(layers),
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    prefix = "language_model." if path == LLAMA4 else ""
    rest = {
        prefix + name: torch.randn(each.shape) / 8
        for name, each in build_on_meta(folder).state_dict().items()
        if ".experts." not in name
    }
    parts = {
        f"{path}.{layer}.{end}": part
        for layer, each in layers.items()
        for end, part in each.tensors.items()
    }
    others = {f"{path}.{name}": each for name, each in (more or {}).items()}
    save_file({**rest, **parts, **others}, folder / "model.safetensors", {"format": "pt"})
    return folder


def groups(layers: dict[str, Layer]) -> dict[str, Any]:
    """The schemes of the layers of one expert."""
    return {
        name: {
            **layers[f"0.{name}"].said["config_groups"]["group_0"],
            "format": layers[f"0.{name}"].said["format"],
            "targets": [f"re:.*{name}$"],
        }
        for name in ("gate_proj", "up_proj", "down_proj")
    }


def expected(layers: dict[str, Layer], *, in_turns: bool) -> dict[str, torch.Tensor]:
    """The stacks, inputs first, in float64."""
    pairs = [
        [layers[f"{expert}.{piece}"].weight for piece in ("gate_proj", "up_proj")]
        for expert in range(EXPERTS)
    ]
    joined = [
        torch.stack(
            [gate[row] if part == 0 else up[row] for row in range(INNER) for part in (0, 1)]
        )
        if in_turns
        else torch.cat([gate, up])
        for gate, up in pairs
    ]
    down = [layers[f"{expert}.down_proj"].weight for expert in range(EXPERTS)]
    return {
        "gate_up_proj": torch.stack([each.T for each in joined]),
        "down_proj": torch.stack([each.T for each in down]),
    }


def require_stacks(folder: Path, path: str, stacks: dict[str, torch.Tensor]) -> QuantisedCheckpoint:
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, QuantisedCheckpoint)
    for name, stack in stacks.items():
        found = checkpoint.read(f"{path}.{name}").double()
        assert found.shape == stack.shape == checkpoint.names()[f"{path}.{name}"].shape
        assert (found - stack).norm() <= 1e-6 * stack.norm()
    assert not [name for name in checkpoint.names() if ".experts.0." in name]
    assert not check_fit(build_on_meta(folder), checkpoint.names())
    return checkpoint


def fresh(kind: Callable[..., Layer]) -> dict[str, Layer]:
    """Layers of a seed that is printed, which torch has, too."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return drawn(random.Random(seed), kind)


@pytest.mark.drawn(few=1)
@pytest.mark.parametrize("kind", [packed, eight_bits])
def test_llama4_as_it_is_released(kind: Callable[..., Layer], tmp_path: Path) -> None:
    layers = fresh(kind)
    require_stacks(llama4(tmp_path, layers), LLAMA4, expected(layers, in_turns=False))


@pytest.mark.parametrize("kind", [packed, eight_bits])
def test_gates_in_turns_and_biases(kind: Callable[..., Layer], tmp_path: Path) -> None:
    layers = fresh(kind)
    folder = gpt_oss(tmp_path, layers)
    checkpoint = require_stacks(folder, GPT_OSS, expected(layers, in_turns=True))
    stored = load_file(folder / "model.safetensors")
    both, down = (
        checkpoint.read(f"{GPT_OSS}.{name}_bias") for name in ("gate_up_proj", "down_proj")
    )
    for expert in range(EXPERTS):
        gate, up, own = (
            stored[f"{GPT_OSS}.{expert}.{piece}_proj.bias"] for piece in ("gate", "up", "down")
        )
        assert torch.equal(both[expert, ::2], gate)
        assert torch.equal(both[expert, 1::2], up)
        assert torch.equal(down[expert], own)
    facts = [fact for fact in checkpoint.facts() if " weights in " in fact]
    assert sum(int(fact.split()[0]) for fact in facts) == 2  # biases are none


def test_an_expert_that_is_left_alone(tmp_path: Path) -> None:
    layers = drawn(random.Random(1), eight_bits)
    plain = torch.randn(INNER, HIDDEN)
    layers["1.up_proj"] = Layer({"weight": plain}, {}, plain.double(), ())
    checkpoint = require_stacks(llama4(tmp_path, layers), LLAMA4, expected(layers, in_turns=False))
    assert checkpoint.weights[f"{LLAMA4}.gate_up_proj"].computed_as not in ("fp8", "int8")


@pytest.mark.drawn(few=1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: [t.pop(f"{LLAMA4}.2.up_proj.{end}") for end in ("weight", "weight_scale")],
            r"no .*experts\.2\.up_proj\.weight",
        ),
        (
            lambda t: t.update(
                {f"{LLAMA4}.2.up_proj.weight": t[f"{LLAMA4}.2.up_proj.weight"][:16].clone()}
            ),
            r"experts\.gate_up_proj \[3, 64, 64\] is not made of such",
        ),
    ],
)
def test_experts_that_are_no_stack(
    change: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    layers = {name: by_tensor(each) for name, each in drawn(random.Random(3), eight_bits).items()}
    folder = llama4(tmp_path, layers)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(OnboardError, match=message):
        open_checkpoint(folder).names()


@pytest.mark.parametrize("static", [False, True])
def test_codes_and_inputs_in_eight_bits(static: bool, tmp_path: Path) -> None:
    """Beside transformers' model whose experts quantise their inputs alike."""
    layers = {name: by_tensor(each) for name, each in drawn(random.Random(5), eight_bits).items()}
    inputs = {"num_bits": 8, "type": "float", "dynamic": not static}
    inputs["strategy"] = "tensor" if static else "token"
    for layer in layers.values():
        layer.said["config_groups"]["group_0"]["input_activations"] = inputs
        layer.tensors.update({"input_scale": torch.tensor([0.02])} if static else {})
    folder = gpt_oss(tmp_path, layers)
    save_tokenizer(folder)
    ids = [1, 17, 5, 42, 9, 33, 28, 60, 11, 3]
    transforms = {key: {"backend": "torch"} for key in EXPERT_KEYS}
    llm = LLM(str(folder), device="cpu", dtype="float32", config={"transforms": transforms})
    found, history = llm.logits(ids), llm.engine.history
    assert sum(entry.num_matches for entry in history if entry.key in EXPERT_KEYS) == 1
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    config: Any = AutoConfig.from_pretrained(folder)
    reference = load_reference(config, folder, state=decoded_state(folder), **options)
    exact = reference(torch.tensor([ids])).logits[0]
    run = SimpleNamespace(factory=SimpleNamespace(checkpoint=folder), history=history)
    assert quantise_inputs(reference, cast(TransformContext, run))
    with torch.no_grad():
        alike = reference(torch.tensor([ids])).logits[0]
    assert (found - alike).norm() < 1e-5 * alike.norm()
    assert (found - exact).norm() > 1e-4 * exact.norm()


def by_tensor(layer: Layer) -> Layer:
    """The same codes with one scale."""
    scheme = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    }
    codes = layer.tensors["weight"].float().to(torch.float8_e4m3fn)
    said = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": scheme},
    }
    tensors = {"weight": codes, "weight_scale": torch.tensor([0.01])}
    return Layer(tensors, said, codes.double() * torch.tensor([0.01]).double(), ())
