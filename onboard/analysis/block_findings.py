"""The blocks of a model: classes of its module tree, and functions that modeling code calls."""

from __future__ import annotations

from torch import nn

from onboard.analysis.classify import classify
from onboard.analysis.multimodal import is_under
from onboard.analysis.recognise import mixers, probe
from onboard.analysis.recognise.mask_makers import mask_makers
from onboard.analysis.recognise.recorder import Recording
from onboard.analysis.recognise.uncalled import with_uncalled
from onboard.analysis.source import location, module_source
from onboard.analysis.spec_blocks import Block, make_block
from onboard.hf.expert_weights import separate_experts


def module_blocks(model: nn.Module, recording: Recording, eager: list[str]) -> list[Block]:
    """Return a block for each class of the module tree that is not PyTorch's, in the order of the
    tree.
    """
    blocks: dict[str, Block] = {}
    attention = {call.path for call in recording.attention}
    separate = separate_experts(model)
    for cls, (path, module) in _examples(model, recording, eager).items():
        finding = classify(model, path, module, recording, attention, separate)
        blocks[cls.__name__] = make_block(
            class_name=cls.__name__,
            kind=finding.kind,
            path=path,
            source=location(cls),
            parameters=finding.parameters,
            evidence=finding.evidence,
        )
    return list(blocks.values())


def _examples(
    model: nn.Module, recording: Recording, eager: list[str]
) -> dict[type, tuple[str, nn.Module]]:
    """Return path and module of the first example of each class in the tree: of those that run, if
    any does, the first with the longest list of modules, as mixtures with one expert show little.
    """
    found: dict[type, tuple[str, nn.Module]] = {}
    ranks: dict[type, tuple[bool, int]] = {}
    for path, module in model.named_modules():
        cls = type(module)
        if cls.__module__.startswith("torch.") or cls.__module__ == "transformers.activations":
            continue
        if is_under(path, eager):
            continue
        mine = (path in recording.modules, _longest_list(module))
        if cls not in found or mine > ranks[cls]:
            found[cls], ranks[cls] = (path, module), mine
    return found


def _longest_list(module: nn.Module) -> int:
    lists = [each for each in module.children() if isinstance(each, nn.ModuleList)]
    return max(map(len, lists), default=0)


def rope_blocks(recordings: list[Recording]) -> list[Block]:
    """Return a block for each helper function that applies RoPE; its evidence is the worst of all
    calls.
    """
    blocks: dict[str, Block] = {}
    for call in with_uncalled(
        [call for each in recordings for call in each.functions], probe.probe_rope
    ):
        finding = probe.probe_rope(call)
        source = module_source(call.module)
        node = source.functions.get(call.name)
        if finding is None or node is None or call.name in blocks:
            continue
        blocks[call.name] = make_block(
            class_name=call.name,
            kind="rope",
            path="",
            source=source.location(node),
            parameters=finding.parameters | ({} if call.called else {"uncalled": True}),
            evidence=finding.evidence,
        )
    return list(blocks.values())


def scan_blocks(recording: Recording) -> list[Block]:
    """Return a block for each helper function that is a canonical op of recurrent mixers."""
    blocks: dict[str, Block] = {}
    for call in recording.helpers:
        source = module_source(call.function.__module__)
        node = source.functions.get(call.name)
        if node is None or call.name in blocks or (finding := mixers.probe_scan(call)) is None:
            continue
        blocks[call.name] = make_block(
            class_name=call.name,
            kind=finding.kind,
            path="",
            source=source.location(node),
            parameters=finding.parameters,
            evidence=finding.evidence,
        )
    return list(blocks.values())


def mask_blocks(model: nn.Module) -> list[Block]:
    """Return a block for each function or method that makes the causal mask of attention that is
    written out.
    """
    evidence = ["probe: returns a causal mask whenever it is called"]
    source = location(type(model)).split(":")[0]
    return [
        make_block(
            class_name=item,
            kind="mask",
            path="",
            source=source,
            parameters={"returns": kinds},
            evidence=evidence,
        )
        for item, kinds in mask_makers(model).items()
    ]
