"""Results lie where a caller wants them, if they fit there, and one of them alone."""

from __future__ import annotations

import pytest
import torch

from onboard.ops.result_places import is_placed, placed, results_at

CPU = torch.device("cpu")


def test_one_result_gets_the_memory_in_its_own_shape() -> None:
    place = torch.zeros(1, 6, 4)
    with results_at(place):
        first, second = (placed((6, 4), torch.float32, CPU) for _ in range(2))
    assert is_placed(first[None], place)
    assert not is_placed(second[None], place)
    first[:] = 7
    assert (place == 7).all()
    assert not is_placed(placed((6, 4), torch.float32, CPU)[None], place)


@pytest.mark.parametrize(
    ("place", "shape", "dtype"),
    [
        (torch.zeros(6, 4), (6, 5), torch.float32),
        (torch.zeros(6, 4), (6, 4), torch.bfloat16),
        (torch.zeros(6, 8)[:, :4], (6, 4), torch.float32),
    ],
)
def test_what_does_not_fit_is_allocated(
    place: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    with results_at(place):
        found = placed(shape, dtype, CPU)
    assert found.shape == shape
    assert found.dtype == dtype
    assert not is_placed(found, place)


def test_the_rows_of_a_step_in_memory_for_more_of_them_are_such_a_place() -> None:
    place = torch.zeros(1, 8, 4)[:, :6]
    with results_at(place):
        assert is_placed(placed((6, 4), torch.float32, CPU)[None], place)


def test_another_layout_or_part_is_no_such_place() -> None:
    place = torch.zeros(4, 4)
    assert is_placed(place.view(4, 4), place)
    assert not is_placed(place.t(), place)
    assert not is_placed(place[:2], place)
