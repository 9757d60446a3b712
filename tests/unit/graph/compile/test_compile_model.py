"""Back ends of `compile_model`, which decode batches are captured, and what a replay sees.

No CUDA graph exists on the CPU: a stand-in that runs the module on the static inputs again, which
is what a replay does, shows which steps are replayed and what comes of it. tests/gpu has the real
thing.
"""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from onboard.content.transforms.compile.compile_model import CompileModel, CompileModelConfig
from torch._dynamo.backends import registry

from onboard.cache.examples import set_decode_example, set_prefill_example
from onboard.cache.token_masks import TokenMasks
from onboard.errors import OnboardError, UsageError
from onboard.graph.compile.capture import capture_sizes
from onboard.graph.compile.cuda_graph import CapturedDecode, _Decode
from tests.support.graph.decoder import (
    VOCABULARY,
    copied_inputs,
    decoder,
    make_cache,
    set_decode_batch,
)
from tests.support.graph.fusion import apply, context_for
from tests.support.graph.harness import rmse


@pytest.fixture
def gm():
    return decoder()


@pytest.mark.parametrize(
    ("wanted", "most", "expected"),
    [
        (None, 8, [1, 2, 4, 8]),
        (None, 6, [1, 2, 4, 6]),
        (None, 1, [1]),
        (None, 24, [1, 2, 4, 8, 16, 24]),
        (None, 100, [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 100]),
        (None, 256, [1, 2, 4, 8, 16, 24, 32, 48, *range(64, 257, 16)]),
        (None, 512, [1, 2, 4, 8, 16, 24, 32, 48, *range(64, 256, 16), *range(256, 513, 32)]),
        ([4, 1, 4, 9], 8, [1, 4]),
        ([], 8, []),
    ],
)
def test_capture_sizes(wanted, most, expected):
    assert capture_sizes(wanted, most) == expected


def test_a_size_below_one_is_refused():
    with pytest.raises(UsageError, match="batch size 0"):
        capture_sizes([2, 0], 8)


class StandIn:
    """Replays like a CUDA graph: same inputs' addresses, same output's address."""

    def __init__(self, gm, inputs, output) -> None:
        self.run = lambda: output.copy_(gm(**inputs))

    def replay(self) -> None:
        self.run()


def _captured(gm, cache, sizes) -> CapturedDecode:
    decode = CapturedDecode(gm)
    for size in sizes:
        set_decode_example(cache.info, size, 16)
        inputs, caches = cache.info.inputs, cache.caches
        both = {**inputs, **caches}
        output = gm(**both)
        tokens = torch.zeros(size, dtype=torch.int64)
        decode._captured[size, True] = _Decode(
            StandIn(gm, both, output), inputs, caches, tokens, output
        )
    cache.info.decode_sizes = sizes
    return decode


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_decode_batch_replays_the_next_size(gm, size):
    cache = make_cache()
    decode = _captured(gm, cache, [1, 4])
    for step in range(3):
        cache.info.decode_sizes = []
        set_decode_batch(cache, size, seed=step)
        alone = copied_inputs(cache)
        cache.info.decode_sizes = [1, 4]
        set_decode_batch(cache, size, seed=step)
        actual, expected = decode(**cache.args), gm(**alone)
        assert actual.shape[1] == (1 if size == 1 else 4)
        assert rmse(actual[:, :size], expected) <= 1e-6
        for name in cache.caches:  # padding writes no page of a sequence
            assert torch.equal(cache.caches[name][1:], alone[name][1:])
        assert (decode.replays, decode.eager_calls) == (step + 1, 0)


def test_a_result_outlives_the_next_replay(gm):
    cache = make_cache()
    decode = _captured(gm, cache, [2])
    set_decode_batch(cache, 2)
    first = decode(**cache.args)
    kept = first.clone()
    set_decode_batch(cache, 2)
    decode(**cache.args)
    assert torch.equal(first, kept)


def test_without_padding_only_exact_sizes_replay(gm):
    cache = make_cache()
    decode = _captured(gm, cache, [1, 4])
    cache.info.decode_sizes = []
    for size in (3, 4):
        set_decode_batch(cache, size)
        decode(**cache.args)
    assert (decode.replays, decode.eager_calls) == (1, 1)


def test_inputs_of_ones_own_run_eagerly(gm):
    cache = make_cache()
    decode = _captured(gm, cache, [4])
    set_decode_batch(cache, 4)
    own = copied_inputs(cache)
    assert rmse(decode(**own), gm(**own)) <= 1e-6
    assert (decode.replays, decode.eager_calls) == (0, 1)


def test_prefill_and_larger_batches_run_eagerly(gm):
    cache = make_cache()
    decode = _captured(gm, cache, [1, 2])
    set_prefill_example(cache.info, 7)
    expected = gm(**copied_inputs(cache))
    assert rmse(decode(**cache.args), expected) <= 1e-6
    set_decode_batch(cache, 3)
    decode(**cache.args)
    assert (decode.replays, decode.eager_calls) == (0, 2)


def test_other_logits_rows_run_eagerly(gm):
    cache = make_cache()
    decode = _captured(gm, cache, [4])
    set_decode_batch(cache, 3)
    inputs = {**cache.args, "logits_gather_indices": torch.tensor([2])}
    assert decode(**inputs).shape == (1, 1, VOCABULARY)
    assert decode.eager_calls == 1


def test_caches_that_moved_are_an_error(gm):
    cache = make_cache()
    decode = _captured(gm, cache, [2])
    cache.allocate(40)
    set_decode_batch(cache, 2)
    with pytest.raises(OnboardError, match="the caches were allocated again"):
        cache.next_tokens(decode)


def test_wrapper_shows_the_graph_inside(gm):
    assert CapturedDecode(gm).graph is gm.graph


def _compile(gm, tmp_path, **fields):
    runtime = {"compile_backend": fields.pop("run", "auto")}
    return apply("compile_model", gm, context_for(tmp_path, **runtime), shapes=False, **fields)


@pytest.mark.parametrize("fields", [{"backend": "torch-simple"}, {"backend": "auto"}])
def test_torch_simple_is_the_graph_itself(gm, tmp_path, fields):
    new, info, context = _compile(gm, tmp_path, **fields)
    assert new is gm
    assert info.num_matches == 0
    assert not context.facts


@pytest.mark.parametrize("backend", ["torch-cudagraph", "torch-opt"])
def test_cuda_graphs_need_a_gpu(gm, tmp_path, backend):
    with pytest.raises(UsageError, match=f"{backend} cannot be used: they need a GPU, not cpu"):
        _compile(gm, tmp_path, backend=backend)
    with pytest.raises(UsageError, match=f"{backend} cannot be used"):
        _compile(gm, tmp_path, backend="auto", run=backend)


def test_tensorrt_says_what_it_needs(gm, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="it compiles for NVIDIA GPUs, and the run is on the cpu"):
        _compile(gm, tmp_path, backend="torch-tensorrt")
    with pytest.raises(UsageError, match="torch-tensorrt cannot be used"):
        _compile(gm, tmp_path, backend="auto", run="torch-tensorrt")
    context = context_for(tmp_path)
    context.device = torch.device("cuda")
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)
    with pytest.raises(UsageError, match="torch_tensorrt is not installed") as error:
        apply("compile_model", gm, context, shapes=False, backend="torch-tensorrt")
    assert "pip install torch-tensorrt" in error.value.hint
    assert "\n" not in error.value.message


def test_tensorrt_is_asked_where_it_is_installed(gm, tmp_path, monkeypatch):
    """A stand-in for the package: a back end of torch.compile under its name."""
    asked = []

    def compiler(graph, inputs, **options):
        asked.append(graph)
        return graph.forward

    monkeypatch.setitem(sys.modules, "torch_tensorrt", ModuleType("torch_tensorrt"))
    monkeypatch.setitem(registry._BACKENDS, "torch_tensorrt", None)
    monkeypatch.setitem(registry._COMPILER_FNS, "torch_tensorrt", compiler)
    cache, context = make_cache(), context_for(tmp_path)
    context.device = torch.device("cuda")
    compiled, info, _ = apply("compile_model", gm, context, shapes=False, backend="torch-tensorrt")
    set_prefill_example(cache.info, 9)
    expected = gm(**copied_inputs(cache))
    assert rmse(compiled(**cache.args), expected) <= 1e-6
    assert asked
    assert info.num_matches == 1


def test_attention_that_reads_lengths_on_the_host_is_not_captured(gm, tmp_path):
    context = context_for(tmp_path)
    context.device = torch.device("cuda")
    new, info, _ = apply("compile_model", gm, context, shapes=False, backend="auto")
    assert new is gm
    assert info.num_matches == 0
    assert "CUDA graphs are not used, torch_cached_attention" in context.facts[0]
    with pytest.raises(UsageError, match="torch_cached_attention"):
        apply("compile_model", gm, context, shapes=False, backend="torch-cudagraph")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backend": "torch-simple", "piecewise_enabled": True}, "piecewise_enabled"),
        ({"backend": "torch-compile", "piecewise_enabled": True}, "piecewise_enabled"),
        ({"backend": "torch-tensorrt", "piecewise_enabled": True}, "piecewise_enabled"),
        ({"backend": "torch-simple", "piecewise_num_tokens": [64]}, "piecewise_num_tokens"),
        (
            {
                "backend": "torch-cudagraph",
                "piecewise_enabled": False,
                "piecewise_num_tokens": [64],
            },
            "piecewise_num_tokens",
        ),
        (
            {"backend": "torch-cudagraph", "piecewise_enabled": True, "piecewise_num_tokens": [0]},
            "piecewise_num_tokens",
        ),
        ({"backend": "torch-cudagraph", "cuda_graph_batch_sizes": [0]}, "cuda_graph_batch_sizes"),
        ({"backend": "torch-cudagraph", "num_batched_inputs": 0}, "num_batched_inputs"),
        ({"backend": "torch-graph"}, "backend"),
        ({}, "backend"),
    ],
)
def test_fields_are_validated(gm, tmp_path, fields, message):
    with pytest.raises((UsageError, ValueError), match=message):
        _compile(gm, tmp_path, **fields)


def test_a_wrong_number_of_batched_inputs_is_refused(gm, tmp_path):
    context = context_for(tmp_path)
    context.cache = make_cache()
    config = CompileModelConfig(stage="compile", backend="torch-cudagraph", num_batched_inputs=2)
    with pytest.raises(
        UsageError, match="num_batched_inputs 2, and the graph takes 9: input_ids, "
    ):
        CompileModel(config)._check_inputs(gm, context)
    for right in (9, None):
        CompileModel(config.model_copy(update={"num_batched_inputs": right}))._check_inputs(
            gm, context
        )
    for backend in ("auto", "torch-simple"):
        with pytest.raises(UsageError, match="num_batched_inputs 2, and the graph takes 9"):
            apply("compile_model", gm, context, shapes=False, backend=backend, num_batched_inputs=2)


@pytest.mark.parametrize("fields", [{"piecewise_enabled": True}, {"piecewise_num_tokens": [64]}])
def test_fields_that_the_back_end_makes_nothing_of_are_a_fact(gm, tmp_path, fields):
    _, _, context = _compile(gm, tmp_path, backend="auto", cuda_graph_batch_sizes=[2], **fields)
    names = f"cuda_graph_batch_sizes and {next(iter(fields))}"
    assert context.facts == [f"compile_model: back end torch-simple makes nothing of {names}"]


@pytest.mark.exhaustive
def test_torch_compile_computes_the_same(gm, tmp_path):
    cache = make_cache()
    compiled, info, _ = _compile(gm, tmp_path, backend="torch-compile")
    assert info.num_matches == 1
    set_prefill_example(cache.info, 9)
    expected = gm(**copied_inputs(cache))
    assert rmse(compiled(**cache.args), expected) <= 1e-6
    assert compiled.graph is gm.graph


def test_a_captured_step_has_its_tokens_and_other_steps_choose_theirs(gm):
    cache = make_cache()
    decode = _captured(gm, cache, [4])
    set_decode_batch(cache, 3)
    decode._captured[4, True].tokens[:] = torch.tensor([5, 6, 7, 8])
    tokens, logits = cache.next_tokens(decode)
    assert tokens.tolist() == [5, 6, 7, 8]
    assert rmse(logits(), gm(**copied_inputs(cache))[0]) <= 1e-6
    assert (decode.replays, decode.eager_calls) == (1, 0)
    set_prefill_example(cache.info, 9)
    tokens, logits = cache.next_tokens(decode)
    assert tokens.tolist() == logits().argmax(-1).tolist()
    assert (decode.replays, decode.eager_calls) == (1, 1)


@torch.inference_mode()
def test_the_second_choice_behind_a_replay_is_the_captured_one(gm, monkeypatch):
    """The capture itself is stood in for by the function again, which is what a replay does."""
    cache = make_cache()

    def captured(choose, size, pool):
        tokens = choose().clone()
        return SimpleNamespace(replay=lambda: tokens.copy_(choose())), tokens

    decode = _captured(gm, cache, [2, 4])
    monkeypatch.setattr("onboard.graph.compile.cuda_graph.captured_graph", captured)
    for size in (4, 2):
        set_decode_example(cache.info, size, 16)
        step, args = decode._captured[size, True], {**cache.args, **cache.info.choice}
        again = decode._captured_again(cache, args, step.output[0], None)
        decode._captured[size, True] = replace(step, again=again)
    for size in (3, 1, 4, 2):
        set_decode_batch(cache, size)
        _, logits = cache.next_tokens(decode)
        masks = TokenMasks(*logits().shape)
        second = logits().topk(2).indices[:, 1].tolist()
        masks.of(0, last=0)[:] = np.packbits(np.arange(64) == second[0], bitorder="little")
        first = logits().argmax(-1).tolist()
        chosen = cache.choose_again(logits(), masks, decode)
        assert chosen is decode._captured[2 if size < 3 else 4, True].again.tokens
        assert chosen.tolist() == [second[0], *first[1:]]
    set_prefill_example(cache.info, 9)
    _, logits = cache.next_tokens(decode)
    masks = TokenMasks(*logits().shape)
    masks.of(0, last=7)[:] = 0
    assert cache.choose_again(logits(), masks, decode).tolist()[0] == 7


def test_a_token_that_only_the_device_knows_is_read_there(gm):
    cache = make_cache()
    set_decode_batch(cache, 3)
    known = cache.info.args["input_ids"].clone()
    expected = cache.next_tokens(gm)[0].clone()
    cache.latest.by_slot[2], cache.info.args["input_ids"][0, 1] = known[0, 1], -2
    assert cache.next_tokens(gm)[0].tolist() == expected.tolist()
