"""What a transform is: its stages, its configuration, what it reports, and the table of all
transforms.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import fx, nn

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


def validated(
    key: str, config_class: type[TransformConfig], fields: Mapping[str, Any]
) -> TransformConfig:
    """Return a transform's configuration; raise `UsageError`, which names the transform, for fields
    that are wrong.
    """
    try:
        return config_class.model_validate(fields)
    except UsageError as error:
        raise UsageError(f"transform {key}: {error.message}", hint=error.hint) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"transform {key}: field {field!r}: {first['msg']}, got {first['input']!r}"
        ) from error


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
    """What was done beyond the number of matches, or why it was skipped, in a few words."""


def skipped(why: str) -> TransformInfo:
    """Return what a transform says that leaves a graph alone, because it is not for it or for this
    run, with the reason, which users may ask for.
    """
    return TransformInfo(skipped=True, is_clean=True, has_valid_shapes=True, summary=why)


C = TypeVar("C", bound=TransformConfig)


class BaseTransform(ABC, Generic[C]):
    """One step of the pipeline.

    The runner owns ordering, timing, memory accounting, clean-up, shape propagation, verification
    and dumps; a transform only edits the module (in place where it can) and counts what it changed.
    """

    key: ClassVar[str]
    home: ClassVar[str | None] = None
    """The stage that a package's transform is registered for; None: the folder says it."""
    origin: ClassVar[str] = ""
    """Where a transform from outside comes from; "" for one that ships."""
    acts: ClassVar[bool] = False
    """It does something beside the graph, which stays as it is (it loads, allocates, captures): it
    also runs when a graph that was transformed before is taken from the cache. All others see no
    values of weights."""
    needed: ClassVar[bool] = False
    """No run goes without it: it stays where the shipped pipeline has it."""
    shows: ClassVar[bool] = False
    """It writes down what the graph is, at every start: one with it takes no graph from the
    cache.
    """
    config_class: ClassVar[type[TransformConfig]] = TransformConfig

    def __init__(self, config: C) -> None:
        self.config = config
        self.asked_for = False
        """The user has enabled it: that it finds nothing to do is then a fact."""

    def from_outside(self) -> str:
        """Return a sentence about what of it an extension brings, "" for nothing: it becomes a fact
        of the run.
        """
        return (
            f"{self.key} is no part of onboard: it comes from {self.origin}" if self.origin else ""
        )

    @abstractmethod
    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Apply the transform; return the module (the same or a new one) and what was done."""


class GraphTransform(BaseTransform[C]):
    """A transform that edits a graph in place: it has `rewrite`, and what holds for the graph then
    is derived.

    One that gives back another module is a `BaseTransform`.
    """

    keeps_shapes: ClassVar[bool] = True
    """`node.meta["val"]` of every node is still right where it has changed something, new nodes
    included.
    """

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        """Rewrite the graph; without a match it is as clean as before, and its shapes are as
        valid.
        """
        assert isinstance(gm, fx.GraphModule), (
            f"{self.key} edits graphs, this is a {type(gm).__name__}"
        )
        done = self.rewrite(gm, context)
        if isinstance(done, TransformInfo):
            return gm, done
        assert isinstance(done, int), (
            f"rewrite returned a {type(done).__name__}, not the number of matches"
        )
        return gm, TransformInfo(
            num_matches=done, is_clean=not done, has_valid_shapes=self.keeps_shapes or not done
        )

    @abstractmethod
    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Change the graph and return the number of matches.

        `skipped(why)`, or a `TransformInfo` of its own, where the number does not say it all: what
        changed is more than the matches, or nothing has to be cleaned up after them.
        """


_TRANSFORMS: dict[str, dict[str, type[BaseTransform[Any]]]] = {}
"""By the module that registers them, and by key."""
T = TypeVar("T", bound=type[BaseTransform[Any]])


def register_transform(key: str, stage: str | None = None) -> Callable[[T], T]:
    """Register a transform class under its YAML key, which is also its file name.

    Its stage is the folder that the file lies in; `stage` names that of an installed package's
    transform.
    """

    def register(cls: T) -> T:
        own = _TRANSFORMS.setdefault(cls.__module__, {})
        assert key not in own or own[key].__qualname__ == cls.__qualname__, (
            f"transform {key} is registered twice"
        )
        cls.key, cls.home = key, stage
        own[key] = cls
        return cls

    return register


def registered(module: str) -> Iterator[tuple[str, type[BaseTransform[Any]]]]:
    """Yield what a module and those below it have registered, each with its key."""
    for name, own in _TRANSFORMS.items():
        if name == module or name.startswith(f"{module}."):
            yield from own.items()


@cache
def transform_keys() -> Mapping[str, Stages]:
    """Return every shipped transform's key and the stage whose folder it lies in."""
    folders = ((stage, CONTENT_ROOT / "transforms" / stage.value) for stage in Stages)
    keys = {
        file.stem: stage for stage, folder in folders for file in sorted(folder.glob("[a-z]*.py"))
    }
    return MappingProxyType(keys)


def get_transform(key: str) -> type[BaseTransform[Any]]:
    """Import the file of a shipped transform and return its class."""
    keys = transform_keys()
    if key not in keys:
        raise UsageError(
            f"there is no transform {key!r}", hint=suggest(key, keys, "transforms/default.yaml")
        )
    module = f"onboard.content.transforms.{keys[key].value}.{key}"
    importlib.import_module(module)
    return _TRANSFORMS[module][key]
