"""What ops declare of themselves where they are registered is so; transforms believe it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from onboard.ops import attention_ops, canonical_ops, stateful_ops
from onboard.ops.library import NOT_OURS, cached_forms, declared, op_sources

ROOT = Path(__file__).resolve().parents[3]
ops = torch.ops.onboard
ROWS = 5
CONSTANT = 0.5


def rand(*shape: int) -> Tensor:
    return torch.randn(shape)


def arguments_of(name: str) -> list[str]:
    return [argument.name for argument in getattr(ops, name).default._schema.arguments]


def test_model_files_call_what_they_may_and_transforms_bring_the_rest() -> None:
    models = "".join(path.read_text("utf-8") for path in (ROOT / "models").glob("*.py"))
    assert set(re.findall(r"torch\.ops\.onboard\.(\w+)", models)) <= canonical_ops()
    folders = (ROOT / "transforms", ROOT / "onboard" / "graph")
    transforms = "".join(
        path.read_text("utf-8") for folder in folders for path in folder.rglob("*.py")
    )
    sources = op_sources().values()
    forms = {form for source in sources for form in (source.fused_form, source.takes_codes)}
    for name, source in op_sources().items():
        kernel = name.partition("_")[2].removeprefix("fused_add_")
        assert not source.inserted or kernel in transforms or kernel in forms, name


def _named(node: ast.AST | None) -> str:
    """Return the op that an item of a list names, by text or as `torch.ops.onboard.<op>`."""
    match node:
        case ast.Constant(value=str() as name):
            # view and split_with_sizes are PyTorch's names, too
            return name if name in op_sources() and not hasattr(torch.ops.aten, name) else ""
        case ast.Attribute(value=owner, attr="default"):
            return _named(owner)
        case ast.Attribute(value=owner, attr=name):
            torchs = ast.unparse(owner).endswith("aten")
            return name if name in op_sources() and not torchs else ""
    return ""


def _lists(text: str) -> list[int]:
    """Return the lines of the lists, sets and tables in a text that name several ops."""
    found = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
                found += [node.lineno] if len({*map(_named, items)} - {""}) > 1 else []
            case ast.Dict(keys=keys):
                found += [node.lineno] if len({*map(_named, keys)} - {""}) > 1 else []
    return found


def test_no_list_of_ops_is_kept_beside_their_registrations() -> None:
    assert _lists("x = ('torch_moe', y)\nz = {ops.torch_moe: 1, ops.torch_mla.default: 2}") == [2]
    files = [
        path
        for folder in ("onboard", "transforms")
        for path in (ROOT / folder).rglob("*.py")
        if not path.is_relative_to(ROOT / "onboard" / "ops")
    ]
    lists = {path.relative_to(ROOT).as_posix(): _lists(path.read_text("utf-8")) for path in files}
    assert {path: lines for path, lines in lists.items() if lines} == {}


def test_whatever_carries_state_has_a_cached_form_that_shares_its_arguments() -> None:
    for name in stateful_ops() | {"torch_attention"}:
        form = cached_forms(name)["torch"]
        assert op_sources()[form].mutates
        shared = set(arguments_of(name)) & set(arguments_of(form))
        assert arguments_of(form)[0] in shared, form
    assert cached_forms("torch_gated_delta_rule").keys() == {"torch", "triton", "fla"}
    assert cached_forms("torch_rmsnorm") == {}


def test_what_keeps_a_state_of_each_sequence_declares_it() -> None:
    for name, source in op_sources().items():
        keeps = name.startswith("torch_") and source.mutates and "state_slots" in arguments_of(name)
        assert (source.state is not None) == bool(keeps), name


@pytest.mark.parametrize(
    "name", sorted(name for name in op_sources() if name.startswith("triton_"))
)
def test_back_ends_are_what_their_reference_is(name: str) -> None:
    one, other = op_sources()[name], op_sources()[name.replace("triton_", "torch_")]
    for each in ("mutates", "rotary", "adds_residual", "attends", "carries_state"):
        assert getattr(one, each) == getattr(other, each), each


def test_what_is_said_of_an_operator_of_others_is_nothing() -> None:
    assert declared(torch.ops.aten.add.Tensor) is declared("input_ids") is NOT_OURS
    assert (
        declared(ops.torch_attention.default)
        is declared(ops.torch_attention)
        is op_sources()["torch_attention"]
    )


def latent() -> tuple[Tensor, ...]:
    rank = torch.randn(8).expand(1, ROWS, 8)
    return rand(1, ROWS, 2, 4), rand(1, ROWS, 2, 3), rank, rand(1, ROWS, 1, 3), rand(2 * (4 + 6), 8)


ATTEND: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "torch_attention": lambda q, k, v: ops.torch_attention(q, k, v),
    "torch_attention_sdpa": lambda q, k, v: ops.torch_attention_sdpa(
        *(each.transpose(1, 2) for each in (q, k, v))
    ).transpose(1, 2),
    "torch_mla": lambda *_: ops.torch_mla(*latent()),
    "torch_sparse_mla": lambda *_: ops.torch_sparse_mla(
        *latent(), torch.arange(3).expand(1, ROWS, 3)
    ),
    "torch_sparse_attention": lambda q, k, v: ops.torch_sparse_attention(
        q, k, v, torch.arange(3).expand(1, ROWS, 3)
    ),
    "torch_dynamic_mask_attention": lambda q, k, v: ops.torch_dynamic_mask_attention(
        q, k, v, rand(1, ROWS, 2), 3
    ),
    "torch_relative_attention": lambda q, k, v: ops.torch_relative_attention(
        q, k, v, rand(1, ROWS, 2, 4)
    ),
    "torch_compressed_attention": lambda q, *_: ops.torch_compressed_attention(
        q, torch.full((1, ROWS, 1, 4), CONSTANT), torch.full((1, ROWS, 4), CONSTANT), None, 2, 3
    ),
}


def test_attention_is_a_mean_of_values() -> None:
    """Of values that are all alike it is that value, whatever queries and keys are."""
    assert ATTEND.keys() == attention_ops()
    q, k, v = rand(1, ROWS, 2, 4), rand(1, ROWS, 2, 4), torch.full((1, ROWS, 2, 4), CONSTANT)
    for name, attend in ATTEND.items():
        out = attend(q, k, v)
        torch.testing.assert_close(out, out[:, :1].expand_as(out), msg=name)


def test_rotations_declare_their_tables_and_leave_what_is_turned_by_nothing() -> None:
    tables = {"cos": torch.ones(1, ROWS, 8), "sin": torch.zeros(1, ROWS, 8)}
    freqs = torch.ones(1, ROWS, 4, dtype=torch.complex64)
    for name, source in op_sources().items():
        own = tuple(
            argument for argument in arguments_of(name) if argument in (*tables, "freqs_cis")
        )
        assert source.rotary == own, name
        if not own or not name.startswith("torch_") or source.attends or source.cached_form_of:
            continue
        q = rand(1, ROWS, 2, 8)
        q = q / q.square().mean(-1, keepdim=True).sqrt()
        known = {
            **tables,
            "freqs_cis": freqs,
            "q_weight": torch.ones(8),
            "k_weight": torch.ones(8),
            "eps": 0.0,
        }
        given = {key: value for key, value in known.items() if key in arguments_of(name)}
        by_name = {"unsqueeze_dim": 2} if "unsqueeze_dim" in arguments_of(name) else {}
        turned, _ = getattr(ops, name)(q, q, **given, **by_name)
        torch.testing.assert_close(turned.sort().values, q.sort().values, msg=name)


def test_what_adds_a_residual_returns_the_norm_and_the_sum() -> None:
    found = [
        name
        for name, source in op_sources().items()
        if source.adds_residual and name.startswith("torch_")
    ]
    assert found
    x, residual = rand(1, ROWS, 8), rand(1, ROWS, 8)
    for name in found:
        normed, total = getattr(ops, name)(x, residual, torch.ones(8), 1e-6)
        torch.testing.assert_close(total, x + residual)
        torch.testing.assert_close(normed, ops.torch_rmsnorm(total, torch.ones(8), 1e-6))


def test_feed_forward_blocks_and_experts_are_those_whose_arguments_say_so() -> None:
    for name, source in op_sources().items():
        if name.startswith("torch_"):
            names = arguments_of(name)
            assert source.experts == ("selected_experts" in names), name
            down = any(each in ("down_weight", "w2_weight", "w2_stacked_weight") for each in names)
            assert source.feed_forward == down, name


def _turned(name: str, rows: slice, q: Tensor, angles: Tensor) -> Tensor:
    tables = [angles.cos(), angles.sin()]
    if "freqs_cis" in arguments_of(name):
        tables = [torch.polar(torch.ones_like(angles), angles)[..., : angles.shape[-1] // 2]]
    turned: Tensor = getattr(ops, name)(
        q[:, rows], q[:, rows], *(each[:, rows] for each in tables)
    )[0]
    return turned


def _kept(rows: slice, x: Tensor) -> Tensor:
    slots = torch.arange(ROWS)[rows]
    cache = torch.zeros(3, 1, 2, x.shape[-1])
    out: Tensor = ops.torch_cached_residual_add(x[:, rows], 2 * x[:, rows], slots, cache)
    return out


def _kept_head_input(rows: slice, x: Tensor) -> Tensor:
    cache = torch.zeros(3, 1, 2, x.shape[-1])
    out: Tensor = ops.torch_cached_head_input(x[:, rows], torch.arange(ROWS)[rows], cache)
    return out


def _pages_of(x: Tensor) -> Tensor:
    """Return rows [1, rows, size] as they lie in pages of two."""
    pages = torch.zeros(3, 1, 2, x.shape[-1])
    pages.view(-1, x.shape[-1])[:ROWS] = x[0]
    return pages


def _row_wise() -> dict[str, Callable[[slice], Tensor]]:
    q, angles, x = rand(1, ROWS, 2, 8), rand(1, ROWS, 8), rand(1, ROWS, 8)
    heads_first = q.transpose(1, 2)

    def rope(name: str) -> Callable[[slice], Tensor]:
        def turn(rows: slice) -> Tensor:
            if "unsqueeze_dim" not in arguments_of(name) or name == "torch_rope_with_complex_freqs":
                return _turned(name, rows, q, angles)
            tables = angles[:, rows].cos(), angles[:, rows].sin()
            turned: Tensor = getattr(ops, name)(
                heads_first[:, :, rows], heads_first[:, :, rows], *tables
            )[0]
            return turned.transpose(1, 2)

        return turn

    names = [
        name for name, source in op_sources().items() if source.rotary and name.startswith("torch_")
    ]
    made = {name: rope(name) for name in names if op_sources()[name].row_wise}
    made["torch_cached_residual_add"] = lambda rows: _kept(rows, x)
    made["torch_cached_head_input"] = lambda rows: _kept_head_input(rows, x)
    made["torch_kept_head_input"] = lambda rows: ops.torch_kept_head_input(
        torch.arange(ROWS)[rows], _pages_of(x)
    )
    made["embedding_of_rank"] = lambda rows: ops.embedding_of_rank(
        torch.arange(ROWS)[None, rows], x[0, 1:3], 1
    )
    made["gather_logits_before_lm_head"] = lambda rows: ops.gather_logits_before_lm_head(
        x, torch.arange(ROWS)[rows]
    )
    return made


def test_a_row_wise_op_computes_a_row_alike_in_any_company() -> None:
    """Those of kernels are in `interpreted_invariant.py`."""
    made = _row_wise()
    known = {name for name, source in op_sources().items() if source.row_wise and source.ships}
    assert made.keys() == {name for name in known if not name.startswith("triton_")}
    for name, run in made.items():
        whole = run(slice(0, ROWS))
        for first, last in ((0, 1), (ROWS - 1, ROWS), (1, 3)):
            assert torch.equal(run(slice(first, last)), whole[:, first:last]), name


def test_attention_that_a_mask_may_shape_is_the_one_that_carries_no_state() -> None:
    """So these are what a graph's invariants look for when it must be cached; with a mask tokens
    see later ones.
    """
    assert {
        name for name in attention_ops() if "attn_mask" in arguments_of(name)
    } == attention_ops() - stateful_ops()
