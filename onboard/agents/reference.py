"""What a role is told of the canonical ops."""

from __future__ import annotations

import inspect


def ops_reference() -> str:
    """Return the canonical ops: each one's schema, and the first paragraph of what it computes."""
    import onboard.ops  # noqa: F401  (registers)
    from onboard.ops import canonical_ops
    from onboard.ops.library import op_sources, schema_of

    sources = op_sources()
    lines = []
    for name in sorted(canonical_ops()):
        first = (inspect.getdoc(sources[name].function) or "").partition("\n\n")[0]
        lines.append(f"torch.ops.onboard.{name}: {schema_of(name)}\n    {' '.join(first.split())}")
    return "\n".join(lines)
