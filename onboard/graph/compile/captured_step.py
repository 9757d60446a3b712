"""A whole step as a CUDA graph: from its numbers on the device to the chosen tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from onboard.errors import OnboardError
from onboard.parallel.ranks import captured_in_group


@dataclass(frozen=True)
class CapturedStep:
    """A graph, and what it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Mapping[str, torch.Tensor]
    """`SequenceInfo.inputs` of the steps that it serves: the same mapping each time."""
    caches: Mapping[str, torch.Tensor]
    tokens: torch.Tensor
    """[sequences] the chosen tokens; each replay overwrites them."""
    output: Any
    """What the graph module returned; each replay overwrites it."""

    def check(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Refuse other caches than those that the graph has the addresses of."""
        if self.caches is not caches:
            problem = "the caches were allocated again after the steps were captured"
            raise OnboardError(problem, hint="Compile the model last")


def captured_graph(
    step: Callable[[], Any], described: str, pool: Any
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a step, `described` for the error; return its graph, and what `step` returned."""
    # Run it once on another stream, as capture does: first behind the work so far, and then the current
    # stream waits for it, so that the capture begins with kernels compiled and tuned.
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = captured_in_group(torch.cuda.CUDAGraph())
    try:
        with torch.cuda.graph(graph, pool=pool):
            result = step()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        problem = f"{described} cannot be captured as a CUDA graph: {reason}"
        raise OnboardError(problem, hint="Set compile_backend to torch-simple") from error
    return graph, result


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's device memory that does not keep it: graphs that are captured later
    in the same pool write there, too. The host has no such pool: its tensors are kept.
    """
    if not tensor.is_cuda:
        return tensor
    span = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    flat = torch.as_tensor(_Memory(tensor.data_ptr(), span * tensor.itemsize), device=tensor.device)
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class _Memory:
    """Device memory, described as numba's CUDA array interface has it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
