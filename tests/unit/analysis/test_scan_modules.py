"""Modules without weights that are a canonical op."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onboard.analysis.recognise.recorder import ModuleCall
from onboard.analysis.recognise.scans.scan_modules import probe_scan_module


class _Memory(nn.Module):
    """The matrix LSTM, a token at a time, without the common factor of memory and norm but where
    `eps` is added.
    """

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        igate: torch.Tensor,
        fgate: torch.Tensor,
        c_initial: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        query, key, value = (x.double() for x in (query * query.shape[-1] ** -0.5, key, value))
        forget, igate = F.logsigmoid(fgate.double()), igate.double()
        memory, norm = (
            key.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1]),
            key.new_zeros(key[:, :, 0].shape),
        )
        scale, out = key.new_zeros(key.shape[:2]), []
        for t in range(key.shape[2]):
            keep, new = forget[:, :, t].exp(), (igate[:, :, t]).exp()
            scale = torch.maximum(forget[:, :, t] + scale, igate[:, :, t])
            weighted = new[..., None] * key[:, :, t]
            memory = keep[..., None, None] * memory + weighted[..., None] * value[:, :, t, None]
            norm = keep[..., None] * norm + weighted
            weight = (query[:, :, t] * norm).sum(-1)
            divisor = self.divisor(weight, scale) + self.config.small * scale.exp()
            out.append((query[:, :, t, None] @ memory)[:, :, 0] / divisor[..., None])
        return torch.stack(out, 2).float(), None

    def divisor(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return weight.abs().clamp_min(1)


class _AlwaysDivides(_Memory):
    def divisor(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return weight.abs() + 1


class _Fixed(_Memory):
    """Its number is not the config's."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(SimpleNamespace(**vars(config) | {"small": 1e-6}))


class _Weighted(_Memory):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.ones(1))


def _call(module: nn.Module, **others: torch.Tensor) -> ModuleCall:
    seed = random.getrandbits(20)
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "query": (2, 3, 9, 4),
        "key": (2, 3, 9, 4),
        "value": (2, 3, 9, 5),
        "igate": (2, 3, 9),
        "fgate": (2, 3, 9),
    }
    given = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    return ModuleCall((), {**given, **others}, None)


def _config() -> SimpleNamespace:
    return SimpleNamespace(dropout=0.0, small=1e-6, other=1e-6, layers=2)


def test_a_matrix_lstm_is_the_op_with_its_number_from_the_config() -> None:
    module = _Memory(_config())
    found = probe_scan_module(module, [_call(module)])
    assert found is not None
    assert (found.kind, found.parameters) == ("scan_module", {"op": "torch_mlstm", "eps": "small"})


@pytest.mark.parametrize("cls", [_AlwaysDivides, _Fixed, _Weighted])
def test_what_is_almost_one_is_none(cls: type[_Memory]) -> None:
    module = cls(_config())
    assert probe_scan_module(module, [_call(module)]) is None


def test_one_that_begins_with_a_state_is_none() -> None:
    module = _Memory(_config())
    assert probe_scan_module(module, [_call(module, c_initial=torch.ones(1))]) is None
    assert probe_scan_module(module, []) is None
