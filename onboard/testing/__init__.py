"""What generated equivalence tests import: the reference and the generated model, their inputs, and
the comparison.
"""

from onboard.testing.compare import assert_rmse_close
from onboard.testing.distinct import continue_distinct, distinct_prompts
from onboard.testing.models import copy_weights, generated_causal_lm, hf_causal_lm, randomize_
from onboard.testing.prompts import all_logprobs, fresh_seed, ragged_prompts, random_prompt
from onboard.testing.recorded_calls import Call, record_calls
from onboard.testing.repository_code import repository_code
from onboard.verify.error import rmse_ratio

__all__ = [
    "Call",
    "all_logprobs",
    "assert_rmse_close",
    "continue_distinct",
    "copy_weights",
    "distinct_prompts",
    "fresh_seed",
    "generated_causal_lm",
    "hf_causal_lm",
    "ragged_prompts",
    "random_prompt",
    "randomize_",
    "record_calls",
    "repository_code",
    "rmse_ratio",
]
