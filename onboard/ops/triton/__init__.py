"""Triton back end: importing this registers the `triton_*` ops."""

from onboard.ops.triton import cached_attention, cached_mla, rmsnorm, rope, silu_mul, swiglu  # noqa: F401  (registers)
