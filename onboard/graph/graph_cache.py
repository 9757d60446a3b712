"""Exported and transformed graphs, kept from start to start under a digest of everything that they
depend on.

A graph is a function of the model file, the model's config, the transforms with their fields, the
run's settings, the names and shapes in the checkpoint, the device, this package's own code,
extensions and the libraries' versions; each is in the key, and the whole key is in the file and
compared, not its digest alone. How much a run holds (sequences, tokens, pages) is no part of its
graph; of its longest sequence only a range is, which is in the file. Weights are not
kept: a graph is kept as it is before they are loaded, or, when all later parameters are theirs,
joined at most, as it is before it is compiled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import fx, nn

from onboard.cache.resources import CacheResource, KVPagedResource
from onboard.extensions import extensions_digest
from onboard.graph.cache_init.interface import cache_dtype, make_interface, state_dtype
from onboard.graph.context import HistoryEntry, TransformContext
from onboard.graph.fx import graph_modules, placeholders
from onboard.graph.saved_graph import CannotSaveError, load_graph, save_graph
from onboard.graph.transform import BaseTransform
from onboard.graph.weight_load.parameters import is_as_loaded, weight_plan
from onboard.graph.weight_load.quantised_folder import stored_checkpoint
from onboard.quantised.layouts.float8 import INPUT_SCALE_NAMES
from onboard.quantised.layouts.integers import OF_INPUTS
from onboard.quantised.said import said_in_files
from onboard.user_cache import code_digest, environment, files_digest, user_cache

MOST_BYTES = 2 << 30
_NOT_IN_KEY = {
    *("model", "revision", "tokenizer", "transforms", "dtype", "device"),
    *(
        "max_seq_len",
        "max_batch_size",
        "max_num_tokens",
        "overlap",
        "speculative",
        "kv_cache_config",
        "cuda_graph_config",
    ),
}
"""Fields of a run: where the model is found says nothing of it; transforms, dtype and device are in
the key as they come out; the others say how much the run holds."""

log = logging.getLogger("onboard.pipeline")


def cache_folder() -> Path | None:
    """Return where graphs are kept, None for nowhere."""
    return user_cache("graphs")


@dataclass(frozen=True)
class Done:
    """What a transform did when the graph was made."""

    key: str
    skipped: bool
    num_matches: int
    summary: str = ""
    nodes: tuple[int, int] | None = None
    ops: dict[str, int] = field(default_factory=dict)
    """See `HistoryEntry`."""


@dataclass
class Restored:
    """A graph from the cache, and what was done to it."""

    module: nn.Module
    done: dict[str, Done]
    facts: list[str]


class GraphCache:
    """The graphs kept in one folder; at most `most_bytes` of them, the last used ones."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder = folder
        self.most_bytes = most_bytes

    def find(self, parts: dict[str, Any], context: TransformContext) -> Restored | None:
        """Return the graph of a key, with the context's caches registered; None when it is not
        there, or damaged.
        """
        path = self._path(parts)
        if not path.is_file():
            return None
        try:
            module, extra = load_graph(path)
            least, most = extra["lengths"]
            if extra["parts"] != _text(parts) or not least <= context.runtime.max_seq_len <= most:
                return None
            done = {key: Done(key, *rest) for key, *rest in extra["done"]}
            os.utime(path)
        except Exception as error:  # whatever a damaged file leads to, the graph can be made again
            log.warning("%s is damaged and is made again: %s", path, error)
            path.unlink(missing_ok=True)
            return None
        if extra["resources"] is not None:
            context.whole_caches = tuple(_in_pages(each, context) for each in extra["whole"])
            context.cache = make_interface(context)
            for name, resource in extra["resources"].items():
                context.cache.add_cache(name, _in_pages(resource, context))
        return Restored(module, done, extra["facts"])

    def keep(
        self,
        parts: dict[str, Any],
        module: nn.Module,
        context: TransformContext,
        done: Sequence[Done],
        facts: Sequence[str],
    ) -> None:
        """Write a graph; where that cannot be, for the log alone says why, it is made again at the
        next start.
        """
        cache_ = context.cache
        extra = {
            "parts": _text(parts),
            "done": [astuple(each) for each in done],
            "facts": list(facts),
            "lengths": _lengths(context),
            "resources": None if cache_ is None else _caches_of(module, cache_.resources),
            "whole": list(context.whole_caches),
        }
        try:
            if not isinstance(module, fx.GraphModule):
                raise CannotSaveError(f"a {type(module).__name__}")
            self.folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=self.folder) as scratch:
                save_graph(module, Path(scratch) / "graph", extra)
                os.replace(Path(scratch) / "graph", self._path(parts))
            self._forget()
        except (CannotSaveError, OSError) as error:
            log.info("the graph is not kept for the next start: %s", error)

    def _path(self, parts: dict[str, Any]) -> Path:
        return self.folder / f"{hashlib.sha256(_text(parts).encode()).hexdigest()}.safetensors"

    def _forget(self) -> None:
        """Remove the graphs that were not used for longest, until there is room for the others."""
        files = sorted(
            self.folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime, reverse=True
        )
        total = 0
        for file in files:
            total += file.stat().st_size
            if total > self.most_bytes:
                file.unlink(missing_ok=True)


class KeptRun:
    """One run of a pipeline beside the cache: it starts from a kept graph, or leaves one."""

    def __init__(
        self, cache: GraphCache, transforms: Sequence[BaseTransform[Any]], context: TransformContext
    ) -> None:
        """Look for the graph; its facts, and its caches, become the context's."""
        self._cache, self._transforms, self._context = cache, transforms, context
        self._parts = key_parts(context, transforms)
        self._restored = cache.find(self._parts, context)
        self._done: list[Done] = []
        self._facts: list[str] = []
        self._is_kept = self.is_restored
        if self._restored is not None:
            context.facts.extend(self._restored.facts)

    @property
    def is_restored(self) -> bool:
        """Whether there was a kept graph."""
        return self._restored is not None

    @property
    def module(self) -> nn.Module:
        """The kept graph, or an empty module."""
        return self._restored.module if self._restored is not None else nn.Module()

    def done_before(self, transform: BaseTransform[Any]) -> Done | None:
        """Return what a transform did to the kept graph, None when it is to run now."""
        return self._restored.done.get(transform.key) if self._restored is not None else None

    def is_due(self, index: int) -> bool:
        """Whether the graph is ready before the transform at `index`: what follows only acts."""
        following = self._transforms[index:]
        return not self._is_kept and all(each.acts or not each.config.enabled for each in following)

    def note(
        self, transform: BaseTransform[Any], entry: HistoryEntry, facts: Sequence[str]
    ) -> None:
        """Take down what a transform did to the graph, and the facts about the graph that came to
        light.
        """
        self._facts.extend(facts)
        if not transform.acts:
            outcome = entry.skipped, entry.num_matches, entry.summary, entry.nodes, entry.ops
            self._done.append(Done(transform.key, *outcome))

    def keep(self, module: nn.Module) -> None:
        """Write the graph, once, if its parameters can be read again from the checkpoint."""
        self._is_kept = True
        if _can_be_loaded(module):
            self._cache.keep(self._parts, module, self._context, self._done, self._facts)
        else:
            log.info(
                "the graph is not kept for the next start: some parameters are computed from others"
            )


def _can_be_loaded(module: nn.Module) -> bool:
    """Whether every parameter has the values that the plan says, and the plan speaks of the
    checkpoint alone.
    """
    plan = weight_plan(module)
    parts = {
        part for name, _ in module.named_parameters() for part in plan.parts(name) if part != name
    }
    return not parts & plan.folds.keys() and all(
        is_as_loaded(parameter) for parameter in module.parameters()
    )


def key_parts(
    context: TransformContext, transforms: Iterable[BaseTransform[Any]]
) -> dict[str, Any]:
    """Return everything that a run's graph depends on, as JSON."""
    factory, runtime = context.factory, context.runtime
    config = {
        key: value for key, value in factory.config.to_dict().items() if "name_or_path" not in key
    }
    return {
        "code": code_digest(),
        "extensions": extensions_digest(factory.root),
        "model_file": files_digest([factory.model_file()]),
        "config": [type(factory.config).__name__, config],
        "transforms": [[each.key, each.config.model_dump(mode="json")] for each in transforms],
        "runtime": runtime.model_dump(mode="json", exclude=_NOT_IN_KEY),
        "cache_dtype": str(cache_dtype(context) or "auto"),
        "state_dtype": str(state_dtype(context) or "auto"),
        "checkpoint": _files(context),
        "dtype": str(context.dtype),
        "device": _device(context.device),
        "rank": context.ranks.rank,
        "first_position": context.first_position,
        **environment(),
    }


def _lengths(context: TransformContext) -> list[int]:
    """Return the least and the greatest `max_seq_len` with which the run would have this graph.

    A window counts where sequences are longer: its pages are then in a group of their own, which
        has inputs of its own.
    """
    own = context.runtime.max_seq_len
    own_caches = context.cache.resources.values() if context.cache is not None else ()
    caches = (*context.whole_caches, *own_caches)
    paged = [resource for resource in caches if isinstance(resource, KVPagedResource)]
    windows = {resource.sliding_window for resource in paged if resource.sliding_window is not None}
    least = max((window + 1 for window in windows if window < own), default=1)
    return [least, min([context.longest or own, *(window for window in windows if window >= own)])]


def _caches_of(
    module: nn.Module, resources: Mapping[str, CacheResource]
) -> dict[str, CacheResource]:
    """Return the caches that a graph reads; others are those of graphs beside it, made anew."""
    read = {node.target for _, gm in graph_modules(module) for node in placeholders(gm)}
    return {name: resource for name, resource in resources.items() if name in read}


def _in_pages(resource: CacheResource, context: TransformContext) -> CacheResource:
    """Return a cache with pages of the run's own size."""
    size = context.runtime.kv_cache_config.tokens_per_block
    return replace(resource, page_size=size) if isinstance(resource, KVPagedResource) else resource


def _text(parts: dict[str, Any]) -> str:
    return json.dumps(parts, sort_keys=True, default=str)


def _files(context: TransformContext) -> str | list[Any]:
    """Return what a graph depends on of a checkpoint's files but config.json: of random weights what
    says that they are quantised.
    """
    folder = context.factory.checkpoint
    if context.runtime.skip_loading_weights:
        return [list(each) for each in said_in_files(folder)]
    return _headers(folder)


def _headers(checkpoint: Path) -> str:
    """Return the digest of what the files' headers say, and of the scales, factors and groups of
    layers' inputs: graphs differ where those of joined layers do.
    """
    files = stored_checkpoint(checkpoint)
    names = files.names()
    described = sorted(f"{name} {meta.dtype} {list(meta.shape)}" for name, meta in names.items())
    scales = (name for name in sorted(names) if name.endswith(INPUT_SCALE_NAMES))
    described += [f"{name} {files.read(name).flatten()[:1].tolist()}" for name in scales]
    digest = hashlib.sha256("\n".join(described).encode())
    for name in sorted(names):
        if name.endswith(OF_INPUTS):
            digest.update(files.read(name).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _device(device: torch.device) -> list[Any]:
    if device.type != "cuda":
        return [device.type]
    found = torch.cuda.get_device_properties(device)
    return [
        str(device),
        found.name,
        found.major,
        found.minor,
        found.multi_processor_count,
        torch.version.cuda,
    ]
