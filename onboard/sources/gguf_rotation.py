"""Whether a GGUF file's factors of the rotation are those of the config beside it, which a run computes
its own from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onboard.errors import OnboardError
from onboard.sources.gguf_header import GgufHeader

FACTORS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight")
"""What angles of the rotation are divided by, [head_dim / 2] float32; the last two in Phi-3's files."""
_ALIKE = 1e-3
"""Converters compute them in float32."""


def check_rotation(header: GgufHeader, file: Path, config: Any) -> None:
    """Raise `OnboardError` where the factors are others: `config` is transformers' of the decoder."""
    rope = getattr(config, "rope_parameters", None) or {}
    for name, tensor in header.tensors.items():
        if (found := FACTORS.fullmatch(name)) is None:
            continue
        if tensor.kind != "F32":
            raise OnboardError(f"{name} of the GGUF file is {tensor.kind}, not F32")
        stored = np.fromfile(file, "<f4", tensor.nbytes // 4, offset=tensor.offset)
        expected = _of_config(found[1], config, rope, len(stored))
        if len(expected) != len(stored) or not np.allclose(stored, expected, rtol=_ALIKE):
            raise OnboardError(
                f"the GGUF file's factors of the rotation ({name}) are not those of config.json "
                f"(rope_type {rope.get('rope_type')!s:.40})",
                hint="Put the config.json of the model that it was made of beside it",
            )


def _of_config(kind: str, config: Any, rope: Mapping[str, Any], count: int) -> np.ndarray:
    """Return the factors that a config means, `count` ones where it has none."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind != "freqs":
        return np.array(rope.get(kind.replace("factors_", "") + "_factor") or [1.0] * count)
    if rope.get("rope_type") != "llama3":
        return np.ones(count)
    angles, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    steps = torch.arange(len(angles)) / len(angles)
    factors: np.ndarray = (rope["rope_theta"] ** -steps / angles).numpy()
    return factors
