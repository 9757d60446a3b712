"""What a transform is: its stages, its configuration, what it reports, and the table of all transforms."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict
from torch import nn

from onboard.config import StrictModel, suggest
from onboard.content import CONTENT_ROOT
from onboard.errors import UsageError
from onboard.graph.context import TransformContext


class Stages(StrEnum):
    """The stages of the pipeline, in the order in which they run."""

    FACTORY = "factory"
    EXPORT = "export"
    POST_EXPORT = "post_export"
    PATTERN_MATCHER = "pattern_matcher"
    SHARDING = "sharding"
    WEIGHT_LOAD = "weight_load"
    POST_LOAD_FUSION = "post_load_fusion"
    CACHE_INIT = "cache_init"
    VISUALIZE = "visualize"
    COMPILE = "compile"


class TransformConfig(StrictModel):
    """The fields that every transform has."""

    stage: Stages
    run_per_gm: bool = True
    """Run on each graph module inside the model (True) or on the whole model."""
    enabled: bool = True
    skip_on_error: bool = False
    """Record an error and go on with the graph as it was before, instead of failing."""
    run_graph_cleanup: bool = True
    run_shape_prop: bool = False
    requires_clean_graph: bool = True
    requires_shape_prop: bool = False
    debug_visualize_dir: str | None = None
    expect_mem_change: bool = False


class TransformInfo(BaseModel):
    """What a transform did."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    skipped: bool = False
    num_matches: int = 0
    is_clean: bool = False
    """The graph needs no clean-up after this transform."""
    has_valid_shapes: bool = False
    """`node.meta["val"]` of every node is still right after this transform."""
    summary: str = ""
    """What was done beyond the number of matches, in a few words."""


C = TypeVar("C", bound=TransformConfig)


class BaseTransform(ABC, Generic[C]):
    """One step of the pipeline.

    The runner owns ordering, timing, memory accounting, clean-up, shape propagation, verification and dumps;
    a transform only edits the module (in place where it can) and counts what it changed.
    """

    key: ClassVar[str]
    acts: ClassVar[bool] = False
    """It does something beside the graph, which stays as it is (it loads, allocates, captures): it also runs when a
    graph that was transformed before is taken from the cache. All others see no values of weights."""
    config_class: ClassVar[type[TransformConfig]] = TransformConfig

    def __init__(self, config: C) -> None:
        self.config = config

    @abstractmethod
    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Apply the transform; return the module (the same or a new one) and what was done."""


_TRANSFORMS: dict[str, type[BaseTransform[Any]]] = {}
T = TypeVar("T", bound=type[BaseTransform[Any]])


def register_transform(key: str) -> Callable[[T], T]:
    """Register a transform class under its YAML key, which is also its file name."""

    def register(cls: T) -> T:
        assert key not in _TRANSFORMS, f"transform {key} is registered twice"
        cls.key = key
        _TRANSFORMS[key] = cls
        return cls

    return register


@cache
def transform_keys() -> Mapping[str, Stages]:
    """Return every shipped transform's key and the stage whose folder it lies in."""
    folders = ((stage, CONTENT_ROOT / "transforms" / stage.value) for stage in Stages)
    keys = {file.stem: stage for stage, folder in folders for file in sorted(folder.glob("[a-z]*.py"))}
    return MappingProxyType(keys)


def get_transform(key: str) -> type[BaseTransform[Any]]:
    """Import the file of a transform and return its class."""
    keys = transform_keys()
    if key not in keys:
        raise UsageError(f"there is no transform {key!r}", hint=suggest(key, keys))
    if key not in _TRANSFORMS:
        importlib.import_module(f"onboard.content.transforms.{keys[key].value}.{key}")
    return _TRANSFORMS[key]
