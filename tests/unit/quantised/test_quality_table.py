"""The formats of scripts/quality_table.py and of `quantize`: each element is the nearest that its format has, beside
float64 numpy and the formats' own libraries.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from onboard.cli.commands.demo import CHECKPOINT
from onboard.graph.weight_load.quantised_folder import QuantisedCheckpoint, open_checkpoint
from onboard.quantised.encode_four_bits import encode_int4, encode_mxfp4
from onboard.quantised.layouts.gguf_blocks import decode
from onboard.quantised.read_method import METHODS
from scripts import quality_table
from scripts.quality_table import Rounding
from scripts.quantised.k_blocks import k_blocks
from scripts.quantised.models import SMALL, save_model
from tests.support import quantised

E2M1 = [sign * each for each in (0, 0.5, 1, 1.5, 2, 3, 4, 6) for sign in (-1, 1)]
E4M3 = [
    float(each)
    for each in torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    if each.isfinite()
]
NF4 = quality_table.NORMAL_FLOAT4.tolist()
FORMATS: dict[str, tuple[Rounding, int, list[float]]] = {
    "int8": (partial(quality_table.integers, bits=8), 176, list(range(-128, 128))),
    "int4": (lambda weight: encode_int4(weight).values(), 128, list(range(-8, 8))),
    "mxfp4": (lambda weight: encode_mxfp4(weight).values(), 32, E2M1),
    "nvfp4": (quality_table.nvfp4, 16, E2M1),
    "nf4": (quality_table.nf4, 64, NF4),
    "mxfp8": (quality_table.mxfp8, 32, E4M3),
    "fp8": (quality_table.float8, 12 * 176, E4M3),
}
FLAT = ("nf4", "fp8")
"""Groups run over the ends of rows."""


def scale_of(name: str, group: np.ndarray, largest: float) -> float:
    """The scale of a group, by the format's definition; `largest` is the whole weight's."""
    most = float(np.abs(group).max())
    if name == "mxfp4":
        return float(2.0 ** (np.floor(np.log2(most)) - 2))
    if name == "nvfp4":
        whole = largest / (448 * 6)
        steps = torch.tensor(most / 6 / whole).to(torch.float8_e4m3fn)
        return float(steps.double()) * whole
    if name == "mxfp8":
        return float(2.0 ** (np.floor(np.log2(most)) - 8))
    if name == "fp8":
        return most / 448
    if name == "nf4":
        return most
    return float(torch.tensor(2 * most / (2 ** int(name[3:]) - 1)).bfloat16().double())


@pytest.mark.parametrize("name", FORMATS)
def test_each_element_is_the_nearest_of_its_group(name: str) -> None:
    rounding, size, levels = FORMATS[name]
    seed = int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(12, 176, generator=generator) * torch.rand(12, 1, generator=generator)
    found, largest = rounding(weight).double().numpy(), float(weight.abs().max())
    rows = [weight.flatten()] if name in FLAT else list(weight)
    pairs = [
        (mine, theirs)
        for row, after in zip(rows, found.reshape(len(rows), -1), strict=True)
        for mine, theirs in zip(
            np.split(row.double().numpy(), range(size, len(row), size)),
            np.split(after, range(size, len(row), size)),
            strict=True,
        )
    ]
    for before, after in pairs:
        choices = np.array(levels) * scale_of(name, before, largest)
        distance = np.abs(before[:, None] - choices).min(axis=1)
        step = np.abs(choices).max()
        np.testing.assert_allclose(np.abs(before - after), distance, atol=1e-6 * step)
        assert np.abs(after[:, None] - choices).min(axis=1).max() < 1e-6 * step


def test_halves_go_to_even_codes() -> None:
    weight = torch.zeros(1, 32)
    weight[0, :9] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -2.5])
    expected = [6, 0, 1, 1, 2, 2, 4, 4, -2]
    found = encode_mxfp4(weight).values()
    assert found[0, :9].tolist() == expected
    assert not found[0, 9:].any()


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_stays_nothing(name: str) -> None:
    weight = torch.randn(3, 128)
    weight[1] = 0
    assert not FORMATS[name][0](weight)[1].any()


def test_zeros_take_the_range_of_a_group() -> None:
    seed = int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(8, 256, generator=generator) + torch.randn(8, 1, generator=generator)
    weight[0] = weight[0].abs() + 1  # zero is a code, whatever the numbers
    found = quality_table.with_zeros(weight).double().view(8, 2, 128).numpy()
    for before, after in zip(weight.view(-1, 128), found.reshape(-1, 128), strict=True):
        low, high = min(float(before.min()), 0.0), max(float(before.max()), 0.0)
        scale = float(torch.tensor((high - low) / 15).half().double())
        choices = (np.arange(16) - np.round(-low / scale)) * scale
        distance = np.abs(before.double().numpy()[:, None] - choices).min(axis=1)
        np.testing.assert_allclose(
            np.abs(before.double().numpy() - after), distance, atol=1e-5 * high
        )


K_CODES = {"Q4_K": range(16), "Q5_K": range(32), "Q6_K": range(-32, 32)}
"""By type: the codes of a block, of 32 inputs or, in Q6_K, of 16."""


@pytest.mark.parametrize("kind", K_CODES)
def test_k_types_have_the_nearest_of_their_block(kind: str) -> None:
    seed = int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(6, 512, generator=generator) * torch.rand(6, 1, generator=generator)
    rows[1, :64] = 0
    found = decode(kind, torch.from_numpy(k_blocks(rows.numpy(), kind)))
    offset = torch.zeros_like(found.scale) if found.offset is None else found.offset
    choices = torch.tensor(K_CODES[kind]) * found.scale[..., None] + offset[..., None]
    blocks, nearest = rows.view(6, -1, found.columns), choices.unsqueeze(2)
    distance = (blocks.unsqueeze(-1) - nearest).abs().amin(-1).view(6, -1)
    taken = (rows - found.values()).abs()
    assert (taken - distance).abs().max() < 1e-6
    limit = {"Q4_K": 0.12, "Q5_K": 0.06, "Q6_K": 0.03}[kind]
    assert taken.square().mean().sqrt() < limit * rows.square().mean().sqrt()
    mine = quality_table.of_gguf(rows[:, :400], kind)  # filled up with zeros
    assert (rows[:, :256] - mine[:, :256] - (rows - found.values())[:, :256]).abs().max() < 1e-6


def test_w8a8_is_a_checkpoint(tmp_path: Path) -> None:
    quality_table.write_w8a8(tmp_path / "demo")
    checkpoint = open_checkpoint(tmp_path / "demo")
    assert isinstance(checkpoint, QuantisedCheckpoint)
    source = load_file(CHECKPOINT / "model.safetensors")
    for name, weight in checkpoint.weights.items():
        expected = quality_table.integers(source[name].float(), bits=8)
        assert torch.equal(checkpoint.read(name), expected), name
        assert (weight.activations.kind, weight.activations.dtype) == ("token", "int8")
    assert len(checkpoint.weights) == len(quality_table._linears())


@pytest.mark.parametrize(("words", "found"), [(["--help"], "Q4_K"), (["xyz"], "no formats: xyz")])
def test_the_command_line(
    words: list[str],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["quality_table", *words])
    with pytest.raises(SystemExit):
        quality_table.main()
    assert found in "".join(capsys.readouterr())


def test_nf4_is_what_bitsandbytes_writes(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(quantised.FOLDER / "bnb_nf4")
    assert isinstance(checkpoint, QuantisedCheckpoint)
    source = load_file(save_model(tmp_path, **SMALL) / "model.safetensors")
    for name in checkpoint.weights:
        written, ours = checkpoint.read(name), quality_table.nf4(source[name].float())
        # Their scales are quantised, ours are not
        assert (written - ours).abs().max() < 0.02 * written.abs().max(), name


def test_the_page_names_every_method_and_every_format() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "quantised.md").read_text("utf-8")
    assert [name for name in METHODS if f"`{name}`" not in page] == []
    rows = [each.what for each in quality_table.FORMATS.values()]
    assert [row for row in rows if f"| {row} |" not in page] == []
