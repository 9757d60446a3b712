"""Do layers have the windows that the config says? A file may derive them from other fields than
masks are.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")


def windowless_layer(model: nn.Module, config: Any) -> int | None:
    """Return the first layer that `layer_types` calls sliding and whose attention has no window;
    None: there is none.

    transformers makes masks by `layer_types`; attention that takes its `sliding_window` from more
    than that may differ.
    """
    kinds = getattr(config, "layer_types", None)
    if not kinds or not getattr(config, "sliding_window", None):
        return None
    for path, module in model.named_modules():
        found = _LAYER.fullmatch(path)
        index = int(found[1]) if found else len(kinds)
        if (
            index < len(kinds)
            and kinds[index] == "sliding_attention"
            and getattr(module, "sliding_window", 0) is None
        ):
            return index
    return None
