"""The blocks of a spec that are mixtures of experts, or the experts of one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from onboard.analysis.blocks.spec_records import AnyBlock, Parameters
from onboard.untrusted.identifiers import AttributePath, FileName, Identifier, ModulePath


class ExpertsParameters(Parameters):
    """Where the weights of a mixture's experts are, how they are computed with, what their forward
    is given.
    """

    layout: Literal["modules", "stacks", "flat"]
    gate: AttributePath | None = None
    up: AttributePath | None = None
    experts: AttributePath | None = None
    gate_up: AttributePath | None = None
    down: AttributePath
    transposed: bool
    gate_up_bias: AttributePath | None = None
    down_bias: AttributePath | None = None
    form: Literal["whole", "halves", "swapped", "alternating"] | None = None
    down_stack: AttributePath | None = None
    down_transposed: bool = False
    limit: AttributePath | None = None
    alpha: AttributePath | None = None
    up_offset: float
    gate_cap: AttributePath | None = None
    up_cap: AttributePath | None = None
    act: AttributePath | None = None
    act_class: Identifier | None = None
    activation: Identifier
    gated: bool
    identity: bool = False
    x: Identifier
    indices: Identifier
    weights: Identifier


class Experts(AnyBlock):
    """The experts of a mixture."""

    kind: Literal["experts"]
    parameters: ExpertsParameters


class Handed(Parameters):
    """A variable of the statements that another function makes of `tensors` and returns: the
    end of that function, from its statement `begin` on.
    """

    variable: Identifier
    file: FileName
    function: Identifier
    line: int
    begin: int
    place: int
    """Of the variable in the tuple that the function returns; -1: it is what the function returns."""
    tensors: list[Identifier]
    through: list[ModulePath]
    """Parts of the mixture whose forwards return it: these give the tensors instead."""

    def name_of(self, variable: str) -> str:
        """Return what a variable of the function is called among the mixture's."""
        return f"{self.variable}_{variable}"


class MixtureParameters(Parameters):
    """The list of experts and the linear layers of each; the statements that are the mixture, by
    the method, the first one's number and how many; their variables.

    `biased`: the layers have biases; `in_rows`: `indices` has a token's experts in its last
    dimension.
    """

    experts: AttributePath | None
    """The list, or the module with the weights of all; None: the mixture has these itself."""
    named: bool = False
    """The experts are modules of a dict, in this order, not of a list."""
    numbered: bool = False
    """The experts are attributes of the mixture itself: `experts` and a number behind it."""
    gate: ModulePath | None
    """None of the three: experts of any class."""
    down: ModulePath | None
    up: ModulePath | None = None
    biased: bool = False
    fused: Literal["gate", "up"] | None = None
    """The layer `gate` is gate and up projection, one below the other: which of them comes first."""
    layout: Literal["modules", "lists", "stacks", "flat", "own", "any"] = "modules"
    """One module an expert in a list, or the weights of all in one module, or in the mixture; `any`:
    modules of any class in a list, each of which computes every token."""
    size: Identifier | None = None
    """Of flat matrices, that module's attribute that says how many experts there are."""
    turned: list[Literal["gate", "down", "up"]] = Field(default_factory=list)
    """Whose matrices that module has with rows and columns swapped."""
    scale: Identifier | None = None
    """The attribute by which the statements multiply what the experts make."""
    activation: Identifier | None
    method: Identifier
    begin: int
    count: int
    result: Identifier
    x: Identifier
    indices: Identifier
    weights: Identifier | None
    weighting: Literal["each", "all", "none"] = "each"
    """Weights of the choices, or of all experts, from which the choices pick; or all are 1."""
    base: Identifier | None = None
    """What the experts' outputs are added to, the result itself perhaps; None: to nothing."""
    identities: Identifier | Literal[True] | None = None
    """The attribute that says how many experts there are, where ids from there on return their input,
    or that this is as many as the list has; None: such ids stand for nothing."""
    in_rows: bool
    handed: Handed | None = None
    router: AttributePath | None = None
    """The linear layer whose softmax chooses, where the statements choose the experts, too."""
    routed_rows: bool = True
    """It gets tokens one below the other, not texts apart."""
    chosen: int = 0
    """How many it chooses then, and whether their weights are made to add up to one."""
    renormalised: bool = False


class Mixture(AnyBlock):
    """A class whose experts are modules of a list, some statements of which are `torch_moe`."""

    kind: Literal["mixture"]
    parameters: MixtureParameters
