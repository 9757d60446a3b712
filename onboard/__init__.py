"""onboard: a Hugging Face causal language model, made fast, proven and servable with one
command.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "StructuredOutputs", "__version__"]

if TYPE_CHECKING:
    from onboard.runtime.calls.async_llm import AsyncLLM
    from onboard.runtime.llm import LLM
    from onboard.runtime.sampling_params import SamplingParams, StructuredOutputs

_HOMES = {
    "LLM": "onboard.runtime.llm",
    "AsyncLLM": "onboard.runtime.calls.async_llm",
    "SamplingParams": "onboard.runtime.sampling_params",
    "StructuredOutputs": "onboard.runtime.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import the runtime on first use, so that `onboard --help` does not load torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'onboard' has no attribute {name!r}")
