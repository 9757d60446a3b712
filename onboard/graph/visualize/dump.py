"""Readable dumps of graphs, one file after each transform."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from torch import fx, nn

from onboard.graph.fx import graph_modules


def op_counts(gm: fx.GraphModule) -> dict[str, int]:
    """Return how often each operator is called, most frequent first."""
    names = (str(node.target) for node in gm.graph.nodes if node.op == "call_function")
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def dump(module: nn.Module, folder: Path, name: str) -> None:
    """Write each graph in `module` as Python code, headed by its operator counts, to
    `folder/name[.path].py`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path, gm in graph_modules(module):
        counts = "".join(f"# {count:5d}  {op}\n" for op, count in op_counts(gm).items())
        code = gm.print_readable(print_output=False)
        folder.joinpath(f"{name}.{path}.py" if path else f"{name}.py").write_text(
            f"{counts}\n{code}\n", "utf-8"
        )
