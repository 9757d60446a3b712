"""`ModelSpec`: what the analysis found out about a model, with the evidence for each trait."""

from __future__ import annotations

import re
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from ruamel.yaml import YAML

from onboard.analysis.blocks.spec_mixtures import Mixture
from onboard.analysis.blocks.spec_records import Record
from onboard.analysis.repository_source import PACKAGE
from onboard.analysis.spec_blocks import Block
from onboard.errors import OnboardError
from onboard.untrusted.identifiers import AttributePath, FileName, Identifier, ModelType
from onboard.untrusted.yaml_text import load_yaml


class Trait(Record):
    """One fact about the model and why we believe it."""

    value: str | int | float | bool | None
    """Words and switches that the report and the support matrix show; no code follows from it."""
    evidence: str
    """`file.py:123`, `config.json: key`, or `probe: ...` with the measured error."""


class LayerKind(Record):
    """A kind of decoder layer and the layers that are of it."""

    name: str
    """For example `full_attention` or `sliding_attention`."""
    layers: list[int]
    """Indices of the layers of this kind."""
    path: str
    """Module path of the first such layer of the tiny model, which has each kind once."""
    modules: dict[str, str] = Field(default_factory=dict)
    """What such a layer has: name in the layer -> class of a block, in the order in which they come
    to their end.
    """
    written_out: bool = False
    """It is a list of modules, or PyTorch's own module: what holds it runs its parts, one by one."""


class RepositoryCode(Record):
    """A model's own code, and what it took to run it."""

    classes: dict[Identifier, AttributePath]
    """`AutoConfig` -> "configuration_x.XConfig", where it has one, and `AutoModelForCausalLM`."""
    files: dict[FileName, str]
    """Name -> sha256."""
    facts: list[str]
    """Stand-ins for what transformers no longer has."""
    native: dict[str, Any]
    """The config's values under their usual names, as far as other phases ask for them."""


def unrun_in(mixture: Mixture) -> list[str]:
    """Return the modules, relative to a mixture, that nothing calls, its experts and what its router
    lies in, or that give it the choices as they are.
    """
    parameters = mixture.parameters
    owner = (parameters.router or "").rpartition(".")[0]
    handing = parameters.handed.through if parameters.handed is not None else []
    return [path for path in (parameters.experts, owner, *handing) if path]


def in_any_layer(path: str) -> str:
    """Return a module path with `*` in the places of numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


class ModelSpec(Record):
    """The analysis of one architecture: a readable YAML artifact that a user may edit and generate
    from.
    """

    schema_version: Literal[1] = 1
    """Of this file's form."""
    model: str
    """An id on the Hub, or a folder."""
    revision: str | None = None
    """The commit of the checkpoint on the Hub; None: a folder."""
    family: ModelType
    """`model_type`."""
    architecture: Identifier
    """For example `LlamaForCausalLM`."""
    config_class: Identifier
    """For example `LlamaConfig`."""
    hf_module: AttributePath
    """For example `transformers.models.llama.modeling_llama`."""
    transformers_version: str
    """The one whose modeling source was read."""
    source_hash: str
    """sha256 of the Hugging Face modeling source, or of the sha256 of each of `sources`."""
    sources: list[str] = Field(default_factory=list)
    """Names of these files: that of `hf_module`, then those that a multimodal model has its text
    model from.
    """
    num_parameters: int
    """Of the checkpoint, all layers."""
    active_parameters: int | None = None
    """Of a mixture: those that one token meets, of the routed experts only as many as it goes
    to.
    """
    config: dict[str, Any]
    """The checkpoint's config.json."""
    traits: dict[str, Trait]
    """attention (mha/gqa/mqa), norm, norm_placement, rope, mlp, activation, qk_norm,
    sliding_window, logit_softcap, attention_softcap, tied_embeddings, position, ...: whatever
    applies, in this order."""
    blocks: list[Block]
    """What each class of the modeling source computes: the part to edit. `kind` says which
    canonical op stands for it, `parameters` with what; one of kind `other` is translated as it is
    written.
    """
    layer_kinds: list[LayerKind]
    """Which layers are alike, in the order of their first ones."""
    eager: list[str] = Field(default_factory=list)
    """Module paths of a multimodal model's towers: transformers' own modules, which the generated
    file leaves out.
    """
    never_called: list[str] = Field(default_factory=list)
    """Paths of the tiny model's modules that no prompt calls, like cross attention where there is
    no encoder: their weights are in the checkpoint, but they have no output to compare."""
    tricky: list[str] = Field(default_factory=list)
    """What a human should look at."""
    repository: RepositoryCode | None = None
    """None: transformers has the model's code."""

    @property
    def whose(self) -> str:
        """Whose class is the reference, for sentences."""
        return "transformers' own" if self.repository is None else "the repository's own"

    def runs_together(self, path: str) -> bool:
        """Whether a module is one of a mixture's experts, which run in one op of that block, or
        what its router lies in, or what gives it the choices.
        """
        mixtures = [block for block in self.blocks if isinstance(block, Mixture)]
        parts = [in_any_layer(f"{m.path}.{part}.") for m in mixtures for part in unrun_in(m)]
        return in_any_layer(f"{path}.").startswith(tuple(parts))

    def to_yaml(self) -> str:
        """Return the spec as YAML."""
        yaml, stream = YAML(), StringIO()
        yaml.width = 110
        yaml.dump(self.model_dump(mode="json"), stream)
        return stream.getvalue()

    @classmethod
    def from_yaml(cls, text: str) -> ModelSpec:
        """Read a spec that `to_yaml` wrote, or that a user edited since; raise `OnboardError` when
        it is not one.
        """
        try:
            spec = _parsed(cls, text).model_copy(deep=True)
            if (package := spec.hf_module.split(".")[0]) in spec.packages():
                return spec
            reason = f"hf_module: {package!r:.80} is no module of transformers"
        except ValidationError as error:
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise OnboardError(
            f"the model's spec is not valid ({reason})",
            hint="Correct it, or rerun with --from analyze",
        )

    def packages(self) -> set[str]:
        """Return the packages of which a spec from a file may name a module: it is imported."""
        return {"transformers", *([PACKAGE] if self.repository else [])}

    def save(self, path: Path) -> None:
        """Write the spec as YAML."""
        path.write_text(self.to_yaml(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> ModelSpec:
        """Read a spec from its file."""
        return cls.from_yaml(path.read_text(encoding="utf-8"))


@lru_cache(maxsize=4)
def _parsed(cls: type[ModelSpec], text: str) -> ModelSpec:
    """Keep what was read: each phase asks for the spec several times, and reading it takes a tenth
    of a second.
    """
    return cls.model_validate(load_yaml(text, "the model's spec"))
