"""The graph as a tree of the model's modules, as JSON and as a page that needs nothing else."""

import json
import re
from pathlib import Path

import torch
from torch import nn

from onboard.graph.visualize.namespaces import namespace_tree
from tests.support.graph.fusion import apply, exported


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.up(x).relu()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.tanh()


def test_operators_lie_in_their_modules(tmp_path: Path) -> None:
    gm = exported(Model(), 2, 3, 8)
    gm, info, _ = apply("visualize_namespace", gm, debug_visualize_dir=str(tmp_path))
    assert info.num_matches == 7
    tree = json.loads((tmp_path / "namespace.json").read_text())
    (layers,) = tree["children"]
    assert [op["op"] for op in tree["ops"]] == ["aten.tanh.default"]
    assert [child["name"] for child in layers["children"]] == ["layers.0", "layers.1"]
    for block in layers["children"]:
        assert block["type"] == "Block"
        assert [op["op"] for op in block["ops"]] == ["aten.relu.default", "aten.add.Tensor"]
        (up,) = block["children"]
        assert (up["name"], up["type"]) == (f"{block['name']}.up", "Linear")
        assert up["ops"][0]["op"] == "aten.linear.default"
        assert f"{up['name']}.weight" in up["ops"][0]["inputs"]
        assert re.fullmatch(r"\[s\d+, s\d+, 8\]", up["ops"][0]["shape"])
        assert up["ops"][0]["dtype"] == "float32"


def test_fused_operators_keep_their_place(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.ModuleDict({"q": nn.Linear(8, 8), "k": nn.Linear(8, 8)})

        def forward(self, x):
            x = x.tanh()
            return self.attn["q"](x) + self.attn["k"](x)

    gm, _, _ = apply("fuse_gemms", exported(Pair(), 2, 3, 8))
    tree = namespace_tree(gm)
    assert tree.counts()["aten.linear.default"] == 1
    attn = tree.children["attn"]
    assert [op["op"] for op in attn.children["q"].ops] == [
        "aten.linear.default",
        "aten.narrow.default",
    ]
    assert [op["op"] for op in attn.children["k"].ops] == ["aten.narrow.default"]


def test_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    gm = exported(Model(), 2, 3, 8)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.meta["nn_module_stack"] = {"a": ("<script>alert(1)</script>", torch.nn.Linear)}
    apply("visualize_namespace", gm, debug_visualize_dir=str(tmp_path))
    page = (tmp_path / "namespace.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"(src|href)\s*=", page)
    assert page.count("<details") == page.count("</details>") == 2
