# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# (The function is written in Triton's language: its argument has Triton's type.)
"""Kernels that start before the one in front of them has ended (programmatic dependent launch); see
`launch.overlaps`.

A kernel lets the next one start only behind its own wait. So all that is older than the kernel in
front is there from the start, and may be read before the wait: weights, metadata, states of earlier
steps. A kernel that reads a state early and writes it does not let the next one start early, which
might be itself again.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr, START_NEXT: tl.constexpr = True):
    """Wait until what the kernel in front writes is there, and let the next kernel start."""
    if OVERLAP:
        gdc_wait()
        if START_NEXT:
            gdc_launch_dependents()
