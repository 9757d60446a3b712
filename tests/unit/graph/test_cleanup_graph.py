from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.support.graph.harness import transform, worst_error

aten = torch.ops.aten


class _Formula(nn.Module):
    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x)


def _inputs(batch: int, sequence: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, sequence, 6)}


@pytest.mark.parametrize(
    ("formula", "left"),
    [
        (lambda x: x[:, :] * 2, 0),
        (lambda x: x[:, 0:, :6] * 2, 0),
        (lambda x: x[..., :9] * 2, 0),
        (lambda x: x[..., :5] * 2, 1),
        (lambda x: x[..., 1:] * 2, 1),
        (lambda x: x[..., ::2] * 2, 1),
        (lambda x: x[:, -3:] * 2, 1),
    ],
)
def test_only_slices_that_keep_everything_go(
    formula: Callable[[Tensor], Tensor], left: int
) -> None:
    module = _Formula(formula)
    result = transform([], module, _inputs(3, 7))

    assert result.count(aten.slice) == left
    assert worst_error(result, module, _inputs) == 0


@pytest.mark.parametrize(
    ("formula", "left"),
    [
        (lambda x: (x + 0) * 2, 0),
        (lambda x: (0.0 + x) * 2, 0),
        (lambda x: (x + 1) * 2, 1),
        (lambda x: (x + torch.zeros(6)) * 2, 1),
        (lambda x: (torch.arange(6) + 0.0) * x, 1),  # changes the dtype
    ],
)
def test_only_additions_of_zero_that_keep_the_type_go(
    formula: Callable[[Tensor], Tensor], left: int
) -> None:
    module = _Formula(formula)
    result = transform([], module, _inputs(3, 7))

    assert result.count(aten.add) == left
    assert result.matches["cleanup_noop_add"] == 1 - left
    assert worst_error(result, module, _inputs) == 0


def test_checks_of_the_example_sizes_go() -> None:
    def checked(x: Tensor) -> Tensor:
        torch._check(x.shape[1] >= 5)
        return x.to(torch.float64) * 2

    result = transform([], _Formula(checked), _inputs(3, 7))

    assert result.count(aten._assert_scalar, aten._assert_tensor_metadata) == 0
    assert result.gm(torch.ones(1, 1, 6)).shape == (1, 1, 6)


def test_in_place_edits_become_functional_and_dropout_goes() -> None:
    def edited(x: Tensor) -> Tensor:
        y = x * 1.5
        y += 1
        y[..., 0] = 0
        return torch.nn.functional.linear(
            nn.functional.dropout(y, 0.5, training=False), torch.eye(6)
        )

    module = _Formula(edited)
    result = transform([], module, _inputs(3, 7))

    assert not [
        node
        for node in result.gm.graph.nodes
        if getattr(node.target, "_schema", None) and node.target._schema.is_mutable
    ]
    assert result.count(aten.dropout) == 0
    assert result.count(aten.linear) == 1
    assert worst_error(result, module, _inputs) == 0


class _Typed(nn.Module):
    """Adds an entry of a table, as long as the longest text, to each token."""

    def __init__(self, table: Tensor, *, persistent: bool = False) -> None:
        super().__init__()
        self.table = nn.Buffer(table, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[:, : x.shape[1]].expand(x.shape[0], x.shape[1])[..., None]


class _Sliced(_Typed):
    """Adds the sum of a part of the table that `of` takes."""

    def __init__(self, of: slice) -> None:
        super().__init__(torch.full((1, 16), 3))
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        of = self.of if self.of.stop else slice(self.of.start, x.shape[1], self.of.step)
        return x + self.table[:, of].sum()


@pytest.mark.parametrize("number", [0, 3])
def test_a_table_of_one_number_serves_rows_longer_than_itself(number: int) -> None:
    result = transform(["widen_uniform_slice"], _Typed(torch.full((1, 16), number)), _inputs(3, 7))

    assert result.matches["widen_uniform_slice"] == 1
    x = torch.randn(1, 40, 6)
    assert torch.equal(result.gm(x), x + number)
    assert worst_error(result, _Typed(torch.full((1, 16), number)), _inputs) == 0


@pytest.mark.parametrize(
    "module",
    [
        _Typed(torch.eye(1, 16, dtype=torch.int64)),
        _Typed(torch.zeros(1, 16), persistent=True),  # a checkpoint may hold other numbers
        _Sliced(slice(0, 5)),
        _Sliced(slice(2, None)),
        _Sliced(slice(0, None, 2)),
    ],
)
def test_another_table_is_read_as_it_is(module: nn.Module) -> None:
    result = transform(["widen_uniform_slice"], module, _inputs(3, 7))

    assert result.matches["widen_uniform_slice"] == 0
    assert worst_error(result, module, _inputs) == 0
