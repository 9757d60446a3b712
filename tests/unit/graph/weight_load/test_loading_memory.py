"""Loading takes little more memory than the weights have in the end: some bytes for each element of
one matrix, of a stack's experts too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from onboard import LLM
from onboard.graph.quantise import read_forms
from onboard.graph.transform import get_transform
from onboard.graph.weight_load import safetensors_folder
from onboard.graph.weight_load.quantised_folder import QuantisedCheckpoint, open_checkpoint
from onboard.graph.weight_load.safetensors_folder import Checkpoint
from onboard.quantised import encoded
from tests.support import quantised
from tests.support.checkpoints import save_checkpoint

KINDS = ("fp8", "finegrained_fp8", "int8", "int4", "mxfp4", "nvfp4")
KEYS = [f"quantize_{kind}_linear_from_config" for kind in KINDS]
KEYS += [f"quantize_{kind}_moe_from_config" for kind in KINDS]
MOST = 5
"""Bytes for each element of the largest matrix: 1 GiB for 200 million elements."""


class Memory(TorchDispatchMode):
    """Counts the bytes of all storages that operators make and nobody has freed yet."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if _is(each)}
        result = func(*args, **(kwargs or {}))
        for tensor in filter(_is, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        self.alive = {key: each for key, each in self.alive.items() if not each[0].expired()}
        return sum(size for _, size in self.alive.values())


def _is(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _copied(read: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What is mapped on the CPU is copied to a GPU: count the copy, not the mapping."""

    def copy(*arguments: Any) -> torch.Tensor:
        with _disable_current_modes():
            mapped = read(*arguments)
        return mapped.clone()

    return copy


def excess(
    folder: Path,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    piece: int = 1 << 10,
    **settings: Any,
) -> int:
    """Load a checkpoint; return the bytes that are needed beside its weights."""
    memory, transform = Memory(), get_transform("load_weights")
    load = transform._load  # type: ignore[attr-defined]
    found = []

    def loaded(self: Any, gm: Any, *rest: Any) -> int:
        with memory:
            count: int = load(self, gm, *rest)
        found.append(sum(each.nbytes for each in gm.parameters()))
        return count

    monkeypatch.setattr(transform, "_load", loaded)
    for name in ("read", "read_run"):
        monkeypatch.setattr(Checkpoint, name, _copied(getattr(Checkpoint, name)))
    for module, name in ((encoded, "PIECE"), (read_forms, "PIECE"), (safetensors_folder, "_PIECE")):
        monkeypatch.setattr(module, name, piece)
    transforms = {key: {"backend": backend} for key in KEYS}
    config = {"max_seq_len": 64, "transforms": transforms, **settings}
    LLM(folder, device="cpu", dtype="float32", config=config)
    assert memory.now() <= found[0] + 64
    return memory.peak - found[0]


def largest(folder: Path) -> int:
    """The elements of the largest matrix."""
    shapes = [meta.shape for meta in open_checkpoint(folder).names().values()]
    return max(shape[-1] * shape[-2] for shape in shapes if len(shape) > 1)


QUICK = [("gptq", "torch"), ("ct_fp8_dynamic", "auto"), ("mxfp4_gpt_oss", "torch")]
QUICK += [("mxfp4_gpt_oss", "auto")]
VARIANTS = [
    "hf_fp8_qwen3_moe", "gptq", "awq", "ct_w4a16_qwen3_moe", "ct_nvfp4", "ct_w8a8",
    "ct_w8a8_qwen3_moe", "ct_fp8_dynamic",
]  # fmt: skip
OTHERS = [
    pytest.param(variant, backend, marks=pytest.mark.exhaustive)
    for variant in VARIANTS
    for backend in ("torch", "auto")
    if (variant, backend) not in QUICK
]


@pytest.mark.parametrize(("variant", "backend"), QUICK + OTHERS)
def test_quantised_weights(variant: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = quantised.FOLDER / variant
    assert isinstance(open_checkpoint(folder), QuantisedCheckpoint)
    assert excess(folder, backend, monkeypatch) <= MOST * largest(folder)


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("llama", "fp8"), ("llama", "int4"), ("gpt_oss", "fp8-block"), ("gpt_oss", "mxfp4")],
)
def test_weights_that_are_quantised_as_they_are_loaded(
    model_type: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 512, "head_dim": 32}
    mixture = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    more = mixture | {"layer_types": ["full_attention"]} if model_type == "gpt_oss" else {}
    save_checkpoint(tmp_path, model_type, **sizes, **more)
    needed = excess(tmp_path, "auto", monkeypatch, piece=1 << 15, quantize=kind)
    assert needed <= 2 * MOST * largest(tmp_path)  # matrices are in float32
