"""Drafts of a checkpoint's own heads for multi-token prediction: the heads are right, and no token
is another one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from onboard.cache.cached_sequence import input_names
from onboard.errors import UsageError
from onboard.graph.draft_heads.captured_heads import captured_head, head_sizes
from onboard.graph.draft_heads.head_tensors import find_heads, heads_of_config
from onboard.graph.weight_load.quantised_folder import open_checkpoint
from onboard.runtime.engine import Engine
from onboard.runtime.sampling_params import SamplingParams
from onboard.runtime.scheduling.request import Request
from onboard.runtime.speculation.head_drafter import HeadDrafter
from onboard.testing.soak import Soak, in_double
from tests.support.drawing import some_of
from tests.support.graph.captures import stand_in_for_captures
from tests.support.graph.harness import rmse
from tests.support.runtime.own_heads import Headed, make_headed
from tests.unit.runtime.test_speculation import RECURRENT

MLA: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
MIXTURE: dict[str, Any] = {
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
KINDS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "latent attention, mixture": ("DeepSeek-V3, GLM-4.5", "deepseek_v3", 1, MLA),
    "mixture": ("DeepSeek-V3, GLM-4.5", "glm4_moe", 1, MIXTURE),
    "no norm of its own": ("ERNIE 4.5", "ernie4_5", 1, {"head_dim": 8}),
    "two in turn": ("MiMo", "qwen2", 2, {}),
    "one tree": ("Qwen3-Next", "qwen3", 1, {"head_dim": 8}),
    "beside recurrent states": ("Qwen3-Next", "qwen3_next", 1, RECURRENT["qwen3_next"]),
    "three in turn": ("DeepSeek-V3, GLM-4.5", "qwen3", 3, {"head_dim": 8}),
}


def _made(folder: Path, kind: str, **options: Any) -> Headed:
    release, model_type, count, own = KINDS[kind]
    return make_headed(folder, release, model_type, count, **own, **options)


def _drafter(engine: Engine) -> HeadDrafter:
    assert isinstance(engine.drafter, HeadDrafter)
    return engine.drafter


@torch.inference_mode()
def _rows(engine: Engine, ids: Sequence[int], number: int) -> Tensor:
    """Return a head's logits for all rows that it has of a text, [rows, vocabulary]; the model, and
    the heads before it, have read the text.
    """
    cache, head = engine.cache, _drafter(engine).heads[number]
    pages = np.arange(1, 1 + -(-len(ids) // cache.info.page_size))[None]
    later = np.array(ids[number + 1 :])
    count = np.array([len(later)])
    rows, positions = np.arange(len(later)), np.arange(len(later)) + 1 + number
    cache.info.set_batch(later, count * 0, count, pages, rows, position_ids=positions)
    return head.gm(**{name: cache.args[name] for name in input_names(head.gm)})[0]


@pytest.mark.parametrize("kind", some_of(KINDS, always=("three in turn",), by_chance=3))
def test_heads_compute_what_the_paper_says(kind: str, tmp_path: Path) -> None:
    """With transformers' own layers between the equations."""
    model = _made(tmp_path, kind)
    engine = model.tiny.engine(speculative={"draft": "mtp"})
    ids = torch.randint(1, 90, (17,)).tolist()
    pages = np.arange(1, 6)[None]
    with torch.inference_mode():
        engine.cache.info.set_batch(np.array(ids), np.array([0]), np.array([17]), pages)
        engine.cache.call(engine.gm)
    expected = model.rows(ids)
    assert len(_drafter(engine).heads) == len(expected)
    for number, rows in enumerate(expected):
        assert rmse(_rows(engine, ids, number), rows) <= 1e-5, number
    assert rmse(engine.logits(ids), model.tiny.logits(ids)) <= 1e-5


def test_embedding_and_output_layer_are_held_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a start that takes the model's graph from the cache, too."""
    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path / "cache"))
    model = _made(tmp_path, "two in turn").tiny
    first, engine = (model.engine(speculative={"draft": "mtp"}) for _ in range(2))
    known = [entry.key for entry in engine.history if entry.from_cache]
    assert "insert_cached_head_input" in known
    assert engine.cache.resources.keys() == first.cache.resources.keys()
    own = {each.data_ptr() for each in engine.gm.parameters()}
    for head in _drafter(engine).heads:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert head.gm.get_parameter(name).data_ptr() in own


class Watched(HeadDrafter):
    """Notes what was drafted for which text."""

    def watch(self) -> list[tuple[list[int], list[int]]]:
        self.seen: list[tuple[list[int], list[int]]] = []
        return self.seen

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        found = super().propose(requests)
        self.seen += [(list(each.tokens), own) for each, own in zip(requests, found, strict=True)]
        return found


@pytest.mark.parametrize(
    "kind", some_of(["one tree", "two in turn", "three in turn"], always=(), by_chance=1)
)
def test_drafts_are_those_of_the_heads_alone(kind: str, tmp_path: Path) -> None:
    """After accepted and refused drafts, chunked prompts and preemptions; computed anew for each
    text by the equations.
    """
    model = _made(tmp_path, kind, vocab_size=11)
    settings = {"max_tokens": 48, "enable_block_reuse": False}
    engine = model.tiny.engine(
        speculative={"draft": "mtp", "num_tokens": 4}, max_num_tokens=9, kv_cache_config=settings
    )
    engine.cache.info.decode_sizes = [2, 4]  # as on a GPU
    drafter = in_double(engine).drafter
    drafter.__class__ = Watched
    assert isinstance(drafter, Watched)
    seen = drafter.watch()
    params = SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True)
    for length in (3, 14, 7):
        engine.submit([random.randrange(1, 11) for _ in range(length)], params)
    engine.run()
    assert engine.stats.preemptions > 0
    doubled = model.doubled()
    for text, drafts in seen:
        assert drafts == doubled.chain(text, len(drafts)), text
    assert max(len(drafts) for _, drafts in seen) == drafter.most


def test_heads_draw_in_steps_that_are_padded(tmp_path: Path) -> None:
    """As decode steps are where their sizes are captured."""
    model, answers = _made(tmp_path, "two in turn").tiny, []
    prompts = [[random.randrange(1, 90) for _ in range(length)] for length in (3, 14, 7)]
    for settings in ({}, {"speculative": {"draft": "mtp"}}):
        engine = in_double(model.engine(**settings))
        engine.cache.info.decode_sizes = [2, 4]
        params = SamplingParams(max_tokens=18, seed=5, ignore_eos=True)
        outputs = [engine.submit(prompt, params)[0] for prompt in prompts]
        engine.run()
        answers.append([output.generated for output in outputs])
    assert answers[0] == answers[1]
    assert engine.stats.drafted_tokens > 40


@pytest.mark.parametrize("kind", some_of(["one tree", "three in turn"], always=(), by_chance=1))
def test_captured_heads_draft_the_same(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture itself is stood in for by the step again."""
    stand_in_for_captures(monkeypatch)
    model, found = _made(tmp_path, kind, vocab_size=11).tiny, []
    prompts = [[random.randrange(1, 11) for _ in range(length)] for length in (3, 14, 7)]
    for captured in (False, True):
        engine = in_double(model.engine(speculative={"draft": "mtp", "num_tokens": 3}))
        engine.cache.info.decode_sizes = [1, 2, 4]
        drafter = _drafter(engine)
        if captured:
            sizes = head_sizes(3, 64, 4, 64)
            heads = [
                captured_head(each, engine.cache, [1, 2, 4], sizes, engine.facts)
                for each in drafter.heads
            ]
            drafter.heads = heads
        drafter.__class__ = Watched
        assert isinstance(drafter, Watched)
        seen = drafter.watch()
        params = SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True)
        for prompt in prompts:
            engine.submit(prompt, params)
        engine.run()
        found.append(seen)
    assert found[0] == found[1]
    assert all(head.gm.replays > 10 for head in heads)


class Informed(HeadDrafter):
    """Drafts what a request of a soak will get, four times out of five; the heads read along, and
    say what else is drafted.
    """

    def inform(self, soak: Soak, seed: int) -> None:
        self.soak, self.random = soak, random.Random(seed)

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        found = super().propose(requests)
        return [self._of(*each) for each in zip(requests, found, strict=True)]

    def _of(self, request: Request, drafts: list[int]) -> list[int]:
        rest = self.soak.expected(request)[request.num_generated :]
        right = [own if self.random.random() < 0.8 else draft for own, draft in zip(rest, drafts)]  # noqa: B905
        return right + drafts[len(right) :]


@pytest.mark.parametrize(
    "kind",
    some_of(
        ["two in turn", "latent attention, mixture", "beside recurrent states"],
        always=(),
        by_chance=1,
    ),
)
def test_no_request_of_a_soak_notices_own_heads(kind: str, tmp_path: Path) -> None:
    """With stops, cancels, priorities, preemptions, reused prefixes, sampling and chunked prompts,
    until all of them have come about: whether a random head is ever right would be luck.
    """
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    model = _made(tmp_path, kind, vocab_size=13).tiny
    engine = in_double(
        model.engine(
            speculative={"draft": "mtp", "num_tokens": 3},
            max_num_tokens=24,
            kv_cache_config={"max_tokens": 88},
        )
    )
    alone = in_double(model.engine(kv_cache_config={"enable_block_reuse": False}))
    soak = Soak(engine, alone, questions=12, seed=seed, cancel_share=0.1)
    for _ in range(2):  # that do not fit in together
        long = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        soak.add(random.choices(range(13), k=40), long)
    drafter = _drafter(engine)
    drafter.__class__ = Informed
    assert isinstance(drafter, Informed)
    drafter.inform(soak, seed)
    stats, report = engine.stats, soak.report

    def least() -> int:
        seen = stats.accepted_tokens, stats.preemptions, stats.prefix_hits, report.cancelled
        return min(*seen, stats.drafted_tokens - stats.accepted_tokens)

    soak.run(1000, go_on=lambda: report.requests < 32 or not least())
    print(stats)
    assert report.wrong == []
    assert least() > 0


def test_what_own_heads_do_not_go_with_is_refused(llama: Any, tmp_path: Path) -> None:
    drafting: dict[str, Any] = {"speculative": {"draft": "mtp"}}
    with pytest.raises(UsageError, match="has no head for multi-token prediction"):
        llama.engine(**drafting)
    with pytest.raises(UsageError, match="do not draft with mode hf"):
        llama.engine(**drafting, mode="hf")
    with pytest.raises(UsageError, match="do not draft with adapters"):
        llama.engine(**drafting, lora={"a": str(tmp_path)})
    with pytest.raises(UsageError, match="config has none of num_nextn_predict_layers"):
        llama.engine(**drafting, skip_loading_weights=True)


def test_random_weights_have_the_heads_that_the_config_names(tmp_path: Path) -> None:
    """They are what is found in a checkpoint of these names, and draft."""
    model = _made(tmp_path, "three in turn").tiny
    file = model.checkpoint / "config.json"
    config = {**json.loads(file.read_text()), "num_nextn_predict_layers": 3}
    layers, size = list(model.hf.model.layers), config["hidden_size"]
    names = open_checkpoint(model.checkpoint).names()
    found = find_heads(layers, size, model.hf.state_dict(), names)
    assert heads_of_config(config, "model.layers", layers) == found
    file.write_text(json.dumps(config))
    (model.checkpoint / "model.safetensors").unlink()
    settings: dict[str, Any] = {"skip_loading_weights": True}
    plain = in_double(model.engine(**settings))
    engine = in_double(model.engine(**settings, speculative={"draft": "mtp"}))
    assert _drafter(engine).most == 3
    greedy, answers = SamplingParams(temperature=0.0, max_tokens=20), []
    for each in (plain, engine):
        output = each.submit([3, 1, 4, 1, 5], greedy)[0]
        each.run()
        answers.append(output.generated)
    assert answers[0] == answers[1]
    assert engine.stats.drafted_tokens > 20


def test_a_head_that_has_no_layer_like_the_models_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = _made(tmp_path, "one tree").tiny
    path = model.checkpoint / "model.safetensors"
    tensors = load_file(path)
    tensors["mtp.layers.0.mlp.up.weight"] = tensors.pop("mtp.layers.0.mlp.up_proj.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    assert model.engine().logits([1, 2]).shape == (2, 97), "without drafts nothing is missing"
    with pytest.raises(UsageError, match=r"head of mtp\.fc\.weight is like none"):
        model.engine(speculative={"draft": "mtp"})
