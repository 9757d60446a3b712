"""Write the graph as a tree of the model's modules: JSON for programs, one HTML page for people."""

from __future__ import annotations

import html
import json
import logging
from pathlib import Path

from torch import fx

from onboard.graph.context import TransformContext
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
)
from onboard.graph.visualize.namespaces import Namespace, namespace_tree

_FOLDER = "debug_visualize"
_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>Graph by module</title>
<style>
body {{ font: 14px/1.5 system-ui, sans-serif; margin: 2rem; }}
details {{ margin-left: 1.2rem; border-left: 1px solid #ccc; padding-left: .6rem; }}
summary {{ cursor: pointer; }}
small {{ color: #777; }}
table {{ border-collapse: collapse; font: 12px ui-monospace, monospace; margin: .3rem 0 .6rem 1.2rem; }}
td {{ padding: 0 1rem 0 0; vertical-align: top; }}
</style>
<h1>Graph by module</h1>
{tree}
"""

log = logging.getLogger("onboard.visualize")


@register_transform("visualize_namespace")
class VisualizeNamespace(GraphTransform[TransformConfig]):
    """Write `namespace.json` and `namespace.html` to `debug_visualize_dir`, by default
    ./debug_visualize.
    """

    shows = True

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> TransformInfo:
        """Count one match for each operator shown."""
        tree = namespace_tree(gm)
        folder = Path(self.config.debug_visualize_dir or _FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "namespace.json").write_text(
            json.dumps(tree.as_json(), indent=1) + "\n", encoding="utf-8"
        )
        (folder / "namespace.html").write_text(
            _PAGE.format(tree=_render(tree, is_open=True)), encoding="utf-8"
        )
        log.info("graph by module: %s", folder / "namespace.html")
        return TransformInfo(
            num_matches=tree.counts().total(), is_clean=True, has_valid_shapes=True
        )


def _render(node: Namespace, *, is_open: bool = False) -> str:
    """Return a module as a collapsible block: its operators, then its children."""
    children = "".join(_render(child) for child in node.children.values())
    title = f"<b>{html.escape(node.name or 'graph')}</b> {html.escape(node.type)}"
    summary = f"<summary>{title} <small>{node.counts().total()} operators</small></summary>"
    return f"<details{' open' if is_open else ''}>{summary}{_table(node)}{children}</details>\n"


def _table(node: Namespace) -> str:
    rows = (
        (op["name"], op["op"], ", ".join(op["inputs"]), f"{op['shape']} {op['dtype']}")
        for op in node.ops
    )
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>" if node.ops else ""
