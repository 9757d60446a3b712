"""The variables of statements that may be a mixture: which of them are tokens, their experts and the
weights of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onboard.analysis.recognise.stretches import Region, read_first

ANY = "any"
"""The layout of a mixture's experts that are no MLPs of a known form."""
EACH, ALL, NONE = "each", "all", "none"
"""A weight of each choice; one of each expert, which the choices pick from; no weights."""


@dataclass(frozen=True)
class Roles:
    """The variables of a region that are tokens, their experts and the weights of these."""

    x: str
    indices: str
    weights: str | None
    weighting: str
    base: str | None
    """What the experts' outputs are added to, like x: made before, the result itself perhaps."""


def roles_of(
    region: Region, variables: Mapping[str, Any], experts: int, result: str
) -> Iterator[Roles]:
    """Yield the roles that the tensors that a region reads may have, which leaves `result`; none
    where they are others, or a token had more choices than there are experts.
    """
    names = [
        name
        for name in read_first(region.statements)
        if isinstance(variables.get(name), torch.Tensor) and variables[name].dim() > 0
    ]
    chosen = [name for name in names if not variables[name].is_floating_point()]
    if len(chosen) != 1 or not 2 <= len(names) <= 4:
        return
    floats = [name for name in names if name not in chosen]
    for x in floats:
        rest = [name for name in floats if name != x]
        if not 1 <= choices(variables, x, chosen[0]) <= experts:
            continue
        for base in _bases(variables, x, rest, result):
            weights = [name for name in rest if name != base]
            of_them = weights[0] if weights else None
            ways = _weightings(variables, x, chosen[0], of_them, experts)
            yield from (Roles(x, chosen[0], of_them, way, base) for way in ways if len(weights) < 2)


def _bases(
    variables: Mapping[str, Any], x: str, rest: Sequence[str], result: str
) -> list[str | None]:
    """Return what the experts' outputs may be added to: the result, where that was there before."""
    alike = [name for name in rest if _alike(variables, x, name)]
    return [result] if result in alike else [None, *(alike if result not in rest else [])]


def _alike(variables: Mapping[str, Any], one: str, other: str) -> bool:
    """Whether two tensors have one shape, and no memory in common."""
    first, second = variables[one], variables[other]
    places = {item.untyped_storage().data_ptr() for item in (first, second)}
    return len(places) == 2 and bool(first.shape == second.shape)


def choices(variables: Mapping[str, Any], x: str, indices: str) -> int:
    """Return how many experts each token goes to; 0 where that is no number."""
    count = tokens(variables[x])
    number, rest = divmod(variables[indices].numel(), count) if count else (0, 0)
    return 0 if rest else number


def _weightings(
    variables: Mapping[str, Any], x: str, indices: str, weights: str | None, experts: int
) -> Iterator[str]:
    if weights is None:
        yield NONE
        return
    given = variables[weights]
    if given.numel() == variables[indices].numel():
        yield EACH
    in_rows = variables[indices].shape[-1] == choices(variables, x, indices)
    rows = in_rows and variables[indices].dim() > 1
    if rows and given.shape[-1] == experts and given.numel() == experts * tokens(variables[x]):
        yield ALL


def random_values(
    roles: Roles, variables: Mapping[str, Any], spread: int, k: int
) -> dict[str, torch.Tensor]:
    """Return random tokens, which go to `k` of the first `spread` experts each, and weights; what is
    added to is 0.
    """
    generator = torch.Generator().manual_seed(19)
    x, indices = (variables[name] for name in (roles.x, roles.indices))
    chosen = torch.rand(tokens(x), spread, generator=generator).argsort(dim=-1)[:, :k].contiguous()
    given = {
        roles.x: torch.randn(x.shape, generator=generator),
        roles.indices: chosen.to(indices.dtype).reshape(indices.shape),
    }
    if roles.weights is not None:
        shape = variables[roles.weights].shape
        given[roles.weights] = torch.rand(shape, generator=generator)
    if roles.base is not None:
        given[roles.base] = torch.zeros(x.shape)
    return given


def rows_of(
    roles: Roles, given: Mapping[str, torch.Tensor], k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token and the weights of these, [tokens, k]."""
    indices = given[roles.indices].reshape(-1, k)
    if roles.weights is None:
        return indices, torch.ones(indices.shape)
    weights = given[roles.weights]
    if roles.weighting == ALL:
        return indices, weights.flatten(0, -2).gather(-1, indices)
    return indices, weights.reshape(-1, k)


def tokens(x: torch.Tensor) -> int:
    """Return how many tokens x [..., hidden] has."""
    return x.numel() // x.shape[-1] if x.numel() else 0


def summed(
    experts: Iterable[Any], x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the sum [tokens, width] over experts of what each makes of all tokens `x` [tokens,
    hidden], times the weight that a token gives it in `weights` [tokens, choices] for its `indices`.
    """
    mixed = x.new_zeros(())  # of any width
    for number, expert in enumerate(experts):
        share = (weights * (indices == number)).sum(dim=-1, keepdim=True)
        mixed = mixed + (expert(x) * share).masked_fill(share == 0, 0.0)
    return mixed
