"""Ranks that follow one another: each has layers of its own, and together they choose the tokens of
one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onboard import LLM, SamplingParams
from onboard.config import RuntimeConfig
from onboard.errors import UsageError
from onboard.graph.export.to_graph import export_to_graph
from onboard.graph.factory import ModelFactory
from onboard.graph.fx import nodes_of
from onboard.graph.pipeline_stages.split_stages import rank_of_stage, split, stage_of_rank
from onboard.parallel.ranks import Ranks
from onboard.parallel.workers import Workers
from onboard.runtime.ranks.following import ready
from onboard.runtime.ranks.kept_division import find_division
from onboard.runtime.ranks.leading import kept_workers
from onboard.testing.prompts import ragged_prompts
from onboard.verify.error import rmse_ratio
from onboard.verify.transforms.stages import verify_model
from tests.support.sharding.zoo import ROOT, divided, save_family

ops = torch.ops.onboard
LIMIT = 1e-5
"""Of the root mean square error, relative to the expected values."""
SETTINGS: dict[str, Any] = {
    "max_seq_len": 64,
    "max_batch_size": 4,
    "max_num_tokens": 32,
    "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 256, "state_snapshots": 16},
}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
FAMILIES = [
    "gemma3_text",  # pages of the window are one rank's, those of all keys the other's
    "qwen3_next",  # states on one rank, keys on the other
    pytest.param("mixtral", marks=pytest.mark.exhaustive),
]


@pytest.fixture(scope="module")
def seed() -> int:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    return seed


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """The ranks keep graphs: a model that is loaded again starts from these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONBOARD_CACHE", str(tmp_path_factory.mktemp("graphs")))
        with kept_workers(2) as workers:
            yield workers


def load(checkpoint: Path, stages: int, **settings: Any) -> LLM:
    mapping = {"dist_mapping": {"pp": stages}}
    all_settings = SETTINGS | mapping | settings
    return LLM(checkpoint, ROOT, device="cpu", world_size=stages, settings=all_settings)


def run(llm: LLM, seed: int) -> tuple[list[torch.Tensor], list[list[int]]]:
    """More sequences than fit at a time, and then prompts that begin as earlier ones do."""
    prompts = ragged_prompts(int(llm.engine.vocab_size or 0), (3, 17, 1, 29, 40, 21), seed)
    logits = [llm.logits(prompt) for prompt in prompts]
    first = [list(each.token_ids) for each in llm.generate(prompts, GREEDY)]
    again = [[*prompt, *new[:3]] for prompt, new in zip(prompts, first, strict=True)]
    return logits, [*first, *(list(each.token_ids) for each in llm.generate(again, GREEDY))]


def assert_same(several: LLM, alone: LLM, seed: int) -> None:
    (logits, tokens), (expected, same) = run(several, seed), run(alone, seed)
    assert tokens == same
    assert max(map(rmse_ratio, logits, expected)) < LIMIT
    assert several.engine.stats.reused_tokens == alone.engine.stats.reused_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_two_stages_choose_the_tokens_of_one_rank(
    workers: Workers, tmp_path: Path, seed: int, family: str
) -> None:
    checkpoint = save_family(tmp_path, family, seed)
    alone = load(checkpoint, 1)
    with load(checkpoint, 2) as both:
        assert_same(both, alone, seed)
        assert both.ranks is not None
        shares, division = both.ranks.shares, both.ranks.division
    whole = ready(alone.engine)
    assert sum(share.cache_bytes for share in shares) == whole.cache_bytes
    first, last = (size for _, size in division.stages)
    assert [share.weight_bytes for share in shares] == [last, first]
    assert [share.bytes_read for share in shares] == [last, first]
    assert max(first, last) < 0.8 * whole.bytes_read


def test_steps_launched_ahead_read_the_tokens_that_were_chosen(
    workers: Workers, tmp_path: Path, seed: int
) -> None:
    """The second time the ranks start from the graphs that they kept."""
    checkpoint = save_family(tmp_path, "llama", seed)
    found = []
    for stages, overlap in ((1, False), (2, False), (2, True)):
        with load(checkpoint, stages, overlap=overlap) as llm:
            found.append(run(llm, seed))
            assert bool(llm.engine.stats.steps_ahead) == overlap
            assert any(entry.from_cache for entry in llm.engine.history) == overlap
    (expected, tokens), *others = found
    for logits, own in others:
        assert own == tokens
        assert max(map(rmse_ratio, logits, expected)) < LIMIT


def test_the_last_stage_is_that_of_the_rank_that_chooses() -> None:
    assert [rank_of_stage(stage, 3) for stage in range(3)] == [1, 2, 0]
    assert [stage_of_rank(rank, 3) for rank in range(3)] == [2, 0, 1]


def test_a_stage_has_the_weights_of_its_layers_alone(tmp_path: Path, seed: int) -> None:
    sizes = {"num_hidden_layers": 5, "tie_word_embeddings": False}
    checkpoint = save_family(tmp_path, "llama", seed, **sizes)
    whole, _ = divided(checkpoint, Ranks(0, 1))
    layers, names = [], set()
    for rank in (1, 2, 0):
        gm, context = divided(checkpoint, Ranks(rank, 3), dist_mapping={"pp": 3})
        own = {name for name, _ in gm.named_parameters()}
        layers.append({int(name.split(".")[2]) for name in own if ".layers." in name})
        assert not names & own
        names |= own
        assert ("embed_tokens" in str(own)) == (rank == 1)
        assert ("lm_head" in str(own)) == (rank == 0)
        assert len(nodes_of(gm, ops.receive_from_stage)) == (rank != 1)
        assert len(nodes_of(gm, ops.send_to_stage)) == (rank != 0)
    assert layers == [{0}, {1, 2}, {3, 4}]
    assert names == {name for name, _ in whole.named_parameters()}


class Skips(nn.Module):
    """Four layers; the last two read what the first has given, and a size of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = first = self.layers[0](self.embed(input_ids))
        for layer in self.layers[1:]:
            x = (layer(x) + first).reshape(first.shape[0], first.shape[1], 8)
        return x * position_ids[..., None]


def test_what_a_later_stage_reads_goes_through_those_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stages are run one after another here, and what they send is kept for the next."""
    sent: dict[tuple[int, int], torch.Tensor] = {}

    class Group:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def send(self, tensors: list[torch.Tensor], rank: int, number: int) -> Group:
            sent[rank, number] = tensors[0].clone()
            return self

        def recv(self, tensors: list[torch.Tensor], rank: int, number: int) -> Group:
            tensors[0].copy_(sent.pop((self.rank, number)))
            return self

        def wait(self) -> None:
            pass

    model = Skips().eval().requires_grad_(False)
    ids, positions = torch.randint(40, (2, 7)), torch.arange(7).expand(2, 7)
    factory = ModelFactory(Path("unused"), root=None, dtype=torch.float32, model_kwargs={})
    handed = []
    for stage in range(4):
        gm = export_to_graph(
            model, factory.example_inputs(), factory.dynamic_shapes(), torch.device("cpu")
        )
        done = split(gm, rank_of_stage(stage, 4), 4)
        handed.append((done.received, done.sent))
        gm.graph.eliminate_dead_code()
        gm.recompile()
        group = Group(rank_of_stage(stage, 4))
        monkeypatch.setattr(
            "onboard.ops.collectives.stage_exchange.current_group", lambda own=group: own
        )
        result = gm(ids, positions)
    assert handed == [(0, 1), (1, 2), (2, 2), (2, 0)]
    assert not sent
    torch.testing.assert_close(result, model(ids, positions))


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"world_size": 4}, "pp 2 for 4 ranks, and a stage has one rank", "4, or to 1"),
        ({"dist_mapping": {"pp": 2, "tp": 2}}, "pp 2, and the layers .* not divided", "Leave tp"),
        ({"mode": "hf"}, "pipeline stages need mode graph", "pp out"),
        ({"speculative": {"draft": "ngram"}}, "drafts are for one device", "pp out"),
        ({"lora": {"own": "nowhere"}}, "pipeline stages have no adapters", "pp out"),
        ({"world_size": 3, "dist_mapping": {"pp": 3}}, "pp 3 and the model has 2 layers", "to 2"),
    ],
)
def test_what_stages_do_not_do_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str, hint: str
) -> None:
    checkpoint = save_family(tmp_path, "llama", 1)
    values = {"world_size": 2, "dist_mapping": {"pp": 2}, **settings}
    with pytest.raises(UsageError, match=message) as raised:
        find_division(checkpoint, RuntimeConfig.model_validate(values), gpu=False, root=ROOT)
    assert hint in raised.value.hint


def test_stages_are_not_verified_one_by_one(tmp_path: Path) -> None:
    checkpoint = save_family(tmp_path, "llama", 1)
    settings = {"world_size": 2, "dist_mapping": {"pp": 2}}
    with pytest.raises(UsageError, match="each rank's logits"):
        verify_model(checkpoint, root=ROOT, device="cpu", settings=settings)
