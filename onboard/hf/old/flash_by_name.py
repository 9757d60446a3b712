"""Attention that code asks for as "flash_attention_2", where that package is not installed: torch's
own function, which computes the same without it.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_flash_attn_2_available

from onboard.plain_config import OLD_DEFAULTS

NAME = "flash_attention_2"


def is_refused(error: Exception) -> bool:
    """Whether an error says that a model cannot be made with it, which may be allowed."""
    allowed = hasattr(PreTrainedModel._check_and_adjust_attn_implementation, "__wrapped__")
    return "flash attention 2" in str(error).lower() and not allowed


def allow_flash_by_name() -> list[str]:
    """Let models be made that ask for flash_attention_2; return what to say of it."""
    if is_flash_attn_2_available():
        return []
    check = PreTrainedModel._check_and_adjust_attn_implementation

    @functools.wraps(check)
    def checked(self: Any, name: str | None, *args: Any, **kwargs: Any) -> Any:
        return NAME if name == NAME else check(self, name, *args, **kwargs)

    # config classes that an auto class imports anew read it, too
    PretrainedConfig._attn_implementation_autoset = OLD_DEFAULTS["_attn_implementation_autoset"]
    PreTrainedModel._check_and_adjust_attn_implementation = checked
    ALL_ATTENTION_FUNCTIONS.register(NAME, sdpa_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    return [f"{NAME} is not installed; torch's scaled_dot_product_attention computes it"]
