"""Damaged and hostile checkpoints are refused in one line; sound ones are described from their
headers.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from onboard.errors import OnboardError
from onboard.graph.weight_load.safetensors_folder import Checkpoint, find_non_finite

TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).view(2, 3),
    "a.bias": torch.ones(3, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "angles": torch.polar(torch.ones(2, 3), torch.arange(6.0).view(2, 3)),
}


def _write_single(folder: Path) -> Path:
    save_file(TENSORS, folder / "model.safetensors")
    return folder / "model.safetensors"


def _write_shards(folder: Path) -> dict[str, str]:
    weight_map = {
        "a.weight": "model-1.safetensors",
        "a.bias": "model-2.safetensors",
        "count": "model-2.safetensors",
        "angles": "model-1.safetensors",
    }
    for shard in set(weight_map.values()):
        save_file(
            {name: TENSORS[name] for name in TENSORS if weight_map[name] == shard}, folder / shard
        )
    _write_index(folder, weight_map)
    return weight_map


def _write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


@pytest.mark.parametrize("write", [_write_single, _write_shards])
def test_headers_describe_and_read_returns_the_tensors(tmp_path, write):
    write(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.validate()
    assert checkpoint.names().keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        meta, tensor = checkpoint.names()[name], checkpoint.read(name)
        assert (meta.shape, meta.dtype, meta.nbytes) == (
            tuple(expected.shape),
            expected.dtype,
            expected.nbytes,
        )
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize(("keep", "what"), [(4, "cut off"), (40, "cut off"), (-1, "cut off")])
def test_truncated_file(tmp_path, keep, what):
    path = _write_single(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(OnboardError, match=rf"model\.safetensors is {what}"):
        Checkpoint(tmp_path).validate()


def test_bytes_after_the_data(tmp_path):
    path = _write_single(tmp_path)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(OnboardError, match="longer than its header says"):
        Checkpoint(tmp_path).validate()


def _header(**entry: object) -> bytes:
    fields = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}
    text = json.dumps({"x": fields}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(
    "content",
    [
        (4).to_bytes(8, "little") + b"{]}{" + bytes(8),
        (2).to_bytes(8, "little") + b"[]",
        (6).to_bytes(8, "little") + b'{"a":1'[:6],
        _header(shape=[3]),
        _header(shape=[-1, -2]),
        _header(dtype="F33"),
        _header(data_offsets=[4, 12]),
        _header(shape="ab"),
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
    ],
)
def test_corrupt_header(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(OnboardError, match=r"model\.safetensors .*(damaged|cut off)") as error:
        Checkpoint(tmp_path).validate()
    assert "\n" not in str(error.value)


def test_missing_shard(tmp_path):
    _write_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(OnboardError, match=r"shard model-2\.safetensors is missing"):
        Checkpoint(tmp_path).validate()


@pytest.mark.parametrize(
    "path", ["../evil.safetensors", "/etc/passwd", "a/../../b.safetensors", "..\\b"]
)
def test_index_that_leaves_the_folder(tmp_path, path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(TENSORS, tmp_path / "evil.safetensors")
    _write_index(folder, dict.fromkeys(TENSORS, path))
    with pytest.raises(OnboardError, match="outside the checkpoint"):
        Checkpoint(folder).names()


def test_index_and_shards_disagree(tmp_path):
    weight_map = _write_shards(tmp_path)
    _write_index(tmp_path, {**weight_map, "ghost": "model-1.safetensors"})
    with pytest.raises(OnboardError, match=r"places ghost in model-1"):
        Checkpoint(tmp_path).validate()
    _write_index(tmp_path, {name: shard for name, shard in weight_map.items() if name != "count"})
    with pytest.raises(OnboardError, match=r"holds count, which the index does not"):
        Checkpoint(tmp_path).validate()


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_malformed_index(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(OnboardError, match="not an index|not valid JSON"):
        Checkpoint(tmp_path).validate()


def test_pickled_weights_are_refused_unread(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(OnboardError, match="safetensors are needed"):
        Checkpoint(tmp_path).validate()


def test_empty_folder(tmp_path):
    with pytest.raises(OnboardError, match=r"has no model\.safetensors\. Fetch"):
        Checkpoint(tmp_path).validate()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
)
def test_find_non_finite(dtype):
    values = torch.full((3, 5), 2.0)
    assert find_non_finite(values.to(dtype)) is None
    values[1, 2] = float("nan")
    assert find_non_finite(values.to(dtype)) == "NaN"


@pytest.mark.parametrize("sign", [1, -1])
def test_find_infinity(sign):
    assert find_non_finite(torch.tensor([1.0, sign * float("inf"), 2.0])) == "infinity"
    assert find_non_finite(torch.tensor([1, 2])) is None
    assert find_non_finite(torch.empty(0)) is None
