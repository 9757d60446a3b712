"""A plan without torch against the plan by the run's own graph."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from onboard.cache.written_plan import read_plan, written_plan
from onboard.config import KVCacheConfig, RuntimeConfig
from onboard.content import CONTENT_ROOT
from onboard.runtime.plan import count_memory
from tests.support.drawing import some_of

FAMILIES = sorted(
    path.stem.removeprefix("modeling_") for path in CONTENT_ROOT.glob("models/modeling_*.py")
)
MAY_BE_UNSURE = {"codegen", "cohere", "cohere2", "gpt_neo", "gptj", "qwen2_5_vl"}
"""Families for which a graph is made: transforms change what their code says, with some options, or
the config has parts.
"""
SPAN = 4
_ASK = """if True:
    import json, sys
    from pathlib import Path
    from onboard.config import RuntimeConfig
    from onboard.runtime.sketch.ask import sketched
    from onboard.cache.written_plan import written_plan
    for root in sys.argv[3:]:
        states = {"mamba_ssm_cache_dtype": sys.argv[2]}
        runtime = RuntimeConfig(model=sys.argv[1], kv_cache_config=states)
        found = sketched(Path(sys.argv[1]), runtime, gpu=True, root=Path(root))
        print(json.dumps({"unsure": found} if isinstance(found, str) else written_plan(found)))
    assert "torch" not in sys.modules"""


def _asked(checkpoint: Path, *roots: Path, states: str = "auto") -> list[dict[str, Any]]:
    """Return what a fresh process, in which torch is not imported, says with the models of each
    root, for states of a dtype.
    """
    command = [sys.executable, "-c", _ASK, str(checkpoint), states, *map(str, roots)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in said.splitlines()]


def _each_kind_once(base: Any) -> int:
    """Return how many first layers have each kind: a graph drops a table that none of them reads."""
    kinds = getattr(base, "layer_types", None) or [None]
    return max(2, 1 + max(kinds.index(kind) for kind in kinds))


def _config(folder: Path, family: str, draw: random.Random) -> Path:
    """Write a config of a family: its class's defaults, few layers, and some drawn changes."""
    own = CONFIG_MAPPING[family]
    whole = own()
    base = whole.get_text_config()
    changes: dict[str, Any] = {"dtype": draw.choice(["float32", "bfloat16", "float16"])}
    if family not in ("gpt_neo", "mamba2"):  # whose layers and sizes other fields repeat
        changes["vocab_size"] = base.vocab_size + draw.choice([0, 3, 64])
        changes["num_hidden_layers"] = _each_kind_once(base) + draw.randrange(3)
    if family == "nemotron":  # without a default that works
        changes["num_key_value_heads"] = base.num_attention_heads
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias"):
        if isinstance(getattr(base, name, None), bool) and draw.random() < 0.5:
            changes[name] = not getattr(base, name)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if base.to_dict().get(name):
            changes[name] = 16
    if getattr(base, "sliding_window", None) and draw.random() < 0.5:
        changes["sliding_window"] = 128
    folder.mkdir()
    own(**(changes if base is whole else {"text_config": changes})).save_pretrained(folder)
    print(f"{family}: {changes}")
    return folder


@pytest.mark.parametrize("family", some_of(FAMILIES, always=(), by_chance=1))
def test_a_sketch_is_the_plan_of_the_graph(family: str, tmp_path: Path) -> None:
    seed = random.randrange(1000)
    print("seed", seed)
    draw = random.Random(seed)
    folder = _config(tmp_path / "model", family, draw)
    states = draw.choice(["auto", "bfloat16"])
    print("states", states)
    (found,) = _asked(folder, tmp_path, states=states)
    if "unsure" in found:
        assert family in MAY_BE_UNSURE, found
        return
    sketch = read_plan(found)
    caches = KVCacheConfig(mamba_ssm_cache_dtype=states)
    runtime = RuntimeConfig(model=str(folder), kv_cache_config=caches)
    exact, _ = count_memory(folder, runtime, gpu=True, root=tmp_path)
    bounded = ("activations", "graphs")
    sizes, expected = (
        {name: value for name, value in asdict(each).items() if name not in (*bounded, "cache")}
        for each in (sketch, exact)
    )
    assert sizes == expected | {"span": SPAN}
    assert sketch.limits == exact.limits
    document = written_plan(exact)["resources"]
    assert _forms(found["resources"]) == _forms(json.loads(json.dumps(document)))
    for name in bounded:
        most, least = getattr(sketch, name), getattr(sketch.least(), name)
        assert least <= getattr(exact, name) <= most, name


def _forms(groups: list[Any]) -> list[tuple[str, int]]:
    """Return forms of caches, in the order in which they first occur, and the number of each."""
    counts = Counter[str]()
    for kind, values, count in groups:
        counts[json.dumps([kind, values], sort_keys=True)] += count
    return list(counts.items())


_LAYER = """
from __future__ import annotations

import torch
from torch import nn

import onboard.ops
from onboard.modeling import CausalLMOutput, register_causal_lm


class LlamaForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.one = nn.Linear(config.hidden_size, 4, bias=False)
        self.other = nn.Linear(config.hidden_size, 4, bias=True)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids)
        {code}
        return CausalLMOutput(logits=self.head(x))


register_causal_lm("LlamaConfig", LlamaForCausalLM)
"""
_CODE = {
    "plain": "x = x + self.one(x).sum(dim=-1, keepdim=True)",
    "shifted": "x = x + torch.cat((x[:, -1:], x[:, :-1]), dim=1)",
    "summed": "x = x + x.mean(dim=1, keepdim=True)",
    "mixed": "x = (x @ x.transpose(1, 2)) @ x",
    "decided": "x = x if self.one.weight.sum() > 0 else -x",
    "unheard_of": "x = torch.fft.fft(x)",
    "biases": "x = x + (self.one(x) + self.other(x)).sum(dim=-1, keepdim=True)",
    "padding": "x = nn.Embedding(5, 8, padding_idx=5)(input_ids)",
    "no_cached_form": "x = x + torch.ops.onboard.torch_attention_repeat_kv(x[:, None], 2)[:, 0]",
}


def test_what_shapes_do_not_tell_is_not_guessed(tmp_path: Path) -> None:
    """Each of these would change caches, weights or values in ways that a sketch does not see."""
    folder = tmp_path / "model"
    folder.mkdir()
    values = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}
    (folder / "config.json").write_text(json.dumps(values))
    plain, *others = _asked(folder, *(_root(tmp_path / name, _CODE[name]) for name in _CODE))
    assert "unsure" not in plain
    words = [each.get("unsure", "") for each in others]
    assert all("tokens are mixed" in each for each in words[:3]), words
    assert all(
        word in each
        for word, each in zip(
            ("value decides", "fft", "bias", "padding_idx", "repeat_kv"), words[3:], strict=True
        )
    ), words


def _root(root: Path, code: str) -> Path:
    """Return a root whose model file has this code between embedding and head."""
    (root / "models").mkdir(parents=True)
    (root / "models" / "modeling_llama.py").write_text(_LAYER.replace("{code}", code))
    return root


def test_the_command_says_that_bounds_are_bounds_and_decides_by_them(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    CONFIG_MAPPING["llama"](num_hidden_layers=2, dtype="bfloat16").save_pretrained(folder)
    command = [sys.executable, "-m", "onboard", "plan", str(folder), "--json", "--root"]
    said = subprocess.run(
        [*command, str(tmp_path), "--gpu", "H100"], capture_output=True, text=True, check=True
    )
    document = json.loads(said.stdout)
    assert document["span"] == SPAN
    assert document["fits"]
    assert any("upper bounds" in fact for fact in document["facts"])
    assert document["gpus_needed"]["H100"] == 1
