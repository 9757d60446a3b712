"""onboard: a Hugging Face causal language model, made fast, proven and servable with one
command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from onboard.runtime.llm import LLM
    from onboard.runtime.sampling_params import SamplingParams


def __getattr__(name: str) -> Any:
    """Import the runtime on first use, so that `onboard --help` does not load torch."""
    if name == "LLM":
        from onboard.runtime.llm import LLM

        return LLM
    if name == "SamplingParams":
        from onboard.runtime.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'onboard' has no attribute {name!r}")
