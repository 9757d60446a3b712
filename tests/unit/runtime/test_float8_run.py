"""A run whose keys and values are kept in float8_e4m3fn; how near that is, is tested on the
operators.
"""

from __future__ import annotations

import torch

from onboard.ops.attention.cached_attention import as_stored
from onboard.runtime.sampling_params import SamplingParams
from tests.support.runtime.tiny import TINY, Tiny


def test_the_cache_holds_the_same_keys_and_values_rounded(llama: Tiny) -> None:
    prompt = torch.randint(TINY["vocab_size"], (19,)).tolist()
    exact, rounded = (
        llama.engine(kv_cache_config={"dtype": dtype}) for dtype in ("auto", "float8_e4m3fn")
    )
    for engine in (exact, rounded):
        engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=1))
        engine.run()
    for name in ("k_cache_0", "v_cache_0"):  # of the first layer, which has seen no rounded ones
        stored = rounded.cache.caches[name]
        assert stored.dtype == torch.float8_e4m3fn
        expected = as_stored(exact.cache.caches[name], torch.float8_e4m3fn).float()
        assert stored.float()[1:].count_nonzero() > 0
        # Equal up to one step of the format: the two runs may round a number near the middle to
        # either side.
        assert (stored.float()[1:] - expected[1:]).abs().le(expected[1:].abs() / 8 + 2**-9).all()
    several = [
        rounded.submit(prompt[:length], SamplingParams(temperature=0.0, max_tokens=6))[0]
        for length in (4, 11)
    ]
    rounded.run()
    alone = rounded.submit(prompt[:4], SamplingParams(temperature=0.0, max_tokens=6))[0]
    rounded.run()
    assert several[0].generated == alone.generated
