"""transformers' own `generate`, measured on the same prompts.

`hf`: eager, with the dynamic cache that is its default. `hf-compiled`: static cache, the decode
step compiled by torch.compile as `generate` itself sets it up. Every peer runs a shape once before
it is timed, over the same lengths: what it builds the first time it meets a key length is not
counted.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onboard.bench.ceilings import synchronized
from onboard.bench.measure import peak_memory, reset_peak_memory
from onboard.bench.metrics import latency, throughput
from onboard.bench.peer_names import PeerName
from onboard.bench.shape import Shape
from onboard.bench.subject import Subject
from onboard.errors import OnboardError
from onboard.graph.factory import ModelFactory
from onboard.graph.weight_load.parameters import move_buffers, set_parameter, tied_names
from onboard.graph.weight_load.quantised_folder import decoded_state
from onboard.hf.codebooks import codebooks_of
from onboard.hf.hf_model import load_reference


@dataclass(frozen=True)
class PeerRun:
    """What was measured of one shape; seconds, medians over the repeats."""

    prefill: float
    """Of `generate` of one token."""
    decode_step: float
    first_call: float
    """The very first generation of this shape, with everything that it builds."""
    durations: list[float]
    peak_memory: int

    def as_dict(self, shape: Shape) -> dict[str, Any]:
        """Return the figures under vLLM's names."""
        return {
            **throughput(self.durations, shape.batch, shape.context, shape.output),
            **latency(self.durations),
            "prefill_ms": 1e3 * self.prefill,
            "mean_ttft_ms": 1e3 * self.prefill,
            "mean_tpot_ms": 1e3 * self.decode_step,
            "decode_step_ms": 1e3 * self.decode_step,
            "first_call_s": self.first_call,
            "peak_memory": self.peak_memory,
        }


_ROUNDS = 8
"""How often all is measured again where noise hides what a step takes."""


@contextmanager
def transformers_model(subject: Subject, device: torch.device, dtype: torch.dtype) -> Iterator[Any]:
    """Build transformers' model on the device, with the checkpoint's weights or random ones; free
    it at the end.
    """
    model = (
        _random_model(subject, device, dtype)
        if subject.random_weights
        else _loaded_model(subject, device, dtype)
    )
    try:
        yield model
    finally:
        del model
        gc.collect()  # Hugging Face models hold reference cycles
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measure_peer(
    model: Any,
    name: PeerName,
    shape: Shape,
    *,
    vocabulary: int,
    seed: int,
    repeats: int,
    device: torch.device,
) -> PeerRun:
    """Time greedy generation of one shape; a step is the difference of a long and a one-token
    generation, by tokens.
    """
    ids = torch.tensor(shape.prompts(vocabulary, seed), device=device)
    generate = _generate(model, name, ids)
    first_call = synchronized(lambda: generate(shape.output), device)
    reset_peak_memory(device)
    generate(1)
    prefills: list[float] = []
    durations: list[float] = []
    for _ in range(_ROUNDS):
        prefills += [synchronized(lambda: generate(1), device) for _ in range(repeats)]
        durations += [synchronized(lambda: generate(shape.output), device) for _ in range(repeats)]
        prefill = statistics.median(prefills)
        step = (statistics.median(durations) - prefill) / (shape.output - 1)
        if step > 0:
            return PeerRun(prefill, step, first_call, durations, peak_memory(device))
    raise OnboardError(
        f"{shape.output} tokens of {name} took no longer than one", hint="Ask for a longer output"
    )


def _generate(model: Any, name: PeerName, ids: torch.Tensor) -> Callable[[int], object]:
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    if name == "hf-compiled":
        options["cache_implementation"] = "static"
        if ids.device.type != "cuda":
            options["compile_config"] = _compile_anywhere()
    return lambda count: model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options)


def _compile_anywhere() -> Any:
    """Return the setting with which `generate` compiles on a CPU, too, as it does on a GPU by
    itself.
    """
    from transformers import CompileConfig

    config = CompileConfig(mode="default")
    config._compile_all_devices = True
    return config


def _random_model(subject: Subject, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build a model of the true shapes whose weights are made on the device."""
    options = {**subject.runtime.model_kwargs, "attn_implementation": None}
    factory = ModelFactory(
        subject.folder, root=subject.root, dtype=dtype, model_kwargs=options, mode="transformers"
    )
    model = factory.build_model("meta")
    for names in tied_names(model):
        meta = model.get_parameter(names[0])
        tensor = torch.empty_like(meta, device=device)
        parameter = nn.Parameter(
            tensor.normal_(std=0.02) if tensor.ndim > 1 else tensor.fill_(1.0), requires_grad=False
        )
        for name in names:
            set_parameter(model, name, parameter)
    move_buffers(model, device)
    model.config.use_cache = True  # type: ignore[union-attr]
    return model


def _loaded_model(subject: Subject, device: torch.device, dtype: torch.dtype) -> Any:
    factory = ModelFactory(
        subject.folder,
        root=subject.root,
        dtype=dtype,
        model_kwargs=subject.runtime.model_kwargs,
        mode="transformers",
    )
    try:
        model = load_reference(
            factory.config,
            subject.folder,
            state=decoded_state(subject.folder),
            dtype=dtype,
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise OnboardError(
            f"transformers cannot load {subject.name}: {reason}", hint="Leave --compare out"
        ) from error
    if (count := codebooks_of(model).count) > 1:
        raise OnboardError(
            f"transformers' generate has no tokens of {count} codebooks", hint="Leave --compare out"
        )
    return model.to(device).eval()
