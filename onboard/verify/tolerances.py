"""The limits of all comparisons in one table, each with its reason. Errors are
`onboard.verify.error.rmse_ratio`.
"""

from __future__ import annotations

import torch

SAME = 1e-5
"""Two float32 results of one computation. Sums in another order and chunks of other lengths give
1e-8 to 1e-6; what is wrong in one term, one position or one weight by a hundredth gives 1e-4 and
more."""
SAME_FORMULA = 1e-6
"""A block without sums that may be split, against the candidate that it is compared with."""
SAME_MIXTURE = 2e-6
"""A mixture of experts, whose few terms are added up in another order."""
NOT_CHANGED = 1e-6
"""A text's logits where later tokens are others, in a batch of one shape: no sum of theirs has
other terms. What looks ahead through an average of many tokens changes them by 1e-5."""
SAME_ELEMENT = 1e-4
"""The largest element, relative to the logits' rmse, where one model is run twice on texts of other
lengths.
"""
ON_GPU, ON_GPU_ELSE = {"attention": 0.10}, 0.05
"""A block, by its kind, in half precision on a GPU: so much comes of rounding its inputs alone."""
ARBITRARY = 1e-3
"""Beyond it the order in which transformers treats equal tokens decides logits, not rounding."""

MARGIN = 1.2
"""Ours may err so many times as much as transformers' own model does in the same precision, both
against float32.
"""
MARGIN_OF_STAGES = 2.0
"""The same, after a single transform: unfused graphs round more often than what the pipeline ends
with.
"""
FLOOR_OF_STAGES = 1e-3
"""And this besides, for models whose own error happens to be next to nothing."""
TORN = 3.0
"""A row of logits that errs so many times as much as the median one does is torn: the token was computed
by other experts, say.
"""
MARGIN_OF_TORN = 2.0
"""Where torn rows make the reference's own error so many times that of its median row, ours may err so
many times as much as it does over all rows, and `MARGIN` times in the median row.
"""
FLOOR_IN_EPS = 0.03
"""Besides `MARGIN`, in units of the dtype's spacing: less than what rounding the logits once
does.
"""
MOST_ROUNDING = 1e-4
"""An error in float32 beyond it is no rounding, however much transformers' own model errs."""
TIE = 10.0
"""A chosen token may lie so many limits below the best, in deviations of its row: each of two
logits errs by five.
"""

READ_OTHERWISE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Our own logits of a text that is read in other parts than before: both round to the dtype, in
other orders.
"""
SELF_CHECK = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.1}
"""Far above what another order of the same sums does, far below what a token of another sequence
does.
"""
TEXT = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Mean negative log-likelihood of held-out text, in nats a token."""
ROUTER = {torch.float32: 1e-5, torch.float64: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Weights of experts, absolute and relative: one rounding to the dtype in another place."""
TOKEN_ALONE, TOKEN_ALONE_ROUNDED = 1e-3, 2e-2
"""A token's value in two batches, relative to the value and to the median of all; the latter in
half precision.
"""
