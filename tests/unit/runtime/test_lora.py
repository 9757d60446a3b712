"""Low-rank adapters: each request's logits are those of transformers' model with its adapter merged
into the weights, whatever else is in the batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard.errors import OnboardError, UsageError
from onboard.graph.lora.adapter_files import open_adapter
from onboard.graph.lora.without_adapters import without_adapters
from onboard.quantised.encode_four_bits import MXFP4_GROUP
from onboard.quantised.encoded import E2M1
from onboard.runtime.engine import Engine
from onboard.runtime.llm import LLM
from onboard.runtime.sampling_params import SamplingParams
from tests.support.runtime.adapters import Adapter, make_adapter
from tests.support.runtime.tiny import Tiny

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
GATED = ["gate_proj", "up_proj", "down_proj"]
GREEDY = {"temperature": 0.0, "max_tokens": 10}


def three(folder: Path, base: Tiny, last: list[str]) -> dict[str, Adapter]:
    """Adapters of different ranks, scales and layers."""
    return {
        "first": make_adapter(folder / "first", base, ATTENTION),
        "patterned": make_adapter(
            folder / "patterned", base, ["q_proj", "v_proj"], 17, 5,
            ranks={"layers.1.self_attn.v_proj": 3}, alphas={"q_proj": 7},
        ),
        "stabilised": make_adapter(folder / "stabilised", base, last, 3, 3, use_rslora=True),
    }  # fmt: skip


def adapted(base: Tiny, adapters: dict[str, Adapter], **runtime: Any) -> Engine:
    return base.engine(lora={name: str(each.folder) for name, each in adapters.items()}, **runtime)


def prompts(count: int, vocabulary: int = 97) -> list[list[int]]:
    seed = int(torch.randint(2**31, ()))
    print(f"prompts seed {seed}")
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, vocabulary, (9 + 4 * each,), generator=draw).tolist()
        for each in range(count)
    ]


def assert_right(engine: Engine, base: Tiny, adapters: dict[str, Adapter]) -> None:
    names = [None, *adapters, None, *reversed(adapters)]
    asked = list(zip(names, prompts(len(names)), strict=True))
    requests = [
        engine.submit(prompt, SamplingParams(**GREEDY, lora=name))[0] for name, prompt in asked
    ]
    engine.run()
    for (name, prompt), request in zip(asked, requests, strict=True):
        source = base if name is None else adapters[name]
        assert request.generated == source.greedy(prompt, 10), name
        assert_near(engine.logits(prompt, name), source.logits(prompt))


def test_a_graph_without_adapters_is_the_model_s(llama: Tiny, tmp_path: Path) -> None:
    """It shares its tensors; a step says whether it needs the other one."""
    own = three(tmp_path, llama, GATED)
    engine = adapted(llama, own, transforms={"call_ops_directly": {"enabled": False}})
    plain = without_adapters(engine.gm)
    assert plain is not None
    assert without_adapters(plain) is None
    shared = {each.data_ptr() for each in engine.gm.parameters()}
    assert {each.data_ptr() for each in plain.parameters()} == shared
    [prompt], name = prompts(1), "first"
    assert_near(replace(engine, gm=plain).logits(prompt, name), llama.logits(prompt))
    assert_near(engine.logits(prompt, name), own[name].logits(prompt))
    for lora in (None, name, None):
        engine.submit(prompt, SamplingParams(**GREEDY, lora=lora))
        engine.run()
        assert engine.cache.info.is_adapted is (lora is not None)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # Sums of float32 in another order; another adapter is off by a thousand times as much.
    assert (actual - expected).abs().max() <= 4e-5 * expected.abs().max()


def calls(engine: Engine) -> dict[str, int]:
    return {entry.key: entry.num_matches for entry in engine.history if "lora" in entry.key}


@pytest.mark.parametrize(
    ("kind", "options"),
    [("llama", {"own_file": True}), ("qwen2", {}), ("phi3", {"pad_token_id": 0})],
)
def test_a_mixed_batch_is_right(
    tiny: Callable[..., Tiny], tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    base = tiny(kind, **{"own_file": False, **options})
    fused = kind == "phi3"
    adapters = (
        {
            "first": make_adapter(tmp_path / "first", base, ["qkv_proj", "gate_up_proj"]),
            "second": make_adapter(tmp_path / "second", base, ["o_proj", "down_proj"], 20),
        }
        if fused
        else three(tmp_path, base, [*GATED, "q_proj"])
    )
    engine = adapted(base, adapters)
    assert_right(engine, base, adapters)
    # q, k and v are one call, and gate and up.
    assert calls(engine) == {"add_lora_adapters": 8, "choose_lora_adapters": 8}


def test_a_mixture_is_right(tiny: Callable[..., Tiny], tmp_path: Path) -> None:
    base = tiny("mixtral", own_file=False, num_local_experts=4)
    adapters = three(tmp_path, base, ["k_proj", "o_proj"])
    assert_right(adapted(base, adapters), base, adapters)


def test_it_is_right_in_chunks_and_when_steps_are_launched_ahead(
    llama: Tiny, tmp_path: Path
) -> None:
    adapters = three(tmp_path, llama, GATED)
    engine = adapted(llama, adapters, max_num_tokens=7, overlap=True)
    assert_right(engine, llama, adapters)
    assert engine.stats.steps_ahead


def test_codes_of_the_base_stay(tiny: Callable[..., Tiny], tmp_path: Path) -> None:
    """Weights that four bits hold exactly, so that the merged model's logits are the run's."""
    base = tiny(hidden_size=128, intermediate_size=128)
    for path, parameter in base.hf.named_parameters():
        if path.endswith("_proj.weight"):
            values = torch.tensor(E2M1)[torch.randint(16, parameter.shape)]
            values[:, ::MXFP4_GROUP] = 6.0
            parameter.data.copy_(values * 2.0**-4)
    base.hf.save_pretrained(base.checkpoint)
    adapters = three(tmp_path, base, GATED)
    engine = adapted(base, adapters, quantize="mxfp4")
    assert_right(engine, base, adapters)
    found = {entry.key: entry.num_matches for entry in engine.history}
    assert found["quantize_mxfp4_linear_from_config"] == 8


def test_cached_prefixes_are_each_adapter_s_own(llama: Tiny, tmp_path: Path) -> None:
    adapters = three(tmp_path, llama, GATED)
    engine = adapted(llama, adapters)
    prompt = prompts(2)[1]
    for name, reused in (("first", 0), ("stabilised", 0), (None, 0), ("first", 12), (None, 12)):
        [request] = engine.submit(prompt, SamplingParams(**GREEDY, lora=name))
        engine.run()
        assert request.num_reused == reused, name
        source = llama if name is None else adapters[name]
        assert request.generated == source.greedy(prompt, 10), name


def test_a_slot_s_next_sequence_does_not_have_its_adapter(llama: Tiny, tmp_path: Path) -> None:
    adapters = three(tmp_path, llama, GATED)
    engine = adapted(llama, adapters, max_batch_size=1)
    assert_right(engine, llama, adapters)


def test_the_python_interface(llama: Tiny, tmp_path: Path) -> None:
    adapters = three(tmp_path, llama, GATED)
    folders = {name: each.folder for name, each in adapters.items()}
    llm = LLM(llama.checkpoint, root=llama.root, device="cpu", dtype="float32", lora=folders)
    prompt, params = prompts(1)[0], SamplingParams(**GREEDY, prompt_logprobs=0)
    names = ["first", None, "stabilised"]
    expected = [(adapters[name] if name else llama).greedy(prompt, 10) for name in names]
    outputs = llm.generate([prompt] * 3, params, lora=names)
    for name, want, output in zip(names, expected, outputs, strict=True):
        assert output.outputs[0].token_ids == want, name
        scores = (adapters[name] if name else llama).logits(prompt).log_softmax(-1)
        for place, (token, row) in enumerate(
            zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        ):
            assert abs(row[token] - float(scores[place, token])) < 1e-4
    streamed = [t for delta in llm.stream(prompt, params, lora="first") for t in delta.token_ids]
    assert streamed == expected[0]
    with torch.no_grad():
        states = adapters["first"].hf.model(torch.tensor([prompt])).last_hidden_state[0, -1]
    found = llm.embed(prompt, normalize=False, lora="first")[0]
    assert (found - states).abs().max() <= 1e-5 * states.abs().max()
    for wrong in ("other", ["first", "first"], 3):
        with pytest.raises(UsageError):
            llm.generate([prompt], params, lora=wrong)  # type: ignore[arg-type]


def test_modes_without_adapters_say_so(llama: Tiny, tmp_path: Path) -> None:
    one = {"first": make_adapter(tmp_path / "first", llama, ATTENTION)}
    with pytest.raises(UsageError, match="adapters need mode graph"):
        adapted(llama, one, mode="hf")


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Adapter], Any]:
    """Save an adapter with another tensor in the place of one."""

    def save(adapter: Adapter) -> None:
        [key] = [key for key in adapter.tensors if f"layers.0.self_attn.q_proj.{name}" in key]
        adapter.save({**adapter.tensors, key: change(adapter.tensors[key])})

    return save


def renamed(old: str, new: str) -> Callable[[Adapter], Any]:
    return lambda adapter: adapter.save(
        {key.replace(old, new): value for key, value in adapter.tensors.items()}
    )


def cut_off(adapter: Adapter) -> None:
    path = adapter.folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickled(adapter: Adapter) -> None:
    (adapter.folder / "adapter_model.safetensors").rename(adapter.folder / "adapter_model.bin")


def without_config(adapter: Adapter) -> None:
    (adapter.folder / "adapter_config.json").unlink()


def a_list(adapter: Adapter) -> None:
    (adapter.folder / "adapter_config.json").write_text("[1]")


def half_of_a_pair(adapter: Adapter) -> None:
    first = next(iter(adapter.tensors))
    adapter.save({key: value for key, value in adapter.tensors.items() if key != first})


HOSTILE: dict[str, tuple[Callable[[Adapter], Any], str]] = {
    "shape": (changed("lora_A", lambda x: x[:, 1:].contiguous()), r"shape \[4, 31\].*\[4, 32\]"),
    "rank": (changed("lora_B", lambda x: x[:, 1:].contiguous()), r"shape \[32, 3\].*\[32, 4\]"),
    "dimensions": (changed("lora_B", lambda x: x[None]), r"shape \[1, 32, 4\]"),
    "NaN": (changed("lora_B", lambda x: x * float("nan")), "has NaN"),
    "infinity": (changed("lora_A", lambda x: x * float("inf")), "has (infinity|NaN)"),
    "integers": (changed("lora_A", lambda x: x.to(torch.int8)), "of int8.*not computed"),
    "large rank": (lambda a: a.save(r=10**6), "1,000,000 for a rank; at most 512"),
    "large pattern": (lambda a: a.save(rank_pattern={"q_proj": 10**6}), "at most 512"),
    "rank of no number": (lambda a: a.save(r="8"), "the rank 'r' is '8'"),
    "rank of zero": (lambda a: a.save(r=0), "the rank 'r' is 0"),
    "alpha": (lambda a: a.save(lora_alpha=float("nan")), "'lora_alpha' is nan"),
    "expression": (lambda a: a.save(rank_pattern={"(a+)+$": 4}), r"the expression '\(a\+\)\+\$'"),
    "patterns": (lambda a: a.save(alpha_pattern=[1]), r"alpha_pattern \[1\]"),
    "unknown layer": (renamed("q_proj", "x_proj"), "x_proj.lora_A.*target_modules does not name"),
    "unknown target": (
        lambda a: renamed("layers.1", "layers.7")(a),
        "layers.7.self_attn.[a-z]_proj', which is no linear layer",
    ),
    "path": (renamed("layers.0", "../../../etc"), r"'model.../../../etc.self_attn.*no linear"),
    "embedding": (renamed("lora_A", "lora_embedding_A"), "lora_embedding_A.*not computed"),
    "magnitude": (
        lambda a: a.save({**a.tensors, "x.lora_magnitude_vector": torch.ones(3)}),
        "lora_magnitude_vector.*not computed",
    ),
    "half": (half_of_a_pair, "has one matrix of two"),
    "nothing": (lambda a: a.save({"x": torch.ones(1)}), "has 'x'"),
    "cut off": (cut_off, "is cut off"),
    "pickled": (pickled, "no adapter_model.safetensors"),
    "no config": (without_config, "has no adapter_config.json"),
    "a list": (a_list, "is no JSON object"),
    "DoRA": (lambda a: a.save(use_dora=True), "has 'use_dora', which is not computed"),
    "bias": (lambda a: a.save(bias="all"), "has bias 'all'"),
    "modules": (lambda a: a.save(modules_to_save=["lm_head"]), "has 'modules_to_save'"),
    "parameters": (lambda a: a.save(target_parameters=["x"]), "has 'target_parameters'"),
    "replication": (lambda a: a.save(layer_replication=[[0, 1]]), "has 'layer_replication'"),
    "changed base": (lambda a: a.save(init_lora_weights="pissa"), "has init_lora_weights 'pissa'"),
    "a field of tomorrow": (lambda a: a.save(use_magic=True), "has 'use_magic'"),
    "another kind": (lambda a: a.save(peft_type="IA3"), "has peft_type 'IA3'"),
}


def opened_and_placed(base: Tiny, adapter: Adapter) -> None:
    open_adapter("one", adapter.folder)  # without the graph, where that is enough: it is quick
    adapted(base, {"one": adapter})


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_adapter_is_refused_in_one_line(llama: Tiny, tmp_path: Path, case: str) -> None:
    adapter = make_adapter(tmp_path / "one", llama, ATTENTION)
    spoil, message = HOSTILE[case]
    spoil(adapter)
    with pytest.raises(OnboardError) as caught:
        opened_and_placed(llama, adapter)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "../x", "a b", "a\nb", "x" * 200, "-x"])
def test_a_name_is_a_name(llama: Tiny, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        LLM(llama.checkpoint, root=llama.root, device="cpu", lora={name: tmp_path})
