"""What towers take of a device is counted before they are loaded, and caches leave it free: a first
image or sound finds its memory on a device that is full.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from onboard import LLM
from onboard.config import RuntimeConfig
from onboard.content import CONTENT_ROOT
from onboard.graph.context import TransformContext
from onboard.graph.peak import StorageMeter
from onboard.media.prompt_media import PromptMedia
from onboard.runtime import build
from onboard.runtime.build import make_context
from onboard.runtime.multimodal.tower_memory import (
    _extrapolated,
    _read,
    kept_tower_memory,
    tower_memory,
)
from onboard.runtime.multimodal.towers import Towers
from onboard.runtime.plan import plan_memory
from tests.support.drawing import some_of
from tests.support.runtime.media_models import FAMILIES, MediaModel, make_media_model

HOST = RuntimeConfig(device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> MediaModel:
    shipped = CONTENT_ROOT / "models" / "modeling_qwen2_5_vl.py"
    return make_media_model(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl", shipped)


def towers_of(model: MediaModel, **runtime: Any) -> Towers:
    config = HOST.model_copy(update=runtime)
    return Towers(make_context(model.checkpoint, config, root=model.root))


def really_read(towers: Towers, tokens: list[int], inputs: dict[str, Any]) -> int:
    """Return the most bytes that tensors take while the towers read, the inputs included."""
    meter = StorageMeter()
    for each in (*towers.model.parameters(), *towers.model.buffers()):
        meter.exclude(each)
    with meter:
        towers.prepare(tokens, inputs)
    return meter.peak + sum(
        each.nbytes for each in inputs.values() if isinstance(each, torch.Tensor)
    )


@pytest.mark.parametrize("family", some_of(FAMILIES, always=(), by_chance=1))
def test_shapes_tell_what_towers_take(family: str, tmp_path: Path) -> None:
    model = make_media_model(tmp_path, family)
    kind: Any = "audio" if "audio_config" in model.hf.config.to_dict() else "image"
    read = _read(towers_of(model), kind, 0.7 if kind == "audio" else 300)
    traced = towers_of(model).traced_peak(read.tokens, read.inputs)
    towers = towers_of(model)
    real = really_read(towers, read.tokens, read.inputs)
    assert 0.98 * real <= traced <= 1.05 * real
    made = [each for each in towers.model.parameters() if not each.is_meta]
    buffers = sum(each.nbytes for each in towers.model.buffers())
    embedding = towers.model.get_input_embeddings().weight.nbytes
    assert sum(each.nbytes for each in made) - embedding + buffers == towers.num_bytes
    counted, facts = tower_memory(towers_of(model))
    assert counted.weights == towers.num_bytes
    assert counted.activations >= 0.98 * real
    assert not facts


def test_what_a_large_image_takes_is_told_by_smaller_ones(qwen: MediaModel) -> None:
    towers, peaks, sizes = towers_of(qwen), [], []
    size = {"shortest_edge": 56 * 56, "longest_edge": 2000 * 2000}
    towers.processor.hf.image_processor = Qwen2VLImageProcessorPil(size=size)
    for side in (112, 224, 672):
        read = _read(towers, "image", side)
        peaks.append(towers.traced_peak(read.tokens, read.inputs))
        sizes.append(read.size)
    told = _extrapolated((sizes[0], sizes[1]), (peaks[0], peaks[1]), sizes[2])
    assert 0.98 * peaks[2] <= told <= 1.1 * peaks[2]


@pytest.mark.parametrize("square", [0, 3])
def test_linear_and_square_parts_are_told_apart(square: int) -> None:
    takes = [5 * size + square * size**2 for size in (10, 40, 900)]
    assert _extrapolated((10, 40), (takes[0], takes[1]), 900) == pytest.approx(takes[2])
    assert _extrapolated((10, 10), (takes[0], takes[0]), 30) == 3 * takes[0]


def test_a_plan_counts_towers_and_its_caches_leave_them_room(qwen: MediaModel) -> None:
    towers = towers_of(qwen)
    counted, _ = tower_memory(towers)
    asked = RuntimeConfig(dtype="float32", max_batch_size=64, max_num_tokens=16, max_seq_len=512)
    asked.kv_cache_config.free_gpu_memory_fraction = 1.0
    ample = plan_memory(qwen.checkpoint, asked, 2**40, gpu=True, root=qwen.root)[0]
    assert ample.towers == counted.weights
    assert ample.activations >= counted.activations
    full = ample.fixed + ample.graphs + ample.cache.num_bytes(20)
    plan, facts = plan_memory(qwen.checkpoint, asked, full, gpu=True, root=qwen.root)
    assert plan.pages == 20
    assert plan.caches + plan.towers + plan.activations + plan.weights <= full
    assert not any("leaves out what towers" in fact for fact in facts)


@pytest.mark.parametrize("reserves", [True, False])
def test_a_first_image_finds_its_memory_where_caches_have_taken_all_they_may(
    reserves: bool, qwen: MediaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1 << 20
    original = build._towers

    def counted(context: TransformContext) -> Any:
        """As on a GPU."""
        towers: Any = original(context)
        context.towers = tower_memory(towers)[0] if reserves else context.towers
        return towers

    monkeypatch.setattr("onboard.graph.cache_init.interface.available_memory", lambda: free)
    monkeypatch.setattr(build, "_towers", counted)
    caches = {"max_tokens": 4096, "tokens_per_block": 8, "free_gpu_memory_fraction": 1.0}
    limits = {"max_seq_len": 128, "max_batch_size": 2, "max_num_tokens": 16}
    llm = LLM(
        qwen.checkpoint,
        root=qwen.root,
        device="cpu",
        settings={**limits, "kv_cache_config": caches},
    )
    held = sum(each.nbytes for each in llm.engine.cache.caches.values())
    towers = llm.engine.towers
    assert isinstance(towers, Towers)
    text = f"{qwen.mark}what is it?"
    image = Image.new("RGB", (300, 200), "green")
    prepared = towers.processor.prepare(text, PromptMedia(images=[image]))
    meter = StorageMeter()
    with meter:
        towers.prepare(*prepared)
    assert (held + meter.peak <= free) is reserves
    asked: Any = {"prompt": text, "multi_modal_data": {"image": image}}
    assert llm.generate(asked)[0].token_ids


def test_towers_read_the_embedding_of_the_text_graph(qwen: MediaModel) -> None:
    llm = LLM(qwen.checkpoint, root=qwen.root, device="cpu")
    towers = llm.engine.towers
    assert isinstance(towers, Towers)
    own = towers.model.get_input_embeddings().weight
    assert own.data_ptr() in {each.data_ptr() for each in llm.engine.gm.parameters()}
    assert torch.equal(own, qwen.hf.get_input_embeddings().weight)
    assert not any("embedding of their own" in fact for fact in llm.facts)


def test_what_was_counted_is_kept_until_the_processor_reads_larger_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path / "cache"))
    shipped = CONTENT_ROOT / "models" / "modeling_qwen2_5_vl.py"
    model = make_media_model(tmp_path, "qwen2_5_vl", shipped)
    first = kept_tower_memory(towers_of(model))
    monkeypatch.setattr(Towers, "traced_peak", lambda *_: 0)
    assert kept_tower_memory(towers_of(model)) == first
    (config,) = model.checkpoint.glob("*processor_config.json")
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"changed": 1}))
    assert kept_tower_memory(towers_of(model))[0].activations == 0
