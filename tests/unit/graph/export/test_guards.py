"""A graph is only right for the sizes for which its model's code would have taken the same path."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from onboard.config import SettledConfig
from onboard.errors import OnboardError
from onboard.graph.context import TransformContext
from onboard.graph.export.guards import (
    broken_guard,
    broken_guards,
    fit_or_refuse,
    refuse_broken_guard,
)
from onboard.graph.export.to_graph import export_to_graph

TRACED = (3, 11)


class _Branching(nn.Module):
    def __init__(self, is_long: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 4)
        self.is_long = is_long

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids + position_ids)
        return hidden * 2 if self.is_long(input_ids) else hidden


def _exported(model: nn.Module | Callable[[torch.Tensor], bool]) -> fx.GraphModule:
    model = model if isinstance(model, nn.Module) else _Branching(model)
    ids = torch.arange(33).view(TRACED)
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    inputs = {"input_ids": ids, "position_ids": torch.arange(11).expand(TRACED).contiguous()}
    return export_to_graph(model, inputs, dict.fromkeys(inputs, dynamic), torch.device("cpu"))


@pytest.mark.parametrize(
    ("is_long", "condition"),
    [
        (lambda ids: ids.shape[1] > 64, "length <= 64"),
        (lambda ids: ids.shape[1] >= 512, "length < 512"),
        (lambda ids: ids.shape[1] == 77, "Ne(length, 77)"),
        (lambda ids: ids.shape[1] % 100 == 99, "Ne(Mod(length, 100), 99)"),
        (lambda ids: ids.shape[0] > 64, "batch <= 64"),
        (lambda ids: ids.shape[0] * ids.shape[1] > 3000, "batch*length <= 3000"),
    ],
)
def test_a_branch_on_a_size_is_found(
    is_long: Callable[[torch.Tensor], bool], condition: str
) -> None:
    found = broken_guard(_exported(is_long), 2048)
    assert found is not None
    assert found.condition == condition
    assert found.code == "return hidden * 2 if self.is_long(input_ids) else hidden"
    assert is_long(torch.empty(found.batch, found.length)) != is_long(torch.empty(TRACED))


class _CutToTokens(nn.Module):
    """Positions are cut to the number of tokens before anything says that there are as many."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 4)
        self.register_buffer("table", torch.randn(64, 4))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        tokens = self.embedding(input_ids).transpose(0, 1).contiguous()
        rows = self.table[position_ids].transpose(0, 1).contiguous()[: tokens.shape[0]]
        return tokens * rows.view(tokens.shape[0], -1, 4)


def test_positions_are_known_to_be_as_many_as_tokens() -> None:
    ids = torch.arange(33).view(TRACED)
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    inputs = {"input_ids": ids, "position_ids": torch.arange(11).expand(TRACED).contiguous()}
    gm = export_to_graph(
        _CutToTokens(), inputs, dict.fromkeys(inputs, dynamic), torch.device("cpu")
    )
    assert broken_guard(gm, 2048) is None


def test_short_texts_are_looked_at_where_that_is_asked_for() -> None:
    gm = _exported(lambda ids: ids.shape[1] < 3)
    assert broken_guard(gm, 2048) is None
    assert [found.length for found in broken_guards(gm, 2048, shortest=1)] == [1]


@pytest.mark.parametrize(
    "is_long", [lambda ids: False, lambda ids: ids.shape[1] > 2048, lambda ids: ids.numel() < 0]
)
def test_what_no_size_changes_is_no_finding(is_long: Callable[[torch.Tensor], bool]) -> None:
    assert broken_guard(_exported(is_long), 2048) is None


def test_the_refusal_says_what_the_code_asks_and_what_to_do() -> None:
    gm = _exported(lambda ids: ids.shape[1] > 64)
    with pytest.raises(
        OnboardError,
        match=r"Model takes another path unless length <= 64 \(`return hidden .*`\): .* length of 65\. ",
    ) as e:
        refuse_broken_guard(gm, "Model", 2048, "max_seq_len")
    assert str(e.value.hint).startswith("Lower max_seq_len below 65")
    refuse_broken_guard(gm, "Model", 64, "max_seq_len")


@pytest.mark.parametrize(("unread", "limit"), [(0, 600), (1, 601)])
def test_a_limit_that_nobody_asked_for_is_lowered_to_what_the_graph_is_right_for(
    unread: int, limit: int
) -> None:
    gm = _exported(lambda ids: ids.shape[1] > 600)
    runtime = SettledConfig(max_seq_len=4096, max_batch_size=2, max_num_tokens=16)
    context = TransformContext(None, runtime, torch.device("cpu"), torch.float32)  # type: ignore[arg-type]
    with pytest.raises(OnboardError, match="Lower max_seq_len below 601"):
        fit_or_refuse(gm, "Model", context, "max_seq_len", unread)
    context.chosen = frozenset({"max_seq_len"})
    fit_or_refuse(gm, "Model", context, "max_seq_len", unread)
    assert context.runtime.max_seq_len == limit
    assert context.facts[0].startswith(
        f"max_seq_len 4,096 -> {limit}: the code of Model takes another path"
    )
    with pytest.raises(OnboardError, match="Lower max_seq_len below 65"):
        fit_or_refuse(
            _exported(lambda ids: ids.shape[1] > 64), "Model", context, "max_seq_len", unread
        )


class _Asserting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 4)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        assert input_ids.shape[1] <= 64, (
            "not covered: texts of more tokens, which change what positions mean"
        )
        return self.embedding(input_ids + position_ids)


def test_a_length_that_the_code_asserts_is_served_however_short_it_is() -> None:
    runtime = SettledConfig(max_seq_len=4096, max_batch_size=2, max_num_tokens=16)
    context = TransformContext(None, runtime, torch.device("cpu"), torch.float32)  # type: ignore[arg-type]
    context.chosen = frozenset({"max_seq_len"})
    fit_or_refuse(_exported(_Asserting()), "Model", context, "max_seq_len")
    assert context.runtime.max_seq_len == 64
