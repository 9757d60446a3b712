"""Triton back end: importing this registers the `triton_*` ops."""

from onboard.ops.triton import (  # noqa: F401  (registers)
    cached_attention,
    cached_causal_conv,
    cached_delta_rule,
    cached_mla,
    cached_ssm,
    gdn_gating,
    l2norm,
    linear,
    moe,
    pointwise,
    replayed_ssm,
    rmsnorm,
    rmsnorm_gated,
    rope,
    router,
    silu_mul,
    swiglu,
    wide_norm,
)
