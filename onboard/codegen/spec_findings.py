"""What a spec says, in the terms of the translation."""

from __future__ import annotations

from collections import defaultdict

from onboard.analysis.blocks.spec_mixtures import Mixture
from onboard.analysis.spec import ModelSpec
from onboard.analysis.spec_blocks import (
    Attention,
    Loop,
    LoopParameters,
    Mask,
    Rope,
    Scan,
    ScanModule,
    Templated,
)
from onboard.codegen.translate.language.findings import Findings, Recognised


def findings_of(spec: ModelSpec) -> Findings:
    """Return what a spec's blocks and traits say of classes and functions."""
    blocks, bias = spec.blocks, spec.traits.get("position_bias")
    turns = {block.class_name: block.parameters for block in blocks if isinstance(block, Rope)}
    ropes = {key: found for key, found in turns.items() if not found.single}
    attention = [block for block in blocks if isinstance(block, Attention)]
    loops: dict[str, list[LoopParameters]] = defaultdict(list)
    for block in blocks:
        if isinstance(block, Loop):
            loops[block.class_name].append(block.parameters)
    return Findings(
        recognised={
            b.class_name: Recognised(b.kind, b.parameters.given())
            for b in blocks
            if isinstance(b, Templated)
        },
        ropes={key: found.op for key, found in ropes.items()},
        rope_dims={
            key: found.unsqueeze_dim
            for key, found in ropes.items()
            if found.unsqueeze_dim is not None
        },
        rope_tables={
            key: found.table_dims for key, found in ropes.items() if found.table_dims is not None
        },
        half_ropes={key for key, found in ropes.items() if found.half_tables},
        rope_frequencies={
            key: found.frequencies for key, found in ropes.items() if found.frequencies is not None
        },
        rope_flags={key: found.flags for key, found in ropes.items()},
        single_ropes={key: found for key, found in turns.items() if found.single},
        scans={block.class_name: block.parameters for block in blocks if isinstance(block, Scan)},
        scan_modules={
            block.class_name: block.parameters for block in blocks if isinstance(block, ScanModule)
        },
        loops=loops,
        mixtures={
            block.class_name: block.parameters for block in blocks if isinstance(block, Mixture)
        },
        latents={
            block.class_name: block.parameters for block in attention if block.parameters.expand
        },
        masks={
            block.class_name: block.parameters.returns
            for block in blocks
            if isinstance(block, Mask)
        },
        eager=spec.eager,
        alibi=bias is not None and bias.value == "alibi",
    )
