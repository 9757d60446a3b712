"""Bytes of files arrive in their places, whatever the number of threads and the size of a piece."""

import random

import pytest
import torch

from onboard.errors import OnboardError
from onboard.graph.weight_load.weight_stream import Load, stream


@pytest.mark.parametrize(("threads", "chunk_bytes"), [(1, 1 << 20), (3, 7), (8, 64)])
def test_every_byte_arrives_in_its_place(tmp_path, threads, chunk_bytes):
    print(f"seed {(seed := random.randrange(2**31))}")
    generator = torch.Generator().manual_seed(seed)
    sources, loads = [], []
    for index in range(3):
        tensors = [torch.randn(size, generator=generator).to(dtype) for size, dtype in _SHAPES]
        data = b"header"[: 2 * index]
        for tensor in tensors:
            target = torch.full_like(tensor, 9)
            loads.append(Load(tmp_path / f"{index}.bin", len(data), target))
            sources.append(tensor)
            data += tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        (tmp_path / f"{index}.bin").write_bytes(data + b"after")
    stream(loads, threads=threads, chunk_bytes=chunk_bytes)
    for load, source in zip(loads, sources, strict=True):
        assert torch.equal(load.target, source)


_SHAPES = [
    ((3, 5), torch.float32),
    ((1, 17, 2), torch.bfloat16),
    ((33,), torch.float64),
    ((4, 4), torch.uint8),
]


def test_a_slice_of_a_larger_tensor_is_filled_alone(tmp_path):
    values = torch.randn(2, 4)
    (tmp_path / "a").write_bytes(values.numpy().tobytes())
    whole = torch.full((5, 4), 7.0)
    stream([Load(tmp_path / "a", 0, whole[1:3])])
    assert torch.equal(whole[1:3], values)
    assert (whole[[0, 3, 4]] == 7).all()


def test_a_file_that_ends_too_early_is_refused(tmp_path):
    (tmp_path / "short.safetensors").write_bytes(bytes(10))
    with pytest.raises(OnboardError, match="short.safetensors ended"):
        stream([Load(tmp_path / "short.safetensors", 4, torch.empty(8, dtype=torch.uint8))])


def test_nothing_to_load_is_nothing_done():
    stream([])
